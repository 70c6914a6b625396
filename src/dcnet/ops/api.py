"""The stateless decoupled operators, and the norm of patches."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from dcnet.formulas import LEARNED, Choice, Formula
from dcnet.ops import documentation
from dcnet.ops.checks import check_eps, check_input, check_literal_radius
from dcnet.ops.dispatch import decouple, eager
from dcnet.ops.geometry import LINEAR, Geometry, Sizes, make_geometry
from dcnet.ops.inputs import Inputs, MeanNorm
from dcnet.ops.mean_norm import BatchMean
from dcnet.ops.norms import EPS
from dcnet.ops.operator import Operator, make_operator
from dcnet.util.suggest import nearest

Spec = str | Formula | Choice
Radius = float | Tensor | None


class _Convolution(Protocol):
    """The signature of `decoupled_conv1d`, `2d` and `3d` for type checkers, which cannot infer it."""

    def __call__(
        self,
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
    ) -> Tensor: ...


def _convolution(dims: int) -> _Convolution:
    """Return the public function for this number of dimensions."""

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
        geometry = make_geometry(tuple(weight.shape[2:]), stride, padding, dilation, groups, padding_mode, dims)
        operator = make_operator(magnitude, angular, weighting)
        return _stateless(x, weight, bias, geometry, operator, radius, mean_norm, parameters, eps, impl)

    decoupled_conv.__name__ = decoupled_conv.__qualname__ = f"decoupled_conv{dims}d"
    decoupled_conv.__doc__ = documentation.conv(dims)
    return decoupled_conv


decoupled_conv1d, decoupled_conv2d, decoupled_conv3d = _convolution(1), _convolution(2), _convolution(3)


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
    _check_weight(x, weight, 0)
    operator = make_operator(magnitude, angular, weighting)
    return _stateless(x, weight, bias, LINEAR, operator, radius, mean_norm, parameters, eps, impl)


decoupled_linear.__doc__ = documentation.LINEAR


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
    geometry: Geometry,
    operator: Operator,
    radius: Radius,
    mean_norm: Tensor | str | None,
    parameters: Mapping[str, Tensor] | None,
    eps: float,
    impl: str,
) -> Tensor:
    """Check what a layer checks when it is constructed, then decouple."""
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
                f"unknown mean_norm {mean_norm!r}; possible: None, 'batch', or a tensor of shape ({geometry.groups},)"
            )
        mean = BatchMean()
    else:
        mean = mean_norm
        if mean is not None and (not isinstance(mean, Tensor) or tuple(mean.shape) != (geometry.groups,)):
            got = tuple(mean.shape) if isinstance(mean, Tensor) else repr(mean)
            raise ValueError(f"mean_norm must be a tensor of shape ({geometry.groups},), one for each group, got {got}")
    rho = check_radius(operator, radius, weight)
    return decouple(Inputs(x, weight, bias, geometry, operator, rho, mean, parameters or {}, eps), impl)[0]


def check_radius(operator: Operator, radius: Radius, weight: Tensor) -> Tensor | None:
    """Return the radius as a tensor (out_channels,), or None for a magnitude without one; raise if it is invalid."""
    name = operator.magnitude.name
    if not operator.magnitude.formula.has_radius:
        if radius is not None:
            raise ValueError(f"radius={radius!r}: the magnitude {name!r} has no radius")
        return None
    if isinstance(radius, Tensor) and radius.dim() > 0:
        if tuple(radius.shape) != (weight.shape[0],):
            shape = f"({weight.shape[0]},), one for each kernel"
            raise ValueError(f"radius must be a number or have the shape {shape}, got {tuple(radius.shape)}")
        return radius
    if isinstance(radius, Tensor):
        return radius.expand(weight.shape[0])
    number = 1.0 if radius is None else radius
    check_literal_radius(number)
    return torch.full(
        (weight.shape[0],), float(number), device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32)
    )


def _with_parameters(operator: Operator, parameters: Mapping[str, Tensor], out_channels: int) -> Operator:
    """Return the operator with every parameter that comes as a tensor marked as learned."""
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
            f"{missing[0]}={LEARNED}: give its values as "
            f"parameters={{{missing[0]!r}: a tensor of shape ({out_channels},)}}"
        )
    new = [name for name in parameters if name not in operator.learned]
    if not new:
        return operator

    def learning(choice: Choice) -> Choice:
        mine = tuple(name for name in choice.formula.learnable if name in parameters)
        return Choice(choice.formula, tuple((k, v) for k, v in choice.values if k not in mine), mine)

    return Operator(learning(operator.magnitude), learning(operator.angular), operator.weighting)


def patch_norm(
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    eps: float = EPS,
) -> Tensor:
    """Return the norm ‖x‖ of every patch x, sqrt(Σx² + eps), over one, two or three spatial dimensions.

    Args:
        x: the input, (N, C, L), (N, C, H, W) or (N, C, D, H, W). The first dimension is always the batch.
        kernel_size: of the patches, an int or one for each spatial dimension, as in `nn.Conv2d`.
        stride: an int or one for each spatial dimension.
        padding: an int or one for each spatial dimension, "same" or "valid".
        dilation: an int or one for each spatial dimension.
        groups: groups of channels whose norms are computed separately.
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        eps: added to the sum of squares.

    Shape:
        The output is (N, groups, …), with the spatial sizes that a convolution gives. It is float64 for a float64
        input, else float32.

    Examples:
        >>> import torch, dcnet
        >>> dcnet.patch_norm(torch.ones(1, 3, 4, 4), 2, eps=0.0).shape
        torch.Size([1, 1, 3, 3])

    References:
        Liu, Liu, Yu, Dai, Lin, Wang, Rehg, Song: Decoupled Networks. CVPR 2018. https://arxiv.org/abs/1804.08071
    """
    check_input(x, "input")
    check_eps(eps)
    if x.dim() not in (3, 4, 5):
        raise ValueError(
            f"input must be (N, C, …) with one to three spatial dimensions, got the shape {tuple(x.shape)}"
        )
    geometry = make_geometry(kernel_size, stride, padding, dilation, groups, padding_mode, x.dim() - 2)
    if x.shape[1] % groups:
        raise ValueError(f"groups={groups} does not divide the {x.shape[1]} channels of the input")
    geometry.check_fits(x.shape[2:])
    return eager().norm_map(x, geometry, eps)
