"""Turn the convolutions of an existing model into decoupled ones, in place."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Unpack

import torch
from torch import nn

from dcnet.converting.calibrate import calibrate_
from dcnet.converting.candidates import CONVERTIBLE, TWINS, reason_to_leave, refuse_wrapped, twin_of, what_it_overrides
from dcnet.converting.costs import multiply_adds, parameters, shapes_in
from dcnet.converting.gates import adapters, gates
from dcnet.converting.observe import observe, prepare
from dcnet.converting.optimizers import Groups, check_optimizer, groups_for
from dcnet.converting.other_code import refuse_fusion_, use_layers_
from dcnet.converting.record import record_
from dcnet.converting.report import Change, Row, kind_of, table_of
from dcnet.converting.report import shown as _shown
from dcnet.fusing.fuse import FuseReport, fuse_, unfuse_
from dcnet.layers.decoupled import Decoupled
from dcnet.layers.options import LayerOptions, OtherOptions, Spec
from dcnet.layers.selection import Selection, Selector
from dcnet.layers.types import Batch, ExampleInput
from dcnet.util.suggest import nearest
from dcnet.util.text import count, few

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class DecoupleReport:
    """What `decouple_` did; `print` shows it as a table.

    Attributes:
        converted: the names of the layers that are decoupled now.
        skipped: the layers left as they were, each with the reason.
        added: the names of the new parameters.
        notes: anything else to know.
        rows: the rows of the printed table, one for each layer.
        fused: what `fuse_` did afterward.
    """

    converted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    fused: FuseReport = field(default_factory=FuseReport)

    def __str__(self) -> str:
        lines = [f"{count(len(self.converted), 'layer')} converted, {len(self.skipped)} left unchanged"]
        lines += ["", *table_of(self.rows)] if self.rows else []
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)


def decouple_(
    model: nn.Module,
    magnitude: Spec = "tanh",
    angular: Spec = "cosine",
    where: Selector = None,
    types: tuple[type[nn.Module], ...] = CONVOLUTIONS,
    optimizer: torch.optim.Optimizer | None = None,
    calibrate: Iterable[Batch] | None = None,
    example_input: ExampleInput | None = None,
    fuse: bool = True,
    **layer_options: Unpack[OtherOptions],
) -> DecoupleReport:
    """Convert layers of `model` in place, keep their weights and biases, and return a report.

    A layer keeps its identity: references to it, its hooks and the optimizer's parameters stay valid. Where all
    parameters of a layer are frozen, its new ones are too. If anything is wrong nothing is changed. The configuration
    of a transformers model gets a record of it, which `from_pretrained` reads.

    Args:
        model: any model.
        magnitude: the function h of the new layers, as in `DecoupledConv2d`.
        angular: the function g of the new layers.
        where: which layers to convert: a function `where(name, module)`; a pattern of names such as
            "layer[1-4].*.conv2", or "!stem*" for all others; a preset, "spatial" (kernels larger than 1×1),
            "not-first", "not-depthwise", or "all"; or a list of these. Several patterns select more layers; every
            other condition but "all" removes layers.
            Gates on pooled maps (squeeze-and-excitation) are left alone unless "all" is among them.
        types: the classes to convert, with the subclasses that compute the same; name `nn.Linear` to convert linear
            layers too. timm's `Conv2dSame`, `StdConv2d` and `ScaledStdConv2d` keep their padding and weight
            standardization. Another subclass with arithmetic of its own is converted if it is named here, loses that
            arithmetic, and a warning says so.
        optimizer: an optimizer of this model, made before; the new parameters are added to it, without weight decay.
        calibrate: a few batches of training inputs, to keep as much of a trained network's function as the operator
            can: radii are chosen by the norms of each layer's patches, and every output gets its mean and deviation
            back, by the BatchNorm that follows or, where none does, by ‖w‖ (these layers get `weighting="linear"`).
            Each batch is an input, or a tuple or list that starts with one.
        example_input: what the model is called with (a tensor, a tuple of arguments, or a dict of named ones), to count
            multiply-adds in the report, and for `fuse_`.
        fuse: let the new layers do the work of the BatchNorm and the activation behind them, as `fuse_` does; the
            report says which.
        **layer_options: `weighting`, `radius`, `eps`, `momentum`, `sync`, `impl` of the new layers.

    Examples:
        >>> import dcnet
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())
        >>> report = dcnet.decouple_(model, magnitude="tanh", angular="cosine")
        >>> report.converted
        ['0']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be the module itself, got {type(model).__name__}")
    if isinstance(types, type):
        types = (types,)
    for kind in types:
        if not isinstance(kind, type) or not issubclass(kind, CONVERTIBLE):
            possible = ", ".join(f"nn.{known.__name__}" for known in TWINS)
            raise ValueError(f"types: cannot convert {kind!r}; possible: {possible} and their subclasses")
    options = [name for name in signature(LayerOptions).parameters if name not in ("magnitude", "angular")]
    for name in layer_options:
        if name not in options:
            raise TypeError(f"decouple_ has no option {name!r}.{nearest(name, options)} Possible: {', '.join(options)}")
    LayerOptions(magnitude, angular, **layer_options).operator()
    check_optimizer(optimizer)
    refuse_wrapped(model)

    report, chosen = DecoupleReport(), {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, CONVERTIBLE)}  # each once
    _check_there_is_something(model, layers, types)
    selection = Selection(where, {name: module for name, module in layers.items() if isinstance(module, types)})
    special = adapters(model) | ({} if selection.takes_gates else gates(model))
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    for name, module in layers.items():
        reason = reason_to_leave(name, module, parents.get(module), types, selection, special)
        if reason:
            report.skipped[name] = reason
        else:
            chosen[name] = module
    shapes = None if example_input is None else shapes_in(model, layers.values(), example_input)
    kinds = {name: kind_of(module) for name, module in layers.items()}
    counts = {name: (parameters(m), multiply_adds(m, shapes[m]) if shapes else 0) for name, m in layers.items()}
    report.notes += _warn_of_what_is_dropped(chosen)
    groups = groups_for(optimizer, chosen)
    if calibrate is not None and not chosen:
        raise ValueError(f"calibrate: nothing to convert in this {type(model).__name__}: {_why_nothing(report)}")
    inputs = [] if calibrate is None else prepare(calibrate, model)
    observed = observe(model, chosen, inputs) if inputs else {}
    undo = _convert(chosen, {"magnitude": magnitude, "angular": angular, **layer_options})
    if inputs:
        try:
            report.notes += calibrate_(model, chosen, observed, inputs)
        except BaseException:
            undo()
            raise
    report.converted = list(chosen)
    for name, module in layers.items():
        work = None if shapes is None else Change(counts[name][1], multiply_adds(module, shapes[module]))
        became = report.skipped.get(name) or _operator_of(module)
        change = Change(counts[name][0], parameters(module))
        report.rows.append(Row(name, kinds[name], became, name in report.skipped, change, work))
    report.added = [f"{name}.{own}".lstrip(".") for name, layer in chosen.items() for own in _new_parameters(layer)]
    frozen = [_shown(name) for name, layer in chosen.items() if _new_parameters(layer) and _is_frozen(layer)]
    if frozen:
        report.notes.append(f"the new parameters of layers that are frozen are frozen too: {few(frozen)}")
    transposed = [name for name, module in model.named_modules() if isinstance(module, _TRANSPOSED)]
    if transposed:
        report.notes.append(f"transposed convolutions have no decoupled twin and stay as they are: {few(transposed)}")
    report.notes += use_layers_(model, chosen)
    report.notes += refuse_fusion_(model, chosen)
    if fuse and chosen:
        try:
            report.fused = fuse_(model, example_input)
        except BaseException:
            unfuse_(model)
            undo()
            raise
        of = len(chosen)
        if report.fused.fused:
            count = len(report.fused.fused)
            report.notes.append(
                f"{count} of {of} do the work of the modules behind them too; dcnet.unfuse_ takes that back"
            )
        elif report.fused.unseen:
            report.notes.append(f"none does the work of a BatchNorm behind it: {report.fused.unseen}")
        elif of > 1 and not report.fused.fused:
            report.notes.append(f"none of the {of} does the work of the modules behind it; report.fused says why")
    _tell_optimizer(report, chosen, groups)
    record_(model)
    return report


