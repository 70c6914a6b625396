"""The Triton kernel of the epilogue's gradient; `kernels.py` says how maps are divided among programs."""

import triton
import triton.language as tl

from dcnet.ops.fused.kernels import angular, magnitude, parameter, vector


@triton.jit
def backward(
    d_ptr,
    n_ptr,
    e_ptr,
    out_ptr,
    grad_d,
    grad_n,
    grad_residual,
    factor,
    gain,
    radius,
    bias,
    learned,
    scale,
    shift,
    slope,
    mean,
    rstd,
    mean_e,
    mean_ey,
    sums,
    groups,
    K,
    P,
    blocks,
    rows,
    d_b,
    d_g,
    d_k,
    d_p,
    n_b,
    n_g,
    n_p,
    H: tl.constexpr,
    HAS_RHO: tl.constexpr,
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
    HAS_FACTOR: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    AFFINE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    REDUCE: tl.constexpr,
    CENTRED: tl.constexpr,
    HL0: tl.constexpr,
    HL1: tl.constexpr,
    HL2: tl.constexpr,
    GL0: tl.constexpr,
    GL1: tl.constexpr,
    GL2: tl.constexpr,
    HL: tl.constexpr,
    SUMS: tl.constexpr,
    BP: tl.constexpr,
    BK: tl.constexpr,
):
    """The gradients of `forward`; with REDUCE, only the sums BatchNorm's gradient needs (and the residual's gradient)."""
    pid = tl.program_id(0)
    block = pid % blocks
    g = (pid // blocks) % groups
    b = (pid // blocks) // groups
    channels = groups * K
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    in_k = k < K
    ch = g * K + k
    p = tl.arange(0, BP)
    in_p = block * BP + p < P
    inside = in_p[:, None] & in_k[None, :]
    start = block.to(tl.int64) * BP
    at = b.to(tl.int64) * d_b + g.to(tl.int64) * d_g + start * d_p + p[:, None] * d_p + k[None, :] * d_k
    at_n = b.to(tl.int64) * n_b + g * n_g + (start + p) * n_p

    n = tl.load(n_ptr + at_n, mask=in_p, other=1.0)[:, None]
    d = tl.load(d_ptr + at, mask=inside, other=0.0).to(tl.float32)
    e = tl.load(e_ptr + at, mask=inside, other=0.0).to(tl.float32)
    one_over_n = tl.where(n > 0.0, 1.0 / n, 0.0)
    ratio = d * one_over_n
    c = tl.minimum(tl.maximum(ratio, -1.0), 1.0)
    rho = vector(radius, HAS_RHO, ch, in_k, 1.0)
    t = vector(gain, HAS_GAIN, ch, in_k, 1.0)
    s = vector(factor, HAS_FACTOR, ch, in_k, 1.0)
    h0, h1, h2 = (
        parameter(learned, H0, HR0, channels, ch, in_k),
        parameter(learned, H1, HR1, channels, ch, in_k),
        parameter(learned, H2, HR2, channels, ch, in_k),
    )
    g0, g1, g2 = (
        parameter(learned, G0, GR0, channels, ch, in_k),
        parameter(learned, G1, GR1, channels, ch, in_k),
        parameter(learned, G2, GR2, channels, ch, in_k),
    )
    of_h = magnitude(H, n * t, rho, h0, h1, h2, HAS_RHO, HC)
    of_g = angular(G, c, g0, g1, g2, GC)
    row = sums + ((b * blocks + block) * SUMS).to(tl.int64) * channels

    if AFFINE:
        y = of_h[0] * of_g[0] * s
        if HAS_BIAS:
            y += vector(bias, True, ch, in_k, 0.0)
        if ACTIVATION != 0:
            if RESIDUAL:
                on = tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32) > 0.0
            else:
                z = y * vector(scale, True, ch, in_k, 1.0) + vector(shift, True, ch, in_k, 0.0)
                on = z > 0.0
            if ACTIVATION == 1:
                e = tl.where(on, e, 0.0)
            else:
                if REDUCE:
                    tl.store(row + 2 * channels + ch, tl.sum(tl.where(on, 0.0, e * z), 0), mask=in_k)
                e = tl.where(on, e, e * vector(slope, True, ch, in_k, 0.0))
        centred = tl.where(inside, (y - vector(mean, True, ch, in_k, 0.0)) * vector(rstd, True, ch, in_k, 0.0), 0.0)
        if REDUCE:
            if RESIDUAL:
                tl.store(grad_residual + at, e.to(grad_residual.dtype.element_ty), mask=inside)
            tl.store(row + ch, tl.sum(e, 0), mask=in_k)
            tl.store(row + channels + ch, tl.sum(e * centred, 0), mask=in_k)
        else:
            if CENTRED:
                e = e - vector(mean_e, True, ch, in_k, 0.0) - centred * vector(mean_ey, True, ch, in_k, 0.0)
            e = tl.where(inside, e * vector(scale, True, ch, in_k, 1.0), 0.0)

    if not REDUCE:
        es = e * s
        grad_h = es * of_g[0]
        grad_g = es * of_h[0]
        of_d = tl.where((ratio > -1.0) & (ratio < 1.0), grad_g * of_g[1], 0.0) * one_over_n
        tl.store(grad_d + at, of_d.to(grad_d.dtype.element_ty), mask=inside)
        of_n = grad_h * of_h[1] * t - of_d * c
        # one map for each block of kernels
        tl.store(grad_n + tl.program_id(1).to(tl.int64) * rows + at_n, tl.sum(tl.where(inside, of_n, 0.0), 1), mask=in_p)
        if HAS_FACTOR:
            tl.store(row + ch, tl.sum(e * of_h[0] * of_g[0], 0), mask=in_k)
        if HAS_GAIN:
            tl.store(row + channels + ch, tl.sum(grad_h * of_h[1] * n, 0), mask=in_k)
        if HAS_RHO:
            tl.store(row + 2 * channels + ch, tl.sum(grad_h * of_h[2], 0), mask=in_k)
        if HAS_BIAS:
            tl.store(row + 3 * channels + ch, tl.sum(e, 0), mask=in_k)
        # learned parameters: where each stands among the formula's results (−1: none); the magnitude's come first
        if HL0 >= 0:
            tl.store(row + 4 * channels + ch, tl.sum(grad_h * of_h[HL0], 0), mask=in_k)
        if HL1 >= 0:
            tl.store(row + 5 * channels + ch, tl.sum(grad_h * of_h[HL1], 0), mask=in_k)
        if HL2 >= 0:
            tl.store(row + 6 * channels + ch, tl.sum(grad_h * of_h[HL2], 0), mask=in_k)
        if GL0 >= 0:
            tl.store(row + (4 + HL) * channels + ch, tl.sum(grad_g * of_g[GL0], 0), mask=in_k)
        if GL1 >= 0:
            tl.store(row + (5 + HL) * channels + ch, tl.sum(grad_g * of_g[GL1], 0), mask=in_k)
        if GL2 >= 0:
            tl.store(row + (6 + HL) * channels + ch, tl.sum(grad_g * of_g[GL2], 0), mask=in_k)
