"""Optimising unweighted decoupled kernels: projection, weighted gradients, orthogonality, weight decay."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from dcnet.layers.decoupled import Decoupled, decoupled_layers
from dcnet.layers.sharding import check_shape, is_sharded, modules_of_fsdp, reshard_, whole_kernels
from dcnet.ops import compute_dtype, root
from dcnet.util.compat import function_transform_active

Where = Callable[[str, nn.Module], bool]


def _unweighted(model: nn.Module, where: Where | None, what: str) -> dict[str, Decoupled]:
    """The decoupled layers, all unweighted; raises if one of them is not, since its output depends on ‖w‖."""
    layers = {name: layer for name, layer in decoupled_layers(model, where).items() if layer.constrained}
    for name, layer in layers.items():
        if layer.weighting is not None:
            raise ValueError(
                f"{what} does not go with weighted operators: layer {name or '(the model itself)'!r} has weighting={layer.weighting!r}. "
                "Leave it out with where=lambda name, layer: …",
            )
        if layer._parameters.get("weight") is None:
            raise ValueError(
                f"{what} changes the kernels themselves, but those of layer {name or '(the model itself)'!r} are computed from other parameters "
                f"({', '.join(_sources(layer)) or 'unknown'}). Remove the parametrization, or leave the layer out with where=",
            )
        check_shape(name, layer)
    return layers


def _sources(layer: Decoupled) -> list[str]:
    """The parameters a parametrized kernel is computed from (weight_norm and the like, old style and new)."""
    return [name for name, _ in layer.named_parameters() if name.startswith(("parametrizations.weight.", "weight_"))]


@torch.no_grad()
def project_weights_(model: nn.Module, scale: float = 1.0, where: Where | None = None) -> list[str]:
    """The names of the decoupled layers whose kernels have been set to s·w/sqrt(Σw²); a zero kernel is left alone."""
    _check_scale(scale)
    reshard_(model)
    layers = _unweighted(model, where, "weight projection")
    for layer in layers.values():
        project_kernels_(layer.weight, scale)
    return list(layers)


@torch.no_grad()
def project_kernels_(weight: Tensor, scale: float = 1.0) -> Tensor:
    """Set each kernel of a weight (out_channels, …) to s·w/sqrt(Σw²) in place; a zero kernel is left alone."""
    exact = weight.double()  # a kernel too small for its squares in float32 still has a direction
    # one number for each kernel in the shape of the kernels, which sharded ones understand too
    norm = torch.linalg.vector_norm(exact, dim=tuple(range(1, exact.dim())), keepdim=True)
    return weight.copy_(exact * torch.where(norm > 0.0, scale / norm, 1.0))


def _check_scale(scale: float) -> None:
    if not isinstance(scale, int | float) or not 0.0 < scale < float("inf"):
        raise ValueError(f"scale must be a finite number > 0, got {scale!r}")


class WeightProjection:
    """Projects the model's kernels after every `every` steps of the optimizer, counted from its construction.

    `state_dict()` and `load_state_dict()` carry the count of steps through a checkpoint; `remove()` ends it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scale: float = 1.0,
        every: int = 100,
        where: Where | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number ≥ 1, got {every!r}")
        _check_scale(scale)
        _unweighted(model, where, "weight projection")  # an error now, not after a hundred steps
        self.model, self.scale, self.every, self.where = model, scale, every, where
        self.steps = 0
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.count()

    def count(self) -> None:
        """Counts a step, and projects if it is time; for steps the hook does not see, such as those a CUDA graph repeats."""
        self.steps += 1
        if self.steps % self.every == 0:
            self.project()

    def project(self) -> None:
        """Project now."""
        project_weights_(self.model, self.scale, self.where)

    def remove(self) -> None:
        """Projects no more."""
        self._handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """The steps counted so far, and what they were counted for."""
        return {"steps": self.steps, "every": self.every, "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on counting from a saved state."""
        if set(state) != {"steps", "every", "scale"}:
            raise ValueError(
                f"not the state of a WeightProjection: it has {sorted(state)}, expected ['every', 'scale', 'steps']"
            )
        self.steps, self.every, self.scale = state["steps"], state["every"], state["scale"]


class WeightedGradients:
    """The handle `weight_gradients_` returns; `remove()` restores the standard gradients."""

    def __init__(self, layers: list[Decoupled]) -> None:
        self._layers = layers

    def remove(self) -> None:
        """Weights gradients no more."""
        for layer in self._layers:
            if layer.weighted_gradient is not None:
                layer.weighted_gradient.remove()
            layer.weighted_gradient = None
        self._layers = []

    def __enter__(self) -> "WeightedGradients":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def weight_gradients_(model: nn.Module, where: Where | None = None) -> WeightedGradients:
    """A handle; until it is removed, the gradient of every decoupled kernel is multiplied by the layer's own ‖w‖."""
    if modules_of_fsdp(model, "FullyShardedDataParallel"):
        raise ValueError(
            "weight_gradients_ does not go with FullyShardedDataParallel, which computes gradients of flattened parameters; use fully_shard"
        )
    reshard_(model)
    layers = _unweighted(model, where, "weighting gradients")
    for name, layer in layers.items():
        if layer.weighted_gradient is not None or _is_weighted(layer.weight):
            raise ValueError(
                f"the gradients of layer {name or '(the model itself)'!r} are weighted already; remove the first handle before"
            )
    kernels = {layer.weight: layer for layer in layers.values() if layer.weight.requires_grad}  # a shared kernel once
    for kernel, layer in kernels.items():
        layer.weighted_gradient = _WeightedGradient(layer.eps, is_sharded(kernel))
        layer.weighted_gradient.of(kernel)
    return WeightedGradients(list(kernels.values()))


class _WeightedGradient:
    """Multiplies by ‖w‖ the gradient of every tensor that has been a layer's kernels.

    There may be several: FSDP2 keeps a rank's part of the kernels, computes with others, and hands the gradient over without autograd.
    """

    def __init__(self, eps: float, sharded: bool) -> None:
        self.eps, self.sharded = eps, sharded
        self._handles: list[Any] = []

    def of(self, kernel: Tensor) -> None:
        """Weight the gradient of these kernels from now on, once."""
        if torch.compiler.is_compiling():
            if (
                self.sharded
            ):  # torch.compile leaves this layer to eager mode then, or, asked for a full graph, shows the error
                raise RuntimeError(
                    "weight_gradients_ under FSDP2 cannot be compiled: kernels come and go, and hooks with them"
                )
            return
        if kernel.requires_grad and not _is_weighted(kernel):
            self._handles.append(kernel.register_hook(_TimesNorm(kernel, self.eps)))

    def remove(self) -> None:
        """Leave the gradients of all of them alone."""
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
        self.kernel, self.eps = ref(kernel), eps  # a kernel that held itself through its hook would not be freed

    def __call__(self, grad: Tensor) -> Tensor:
        kernel = self.kernel()
        assert kernel is not None
        squares = kernel.detach().to(compute_dtype(kernel)).square().sum(tuple(range(1, kernel.dim())), keepdim=True)
        return (grad * root(squares, self.eps)).to(grad.dtype)


def orthonormal_penalty(model: nn.Module, where: Where | None = None) -> Tensor:
    """Σ over unweighted decoupled layers of ‖WᵀW − I‖²_F, columns of W the kernels of one group: a scalar."""
    return _penalty(model, where, keep_diagonal=True)


def orthogonal_penalty(model: nn.Module, where: Where | None = None) -> Tensor:
    """Σ over unweighted decoupled layers of ‖WᵀW − diag(WᵀW)‖²_F, columns of W the kernels of one group: a scalar."""
    return _penalty(model, where, keep_diagonal=False)


def _penalty(model: nn.Module, where: Where | None, keep_diagonal: bool) -> Tensor:
    layers = {
        name: layer
        for name, layer in decoupled_layers(model, where).items()
        if layer.weighting is None and layer.constrained
    }
    if not layers:
        return torch.zeros((), device=next((p.device for p in model.parameters()), None))
    penalties = []
    for name, layer in layers.items():
        kernels = whole_kernels(name, layer).flatten(1).unflatten(0, (layer._kernels_and_groups()[1], -1))
        with torch.autocast(
            kernels.device.type, enabled=False
        ):  # a product in bf16 would lose the small off-diagonal entries
            penalties.append(_off_target(kernels.to(compute_dtype(kernels)), keep_diagonal))
    return torch.stack([penalty.to(penalties[0]) for penalty in penalties]).sum()


def _off_target(kernels: Tensor, keep_diagonal: bool) -> Tensor:
    """‖WᵀW − I‖² or ‖WᵀW − diag(WᵀW)‖² of kernels (groups, kernels of a group, elements), summed over groups."""
    if torch.compiler.is_compiling() or function_transform_active():
        return _products(kernels, keep_diagonal).square().sum()
    return _OffTarget.apply(kernels, keep_diagonal)


def _products(kernels: Tensor, keep_diagonal: bool) -> Tensor:
    """WᵀW less its target."""
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
    """With its gradient written out: a third of the launches, which in a small network's step are many."""

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


def parameter_groups(model: nn.Module, weight_decay: float = 5e-4) -> list[dict[str, Any]]:
    """Two groups for an optimizer: what decays, and what must not (unweighted decoupled kernels, radii, learned parameters)."""
    if not isinstance(weight_decay, int | float) or not 0.0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay must be a finite number ≥ 0, got {weight_decay!r}")
    exempt: set[nn.Parameter] = set()
    for layer in decoupled_layers(model).values():
        exempt |= {p for name, p in layer.named_parameters(recurse=False) if name.startswith("raw_")}
        if layer.weighting is None:
            exempt |= {
                layer.get_parameter(name)
                for name in (["weight"] if layer._parameters.get("weight") is not None else _sources(layer))
            }
    groups = [
        {"params": [p for p in model.parameters() if p not in exempt], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
