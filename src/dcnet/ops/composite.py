"""Decoupling by ordinary PyTorch operations, which torch.compile, function transforms, forward mode and fx can follow.

It has three steps: a convolution with the normalized kernels, a box sum of x², and h·g on the output. `cpu/` has the
same steps as autograd functions, which make fewer passes over memory.
"""

import torch
from torch import Tensor

from dcnet.ops import norms
from dcnet.ops.geometry import Geometry, convolve
from dcnet.ops.inputs import Inputs
from dcnet.ops.operator import Operator


class Composite:
    """`impl="eager"`: the algorithm, and its steps by ordinary operations."""

    def decouple(self, inputs: Inputs) -> Tensor:
        """Return h(‖w‖, ‖x‖)·g(θ) for every patch and kernel, after its post-ops: (N, out_channels, …)."""
        operator, geometry, post_ops = inputs.operator, inputs.geometry, inputs.post_ops
        if operator.is_inner_product:
            y = convolve(inputs.x, self.inner_product_kernel(inputs), inputs.bias, geometry)
            return y if post_ops is None else post_ops.apply(y)
        relu = post_ops is not None and post_ops.is_relu
        y = self.map(inputs, relu)
        return y if post_ops is None or relu else post_ops.apply(y)

    def map(self, inputs: Inputs, relu: bool) -> Tensor:
        """Return h(‖w‖, ‖x‖)·g(θ), or with `relu` the maximum of that and 0."""
        # Kernels are normalized before the convolution. A large kernel then cannot make the dot product of a bounded
        # operator overflow, and the gradient of ‖w‖ costs a pass over w instead of one over the output.
        unit, w_norm = self.unit_kernel(inputs.weight, inputs.eps)
        dot, norm_map = self.dot_and_norms(inputs, unit, w_norm)
        vectors = self.vectors(inputs, w_norm, norm_map)
        return self.epilogue(dot, norm_map, inputs.operator, vectors, inputs.eps, inputs.geometry.groups, relu)

    @staticmethod
    def vectors(inputs: Inputs, w_norm: Tensor, norm_map: Tensor) -> tuple[Tensor | None, ...]:
        """Return what `epilogue` needs of every kernel: s, t, ρ, b and the learned parameters."""
        operator = inputs.operator
        rho, radius = inputs.radii(norm_map)
        factor = operator.kernel_factor(w_norm, rho, inputs.learned)
        gain = w_norm if operator.weighting == "joint" else None
        return factor, gain, radius, inputs.bias, *(inputs.learned[name] for name in operator.learned)

    def inner_product_kernel(self, inputs: Inputs) -> Tensor:
        """Return the kernel with which a plain convolution is LinearConv with cosine; each weighting keeps ‖w‖."""
        weight, alpha = inputs.weight, inputs.operator.magnitude.value("alpha", 1.0)
        if inputs.operator.weighting is None:
            weight, _ = self.unit_kernel(weight, inputs.eps)
        return weight if alpha == 1.0 else (weight.to(norms.compute_dtype(weight)) * alpha).to(weight.dtype)

    def unit_kernel(self, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return w/‖w‖ in the dtype of w, and ‖w‖ (out_channels,)."""
        w_norm = norms.kernel_norm(weight, eps)
        return norms.normalized(weight, norms.inverse(w_norm, eps)), w_norm

    def norm_map(self, x: Tensor, geometry: Geometry, eps: float) -> Tensor:
        """Return ‖x‖ of every patch and group: (N, groups, …).

        The small map of Σx² is padded instead of x, with the same result: padding copies or mirrors positions.
        """
        return norms.root(norms.box_sum(norms.sum_of_squares(x, geometry.groups), geometry), eps)

    def dot_and_norms(self, inputs: Inputs, unit: Tensor, w_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Return ⟨w, x⟩/‖w‖ of every patch and kernel, and ‖x‖ (N, groups, …) of every patch."""
        x, geometry = inputs.x, inputs.geometry
        return convolve(x, unit, None, geometry), self.norm_map(x, geometry, inputs.eps)

    @staticmethod
    def epilogue(
        dot: Tensor,
        norm_map: Tensor,
        operator: Operator,
        vectors: tuple[Tensor | None, ...],
        eps: float,
        groups: int,
        relu: bool,
    ) -> Tensor:
        """Return s·h(t·‖x‖, ρ)·g(θ) + b in the shape, dtype and memory format of the dot product.

        vectors: s, t, ρ, b and the learned parameters in the order of `operator.learned`, each (out_channels,) or None.
        relu: return the maximum of that and 0.
        """
        # do not reshape maps: torch.compile cannot follow that when sizes are unknown
        channels, ones = dot.shape[1], [1] * (dot.dim() - 2)
        n = norm_map if groups == 1 else norm_map.repeat_interleave(channels // groups, 1)
        values = [None if v is None else v.to(n.dtype).reshape(channels, *ones) for v in vectors]
        cosine = (dot * norms.inverse(n, eps)).clamp(-1.0, 1.0)
        y = operator.value(cosine, n, *values).to(dot.dtype)
        return torch.relu(y) if relu else y
