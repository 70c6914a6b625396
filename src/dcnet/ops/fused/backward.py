"""The gradients of a decoupled convolution with what follows it, as launches.

Reads dot product and incoming gradient twice and writes the dot product's gradient. The norms' gradient is added to the convolution's in
one pass, or left to whoever handed the input's energy on.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from dcnet.ops.fused.call import BACKWARD, Call
from dcnet.ops.fused.forward import rho_and_learned
from dcnet.ops.fused.launcher import Memory
from dcnet.ops.fused.layout import like
from dcnet.ops.fused.operands import GIVEN, OF_RANKS, Gradients, Kept, Operands
from dcnet.ops.mean_norm import distributed

_OF_MEAN, _OF_W_NORM, _GRAD_X, _GRAD_UNIT, _GRAD_WEIGHT = map(
    BACKWARD.index, ("of_mean", "of_w_norm", "grad_x", "grad_unit", "grad_weight")
)


def backward(
    call: Call,
    e: Tensor,
    of_left: Tensor | None,
    t: Operands,
    kept: Kept,
    out: Tensor | None,
    want_x: bool,
    want_weight: bool,
    add: bool,
) -> Gradients:
    """The gradients of `forward`, of those in its output and in the energy it has left; t has at least what is `READ_BY_BACKWARD`.

    out: where a residual was added and the gradient depends on the sum (`arrived`).
    add: whether to add the norms' gradient to the convolution's. Whoever left the energy does that itself; so does a compiled graph, in a
    pass with what comes next.
    """
    o, x, weight = call.options, t.x, t.weight
    dot, norms, unit, vectors = kept
    device, single = x.device, torch.float32
    add = add or not want_x
    launchers = call.backward(out is not None, of_left is not None, add)
    grad_d = torch.empty_like(dot)
    behind = None if out is None else torch.empty_like(dot)
    of_vectors = torch.empty(call.of_vectors.slope.stop, dtype=single, device=device)
    scratch = torch.empty(launchers.scratch, dtype=single, device=device)
    products = None if add else torch.empty(call.positions, dtype=single, device=device)
    grad_weight = torch.empty_like(weight) if want_weight else None
    results = [grad_d, of_vectors, behind, scratch, products, None, None, None, None, grad_weight]
    e = call.ordered(e)
    if of_left is not None and of_left.stride()[1:] != norms.stride():
        of_left = of_left[0].contiguous()  # the maps are summed up, so that their gradients are all the same
    memory = Memory(
        [
            x,
            weight,
            t.bias,
            t.radius,
            t.mean_norm,
            t.learned,
            t.slope,
            e,
            of_left,
            out,
            dot,
            norms,
            unit,
            vectors,
            *results,
        ]
    )
    if call.has_output:
        for launcher in launchers.epilogue:
            launcher(memory)
    else:
        of_vectors.zero_()
        scratch.zero_()
    if o.weighting == "separate":
        memory.put(_OF_W_NORM, _factor_backward(call, t, vectors[: call.kernels], of_vectors))

    if o.stride:
        shape = (o.stride, o.padding, o.dilation, False, [0] * len(o.stride), o.groups)
        grad_x, grad_unit, _ = torch.ops.aten.convolution_backward.default(
            grad_d, x, unit, None, *shape, (want_x, want_weight, False)
        )
    else:
        grad_x = grad_d @ unit if want_x else None
        grad_unit = grad_d.t() @ x if want_weight else None
    if want_x:
        if o.mean_kind == OF_RANKS:  # also where this rank has nothing: the others are waiting
            memory.put(_OF_MEAN, _over_ranks(call, scratch, vectors))
        if call.has_norms and x.numel():
            grad_x = like(grad_x, x)
            memory.put(_GRAD_X, grad_x)
            launchers.box(memory)
            if add:
                launchers.product(memory)
        elif products is not None:
            products.zero_()
    if grad_weight is not None:
        memory.put(_GRAD_UNIT, like(grad_unit, weight))
        call.normalise_backward(memory)
    mean_at = call.epilogue_plan.mean_at
    of_mean = (
        scratch[mean_at : mean_at + o.groups * call.epilogue_plan.mean_parts].clone() if o.mean_kind == GIVEN else None
    )
    return Gradients(grad_x, products, grad_weight, of_vectors, of_mean, behind)


def _factor_backward(call: Call, t: Operands, w_norm: Tensor, of_vectors: Tensor) -> Tensor:
    """The gradient in ‖w‖ of the factor, α·h₁(‖w‖); those in ρ and the learned parameters are added to theirs."""
    operator, at = call.operator, call.of_vectors
    e = of_vectors[at.w_norm] * operator.magnitude.value("alpha", 1.0)
    _, of_norm, *slopes = operator.magnitude_one(w_norm, *rho_and_learned(call, t))
    if t.radius is not None:
        of_vectors[at.radius] += e * slopes.pop(0)
    learned = of_vectors[at.learned].view(-1, call.kernels)
    for name, slope in zip(operator.magnitude.formula.learnable, slopes, strict=True):
        if name in operator.magnitude.learned:
            learned[operator.magnitude.learned.index(name)] += e * slope
    return e * of_norm


def _over_ranks(call: Call, scratch: Tensor, vectors: Tensor) -> Tensor:
    """What every norm of every rank gets of the gradient of E{‖x‖}: (groups,)."""
    how, groups = call.epilogue_plan, call.options.groups
    of_mean = scratch[how.mean_at : how.mean_at + groups * how.mean_parts].view(groups, -1).sum(1)
    if distributed():
        dist.all_reduce(of_mean)
    return of_mean / vectors[call.at.mean + groups]
