"""The gradients of a decoupled convolution with what follows it, as launches.

Reads dot product and incoming gradient twice, writes the dot product's gradient, and adds the norms' gradient to the
convolution's in one pass.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dcnet.ops.fused import launch
from dcnet.ops.fused.fast import Piece
from dcnet.ops.fused.forward import rho_and_learned
from dcnet.ops.fused.launch import either
from dcnet.ops.fused.operands import (
    ALONE,
    GIVEN,
    OF_BATCH,
    OF_RANKS,
    STATISTICS,
    Gradients,
    Kept,
    Operands,
    Options,
    epilogue,
    gradient_size,
    norm_at,
    norm_plan,
    places_of,
    vector_rows,
)
from dcnet.ops.fused.plan import GradientFlags, Plan, operator_named
from dcnet.ops.mean_norm import distributed

READ_BY_BACKWARD = ("x", "weight", "bias", "radius", "mean_norm", "learned", "slope")


def backward(
    e: Tensor, t: Operands, kept: Kept, out: Tensor | None, o: Options, residual: bool, want_x: bool, want_weight: bool, add: bool = True
) -> Gradients:
    """The gradients of `forward`; t has at least what is `READ_BY_BACKWARD`, `out` is there where a residual is followed by an activation.

    add: whether to add the norms' gradient to the convolution's. A compiled graph does that itself, in a pass with what comes next.
    """
    dot = kept.dot
    how, tensors, pieces = epilogue(t, dot, kept.vectors, o)
    of_vectors = torch.empty(gradient_size(t, o), dtype=torch.float32, device=dot.device)
    behind_activation = residual and o.activation != 0
    behind = torch.empty_like(dot) if behind_activation else None
    grad_d = torch.empty_like(dot)
    plan = norm_plan(t, o)
    separate = want_x and not add
    scratch = torch.empty(how.scratch + (0 if separate else plan.squares), dtype=torch.float32, device=dot.device)
    products = torch.empty((t.x.shape[0], o.groups, *t.x.shape[2:]), dtype=torch.float32, device=dot.device) if separate else None
    if dot.numel():
        _epilogue_backward(launch.like(e, dot), t, kept, out, o, how, tensors, pieces, (grad_d, of_vectors, behind, scratch))
    else:
        of_vectors.zero_()
        scratch.zero_()
    of_w_norm = (of_vectors, 0) if o.weighting else None  # the gradient of the factor, or of the gain
    if o.weighting == "separate":
        of_w_norm = (_factor_backward(t, kept.vectors[: dot.shape[1]], of_vectors, o), 0)
    into = (scratch, how.scratch) if products is None else (products, 0)
    grad_x, grad_weight = _convolution_backward(grad_d, scratch, of_w_norm, t, kept, o, how, plan, want_x, want_weight, into, add)
    of_mean = scratch[how.mean_at : how.mean_at + o.groups * how.mean_parts].clone() if o.mean_kind == GIVEN else None
    return Gradients(grad_x, products, grad_weight, of_vectors, of_mean, behind)


def _epilogue_backward(
    e: Tensor,
    t: Operands,
    kept: Kept,
    out: Tensor | None,
    o: Options,
    how: Plan,
    tensors: list[Tensor],
    pieces: list[Piece],
    results: tuple[Tensor, Tensor, Tensor | None, Tensor],
) -> None:
    """Fills the results: the gradients of dot product and vectors, that behind the activation, and the rest in the scratch."""
    dot, norms = kept.dot, kept.norms
    grad_d, of_vectors, behind, scratch = results
    activation, follows, slope, count = o.activation, o.follows != ALONE, o.activation == 2, float(how.count)
    pieces = [*pieces, (scratch, how.norms_at), (scratch, how.reduced_at), (of_vectors, norm_at(t, o))]
    if follows:
        flags = GradientFlags(affine=True, residual=behind is not None, activation=activation, reduce=True, centred=False, slope=slope)
        launcher = how.launcher("backward", flags)
        launcher((dot, norms, e, either(out, dot), dot, either(behind, dot), *tensors), (*pieces, (scratch, how.reduced_at)), count)
        if behind is not None:
            e, activation = behind, 0
    sums = (scratch, how.sums_at)
    flags = GradientFlags(affine=follows, residual=False, activation=activation, reduce=False, centred=o.follows == STATISTICS, slope=slope)
    launcher = how.launcher("backward", flags)
    launcher((dot, norms, e, dot, grad_d, dot, *tensors), (*pieces, sums), count)
    if how.rows:
        how.launcher("vector_gradients")(tensors[:1], (sums, pieces[2], (of_vectors, 0), (scratch, how.mean_at)))


def _factor_backward(t: Operands, w_norm: Tensor, of_vectors: Tensor, o: Options) -> Tensor:
    """The gradient in ‖w‖ of the factor, α·h₁(‖w‖); those in ρ and the learned parameters are added to theirs."""
    operator = operator_named(o.magnitude, o.angular, o.weighting)
    rows = of_vectors[: vector_rows(t, o) * len(w_norm)].view(-1, len(w_norm))
    e = rows[0] * operator.magnitude.value("alpha", 1.0)
    _, of_norm, *slopes = operator.magnitude_one(w_norm, *rho_and_learned(t, o))
    if t.radius is not None:
        rows[1] += e * slopes.pop(0)
    first = len(rows) - len(operator.learned)
    for name, slope in zip(operator.magnitude.formula.learnable, slopes, strict=True):
        if name in operator.magnitude.learned:
            rows[first + operator.magnitude.learned.index(name)] += e * slope
    return e * of_norm


def _convolution_backward(
    e: Tensor,
    scratch: Tensor,
    e_w_norm: Piece | None,
    t: Operands,
    kept: Kept,
    o: Options,
    how: Plan,
    plan: launch.NormPlan,
    want_x: bool,
    want_weight: bool,
    products: Piece,
    add: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients in x and in the weight; those of norms and mean are in the scratch, what multiplies x goes into `products`."""
    if not o.stride:
        grad_x = e @ kept.unit if want_x else None
        grad_unit = e.t() @ t.x if want_weight else None
    else:
        shape = (o.stride, o.padding, o.dilation, False, [0] * len(o.stride), o.groups)
        grad_x, grad_unit, _ = torch.ops.aten.convolution_backward.default(e, t.x, kept.unit, None, *shape, (want_x, want_weight, False))
    if grad_x is not None and t.x.numel() and kept.norms.numel():
        of_mean: Piece | None = (scratch, how.mean_at) if o.mean_kind in (OF_BATCH, OF_RANKS) else None
        parts, share = how.mean_parts if of_mean else 0, 1.0 / plan.count
        if o.mean_kind == OF_RANKS:
            of_mean, parts, share = (_over_ranks(scratch, t, kept, o, how), 0), 1, 1.0
        launch.patch_norms_backward((scratch, how.norms_at), how.kernel_blocks, of_mean, parts, share, kept.norms, plan, products)
        grad_x = launch.like(grad_x, t.x)
        if add:
            plan.launcher("of_product")((grad_x, t.x), (products,))
    elif grad_x is not None and o.mean_kind == OF_RANKS:
        _over_ranks(scratch, t, kept, o, how)  # the other ranks are waiting
    if grad_x is not None and not kept.norms.numel() and not add:
        products[0].zero_()
    return grad_x, None if grad_unit is None else launch.unit_kernel_backward(t.weight, (kept.vectors, 0), grad_unit, e_w_norm)


