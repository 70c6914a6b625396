"""The Triton kernels before and after the convolution: normalized kernels, patch norms, and their gradients.

Maps have three spatial dimensions here; a missing dimension has size 1.
"""

import triton
import triton.language as tl

# Numbers of which Triton need not know whether they are 1 or divisible by 16: fewer variants to compile
_ANY = ("maps", "rows", "total", "IH", "IW", "OH", "OW", "PH", "PW")


@triton.jit
def normalize(w_ptr, unit_ptr, norm_ptr, eps, D, unit_k, unit_i, BLOCK: tl.constexpr):
    """Write unit = w/‖w‖ and ‖w‖, one program for each kernel of D contiguous elements.

    unit_k and unit_i are the strides of unit.
    """
    k = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        i = start + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + k * D + i, mask=i < D, other=0.0).to(tl.float32)
        total += w * w
    norm = tl.sqrt(tl.sum(total, 0) + eps)
    tl.store(norm_ptr + k, norm)
    inverse = tl.where(norm > 0.0, 1.0 / norm, 0.0)
    for start in range(0, D, BLOCK):
        i = start + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + k * D + i, mask=i < D, other=0.0).to(tl.float32)
        tl.store(unit_ptr + k * unit_k + i * unit_i, (w * inverse).to(unit_ptr.dtype.element_ty), mask=i < D)


@triton.jit
def normalize_backward(w_ptr, e_ptr, grad_ptr, norm_ptr, e_norm_ptr, D, BLOCK: tl.constexpr):
    """Write grad = (e − ⟨e, û⟩û)/‖w‖ + e_norm·û with û = w/‖w‖."""
    k = tl.program_id(0)
    norm = tl.load(norm_ptr + k)
    inverse = tl.where(norm > 0.0, 1.0 / norm, 0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        i = start + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + k * D + i, mask=i < D, other=0.0).to(tl.float32)
        e = tl.load(e_ptr + k * D + i, mask=i < D, other=0.0).to(tl.float32)
        total += w * e
    along = -tl.sum(total, 0) * inverse * inverse
    if e_norm_ptr is not None:
        along += tl.load(e_norm_ptr + k)
    for start in range(0, D, BLOCK):
        i = start + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + k * D + i, mask=i < D, other=0.0).to(tl.float32)
        grad = w * inverse * along + tl.load(e_ptr + k * D + i, mask=i < D, other=0.0).to(tl.float32) * inverse
        tl.store(grad_ptr + k * D + i, grad.to(grad_ptr.dtype.element_ty), mask=i < D)


