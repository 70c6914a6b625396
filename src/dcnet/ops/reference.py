"""The meaning of a decoupled operator, as plainly as it can be written. Slow on purpose; gradients by autograd."""

import torch
from torch import Tensor

from dcnet.ops.inputs import Inputs
from dcnet.ops.norms import compute_dtype, inverse, kernel_norm, root


def patches_of(x: Tensor, inputs: Inputs) -> Tensor:
    """Return every patch of every group: (N, groups, channels per group, *positions, *kernel_size)."""
    geometry = inputs.geometry
    windows = geometry.pad(x)
    for i, (size, step, dilation) in enumerate(
        zip(geometry.kernel_size, geometry.stride, geometry.dilation, strict=True)
    ):
        windows = windows.unfold(2 + i, dilation * (size - 1) + 1, step)[..., ::dilation]
    return windows.unflatten(1, (geometry.groups, -1))


def decouple(inputs: Inputs) -> Tensor:
    """Return h(‖w‖, ‖x‖)·g(θ) for every patch and kernel: (N, out_channels, *positions)."""
    operator, geometry, weight = inputs.operator, inputs.geometry, inputs.weight
    positions = (1,) * geometry.dims
    patches = patches_of(inputs.x, inputs)
    patches = patches.movedim(2, 1 + 1 + geometry.dims).flatten(2 + geometry.dims)  # (N, groups, *positions, patch)
    exact = compute_dtype(patches)

    def per_kernel(v: Tensor) -> Tensor:
        return v.to(exact).reshape(1, geometry.groups, -1, *positions)

    w_norm = kernel_norm(weight, inputs.eps)
    unit = weight.to(exact).flatten(1) * inverse(w_norm, inputs.eps).unsqueeze(1)
    unit = unit.to(weight.dtype).unflatten(0, (geometry.groups, -1))  # (groups, kernels, patch)
    dot = torch.einsum("ng...i,gki->ngk...", patches, unit)
    n = root(patches.to(exact).square().sum(-1), inputs.eps).unsqueeze(2)

    c = (dot.to(exact) * inverse(n, inputs.eps)).clamp(-1.0, 1.0)
    rho, radius = inputs.radii(n.squeeze(2))
    learned = {name: per_kernel(value) for name, value in inputs.learned.items()}
    bent = n * per_kernel(w_norm) if operator.weighting == "joint" else n
    h = operator.patch_magnitude(bent, None if radius is None else per_kernel(radius), learned)[0]
    factor = operator.kernel_factor(per_kernel(w_norm), None if rho is None else per_kernel(rho), learned)
    if factor is not None:
        h = factor * h
    out = h * operator.angle(c, learned)[0]
    if inputs.bias is not None:
        out = out + per_kernel(inputs.bias)
    return out.to(dot.dtype).flatten(1, 2)
