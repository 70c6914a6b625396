"""The way back: turn decoupled layers that compute a plain convolution or linear map into plain layers.

A BatchNorm that follows such a layer is folded into it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from dcnet.converting.candidates import plain_class, refuse_wrapped
from dcnet.converting.fold import fold_
from dcnet.converting.other_code import Refusal
from dcnet.converting.record import record_
from dcnet.converting.report import shown
from dcnet.formulas.angulars import cosine, power_cosine
from dcnet.formulas.magnitudes import linear, mix, seg
from dcnet.fusing.fuse import unfuse_
from dcnet.fusing.readers import EVALUATION, Seen, look
from dcnet.fusing.running import run_once
from dcnet.layers.decoupled import OWN_ATTRIBUTES, STARTS, Decoupled, decoupled_layers, own_forward
from dcnet.layers.own_arithmetic import DecoupledConv2dSame
from dcnet.layers.types import ExampleInput
from dcnet.ops import Operator, compute_dtype, kernel_norm
from dcnet.util.compat import BatchNorm
from dcnet.util.text import count


@dataclass
class CoupleReport:
    """What `couple_` did.

    Attributes:
        coupled: the names of the layers that are plain now.
        folded: the BatchNorms folded into them, each by the name of the layer it went into.
        left: the layers left as they were, each with the reason.
        notes: what else there is to know.
    """

    coupled: list[str] = field(default_factory=list)
    folded: dict[str, str] = field(default_factory=dict)  # the BatchNorm's name, by that of the layer it went into
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{count(len(self.coupled), 'layer')} made plain, {len(self.folded)} with BatchNorm, "
            f"{len(self.left)} left unchanged"
        ]
        lines += [
            f"  plain  {shown(name)}" + (f", with {self.folded[name]}" if name in self.folded else "")
            for name in self.coupled
        ]
        lines += [f"  left   {shown(name)}: {reason}" for name, reason in self.left.items()]
        return "\n".join([*lines, *(f"  note   {note}" for note in self.notes)])


def inner_product_factor(operator: Operator) -> float | None:
    """Return the number a for which h·g is a·⟨w, x⟩, or a·⟨w, x⟩/‖w‖ without weighting; None if there is none."""
    formula, values = operator.magnitude.formula.function, dict(operator.magnitude.values)
    is_cosine = operator.angular.formula.function is cosine or (
        operator.angular.formula.function is power_cosine and operator.angular.value("p", 2.0) == 1.0
    )
    if not is_cosine or operator.magnitude.learned:
        return None
    alpha = values.get("alpha", 1.0)
    # with weighting="separate" both magnitudes have α = 1, and α stands in front of them
    of_patches = values | dict(operator.alpha_one) if operator.weighting == "separate" else values
    is_linear = (
        formula is linear
        or (formula is seg and of_patches["alpha"] == of_patches["beta"])
        or (formula is mix and of_patches["beta"] == 0.0)
    )
    return alpha if is_linear else None


@torch.no_grad()
def plain_kernel(layer: Decoupled) -> Tensor | None:
    """Return the kernels with which a plain layer computes what this one does; None if there are none."""
    factor = inner_product_factor(layer.operator)
    if factor is None:
        return None
    weight = layer.effective_weight.detach()
    exact = weight.to(compute_dtype(weight))
    if layer.weighting is None:
        norm = kernel_norm(exact, layer.eps)
        exact = exact * torch.where(norm > 0.0, 1.0 / norm, 0.0).reshape(-1, *[1] * (exact.dim() - 1))
    return (exact * factor).to(weight.dtype)


def couple_(model: nn.Module, fold: bool = True, example_input: ExampleInput | None = None) -> CoupleReport:
    """Turn decoupled layers that are plain ones back into `nn.Conv2d` or `nn.Linear`, in place.

    Plain are `linear` with `cosine`, and `seg` with β = α: the kernel is α·w with a weighting, α·w/‖w‖ without. What
    cannot be written as a plain layer (`sphere`, `tanh`, …) stays as it is. A layer keeps its identity. If anything is
    wrong nothing is changed.

    Args:
        model: any model with decoupled layers.
        fold: also fold the BatchNorm behind such a layer into its kernels, where both are in evaluation mode and have
            no hooks, and nothing else reads the layer's result. An `nn.Identity` replaces it; of timm's
            `BatchNormAct2d`, the activation stays.
        example_input: a tensor, a tuple of arguments, or a dict of named ones, to run the model on once, to see which
            BatchNorm follows which layer; without one the model is traced by torch.fx, which not every model allows.

    Returns:
        A report of the layers that are plain now, and of those left with the reason. Its notes say which BatchNorms
        were not folded, and why.

    Examples:
        >>> import dcnet
        >>> from torch import nn
        >>> model = nn.Sequential(dcnet.DecoupledConv2d(3, 8, 3, magnitude="linear"), nn.BatchNorm2d(8)).eval()
        >>> print(dcnet.couple_(model))
        1 layer made plain, 1 with BatchNorm, 0 left unchanged
          plain  0, with 1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"couple_ takes a model, got {type(model).__name__}")
    refuse_wrapped(model, "couple_ cannot take parameters from", "couple")
    report, kernels = CoupleReport(), {}
    layers: dict[str, Decoupled] = decoupled_layers(model)
    fused = _known_from_fusions(model, layers)
    if any(layer.fusion is not None for layer in layers.values()):
        if example_input is not None:
            run_once(model, example_input, ())  # an error shall come before anything is changed
        unfuse_(model)
        report.notes.append(
            "what fuse_ had fused computes for itself again; call dcnet.fuse_ for the layers that stayed"
        )
    for name, layer in layers.items():
        reason = _reason_to_leave(layer)
        kernel = None if reason else plain_kernel(layer)
        if kernel is None:
            report.left[name] = reason
        else:
            kernels[name] = kernel
    for name, others in _needed_by_others(model, layers, kernels).items():
        report.left[name] = (
            f"its kernels are also those of {', '.join(map(shown, others))}, which needs them as they are"
        )
        del kernels[name]
    changed = {name for name, kernel in kernels.items() if not torch.equal(kernel, layers[name].weight)}
    fold = fold and bool(kernels) and any(isinstance(module, BatchNorm) for module in model.modules())
    seen, why = look(model, example_input, EVALUATION) if fold or changed else (fused, "")
    seen = fused if why else seen
    for name in sorted(changed & seen.read):
        report.left[name] = "other code reads its kernels, which needs them as they are"
        del kernels[name]
    for name, kernel in kernels.items():
        _make_plain(layers[name], kernel)
    report.coupled = list(kernels)
    if fold:
        report.folded, notes = fold_(model, {name: layers[name] for name in kernels}, seen, why)
        report.notes += notes
    _lift_refusals(model)
    record_(model)
    return report


