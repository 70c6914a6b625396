"""What the epilogue's kernels are made of.

Every map is seen as (batch, groups, kernels, positions), whatever its layout; a map in channels_last order has one batch
of N·positions. A tile is a block of positions times the kernels of one group (a block of them where they are many), so
that sums over kernels stay inside it. Programs take the tiles in turns, and each keeps its sums over positions element by
element until the end; they leave as one row per program. The kernel that needs them adds up the rows itself (`total`),
in front of its own work: a launch less. No atomics: the same result in every run.

An operand that is not there is None, which the compiler knows: what depends on it is not compiled.
"""

import triton
import triton.language as tl


@triton.jit
def parameters(learned, FIXED: tl.constexpr, ROWS: tl.constexpr, channels, k, inside):
    """The parameters of a formula for a block of kernels: numbers, or where ROWS is not −1 rows of the learned ones, (1, kernels)."""
    values = ()
    for i in tl.static_range(len(FIXED)):
        if ROWS[i] < 0:
            values = values + (FIXED[i],)
        else:
            values = values + (tl.load(learned + ROWS[i] * channels + k, mask=inside, other=1.0)[None, :],)
    return values


@triton.jit
def magnitude(H: tl.constexpr, n, rho, values, RADIUS: tl.constexpr):
    """The magnitude and its slopes; not every formula takes ρ."""
    if RADIUS > 0:
        result = H(n, rho, *values)
    else:
        result = H(n, *values)
    return result


@triton.jit
def offsets_in_tile(p, k, K, P, groups, CHANNELS_LAST: tl.constexpr):
    """Where the elements of a tile lie from its first on: (positions, kernels)."""
    if CHANNELS_LAST:
        result = p[:, None] * (groups * K) + k[None, :]
    else:
        result = p[:, None] + k[None, :] * P
    return result


@triton.jit
def start_of_tile(b, g, start, K, P, groups, CHANNELS_LAST: tl.constexpr):
    """Where a tile starts in its map: one 64-bit number a tile; b and start have 64 bits."""
    if CHANNELS_LAST:
        result = b * (groups * K) * P + g * K + start * (groups * K)
    else:
        result = (b * (groups * K) + g * K) * P + start
    return result


@triton.jit
def within(in_p, in_k, EVEN: tl.constexpr):
    """Which elements of a tile lie in the map; with EVEN all of them do, and the compiler drops every mask."""
    inside = in_p[:, None] & in_k[None, :]
    if EVEN:
        inside = inside | True
    return inside


@triton.jit
def vector(pointer, k, inside, DEFAULT: tl.constexpr):
    """A per-kernel vector as (1, kernels); the default where there is none."""
    if pointer is not None:
        value = tl.load(pointer + k, mask=inside, other=1.0).to(tl.float32)[None, :]
    else:
        value = DEFAULT
    return value


@triton.jit
def rho_of(radius, RADIUS: tl.constexpr, FLOOR: tl.constexpr, k, inside):
    """ρ of a block of kernels, (1, kernels). RADIUS: 0 for none (then 1), 1 for ρ itself, 2 for what is learned, ρ = raw² + FLOOR."""
    rho = vector(radius, k, inside, 1.0)
    if RADIUS == 2:
        rho = rho * rho + FLOOR
    return rho


@triton.jit
def patch_radius(radius, mean, RADIUS: tl.constexpr, FLOOR: tl.constexpr, MEAN: tl.constexpr, k, inside):
    """The radius used for patches: ρ·E{‖x‖}, or ρ where there is no mean."""
    rho = rho_of(radius, RADIUS, FLOOR, k, inside)
    if MEAN:
        rho = rho * mean
        rho = tl.where(rho > 0.0, rho, 1.0)  # a group of nothing but zeros, without eps: any radius will do
    return rho


@triton.jit
def zeros(COUNT: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr):
    """So many sums to begin with."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros((BP, BK), tl.float32),)
    return sums


@triton.jit
def total(sums, row, ROWS: tl.constexpr, channels, programs, ch, inside, BR: tl.constexpr, BC: tl.constexpr):
    """Σ over programs of one row of their sums (programs, ROWS, channels), for a block of channels: (1, channels)."""
    sum = tl.zeros((BR, BC), tl.float32)
    for first in range(0, programs, BR):
        r = first + tl.arange(0, BR)
        places = (r[:, None] * ROWS + row) * channels + ch[None, :]
        sum += tl.load(sums + places, mask=(r < programs)[:, None] & inside[None, :], other=0.0)
    return tl.sum(sum, 0)[None, :]
