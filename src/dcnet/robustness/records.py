"""The records in `attacks.json` of a run folder, one for each call of `dcnet attack`.

This module decides which records are comparable, and which one stands for the run.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcnet.robustness.checkup import STRONGER, STRONGER_TEST
from dcnet.robustness.evaluate import as_typed

Record = dict[str, Any]


def eps_of(record: Record) -> float | None:
    """Return ε in units of 1/255, rounded so that 8/255 and 0.031373 are the same; None if it was not recorded."""
    return None if record.get("eps") is None else round(255.0 * record["eps"], 2)


def conditions(record: Record) -> tuple[Any, ...]:
    """Return what two records must have in common, besides the attack, for their figures to be comparable.

    This is ε, images, labels, source, arithmetic and statistics.
    """
    source = record.get("from") if record["transfer"] else None
    return (
        eps_of(record),
        record.get("images"),
        record["labels"],
        record["transfer"],
        source,
        bool(record.get("bf16")),
        record.get("statistics", "running"),
    )


def in_words(record: Record) -> str:
    """Describe a record in one line: what was done, under what conditions, and the outcome."""
    found = [
        as_typed(entry["attack"]) + (f" {entry['accuracy']:.2f}%" if "accuracy" in entry else "")
        for entry in record["attacks"]
    ]
    eps = "ε unknown" if eps_of(record) is None else f"ε·255 = {eps_of(record):g}"
    source = f", made on {record.get('from') or 'another network'}" if record["transfer"] else ""
    extras = ", with E of the batch" if record.get("statistics") == "batch" else ""
    extras += (", in bf16" if record.get("bf16") else "") + (", with a check-up" if "check-up" in record else "")
    setup = f"{eps}, {record.get('images', '?')} images, {record['labels']} labels{source}{extras}"
    return f"{setup}: {', '.join(found) or 'no attack'}"


def replaced(records: Sequence[Record], new: Record) -> list[Record]:
    """Return the records with the new one instead of those of the same attacks under the same conditions.

    Other attacks of an older record stay. Its check-up moves to the new record, unless that has its own.
    """
    again = {entry["attack"] for entry in new["attacks"]}
    kept = []
    for record in records:
        if conditions(record) != conditions(new):
            kept.append(record)
            continue
        if "check-up" in record and "check-up" not in new:
            new = {**new, "check-up": record["check-up"]}
        left = [entry for entry in record["attacks"] if entry["attack"] not in again]
        if left:
            kept.append({key: value for key, value in record.items() if key != "check-up"} | {"attacks": left})
    return [*kept, new]


def _own(records: Iterable[Record]) -> list[Record]:
    """Return the records of a network's own robustness: attacks on itself, with true labels, with an accuracy."""
    return [
        record
        for record in records
        if not record["transfer"]
        and record["labels"] == "true"
        and eps_of(record) is not None
        and any("accuracy" in e for e in record["attacks"])
    ]


def common_eps(runs: Iterable[Sequence[Record]]) -> float | None:
    """Return the ε, in units of 1/255, that most of these runs were attacked with.

    Among equals, choose the one with the most images, then the last one.
    """
    counts: dict[float, tuple[int, int, int]] = {}
    for records in runs:
        own = _own(records)
        for eps in {found for record in own if (found := eps_of(record)) is not None}:
            mine = [number for number, record in enumerate(own) if eps_of(record) == eps]
            count, images, last = counts.get(eps, (0, 0, 0))
            counts[eps] = (
                count + 1,
                images + max(own[number].get("images", 0) for number in mine),
                max(last, mine[-1]),
            )
    return max(counts, key=lambda eps: counts[eps]) if counts else None


def check_up_at(records: Iterable[Record], eps: float | None) -> dict[str, Any] | None:
    """Return the last check-up at that ε, in units of 1/255."""
    found = [record["check-up"] for record in records if "check-up" in record and eps_of(record["check-up"]) == eps]
    return found[-1] if found else None


def check_ups_of(runs: Mapping[str, Sequence[Record]]) -> tuple[float | None, dict[str, dict[str, Any]]]:
    """Return the ε, in units of 1/255, at which most runs have a check-up, and those check-ups.

    Among equals, choose `common_eps`, then the largest one.
    """
    sizes = {
        name: {eps_of(record["check-up"]) for record in records if "check-up" in record}
        for name, records in runs.items()
    }
    all_of_them = sorted({eps for mine in sizes.values() for eps in mine if eps is not None})
    if not all_of_them:
        return None, {}
    table = common_eps(runs.values())
    eps = max(all_of_them, key=lambda size: (sum(size in mine for mine in sizes.values()), size == table, size))
    found = {name: check_up_at(records, eps) for name, records in runs.items()}
    return eps, {name: check_up for name, check_up in found.items() if check_up is not None}


def doubt(accuracy: float, check_up: dict[str, Any] | None) -> str | None:
    """Return why the check-up at its ε casts doubt on an accuracy under attack, in percent; None if it does not."""
    if check_up is None:
        return "no check-up was made at this ε"
    # a stronger attack that finds more only casts doubt on figures that are higher; that is compared below
    if failed := [test["test"] for test in check_up["tests"] if not test["passed"] and test["test"] != STRONGER_TEST]:
        return f"the check-up fails ({', '.join(failed)})"
    stronger, count = (
        min(check_up[name] for name in ("pgd", "pgd, stronger", "square") if name in check_up),
        check_up["images"],
    )
    share = (stronger / 100.0 * count + 1.0) / (count + 2.0)  # not 0 or 1, which would give a standard error of 0
    chance = 200.0 * math.sqrt(share * (1.0 - share) / count)  # two standard errors, in percent
    if accuracy - stronger > STRONGER + chance:
        return f"stronger attacks leave {stronger:.1f}% of the {count} images of the check-up"
    return None


@dataclass(frozen=True)
class Headline:
    """The figure that stands for a run, and what the check-up at that ε says about it.

    It is the accuracy that the strongest attack of one set-up leaves.
    """

    accuracy: float
    attack: str  # where several came one after the other, all of them
    eps: float  # in units of 1/255
    images: int
    check_up: dict[str, Any] | None

    @property
    def doubt(self) -> str | None:
        """Why it may be wrong; None if there is no such reason."""
        return doubt(self.accuracy, self.check_up)


def headline(records: Sequence[Record], eps: float | None) -> Headline | None:
    """Return the lowest accuracy at that ε (in units of 1/255); None if there is none.

    Only attacks on the run itself with true labels count, and of these the ones on the most images.
    """
    own = [record for record in _own(records) if eps_of(record) == eps]
    if not own:
        return None
    # bf16 weakens attacks, so its records only count if there are no others
    images, exact = max((record.get("images", 0), not record.get("bf16")) for record in own)
    own = [record for record in own if (record.get("images", 0), not record.get("bf16")) == (images, exact)]
    accuracy, attack = min(
        ((entry["accuracy"], name) for record in own for name, entry in _named(record)), key=lambda found: found[0]
    )
    assert eps is not None
    return Headline(accuracy, attack, eps, images, check_up_at(records, eps))


def _named(record: Record) -> list[tuple[str, Record]]:
    """Return the accuracies of a record, each with the name of its attack.

    If each attack only saw the survivors of the one before, the name has all attacks so far.
    """
    found: list[tuple[str, Record]] = []
    names: list[str] = []
    for entry in record["attacks"]:
        if "accuracy" in entry:
            name = as_typed(entry["attack"])
            names = [*names, name] if record.get("cumulative") else [name]
            found.append((" + ".join(names), entry))
    return found
