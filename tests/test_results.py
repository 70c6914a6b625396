"""What results/ says is what its records say."""

import json
import re
from pathlib import Path
from statistics import mean, stdev

import pytest

from dcnet.tables import TABLES, Ledger, markdown, settings_of
from dcnet.training import Run

RESULTS = Path(__file__).parent.parent / "results"
FOLDERS = sorted(path.parent for path in RESULTS.rglob("result.json"))
CELLS = RESULTS / "tables"  # whose page is made of the ledger


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(RESULTS)))
def test_a_record_is_whole(folder):
    run = Run(folder)
    assert run.metrics[-1]["test_accuracy"] == run.accuracy
    assert run.metrics[-1]["step"] == run.result["steps"]
    assert run.recipe.data == run.result["data"]


def test_numbers_of_the_page():
    """Every line with a link to a record has its accuracy, or its error, in percent."""
    seen = set()
    for line in (RESULTS / "README.md").read_text().splitlines():
        for link in re.findall(r"\]\(((?!tables|conversion)[\w/-]+)\)", line):
            accuracy = json.loads((RESULTS / link / "result.json").read_text())["accuracy"]
            assert f"{accuracy:.2f}%" in line or f"{100 - accuracy:.2f}%" in line, line
            seen.add(RESULTS / link)
    assert seen == {folder for folder in FOLDERS if CELLS not in folder.parents}


def test_the_ledger_is_of_the_records():
    """Every line has its record with the same recipe and error, and every record its line."""
    entries = Ledger(CELLS / "ledger.jsonl").entries
    assert {entry.record["run"] for entry in entries} == {folder.name for folder in (CELLS / "runs").iterdir()}
    for entry in entries:
        run = Run(CELLS / "runs" / entry.record["run"])
        assert run.recipe == entry.recipe
        if entry.setup is None:
            assert run.result is None or round(100.0 - run.accuracy, 4) == entry.record["error"]
        else:
            (found,) = [attacked for attacked in run.attacks if attacked.get("setup") == entry.setup]
            numbers = {one["attack"].split(":")[0]: one["accuracy"] for one in found["attacks"]}
            assert (numbers, found["from"]) == (entry.record["attacks"], entry.record["from"])
            assert found["from"] is None or (CELLS / "runs" / found["from"]).is_dir()


def test_the_readme_counts_them():
    trained = sum(entry.setup is None for entry in Ledger(CELLS / "ledger.jsonl").entries)
    assert f"({trained} networks trained so far)" in (RESULTS.parent / "README.md").read_text()


def worth():
    """Every row of the README's first table: our mean over the seeds, and the paper's number."""
    columns = {"Baseline": "Cosine", "LinearConv": "Cosine", "TanhConv": "Cosine", "SegConv": "Cosine"}
    rows = {"ResNet-32": ("resnet32", "", ""), "CNN-9": ("cnn9", ", ReLU", ", no ReLU")}
    rows["CNN-9 without BatchNorm"] = ("cnn9-no-batchnorm", "", "")
    for title, (name, relu, last) in rows.items():
        (shown,) = settings_of(TABLES[name], Ledger(CELLS / "ledger.jsonl"), {}).values()
        wanted = [f"{row}, {column}{relu}" for row, column in columns.items()] + [f"SegConv, Sq. cosine{last}"]
        cells = []
        for one in (shown[key] for key in wanted):
            numbers, paper = one.numbers, one.cell.paper
            text = f"{mean(numbers):.2f}" if numbers else "N/C"
            text += f" ± {stdev(numbers):.2f}" if len(numbers) == 3 else ""
            cells.append(f"{text} ({paper:.2f})" if isinstance(paper, float) else f"{text} ({paper})")
        yield f"| {title} | {' | '.join(cells)} |"


def test_the_readme_says_what_it_is_worth():
    rows, text = list(worth()), (RESULTS.parent / "README.md").read_text()
    assert "\n".join(rows) in text
    gains = []
    for row in rows:
        plain, *ours = (cell.split()[0] for cell in row.strip("| ").split(" | ")[1:])
        gains += [float(plain) - float(error) for error in ours if error != "N/C"]
    assert len(gains) == 3 * 4 - 1
    assert f"{min(gains):.1f} to {max(gains):.1f} points less test error" in text


def test_what_pages_say_of_todays_recipe():
    (shown,) = settings_of(TABLES["best"], Ledger(CELLS / "ledger.jsonl"), {}).values()
    error = {
        (operator, data): shown[f"{row}, {column}"].ours
        for operator, row in (("plain", "Baseline"), ("seg", "SegConv, cosine"))
        for data, column in ((10, "CIFAR-10"), (100, "CIFAR-100"))
    }
    plain, seg = ((error[operator, 100], error[operator, 10]) for operator in ("plain", "seg"))
    readme, choosing, results = (
        (RESULTS.parent / name).read_text() for name in ("README.md", "docs/choosing.md", "docs/results.md")
    )
    assert (
        f"to {plain[0]}% on CIFAR-100 and {plain[1]}% on CIFAR-10, and `seg` + `cosine` to {seg[0]} and {seg[1]}%"
        in readme
    )
    assert (
        f"plain {plain[0]} % on CIFAR-100 and {plain[1]} % on CIFAR-10, `seg` + `cosine` {seg[0]} and {seg[1]} %"
        in choosing
    )
    assert f"| plain, `best-cifar` | **{plain[0]}** | {plain[1]} |" in results
    assert f"| SegConv with cosine, `best-cifar` | {seg[0]} | **{seg[1]}** |" in results
    (paper,) = settings_of(TABLES["resnet32"], Ledger(CELLS / "ledger.jsonl"), {}).values()
    before = [paper[f"{row}, Cosine"].ours for row in ("Baseline", "SegConv")]
    gains = [float(old) - float(new[0]) for old, new in zip(before, (plain, seg), strict=True)]
    leads = [float(before[0]) - float(before[1]), float(plain[0]) - float(seg[0])]
    words = f"the plain network by {gains[0]:.1f} points and SegConv by {gains[1]:.1f}, and the operator's lead of "
    assert words + f"{leads[0]:.1f} points becomes −{-leads[1]:.1f}" in results


