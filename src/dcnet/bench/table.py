"""A table out of the records: ratios to the plain network in the same run of the benchmark."""

from collections.abc import Iterable
from pathlib import Path

from dcnet.bench.cases import Case
from dcnet.bench.records import CASE, Row
from dcnet.util.files import write_atomically

BEGIN, END = "<!-- dcnet bench: begin -->", "<!-- dcnet bench: end -->"
_TOGETHER = ("device", "torch", "triton", "commit")  # a ratio is taken within these


def render(rows: Iterable[Row]) -> str:
    """Return a Markdown table of time and peak memory, each as a ratio to the plain twin.

    The last record of a case counts.
    """
    values: dict[tuple[str, ...], float] = {}
    order: dict[tuple[str, ...], Row] = {}
    for row in rows:
        case = tuple(row[name] for name in CASE)
        together = tuple(row[name] for name in _TOGETHER)
        values[*together, *case, row["metric"]] = float(row["p50"])
        order.setdefault((*together, *case), row)
    lines = []
    for row in order.values():
        if not row["operator"]:
            continue
        plain = _case(row).plain
        together = tuple(row[name] for name in _TOGETHER)
        mine = (*together, *(row[name] for name in CASE))
        twin = (*together, *(str(getattr(plain, name)) for name in CASE))
        time = _ratio(values.get((*mine, "milliseconds")), values.get((*twin, "milliseconds")))
        memory = _ratio(values.get((*mine, "peak MiB")), values.get((*twin, "peak MiB")))
        kernels = _ratio(values.get((*mine, "kernels, milliseconds")), values.get((*twin, "kernels, milliseconds")))
        milliseconds = values[*mine, "milliseconds"]
        what = f"{row['name']}, {row['mode']}"
        setting = f"{row['batch']}, {row['dtype']}, {row['layout']}"
        lines.append(
            f"| {what} | {setting} | {row['operator']} | {row['provider']} | {milliseconds:.4g} | {time} | "
            f"{kernels} | {memory} |"
        )
    head = (
        "| what | batch, dtype, layout | operator | provider | ms | time | kernels alone | memory |\n"
        + "|---" * 8
        + "|"
    )
    made = sorted(
        {f"{row['device']}, torch {row['torch']}, commit {row['commit']}" for row in order.values() if row["operator"]}
    )
    return "\n".join(
        [
            head,
            *lines,
            "",
            "Time, time of the GPU's kernels alone (without waiting for the host) and peak memory as ratios to "
            "the plain network in the same run. " + "; ".join(made) + ".",
        ]
    )


def render_into(path: Path, table: str, begin: str = BEGIN, end: str = END) -> None:
    """Put the table between its two marks in a file."""
    before, after = around(path, begin, end)
    write_atomically(path, f"{before}{begin}\n{table}\n{end}{after}".encode())


def around(path: Path, begin: str = BEGIN, end: str = END) -> tuple[str, str]:
    """Return what is before and after the two marks in a file; raise where they are not there once each, in order."""
    text = read_page(path)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{path} must have the lines {begin} and {end} once each, for the table to go between")
    return text.split(begin)[0], text.split(end)[1]


def read_page(path: Path) -> str:
    """Return the text of a file that tables go into; raise where there is none."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{path} {what}; possible: a file with marks that a table goes between")
    try:
        return path.read_bytes().decode()  # with its own ends of lines
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from error


def _case(row: Row) -> Case:
    return Case(**{name: int(row[name]) if name == "batch" else row[name] for name in CASE})  # type: ignore[arg-type]


def _ratio(value: float | None, plain: float | None) -> str:
    return "" if value is None or plain is None else f"{value / plain:.2f}"
