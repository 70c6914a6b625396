"""What the epilogue's kernels are made of.

Every map is seen as (batch, groups, kernels, positions) with strides, whatever its layout; a map in channels_last order
has one batch of N·positions. A tile is a block of positions times the kernels of one group (a block of them where they
are many), so that sums over kernels stay inside it. A program takes every so many-th tile and keeps its sums over positions
element by element until the end; they leave as one row per program. Whoever needs them adds up the rows itself (`total`), in
front of its own work: a launch less. No atomics: the same result in every run.
"""

import triton
import triton.language as tl


@triton.jit
def parameter(learned, FIXED: tl.constexpr, ROW: tl.constexpr, channels, k, inside):
    """A parameter of a formula for a block of kernels: a number, or a row of the learned ones as (1, kernels)."""
    if ROW < 0:
        value = FIXED
    else:
        value = tl.load(learned + ROW * channels + k, mask=inside, other=1.0)[None, :]
    return value


@triton.jit
def magnitude(H: tl.constexpr, n, rho, p0, p1, p2, HAS_RHO: tl.constexpr, COUNT: tl.constexpr):
    """The magnitude and its slopes; formulas differ in how many arguments they take."""
    if HAS_RHO:
        if COUNT == 0:
            result = H(n, rho)
        elif COUNT == 1:
            result = H(n, rho, p0)
        elif COUNT == 2:
            result = H(n, rho, p0, p1)
        else:
            result = H(n, rho, p0, p1, p2)
    else:
        if COUNT == 0:
            result = H(n)
        elif COUNT == 1:
            result = H(n, p0)
        elif COUNT == 2:
            result = H(n, p0, p1)
        else:
            result = H(n, p0, p1, p2)
    return result


@triton.jit
def angular(G: tl.constexpr, c, p0, p1, p2, COUNT: tl.constexpr):
    """The angular function and its slopes."""
    if COUNT == 0:
        result = G(c)
    elif COUNT == 1:
        result = G(c, p0)
    elif COUNT == 2:
        result = G(c, p0, p1)
    else:
        result = G(c, p0, p1, p2)
    return result


@triton.jit
def within(in_p, in_k, EVEN: tl.constexpr):
    """Which elements of a tile lie in the map; with EVEN all of them do, and the compiler drops every mask."""
    inside = in_p[:, None] & in_k[None, :]
    if EVEN:
        inside = inside | True
    return inside


@triton.jit
def vector(pointer, HAS: tl.constexpr, k, inside, DEFAULT: tl.constexpr):
    """A per-kernel vector as (1, kernels); the default where there is none."""
    if HAS:
        value = tl.load(pointer + k, mask=inside, other=1.0).to(tl.float32)[None, :]
    else:
        value = DEFAULT
    return value


@triton.jit
def rho_of(radius, RADIUS: tl.constexpr, FLOOR: tl.constexpr, k, inside):
    """ρ of a block of kernels, (1, kernels). RADIUS: 0 for none (then 1), 1 for ρ itself, 2 for what is learned, ρ = raw² + FLOOR."""
    rho = vector(radius, RADIUS > 0, k, inside, 1.0)
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
def total(sums, row, ROWS: tl.constexpr, channels, programs, ch, inside, BR: tl.constexpr, BC: tl.constexpr):
    """Σ over programs of one row of their sums (programs, ROWS, channels), for a block of channels: (1, channels)."""
    sum = tl.zeros((BR, BC), tl.float32)
    for first in range(0, programs, BR):
        r = first + tl.arange(0, BR)
        sum += tl.load(
            sums + (r[:, None] * ROWS + row) * channels + ch[None, :],
            mask=(r < programs)[:, None] & inside[None, :],
            other=0.0,
        )
    return tl.sum(sum, 0)[None, :]
