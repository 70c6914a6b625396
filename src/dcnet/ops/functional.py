"""The stateless decoupled operators, and the choice of an implementation."""

from collections.abc import Callable, Mapping
from numbers import Real

import torch
from torch import Tensor

from dcnet.formulas import LEARNED, Choice, Formula
from dcnet.ops.dispatch import decouple_by
from dcnet.ops.geometry import Geometry, Sizes, geometry
from dcnet.ops.inputs import Inputs, LearnedRadius, MeanNorm
from dcnet.ops.mean_norm import BatchMean
from dcnet.ops.norms import EPS, check_eps, check_input, recorded_by_jit
from dcnet.ops.operator import Operator, make_operator
from dcnet.ops.post_ops import Finish
from dcnet.util.suggest import nearest

LINEAR = Geometry((), (), (), ())  # the patch of a linear layer is its input vector
Spec = str | Formula | Choice
Radius = float | Tensor | None


def _convolution(dims: int, doc: str) -> Callable[..., Tensor]:
    """The public function over that many dimensions; the three differ in nothing else."""

    def decoupled_conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: str | Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        *,
        padding_mode: str = "zeros",
        magnitude: Spec = "tanh",
        angular: Spec = "cosine",
        weighting: str | None = None,
        radius: Radius = None,
        mean_norm: Tensor | str | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        eps: float = EPS,
        impl: str = "auto",
    ) -> Tensor:
        _check_weight(x, weight, dims)
        where = geometry(tuple(weight.shape[2:]), stride, padding, dilation, groups, padding_mode, dims)
        return _stateless(
            x,
            weight,
            bias,
            where,
            make_operator(magnitude, angular, weighting),
            radius,
            mean_norm,
            parameters,
            eps,
            impl,
        )

    decoupled_conv.__name__ = decoupled_conv.__qualname__ = f"decoupled_conv{dims}d"
    decoupled_conv.__doc__ = doc
    return decoupled_conv


decoupled_conv1d = _convolution(
    1, "h(‖w‖, ‖x‖)·g(θ) for x (N, C, L) or (C, L): what `F.conv1d` gives in shape and dtype. See `decoupled_conv2d`."
)
decoupled_conv2d = _convolution(
    2,
    """h(‖w‖, ‖x‖)·g(θ) for x (N, C, H, W) or (C, H, W): what `F.conv2d` gives in shape and dtype.

    radius: a number, or a tensor (out_channels,); 1 where the magnitude has a radius and none is given.
    mean_norm: what multiplies the radius. None (the literal radius), "batch" (the mean patch norm of this batch, one per
        group, with gradient), or a tensor (groups,). It has no effect on a magnitude without a radius.
    parameters: learned parameters such as k by name, each a tensor (out_channels,).
    impl: "auto", or one of "reference" (slow, obvious), "eager" (PyTorch's operators) and "fused" (Triton kernels on CUDA,
        which have no second derivatives).

    >>> x, w = torch.randn(2, 3, 8, 8), torch.randn(16, 3, 3, 3)
    >>> decoupled_conv2d(x, w, padding=1, magnitude="ball", angular="sigmoid:k=0.5", radius=2.0).shape
    torch.Size([2, 16, 8, 8])
    """,
)
decoupled_conv3d = _convolution(
    3,
    "h(‖w‖, ‖x‖)·g(θ) for x (N, C, D, H, W) or (C, D, H, W): what `F.conv3d` gives in shape and dtype. See `decoupled_conv2d`.",
)


def decoupled_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    magnitude: Spec = "tanh",
    angular: Spec = "cosine",
    weighting: str | None = None,
    radius: Radius = None,
    mean_norm: Tensor | str | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    eps: float = EPS,
    impl: str = "auto",
) -> Tensor:
    """h(‖w‖, ‖x‖)·g(θ) for x (…, in_features): (…, out_features). See `decoupled_conv2d`."""
    _check_weight(x, weight, 0)
    return _stateless(
        x, weight, bias, LINEAR, make_operator(magnitude, angular, weighting), radius, mean_norm, parameters, eps, impl
    )


def _check_weight(x: Tensor, weight: Tensor, dims: int) -> None:
    check_input(x, "input")
    check_input(weight, "weight")
    if weight.dim() != 2 + dims:
        expected = (
            "(out_features, in_features)"
            if dims == 0
            else f"(out_channels, in_channels / groups, *kernel_size), {2 + dims} dimensions"
        )
        raise ValueError(f"weight must be {expected}, got the shape {tuple(weight.shape)}")


def _stateless(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    where: Geometry,
    operator: Operator,
    radius: Radius,
    mean_norm: Tensor | str | None,
    parameters: Mapping[str, Tensor] | None,
    eps: float,
    impl: str,
) -> Tensor:
    """Checks what a layer has checked at its construction, then decouples."""
    check_eps(eps)
    if bias is not None:
        check_input(bias, "bias")
        if tuple(bias.shape) != (weight.shape[0],):
            raise ValueError(
                f"bias must have the shape ({weight.shape[0]},), one for each kernel, got {tuple(bias.shape)}"
            )
    operator = _with_parameters(operator, parameters or {}, weight.shape[0])
    mean: MeanNorm
    if isinstance(mean_norm, str):
        if mean_norm != "batch":
            raise ValueError(
                f"unknown mean_norm {mean_norm!r}; possible: None, 'batch', or a tensor of shape ({where.groups},)"
            )
        mean = BatchMean()
    else:
        mean = mean_norm
        if mean is not None and (not isinstance(mean, Tensor) or tuple(mean.shape) != (where.groups,)):
            got = tuple(mean.shape) if isinstance(mean, Tensor) else repr(mean)
            raise ValueError(f"mean_norm must be a tensor of shape ({where.groups},), one for each group, got {got}")
    rho = check_radius(operator, radius, weight)
    return decouple(x, weight, bias, where, operator, rho, mean, parameters or {}, eps, impl)


