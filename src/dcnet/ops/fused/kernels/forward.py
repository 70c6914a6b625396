"""The Triton kernel of the epilogue: h·g on the output of a convolution, and its post-ops."""

import triton
import triton.language as tl

from dcnet.ops.fused.kernels.common import (
    magnitude,
    norms_at,
    offsets_in_tile,
    parameters,
    patch_radius,
    place_of_tile,
    rounded,
    start_of_tile,
    vector,
    within,
    zeros,
)
from dcnet.ops.fused.kernels.statistics import mean_norm, mean_norms, normalization


@triton.jit(do_not_specialize=["units", "mean_parts", "norm_parts"])  # fewer variants to compile; UNIT is enough
def forward(
    d_ptr, n_ptr, y_ptr, energy_ptr, residual_ptr, radius, bias, learned, slope, gamma, beta, running_mean,
    running_var, norm_batches, running_norm, mean_batches, factor, gain, mean, norm, sums, norm_sums, norm_momentum,
    mean_momentum, norm_eps, count, unbiased, batch, groups, units, P, mean_parts, norm_parts,
    H: tl.constexpr, H_FIXED: tl.constexpr, H_ROWS: tl.constexpr, G: tl.constexpr, G_FIXED: tl.constexpr,
    G_ROWS: tl.constexpr, A: tl.constexpr, RADIUS: tl.constexpr, FLOOR: tl.constexpr, BP: tl.constexpr,
    BK: tl.constexpr, BR: tl.constexpr, EVEN: tl.constexpr, CHANNELS_LAST: tl.constexpr, STAGES: tl.constexpr,
    MEAN: tl.constexpr, TRACK: tl.constexpr, TALLY: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    STATISTICS: tl.constexpr, UNIT: tl.constexpr, DEPTHWISE: tl.constexpr,
):  # fmt: skip
    """Write y = factor·h·g + bias, after BatchNorm, residual and activation, each if it is asked for.

    With STATISTICS, write only the sums of y − center and of its square. The center is BatchNorm's running mean, or 0
    where there is none.

    `mean_norm` explains MEAN, TRACK and TALLY, `normalization` explains NORM (0 for no BatchNorm). With an energy_ptr,
    the output's energy is written too, ½·Σ of its squares, one map for each block of kernels. With norm_batches,
    BatchNorm's running averages are updated.
    """
    K = units * UNIT  # so the compiler knows that UNIT divides it
    channels = groups * K
    blocks = tl.cdiv(P, BP)
    kernel_blocks = tl.cdiv(K, BK)
    g = tl.program_id(1) // kernel_blocks
    kernel_block = tl.program_id(1) % kernel_blocks
    k = kernel_block * BK + tl.arange(0, BK)
    in_k = k < K
    ch = g * K + k
    writes = tl.program_id(0) == 0
    if DEPTHWISE:
        average = mean_norms(
            mean, norm_sums, running_norm, mean_batches, count, mean_momentum, mean_parts, channels, ch, in_k, writes,
            MEAN, TRACK, BR, BK,
        )  # fmt: skip
    else:
        average = mean_norm(
            mean, norm_sums, running_norm, mean_batches, count, mean_momentum, mean_parts, g,
            writes & (kernel_block == 0), MEAN, TRACK, TALLY, 1024,
        )  # fmt: skip
    rho = patch_radius(radius, average, RADIUS, FLOOR, MEAN > 0, ch, in_k)
    t = vector(gain, ch, in_k, 1.0)
    s = vector(factor, ch, in_k, 1.0)
    of_h = parameters(learned, H_FIXED, H_ROWS, channels, ch, in_k)
    of_g = parameters(learned, G_FIXED, G_ROWS, channels, ch, in_k)
    if NORM > 0:
        scale, shift = normalization(
            norm, sums, gamma, beta, running_mean, running_var, norm_batches, count, unbiased, norm_momentum,
            norm_eps, norm_parts, channels, ch, in_k, writes, writes & (tl.program_id(1) == 0), NORM, BR, BK,
        )  # fmt: skip
    p = tl.arange(0, BP)
    if STATISTICS:
        center = vector(running_mean, ch, in_k, 0.0) + tl.zeros((1, BK), tl.float32)
        if writes:
            tl.store(norm + 5 * channels + ch[None, :], center, mask=in_k[None, :])
        sum_y, sum_yy = zeros(2, BP, BK)
    offsets = offsets_in_tile(p, k, K, P, groups, CHANNELS_LAST)
    for step in tl.range(tl.program_id(0), batch * blocks, tl.num_programs(0), num_stages=STAGES):
        # The first pass after the convolution goes from the end of the map to its start: what the convolution wrote
        # last is still in the cache. The second finds there what the first read last.
        tile = batch * blocks - 1 - step if STATISTICS or NORM != 2 else step
        b, block = place_of_tile(tile, batch, blocks)
        in_p = block * BP + p < P
        inside = within(in_p, in_k, EVEN)
        start = block.to(tl.int64) * BP
        first = start_of_tile(b, g.to(tl.int64), start, K, P, groups, CHANNELS_LAST)
        at_n = (b * groups + g) * P + start + p
        n = norms_at(n_ptr, at_n, in_p, first + offsets, inside, DEPTHWISE)
        d = tl.load(d_ptr + first + offsets, mask=inside, other=0.0).to(tl.float32)
        c = tl.minimum(tl.maximum(d * tl.where(n > 0.0, 1.0 / n, 0.0), -1.0), 1.0)
        y = magnitude(H, n * t, rho, of_h, RADIUS)[0] * G(c, *of_g)[0] * s
        if bias is not None:
            y += vector(bias, ch, in_k, 0.0)
        if STATISTICS:
            y = tl.where(inside, y - center, 0.0)
            sum_y += y
            sum_yy += y * y
        else:
            if NORM > 0:
                y = y * scale + shift
            if residual_ptr is not None:
                y += tl.load(residual_ptr + first + offsets, mask=inside, other=0.0).to(tl.float32)
            if ACTIVATION == 1:
                y = tl.maximum(y, 0.0)
            if ACTIVATION == 2:
                y = tl.where(y > 0.0, y, y * vector(slope, ch, in_k, 0.0))
            if ACTIVATION == 3:
                y = A(y)[0]
            result = rounded(y, y_ptr)
            tl.store(y_ptr + first + offsets, result, mask=inside)
            if energy_ptr is not None:  # of the values as they are stored
                y = tl.where(inside, result.to(tl.float32), 0.0)
                at_energy = kernel_block.to(tl.int64) * batch * groups * P + at_n
                tl.store(energy_ptr + at_energy, 0.5 * tl.sum(y * y, 1), mask=in_p)
    if STATISTICS:
        row = sums + tl.program_id(0) * 2 * channels + ch
        tl.store(row, tl.sum(sum_y, 0), mask=in_k)
        tl.store(row + channels, tl.sum(sum_yy, 0), mask=in_k)
