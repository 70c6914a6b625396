"""The Triton kernel of the epilogue; `parts.py` says how maps are divided among programs."""

import triton
import triton.language as tl

from dcnet.ops.fused.parts import angular, magnitude, parameter, patch_radius, vector, within
from dcnet.ops.fused.statistics import mean_norm, normalisation


@triton.jit
def forward(
    d_ptr,
    n_ptr,
    y_ptr,
    energy_ptr,
    residual_ptr,
    radius,
    bias,
    learned,
    slope,
    gamma,
    beta,
    running_mean,
    running_var,
    norm_batches,
    running_norm,
    mean_batches,
    factor,
    gain,
    mean,
    norm,
    sums,
    norm_sums,
    norm_momentum,
    mean_momentum,
    count,
    unbiased,
    norm_eps,
    mean_count,
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
    mean_parts,
    TALLY: tl.constexpr,
    MEAN: tl.constexpr,
    TRACK: tl.constexpr,
    NORM: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    MOVE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STATISTICS: tl.constexpr,
    CENTRE: tl.constexpr,
    ENERGY: tl.constexpr,
):
    """y = factor·h·g + bias; then BatchNorm, residual and activation, each if asked for; or, with STATISTICS, only sums of y − centre.

    MEAN and TRACK as `mean_norm` has them, NORM (0 for none) as `normalisation` has it. CENTRE: whether BatchNorm's running mean is there.
    ENERGY: ½·Σ of the output's squares too, one map of `rows` elements for each block of kernels.
    """
    channels = groups * K
    g = tl.program_id(1) // kernel_blocks
    kernel_block = tl.program_id(1) % kernel_blocks
    k = kernel_block * BK + tl.arange(0, BK)
    in_k = k < K
    ch = g * K + k
    writes = tl.program_id(0) == 0
    average = mean_norm(
        mean,
        norm_sums,
        running_norm,
        mean_batches,
        mean_count,
        mean_momentum,
        mean_parts,
        g,
        writes & (kernel_block == 0),
        MEAN,
        TRACK,
        TALLY,
        1024,
    )
    rho = patch_radius(radius, average, RADIUS, FLOOR, MEAN > 0, ch, in_k)
    t = vector(gain, HAS_GAIN, ch, in_k, 1.0)
    s = vector(factor, HAS_FACTOR, ch, in_k, 1.0)
    h0 = parameter(learned, H0, HR0, channels, ch, in_k)
    h1 = parameter(learned, H1, HR1, channels, ch, in_k)
    h2 = parameter(learned, H2, HR2, channels, ch, in_k)
    g0 = parameter(learned, G0, GR0, channels, ch, in_k)
    g1 = parameter(learned, G1, GR1, channels, ch, in_k)
    g2 = parameter(learned, G2, GR2, channels, ch, in_k)
    if NORM > 0:
        scale, shift = normalisation(
            norm,
            sums,
            gamma,
            beta,
            running_mean,
            running_var,
            norm_batches,
            count,
            unbiased,
            norm_momentum,
            norm_eps,
            tl.num_programs(0),
            channels,
            ch,
            in_k,
            writes,
            writes & (tl.program_id(1) == 0),
            NORM,
            HAS_GAMMA,
            HAS_BETA,
            MOVE,
            BR,
            BK,
        )
    p = tl.arange(0, BP)
    if STATISTICS:
        centre = vector(running_mean, CENTRE, ch, in_k, 0.0) + tl.zeros((1, BK), tl.float32)
        if writes:
            tl.store(norm + 5 * channels + ch[None, :], centre, mask=in_k[None, :])
        sum_y = tl.zeros((BP, BK), tl.float32)
        sum_yy = tl.zeros((BP, BK), tl.float32)
    offsets = p[:, None] * d_p + k[None, :] * d_k
    for step in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        tile = (
            tiles - 1 - step if STATISTICS else step
        )  # from behind: what the convolution wrote last is still in the cache
        block = tile % blocks
        b = (tile // blocks).to(tl.int64)
        in_p = block * BP + p < P
        inside = within(in_p, in_k, EVEN)
        start = block.to(tl.int64) * BP
        first = b * d_b + g.to(tl.int64) * d_g + start * d_p  # one 64-bit number a tile
        at_n = b * n_b + g * n_g + (start + p) * n_p
        n = tl.load(n_ptr + at_n, mask=in_p, other=1.0)[:, None]
        d = tl.load(d_ptr + first + offsets, mask=inside, other=0.0).to(tl.float32)
        c = tl.minimum(tl.maximum(d * tl.where(n > 0.0, 1.0 / n, 0.0), -1.0), 1.0)
        y = magnitude(H, n * t, rho, h0, h1, h2, RADIUS > 0, HC)[0] * angular(G, c, g0, g1, g2, GC)[0] * s
        if HAS_BIAS:
            y += vector(bias, True, ch, in_k, 0.0)
        if STATISTICS:
            y = tl.where(inside, y - centre, 0.0)
            sum_y += y
            sum_yy += y * y
        else:
            if NORM > 0:
                y = y * scale + shift
            if RESIDUAL:
                y += tl.load(residual_ptr + first + offsets, mask=inside, other=0.0).to(tl.float32)
            if ACTIVATION == 1:
                y = tl.maximum(y, 0.0)
            if ACTIVATION == 2:
                y = tl.where(y > 0.0, y, y * vector(slope, True, ch, in_k, 0.0))
            result = y.to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + first + offsets, result, mask=inside)
            if ENERGY:  # of what is stored
                y = tl.where(inside, result.to(tl.float32), 0.0)
                tl.store(energy_ptr + kernel_block.to(tl.int64) * rows + at_n, 0.5 * tl.sum(y * y, 1), mask=in_p)
    if STATISTICS:
        row = sums + tl.program_id(0) * 2 * channels + ch
        tl.store(row, tl.sum(sum_y, 0), mask=in_k)
        tl.store(row + channels, tl.sum(sum_yy, 0), mask=in_k)
