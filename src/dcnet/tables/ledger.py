"""The ledger: one JSON line for every cell that was trained, to its end or until its loss was no longer finite."""

import json
import os
from collections.abc import Hashable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dcnet.training import Recipe, Run, recorded
from dcnet.training.run import read_json
from dcnet.util.files import append_line, write_atomically, write_json

# Fields for how a recipe is computed, not for what: recipes that differ only in these fill the same cell. Precision is
# not one of them.
COMPUTED = ("channels_last", "graphs", "compile", "deterministic", "evaluate_every", "save_every")
_FROM_RESULT = ("seconds", "device", "devices", "torch", "triton", "python", "dcnet", "commit")
_ENDS = ("result.json", "diverged.json")  # of which an ended run has one
REPLACES = "replaces.json"  # in run folders: which training in the ledger this one was started to replace
# What is read of every line. Older versions did not write all that this one writes.
_NEEDED = {"cell", "recipe", "seconds"}
_NEEDED_OF_TRAINING, _NEEDED_OF_ATTACKS = {"error", "top5_error", "classes"}, {"attacks"}


def kind_of(recipe: Recipe) -> tuple[Any, ...]:
    """Return the key of the cell that a recipe fills, without data, precision and seed."""
    apart = (*COMPUTED, "data", "precision", "seed")
    return tuple(getattr(recipe, field.name) for field in fields(recipe) if field.name not in apart)


def cell_of(recipe: Recipe) -> tuple[Any, ...]:
    """Return the key of the cell that a recipe fills, with data, precision and seed."""
    return kind_of(recipe), recipe.data, recipe.precision, recipe.seed


@dataclass(frozen=True)
class Entry:
    """A line of the ledger: of training, or of an attack on what was trained."""

    cell: str
    recipe: Recipe
    record: dict[str, Any]

    @property
    def setup(self) -> str | None:
        """The name of the set-up of an attack; None for training."""
        return self.record.get("setup")

    def number(self, measure: str, attack: str | None = None) -> float:
        """Return the number of a cell: that measure of a training, or the accuracy under that attack."""
        if attack is not None:
            return float(self.record["attacks"][attack])
        return float(100.0 - self.record["error"] if measure == "accuracy" else self.record[measure])

    @property
    def diverged(self) -> bool:
        """Whether the loss was not finite, or the network is no better than chance at the end."""
        if self.setup is not None:
            return False
        return self.record["error"] is None or self.record["error"] > 100.0 - 200.0 / self.record["classes"]

    @property
    def gpu_seconds(self) -> float:
        """The cost of the cell: its seconds, divided by the number of cells that ran at once."""
        return float(self.record["seconds"] / self.record.get("jobs", 1))


