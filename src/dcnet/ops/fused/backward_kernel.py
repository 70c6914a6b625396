"""The Triton kernel of the epilogue's gradient; `parts.py` says how maps are divided among programs."""

import triton
import triton.language as tl

from dcnet.ops.fused.parts import angular, magnitude, parameter, patch_radius, vector, within
from dcnet.ops.fused.statistics import normalisation_gradient


@triton.jit
def backward(
    d_ptr,
    n_ptr,
    e_ptr,
    e_energy,
    out_ptr,
    grad_d,
    grad_residual,
    radius,
    bias,
    learned,
    slope,
    factor,
    gain,
    mean,
    norm,
    grad_n,
    norm_sums,
    norm_gradients,
    sums,
    count,
    groups,
    K,
    P,
    blocks,
    tiles,
    kernel_blocks,
    d_b,
    d_g,
    d_k,
    d_p,
    n_b,
    n_g,
    n_p,
    H: tl.constexpr,
    HC: tl.constexpr,
    H0: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    HR0: tl.constexpr,
    HR1: tl.constexpr,
    HR2: tl.constexpr,
    G: tl.constexpr,
    GC: tl.constexpr,
    G0: tl.constexpr,
    G1: tl.constexpr,
    G2: tl.constexpr,
    GR0: tl.constexpr,
    GR1: tl.constexpr,
    GR2: tl.constexpr,
    RADIUS: tl.constexpr,
    FLOOR: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BP: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    rows,
    MEAN: tl.constexpr,
    HL0: tl.constexpr,
    HL1: tl.constexpr,
    HL2: tl.constexpr,
    GL0: tl.constexpr,
    GL1: tl.constexpr,
    GL2: tl.constexpr,
    HL: tl.constexpr,
    AFFINE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    REDUCE: tl.constexpr,
    CENTRED: tl.constexpr,
    ENERGY: tl.constexpr,
    SUMS: tl.constexpr,
    NORM_SUMS: tl.constexpr,
):
    """The gradients of `forward`; with REDUCE, only the sums BatchNorm's gradient needs (and the residual's gradient).

    AFFINE: whether BatchNorm follows; CENTRED: with this batch's statistics, which have a gradient. ENERGY: whether ½·Σ of the output's
    squares has a gradient, e_energy: that times the output is the output's. The sums come in this order, each if
    it is wanted: factor, gain, radius, bias, learned parameters.
    """
    channels = groups * K
    g = tl.program_id(1) // kernel_blocks
    kernel_block = tl.program_id(1) % kernel_blocks
    k = kernel_block * BK + tl.arange(0, BK)
    in_k = k < K
    ch = g * K + k
    average = 1.0
    if MEAN:
        average = tl.load(mean + g).to(tl.float32)
    rho = patch_radius(radius, average, RADIUS, FLOOR, MEAN, ch, in_k)
    t = vector(gain, HAS_GAIN, ch, in_k, 1.0)
    s = vector(factor, HAS_FACTOR, ch, in_k, 1.0)
    h0 = parameter(learned, H0, HR0, channels, ch, in_k)
    h1 = parameter(learned, H1, HR1, channels, ch, in_k)
    h2 = parameter(learned, H2, HR2, channels, ch, in_k)
    g0 = parameter(learned, G0, GR0, channels, ch, in_k)
    g1 = parameter(learned, G1, GR1, channels, ch, in_k)
    g2 = parameter(learned, G2, GR2, channels, ch, in_k)
    centre = vector(norm, AFFINE, ch, in_k, 0.0)
    scale = vector(norm + 3 * channels, AFFINE, ch, in_k, 1.0)
    shift = vector(norm + 4 * channels, AFFINE, ch, in_k, 0.0)
    if AFFINE and not REDUCE:
        writes = tl.program_id(0) == 0
        constant, along = normalisation_gradient(
            norm_sums,
            norm,
            norm_gradients,
            count,
            tl.num_programs(0),
            channels,
            ch,
            in_k,
            writes,
            NORM_SUMS,
            NORM_SUMS == 3,
            BR,
            BK,
        )
    p = tl.arange(0, BP)
    nothing = tl.zeros((BP, BK), tl.float32)
    sum_0, sum_1, sum_2, sum_3 = nothing, nothing, nothing, nothing
    sum_h0, sum_h1, sum_h2, sum_g0, sum_g1, sum_g2 = nothing, nothing, nothing, nothing, nothing, nothing
    offsets = p[:, None] * d_p + k[None, :] * d_k
    for step in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        tile = tiles - 1 - step if REDUCE else step  # from behind: what was written last is still in the cache
        block = tile % blocks
        b = (tile // blocks).to(tl.int64)
        in_p = block * BP + p < P
        inside = within(in_p, in_k, EVEN)
        start = block.to(tl.int64) * BP
        first = b * d_b + g.to(tl.int64) * d_g + start * d_p  # one 64-bit number a tile
        at_n = b * n_b + g * n_g + (start + p) * n_p

        n = tl.load(n_ptr + at_n, mask=in_p, other=1.0)[:, None]
        d = tl.load(d_ptr + first + offsets, mask=inside, other=0.0).to(tl.float32)
        e = tl.load(e_ptr + first + offsets, mask=inside, other=0.0).to(tl.float32)
        one_over_n = tl.where(n > 0.0, 1.0 / n, 0.0)
        ratio = d * one_over_n
        c = tl.minimum(tl.maximum(ratio, -1.0), 1.0)
        of_h = magnitude(H, n * t, rho, h0, h1, h2, RADIUS > 0, HC)
        of_g = angular(G, c, g0, g1, g2, GC)

        if AFFINE:
            y = of_h[0] * of_g[0] * s
            if HAS_BIAS:
                y += vector(bias, True, ch, in_k, 0.0)
            if RESIDUAL:  # only the output itself tells what the sum was
                out = tl.load(out_ptr + first + offsets, mask=inside, other=0.0).to(tl.float32)
                on = out > 0.0
            else:
                z = y * scale + shift
                on = z > 0.0
            if ENERGY:
                if not RESIDUAL:
                    out = z
                    if ACTIVATION == 1:
                        out = tl.maximum(z, 0.0)
                    if ACTIVATION == 2:
                        out = tl.where(on, z, z * vector(slope, True, ch, in_k, 0.0))
                    out = out.to(d_ptr.dtype.element_ty).to(tl.float32)  # as it was stored
                e += tl.load(e_energy + at_n, mask=in_p, other=0.0)[:, None] * out
            if ACTIVATION != 0:
                if ACTIVATION == 1:
                    e = tl.where(on, e, 0.0)
                else:
                    if REDUCE:
                        sum_2 += tl.where(on, 0.0, e * z)
                    e = tl.where(on, e, e * vector(slope, True, ch, in_k, 0.0))
            if REDUCE:
                if RESIDUAL:
                    tl.store(grad_residual + first + offsets, e.to(grad_residual.dtype.element_ty), mask=inside)
                sum_0 += e
                sum_1 += e * (y - centre)
            else:
                e = e * scale
                if CENTRED:  # scale·(e − mean(e) − ŷ·mean(e·ŷ)), as a line in y
                    e = e - (constant + along * y)
                e = tl.where(inside, e, 0.0)

        if not REDUCE:
            es = e * s
            grad_h = es * of_g[0]
            grad_g = es * of_h[0]
            of_d = tl.where(tl.abs(ratio) < 1.0, grad_g * of_g[1], 0.0) * one_over_n
            tl.store(grad_d + first + offsets, of_d.to(grad_d.dtype.element_ty), mask=inside)
            of_n = grad_h * of_h[1] * t - of_d * c
            # one map for each block of kernels
            tl.store(grad_n + kernel_block.to(tl.int64) * rows + at_n, tl.sum(of_n, 1), mask=in_p)
            if HAS_FACTOR:
                sum_0 += e * of_h[0] * of_g[0]
            if HAS_GAIN:
                sum_1 += grad_h * of_h[1] * n
            if RADIUS > 0:
                sum_2 += grad_h * of_h[2]
            if HAS_BIAS:
                sum_3 += e
            # learned parameters: where each stands among the formula's results, −1 for none
            if HL0 >= 0:
                sum_h0 += grad_h * of_h[HL0]
            if HL1 >= 0:
                sum_h1 += grad_h * of_h[HL1]
            if HL2 >= 0:
                sum_h2 += grad_h * of_h[HL2]
            if GL0 >= 0:
                sum_g0 += grad_g * of_g[GL0]
            if GL1 >= 0:
                sum_g1 += grad_g * of_g[GL1]
            if GL2 >= 0:
                sum_g2 += grad_g * of_g[GL2]

    row = sums + tl.program_id(0) * SUMS * channels + ch
    if REDUCE:
        tl.store(row, tl.sum(sum_0, 0), mask=in_k)
        tl.store(row + channels, tl.sum(sum_1, 0), mask=in_k)
        if ACTIVATION == 2:
            tl.store(row + 2 * channels, tl.sum(sum_2, 0), mask=in_k)
    else:
        if HAS_FACTOR:
            tl.store(row, tl.sum(sum_0, 0), mask=in_k)
            row += channels
        if HAS_GAIN:
            tl.store(row, tl.sum(sum_1, 0), mask=in_k)
            row += channels
        if RADIUS > 0:
            tl.store(row, tl.sum(sum_2, 0), mask=in_k)
            row += channels
        if HAS_BIAS:
            tl.store(row, tl.sum(sum_3, 0), mask=in_k)
            row += channels
        # the magnitude's learned parameters first
        if HL0 >= 0:
            tl.store(row, tl.sum(sum_h0, 0), mask=in_k)
        if HL1 >= 0:
            tl.store(row + channels, tl.sum(sum_h1, 0), mask=in_k)
        if HL2 >= 0:
            tl.store(row + 2 * channels, tl.sum(sum_h2, 0), mask=in_k)
        if GL0 >= 0:
            tl.store(row + HL * channels, tl.sum(sum_g0, 0), mask=in_k)
        if GL1 >= 0:
            tl.store(row + (1 + HL) * channels, tl.sum(sum_g1, 0), mask=in_k)
        if GL2 >= 0:
            tl.store(row + (2 + HL) * channels, tl.sum(sum_g2, 0), mask=in_k)
