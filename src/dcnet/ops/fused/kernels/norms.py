"""The Triton kernels before and after the convolution: normalized kernels, patch norms, and their gradients.

Maps have three spatial dimensions here; a missing dimension has size 1.
"""

import triton
import triton.language as tl

from dcnet.ops.fused.kernels.common import positions

MAPS = tl.constexpr(2)  # read at once, so that their loads do not wait for each other
# Arguments Triton must not specialize on (by whether they are 1 or divisible by 16): fewer variants to compile
_ANY = ("maps", "rows", "total", "kernel_programs", "means", "K", "IH", "IW", "OH", "OW", "PH", "PW")


@triton.jit
def normalize_kernel(k, w_ptr, unit_ptr, norm_ptr, eps, D, unit_k, unit_i, BLOCK: tl.constexpr):
    """Write unit = w/‖w‖ and ‖w‖ for kernel k, of D contiguous elements; unit_k and unit_i are the strides of unit."""
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
def normalize_kernel_backward(k, w_ptr, e_ptr, grad_ptr, norm_ptr, e_norm_ptr, D, BLOCK: tl.constexpr):
    """Write grad = (e − ⟨e, û⟩û)/‖w‖ + e_norm·û with û = w/‖w‖ for kernel k."""
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


@triton.jit(do_not_specialize=["blocks"])
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


@triton.jit
def normalize(w_ptr, unit_ptr, w_norm_ptr, eps, D, unit_k, unit_i, BLOCK: tl.constexpr):
    """Normalize all kernels, one program each."""
    normalize_kernel(tl.program_id(0), w_ptr, unit_ptr, w_norm_ptr, eps, D, unit_k, unit_i, BLOCK)


@triton.jit
def normalize_backward(w_ptr, e_unit_ptr, grad_ptr, w_norm_ptr, e_norm_ptr, D, BLOCK: tl.constexpr):
    """Compute the gradient of `normalize`."""
    normalize_kernel_backward(tl.program_id(0), w_ptr, e_unit_ptr, grad_ptr, w_norm_ptr, e_norm_ptr, D, BLOCK)


@triton.jit(do_not_specialize=[name for name in _ANY if name != "means"])
def normalize_and_box(
    w_ptr, unit_ptr, w_norm_ptr, n_ptr, q_ptr, sums_ptr, eps, D, unit_k, unit_i, K, kernel_programs, maps, rows,
    groups, total, ID, IH, IW, OD, OH, OW, SD, SH, SW, PD, PH, PW, DD, DH, DW,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
    KERNEL_BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize the K kernels, in the first `kernel_programs` of each group, and compute patch norms in the others.

    The two are independent; doing both here saves a launch.

    Patch norms are n = sqrt(2·Σ over the window of q + eps) for one group. n is (batch, groups, OD, OH, OW), q is
    (batch, groups, ID, IH, IW). q is the sum of `maps` maps of `rows` elements each. `total` is batch·positions. LONG
    is for 64-bit indices. sums_ptr gets each program's sum of n, (groups, programs).
    """
    g = tl.program_id(1)
    pid = tl.program_id(0) - kernel_programs
    if pid < 0:
        k = tl.program_id(0) * groups + g
        if k < K:
            normalize_kernel(k, w_ptr, unit_ptr, w_norm_ptr, eps, D, unit_k, unit_i, KERNEL_BLOCK)
    else:
        box(
            pid, g, n_ptr, q_ptr, sums_ptr, eps, tl.num_programs(0) - kernel_programs, maps, rows, groups, total,
            ID, IH, IW, OD, OH, OW, SD, SH, SW, PD, PH, PW, DD, DH, DW, KD, KH, KW, LONG, BLOCK,
        )  # fmt: skip


@triton.jit
def box(
    pid, g, n_ptr, q_ptr, sums_ptr, eps, programs, maps, rows, groups, total, ID, IH, IW, OD, OH, OW, SD, SH, SW, PD,
    PH, PW, DD, DH, DW,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the patch norms of a block of positions of a group."""
    b, d, h, w, inside = positions(pid, total, OD, OH, OW, LONG, BLOCK)
    m = b.to(tl.int64) * groups + g
    at = q_ptr + m * (ID * IH * IW)
    sum = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, maps, MAPS):
        for map in tl.static_range(MAPS):
            there = inside & (first + map < maps)
            for kd in tl.static_range(KD):
                for kh in tl.static_range(KH):
                    for kw in tl.static_range(KW):
                        zd = d * SD - PD + kd * DD
                        zh = h * SH - PH + kh * DH
                        zw = w * SW - PW + kw * DW
                        ok = there & (zd >= 0) & (zd < ID) & (zh >= 0) & (zh < IH) & (zw >= 0) & (zw < IW)
                        sum += tl.load(at + (zd * IH + zh) * IW + zw, mask=ok, other=0.0)
            at += rows
    n = tl.sqrt(2.0 * sum + eps)
    tl.store(n_ptr + m * (OD * OH * OW) + (d * OH + h) * OW + w, n, mask=inside)
    if sums_ptr is not None:
        tl.store(sums_ptr + g * programs + pid, tl.sum(tl.where(inside, n, 0.0), 0))


