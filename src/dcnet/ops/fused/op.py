"""A decoupled convolution with what follows it, and its gradients, as launches.

Forward: kernels normalized, patch norms, PyTorch's convolution, epilogue. With BatchNorm the epilogue reads the dot
product twice (statistics; normalized output) and writes once; the decoupled map itself is never stored.
Backward: reads dot product and incoming gradient twice and writes the dot product's gradient. The norms' gradient is added
to the convolution's in one pass, or left to the layer that handed the input's energy on.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from dcnet.ops.fused.launcher import Memory
from dcnet.ops.fused.layout import like
from dcnet.ops.fused.operands import GIVEN, OF_BATCH, OF_RANKS, Effects, Gradients, Kept, Operands, convolution
from dcnet.ops.fused.plan import BACKWARD, FORWARD, Plan
from dcnet.ops.mean_norm import BatchMean, distributed
from dcnet.util.compat import recomputing

_DOT, _OUT, _RESIDUAL = map(FORWARD.index, ("dot", "out", "residual"))
_OF_MEAN, _OF_W_NORM, _GRAD_X, _GRAD_UNIT = map(BACKWARD.index, ("of_mean", "of_w_norm", "grad_x", "grad_unit"))


def forward(plan: Plan, t: Operands, effects: Effects, keep: bool = True) -> tuple[Tensor, Tensor | None, Kept]:
    """Return act(BatchNorm(s·h·g + b) + residual), or s·h·g + b alone; its energy if it is to be left; what backward needs."""
    o, x, regions = plan.options, t.x, plan.vectors
    device, single = x.device, torch.float32
    tracked, momentum, batches = effects
    running_norm = mean_batches = None
    track, mean_momentum = 0, 0.0
    if o.mean_kind == OF_BATCH and tracked is not None and tracked.running_norm is not None and not recomputing():
        running_norm, mean_batches = tracked.running_norm, tracked.num_batches_tracked
        track, mean_momentum = (2, 0.0) if tracked.momentum is None else (1, tracked.momentum)
    if momentum is not None and batches is None:  # nobody counts
        batches = torch.zeros((), dtype=torch.int64, device=device)

    vectors = torch.empty(regions.size, dtype=single, device=device)
    norms = torch.empty(plan.norms.output, dtype=single, device=device)
    scratch = torch.empty(plan.tiles.scratch.size, dtype=single, device=device)
    unit = torch.empty_like(t.weight, dtype=x.dtype)
    left = None if plan.left is None else torch.empty(plan.left, dtype=single, device=device)
    memory = Memory((*t, batches, running_norm, mean_batches, vectors, unit, norms, scratch, left, None, None))
    plan.normalize(memory)
    if plan.norms.count:
        if t.energy is None:
            plan.energies(memory)
        plan.box(memory)
    dot = plan.ordered(convolution(x, unit, o))
    out = torch.empty_like(dot) if keep else dot  # each element is read before it is written
    memory.put(_DOT, dot)
    memory.put(_OUT, out)
    if o.mean_kind == OF_RANKS:
        _mean_over_ranks(norms, regions.view(vectors, "mean"), plan.norms.count, tracked)
    if o.operator.weighting == "separate":
        h = o.operator.magnitude_one(regions.view(vectors, "w_norm"), *_rho_and_learned(plan, t))[0]
        torch.mul(h, o.operator.magnitude.value("alpha", 1.0), out=regions.view(vectors, "factor"))
    if t.residual is not None and t.residual.stride() != plan.stride:
        memory.put(_RESIDUAL, plan.ordered(t.residual))
    if plan.has_output:
        for launcher in plan.epilogue(track, momentum is not None):
            launcher(memory, momentum or 0.0, mean_momentum)
        if mean_batches is not None and o.groups > 1:
            mean_batches.add_(regions.view(vectors, "mean")[: o.groups].isfinite().all())
    elif o.mean_kind == OF_BATCH:
        regions.view(vectors, "mean").fill_(torch.nan)  # as the mean of nothing is
    return out, left, Kept(dot, norms, unit, vectors)


def _mean_over_ranks(norms: Tensor, total: Tensor, count: int, tracked: BatchMean | None) -> None:
    """Write E{‖x‖} over the batches of all ranks to `total`, then the number of norms; move the running average."""
    total[:-1] = norms.sum([0, *range(2, norms.dim())])
    total[-1] = count
    if distributed():
        dist.all_reduce(total)
    total[:-1] /= total[-1]
    if tracked is not None:
        tracked.track(total[:-1])


def _rho_and_learned(plan: Plan, t: Operands) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return ρ and the learned parameters by name, for what is computed outside the kernels."""
    assert plan.options.radius_kind == 1  # then ρ comes as it is
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
) -> Gradients:
    """Return the gradients of `forward`, by those of its output and of the energy it left.

    t: at least what is `READ_BY_BACKWARD`. out: where a residual was added and the gradient depends on the sum (`arrived`).
    add: whether to add the norms' gradient to the convolution's. The layer that left the energy does that itself; so does
    a compiled graph, in a pass with what comes next.
    """
    o, x, weight = plan.options, t.x, t.weight
    dot, norms, unit, vectors = kept
    device, single = x.device, torch.float32
    add = add or not want_x
    launchers = plan.backward(out is not None, of_left is not None, add)
    grad_d = torch.empty_like(dot)
    behind = None if out is None else torch.empty_like(dot)
    of_vectors = torch.empty(plan.of_vectors.size, dtype=single, device=device)
    scratch = torch.empty(launchers.scratch, dtype=single, device=device)
    products = None if add else torch.empty(plan.positions, dtype=single, device=device)
    grad_weight = torch.empty_like(weight) if want_weight else None
    if of_left is not None and of_left.stride()[1:] != norms.stride():
        of_left = of_left[0].contiguous()  # the maps are added up, so that their gradients are all the same
    read = (x, weight, t.bias, t.radius, t.mean_norm, t.learned, t.slope)
    results = (grad_d, of_vectors, behind, scratch, products, None, None, None, None, grad_weight)
    memory = Memory((*read, plan.ordered(e), of_left, out, dot, norms, unit, vectors, *results))
    if plan.has_output:
        for launcher in launchers.epilogue:
            launcher(memory)
    else:
        of_vectors.zero_()
        scratch.zero_()
    if o.operator.weighting == "separate":
        memory.put(_OF_W_NORM, _factor_backward(plan, t, vectors, of_vectors))

    if o.stride:
        shape = (o.stride, o.padding, o.dilation, False, [0] * len(o.stride), o.groups)
        wanted = (want_x, want_weight, False)
        grad_x, grad_unit, _ = torch.ops.aten.convolution_backward.default(grad_d, x, unit, None, *shape, wanted)
    else:
        grad_x = grad_d @ unit if want_x else None
        grad_unit = grad_d.t() @ x if want_weight else None
    of_mean = plan.tiles.back_scratch.view(scratch, "mean")
    if want_x:
        if o.mean_kind == OF_RANKS:  # also where this rank has nothing: the others are waiting
            memory.put(_OF_MEAN, _over_ranks(plan, of_mean, vectors))
        if plan.norms.count and x.numel():
            grad_x = like(grad_x, x)
            memory.put(_GRAD_X, grad_x)
            launchers.box(memory)
            if add:
                launchers.product(memory)
        elif products is not None:
            products.zero_()
    if grad_weight is not None:
        memory.put(_GRAD_UNIT, like(grad_unit, weight))
        plan.normalize_backward(memory)
    return Gradients(
        grad_x, products, grad_weight, of_vectors, of_mean.clone() if o.mean_kind == GIVEN else None, behind
    )


def _factor_backward(plan: Plan, t: Operands, vectors: Tensor, of_vectors: Tensor) -> Tensor:
    """Return the gradient in ‖w‖ of the factor, α·h₁(‖w‖); add those in ρ and the learned parameters to theirs."""
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
    """Return what every norm of every rank gets of the gradient of E{‖x‖}: (groups,)."""
    total = of_mean.view(plan.groups, -1).sum(1)
    if distributed():
        dist.all_reduce(total)
    return total / plan.vectors.view(vectors, "mean")[-1]
