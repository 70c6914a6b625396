"""The Triton kernels of depthwise convolutions, where each channel has a kernel, and a patch norm, of its own.

Channels lie next to each other in memory: a map is (positions, channels), and a tile is a block of positions times a
block of channels. One kernel reads x once for dot products and norms together. Backward sums the norms' gradient along
columns first and along rows last, so that a window of k × k takes 2·k additions.

Maps have three spatial dimensions here; a missing dimension has size 1. The number of channels is units·UNIT, so that
the compiler knows that UNIT divides it, and loads that many channels at once.
"""

import triton
import triton.language as tl

from dcnet.ops.fused.kernels.common import positions


@triton.jit
def windows(
    x_ptr, unit_ptr, d_ptr, n_ptr, sums_ptr, eps, total, units, ID, IH, IW, OD, OH, OW, SD, SH, SW, PD, PH, PW, DD, DH,
    DW,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, UNIT: tl.constexpr, LONG: tl.constexpr, BP: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Write the dot product d and the norm n = sqrt(Σ x² + eps) of every patch; `total` is batch·positions.

    unit is (taps, channels). sums_ptr gets each program's sums of n, (programs, channels).
    """
    C = units * UNIT
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = c < C
    sums = tl.zeros((BP, BC), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(total, BP), tl.num_programs(0)):
        b, d, h, w, inside = positions(block, total, OD, OH, OW, LONG, BP)
        dot = tl.zeros((BP, BC), tl.float32)
        squares = tl.zeros((BP, BC), tl.float32)
        for kd in range(KD):
            zd = d * SD - PD + kd * DD
            for kh in range(KH):
                zh = h * SH - PH + kh * DH
                in_row = inside & (zd >= 0) & (zd < ID) & (zh >= 0) & (zh < IH)
                row = ((b * ID + zd) * IH + zh) * IW
                for kw in tl.static_range(KW):
                    zw = w * SW - PW + kw * DW
                    ok = (in_row & (zw >= 0) & (zw < IW))[:, None] & in_c[None, :]
                    x = tl.load(x_ptr + ((row + zw) * C)[:, None] + c[None, :], mask=ok, other=0.0).to(tl.float32)
                    unit = tl.load(unit_ptr + ((kd * KH + kh) * KW + kw) * C + c, mask=in_c, other=0.0)
                    dot += x * unit.to(tl.float32)[None, :]
                    squares += x * x
        at = ((((b * OD + d) * OH + h) * OW + w) * C)[:, None] + c[None, :]
        ok = inside[:, None] & in_c[None, :]
        n = tl.sqrt(squares + eps)
        tl.store(d_ptr + at, dot.to(d_ptr.dtype.element_ty), mask=ok)
        tl.store(n_ptr + at, n, mask=ok)
        sums += tl.where(ok, n, 0.0)
    if sums_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0) * C + c, tl.sum(sums, 0), mask=in_c)


@triton.jit
def sum_columns(
    of_norms, n_ptr, e_mean, sum_ptr, share, total, units, ID, IH, OD, OH, OW, SD, SH, PD, PH, DD, DH,
    KD: tl.constexpr, KH: tl.constexpr, UNIT: tl.constexpr, LONG: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the sums of `of_norms` over depth and height, for every row of x and every column of the output.

    `of_norms` is the gradient of the norms, divided by the norms. If there is a gradient of E{‖x‖}, every norm gets a
    `share` of it. `total` is batch·ID·IH·OW.
    """
    C = units * UNIT
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = c < C
    b, d, h, w, inside = positions(tl.program_id(0), total, ID, IH, OW, LONG, BP)
    if e_mean is not None:
        everywhere = tl.load(e_mean + c, mask=in_c, other=0.0)[None, :] * share
    sum = tl.zeros((BP, BC), tl.float32)
    for kd in range(KD):
        zd = d + PD - kd * DD
        for kh in range(KH):
            zh = h + PH - kh * DH
            ok = inside & (zd >= 0) & (zh >= 0) & (zd % SD == 0) & (zh % SH == 0) & (zd // SD < OD) & (zh // SH < OH)
            at = ((((b * OD + zd // SD) * OH + zh // SH) * OW + w) * C)[:, None] + c[None, :]
            ok = ok[:, None] & in_c[None, :]
            sum += tl.load(of_norms + at, mask=ok, other=0.0)
            if e_mean is not None:
                n = tl.load(n_ptr + at, mask=ok, other=0.0)
                sum += tl.where(n > 0.0, everywhere / n, 0.0)
    at = ((((b * ID + d) * IH + h) * OW + w) * C)[:, None] + c[None, :]
    tl.store(sum_ptr + at, sum, mask=inside[:, None] & in_c[None, :])


@triton.jit
def input_gradient(
    grad_ptr, x_ptr, grad_d, unit_ptr, sum_ptr, total, units, ID, IH, IW, OD, OH, OW, SD, SH, SW, PD, PH, PW, DD, DH,
    DW,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, UNIT: tl.constexpr, LONG: tl.constexpr, BP: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x: the convolution's, and x times the sums of `sum_columns` along rows.

    `total` is batch·positions of x.
    """
    C = units * UNIT
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = c < C
    b, d, h, w, inside = positions(tl.program_id(0), total, ID, IH, IW, LONG, BP)
    sum = tl.zeros((BP, BC), tl.float32)
    grad = tl.zeros((BP, BC), tl.float32)
    start = ((b * ID + d) * IH + h) * OW
    for kw in tl.static_range(KW):
        zw = w + PW - kw * DW
        ok = (inside & (zw >= 0) & (zw % SW == 0) & (zw // SW < OW))[:, None] & in_c[None, :]
        sum += tl.load(sum_ptr + ((start + zw // SW) * C)[:, None] + c[None, :], mask=ok, other=0.0)
    for kd in range(KD):
        zd = d + PD - kd * DD
        for kh in range(KH):
            zh = h + PH - kh * DH
            in_row = inside & (zd >= 0) & (zh >= 0) & (zd % SD == 0) & (zh % SH == 0)
            in_row = in_row & (zd // SD < OD) & (zh // SH < OH)
            row = ((b * OD + zd // SD) * OH + zh // SH) * OW
            for kw in tl.static_range(KW):
                zw = w + PW - kw * DW
                ok = (in_row & (zw >= 0) & (zw % SW == 0) & (zw // SW < OW))[:, None] & in_c[None, :]
                e = tl.load(grad_d + ((row + zw // SW) * C)[:, None] + c[None, :], mask=ok, other=0.0)
                unit = tl.load(unit_ptr + ((kd * KH + kh) * KW + kw) * C + c, mask=in_c, other=0.0)
                grad += e.to(tl.float32) * unit.to(tl.float32)[None, :]
    at = ((((b * ID + d) * IH + h) * IW + w) * C)[:, None] + c[None, :]
    ok = inside[:, None] & in_c[None, :]
    grad += tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32) * sum
    tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=ok)