@triton.jit(do_not_specialize=_ANY)
def normalize_and_box_backward(
    w_ptr, e_unit_ptr, grad_ptr, w_norm_ptr, e_norm_ptr, n_ptr, e_ptr, e_mean, t_ptr, D, K, kernel_programs, means,
    share, maps, groups, total, rows, ID, IH, IW, OD, OH, OW, SD, SH, SW, PD, PH, PW, DD, DH, DW,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
    KERNEL_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `normalize_and_box`, divided among programs in the same way.

    w_ptr is None where the weight needs no gradient.

    For patch norms, write t = Σ of e/n over the windows that contain a position. It is the gradient of ½·Σ x², so x·t
    is the gradient of x. e is the sum of `maps` maps of `rows` elements each, plus the `share` that every norm gets of
    the gradient of E{‖x‖}, which is itself a sum of `means` numbers.
    """
    g = tl.program_id(1)
    pid = tl.program_id(0) - kernel_programs
    if pid < 0:
        k = tl.program_id(0) * groups + g
        if w_ptr is not None:  # decided when it is compiled, unlike `k < K`
            if k < K:
                normalize_kernel_backward(k, w_ptr, e_unit_ptr, grad_ptr, w_norm_ptr, e_norm_ptr, D, KERNEL_BLOCK)
    else:
        box_backward(
            pid, g, n_ptr, e_ptr, e_mean, t_ptr, means, share, maps, groups, total, rows, ID, IH, IW, OD, OH, OW, SD,
            SH, SW, PD, PH, PW, DD, DH, DW, KD, KH, KW, LONG, BLOCK,
        )  # fmt: skip


@triton.jit
def box_backward(
    pid, g, n_ptr, e_ptr, e_mean, t_ptr, means, share, maps, groups, total, rows, ID, IH, IW, OD, OH, OW, SD, SH, SW,
    PD, PH, PW, DD, DH, DW,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the products t of a block of positions of a group."""
    b, d, h, w, inside = positions(pid, total, ID, IH, IW, LONG, BLOCK)
    m = b.to(tl.int64) * groups + g
    start = m * (OD * OH * OW)
    everywhere = 0.0
    if e_mean is not None:
        part = tl.arange(0, 64)
        parts = tl.zeros((64,), tl.float32)
        for done in range(0, means, 64):
            parts += tl.load(e_mean + g * means + done + part, mask=done + part < means, other=0.0)
        everywhere = tl.sum(parts, 0) * share
    sum = tl.zeros((BLOCK,), tl.float32)
    for kd in tl.static_range(KD):
        for kh in tl.static_range(KH):
            zd = d + PD - kd * DD
            zh = h + PH - kh * DH
            row = inside & (zd >= 0) & (zh >= 0) & (zd % SD == 0) & (zh % SH == 0)
            row = row & (zd // SD < OD) & (zh // SH < OH)
            first = start + ((zd // SD) * OH + zh // SH) * OW
            e = ()
            for _ in tl.static_range(KW):
                e = e + (tl.zeros((BLOCK,), tl.float32) + everywhere,)
            at = first
            for before in range(0, maps, MAPS):
                for map in tl.static_range(MAPS):
                    there = row & (before + map < maps)
                    new = ()
                    for kw in tl.static_range(KW):
                        zw = w + PW - kw * DW
                        ok = there & (zw >= 0) & (zw % SW == 0) & (zw // SW < OW)
                        new = new + (e[kw] + tl.load(e_ptr + at + zw // SW, mask=ok, other=0.0),)
                    e = new
                    at += rows
            for kw in tl.static_range(KW):
                zw = w + PW - kw * DW
                ok = row & (zw >= 0) & (zw % SW == 0) & (zw // SW < OW)
                n = tl.load(n_ptr + first + zw // SW, mask=ok, other=0.0)
                sum += tl.where(n > 0.0, e[kw] / n, 0.0)
    tl.store(t_ptr + m * (ID * IH * IW) + (d * IH + h) * IW + w, sum, mask=inside)


@triton.jit(do_not_specialize=["blocks"])
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
