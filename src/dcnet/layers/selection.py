"""What `where=` means: patterns of names, presets, functions, or a list of them."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TypeVar

from torch import nn

from dcnet.util.compat import constant_in_graphs
from dcnet.util.suggest import nearest

Where = Callable[[str, nn.Module], bool]
Selector = str | Where | Sequence[str | Where] | AbstractSet[str | Where] | None

Layer = TypeVar("Layer", bound=nn.Module)

_PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)

ALL = "all"


def _is_spatial(module: nn.Module) -> bool:
    return any(size > 1 for size in getattr(module, "kernel_size", ()))


def _is_depthwise(module: nn.Module) -> bool:
    groups = getattr(module, "groups", 1)
    return groups > 1 and groups == getattr(module, "in_channels", None)


# each with its reason for leaving a layer
_PRESETS: dict[str, tuple[Callable[[nn.Module], bool], str]] = {
    ALL: (lambda module: True, ""),
    "spatial": (_is_spatial, "its kernel is 1×1, and where='spatial' takes larger ones"),
    "not-first": (lambda module: True, "the first one, which where='not-first' leaves alone"),
    "not-depthwise": (lambda module: not _is_depthwise(module), "depthwise, which where='not-depthwise' leaves alone"),
}
PRESETS = tuple(_PRESETS)


class Selection:
    """What `where=` says about the layers of a model, checked.

    layers: the candidates by name; "not-first" leaves the first of them alone. A pattern matches the name of a layer,
    or of a module around it, like file names: `*` is any text, including dots. Several patterns select the layers that
    any of them matches. Each pattern after "!", each preset and each function removes layers. "all" removes nothing,
    and lets gates be converted too.
    selectable: the candidates that can be selected, if not all can be. A pattern must match one of these; a pattern
    after "!" must match any candidate.
    """

    def __init__(
        self, where: Selector, layers: Mapping[str, nn.Module], selectable: Mapping[str, nn.Module] | None = None
    ) -> None:
        self.items = [where] if isinstance(where, str) or callable(where) else self._listed(where)
        self.layers, self.selectable = layers, layers if selectable is None else selectable
        self.patterns = [item for item in self.items if isinstance(item, str) and item not in _PRESETS]
        for pattern in self.patterns:
            self._check(pattern)
        self.first = next(iter(layers.values()), None)

    @staticmethod
    def _listed(where: Selector) -> "list[str | Where]":
        if where is None:
            return []
        items = list(where) if isinstance(where, list | tuple | set | frozenset) else []
        if not items or any(not isinstance(item, str) and not callable(item) for item in items):
            raise TypeError(
                "where must be a function of (name, module), a pattern of names such as 'layer[1-4].*' or '!stem*', "
                f"one of {', '.join(map(repr, PRESETS))}, or a list of these, got {where!r}"
            )
        return items

    def _check(self, pattern: str) -> None:
        """Raise for a pattern that matches no layer: it would silently select everything, or nothing."""
        names = list(self.layers if pattern.startswith("!") else self.selectable)
        if any(_matches(pattern.removeprefix("!"), name) for name in names):
            return
        guess = nearest(pattern.removeprefix("!"), [*PRESETS, *names])
        shown = ", ".join(map(repr, names[:8])) + (", …" if len(names) > 8 else "")
        raise ValueError(
            f"where: {pattern!r} is no preset and matches no layer.{guess} Presets: {', '.join(PRESETS)}; "
            f"layers: {shown or 'none'}"
        )

    @property
    def takes_gates(self) -> bool:
        return ALL in self.items

    def reason_to_leave(self, name: str, module: nn.Module) -> str:
        """Say why the layer is not among those to convert, or nothing."""
        wanted = [pattern for pattern in self.patterns if not pattern.startswith("!")]
        if wanted and not any(_matches(pattern, name) for pattern in wanted):
            return f"its name does not match {' or '.join(map(repr, wanted))}"
        for item in self.items:
            if not isinstance(item, str):
                if not item(name, module):
                    return "where(name, module) said no"
            elif item in _PRESETS:
                admits, reason = _PRESETS[item]
                if not admits(module) or (item == "not-first" and module is self.first):
                    return reason
            elif item.startswith("!") and _matches(item[1:], name):
                return f"excluded by {item!r}"
        return ""


def selected(model: nn.Module, layers: Mapping[str, Layer], where: Selector) -> dict[str, Layer]:
    """Return the decoupled layers of a model that `where=` selects; raise for a pattern that matches none of them.

    Selectors mean the same as in `decouple_`: "not-first" leaves the first layer of the network alone, even if that was
    not converted, and "!stem*" is not an error then. In a plain network nothing can be selected, but patterns are
    checked against the names of its layers.
    """
    if where is None:
        return dict(layers)
    kinds = tuple(kind for kind in _PLAIN if any(isinstance(layer, kind) for layer in layers.values())) or _PLAIN
    alike = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    selection = Selection(where, alike, layers or alike)
    return {name: layer for name, layer in layers.items() if not selection.reason_to_leave(name, layer)}


@constant_in_graphs  # fnmatch cannot be traced
def _matches(pattern: str, name: str) -> bool:
    """Tell whether a pattern matches the name of a layer, or of a module around it."""
    around = accumulate(name.split("."), lambda a, b: f"{a}.{b}")
    return any(fnmatchcase(whole, pattern) for whole in around)
