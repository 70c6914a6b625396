"""The README's table out of the records: ratios to the plain network in the same run of the benchmark."""

from collections.abc import Iterable
from pathlib import Path

from dcnet.bench.cases import Case
from dcnet.bench.records import CASE, Row

BEGIN, END = "<!-- dcnet bench: begin -->", "<!-- dcnet bench: end -->"
# What a reader wants to know first: what cheap and costly operators cost, and what it would cost without these kernels.
_STEP = "resnet32, training step, batch 512, bfloat16, channels_last"
BRIEF = (
    *(
        f"{_STEP}, ours {operator}"
        for operator in ("tanh + cosine", "linear + cosine", "seg + square_cosine", "tanh + sigmoid")
    ),
    f"{_STEP}, straightforward tanh + cosine",
)
_TOGETHER = ("device", "torch", "triton", "commit")  # a ratio is taken within these


def render(rows: Iterable[Row], brief: bool = False) -> str:
    """Return a Markdown table of time and peak memory, each as a ratio to the plain twin.

    The last record of a case counts. brief: only the rows in BRIEF.
    """
    if brief:
        rows = [row for row in rows if not row["operator"] or _case(row).title in BRIEF]
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
    text = path.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{path} must have the lines {begin} and {end} once each, for the table to go between")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    path.write_text(f"{before}{begin}\n{table}\n{end}{after}")


def _case(row: Row) -> Case:
    return Case(**{name: int(row[name]) if name == "batch" else row[name] for name in CASE})  # type: ignore[arg-type]


def _ratio(value: float | None, plain: float | None) -> str:
    return "" if value is None or plain is None else f"{value / plain:.2f}"
