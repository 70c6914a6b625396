"""A copy of a model for inference: decoupled layers as few plain operations, BatchNorm folded into them."""

import copy
from collections import Counter
from typing import Any

from torch import Tensor, nn

from dcnet.converting import couple_
from dcnet.converting.candidates import refuse_wrapped
from dcnet.converting.fold import rest_of
from dcnet.deploy.inference import Inference
from dcnet.fusing.readers import EVALUATION, look
from dcnet.fusing.running import hooks, run_once
from dcnet.fusing.wrappers import unwrap
from dcnet.layers import decoupled_layers
from dcnet.layers.decoupled import own_forward
from dcnet.layers.types import ExampleInput
from dcnet.util.compat import BatchNorm


def prepare(model: nn.Module, example_input: ExampleInput | None = None) -> nn.Module:
    """Return a copy of the model in evaluation mode that computes the same with fewer operations.

    Decoupled layers that compute a plain convolution become plain (`couple_`), the others become `Inference` modules.
    The model itself stays as it is.

    With an example_input, the arguments of a call of the model, a BatchNorm that is the only reader of an `Inference`
    module is folded into it, wherever the code calls the two.
    """
    model = unwrap(model)
    refuse_wrapped(model, "cannot make a copy for inference of", "export")
    for name, layer in decoupled_layers(model).items():
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise ValueError(
                f"layer {name or '(the model itself)'!r} has forward hooks, which an exported model would not have; "
                "remove them first"
            )
    ready = copy.deepcopy(model).eval().requires_grad_(False)
    couple_(ready, example_input=example_input)
    # a plain convolution that couple_ had to leave, for its padding or a parametrization, needs no norms anyway
    left = [
        layer
        for layer in decoupled_layers(ready).values()
        if not layer.operator.is_inner_product and not own_forward(layer)
    ]
    if left and example_input is not None:
        seen, _ = look(ready, example_input, EVALUATION)
        read = [name for name, layer in decoupled_layers(ready).items() if layer in left and name in seen.read]
        if read:
            raise ValueError(
                f"other code reads the kernels of layer {read[0]!r}, which would be others in an exported model; "
                "let that code take a parameter of its own"
            )
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


def _fold_norms(model: nn.Module, example_input: ExampleInput) -> None:
    """Fold the BatchNorms that are the only readers of an `Inference` module's output."""
    folded = {norm: layer for layer, norm in _followed_by_norm(model, example_input).items()}
    for norm, layer in folded.items():
        layer.fold_(norm)
    for module in list(model.modules()):
        for place, child in module._modules.items():
            if child in folded:
                module._modules[place] = rest_of(child)


def _followed_by_norm(model: nn.Module, example_input: ExampleInput) -> dict[Inference, nn.Module]:
    """Return the layers whose output only goes into one BatchNorm, as seen in one call of the model."""
    watched = [module for module in model.modules() if isinstance(module, Inference) or _is_foldable(module)]
    batches: dict[nn.Module, bool] = {}

    def note(layer: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        if isinstance(layer, Inference):  # of other outputs a norm takes another dimension for the channels
            batches[layer] = batches.get(layer, True) and y.dim() == layer.geometry.dims + 2

    with hooks() as handles:
        handles += [module.register_forward_hook(note) for module in watched]
        flow, returned = run_once(model, example_input, watched)
    calls = Counter(one.module for one in flow.calls)
    norms = {one.input: one.module for one in flow.calls if one.input and not isinstance(one.module, Inference)}
    found = {}
    for one in flow.calls:
        layer, output = one.module, one.output
        if not isinstance(layer, Inference) or output is None or output not in norms or output in returned:
            continue
        norm = norms[output]
        if calls[layer] == calls[norm] == 1 and output.readers == [norm] and batches[layer]:
            found[layer] = norm
    return found


def _is_foldable(module: nn.Module) -> bool:
    if (
        not isinstance(module, BatchNorm)
        or module.running_mean is None
        or module._forward_hooks
        or module._forward_pre_hooks
    ):
        return False
    return rest_of(module) is not None
