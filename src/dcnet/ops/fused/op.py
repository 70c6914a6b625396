"""Run a decoupled convolution with its post-ops, and its gradients, as launches of kernels.

Forward normalizes the kernels, computes patch norms, calls PyTorch's convolution, and runs the epilogue. With BatchNorm
the epilogue reads the dot product twice (for the statistics, and for the normalized output) and writes once; the
decoupled map itself is never stored.

Backward reads the dot product and the incoming gradient twice, and writes the gradient of the dot product. It adds the
gradient of the norms to that of the convolution in one pass, or leaves that to the layer that passed on the energy of
the input.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from dcnet.ops.fused.first_use import COMPILERS, compile_ahead, compile_backward
from dcnet.ops.fused.launcher import Memory
from dcnet.ops.fused.layout import like
from dcnet.ops.fused.operands import (
    BACKWARD,
    FORWARD,
    GIVEN,
    OF_BATCH,
    OF_RANKS,
    Effects,
    Gradients,
    Kept,
    Operands,
    Results,
    convolution,
    tracking,
)
from dcnet.ops.fused.plan import Plan
from dcnet.ops.mean_norm import BatchMean, distributed
from dcnet.util.compat import recomputing

_DOT, _OUT, _RESIDUAL = map(FORWARD.index, ("dot", "out", "residual"))
_OF_MEAN, _OF_W_NORM, _GRAD_X, _GRAD_UNIT = map(BACKWARD.index, ("of_mean", "of_w_norm", "grad_x", "grad_unit"))


def forward(
    plan: Plan, t: Operands, effects: Effects, keep: bool = True, in_graph: bool = False
) -> tuple[Results, Kept]:
    """Return the results, and what backward needs.

    The output is act(BatchNorm(s·h·g + b) + residual), or s·h·g + b alone. keep: whether backward will run. If not, or
    if backward recovers the dot product from the output, the output overwrites the dot product. in_graph: whether this
    is an operator of a compiled graph.
    """
    o, x, regions = plan.options, t.x, plan.vectors
    device, single = x.device, torch.float32
    if keep not in plan.used:
        plan.used.add(keep)
        compile_ahead(plan, t, effects, keep, in_graph)
    tracked, momentum, batches = effects
    running_norm = mean_batches = None
    track, mean_momentum = (0, 0.0) if recomputing() else tracking(effects, o)
    if track and tracked is not None:
        running_norm, mean_batches = tracked.running_norm, tracked.num_batches_tracked
    if momentum is not None and batches is None:  # nobody counts, but the kernel needs a counter
        batches = torch.zeros((), dtype=torch.int64, device=device)

    vectors = torch.empty(regions.size, dtype=single, device=device)
    dot = None
    if plan.depthwise:  # its own kernels compute the dot product
        dot, norms = _dot_and_norms(plan, x)
    else:
        norms = torch.empty(plan.norms.output, dtype=single, device=device)
    scratch = torch.empty(plan.tiles.scratch.size, dtype=single, device=device)
    unit = torch.empty_like(t.weight, dtype=x.dtype)
    left = None if plan.left is None else torch.empty(plan.left, dtype=single, device=device)
    memory = Memory((*t, batches, running_norm, mean_batches, vectors, unit, norms, scratch, left, dot, None))
    plan.ahead(memory)
    if dot is None:
        dot = plan.ordered(convolution(x, unit, o))
        memory.put(_DOT, dot)
    out = torch.empty_like(dot) if keep and not o.recovers else dot  # each element is read before it is written
    memory.put(_OUT, out)
    if o.mean_kind == OF_RANKS:
        _mean_over_ranks(norms, regions.view(vectors, "mean"), plan.norms.count, tracked)
    if o.operator.weighting == "separate":
        h = o.operator.magnitude_one(regions.view(vectors, "w_norm"), *_rho_and_learned(plan, t))[0]
        torch.mul(h, o.operator.magnitude.value("alpha", 1.0), out=regions.view(vectors, "factor"))
    if t.residual is not None and t.residual.stride() != plan.stride:
        memory.put(_RESIDUAL, plan.ordered(t.residual))
    if plan.has_output:
        plan.epilogue(track, momentum is not None)(memory, momentum or 0.0, mean_momentum)
    elif o.mean_kind == OF_BATCH:
        regions.view(vectors, "mean").fill_(torch.nan)  # the mean of no numbers
    return Results(out, left), Kept(dot, norms, unit, vectors)


def _dot_and_norms(plan: Plan, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the dot product and the norms of a depthwise layer, which have the same shape."""
    dot = torch.empty_strided(plan.norms.output, plan.stride, dtype=x.dtype, device=x.device)
    return dot, torch.empty_like(dot, dtype=torch.float32)


