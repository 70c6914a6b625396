"""The tables of docs/robustness.md out of the records: ours, and the paper's in brackets.

python experiments/robustness_tables.py --runs results/robustness --into docs/robustness.md
"""

import argparse
import json
from pathlib import Path

from robustness import COUPLING, OPERATORS, STATISTICS, VARIANTS, calls_of, jobs

from dcnet.bench import render_into

TITLES = {"plain": "baseline", "sphere": "SphereConv", "ball": "BallConv", "tanh": "TanhConv"}
PAPER = {  # in percent: natural None, FGSM, BIM, then FGSM-trained None, FGSM, BIM
    "white": {
        "plain": (85.35, 18.82, 8.67, 83.70, 78.96, 7.96),
        "sphere": (88.58, 43.64, 8.89, 87.41, 85.98, 35.07),
        "ball": (91.13, 50.47, 7.74, 87.47, 82.20, 17.38),
        "tanh": (91.45, 52.60, 10.18, 87.54, 81.46, 19.86),
    },
    "black": {
        "plain": (85.35, 50.90, 36.22, 83.70, 77.57, 78.55),
        "sphere": (88.58, 56.71, 43.10, 87.41, 76.29, 77.79),
        "ball": (91.13, 49.50, 27.48, 87.47, 78.67, 80.59),
        "tanh": (91.45, 50.61, 29.06, 87.54, 80.38, 82.47),
    },
}
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def of_batch(folder):
    path = folder / STATISTICS
    return {"statistics": json.loads(path.read_text())} if path.is_file() else {}


def rendered(runs):
    """Render the tables as Markdown: ours, the paper's in brackets."""
    found = {
        name: dict(calls_of(runs / name)) | of_batch(runs / name)
        for name, _ in jobs(VARIANTS)
        if (runs / name / "result.json").is_file()
    }
    lines = []
    boxes = {
        "white": "White box",
        "black natural": "Black box, made on a naturally trained plain network",
        "black fgsm": "Black box, made on an FGSM-trained one",
    }
    for box, title in boxes.items():
        lines += ["", f"### {title}", "", *_table(found, box)]
    lines += ["", "### What it depends on", "", *_variants(found)]
    lines += ["", "### FGSM through E{‖x‖} of the batch, on the network as it is used", "", *_couplings(runs)]
    return "\n".join(lines).strip()


def _table(found, box):
    white = box == "white"
    paper = PAPER[box.split()[0]]
    lines = ["| training, attack | " + " | ".join(TITLES.values()) + " |", "|---" * (1 + len(TITLES)) + "|"]
    for offset, training in ((0, "natural"), (3, "fgsm")):
        rows = ["none", "fgsm", "bim", *(["pgd", "auto"] if white else [])]
        for number, row in enumerate(rows):
            cells = []
            for name in OPERATORS:
                calls = found.get(f"{training}-{name}", {})
                result = calls.get("auto" if row == "auto" else box)
                ours = None if result is None else result["clean"] if row == "none" else _accuracy(result, row)
                theirs = f" ({paper[name][offset + number]:.2f})" if number < 3 else ""
                cells.append(("–" if ours is None else f"{ours:.2f}") + theirs)
            label = {"none": "none", "fgsm": "FGSM", "bim": "BIM", "pgd": "PGD-50×5", "auto": "AutoAttack"}[row]
            lines.append(f"| {'natural' if training == 'natural' else 'FGSM-trained'}, {label} | {' | '.join(cells)} |")
    return lines


def _variants(found):
    """Return None / FGSM / BIM of all networks, with true labels and with predicted ones."""
    lines = ["| networks | labels | " + " | ".join(TITLES.values()) + " |", "|---" * (2 + len(TITLES)) + "|"]
    for training in ("natural", "fgsm"):
        for variant in VARIANTS:
            for call, labels in (("white", "true"), ("predicted", "predicted"), ("statistics", "true; E of the batch")):
                results = [
                    found.get("-".join(filter(None, (training, name, variant))), {}).get(call) for name in OPERATORS
                ]
                if any(results):
                    cells = ["–" if result is None else _three(result) for result in results]
                    lines.append(f"| {', '.join(filter(None, (training, variant)))} | {labels} | {' | '.join(cells)} |")
    return lines


def _couplings(runs):
    """Return accuracies, and the share of the gradient's signs that are as with E frozen."""
    found = {
        name: json.loads(path.read_text())
        for name in OPERATORS
        if (path := runs / f"natural-{name}" / COUPLING).is_file()
    }
    lines = [
        "| gradient of | " + " | ".join(f"natural {TITLES[name]}" for name in found) + " |",
        "|---" * (1 + len(found)) + "|",
    ]
    words = {"E frozen": "the loss, E frozen", "E of the batch": "the batch's loss, E of the batch"}
    for way in (*words, "E of the batch, each image's own loss"):
        cells = [
            f"{result[way]['accuracy']:.1f} (signs {result[way]['signs as with E frozen']:.0f}%)"
            for result in found.values()
        ]
        lines.append(f"| {words.get(way, 'each image’s own loss, E of the batch')} | {' | '.join(cells)} |")
    return lines


def _three(result):
    return f"{result['clean']:.1f} / {_accuracy(result, 'fgsm'):.1f} / {_accuracy(result, 'bim'):.1f}"


def _accuracy(result, attack):
    return next(entry["accuracy"] for entry in result["attacks"] if entry["attack"].split(":")[0] == attack)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("results/robustness"))
    parser.add_argument("--into", type=Path, default=Path("docs/robustness.md"))
    options = parser.parse_args(arguments)
    if not options.into.is_file():
        raise SystemExit(
            f"{options.into} does not exist; it must have the lines {BEGIN} and {END}, for the tables to go between"
        )
    render_into(options.into, rendered(options.runs), BEGIN, END)


if __name__ == "__main__":
    main()
