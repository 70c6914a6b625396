"""E{‖x‖} and BatchNorm inside the epilogue's kernels, and the gradients of the per-kernel vectors."""

import triton
import triton.language as tl

from dcnet.ops.fused.kernels.common import rho_of, total, vector


@triton.jit
def track_norm(running_norm, batches, momentum, g, inside, value, TRACK: tl.constexpr, TALLY: tl.constexpr):
    """Move the running average of E{‖x‖} of a group, or of several where they are inside, toward a value.

    TRACK: 1 with the momentum, 2 as a cumulative average. `batches` is the number of batches before this one. A value
    that is not finite is left out, and its batch is not counted.
    """
    finite = (value - value == 0.0) & inside
    seen = tl.load(batches).to(tl.float32) + 1.0
    share = 1.0 / seen
    if TRACK == 1:
        share = tl.where(seen == 1.0, 1.0, momentum)  # the average starts at the first batch's value
    old = tl.load(running_norm + g, mask=inside, other=0.0).to(tl.float32)
    tl.store(running_norm + g, (old + share * (value - old)).to(running_norm.dtype.element_ty), mask=finite)
    if TALLY:
        tl.store(batches, seen.to(batches.dtype.element_ty), mask=finite)


@triton.jit
def move_norm(running_mean, running_var, mean, variance, unbiased, momentum, at, ok):
    """Move BatchNorm's running averages toward this batch's, for a block of channels."""
    old = tl.load(running_mean + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(running_mean + at, (old + momentum * (mean - old)).to(running_mean.dtype.element_ty), mask=ok)
    old = tl.load(running_var + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(running_var + at, (old + momentum * (variance * unbiased - old)).to(running_var.dtype.element_ty), mask=ok)


@triton.jit
def mean_norm(
    mean, norm_sums, running_norm, batches, count, momentum, parts, g, writes,
    MEAN: tl.constexpr, TRACK: tl.constexpr, TALLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return E{‖x‖} of a group.

    MEAN: 0 where there is none (then 1), 1 where it is known, 2 to compute it as the sum of `parts` numbers, a row of
    `norm_sums`, over `count`. The one program of a group that `writes` stores it, and updates the running average.
    TALLY: whether to count the batch too, which only a single program may do.
    """
    value = 1.0
    if MEAN == 1:
        value = tl.load(mean + g).to(tl.float32)
    if MEAN == 2:
        sum = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, parts, BLOCK):
            i = first + tl.arange(0, BLOCK)
            sum += tl.load(norm_sums + g * parts + i, mask=i < parts, other=0.0)
        value = tl.sum(sum, 0) / count
        if writes:
            tl.store(mean + g, value)
            if TRACK > 0:
                track_norm(running_norm, batches, momentum, g, True, value, TRACK, TALLY)
    return value


@triton.jit
def mean_norms(
    mean, norm_sums, running_norm, batches, count, momentum, parts, channels, ch, inside, writes,
    MEAN: tl.constexpr, TRACK: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return E{‖x‖} of a block of channels that are groups of their own, (1, channels).

    As in `mean_norm`, but norm_sums is (parts, channels).
    """
    at = ch[None, :]
    ok = inside[None, :]
    value = 1.0
    if MEAN == 1:
        value = tl.load(mean + at, mask=ok, other=1.0).to(tl.float32)
    if MEAN == 2:
        value = total(norm_sums, 0, 1, channels, parts, ch, inside, BR, BK) / count
        if writes:
            tl.store(mean + at, value, mask=ok)
            if TRACK > 0:
                track_norm(running_norm, batches, momentum, at, ok, value, TRACK, False)
    return value


@triton.jit
def count_batch(mean, batches, groups, BLOCK: tl.constexpr):
    """Count this batch if E{‖x‖} of all groups is finite, which a program of one group alone cannot tell."""
    finite = 0
    for first in range(0, groups, BLOCK):
        g = first + tl.arange(0, BLOCK)
        value = tl.load(mean + g, mask=g < groups, other=0.0)
        finite += tl.sum((value - value == 0.0).to(tl.int32), 0) - BLOCK
    tl.store(batches, tl.load(batches) + 1, mask=finite == 0)


@triton.jit
def normalization(
    norm, sums, gamma, beta, running_mean, running_var, batches, count, unbiased, momentum, eps, programs, channels,
    ch, inside, writes, first_program,
    NORM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return scale and shift of a block of channels, each (1, channels), so that γ·ŷ + β = scale·y + shift.

    NORM: 1 with BatchNorm's running averages, 2 with the sums of y − center and of its square over this batch.

    The one program of a channel that `writes` stores the rows of `norm`: mean, variance, rstd, scale and shift. The
    last row of `norm` is the center: the running mean before its update. With `batches`, that program also updates the
    running averages, and the very first program counts the batch.
    """
    at = ch[None, :]
    ok = inside[None, :]
    if NORM == 1:
        mean = tl.load(running_mean + at, mask=ok, other=0.0).to(tl.float32)
        variance = tl.load(running_var + at, mask=ok, other=1.0).to(tl.float32)
    else:
        first = total(sums, 0, 2, channels, programs, ch, inside, BR, BK) / count
        second = total(sums, 1, 2, channels, programs, ch, inside, BR, BK) / count
        mean = tl.load(norm + 5 * channels + at, mask=ok, other=0.0) + first
        variance = tl.maximum(second - first * first, 0.0)
    rstd = 1.0 / tl.sqrt(variance + eps)
    scale = rstd * vector(gamma, ch, inside, 1.0)
    shift = vector(beta, ch, inside, 0.0) - mean * scale
    if writes:
        tl.store(norm + at, mean, mask=ok)
        tl.store(norm + channels + at, variance, mask=ok)
        tl.store(norm + 2 * channels + at, rstd, mask=ok)
        tl.store(norm + 3 * channels + at, scale, mask=ok)
        tl.store(norm + 4 * channels + at, shift, mask=ok)
        if batches is not None:
            move_norm(running_mean, running_var, mean, variance, unbiased, momentum, at, ok)
            if first_program:
                tl.store(batches, tl.load(batches) + 1)
    return scale, shift


@triton.jit
def normalization_gradient(
    sums, norm, gradients, count, programs, channels, ch, inside, writes,
    ROWS: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return constant and slope of the line in y that BatchNorm's gradient subtracts.

    The one program of a channel that `writes` stores the gradients of β, γ and the activation's slope: (ROWS,
    channels).
    """
    at = ch[None, :]
    ok = inside[None, :]
    rstd = tl.load(norm + 2 * channels + at, mask=ok, other=0.0)
    scale = tl.load(norm + 3 * channels + at, mask=ok, other=0.0)
    e = total(sums, 0, ROWS, channels, programs, ch, inside, BR, BK)
    ey = total(sums, 1, ROWS, channels, programs, ch, inside, BR, BK) * rstd
    if writes:
        tl.store(gradients + at, e, mask=ok)
        tl.store(gradients + channels + at, ey, mask=ok)
        if ROWS == 3:
            tl.store(
                gradients + 2 * channels + at, total(sums, 2, ROWS, channels, programs, ch, inside, BR, BK), mask=ok
            )
    along = scale * rstd * ey / count
    return scale * e / count - along * tl.load(norm + at, mask=ok, other=0.0), along


@triton.jit(do_not_specialize=["programs"])
def vector_gradients(
    radius, sums, mean, gradients, grad_mean, programs, K, channels,
    ROWS: tl.constexpr, RADIUS_ROW: tl.constexpr, RADIUS: tl.constexpr, FLOOR: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, DEPTHWISE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the per-kernel vectors, (ROWS, channels), and of E{‖x‖}, as grad_mean (groups, programs).

    The gradient of E{‖x‖} is the sum of grad_mean over programs. The sums of the radius are for ρ·E{‖x‖}: here they
    become the gradients of E{‖x‖} and of ρ, or of the raw parameter, ρ = raw² + FLOOR.
    """
    g = tl.program_id(0)
    k = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = k < K
    ch = g * K + k
    for row in tl.static_range(ROWS):
        sum = total(sums, row, ROWS, channels, programs, ch, inside, BR, BC)
        if row == RADIUS_ROW:
            if mean is not None:
                if DEPTHWISE:
                    average = vector(mean, ch, inside, 1.0)
                else:
                    average = tl.load(mean + g).to(tl.float32)
                of_mean = tl.where(average > 0.0, rho_of(radius, RADIUS, FLOOR, ch, inside) * sum, 0.0)
                if DEPTHWISE:
                    tl.store(grad_mean + ch[None, :], of_mean, mask=inside[None, :])
                else:
                    tl.store(grad_mean + g * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.sum(of_mean, 1), 0))
                sum = sum * average
            if RADIUS == 2:
                sum = sum * 2.0 * vector(radius, ch, inside, 1.0)
        tl.store(gradients + row * channels + ch[None, :], sum, mask=inside[None, :])
