"""A decoupled layer in evaluation: one convolution, one map of norms, and a recorded epilogue.

Nothing is trained, and all constants are computed once.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dcnet.layers.decoupled import Decoupled
from dcnet.layers.own_arithmetic import DecoupledConv2dSame
from dcnet.layers.recording import Vectors, degree_in_dot, record_epilogue, takes_inverse
from dcnet.ops import Geometry, compute_dtype, convolve, kernel_norm
from dcnet.util.compat import BatchNorm


class Inference(nn.Module):
    """A decoupled layer in evaluation, made of plain PyTorch operations only, for exporters and other compilers.

    The kernels are normalized once; ρ·E{‖x‖} and everything else that belongs to a kernel are constants. Norms are
    computed in float32 at least, in a half-precision model too. `fold_` adds a BatchNorm after the layer.
    """

    def __init__(self, layer: Decoupled) -> None:
        super().__init__()
        if layer.operator.is_inner_product:
            raise ValueError("this layer is a plain convolution; dcnet.couple_ makes it one")
        self.geometry = layer._geometry()
        self.operator, self.eps = layer.operator, layer.eps
        self.prepare = layer.prepare_input if isinstance(layer, DecoupledConv2dSame) and layer.same_pad else None
        with torch.no_grad():
            exact = layer.effective_weight.detach().to(compute_dtype(layer.weight))
            norm = kernel_norm(exact, layer.eps)
            inverse = torch.where(norm > 0.0, 1.0 / norm, 0.0)
            self.unit = exact * inverse.reshape(-1, *[1] * (exact.dim() - 1))
            self.vectors = _vectors(layer, norm)
        self.weight = nn.Parameter(self.unit.to(layer.weight.dtype, copy=True), requires_grad=False)
        self.bias = None  # in the epilogue
        self._sums()
        self._record(layer.weight.dtype)
        self.train(layer.training)

    def fold_(self, norm: nn.Module) -> "Inference":
        """Take a BatchNorm in evaluation into the epilogue: y → y·γ/sqrt(var + eps) + β − mean·γ/sqrt(var + eps)."""
        assert isinstance(norm, BatchNorm)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        exact = self.unit.dtype
        scale = (norm.running_var.to(exact) + norm.eps).rsqrt()
        if norm.weight is not None:
            scale = scale * norm.weight.detach().to(exact)
        shift = -norm.running_mean.to(exact) * scale
        if norm.bias is not None:
            shift = shift + norm.bias.detach().to(exact)
        old = self.vectors
        self.vectors = old._replace(
            factor=scale if old.factor is None else old.factor * scale,
            bias=shift if old.bias is None else old.bias * scale + shift,
        )
        self._record(self.weight.dtype)
        return self

    def _record(self, dtype: torch.dtype) -> None:
        """Record the epilogue. If the output is a power of the dot product, put its factor into the kernels."""
        vectors, kernel, degree = self.vectors, self.unit, degree_in_dot(self.operator)
        if vectors.factor is not None and degree is not None:
            root = vectors.factor.sign() * vectors.factor.abs() ** (1.0 / degree)
            kernel = kernel * root.reshape(-1, *[1] * (kernel.dim() - 1))
            vectors = vectors._replace(factor=None)
        with torch.no_grad():
            self.weight.copy_(kernel.to(dtype))
        self.inverse = takes_inverse(self.operator, vectors, self.eps, self.geometry.groups)
        self.epilogue = record_epilogue(self.operator, vectors, self.geometry.dims, self.eps, self.inverse)

    def _sums(self) -> None:
        """Make kernels of ones, which sum squares over the channels of a group and over the window of a patch."""
        where, like = self.geometry, self.unit
        channels, groups, ones = self.weight.shape[1], where.groups, (1,) * where.dims
        pointwise = where.is_pointwise
        self.channel_sum: Tensor | None
        self.window: Tensor | None
        self.window_bias: Tensor | None
        self.group_of: Tensor | None
        # for one group a plain sum is enough, and with one channel there is nothing to sum
        sums = like.new_ones(groups, channels, *ones) if groups > 1 and channels > 1 else None
        self.register_buffer("channel_sum", sums, persistent=False)
        window = None if pointwise else like.new_ones(groups, 1, *where.kernel_size)
        self.register_buffer("window", window, persistent=False)
        # eps is added at no cost as the bias of the window's sum
        bias = None if window is None or not self.eps else like.new_full((groups,), self.eps)
        self.register_buffer("window_bias", bias, persistent=False)
        kernels = self.weight.shape[0] // groups
        of = torch.arange(groups, device=like.device).repeat_interleave(kernels)
        self.register_buffer("group_of", of if groups > 1 and kernels > 1 else None, persistent=False)

    def norms(self, x: Tensor) -> Tensor:
        """Return ‖x‖ of every patch, or 1/‖x‖ if `self.inverse`: (N, 1, …), or (N, out_channels, …) with groups."""
        where, dim = self.geometry, -1 - self.geometry.dims
        exact = x.to(self.unit.dtype)
        squares = exact * exact
        if where.groups == 1 and self.weight.shape[1] > 1:
            squares = squares.sum(dim, keepdim=True)
        elif self.channel_sum is not None:
            squares = convolve(squares, self.channel_sum, None, _pointwise(where))
        if self.window is None:
            squares = where.pad(squares)
            squares = squares + self.eps if self.eps else squares
        else:
            squares = convolve(squares, self.window, self.window_bias, where)
        norm = squares.pow(-0.5) if self.inverse else squares.sqrt()  # one operation of ONNX, where rsqrt is two
        return norm if self.group_of is None else norm.index_select(dim, self.group_of)

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's result in evaluation, after the BatchNorm that was folded in, if any."""
        x = input if self.prepare is None else self.prepare(input)
        dot, norm = convolve(x, self.weight, None, self.geometry), self.norms(x)
        return self.epilogue(dot.to(norm.dtype), norm).to(dot.dtype)  # type: ignore[no-any-return]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Do what nn.Module does, but let only the kernels become half precision."""
        exact = {
            (module, name): buffer
            for module in (self, self.epilogue)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        }
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for (module, name), old in exact.items():
            new = getattr(module, name)
            if new.dtype in (torch.float16, torch.bfloat16):
                setattr(module, name, old.to(new.device))
        self.unit = self.unit.to(self.weight.device)
        return self

    def extra_repr(self) -> str:
        where = self.geometry
        kernel = "×".join(map(str, where.kernel_size)) or "linear"
        return f"{kernel}, magnitude={str(self.operator.magnitude)!r}, angular={str(self.operator.angular)!r}"


def _pointwise(where: Geometry) -> Geometry:
    """Return the geometry of 1×1 kernels with the same groups."""
    return Geometry((1,) * where.dims, (1,) * where.dims, ((0, 0),) * where.dims, (1,) * where.dims, where.groups)


def _vectors(layer: Decoupled, norm: Tensor) -> Vectors:
    """Return the vectors of a layer in evaluation, as the layer itself would compute them."""
    operator, learned = layer.operator, {name: v.detach() for name, v in layer.learned_parameters.items()}
    rho = layer.effective_radius
    rho = radius = None if rho is None else rho.detach().to(norm.dtype)
    if rho is not None and layer.running_norm is not None:
        mean = layer.running_norm.to(norm.dtype).repeat_interleave(len(norm) // len(layer.running_norm))
        radius = rho * mean
        if layer.eps == 0.0:  # without eps, E = 0 for a group of zeros; any radius will do there
            radius = torch.where(radius > 0.0, radius, 1.0)
    return Vectors(
        factor=operator.kernel_factor(norm, rho, learned),
        gain=norm if operator.weighting == "joint" else None,
        radius=radius,
        bias=None if layer.bias is None else layer.bias.detach().to(norm.dtype),
        learned=learned,
    )
