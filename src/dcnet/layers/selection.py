"""Where to convert: patterns of names, presets, functions, or a list of them."""

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from dcnet.layers.optimization import Where
from dcnet.util.suggest import nearest

Selector = str | Where | Iterable["str | Where"] | None

ALL = "all"


def _is_spatial(module: nn.Module) -> bool:
    return any(size > 1 for size in getattr(module, "kernel_size", ()))


def _is_depthwise(module: nn.Module) -> bool:
    groups = getattr(module, "groups", 1)
    return groups > 1 and groups == getattr(module, "in_channels", None)


# each with the reason it gives for a layer it leaves
_PRESETS: dict[str, tuple[Callable[[nn.Module], bool], str]] = {
    ALL: (lambda module: True, ""),
    "spatial": (_is_spatial, "its kernel is 1×1, and where='spatial' takes larger ones"),
    "not-first": (lambda module: True, "the first one, which where='not-first' leaves alone"),
    "not-depthwise": (lambda module: not _is_depthwise(module), "depthwise, which where='not-depthwise' leaves alone"),
}
PRESETS = tuple(_PRESETS)


class Selection:
    """What `where=` says about the layers of a model, checked.

    layers: the candidates by name. A pattern matches the name of a layer, or of a module around it, as file names are
    matched: `*` is any text, dots included. Several patterns select the layers that any of them matches; a pattern
    after "!", a preset and a function each take layers away. "all" takes nothing away, and lets gates be converted too.
    """

    def __init__(self, where: Selector, layers: Mapping[str, nn.Module]) -> None:
        self.items = [where] if isinstance(where, str) or callable(where) else self._listed(where)
        self.layers = layers
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
        """Raise for a pattern that matches no layer: it would convert everything, or nothing, without a word."""
        if any(_matches(pattern.removeprefix("!"), name) for name in self.layers):
            return
        guess = nearest(pattern.removeprefix("!"), [*PRESETS, *self.layers])
        names = list(self.layers)
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


def _matches(pattern: str, name: str) -> bool:
    """Tell whether a pattern matches the name of a layer, or of a module around it."""
    around = accumulate(name.split("."), lambda a, b: f"{a}.{b}")
    return any(fnmatchcase(whole, pattern) for whole in around)
