"""The tables of docs/robustness.md that `dcnet table` does not make are those of the records."""

import json
from pathlib import Path

import pytest

from dcnet.training import Run

ROOT = Path(__file__).parent.parent
OLDER, TABLES = ROOT / "results" / "robustness", ROOT / "results" / "tables" / "runs"
NAMES = {"plain": "baseline", "sphere": "SphereConv", "ball": "BallConv", "tanh": "TanhConv"}


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")


def left(record, attack):
    return next(entry["accuracy"] for entry in record["attacks"] if entry["attack"].split(":")[0] == attack)


def three(record):
    return f"{record['clean']:.1f} / {left(record, 'fgsm'):.1f} / {left(record, 'bim'):.1f}"


@pytest.mark.parametrize("networks", ["natural", "natural, relu", "natural, long", "fgsm"])
def test_older_networks(page, networks):
    training, _, variant = networks.partition(", ")
    folders = [OLDER / "-".join(filter(None, (training, name, variant))) for name in NAMES]
    for labels in ("true", "predicted"):
        records = [
            next(
                record
                for record in Run(folder).attacks
                if record["labels"] == labels and not record["transfer"] and record["attacks"][0]["attack"] == "fgsm"
            )
            for folder in folders
        ]
        assert f"| {networks} | {labels} | {' | '.join(map(three, records))} |" in page
    if not variant:
        records = [json.loads((folder / "batch_statistics.json").read_text()) for folder in folders]
        assert f"| {networks} | true; E of the batch | {' | '.join(map(three, records))} |" in page


def older_fgsm():
    """Every row of what attacks leave of the older networks with FGSM training."""
    yield "| | " + " | ".join(NAMES.values()) + " |"
    yield "|---" * 5 + "|"
    rows = {
        None: {"fgsm": "FGSM", "bim": "BIM", "pgd": "PGD-50×5", "auto": "AutoAttack"},
        "natural-source": dict.fromkeys(("fgsm", "bim"), "made on a naturally trained baseline"),
        "fgsm-source": dict.fromkeys(("fgsm", "bim"), "made on an FGSM-trained baseline"),
    }
    for source, attacks in rows.items():
        for attack, words in attacks.items():
            cells = []
            for name in NAMES:
                numbers = [
                    entry["accuracy"]
                    for record in Run(OLDER / f"fgsm-{name}").attacks
                    if record["from"] == source and record["labels"] == "true"
                    for entry in record["attacks"]
                    if entry["attack"].split(":")[0] == attack
                ]
                (number,) = numbers
                cells.append(f"{number:.2f}")
            title = words if source is None else f"{attack.upper()}, {words}"
            yield f"| {title} | {' | '.join(cells)} |"


def test_attacks_on_older_fgsm_trained_networks(page):
    assert "\n".join(older_fgsm()) in page


def test_the_gradient_through_e(page):
    found = [json.loads((OLDER / f"natural-{name}" / "coupling.json").read_text()) for name in ("ball", "tanh")]
    ways = {
        "the loss, E frozen": "E frozen",
        "the batch's loss, E of the batch": "E of the batch",
        "each image’s own loss, E of the batch": "E of the batch, each image's own loss",
    }
    for words, way in ways.items():
        cells = [f"{one[way]['accuracy']:.1f} (signs {one[way]['signs as with E frozen']:.0f}%)" for one in found]
        assert f"| {words} | {' | '.join(cells)} |" in page


def began(run):
    """Return the epoch in which accuracy under FGSM in training jumped, and the one before the rate was divided."""
    found = {round(entry["epoch"]): entry for entry in run.metrics}
    jump = (e for e in found if e > 20 and found[e]["train_accuracy"] > found[e - 5]["train_accuracy"] + 5.0)
    divided = (e for e in found if found[e]["lr"] < 0.9 * found[1]["lr"])
    return next(jump, None), next(divided, 101) - 1


def trainings():
    """Every FGSM training: network, generation, and its run."""
    for name in ("plain-seed0", "source", "plain", "sphere", "ball", "tanh"):
        yield NAMES["plain" if name == "source" else name.split("-")[0]], "older", Run(OLDER / f"fgsm-{name}")
    for name in NAMES.values():
        for seed in range(3):
            for again in ("-first", "-second", ""):
                folder = f"robustness-fgsm-trained-{name.lower()}-cifar10-paper-bf16-seed-{seed}{again}"
                if (TABLES / folder).is_dir():
                    yield name, "newer", Run(TABLES / folder)


def rows():
    for name, generation, run in sorted(trainings(), key=lambda one: list(NAMES.values()).index(one[0])):
        kept = [record for record in run.attacks if record["labels"] == "true" and not record["transfer"]]
        white = next(
            (record for record in kept if "bim" in str(record["attacks"]) and record["images"] == 10_000), None
        )
        under = ["not attacked"] * 2 if white is None else [f"{left(white, attack):.1f}" for attack in ("fgsm", "bim")]
        jump, last = began(run)
        outcome = (
            "died in the first epoch" if run.accuracy <= 10.0 else f"overfitted, from epoch {jump} on" if jump else "no"
        )
        numbers = [f"{run.metrics[-1]['train_accuracy']:.1f}", f"{run.accuracy:.1f}", *under]
        yield f"| {name} | {generation}, {run.recipe.seed} | {last} | {outcome} | {' | '.join(numbers)} |"
        assert jump is None or jump <= last, "overfitting begins at the first learning rate"


def test_every_fgsm_training(page):
    found = list(rows())
    assert "\n".join(found) in page
    assert len(found) == 19
    assert sum("overfitted" in row for row in found) == 7
    assert sum("| no |" in row for row in found) == 10, "as the page says in words"


def under_margin(training, name, schedule, seed=0):
    """Return what PGD with the margin loss leaves of a network."""
    run = Run(TABLES / f"robustness-{training}-trained-{name}-cifar10-{schedule}-bf16-seed-{seed}")
    (record,) = (one for one in run.attacks if one["attacks"][0]["attack"] == "pgd:iterations=50:loss=margin")
    assert record["images"] == 10_000
    return record["worst"]


def test_trades_under_the_margin_loss(page):
    names = ("baseline", "sphereconv", "tanhconv", "segconv")
    plain, sphere, tanh, seg = (f"{under_margin('trades', name, 'short'):.1f}" for name in names)
    words = f"leaves {plain}% of the plain network, {sphere}% of SphereConv, {tanh}% of TanhConv and {seg}% of SegConv"
    assert words in page
    choosing = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    words = f"leaves {seg} % of `seg` with TRADES, {tanh} of `tanh`, {sphere} of `sphere` and {plain} of plain"
    assert words in choosing


def test_fgsm_training_under_the_margin_loss(page):
    names = {"baseline": 1, "sphereconv": 0, "ballconv": 0, "tanhconv": 0}
    plain, sphere, ball, tanh = (f"{under_margin('fgsm', name, 'paper', seed):.1f}" for name, seed in names.items())
    words = (
        f"{plain}% of the plain network (seed 1), {sphere}% of SphereConv, {ball}% of BallConv and {tanh}% of TanhConv"
    )
    assert words in page
