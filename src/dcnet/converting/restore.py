"""Convert a newly built model as a saved one was converted, before its weights are loaded."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import nn

from dcnet.converting.candidates import CONVERTIBLE
from dcnet.converting.convert import decouple_
from dcnet.layers.decoupled import Decoupled
from dcnet.layers.selection import ALL, Where
from dcnet.layers.types import Model


def restore_conversion_(model: Model, conversion: Mapping[str, Mapping[str, Any]]) -> Model:
    """Convert the layers of a plain model that `conversion_of` names, and return it; load the weights afterward.

    Args:
        model: the plain model.
        conversion: what `conversion_of` returned for the converted one.

    Examples:
        >>> import dcnet
        >>> model, again = (nn.Sequential(nn.Conv2d(3, 8, 3)) for _ in range(2))
        >>> report = dcnet.decouple_(model, "ball", radius=2.0)
        >>> dcnet.restore_conversion_(again, dcnet.conversion_of(model))[0].magnitude
        'ball'
        >>> again.load_state_dict(model.state_dict())
        <All keys matched successfully>
    """
    modules = dict(model.named_modules())
    for name in conversion:
        module = modules.get(name)
        if not isinstance(module, CONVERTIBLE) or isinstance(module, Decoupled):
            found = "there is none of that name" if module is None else f"that is a {type(module).__name__}"
            raise ValueError(
                f"cannot convert layer {name!r} as recorded: {found}. Is this the model the record was made of, "
                "built anew?"
            )
    alike: dict[tuple[Any, ...], set[str]] = {}
    for name, options in conversion.items():
        alike.setdefault(tuple(sorted(options.items(), key=lambda item: item[0])), set()).add(name)
    for chosen, names in alike.items():
        kinds = tuple({type(modules[name]) for name in names})
        report = decouple_(model, where=[ALL, _among(names)], types=kinds, **dict(chosen))
        left = names - set(report.converted)
        if left:
            raise ValueError(f"layer {min(left)!r} was not converted as recorded: {report.skipped[min(left)]}")
    return model


def _among(names: set[str]) -> Where:
    return lambda name, module: name in names


def from_pretrained(kind: type[Model], source: str | PathLike[str], *arguments: Any, **options: Any) -> Model:
    """Return the model of `kind.from_pretrained(source, …)` of transformers, converted as it was when it was saved.

    `kind.from_pretrained` alone would build the plain network.

    Args:
        kind: the class of the model itself, such as `ResNetForImageClassification`.
        source: a folder or a name, as for `from_pretrained` of transformers.
        *arguments: passed on.
        **options: passed on.
    """
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise TypeError(f"kind must be the class of a model, which is an nn.Module, got {kind!r}")

    base: Any = kind  # which is known when it runs

    class Converted(base):  # type: ignore[misc]
        def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(config, *arguments, **options)
            conversion = getattr(config, "dcnet", None)
            if not conversion:
                raise ValueError(
                    f"{source!r} has no conversion in its configuration; use {kind.__name__}.from_pretrained"
                )
            restore_conversion_(self, conversion)

    Converted.__name__, Converted.__qualname__ = kind.__name__, kind.__qualname__
    model: Model = Converted.from_pretrained(source, *arguments, **options)
    model.__class__ = kind  # only the layers are decoupled; the model is of its usual class
    return model