@triton.jit
def energies(x_ptr, q_ptr, groups, C, P, blocks, x_b, x_c, x_p, BP: tl.constexpr, BC: tl.constexpr):
    """Write q (batch, groups, positions) = ½·Σ over each group's C channels of x²."""
    pid = tl.program_id(0)
    block = pid % blocks
    g = (pid // blocks) % groups
    b = (pid // blocks) // groups
    p = tl.arange(0, BP)
    start = block.to(tl.int64) * BP
    in_p = block * BP + p < P
    base = x_ptr + b.to(tl.int64) * x_b + (g * C).to(tl.int64) * x_c + start * x_p
    total = tl.zeros((BP,), tl.float32)
    for first in range(0, C, BC):
        c = first + tl.arange(0, BC)
        x = tl.load(base + p[:, None] * x_p + c[None, :] * x_c, mask=in_p[:, None] & (c < C)[None, :], other=0.0).to(
            tl.float32
        )
        total += tl.sum(x * x, 1)
    tl.store(q_ptr + (b * groups + g).to(tl.int64) * P + start + p, 0.5 * total, mask=in_p)


@triton.jit(do_not_specialize=_ANY)
def box(
    n_ptr, q_ptr, sums_ptr, eps, maps, rows, groups, total, ID, IH, IW, OD, OH, OW, SD, SH, SW, PD, PH, PW, DD, DH,
    DW,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write n = sqrt(2·Σ over the window of q + eps) for one group.

    n is (batch, groups, OD, OH, OW), q is (batch, groups, ID, IH, IW). q is the sum of `maps` maps of `rows` elements
    each. `total` is batch·positions. LONG is for 64-bit indices, whose division is slow. sums_ptr gets each program's
    sum of n, (groups, programs).
    """
    g = tl.program_id(1)
    pid = tl.program_id(0)
    if LONG:
        pid = pid.to(tl.int64)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    w = i % OW
    h = (i // OW) % OH
    d = (i // (OW * OH)) % OD
    b = i // (OW * OH * OD)
    m = b.to(tl.int64) * groups + g
    at = q_ptr + m * (ID * IH * IW)
    sum = tl.zeros((BLOCK,), tl.float32)
    for _ in range(maps):
        for kd in tl.static_range(KD):
            for kh in tl.static_range(KH):
                for kw in tl.static_range(KW):
                    zd = d * SD - PD + kd * DD
                    zh = h * SH - PH + kh * DH
                    zw = w * SW - PW + kw * DW
                    ok = inside & (zd >= 0) & (zd < ID) & (zh >= 0) & (zh < IH) & (zw >= 0) & (zw < IW)
                    sum += tl.load(at + (zd * IH + zh) * IW + zw, mask=ok, other=0.0)
        at += rows
    n = tl.sqrt(2.0 * sum + eps)
    tl.store(n_ptr + m * (OD * OH * OW) + (d * OH + h) * OW + w, n, mask=inside)
    if sums_ptr is not None:
        tl.store(sums_ptr + g * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.where(inside, n, 0.0), 0))


@triton.jit(do_not_specialize=[name for name in _ANY if name != "maps"])
def box_backward(
    n_ptr, e_ptr, e_mean, t_ptr, share, groups, total, rows, ID, IH, IW, OD, OH, OW, SD, SH, SW, PD, PH, PW, DD, DH,
    DW,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, LONG: tl.constexpr, MAPS: tl.constexpr, MEANS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write t = Σ of e/n over the windows that hold a position: the gradient of ½·Σ x². That of x is x·t.

    e is the sum of MAPS maps of `rows` elements each, plus the `share` that every norm gets of the gradient of E{‖x‖},
    which is itself a sum of MEANS ≤ PARTS numbers.
    """
    g = tl.program_id(1)
    pid = tl.program_id(0)
    if LONG:
        pid = pid.to(tl.int64)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    w = i % IW
    h = (i // IW) % IH
    d = (i // (IW * IH)) % ID
    b = i // (IW * IH * ID)
    m = b.to(tl.int64) * groups + g
    start = m * (OD * OH * OW)
    everywhere = 0.0
    if MEANS > 0:
        part = tl.arange(0, PARTS)
        everywhere = tl.sum(tl.load(e_mean + g * MEANS + part, mask=part < MEANS, other=0.0), 0) * share
    sum = tl.zeros((BLOCK,), tl.float32)
    for kd in tl.static_range(KD):
        for kh in tl.static_range(KH):
            for kw in tl.static_range(KW):
                zd = d + PD - kd * DD
                zh = h + PH - kh * DH
                zw = w + PW - kw * DW
                ok = inside & (zd >= 0) & (zh >= 0) & (zw >= 0) & (zd % SD == 0) & (zh % SH == 0) & (zw % SW == 0)
                ok = ok & (zd // SD < OD) & (zh // SH < OH) & (zw // SW < OW)
                at = start + ((zd // SD) * OH + zh // SH) * OW + zw // SW
                n = tl.load(n_ptr + at, mask=ok, other=0.0)
                e = tl.load(e_ptr + at, mask=ok, other=0.0) + everywhere
                for _ in tl.static_range(1, MAPS):
                    at += rows
                    e += tl.load(e_ptr + at, mask=ok, other=0.0)
                sum += tl.where(n > 0.0, e / n, 0.0)
    tl.store(t_ptr + m * (ID * IH * IW) + (d * IH + h) * IW + w, sum, mask=inside)


@triton.jit
def add_product(grad_ptr, x_ptr, t_ptr, groups, C, P, blocks, x_b, x_c, x_p, BP: tl.constexpr, BC: tl.constexpr):
    """Add x·t to grad in place, with t (batch, groups, positions); x and grad have the same memory order."""
    pid = tl.program_id(0)
    block = pid % blocks
    g = (pid // blocks) % groups
    b = (pid // blocks) // groups
    p = tl.arange(0, BP)
    start = block.to(tl.int64) * BP
    in_p = block * BP + p < P
    t = tl.load(t_ptr + (b * groups + g).to(tl.int64) * P + start + p, mask=in_p, other=0.0)
    first = b.to(tl.int64) * x_b + (g * C).to(tl.int64) * x_c + start * x_p
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = in_p[:, None] & (c < C)[None, :]
    at = first + p[:, None] * x_p + c[None, :] * x_c
    grad = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * t[:, None]
    grad += tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=inside)