def _check_there_is_something(
    model: nn.Module, layers: dict[str, nn.Module], types: tuple[type[nn.Module], ...]
) -> None:
    """Raise for a model that has no layer of these types, converted or not, instead of silently doing nothing."""
    if any(isinstance(module, (*types, Decoupled)) for module in layers.values()):
        return
    wanted = ", ".join(f"nn.{kind.__name__}" if kind in TWINS else kind.__name__ for kind in types)
    linear = sum(isinstance(module, nn.Linear) for module in layers.values())
    hint = f"; for its {count(linear, 'linear layer')}: types=(nn.Linear,)" if linear and nn.Linear not in types else ""
    raise ValueError(
        f"there is nothing to convert: {type(model).__name__} has no layer of {wanted or 'no type at all'}{hint}"
    )


def _operator_of(layer: nn.Module) -> str:
    assert isinstance(layer, Decoupled)
    return f"{layer.magnitude} + {layer.angular}" + (f", {layer.weighting}" if layer.weighting else "")


def _convert(chosen: dict[str, nn.Module], options: dict[str, Any]) -> Callable[[], None]:
    """Convert all of the layers, or none if one fails; return a function that undoes it."""
    before: dict[nn.Module, tuple[type[nn.Module], dict[str, Any]]] = {}

    def undo() -> None:
        for module, (kind, state) in before.items():
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(state)

    try:
        for module in chosen.values():
            state = dict(module.__dict__)
            before[module] = type(module), state | {key: state[key].copy() for key in ("_parameters", "_buffers")}
            # Decoupled layers are plain ones with different arithmetic, so changing the class converts the layer.
            module.__class__ = twin_of(type(module))
            assert isinstance(module, Decoupled)
            frozen = _is_frozen(module)
            module._init_decoupling(LayerOptions(**options))
            for parameter in _new_parameters(module).values():
                parameter.requires_grad_(not frozen)
    except BaseException:
        undo()
        raise
    return undo