class Ledger:
    """The entries of a file, to which lines are only added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = []
        # The entries that count, by cell and set-up: the last training, and the last attacks after it. A network that
        # is trained again is another one, and what attacks left of the one before says nothing about it.
        self.counting: dict[Hashable, dict[str | None, Entry]] = {}
        if path.is_file():
            *lines, last = path.read_bytes().split(b"\n")
            for number, line in enumerate(lines + [last] * _whole(last), 1):
                self._count(self._read(number, line))

    def _read(self, number: int, line: bytes) -> Entry:
        try:
            text = line.decode()
            record = json.loads(text)
            if not isinstance(record, dict):
                raise TypeError(f"a cell is an object, {{…}}, not {text[:40]!r}")
            needed = _NEEDED | (_NEEDED_OF_ATTACKS if "setup" in record else _NEEDED_OF_TRAINING)
            if lacking := sorted(needed - set(record)):
                raise ValueError(f"it lacks {', '.join(lacking)}")
            return Entry(record["cell"], recorded(record["recipe"]), record)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}, line {number}, is not what `dcnet table` writes: {error}") from error

    def find(self, recipe: Recipe, setup: str | None = None) -> Entry | None:
        """Return the entry of the same cell that counts: see `counting`."""
        return self.counting.get(cell_of(recipe), {}).get(setup)

    def counts(self, recipe: Recipe, result: dict[str, Any] | None) -> bool:
        """Return whether a result is that of the training that counts, or the first one of its cell."""
        entry = self.find(recipe)
        return result is not None and (entry is None or _of_training(entry.record) == _of_training(_numbers(result)))

    def note_replaced(self, folder: Path, recipe: Recipe) -> None:
        """Note in a run folder which training of the cell, if any, the one that starts there replaces."""
        if (entry := self.find(recipe)) is not None:
            write_json(folder / REPLACES, _of_training(entry.record))

    def replaced_in(self, folder: Path, recipe: Recipe) -> bool:
        """Return whether the training in a run folder was started to replace the one that counts."""
        entry, note = self.find(recipe), folder / REPLACES
        return entry is not None and note.is_file() and read_json(note) == _of_training(entry.record)

    def _count(self, entry: Entry) -> None:
        self.entries.append(entry)
        counting = self.counting.setdefault(cell_of(entry.recipe), {})
        if entry.setup is None:
            before = counting.get(None)
            if before is not None and _of_training(before.record) != _of_training(entry.record):
                counting.clear()
        counting[entry.setup] = entry

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(self.path)
        append_line(self.path, json.dumps(entry.record, ensure_ascii=False))
        self._count(entry)


def entry_of_training(cell: str, run: Run, jobs: int) -> Entry:
    """Return the entry of a run that is finished or has diverged."""
    return _entry(cell, run, _findings(run) | {"jobs": jobs})


def entry_of_attacks(cell: str, run: Run, setup: str, found: dict[str, Any], jobs: int) -> Entry:
    """Return the entry of attacks on a run."""
    attacks = {entry["attack"].split(":")[0]: entry["accuracy"] for entry in found["attacks"]}
    record = {
        "setup": setup,
        "clean": found["clean"],
        "attacks": attacks,
        "images": found["images"],
        "eps": found["eps"],
    }
    record |= {
        "from": found["from"] and Path(found["from"]).name,
        "verdict": found.get("check-up", {}).get("verdict"),
    }
    record |= {"seconds": sum(entry["seconds"] for entry in found["attacks"]), "jobs": jobs}
    return _entry(
        cell, run, record | {name: found[name] for name in _FROM_RESULT if name in found and name != "seconds"}
    )


def _entry(cell: str, run: Run, findings: dict[str, Any]) -> Entry:
    named = {"cell": cell, "run": run.folder.name, "seed": run.recipe.seed}
    return Entry(cell, run.recipe, {**named, **findings, "recipe": asdict(run.recipe)})


def keep_record(run: Run, into: Path) -> None:
    """Copy the records of a run, without checkpoint and logs, into a folder of the same name.

    Of the learned radii, only the last ones are kept. Records there of an earlier training are replaced; of the same
    training, what the run folder does not have is kept.
    """
    folder = into / run.folder.name
    metrics, attacks = run.metrics, run.attacks
    before = kept_record(run, into)
    folder.mkdir(parents=True, exist_ok=True)
    if before is not None:
        attacks = all_attacks(before.attacks, attacks)
    else:  # the result goes first and comes last: where a kill leaves none, nothing there counts as of this training
        for name in (*_ENDS, "metrics.jsonl", "attacks.json"):
            (folder / name).unlink(missing_ok=True)
    write_atomically(folder / "recipe.json", (run.folder / "recipe.json").read_bytes())
    if metrics:
        *earlier, last = metrics
        kept = [{name: value for name, value in entry.items() if name != "learned"} for entry in earlier] + [last]
        write_atomically(folder / "metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in kept).encode())
    if attacks:
        Run(folder).write_attacks(attacks)
    for name in _ENDS:
        if (run.folder / name).is_file():
            write_atomically(folder / name, (run.folder / name).read_bytes())


def kept_record(run: Run, records: Path) -> Run | None:
    """Return what `keep_record` has kept of the same training; None if there is nothing."""
    folder = records / run.folder.name
    kept = Run(folder) if (folder / "recipe.json").is_file() else None
    same = kept is not None and (kept.result, kept.divergence) == (run.result, run.divergence)
    return kept if same else None


def all_attacks(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records of attacks: those of now, and before them those that are neither there nor of the same set-up."""
    setups = {record["setup"] for record in now if "setup" in record}
    return [record for record in before if record not in now and record.get("setup") not in setups] + now


def _whole(last: bytes) -> bool:
    """Return whether what follows the last line's end is a line without one, as editors leave it.

    Otherwise it is empty, or was cut off by a kill.
    """
    try:
        return isinstance(json.loads(last), dict)
    except ValueError:
        return False


def _end_last_line(path: Path) -> None:
    """End the last line, or remove it if a killed process has left it incomplete, so that the next one is separate."""
    if path.is_file() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        start = text.rfind(b"\n") + 1
        with path.open("r+b") as file:
            if _whole(text[start:]):
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
            else:
                file.truncate(start)


def _of_training(record: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a line that no two trainings of a cell share."""
    return {name: record.get(name) for name in ("error", "epoch", *_FROM_RESULT)}


def _numbers(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a finished run as lines have it."""
    numbers = {
        "error": round(100.0 - result["accuracy"], 4),
        "top5_error": round(100.0 - result["top5_accuracy"], 4),
        "epoch": result["epochs"],
    }
    return {**numbers, **_provenance(result)}


def _provenance(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("classes", *_FROM_RESULT)}


def _findings(run: Run) -> dict[str, Any]:
    """Return the error of the last epoch, or the epoch of the divergence, with the provenance."""
    result, divergence, metrics = run.result, run.divergence, run.metrics
    if result is None:
        assert divergence is not None
        found = {"error": None, "top5_error": None, "epoch": divergence["epoch"], "why": divergence["why"]}
        return {**found, **_provenance(divergence)}
    if not metrics:  # a run that was restored from its weights
        return _numbers(result)
    return {**_numbers(result), "train_error": round(100.0 - metrics[-1]["train_accuracy"], 4)}
