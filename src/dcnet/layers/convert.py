"""Turning the convolutions of a model someone already has into decoupled ones, in place."""

import warnings
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import nn

from dcnet.layers.candidates import CONVERTIBLE, TWINS, plain_class, reason_to_leave, refuse_wrapped, what_it_overrides
from dcnet.layers.decoupled import Decoupled, Spec, check_options
from dcnet.layers.optimization import Where
from dcnet.layers.optimizers import Groups, check_optimizer, groups_for
from dcnet.layers.other_code import refuse_fusion_, use_layers_
from dcnet.layers.record import record_
from dcnet.util.suggest import nearest

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class DecoupleReport:
    """What `decouple_` did: the names it converted, those it left with the reason, and notes."""

    converted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)  # the new parameters
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} layers converted, {len(self.skipped)} left as they were"]
        lines += [f"  converted {_shown(name)}" for name in self.converted]
        lines += [f"  left      {_shown(name)}: {reason}" for name, reason in self.skipped.items()]
        lines += [f"  note      {note}" for note in self.notes]
        return "\n".join(lines)


def _shown(name: str) -> str:
    return name or "(the model itself)"


def decouple_(
    model: nn.Module,
    magnitude: Spec = "tanh",
    angular: Spec = "cosine",
    where: Where | None = None,
    types: tuple[type[nn.Module], ...] = CONVOLUTIONS,
    optimizer: torch.optim.Optimizer | None = None,
    **layer_options: Any,
) -> DecoupleReport:
    """Convert layers of `model` in place, keep their weights and biases, and return a report.

    where: `where(name, module)` says which candidates to convert; all of them without it.
    types: the classes to convert, with the subclasses that compute the same; name `nn.Linear` to convert linear layers
        too. A subclass with arithmetic of its own is converted if it is named here, loses that arithmetic, and a
        warning says so.
    optimizer: an optimizer of this model, made before; the new parameters are added to it, without weight decay.
    layer_options: `weighting`, `radius`, `eps`, `momentum`, `sync`, `impl` of the new layers.

    A layer keeps its identity: references to it, its hooks and the optimizer's parameters stay valid. If anything is
    wrong nothing is changed. The configuration of a model of transformers gets a record of it, which `from_pretrained`
    reads.
    """
    if isinstance(types, type):
        types = (types,)
    for kind in types:
        if not isinstance(kind, type) or not issubclass(kind, CONVERTIBLE):
            possible = ", ".join(f"nn.{known.__name__}" for known in TWINS)
            raise ValueError(f"types: cannot convert {kind!r}; possible: {possible} and their subclasses")
    if where is not None and not callable(where):
        raise TypeError(f"where must be a function of (name, module), got {where!r}")
    options = [name for name in signature(check_options).parameters if name not in ("magnitude", "angular")]
    for name in layer_options:
        if name not in options:
            raise TypeError(f"decouple_ has no option {name!r}.{nearest(name, options)} Possible: {', '.join(options)}")
    check_options(magnitude, angular, **layer_options)
    check_optimizer(optimizer)
    refuse_wrapped(model)

    report, chosen = DecoupleReport(), {}
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    for name, module in model.named_modules():  # a shared module comes once
        if isinstance(module, CONVERTIBLE):
            reason = reason_to_leave(name, module, parents.get(module), types, where)
            if reason:
                report.skipped[name] = reason
            else:
                chosen[name] = module
    report.notes += _warn_of_what_is_dropped(chosen)
    groups = groups_for(optimizer, chosen)
    _convert(chosen, {"magnitude": magnitude, "angular": angular, **layer_options})
    report.converted = list(chosen)
    report.added = [f"{name}.{own}".lstrip(".") for name, layer in chosen.items() for own in _new_parameters(layer)]
    report.notes += use_layers_(model, chosen)
    report.notes += refuse_fusion_(model, chosen)
    _tell_optimizer(report, chosen, groups)
    record_(model)
    return report


def _convert(chosen: dict[str, nn.Module], options: dict[str, Any]) -> None:
    """Convert them all, or, if one fails, none."""
    before = {}
    try:
        for module in chosen.values():
            state = dict(module.__dict__)
            before[module] = type(module), state | {key: state[key].copy() for key in ("_parameters", "_buffers")}
            # The decoupled layers are the plain ones with other arithmetic, so changing the class converts the layer.
            module.__class__ = TWINS[plain_class(module)]
            assert isinstance(module, Decoupled)
            module._init_decoupling(**options)
    except BaseException:
        for module, (kind, state) in before.items():
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(state)
        raise


def _new_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in layer.named_parameters(recurse=False) if name.startswith("raw_")}


def _warn_of_what_is_dropped(chosen: dict[str, nn.Module]) -> list[str]:
    """Return notes on the layers whose own arithmetic is about to go, and warn: a report need not be looked at."""
    dropped = {name: what for name, module in chosen.items() if (what := what_it_overrides(type(module)))}
    notes = [
        f"{_shown(name)}: the {what} of {type(chosen[name]).__name__} is dropped" for name, what in dropped.items()
    ]
    if notes:
        warnings.warn(
            f"decouple_ drops arithmetic of subclasses named in types: {'; '.join(notes)}", UserWarning, stacklevel=3
        )
    return notes


def _tell_optimizer(report: DecoupleReport, chosen: dict[str, nn.Module], groups: Groups | None) -> None:
    new = {layer: list(_new_parameters(layer).values()) for layer in chosen.values()}
    if groups is not None:
        groups.add(new)
        unknown = [name for name, layer in chosen.items() if layer not in groups]
        if unknown:
            report.notes.append(
                f"the optimizer has no parameter of {', '.join(map(_shown, unknown))}, and does not train what "
                "is new there either"
            )
        decaying = [name for name, layer in chosen.items() if groups.decays(layer)]
        if decaying:
            report.notes.append(
                f"the optimizer still decays the kernels of {len(decaying)} unweighted layers "
                f"({decaying[0] or 'the model itself'}, …), "
                "whose length means nothing; an optimizer made anew from dcnet.parameter_groups(model) does not",
            )
    elif report.added:
        report.notes.append(
            f"an optimizer made before does not know the {len(report.added)} new parameters ({report.added[0]}, "
            "…): pass it as optimizer=, "
            "or make it now, from dcnet.parameter_groups(model)",
        )
