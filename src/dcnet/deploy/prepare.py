"""A copy of a model for inference: decoupled layers as few plain operations, BatchNorm folded into them."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dcnet.layers import couple_, decoupled_layers
from dcnet.layers.candidates import refuse_wrapped
from dcnet.layers.costs import call
from dcnet.layers.inference import Inference
from dcnet.util.compat import BatchNorm


def prepare(model: nn.Module, example_input: Any = None) -> nn.Module:
    """Return a copy of the model in evaluation mode that computes the same with fewer operations.

    Decoupled layers that compute a plain convolution become plain (`couple_`), the others become `Inference` modules.
    The model itself stays as it is.

    With an example_input, the arguments of a call of the model, a BatchNorm that alone follows an `Inference` module is
    folded into it, wherever in the code the two are called.
    """
    refuse_wrapped(model, "cannot make a copy for inference of", "export")
    for name, layer in decoupled_layers(model).items():
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise ValueError(
                f"layer {name or '(the model itself)'!r} has forward hooks, which an exported model would not have; "
                "remove them first"
            )
    ready = copy.deepcopy(model).eval().requires_grad_(False)
    couple_(ready)
    # a plain convolution that couple_ had to leave, for its padding or a parametrization, needs no norms either way
    left = [layer for layer in decoupled_layers(ready).values() if not layer.operator.is_inner_product]
    lean = {layer: Inference(layer).eval() for layer in left}
    if ready in lean:
        return lean[ready]
    for module in list(ready.modules()):
        for place, child in module._modules.items():
            if child in lean:
                module._modules[place] = lean[child]
    if example_input is not None:
        _fold_norms(ready, example_input)
    return ready


def _fold_norms(model: nn.Module, example_input: Any) -> None:
    """Fold the BatchNorms of which the input is the output of an `Inference` module that goes nowhere else."""
    folded = {norm: layer for layer, norm in _followed_by_norm(model, example_input).items()}
    for norm, layer in folded.items():
        layer.fold_(norm)
    for module in list(model.modules()):
        for place, child in module._modules.items():
            if child in folded:
                module._modules[place] = _rest_of(child)


def _followed_by_norm(model: nn.Module, example_input: Any) -> dict[Inference, nn.Module]:
    """Return the layers whose output goes into one BatchNorm and nowhere else, seen in one call of the model."""
    uses, norms = _Uses(), {}
    calls: dict[nn.Module, int] = {}

    def made(layer: nn.Module, _: Any, output: Tensor) -> None:
        calls[layer] = calls.get(layer, 0) + 1
        uses.watch(layer, output)

    def taken(norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        calls[norm] = calls.get(norm, 0) + 1
        layer = uses.made_by(inputs[0]) if inputs else None
        if layer is not None:
            norms[layer] = norm

    hooks = [m.register_forward_hook(made) for m in model.modules() if isinstance(m, Inference)]
    hooks += [m.register_forward_pre_hook(taken) for m in model.modules() if _is_foldable(m)]
    try:
        with torch.no_grad(), uses:
            outputs = call(model, example_input)
    finally:
        for hook in hooks:
            hook.remove()
    for output in tree_leaves(outputs):
        uses.count(output)  # the caller of the model uses its output
    return {
        layer: norm
        for layer, norm in norms.items()
        if calls[layer] == calls[norm] == uses.of(layer) == 1 and isinstance(layer, Inference)
    }


class _Uses(TorchFunctionMode):
    """Counts how often outputs of layers are arguments of a PyTorch function that returns tensors.

    Functions that read a shape or the like do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[int, tuple[nn.Module, Tensor]] = {}  # the tensors are kept, so that their ids stay their own
        self.counts: dict[nn.Module, int] = {}

    def watch(self, layer: nn.Module, output: Tensor) -> None:
        self.watched[id(output)] = layer, output

    def made_by(self, value: object) -> nn.Module | None:
        found = self.watched.get(id(value))
        return None if found is None else found[0]

    def of(self, layer: nn.Module) -> int:
        return self.counts.get(layer, 0)

    def count(self, value: object) -> None:
        layer = self.made_by(value)
        if layer is not None:
            self.counts[layer] = self.of(layer) + 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(one, Tensor) for one in tree_leaves(result)):
            for value in tree_leaves((args, kwargs)):
                self.count(value)
        return result


def _is_foldable(module: nn.Module) -> bool:
    if (
        not isinstance(module, BatchNorm)
        or module.running_mean is None
        or module._forward_hooks
        or module._forward_pre_hooks
    ):
        return False
    return type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) or _rest_of(module) is not None


def _rest_of(norm: nn.Module) -> nn.Module | None:
    """Return what is left of a BatchNorm once it is folded; None for an unknown class.

    Of timm's BatchNorm, dropout and activation are left.
    """
    if type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return nn.Identity()
    if type(norm).__name__ == "BatchNormAct2d" and type(norm).__module__.startswith("timm."):
        rest = [norm._modules.get(name) for name in ("drop", "act")]
        return nn.Sequential(*[module for module in rest if module is not None]).eval()
    return None