def test_what_pages_say_of_trades():
    ledger = Ledger(CELLS / "ledger.jsonl")
    (shown,) = (
        one for setting, one in settings_of(TABLES["white-box"], ledger, {}).items() if setting.schedule == "short"
    )
    names = {"plain": "Baseline", "sphere": "SphereConv", "tanh": "TanhConv", "seg": "SegConv"}
    rows = ("no attack", "PGD-50×5")
    clean, pgd = (
        {name: shown[f"TRADES-trained: {row}, {cell}"].numbers[0] for name, cell in names.items()} for row in rows
    )
    both = {name: f"{clean[name]:.1f} and {pgd[name]:.1f}" for name in names}
    sentence = (
        f"plain {both['plain']}, SphereConv {both['sphere']}, TanhConv {both['tanh']},\n    SegConv {both['seg']}."
    )
    assert sentence in (RESULTS.parent / "docs" / "results.md").read_text()
    choosing = (RESULTS.parent / "docs" / "choosing.md").read_text()
    assert f"`tanh` {both['tanh']} %, plain {both['plain']} %, `sphere` {both['sphere']} %" in choosing
    assert f"`seg` has {clean['seg']:.1f} % right, and {pgd['seg']:.1f} % under PGD" in choosing
    readme = (RESULTS.parent / "README.md").read_text()
    left = {name: f"{value:.0f}%" for name, value in pgd.items()}
    assert left["plain"] == left["sphere"]
    assert (
        f"the plain network and SphereConv keep {left['plain']}, TanhConv {left['tanh']} and SegConv {left['seg']}"
        in readme
    )
    assert all(3.0 < clean[name] - clean["plain"] < 5.0 for name in ("tanh", "seg")), "3 to 5 points"


def test_pages_of_tables_are_of_the_ledger():
    ledger = Ledger(CELLS / "ledger.jsonl")
    shown = [name for name, table in TABLES.items() if markdown(table, ledger)]
    assert shown
    for name in shown:
        page = "docs/robustness.md" if name in ("white-box", "black-box") else "docs/results.md"
        for path in ("results/tables/tables.md", page):
            assert markdown(TABLES[name], ledger) in (RESULTS.parent / path).read_text(), (
                f"{name}: dcnet table --ledger results/tables/ledger.jsonl --render results/tables --into {page}"
            )


def test_the_readme_says_how_fast_cifar_is():
    runs = [Run(RESULTS / "fast-cifar" / f"tanh-cosine-{seed}").result for seed in range(3)]
    plain = Run(RESULTS / "fast-cifar" / "plain").result
    seconds = [run["seconds"] for run in (*runs, plain)]
    rates = [round(run["images_per_second"] / 1000) for run in (*runs, plain)]
    ours = f"{min(rates[:3])},000 to {max(rates[:3])},000 images a second"
    first, second, third = (f"{run['accuracy']:.2f}" for run in runs)
    text = " ".join((RESULTS.parent / "README.md").read_text().split())
    for words in (
        f"takes {min(seconds):.1f} to {max(seconds):.1f} s on one H200",
        f"tanh + cosine {first}, {second} and {third}% with three seeds at {ours}",
        f"its plain twin {plain['accuracy']:.2f}% at {rates[3]},000 (bf16",
        f"by default: {ours} in the runs above, the plain twin {rates[3]},000)",
    ):
        assert words in text


CONVERTED = {
    "only converted": "converted",
    "averages recalibrated": "converted, recalibrated",
    "calibrated": "calibrated",
    "+ 1 epoch": "calibrated, 1 epochs on",
    "+ 5 epochs": "calibrated, 5 epochs on",
    "from scratch": "from scratch",
}


@pytest.mark.parametrize("network", ["cnn9", "resnet32"])
def test_conversions_of_the_page(network):
    """Every number of the page's table is in the record, and every number of the record in the table."""
    lines = [json.loads(line) for line in (RESULTS / "conversion" / f"{network}.jsonl").read_text().splitlines()[1:]]
    record = {line["figure"]: f"{line['accuracy']:.2f}" for line in lines}
    page = (RESULTS.parent / "docs" / "your-model.md").read_text()
    head, _, *rows = page[page.index(f"| `{network}`, ") :].split("\n\n")[0].splitlines()
    columns = [part.strip() for part in head.strip("|").split("|")]
    found = {"plain": columns[0].split(", ")[1]}
    for row in rows:
        name, *values = [part.strip() for part in row.strip("|").split("|")]
        plain, operator = name.startswith("plain"), name.replace(" + ", "+").replace("square cosine", "square_cosine")
        for column, value in zip(columns[1:], values, strict=True):
            treatment = CONVERTED[column].removeprefix("calibrated, " if plain else "")
            if value:
                found[f"{'plain' if plain else operator}, {treatment}"] = value
    assert found.items() <= record.items()
    assert set(record) - set(found) == {name for name in record if name.endswith("calibrated, recalibrated")}