def _is_frozen(layer: nn.Module) -> bool:
    """Tell whether none of a layer's own parameters is trained."""
    return not any(parameter.requires_grad for parameter in layer.parameters(recurse=False))


def _why_nothing(report: DecoupleReport) -> str:
    """Say why no layer was chosen."""
    first = next(iter(report.skipped.items()), None)
    return "it has no convolution" if first is None else f"{_shown(first[0])}: {first[1]}"


def _new_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in layer.named_parameters(recurse=False) if name.startswith("raw_")}


def _warn_of_what_is_dropped(chosen: dict[str, nn.Module]) -> list[str]:
    """Return notes on the layers that lose their own arithmetic, and warn, since nobody has to read the report."""
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
    new = {
        layer: {f"{name}.{own}".lstrip("."): p for own, p in _new_parameters(layer).items()}
        for name, layer in chosen.items()
    }
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
                f"the optimizer still decays the kernels of {count(len(decaying), 'unweighted layer')} "
                f"({decaying[0] or 'the model itself'}, …), "
                "whose length means nothing; an optimizer made anew from dcnet.parameter_groups(model) does not",
            )
    elif report.added:
        report.notes.append(
            f"an optimizer made before does not know {count(len(report.added), 'new parameter')} "
            f"({few(report.added)}): pass it as optimizer=, or make it now, from dcnet.parameter_groups(model)",
        )