def _known_from_fusions(model: nn.Module, layers: dict[str, Decoupled]) -> Seen:
    """Return which BatchNorm follows which layer, as far as `fuse_` has found out, perhaps with an example."""
    names = {module: name for name, module in model.named_modules()}
    fusions = {name: layer.fusion for name, layer in layers.items() if layer.fusion and layer.fusion.holds(layer)}
    norms = {name: names[fusion.norm.module] for name, fusion in fusions.items() if fusion.norm is not None}
    return Seen({name: [norm] for name, norm in norms.items()}, {}, {norm: name for name, norm in norms.items()})


def _reason_to_leave(layer: Decoupled) -> str:
    if inner_product_factor(layer.operator) is None:
        return f"{layer.magnitude} + {layer.angular} is no plain layer"
    if why := own_forward(layer):
        return why
    if isinstance(layer, LazyModuleMixin):
        return "its shape is not known yet; run the model once"
    if isinstance(layer, DecoupledConv2dSame) and layer.same_pad:
        return "it pads its input by the size of that, which nn.Conv2d does not"
    if parametrize.is_parametrized(layer) or layer._parameters.get("weight") is None:
        return "its weight is computed from other parameters; take the parametrization off first"
    if layer.bias is not None and layer._parameters.get("bias") is None:
        return "its bias is computed from other parameters; take that off first"
    return ""


def _needed_by_others(
    model: nn.Module, layers: dict[str, Decoupled], kernels: dict[str, Tensor]
) -> dict[str, list[str]]:
    """Return the layers that share kernels with modules that would not get the same ones, and those modules."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in {p for p in module._parameters.values() if p is not None}:
            owners.setdefault(parameter, []).append(name)
    found = {}
    for name, kernel in kernels.items():
        others = [one for one in owners[layers[name].weight] if one != name]
        if not all(one in kernels and torch.equal(kernels[one], kernel) for one in others):
            found[name] = others
    return found


@torch.no_grad()
def _make_plain(layer: Decoupled, kernel: Tensor) -> None:
    extras = layer._extras()
    if layer.weighted_gradient is not None:  # its hook is on the kernels, and would stay
        layer.weighted_gradient.remove()
    layer.weight.copy_(kernel)
    layer.__class__ = plain_class(layer)  # type: ignore[assignment]
    # attributes that others have put on the layer stay
    for store, names in (
        (layer._parameters, ["raw_radius", *extras]),
        (layer._buffers, STARTS),
        (layer.__dict__, OWN_ATTRIBUTES),
    ):
        for name in names:
            store.pop(name, None)


def _lift_refusals(model: nn.Module) -> None:
    """Let methods that merge kernels work again in modules without decoupled layers."""
    for module in model.modules():
        if not any(isinstance(child, Decoupled) for child in module.modules()):
            for method in [key for key, value in vars(module).items() if isinstance(value, Refusal)]:
                delattr(module, method)
