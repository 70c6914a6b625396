"""Observe the layers of a trained network: statistics of outputs, norms of patches, and the BatchNorm that follows."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.fusing.running import Flow, Made, evaluating, hooks
from dcnet.layers.own_arithmetic import prepared_input
from dcnet.layers.statistics import input_of
from dcnet.layers.types import Batch
from dcnet.ops import EPS, compute_dtype, patch_norm
from dcnet.util.compat import BatchNorm, hooked

_SAMPLES = 2**14  # patch norms of a layer and call that are kept


class Moments:
    """Mean and variance of each channel of a layer's output, over all batches, in double precision."""

    def __init__(self) -> None:
        self.count, self.sum, self.squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, channels: Tensor) -> None:
        """Add outputs of shape (channels, values)."""
        exact = channels.double()
        self.sum, self.squares = self.sum.to(exact) + exact.sum(1), self.squares.to(exact) + exact.square().sum(1)
        self.count += channels.shape[1]

    @property
    def mean(self) -> Tensor:
        return self.sum / self.count

    @property
    def variance(self) -> Tensor:
        return (self.squares / self.count - self.mean.square()).clamp(min=0.0)


@dataclass
class Observed:
    """What was observed of a layer of the trained network."""

    output: Moments = field(default_factory=Moments)
    calls: list[Moments] = field(default_factory=list)  # of the output in each call
    norms: list[Tensor] = field(default_factory=list)  # a sample of n in each call, (groups, values)
    following: set[Any] = field(default_factory=set)  # BatchNorms its output goes to, and None if it goes elsewhere
    hooked: bool = False  # whether the user's hooks act on its input or output
    kernels_read: bool = False  # whether other code reads its kernels

    @property
    def norm(self) -> BatchNorm | None:
        """The BatchNorm that is the only reader of the output, or None."""
        (only,) = self.following if len(self.following) == 1 else (None,)
        return only


def prepare(batches: Iterable[Batch], model: nn.Module) -> list[Tensor]:
    """Return the inputs of the batches, on the model's device; raise unless there are some and all are finite."""
    if isinstance(batches, Tensor | str) or not isinstance(batches, Iterable):
        kind = "one tensor; possible: [images]" if isinstance(batches, Tensor) else repr(batches)
        raise TypeError(f"calibrate must be an iterable of batches, got {kind}")
    like = next(model.parameters(), torch.zeros(()))
    inputs = []
    for number, batch in enumerate(batches, 1):
        x = input_of(batch, model).to(like.device)
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise ValueError(f"calibrate: batch {number} has values that are not finite; nothing has been changed")
        if not x.numel():
            raise ValueError(f"calibrate: batch {number} is empty, of shape {tuple(x.shape)}; nothing has been changed")
        inputs.append(x)
    if not inputs:
        raise ValueError("calibrate has no batches; nothing has been changed")
    return inputs


@torch.no_grad()
def observe(model: nn.Module, layers: dict[str, nn.Module], inputs: list[Tensor]) -> dict[str, Observed]:
    """Run the trained network in evaluation; return what was observed of each layer that ran, by name."""
    found = {name: Observed(hooked=hooked(layer)) for name, layer in layers.items()}
    names: dict[nn.Module, str] = {layer: name for name, layer in layers.items()}
    flow = Flow([*names, *(module for module in model.modules() if isinstance(module, BatchNorm))])

    def seen(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], y: Tensor) -> None:
        x = arguments[0] if arguments else options["input"]
        with flow.paused():
            mine, rows, here = found[names[layer]], channels(layer, y), Moments()
            if _channel_dimension(layer, y) != 1:  # a BatchNorm sees another dimension as the channels
                mine.following.add(None)
            mine.output.add(rows)
            here.add(rows)
            mine.calls.append(here)
            mine.norms.append(_norms(layer, x))

    kernels = {
        name: flow.watch(p) for name, layer in layers.items() if (p := layer._parameters.get("weight")) is not None
    }
    kept: set[Made] = set()
    with flow, evaluating(model), hooks() as handles:
        handles += [layer.register_forward_hook(seen, with_kwargs=True) for layer in names]
        for x in inputs:
            outputs = model(x)
            kept |= flow.alive  # what is returned, or stored in the model
            del outputs
    for name, made in kernels.items():
        found[name].kernels_read = any(reader is not layers[name] for reader in made.readers)
    made_by: dict[Made | None, str] = {}
    fed: dict[nn.Module, set[str | None]] = {}
    for one in flow.calls:
        if one.module in names:
            name = names[one.module]
            made_by[one.output] = name
            readers = [] if one.output is None else one.output.readers
            found[name].following |= {reader if isinstance(reader, BatchNorm) else None for reader in readers}
            if one.output in kept:
                found[name].following.add(None)
        else:
            fed.setdefault(one.module, set()).add(made_by.get(one.input))
    for name, what in found.items():
        for norm in list(what.following - {None}):
            if fed[norm] != {name}:  # it normalizes other results too
                what.following.add(None)
        if what.output.count and not bool(what.output.squares.isfinite().all()):
            raise ValueError(
                f"calibrate: layer {name!r} of the trained network gives values that are not finite; "
                "nothing has been changed"
            )
    return {name: what for name, what in found.items() if what.output.count}


def channels(layer: nn.Module, y: Tensor) -> Tensor:
    """Return an output as (channels, values), in float32 at least."""
    y = y.to(compute_dtype(y))
    return y.movedim(_channel_dimension(layer, y), 0).flatten(1) if y.dim() > 1 else y.unsqueeze(1)


def _channel_dimension(layer: nn.Module, y: Tensor) -> int:
    """Return which dimension of an output is its channels."""
    if isinstance(layer, nn.Linear):
        return y.dim() - 1
    return y.dim() - layer.weight.dim() + 1  # type: ignore[operator]


def _norms(layer: Any, x: Tensor) -> Tensor:
    """Return a sample of the norms of a layer's patches: (groups, values)."""
    if isinstance(layer, nn.Linear):
        norms = (x.to(compute_dtype(x)).square().sum(-1) + EPS).sqrt().flatten().unsqueeze(0)
    else:
        x = prepared_input(layer, x)
        batch = x if x.dim() == layer.weight.dim() else x.unsqueeze(0)
        where = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups)
        norms = patch_norm(batch, *where, padding_mode=layer.padding_mode).movedim(1, 0).flatten(1)
    return norms[:, :: -(-norms.numel() // _SAMPLES)].float()
