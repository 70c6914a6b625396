"""`impl="fused"`: prepare the operands of the fused operator, which may include BatchNorm, residual and activation."""

from functools import lru_cache

import torch
from torch import Tensor

from dcnet.ops.activations import ACTIVATIONS
from dcnet.ops.composite import Composite
from dcnet.ops.fused.autograd import decoupled, unit_kernel
from dcnet.ops.fused.host import HOST
from dcnet.ops.fused.layout import dense, energy_maps, on_device
from dcnet.ops.fused.operands import (
    ALONE,
    AVERAGES,
    GIVEN,
    NO_MEAN,
    OF_BATCH,
    OF_RANKS,
    STATISTICS,
    Effects,
    Operands,
    Options,
    Results,
    is_depthwise,
)
from dcnet.ops.geometry import Geometry, convolution_dtype, convolve
from dcnet.ops.inputs import Inputs, LearnedRadius
from dcnet.ops.mean_norm import BatchMean
from dcnet.ops.operator import Operator
from dcnet.ops.post_ops import NOTHING, PostOps


def decouple(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Return h(‖w‖, ‖x‖)·g(θ) after its post-ops, (N, out_channels, …), and its energy.

    The energy is None where it is not wanted, or where it would not pay.
    """
    post_ops = inputs.post_ops
    if inputs.operator.is_inner_product:
        y = convolve(inputs.x, _inner_product_kernel(inputs), inputs.bias, inputs.geometry)
        return y if post_ops is None else post_ops.apply(y), None
    if post_ops is None or inputs.x.shape[0] == 0 or not _share_a_pass(post_ops):
        y = _decouple(inputs, NOTHING).out
        return y if post_ops is None else post_ops.apply(y), None
    results = _decouple(inputs, post_ops)
    return results.out, results.energy


def _check_there_is_variance(x: Tensor, inputs: Inputs) -> None:
    """Raise as `F.batch_norm` does where a channel has one value only."""
    sizes = [1] if inputs.geometry.dims == 0 else inputs.geometry.output_sizes(inputs.x.shape[2:])
    if x.shape[0] == 1 and all(size == 1 for size in sizes):
        shape = (1, inputs.weight.shape[0], *sizes[: inputs.geometry.dims])
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {torch.Size(shape)}")


def _share_a_pass(post_ops: PostOps) -> bool:
    """Tell whether the kernels can run these post-ops.

    The sum with a residual is not stored. So the activation must be one whose gradient follows from the output: ReLU
    or none. Without BatchNorm there is no pass that could compute the gradient of PReLU's slope.
    """
    if post_ops.normalize:
        return post_ops.residual is None or post_ops.activation in (None, "relu")
    return post_ops.residual is None and post_ops.activation != "prelu"


def _inner_product_kernel(inputs: Inputs) -> Tensor:
    """Return the kernel whose plain convolution is the operator, in the dtype of the convolution."""
    operator = inputs.operator
    if operator.weighting is not None or operator.magnitude.value("alpha", 1.0) != 1.0 or torch.compiler.is_compiling():
        return _EAGER.inner_product_kernel(inputs)
    with on_device(inputs.x):
        return unit_kernel(inputs.weight, inputs.eps, convolution_dtype(inputs.x))


_EAGER = Composite()


def again(inputs: Inputs) -> tuple[Tensor, Tensor | None] | None:
    """Run the layer in C++ if its plan is registered there; otherwise return None.

    Inputs are not checked here: the lookup key covers everything the checks would check.
    """
    native, post_ops, x = HOST.module, inputs.post_ops, inputs.x
    if native is None or inputs.geometry.symmetric_padding is None:
        return None
    dtype = convolution_dtype(x)
    if x.dtype != dtype:
        x = x.to(dtype)
    if post_ops is not None and not _share_a_pass(post_ops):
        return None
    return native.run(*_call(inputs, x, inputs.weight, post_ops or NOTHING))


def _decouple(inputs: Inputs, post_ops: PostOps) -> Results:
    """Bring the operands into the form that the operator takes, and call it; running averages are updated."""
    x, dtype = inputs.x, convolution_dtype(inputs.x)
    if x.dtype != dtype:
        x = x.to(dtype)
    if inputs.geometry.symmetric_padding is None:
        x = inputs.geometry.pad(x)
    if post_ops.normalize and post_ops.training:
        _check_there_is_variance(x, inputs)
    options, t, effects = _call(inputs, dense(x), dense(inputs.weight), post_ops)
    t = t._replace(bias=_dense(t.bias), radius=_dense(t.radius), gamma=_dense(t.gamma), beta=_dense(t.beta))
    return decoupled(t, options, effects)


def _call(inputs: Inputs, x: Tensor, weight: Tensor, post_ops: PostOps) -> tuple[Options, Operands, Effects]:
    """Return the arguments of the fused operator, given x and the weight in the form that it takes."""
    operator, geometry = inputs.operator, inputs.geometry
    radius, radius_kind = (inputs.radius.raw, 2) if isinstance(inputs.radius, LearnedRadius) else (inputs.radius, 1)
    if operator.weighting == "separate":  # ρ is also needed outside the kernels
        radius, radius_kind = inputs.rho, 1
    given = tracked = None
    mean_kind = NO_MEAN
    if radius is not None and isinstance(inputs.mean_norm, BatchMean):
        mean_kind, tracked = OF_RANKS if inputs.mean_norm.sync else OF_BATCH, inputs.mean_norm
    elif radius is not None and isinstance(inputs.mean_norm, Tensor):
        mean_kind, given = GIVEN, inputs.mean_norm.float().contiguous()
    learned = torch.stack([inputs.learned[name].float() for name in operator.learned]) if operator.learned else None

    energy = inputs.energy if x is inputs.x and geometry.groups == 1 else None  # valid for this very tensor only
    if energy is not None and energy.requires_grad != x.requires_grad:
        energy = None  # x gets its gradients in another way, as in the first forward pass of a checkpoint
    kernels, follows = weight.shape[0], _follows(post_ops)
    shares = post_ops.normalize or post_ops.activation is not None
    leaves = inputs.leave_energy and shares and energy_maps(kernels, geometry.groups) > 0
    compiling = torch.compiler.is_compiling()
    # a graph's operators may not return a tensor twice; a depthwise layer keeps nothing anyway
    recovers = post_ops.is_relu and inputs.bias is None and operator.is_cosine and not compiling
    recovers = recovers and not is_depthwise(x, weight, geometry.groups)
    residual, slope = post_ops.residual, post_ops.slope
    if residual is not None and residual.dtype != x.dtype:
        residual = residual.to(x.dtype)
    if slope is not None and slope.shape[0] != kernels:
        slope = slope.expand(kernels).contiguous()
    make = _options if compiling else _known_options
    after = follows, post_ops.eps, post_ops.activation, leaves, recovers
    options = make(geometry, inputs.eps, radius_kind, mean_kind, *after, operator)
    operands = Operands(
        x,
        weight,
        inputs.bias,
        radius,
        given,
        learned,
        post_ops.gamma,
        post_ops.beta,
        post_ops.running_mean,
        post_ops.running_var,
        residual,
        slope,
        energy,
    )
    moves = follows == STATISTICS and post_ops.running_mean is not None and post_ops.running_var is not None
    effects = Effects(tracked, post_ops.momentum, post_ops.batches) if moves else Effects(tracked)
    return options, operands, effects


def _follows(post_ops: PostOps) -> int:
    if not post_ops.normalize:
        return ALONE
    return STATISTICS if post_ops.training else AVERAGES


def _options(
    geometry: Geometry,
    eps: float,
    radius_kind: int,
    mean_kind: int,
    follows: int,
    norm_eps: float,
    activation: str | None,
    leaves: bool,
    recovers: bool,
    operator: Operator,
) -> Options:
    padding = geometry.symmetric_padding
    return Options(
        stride=geometry.stride,
        padding=(0,) * geometry.dims if padding is None else padding,
        dilation=geometry.dilation,
        groups=geometry.groups,
        eps=eps,
        radius_kind=radius_kind,
        mean_kind=mean_kind,
        follows=follows,
        norm_eps=norm_eps,
        activation=ACTIVATIONS.index(activation),
        leaves=leaves,
        recovers=recovers,
        operator=operator,
    )


# Cached, since C++ looks up options by identity; while torch.compile traces, the function itself is called.
_known_options = lru_cache(4096)(_options)


def _dense(vector: Tensor | None) -> Tensor | None:
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()