def recompute(plan: Plan, x: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the dot product and the norms of a depthwise layer again."""
    dot, norms = _dot_and_norms(plan, x)
    given = {"x": x, "unit": unit, "dot": dot, "norms": norms}
    plan.again(Memory(tuple(given.get(name) for name in BACKWARD)))
    return dot, norms


def _mean_over_ranks(norms: Tensor, total: Tensor, count: int, tracked: BatchMean | None) -> None:
    """Write E{‖x‖} over the batches of all ranks to `total`, followed by the number of norms.

    Update the running average.
    """
    total[:-1] = norms.sum([0, *range(2, norms.dim())])
    total[-1] = count
    if distributed():
        dist.all_reduce(total)
    total[:-1] /= total[-1]
    if tracked is not None:
        tracked.track(total[:-1])


def _rho_and_learned(plan: Plan, t: Operands) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return ρ, and the learned parameters by name, for computations outside the kernels."""
    assert plan.options.radius_kind == 1  # `radius` is ρ itself
    return t.radius, {} if t.learned is None else dict(zip(plan.operator.learned, t.learned, strict=True))


def backward(
    plan: Plan,
    e: Tensor,
    of_left: Tensor | None,
    t: Operands,
    kept: Kept,
    out: Tensor | None,
    want_x: bool,
    want_weight: bool,
    add: bool,
    e_more: Tensor | None = None,
) -> Gradients:
    """Return the gradients of `forward`, given those of its output and of the output's energy.

    Args:
        plan: of the forward pass.
        e: the gradient of the output.
        of_left: the gradient of the output's energy, if it has one.
        t: the operands; only those in `READ_BY_BACKWARD` have to be there.
        kept: what forward kept.
        out: the output, where a residual was added and the gradient depends on the sum (`arrived`).
        want_x: whether the gradient of x is wanted.
        want_weight: whether the gradient of the weight is wanted.
        add: whether to add the gradient of the norms to that of the convolution. False if the previous layer passed on
            the energy of x, since that layer then adds it, and in a compiled graph, which fuses the addition with the
            code that follows. The kernels of a depthwise layer compute both at once, and always add.
        e_more: another gradient of the output, to be added to e.
    """
    o, x, weight = plan.options, t.x, t.weight
    dot, norms, unit, vectors = kept
    device, single = x.device, torch.float32
    add = add or not want_x or plan.depthwise
    key = (out is not None, of_left is not None, add, want_x, want_weight, e_more is not None)
    launchers = plan.backward(*key)
    if key not in plan.used:
        plan.used.add(key)
        compile_backward(plan, t, launchers)
    COMPILERS.wait()
    grad_d = torch.empty_like(dot)
    behind = None if out is None else torch.empty_like(dot)
    of_vectors = torch.empty(plan.of_vectors.size, dtype=single, device=device)
    scratch = torch.empty(launchers.scratch, dtype=single, device=device)
    products = None if add else torch.empty(plan.positions, dtype=single, device=device)
    grad_weight = torch.empty_like(weight) if want_weight else None
    if of_left is not None and of_left.stride()[1:] != norms.stride():
        of_left = of_left[0].contiguous()  # the energy is the sum of the maps, so all have the same gradient
    read = (x, weight, t.bias, t.radius, t.mean_norm, t.learned, t.slope)
    results = (grad_d, of_vectors, behind, scratch, products, None, None, None, None, grad_weight)
    incoming = (plan.ordered(e), None if e_more is None else plan.ordered(e_more), of_left)
    memory = Memory((*read, *incoming, out, dot, norms, unit, vectors, *results))
    if plan.has_output:
        launchers.epilogue(memory)
    else:
        of_vectors.zero_()
        scratch.zero_()
    if o.operator.weighting == "separate":
        memory.put(_OF_W_NORM, _factor_backward(plan, t, vectors, of_vectors))

    if o.stride:
        shape = (o.stride, o.padding, o.dilation, False, [0] * len(o.stride), o.groups)
        wanted = (want_x and not plan.depthwise, want_weight, False)
        grad_x, grad_unit, _ = torch.ops.aten.convolution_backward.default(grad_d, x, unit, None, *shape, wanted)
    else:
        grad_x = grad_d @ unit if want_x else None
        grad_unit = grad_d.t() @ x if want_weight else None
    if plan.depthwise and want_x:
        grad_x = torch.empty_like(x)
    if want_x:
        if o.mean_kind == OF_RANKS:  # even if this rank has no input: the others wait for it
            memory.put(_OF_MEAN, _over_ranks(plan, plan.tiles.back_scratch.view(scratch, "mean"), vectors))
        if plan.norms.count and x.numel():
            grad_x = like(grad_x, x)
            memory.put(_GRAD_X, grad_x)
        elif products is not None:
            products.zero_()
    if grad_weight is not None:
        memory.put(_GRAD_UNIT, like(grad_unit, weight))
    launchers.ends(memory)
    of_mean = plan.tiles.back_scratch.view(scratch, "mean").clone() if o.mean_kind == GIVEN else None
    return Gradients(grad_x, products, grad_weight, of_vectors, of_mean, behind)


def _factor_backward(plan: Plan, t: Operands, vectors: Tensor, of_vectors: Tensor) -> Tensor:
    """Return the gradient of ‖w‖ through the factor α·h₁(‖w‖).

    Add the factor's gradients of ρ and of the learned parameters to those in `of_vectors`.
    """
    operator, regions = plan.operator, plan.of_vectors
    e = regions.view(of_vectors, "w_norm") * operator.magnitude.value("alpha", 1.0)
    _, of_norm, *slopes = operator.magnitude_one(plan.vectors.view(vectors, "w_norm"), *_rho_and_learned(plan, t))
    if t.radius is not None:
        regions.view(of_vectors, "radius").add_(e * slopes.pop(0))
    learned = regions.view(of_vectors, "learned").view(-1, plan.kernels)
    for name, slope in zip(operator.magnitude.formula.learnable, slopes, strict=True):
        if name in operator.magnitude.learned:
            learned[operator.magnitude.learned.index(name)] += e * slope
    return e * of_norm


def _over_ranks(plan: Plan, of_mean: Tensor, vectors: Tensor) -> Tensor:
    """Return the share of the gradient of E{‖x‖} that each norm of each rank gets: (groups,)."""
    total = of_mean.view(plan.groups, -1).sum(1)
    if distributed():
        dist.all_reduce(total)
    return total / plan.vectors.view(vectors, "mean")[-1]