def _over_ranks(scratch: Tensor, t: Operands, kept: Kept, o: Options, how: Plan) -> Tensor:
    """What every norm of every rank gets of the gradient of E{‖x‖}: (groups,)."""
    of_mean = scratch[how.mean_at : how.mean_at + o.groups * how.mean_parts].view(o.groups, -1).sum(1)
    if distributed():
        dist.all_reduce(of_mean)
    return of_mean / kept.vectors[places_of(t, o).mean + o.groups]


def operand_gradients(gradients: Gradients, e: Tensor, t: Operands, o: Options, wanted: Sequence[bool]) -> Operands:
    """The gradients by operand, None for those that are not wanted."""
    want = Operands(*wanted)  # type: ignore[arg-type]
    kernels, row = t.weight.shape[0], int(bool(o.weighting))

    def rows(first: int, count: int = 1) -> Tensor:
        return gradients.vectors[first * kernels : (first + count) * kernels]

    radius = rows(row) if want.radius else None
    row += t.radius is not None
    bias = rows(row) if want.bias else None
    row += t.bias is not None
    learned = rows(row, t.learned.shape[0]).view_as(t.learned) if want.learned and t.learned is not None else None
    start = norm_at(t, o)
    of_norm = [
        gradients.vectors[start + i * kernels : start + (i + 1) * kernels] if wants else None
        for i, wants in enumerate((want.beta, want.gamma, want.slope))
    ]
    beta, gamma, slope = of_norm
    of_mean = gradients.mean.view(o.groups, -1).sum(1) if want.mean_norm and gradients.mean is not None else None
    residual = (gradients.residual if o.activation != 0 else e) if want.residual else None
    return Operands(gradients.x, gradients.weight, bias, radius, of_mean, learned, gamma, beta, None, None, residual, slope)  # type: ignore[arg-type]
