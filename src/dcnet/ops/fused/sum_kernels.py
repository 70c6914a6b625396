"""Small Triton kernels that add up what the large ones leave, a row from every program, and turn it into what is wanted.

Each replaces a dozen launches of elementary operations on a few hundred numbers.
"""

import triton
import triton.language as tl

from dcnet.ops.fused.kernels import rho_of, vector


@triton.jit
def total(sums, row, ROWS: tl.constexpr, channels, programs, ch, inside, BR: tl.constexpr, BC: tl.constexpr):
    """Σ over programs of one row of their sums (programs, ROWS, channels), for a block of channels."""
    sum = tl.zeros((BR, BC), tl.float32)
    for first in range(0, programs, BR):
        r = first + tl.arange(0, BR)
        sum += tl.load(sums + (r[:, None] * ROWS + row) * channels + ch[None, :], mask=(r < programs)[:, None] & inside[None, :], other=0.0)
    return tl.sum(sum, 0)


@triton.jit
def mean_norm(
    running_norm,
    batches,
    sums,
    mean,
    count,
    momentum,
    programs,
    TRACK: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    TALLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """E{‖x‖} of each group out of sums (groups, programs); with TRACK, its running average takes a step.

    `batches` were seen before; TALLY counts this one, which only a single program can do.
    """
    g = tl.program_id(0)
    sum = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, programs, BLOCK):
        i = first + tl.arange(0, BLOCK)
        sum += tl.load(sums + g * programs + i, mask=i < programs, other=0.0)
    value = tl.sum(sum, 0) / count
    tl.store(mean + g, value)
    if TRACK:
        seen = tl.load(batches).to(tl.float32) + 1.0
        share = 1.0 / seen
        if not CUMULATIVE:
            share = tl.where(seen == 1.0, 1.0, momentum)  # the first batch is taken as it is
        old = tl.load(running_norm + g).to(tl.float32)
        tl.store(running_norm + g, (old + share * (value - old)).to(running_norm.dtype.element_ty))
        if TALLY:
            tl.store(batches, seen.to(batches.dtype.element_ty))


@triton.jit
def batch_norm(
    gamma,
    beta,
    running_mean,
    running_var,
    sums,
    norm,
    count,
    unbiased,
    momentum,
    eps,
    programs,
    channels,
    BATCH: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    RUNNING: tl.constexpr,
    MOVE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """norm (5, channels) = mean, variance, rstd, scale and shift, so that γ·ŷ + β = scale·y + shift; MOVE moves the running averages.

    With BATCH from sums of y − running_mean and its square (of y where there are no averages), else from the averages.
    """
    ch = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = ch < channels
    if RUNNING:
        old_mean = tl.load(running_mean + ch, mask=inside, other=0.0).to(tl.float32)
        old_var = tl.load(running_var + ch, mask=inside, other=1.0).to(tl.float32)
    else:
        old_mean = tl.zeros((BC,), tl.float32)
        old_var = tl.zeros((BC,), tl.float32)
    if BATCH:
        first = total(sums, 0, 2, channels, programs, ch, inside, BR, BC) / count
        second = total(sums, 1, 2, channels, programs, ch, inside, BR, BC) / count
        mean = old_mean + first
        variance = tl.maximum(second - first * first, 0.0)
        if MOVE:
            tl.store(running_mean + ch, (old_mean + momentum * first).to(running_mean.dtype.element_ty), mask=inside)
            moved = old_var + momentum * (variance * unbiased - old_var)
            tl.store(running_var + ch, moved.to(running_var.dtype.element_ty), mask=inside)
    else:
        mean = old_mean
        variance = old_var
    rstd = 1.0 / tl.sqrt(variance + eps)
    scale = rstd
    shift = -mean * rstd
    if HAS_GAMMA:
        weight = tl.load(gamma + ch, mask=inside, other=1.0).to(tl.float32)
        scale *= weight
        shift *= weight
    if HAS_BETA:
        shift += tl.load(beta + ch, mask=inside, other=0.0).to(tl.float32)
    tl.store(norm + ch, mean, mask=inside)
    tl.store(norm + channels + ch, variance, mask=inside)
    tl.store(norm + 2 * channels + ch, rstd, mask=inside)
    tl.store(norm + 3 * channels + ch, scale, mask=inside)
    tl.store(norm + 4 * channels + ch, shift, mask=inside)


@triton.jit
def batch_norm_gradient(
    sums, norm, gradients, coefficients, count, programs, channels, ROWS: tl.constexpr, SLOPE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """gradients (ROWS, channels) of β, γ and the activation's slope; coefficients (2, channels) of the line in y that BatchNorm takes off."""
    ch = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = ch < channels
    mean = tl.load(norm + ch, mask=inside, other=0.0)
    rstd = tl.load(norm + 2 * channels + ch, mask=inside, other=0.0)
    scale = tl.load(norm + 3 * channels + ch, mask=inside, other=0.0)
    e = total(sums, 0, ROWS, channels, programs, ch, inside, BR, BC)
    ey = total(sums, 1, ROWS, channels, programs, ch, inside, BR, BC) * rstd
    tl.store(gradients + ch, e, mask=inside)
    tl.store(gradients + channels + ch, ey, mask=inside)
    if SLOPE:
        tl.store(gradients + 2 * channels + ch, total(sums, 2, ROWS, channels, programs, ch, inside, BR, BC), mask=inside)
    along = scale * rstd * ey / count
    tl.store(coefficients + ch, scale * e / count - along * mean, mask=inside)
    tl.store(coefficients + channels + ch, along, mask=inside)


@triton.jit
def vector_gradients(
    radius,
    sums,
    mean,
    gradients,
    grad_mean,
    programs,
    K,
    channels,
    ROWS: tl.constexpr,
    RADIUS_ROW: tl.constexpr,
    RADIUS: tl.constexpr,
    FLOOR: tl.constexpr,
    MEAN: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """gradients (ROWS, channels) of the per-kernel vectors, and grad_mean (groups, programs) of E{‖x‖}, to be added up.

    The radius' sums are of ρ·E{‖x‖}: here they become the gradients of E and of ρ, or of what is learned, ρ = raw² + FLOOR.
    """
    g = tl.program_id(0)
    k = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = k < K
    ch = g * K + k
    for row in tl.static_range(ROWS):
        sum = total(sums, row, ROWS, channels, programs, ch, inside, BR, BC)[None, :]
        if row == RADIUS_ROW:
            if MEAN:
                average = tl.load(mean + g).to(tl.float32)
                of_mean = tl.where(average > 0.0, rho_of(radius, RADIUS, FLOOR, ch, inside) * sum, 0.0)
                tl.store(grad_mean + g * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.sum(of_mean, 1), 0))
                sum = sum * average
            if RADIUS == 2:
                sum = sum * 2.0 * vector(radius, True, ch, inside, 1.0)
        tl.store(gradients + row * channels + ch[None, :], sum, mask=inside[None, :])
