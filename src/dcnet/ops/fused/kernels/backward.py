"""The Triton kernel of the epilogue's gradient."""

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
from dcnet.ops.fused.kernels.statistics import normalization_gradient


@triton.jit(do_not_specialize=["units", "norm_parts"])  # fewer variants to compile; UNIT is enough
def backward(
    d_ptr, n_ptr, e_ptr, e_more, e_energy, out_ptr, grad_d, grad_residual, radius, bias, learned, slope, factor, gain,
    mean, norm, grad_n, norm_sums, norm_gradients, sums, count, batch, groups, units, P, norm_parts,
    H: tl.constexpr, H_FIXED: tl.constexpr, H_ROWS: tl.constexpr, H_SLOPES: tl.constexpr, G: tl.constexpr,
    G_FIXED: tl.constexpr, G_ROWS: tl.constexpr, A: tl.constexpr, G_SLOPES: tl.constexpr, RADIUS: tl.constexpr,
    FLOOR: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, EVEN: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr, REDUCE: tl.constexpr,
    CENTERED: tl.constexpr, RECOVERS: tl.constexpr, SUMS: tl.constexpr, NORM_SUMS: tl.constexpr,
    UNIT: tl.constexpr, DEPTHWISE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `forward`; with REDUCE, only the sums that BatchNorm's gradient needs.

    With REDUCE it also writes the gradient of the residual.

    `norm` is given where BatchNorm follows; CENTERED: with this batch's statistics, which have a gradient themselves.
    e_more is added to the incoming gradient, e_ptr. e_energy is the gradient of the output's energy, ½·Σ of its
    squares; times the output it adds to the gradient of the output. out_ptr is given where a residual was added.
    RECOVERS: d_ptr holds the output, a ReLU's, instead of the dot product; where it is 0 no gradient passes, elsewhere
    cos θ follows from it.

    There are SUMS rows of sums, of those that are wanted, in this order: factor, gain, radius, bias, and the learned
    parameters, whose slopes are results number H_SLOPES and G_SLOPES of the formulas. With REDUCE the rows are e,
    e·(y − center), and the gradient of PReLU's slope.
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
    average = 1.0
    if DEPTHWISE:
        average = vector(mean, ch, in_k, 1.0)
    elif mean is not None:
        average = tl.load(mean + g).to(tl.float32)
    rho = patch_radius(radius, average, RADIUS, FLOOR, mean is not None, ch, in_k)
    t = vector(gain, ch, in_k, 1.0)
    s = vector(factor, ch, in_k, 1.0)
    h_values = parameters(learned, H_FIXED, H_ROWS, channels, ch, in_k)
    g_values = parameters(learned, G_FIXED, G_ROWS, channels, ch, in_k)
    if norm is not None:
        center = vector(norm, ch, in_k, 0.0)
        scale = vector(norm + 3 * channels, ch, in_k, 1.0)
        shift = vector(norm + 4 * channels, ch, in_k, 0.0)
        if not REDUCE:
            writes = tl.program_id(0) == 0
            constant, along = normalization_gradient(
                norm_sums, norm, norm_gradients, count, norm_parts, channels, ch, in_k, writes, NORM_SUMS, BR, BK,
            )  # fmt: skip
    p = tl.arange(0, BP)
    total = zeros(SUMS, BP, BK)
    offsets = offsets_in_tile(p, k, K, P, groups, CHANNELS_LAST)
    for step in tl.range(tl.program_id(0), batch * blocks, tl.num_programs(0), num_stages=STAGES):
        # from the end of the map to its start: what was written last is still in the cache
        tile = batch * blocks - 1 - step if REDUCE else step
        b, block = place_of_tile(tile, batch, blocks)
        in_p = block * BP + p < P
        inside = within(in_p, in_k, EVEN)
        start = block.to(tl.int64) * BP
        first = start_of_tile(b, g.to(tl.int64), start, K, P, groups, CHANNELS_LAST)
        at_n = (b * groups + g) * P + start + p

        n = norms_at(n_ptr, at_n, in_p, first + offsets, inside, DEPTHWISE)
        d = tl.load(d_ptr + first + offsets, mask=inside, other=0.0).to(tl.float32)
        e = tl.load(e_ptr + first + offsets, mask=inside, other=0.0).to(tl.float32)
        if e_more is not None:
            e += tl.load(e_more + first + offsets, mask=inside, other=0.0).to(tl.float32)
        one_over_n = tl.where(n > 0.0, 1.0 / n, 0.0)
        of_h = magnitude(H, n * t, rho, h_values, RADIUS)
        if RECOVERS:
            largest = of_h[0] * s + tl.zeros_like(d)  # what the operator gives for cos θ = 1
            ratio = d * tl.where(largest != 0.0, 1.0 / largest, 0.0)
        else:
            ratio = d * one_over_n
        c = tl.minimum(tl.maximum(ratio, -1.0), 1.0)
        of_g = G(c, *g_values)
        new = ()

        if norm is not None or ACTIVATION > 0 or e_energy is not None:
            y = of_h[0] * of_g[0] * s
            if bias is not None:
                y += vector(bias, ch, in_k, 0.0)
            if out_ptr is not None:  # the sum was not stored, only the output tells its sign
                out = tl.load(out_ptr + first + offsets, mask=inside, other=0.0).to(tl.float32)
                on = out > 0.0
            else:
                z = y
                if norm is not None:
                    z = y * scale + shift
                if RECOVERS:
                    z = d
                on = z > 0.0
            if e_energy is not None:
                if out_ptr is None:
                    out = z
                    if ACTIVATION == 1:
                        out = tl.maximum(z, 0.0)
                    if ACTIVATION == 2:
                        out = tl.where(on, z, z * vector(slope, ch, in_k, 0.0))
                    if ACTIVATION == 3:
                        out = A(z)[0]
                    out = rounded(out, d_ptr).to(tl.float32)  # as it was stored
                e += tl.load(e_energy + at_n, mask=in_p, other=0.0)[:, None] * out
            before = e
            if ACTIVATION == 1:
                e = tl.where(on, e, 0.0)
            if ACTIVATION == 2:
                e = tl.where(on, e, e * vector(slope, ch, in_k, 0.0))
            if ACTIVATION == 3:
                e = e * A(z)[1]
            if REDUCE:
                if grad_residual is not None:
                    tl.store(grad_residual + first + offsets, e.to(grad_residual.dtype.element_ty), mask=inside)
                new = (total[0] + e, total[1] + e * (y - center))
                if ACTIVATION == 2:
                    new = new + (total[2] + tl.where(on, 0.0, before * z),)
            else:
                if norm is not None:
                    e = e * scale
                if CENTERED:  # scale·(e − mean(e) − ŷ·mean(e·ŷ)), as a line in y
                    e = e - (constant + along * y)
                e = tl.where(inside, e, 0.0)

        if not REDUCE:
            es = e * s
            grad_h = es * of_g[0]
            grad_g = es * of_h[0]
            of_d = tl.where(tl.abs(ratio) < 1.0, grad_g * of_g[1], 0.0) * one_over_n
            tl.store(grad_d + first + offsets, of_d.to(grad_d.dtype.element_ty), mask=inside)
            of_n = grad_h * of_h[1] * t - of_d * c
            if DEPTHWISE:  # what `sum_columns` takes
                tl.store(grad_n + first + offsets, of_n * one_over_n, mask=inside)
            else:  # one map for each block of kernels
                at_map = kernel_block.to(tl.int64) * batch * groups * P + at_n
                tl.store(grad_n + at_map, tl.sum(of_n, 1), mask=in_p)
            if factor is not None:
                new = new + (total[len(new)] + e * of_h[0] * of_g[0],)
            if gain is not None:
                new = new + (total[len(new)] + grad_h * of_h[1] * n,)
            if RADIUS > 0:
                new = new + (total[len(new)] + grad_h * of_h[2],)
            if bias is not None:
                new = new + (total[len(new)] + e,)
            for i in tl.static_range(len(H_SLOPES)):
                new = new + (total[len(new)] + grad_h * of_h[H_SLOPES[i]],)
            for i in tl.static_range(len(G_SLOPES)):
                new = new + (total[len(new)] + grad_g * of_g[G_SLOPES[i]],)
        if SUMS > 0:
            total = new

    row = sums + tl.program_id(0) * SUMS * channels + ch
    for i in tl.static_range(SUMS):
        tl.store(row + i * channels, tl.sum(total[i], 0), mask=in_k)
