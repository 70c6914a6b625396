"""Run cases and keep the records: one long-form CSV, a row for each metric, written as it comes."""

import csv
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path

import torch

from dcnet.bench.cases import Case
from dcnet.bench.measure import measure
from dcnet.util.files import naming
from dcnet.util.provenance import provenance
from dcnet.util.text import printable

CASE = [field.name for field in fields(Case)]
COLUMNS = [*CASE, "metric", "p20", "p50", "p80", "repeats", "device", "torch", "triton", "python", "commit", "note"]

Row = dict[str, str]


def read(path: Path) -> list[Row]:
    """Return the rows of a results file; none where there is no file yet."""
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            columns, lines = next(reader, None), [(reader.line_num, line) for line in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file of records: {error}") from error
    if columns is None:
        return []
    if columns != COLUMNS:
        raise ValueError(f"{path} has the columns {printable(', '.join(columns))}; expected {', '.join(COLUMNS)}")
    for number, line in lines:
        if len(line) != len(COLUMNS) or not _is_number(line[COLUMNS.index("p50")]):
            raise ValueError(f"{path}, line {number}, is not what `dcnet bench` writes; remove it to go on")
    return [dict(zip(COLUMNS, line, strict=True)) for _, line in lines]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def run(
    wanted: Iterable[Case],
    path: Path,
    device: torch.device,
    repeats: int,
    progress: Callable[[str], None],
    known_commit: str | None = None,
) -> list[Row]:
    """Measure what the file does not have yet for this device, these versions and this commit; return all its rows."""
    here = provenance(device)
    if known_commit is not None:
        here["commit"] = known_commit
    rows = read(path)
    done = {_key(row) for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    missing = []
    for case in dict.fromkeys(wanted):
        if _key(_row(case) | here) in done:
            progress(f"{case.title}: known")
        else:
            missing.append(case)
    for cases in _together(missing, device):
        try:
            measured, note = measure(cases, device, repeats), ""
        except torch.OutOfMemoryError:
            measured, note = [{"milliseconds": (float("nan"),) * 3}] * len(cases), "out of memory"
        for case, results in zip(cases, measured, strict=True):
            new = [
                _row(case)
                | here
                | {
                    "metric": metric,
                    "p20": f"{p20:.4g}",
                    "p50": f"{p50:.5g}",
                    "p80": f"{p80:.4g}",
                    "repeats": str(repeats),
                    "note": note,
                }
                for metric, (p20, p50, p80) in results.items()
            ]
            _append(path, new)
            rows += new
            progress(
                f"{case.title}: {', '.join(f'{metric} {values[1]:.4g}' for metric, values in results.items())} {note}"
            )
    return rows


def _row(case: Case) -> Row:
    return {name: str(value) for name, value in asdict(case).items()}


def _together(cases: list[Case], device: torch.device) -> list[list[Case]]:
    """Group the cases that take turns: on a CPU all that share a plain twin, on a GPU each by itself."""
    if device.type == "cuda":
        return [[case] for case in cases]
    groups: dict[Case, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.plain, []).append(case)
    return list(groups.values())


def _append(path: Path, rows: list[Row]) -> None:
    fresh = not path.exists() or path.stat().st_size == 0
    with naming(path), path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in (*CASE, "device", "torch", "triton", "commit"))
