"""Penalties that make the kernels of unweighted layers orthogonal."""

from typing import Any

import torch
from torch import Tensor, nn

from dcnet.layers.optimization import constrained_layers
from dcnet.layers.selection import Selector, selected
from dcnet.layers.sharding import whole_kernels
from dcnet.ops import compute_dtype
from dcnet.util.compat import function_transform_active


def orthonormal_penalty(model: nn.Module, where: Selector = None) -> Tensor:
    """Return Σ ‖WᵀW − I‖²_F over the unweighted decoupled layers; the columns of W are the kernels of one group.

    Args:
        model: any model with decoupled layers.
        where: which layers, in the words of `decouple_`: a function `where(name, layer)`, a pattern of names such as
            "layer[1-4].*" or "!stem*", a preset such as "not-first", or a list of these; without it all that are
            unweighted.

    Returns:
        A scalar to add to the loss, times a small factor.

    Examples:
        >>> import torch, dcnet
        >>> layer = dcnet.DecoupledLinear(8, 4)
        >>> _ = torch.nn.init.orthogonal_(layer.weight)
        >>> bool(dcnet.orthonormal_penalty(layer) < 1e-9)
        True
    """
    return _penalty(model, where, keep_diagonal=True)


def orthogonal_penalty(model: nn.Module, where: Selector = None) -> Tensor:
    """Return Σ ‖WᵀW − diag(WᵀW)‖²_F over the unweighted decoupled layers: the kernels' orthogonality.

    The columns of W are the kernels of one group. Unlike `orthonormal_penalty` it leaves their norms alone.

    Args:
        model: any model with decoupled layers.
        where: which layers, in the words of `decouple_`: a function `where(name, layer)`, a pattern of names such as
            "layer[1-4].*" or "!stem*", a preset such as "not-first", or a list of these; without it all that are
            unweighted.

    Returns:
        A scalar to add to the loss, times a small factor; the paper takes 1e-5.

    Examples:
        >>> import torch, dcnet
        >>> model = dcnet.DecoupledConv2d(3, 8, 3)
        >>> penalty = 1e-5 * dcnet.orthogonal_penalty(model)
        >>> penalty.shape
        torch.Size([])
    """
    return _penalty(model, where, keep_diagonal=False)


def _penalty(model: nn.Module, where: Selector, keep_diagonal: bool) -> Tensor:
    unweighted = {name: layer for name, layer in constrained_layers(model).items() if layer.weighting is None}
    layers = selected(model, unweighted, where)
    if not layers:
        return torch.zeros((), device=next((p.device for p in model.parameters()), None))
    alike: dict[Any, list[Tensor]] = {}
    for name, layer in layers.items():
        kernels = whole_kernels(name, layer)
        if not kernels.is_contiguous():  # channels_last; products do not depend on the order, and this saves a copy
            kernels = kernels.movedim(1, -1)
        kernels = kernels.flatten(1).unflatten(0, (layer._kernels_and_groups()[1], -1))
        # a product in bf16 would lose the small off-diagonal entries
        kernels = kernels.to(compute_dtype(kernels))
        alike.setdefault((kernels.shape[1:], kernels.dtype, kernels.device), []).append(kernels)
    penalties = []
    for same in alike.values():
        for some in _parts(same):
            with torch.autocast(some[0].device.type, enabled=False):
                penalties.append(_off_target(some[0] if len(some) == 1 else torch.cat(some), keep_diagonal))
    return torch.stack([penalty.to(penalties[0]) for penalty in penalties]).sum()


def _parts(kernels: list[Tensor]) -> list[list[Tensor]]:
    """Return kernels of equal shape in parts whose products are computed together.

    A deep network has many small products, and one alone uses little of a GPU. A part is copied, so it must be small.
    """
    count = max(1, _TOGETHER // max(1, kernels[0].numel()))
    return [kernels[i : i + count] for i in range(0, len(kernels), count)]


_TOGETHER = 2**22  # elements


def _off_target(kernels: Tensor, keep_diagonal: bool) -> Tensor:
    """Return ‖WᵀW − I‖² or ‖WᵀW − diag(WᵀW)‖², summed over groups; kernels: (groups, kernels of a group, elements)."""
    if torch.compiler.is_compiling() or function_transform_active():
        return _products(kernels, keep_diagonal).square().sum()
    penalty: Tensor = _OffTarget.apply(kernels, keep_diagonal)  # type: ignore[no-untyped-call]
    return penalty


def _products(kernels: Tensor, keep_diagonal: bool) -> Tensor:
    """Return WᵀW minus its target."""
    products = kernels @ kernels.transpose(1, 2)
    diagonal = products.diagonal(dim1=1, dim2=2)
    if torch.is_grad_enabled():
        return products - torch.diag_embed(torch.ones_like(diagonal) if keep_diagonal else diagonal)
    if keep_diagonal:
        diagonal.sub_(1.0)
    else:
        diagonal.zero_()
    return products


class _OffTarget(torch.autograd.Function):
    """Computes the penalty with a hand-derived gradient, which takes a third of the launches."""

    @staticmethod
    def forward(ctx: Any, kernels: Tensor, keep_diagonal: bool) -> Tensor:
        products = _products(kernels, keep_diagonal)
        ctx.save_for_backward(kernels, products)
        ctx.keep_diagonal = keep_diagonal
        flat = products.flatten()
        return flat @ flat

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor, None]:
        kernels, products = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            products = _products(kernels, ctx.keep_diagonal)
        return (4.0 * e) * (products @ kernels), None
