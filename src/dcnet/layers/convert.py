"""Turning the convolutions of a model someone already has into decoupled ones, in place."""

from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from dcnet.formulas import nearest
from dcnet.layers.conv import DecoupledConv1d, DecoupledConv2d, DecoupledConv3d
from dcnet.layers.decoupled import Decoupled, Spec, check_options
from dcnet.layers.linear import DecoupledLinear
from dcnet.layers.optimisation import Where

_TWINS: dict[type[nn.Module], type[Decoupled]] = {
    nn.Conv1d: DecoupledConv1d,
    nn.Conv2d: DecoupledConv2d,
    nn.Conv3d: DecoupledConv3d,
    nn.Linear: DecoupledLinear,
}
_CONVERTIBLE: tuple[type[nn.Module], ...] = tuple(_TWINS)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class DecoupleReport:
    """What `decouple_` did: the names it converted, and the names it left with the reason."""

    converted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} layers converted, {len(self.skipped)} left as they were"]
        lines += [f"  converted {_shown(name)}" for name in self.converted]
        lines += [f"  left      {_shown(name)}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def _shown(name: str) -> str:
    return name or "(the model itself)"


def decouple_(
    model: nn.Module,
    magnitude: Spec = "tanh",
    angular: Spec = "cosine",
    where: Where | None = None,
    types: tuple[type[nn.Module], ...] = CONVOLUTIONS,
    **layer_options: Any,
) -> DecoupleReport:
    """A report of the layers converted and left; `model` itself is changed, its weights and biases are kept.

    where: `where(name, module)` says which candidates to convert; all of them without it.
    types: the classes to convert, exactly; name `nn.Linear`, or a subclass of a convolution, to convert those too.
    layer_options: `weighting`, `radius`, `eps`, `momentum`, `sync`, `impl` of the new layers.

    A layer keeps its identity: references to it, its hooks and the optimizer's parameters stay valid.
    """
    if isinstance(types, type):
        types = (types,)
    for kind in types:
        if not isinstance(kind, type) or not issubclass(kind, _CONVERTIBLE):
            possible = ", ".join(f"nn.{known.__name__}" for known in _TWINS)
            raise ValueError(f"types: cannot convert {kind!r}; possible: {possible} and their subclasses")
    if where is not None and not callable(where):
        raise TypeError(f"where must be a function of (name, module), got {where!r}")
    options = [name for name in signature(check_options).parameters if name not in ("magnitude", "angular")]
    for name in layer_options:
        if name not in options:
            raise TypeError(f"decouple_ has no option {name!r}.{nearest(name, options)} Possible: {', '.join(options)}")
    check_options(magnitude, angular, **layer_options)  # before the model is touched
    report = DecoupleReport()
    for name, module in list(model.named_modules()):  # a shared module comes once
        if not isinstance(module, _CONVERTIBLE):
            continue
        reason = _reason_to_leave(name, module, types, where)
        if reason:
            report.skipped[name] = reason
            continue
        twin = next(twin for plain, twin in _TWINS.items() if isinstance(module, plain))
        # The decoupled layers are the plain ones with other arithmetic, so changing the class converts the layer.
        module.__class__ = twin
        assert isinstance(module, Decoupled)
        module._init_decoupling(magnitude=magnitude, angular=angular, **layer_options)
        report.converted.append(name)
    return report


def _reason_to_leave(name: str, module: nn.Module, types: tuple[type[nn.Module], ...], where: Where | None) -> str:
    kind = type(module)
    if isinstance(module, Decoupled):
        return "decoupled already"
    if isinstance(module, LazyModuleMixin):
        return "its shape is not known yet; run the model once, then convert"
    if kind not in types:
        named = kind.__name__ if kind not in _TWINS else f"nn.{kind.__name__}"
        return (
            f"a {named}, which is not among types"
            if kind in _TWINS
            else f"a subclass, {named}, with arithmetic of its own; name it in types to convert it"
        )
    if where is not None and not where(name, module):
        return "where(name, module) said no"
    return ""
