"""The Triton kernel of the epilogue, and what it shares with its gradient (`gradient_kernel.py`).

Every map is seen as (batch, groups, kernels, positions) with strides, whatever its layout; a map in channels_last order
has one batch of N·positions. A tile is a block of positions times the kernels of one group (a block of them where they
are many), so that sums over kernels stay inside it. A program takes every so many-th tile and keeps its sums over positions
element by element until the end; they leave as one row per program, added up afterwards. No atomics: the same result in
every run.
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
def patch_radius(radius, mean, RADIUS: tl.constexpr, FLOOR: tl.constexpr, MEAN: tl.constexpr, g, k, inside):
    """The radius used for patches: ρ·E{‖x‖}, or ρ where there is no mean."""
    rho = rho_of(radius, RADIUS, FLOOR, k, inside)
    if MEAN:
        rho = rho * tl.load(mean + g).to(tl.float32)
        rho = tl.where(rho > 0.0, rho, 1.0)  # a group of nothing but zeros, without eps: any radius will do
    return rho


@triton.jit
def forward(
    d_ptr,
    n_ptr,
    y_ptr,
    residual_ptr,
    radius,
    bias,
    learned,
    around,
    slope,
    factor,
    gain,
    mean,
    norm,
    sums,
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
    MEAN: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BP: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    AFFINE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STATISTICS: tl.constexpr,
    AROUND: tl.constexpr,
):
    """y = factor·h·g + bias; then scale·y + shift + residual and the activation; or, with STATISTICS, only sums of y − around."""
    channels = groups * K
    g = tl.program_id(1) // kernel_blocks
    k = (tl.program_id(1) % kernel_blocks) * BK + tl.arange(0, BK)
    in_k = k < K
    ch = g * K + k
    rho = patch_radius(radius, mean, RADIUS, FLOOR, MEAN, g, ch, in_k)
    t = vector(gain, HAS_GAIN, ch, in_k, 1.0)
    s = vector(factor, HAS_FACTOR, ch, in_k, 1.0)
    h0 = parameter(learned, H0, HR0, channels, ch, in_k)
    h1 = parameter(learned, H1, HR1, channels, ch, in_k)
    h2 = parameter(learned, H2, HR2, channels, ch, in_k)
    g0 = parameter(learned, G0, GR0, channels, ch, in_k)
    g1 = parameter(learned, G1, GR1, channels, ch, in_k)
    g2 = parameter(learned, G2, GR2, channels, ch, in_k)
    scale = vector(norm + 3 * channels, AFFINE, ch, in_k, 1.0)
    shift = vector(norm + 4 * channels, AFFINE, ch, in_k, 0.0)
    centre = vector(around, AROUND, ch, in_k, 0.0)
    p = tl.arange(0, BP)
    if STATISTICS:
        sum_y = tl.zeros((BP, BK), tl.float32)
        sum_yy = tl.zeros((BP, BK), tl.float32)
    offsets = p[:, None] * d_p + k[None, :] * d_k
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        block = tile % blocks
        b = (tile // blocks).to(tl.int64)
        in_p = block * BP + p < P
        inside = within(in_p, in_k, EVEN)
        start = block.to(tl.int64) * BP
        first = b * d_b + g.to(tl.int64) * d_g + start * d_p  # one 64-bit number a tile
        n = tl.load(n_ptr + b * n_b + g * n_g + (start + p) * n_p, mask=in_p, other=1.0)[:, None]
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
            if AFFINE:
                y = y * scale + shift
            if RESIDUAL:
                y += tl.load(residual_ptr + first + offsets, mask=inside, other=0.0).to(tl.float32)
            if ACTIVATION == 1:
                y = tl.maximum(y, 0.0)
            if ACTIVATION == 2:
                y = tl.where(y > 0.0, y, y * vector(slope, True, ch, in_k, 0.0))
            tl.store(y_ptr + first + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)
    if STATISTICS:
        row = sums + tl.program_id(0) * 2 * channels + ch
        tl.store(row, tl.sum(sum_y, 0), mask=in_k)
        tl.store(row + channels, tl.sum(sum_yy, 0), mask=in_k)
