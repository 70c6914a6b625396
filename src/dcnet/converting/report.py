"""Reports of what was done to a model, as tables to print."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn


class Change(NamedTuple):
    """A number before a conversion, and after it."""

    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.before:,}" if self.before == self.after else f"{self.before:,} → {self.after:,}"


@dataclass(frozen=True)
class Row:
    """One layer in a report. multiply_adds: None if no example input was given."""

    layer: str
    kind: str
    became: str  # an operator, or the reason why the layer was left
    left: bool
    parameters: Change
    multiply_adds: Change | None = None


def shown(name: str) -> str:
    """Return a layer's name for reports."""
    return name or "(the model itself)"


def kind_of(layer: nn.Module) -> str:
    """Return a layer's class with its kernel, stride and groups, such as "Conv2d 3×3/2"."""
    text = type(layer).__name__
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return text
    text += " " + "×".join(map(str, layer.kernel_size))
    if any(step != 1 for step in layer.stride):
        steps = layer.stride[:1] if len(set(layer.stride)) == 1 else layer.stride
        text += "/" + "×".join(map(str, steps))
    if layer.groups == 1:
        return text
    return f"{text} depthwise" if layer.groups == layer.in_channels else f"{text} groups={layer.groups}"


def table_of(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table of layers, and below it the reasons for those left, each once."""
    reasons = list(dict.fromkeys(row.became for row in rows if row.left))
    counted = [row.multiply_adds for row in rows if row.multiply_adds is not None]
    head = ["layer", "kind", "what became of it", "parameters"] + ["multiply-adds"] * bool(counted)
    cells = [
        [
            shown(row.layer),
            row.kind,
            f"left ({reasons.index(row.became) + 1})" if row.left else row.became,
            str(row.parameters),
            *([str(row.multiply_adds)] if row.multiply_adds is not None else []),
        ]
        for row in rows
    ]
    total = ["all of them", "", "", str(_total([row.parameters for row in rows]))]
    total += [str(_total(counted))] * bool(counted)
    widths = [max(map(len, column)) for column in zip(head, *cells, total, strict=True)]
    lines = [
        "  ".join(
            _placed(cell, width, i >= 3) for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [head, *cells, total]
    ]
    rule = "  ".join("-" * width for width in widths)
    return [lines[0], rule, *lines[1:-1], rule, lines[-1], *(f"({i}) {reason}" for i, reason in enumerate(reasons, 1))]


def _placed(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def _total(changes: Sequence[Change]) -> Change:
    return Change(sum(change.before for change in changes), sum(change.after for change in changes))
