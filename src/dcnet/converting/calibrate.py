"""Start a converted network as close to the trained network's function as the new operator can be.

A trained layer gives y = ‖w‖·n·cos θ + b with n = ‖x‖; the converted layer gives f = h(n)·g(θ). This is kept:

- *The scale.* Over a layer's patches, each channel of f gets the mean and the deviation of its y: a·f + d with
  a = σ_y/σ_f and d = μ_y − a·μ_f. So ‖w‖, which an unweighted operator does not have, is not lost: for LinearConv a is
  ‖w‖, and the start is exact.
  A BatchNorm after the layer takes a and d: γ·(a·f + d − μ)/√(v + ε) is γ'·(f − μ')/√(v' + ε) with
  μ' = μ_f + (μ − μ_y)/a, v' = v/a² and γ' = γ·√((v + a²ε)/(v + ε)). Its averages are then those of f, as in training;
  γ' differs from γ only because of ε.
  Where no BatchNorm follows, ‖w‖ itself is the scale: the operator gets `weighting="linear"`, w becomes a·w, and a bias
  takes d.
- *The shape.* A scale cannot undo that h is not linear. Over the patches, there is an angle between h and n, and the
  share of the signal that is lost is 1 − ⟨h, n⟩²/(⟨h, h⟩⟨n, n⟩). With a small radius h is curved within the range of
  norms. With a large radius h is a straight line, and the operator a slow LinearConv. So the radius is the smallest
  one that loses no more than `LOST`.
- *The order.* Layers are calibrated one after the other. The statistics of f are measured on the outputs of the
  converted layers before it, which are already corrected to the mean and deviation that the trained layer has on the
  same batch. This takes two passes over the batches, one by each network.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.converting.candidates import TWINS
from dcnet.converting.observe import Moments, Observed, channels
from dcnet.fusing.running import evaluating, hooks
from dcnet.layers.decoupled import Decoupled
from dcnet.ops import make_operator
from dcnet.util.compat import BatchNorm

LOST = 0.01  # the share of a layer's signal that the curvature of h may cost
_RADII = [2.0 ** (i / 4) for i in range(25)]  # to try, in units of E{‖x‖}: from 1, as in a new layer, to 64


@torch.no_grad()
def calibrate_(
    model: nn.Module, layers: dict[str, Any], observed: dict[str, Observed], inputs: list[Tensor]
) -> list[str]:
    """Calibrate converted layers in place, as the top of this file explains; return notes on what could not be kept.

    An error is raised before a kernel or a BatchNorm is changed.
    """
    notes = [f"{name}: never ran on the batches, and starts uncalibrated" for name in layers if name not in observed]
    layers = {name: layer for name, layer in layers.items() if name in observed}
    parameters = [p for module in model.modules() for p in module._parameters.values() if p is not None]
    owners: Counter[Tensor] = Counter(parameters)
    scaled = {
        name
        for name, layer in layers.items()
        if observed[name].norm is None and _scalable(layer, owners, observed[name])
    }
    for name, layer in layers.items():
        if name in scaled and layer.weighting is None:
            operator = layer.operator
            layer.operator = make_operator(operator.magnitude, operator.angular, "linear")
        if layer.raw_radius is not None:
            layer.raw_radius.fill_((_radius(layer, torch.cat(observed[name].norms, 1)) - 1e-4) ** 0.5)
    measured = _measure(model, layers, observed, inputs, scaled)
    changes = {name: _scale_and_shift(observed[name].output, measured[name]) for name in layers}
    for name in layers:
        if not all(bool(value.isfinite().all()) for value in changes[name]):
            raise ValueError(
                f"calibrate: the converted layer {name!r} gives values that are not finite; nothing has been changed"
            )
    unscaled = []
    for name, layer in layers.items():
        (a, d), norm = changes[name], observed[name].norm
        if norm is not None:
            _into_norm_(norm, a, observed[name].output, measured[name])
        elif name in scaled and not _exact(layer):
            layer.weight.mul_(a.to(layer.weight).view(-1, *[1] * (layer.weight.dim() - 1)))
            if layer.bias is not None:
                layer.bias.copy_(a * layer.bias + d)
        elif name not in scaled and not _exact(layer):
            unscaled.append(name)
    if unscaled:
        notes.append(
            f"calibrate: no BatchNorm follows {', '.join(unscaled)}, and the length of a kernel is no scale there "
            f"(weighting {layers[unscaled[0]].weighting!r}, a hook, kernels that are shared, or computed from others): "
            "mean and deviation of the output are other ones"
        )
    return notes


def _measure(
    model: nn.Module, layers: dict[str, Any], observed: dict[str, Observed], inputs: list[Tensor], scaled: set[str]
) -> dict[str, Moments]:
    """Return the mean and variance of each converted layer's output, by name.

    For this, run the converted network. Each layer hands on its output with the mean and deviation of the trained one.
    """
    measured = {name: Moments() for name in layers}

    def corrected(name: str) -> Any:
        wanted = iter(observed[name].calls)

        def hook(layer: Any, arguments: tuple[Any, ...], options: dict[str, Any], f: Tensor) -> Tensor:
            rows, here = channels(layer, f), Moments()
            here.add(rows)
            measured[name].add(rows)
            a, d = _scale_and_shift(next(wanted, observed[name].output), here)
            if observed[name].norm is None and (_exact(layer) or name not in scaled):
                return f
            if observed[name].norm is None and layer.bias is None:
                d = torch.zeros_like(d)
            shape = (-1,) if isinstance(layer, nn.Linear) else (-1, *[1] * (layer.weight.dim() - 2))
            return (f * a.view(shape) + d.view(shape)).to(f.dtype)

        return hook

    momenta = {layer: layer.momentum for layer in layers.values()}
    with evaluating(model), hooks() as handles:
        for name, layer in layers.items():
            layer.reset_running_stats()
            layer.train()
            layer.momentum = None  # a cumulative average of E{‖x‖}
            # a hook with keywords makes a `Block` call its modules one after the other
            handles.append(layer.register_forward_pre_hook(lambda *_: None, with_kwargs=True))
            handles.append(layer.register_forward_hook(corrected(name), with_kwargs=True))
        try:
            for x in inputs:
                model(x)
        finally:
            for layer, momentum in momenta.items():
                layer.momentum = momentum
    return measured


def _scale_and_shift(wanted: Moments, given: Moments) -> tuple[Tensor, Tensor]:
    """Return a and d for each channel, so that a·f + d has the wanted mean and deviation.

    A constant channel keeps its scale.
    """
    ratio = wanted.variance / given.variance
    tiny = 1e-12
    alive = (wanted.variance > tiny * wanted.mean.square()) & (given.variance > tiny * given.mean.square())
    a = torch.where(alive & (ratio > 0.0), ratio.sqrt(), 1.0)
    return a, wanted.mean - a * given.mean


def _into_norm_(norm: BatchNorm, a: Tensor, y: Moments, f: Moments) -> None:
    """Change the BatchNorm so that it gives for f what it gave for a·f + d."""
    variance = y.variance if norm.running_var is None else norm.running_var.double()
    if norm.weight is not None:  # must come first: in float64 `variance` is running_var itself, which changes below
        norm.weight.mul_(((variance + a.square() * norm.eps) / (variance + norm.eps)).sqrt().to(norm.weight))
    if norm.running_mean is not None and norm.running_var is not None:
        norm.running_mean.copy_(f.mean + (norm.running_mean.double() - y.mean) / a)
        norm.running_var.copy_(variance / a.square())


def _scalable(layer: Decoupled, owners: Mapping[Tensor, int], observed: Observed) -> bool:
    """Tell whether scaling a layer's kernels scales only its output, if need be with `weighting="linear"`.

    owners: the number of modules that have a parameter.
    """
    # a subclass may compute its kernels from the weight: the length of standardized kernels is fixed
    usual = layer.weighting in (None, "linear") and type(layer) in TWINS.values()
    if observed.hooked or observed.kernels_read:
        return False
    return usual and owners[layer.weight] == 1  # 0 where the kernels are no parameter: weight_norm computes them


def _exact(layer: Decoupled) -> bool:
    """Tell whether the layer computes what the plain layer did."""
    operator = layer.operator
    return (
        operator.is_inner_product and operator.weighting == "linear" and operator.magnitude.value("alpha", 1.0) == 1.0
    )


def _radius(layer: Decoupled, norms: Tensor) -> float:
    """Return the smallest radius, in units of E{‖x‖}, with which h loses no more than `LOST` of the signal.

    norms: a sample of the layer's patch norms, (groups, values).
    """
    n = (norms / norms.mean(1, keepdim=True)).flatten().double()
    learned = {name: value.double().mean() for name, value in layer.learned_parameters.items()}
    for rho in _RADII:
        h = layer.operator.magnitude(n, torch.tensor(rho, dtype=torch.float64, device=n.device), learned)[0]
        if 1.0 - (h * n).sum().square() / (h.square().sum() * n.square().sum()) <= LOST:
            return rho  # type: ignore[no-any-return]
    return _RADII[-1]  # type: ignore[no-any-return]
