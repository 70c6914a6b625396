"""Weighted gradients: the gradients of unweighted kernels times ‖w‖."""

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from dcnet.layers.decoupled import Decoupled
from dcnet.layers.optimization import unweighted
from dcnet.layers.selection import Selector
from dcnet.layers.sharding import is_sharded, modules_of_fsdp, reshard_
from dcnet.ops import compute_dtype, root


class WeightedGradients:
    """The handle `weight_gradients_` returns; `remove()` restores the standard gradients."""

    def __init__(self, layers: list[Decoupled]) -> None:
        self._layers = layers

    def remove(self) -> None:
        """Stop weighting gradients."""
        for layer in self._layers:
            if layer.weighted_gradient is not None:
                layer.weighted_gradient.remove()
            layer.weighted_gradient = None
        self._layers = []

    def __enter__(self) -> "WeightedGradients":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def weight_gradients_(model: nn.Module, where: Selector = None) -> WeightedGradients:
    """Multiply the gradient of every unweighted decoupled kernel by its ‖w‖, from now on.

    The paper's "weighted gradients": an alternative to projection that keeps large kernels from learning slowly.

    Args:
        model: any model with decoupled layers.
        where: which layers, in the words of `decouple_`: a function `where(name, layer)`, a pattern of names such as
            "layer[1-4].*" or "!stem*", a preset such as "not-first", or a list of these; without it all that are
            unweighted.

    Returns:
        A handle, also a context manager; its `remove()` restores the ordinary gradients.

    Examples:
        >>> import torch, dcnet
        >>> layer = dcnet.DecoupledLinear(4, 3)
        >>> with dcnet.weight_gradients_(layer):
        ...     layer(torch.randn(2, 4)).sum().backward()
    """
    if modules_of_fsdp(model, "FullyShardedDataParallel"):
        raise ValueError(
            "weight_gradients_ does not go with FullyShardedDataParallel, which computes gradients of flattened "
            "parameters; use fully_shard"
        )
    reshard_(model)
    layers = unweighted(model, where, "weighting gradients")
    for name, layer in layers.items():
        if layer.weighted_gradient is not None or _is_weighted(layer.weight):
            raise ValueError(
                f"the gradients of layer {name or '(the model itself)'!r} are weighted already; remove the first "
                "handle before"
            )
    kernels = {layer.weight: layer for layer in layers.values()}  # a shared kernel once; one that is frozen may thaw
    for kernel, layer in kernels.items():
        layer.weighted_gradient = _WeightedGradient(layer.eps, is_sharded(kernel))
        layer.weighted_gradient.of(kernel)
    return WeightedGradients(list(kernels.values()))


class _WeightedGradient:
    """Multiplies the gradient of every tensor that has been a layer's kernels by ‖w‖.

    There may be several: FSDP2 keeps a rank's part of the kernels, but computes with other tensors, and hands their
    gradient over without autograd.
    """

    def __init__(self, eps: float, sharded: bool) -> None:
        self.eps, self.sharded = eps, sharded
        self._handles: list[Any] = []

    def of(self, kernel: Tensor) -> None:
        """Weight the gradient of these kernels from now on, once."""
        if torch.compiler.is_compiling():
            if (
                self.sharded
            ):  # torch.compile then runs this layer in eager mode, or shows the error if it needs a full graph
                raise RuntimeError(
                    "weight_gradients_ under FSDP2 cannot be compiled: kernels come and go, and hooks with them"
                )
            return
        if kernel.requires_grad and not _is_weighted(kernel):
            self._handles.append(kernel.register_hook(_TimesNorm(kernel, self.eps)))

    def remove(self) -> None:
        """Stop weighting all of them."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the model has standard gradients, as hooks are not copied with parameters


def _is_weighted(kernel: Tensor) -> bool:
    return any(isinstance(hook, _TimesNorm) for hook in (kernel._backward_hooks or {}).values())


class _TimesNorm:
    """The hook on kernels that multiplies their gradient by ‖w‖."""

    def __init__(self, kernel: Tensor, eps: float) -> None:
        self.kernel, self.eps = ref(kernel), eps  # a weak reference: the kernel holds this hook

    def __call__(self, grad: Tensor) -> Tensor:
        kernel = self.kernel()
        assert kernel is not None
        squares = kernel.detach().to(compute_dtype(kernel)).square().sum(tuple(range(1, kernel.dim())), keepdim=True)
        return (grad * root(squares, self.eps)).to(grad.dtype)