def check_radius(operator: Operator, radius: Radius, weight: Tensor) -> Tensor | None:
    """The radius as a tensor (out_channels,), None for a magnitude without one; raises for a radius that cannot be."""
    name = operator.magnitude.name
    if not operator.magnitude.formula.has_radius:
        if radius is not None:
            raise ValueError(f"radius={radius!r}: the magnitude {name!r} has no radius")
        return None
    if isinstance(radius, Tensor) and radius.dim() > 0:
        if tuple(radius.shape) != (weight.shape[0],):
            raise ValueError(
                f"radius must be a number or have the shape ({weight.shape[0]},), one for each kernel, got {tuple(radius.shape)}"
            )
        return radius
    if isinstance(radius, Tensor):
        return radius.expand(weight.shape[0])
    number = 1.0 if radius is None else radius
    check_literal_radius(number)
    return torch.full(
        (weight.shape[0],), float(number), device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32)
    )


def check_literal_radius(radius: object) -> None:
    """Raises unless the number may be an operator radius."""
    if not isinstance(radius, Real) or isinstance(radius, bool) or not 0.0 < float(radius) < float("inf"):
        raise ValueError(f"radius must be a finite number > 0, or 'learned' in a layer, got {radius!r}")


def _with_parameters(operator: Operator, parameters: Mapping[str, Tensor], out_channels: int) -> Operator:
    """The operator with every parameter that comes as a tensor marked as learned."""
    learnable = {name: kind for kind in ("magnitude", "angular") for name in getattr(operator, kind).formula.learnable}
    for name, value in parameters.items():
        if name not in learnable:
            raise ValueError(
                f"parameters[{name!r}]: neither {operator.magnitude.name!r} nor {operator.angular.name!r} can learn it."
                f"{nearest(name, learnable)} Learnable here: {', '.join(learnable) or 'none'}",
            )
        if not isinstance(value, Tensor) or tuple(value.shape) != (out_channels,):
            got = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"parameters[{name!r}] must be a tensor of shape ({out_channels},), one for each kernel, got {got}"
            )
    missing = [name for name in operator.learned if name not in parameters]
    if missing:
        raise ValueError(
            f"{missing[0]}={LEARNED}: give its values as parameters={{{missing[0]!r}: a tensor of shape ({out_channels},)}}"
        )
    new = [name for name in parameters if name not in operator.learned]
    if not new:
        return operator

    def learning(choice: Choice) -> Choice:
        mine = tuple(name for name in choice.formula.learnable if name in parameters)
        return Choice(choice.formula, tuple((k, v) for k, v in choice.values if k not in mine), mine)

    return Operator(learning(operator.magnitude), learning(operator.angular), operator.weighting)


def decouple(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    where: Geometry,
    operator: Operator,
    radius: Tensor | LearnedRadius | None,
    mean_norm: MeanNorm,
    learned: Mapping[str, Tensor],
    eps: float,
    impl: str,
    finish: Finish | None = None,
) -> Tensor:
    """The decoupled convolution (or, over no dimensions, linear map), finished, by the implementation asked for."""
    if where.dims == 0 and x.dim() == 0:
        raise ValueError("input must be (…, in_features), got a single number")
    if where.dims == 0:
        flat, lead = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x, x.shape[:-1]
    else:
        if x.dim() not in (where.dims + 1, where.dims + 2):
            raise ValueError(
                f"input must have {where.dims + 1} (unbatched) or {where.dims + 2} dimensions, got the shape {tuple(x.shape)}"
            )
        flat = x if x.dim() == where.dims + 2 else x.unsqueeze(0)
    if not recorded_by_jit():  # the convolution checks its sizes itself, though it says less
        _check_sizes(x, flat, weight, where)
    out = decouple_by(impl, Inputs(flat, weight, bias, where, operator, radius, mean_norm, learned, eps, finish))
    if where.dims == 0:
        return out.reshape(*lead, out.shape[1]) if x.dim() != 2 else out
    return out if flat is x else out.squeeze(0)


def _check_sizes(x: Tensor, flat: Tensor, weight: Tensor, where: Geometry) -> None:
    """Raise where the input, or the groups, do not fit the kernels."""
    expected = weight.shape[1] * where.groups
    if flat.shape[1] != expected:
        what = "features" if where.dims == 0 else "channels"
        raise ValueError(f"input has {flat.shape[1]} {what}, the layer expects {expected} (shape {tuple(x.shape)})")
    if weight.shape[0] % where.groups:
        raise ValueError(f"groups={where.groups} does not divide the {weight.shape[0]} kernels of the weight")
    where.check_fits(flat.shape[2:])
