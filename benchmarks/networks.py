"""Networks and their price, and the table of it, made of the records: networks.py RECORDS PAGE [--all].

The README has the rows that matter most, benchmarks/h200.md has all.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from dcnet.bench.cases import Case
from dcnet.bench.table import render_into

BEGIN, END = "<!-- networks: begin -->", "<!-- networks: end -->"
KINDS = {"plain": ("", "plain"), "decoupled": ("tanh + cosine", "ours")}  # operator and provider of a case
FIRST = "first step, no kernel compiled before"


class Network(NamedTuple):
    """A row of the table."""

    model: str
    batch: int
    mode: str = "eager"

    @property
    def title(self) -> str:
        return f"{self.model.replace(':', ' ')}, {self.batch}" + ("" if self.mode == "eager" else f", {self.mode}")

    def case(self, kind: str) -> Case:
        operator, provider = KINDS[kind]
        external = ":" in self.model
        return Case(
            what="model" if external else "network",
            name=f"{self.model}@224" if external else self.model,
            mode="inference" if "inference" in self.mode else "training step",
            batch=self.batch,
            dtype="bfloat16",
            layout="channels_last",
            operator=operator,
            provider=provider + (" compiled" if self.mode.startswith("torch.compile") else ""),
        )


NETWORKS = (
    Network("timm:resnet50", 128),
    Network("timm:resnet18", 128),
    Network("timm:convnext_tiny", 64),
    Network("timm:mobilenetv3_large_100", 128),
    Network("timm:efficientnet_b0", 64),
    Network("resnet32", 512),
    Network("resnet32", 128),
    Network("resnet32", 32),
    Network("cnn9", 128),
    Network("cnn9_narrow", 128),
    Network("resnet32", 512, "torch.compile"),
    Network("resnet32", 128, "torch.compile"),
    Network("timm:resnet50", 128, "torch.compile"),
    Network("resnet32", 512, "torch.compile, inference"),
)
_LESS_TELLING = (
    Network("timm:resnet18", 128),
    Network("resnet32", 32),
    Network("cnn9", 128),
    Network("resnet32", 128, "torch.compile"),
)
IN_README = tuple(network for network in NETWORKS if network not in _LESS_TELLING)
FIRST_STEPS = (Network("cnn9_narrow", 128, FIRST), Network("resnet32", 512, FIRST))


def table(lines: Iterable[str], networks: Sequence[Network] = NETWORKS) -> str:
    """Return the table: of each network the records of the last commit, plain and decoupled in a round of one run."""
    rounds: dict[Network, dict[tuple[str, int], dict[str, dict[str, Any]]]] = {}
    commits: dict[Network, str] = {}
    for record in map(json.loads, lines):
        network = Network(record["model"], record["batch"], record["mode"])
        if network not in NETWORKS or record.get("host_code") != "C++":
            continue
        if commits.setdefault(network, record["commit"]) != record["commit"]:
            commits[network] = record["commit"]
            rounds.pop(network)
        kind = "plain" if record["kind"] == "plain" else "decoupled"
        rounds.setdefault(network, {}).setdefault((record.get("run", ""), record["round"]), {})[kind] = record
    rows = ["| network, batch | plain, ms | time | memory |", "|---|---|---|---|"]
    for network in networks:
        pairs = list(rounds.get(network, {}).values())
        if pairs:
            plain = _span([pair["plain"]["ms"] for pair in pairs], 1)
            ratios = [_span(list(_ratios(pairs, name)), 2) for name in ("ms", "MB")]
            rows.append(f"| {network.title} | {plain} | {' | '.join(ratios)} |")
    return "\n".join(rows)


def _ratios(pairs: Iterable[dict[str, dict[str, Any]]], name: str) -> Iterator[float]:
    return (pair["decoupled"][name] / pair["plain"][name] for pair in pairs)


def _span(numbers: list[float], digits: int) -> str:
    """Return the median, and the least and the greatest number where they differ."""
    middle, low, high = (f"{number:.{digits}f}" for number in (median(numbers), min(numbers), max(numbers)))
    return middle if low == high else f"{middle} ({low}–{high})"


if __name__ == "__main__":
    chosen = NETWORKS if "--all" in sys.argv else IN_README
    records, page = (Path(one) for one in sys.argv[1:] if one != "--all")
    render_into(page, table(records.read_text(encoding="utf-8").splitlines(), chosen), BEGIN, END)
