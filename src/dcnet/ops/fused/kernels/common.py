"""The functions that the epilogue's kernels share.

Every map is seen as (batch, groups, kernels, positions), whatever its layout; a map in channels_last order has one
batch of N·positions. A tile is a block of positions times the kernels of one group (or a block of them where there are
many), so that sums over kernels stay inside a tile.

Programs take the tiles in turn. Each program keeps its sums over positions element by element until the end, and then
writes them as one row. The kernel that needs the sums adds up the rows itself before its own work (`total`), which
saves a launch. There are no atomics, so every run gives the same result.

An absent operand is None, a constant: code that depends on it is not compiled.
"""

import triton
import triton.language as tl

from dcnet.ops.fused.triton_math16 import bfloat16


@triton.jit
def positions(block, total, D, H, W, LONG: tl.constexpr, BP: tl.constexpr):
    """Return image, depth, row and column of a block of positions, and which of them exist.

    LONG is for 64-bit indices. Integer division is slow, so this uses as few as possible.
    """
    if LONG:
        block = block.to(tl.int64)
    i = block * BP + tl.arange(0, BP)
    row = i // W
    plane = row // H
    b = plane // D
    return b, plane - b * D, row - plane * H, i - row * W, i < total


@triton.jit
def parameters(learned, FIXED: tl.constexpr, ROWS: tl.constexpr, channels, k, inside):
    """Return the parameters of a formula for a block of kernels, as a tuple.

    Each is a number of FIXED, or, where ROWS is not −1, that row of the learned parameters, (1, kernels).
    """
    values = ()
    for i in tl.static_range(len(FIXED)):
        if ROWS[i] < 0:
            values = values + (FIXED[i],)
        else:
            values = values + (tl.load(learned + ROWS[i] * channels + k, mask=inside, other=1.0)[None, :],)
    return values


@triton.jit
def magnitude(H: tl.constexpr, n, rho, values, RADIUS: tl.constexpr):
    """Return the magnitude and its slopes; not every formula takes ρ."""
    if RADIUS > 0:
        result = H(n, rho, *values)
    else:
        result = H(n, *values)
    return result


@triton.jit
def offsets_in_tile(p, k, K, P, groups, CHANNELS_LAST: tl.constexpr):
    """Return the offsets of a tile's elements from its first one: (positions, kernels)."""
    if CHANNELS_LAST:
        result = p[:, None] * (groups * K) + k[None, :]
    else:
        result = p[:, None] + k[None, :] * P
    return result


@triton.jit
def place_of_tile(tile, batch, blocks):
    """Return which image of the batch a tile belongs to, with 64 bits, and which block of positions it is."""
    if batch == 1:  # decided when it is compiled; a division is as much work as two elements
        b = tl.zeros((), tl.int64)
        block = tile
    else:
        b = (tile // blocks).to(tl.int64)
        block = tile % blocks
    return b, block


@triton.jit
def start_of_tile(b, g, start, K, P, groups, CHANNELS_LAST: tl.constexpr):
    """Return where a tile starts in its map: one 64-bit number for each tile; b and start have 64 bits."""
    if CHANNELS_LAST:
        result = b * (groups * K) * P + g * K + start * (groups * K)
    else:
        result = (b * (groups * K) + g * K) * P + start
    return result


@triton.jit
def norms_at(n_ptr, at_n, in_p, at, inside, DEPTHWISE: tl.constexpr):
    """Return the norms of a tile: (positions, 1), or (positions, kernels) where each kernel has its own."""
    if DEPTHWISE:
        result = tl.load(n_ptr + at, mask=inside, other=1.0)
    else:
        result = tl.load(n_ptr + at_n, mask=in_p, other=1.0)[:, None]
    return result


@triton.jit
def rounded(x, like):
    """Return x in the element type of the pointer `like`, as it is stored."""
    if like.dtype.element_ty == tl.bfloat16:
        result = bfloat16(x)
    else:
        result = x.to(like.dtype.element_ty)
    return result


@triton.jit
def within(in_p, in_k, EVEN: tl.constexpr):
    """Return which elements of a tile lie in the map; with EVEN all of them do, and the compiler drops every mask."""
    inside = in_p[:, None] & in_k[None, :]
    if EVEN:
        inside = inside | True
    return inside


@triton.jit
def vector(pointer, k, inside, DEFAULT: tl.constexpr):
    """Return a per-kernel vector as (1, kernels), or the default where there is none."""
    if pointer is not None:
        value = tl.load(pointer + k, mask=inside, other=1.0).to(tl.float32)[None, :]
    else:
        value = DEFAULT
    return value


@triton.jit
def rho_of(radius, RADIUS: tl.constexpr, FLOOR: tl.constexpr, k, inside):
    """Return ρ of a block of kernels, (1, kernels).

    RADIUS: 0 where there is none (then 1), 1 where `radius` is ρ, 2 where it is the raw parameter, ρ = raw² + FLOOR.
    """
    rho = vector(radius, k, inside, 1.0)
    if RADIUS == 2:
        rho = rho * rho + FLOOR
    return rho


@triton.jit
def patch_radius(radius, mean, RADIUS: tl.constexpr, FLOOR: tl.constexpr, MEAN: tl.constexpr, k, inside):
    """Return the radius used for patches: ρ·E{‖x‖}, or ρ where there is no mean."""
    rho = rho_of(radius, RADIUS, FLOOR, k, inside)
    if MEAN:
        rho = rho * mean
        rho = tl.where(rho > 0.0, rho, 1.0)  # without eps, E = 0 for a group of zeros; any radius will do there
    return rho


@triton.jit
def zeros(COUNT: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr):
    """Return COUNT sums that start at 0."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros((BP, BK), tl.float32),)
    return sums


@triton.jit
def total(sums, row, ROWS: tl.constexpr, channels, programs, ch, inside, BR: tl.constexpr, BC: tl.constexpr):
    """Return one row of the sums (programs, ROWS, channels), added over programs, for a block of channels: (1, BC)."""
    sum = tl.zeros((BR, BC), tl.float32)
    for first in range(0, programs, BR):
        r = first + tl.arange(0, BR)
        places = (r[:, None] * ROWS + row) * channels + ch[None, :]
        sum += tl.load(sums + places, mask=(r < programs)[:, None] & inside[None, :], other=0.0)
    return tl.sum(sum, 0)[None, :]
