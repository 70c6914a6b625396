"""The paper's robustness tables on CIFAR-10, with attacks a reader of today expects: trains, attacks, and writes the tables.

    python experiments/robustness.py train  --runs runs/robustness --seconds 500     # goes on where it was left
    python experiments/robustness.py attack --runs runs/robustness
    python experiments/robustness.py statistics --runs runs/robustness               # attacks with E{‖x‖} of the batch
    python experiments/robustness.py keep   --runs runs/robustness --into results/robustness   # all but the checkpoints
    python experiments/robustness.py tables --runs runs/robustness --into docs/robustness.md

Every step skips what is done. Jobs run side by side, as a small network leaves a GPU idle.
"""

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import dcnet
from dcnet.bench import render_into
from dcnet.data import load_data
from dcnet.layers import decoupled_layers
from dcnet.training.settings import tf32

OPERATORS = {"plain": "none", "sphere": "sphere", "ball": "ball", "tanh": "tanh"}
TITLES = {"plain": "baseline", "sphere": "SphereConv", "ball": "BallConv", "tanh": "TanhConv"}
DCNET = [sys.executable, "-m", "dcnet"]
FAST = ["--precision", "tf32", "--channels-last", "--graphs", "--evaluate-every", "10"]  # how it is computed, not what
# what is trained beside the networks of the tables, to see what their numbers depend on
VARIANTS = {
    "": [],
    "relu": ["--penultimate-activation"],
    "long": ["--epochs", "200"],
    "mixed": ["--adversarial-share", "0.5"],  # half the loss on the images as they are, as libraries of the time had it
}
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
WHITE = "fgsm,bim,pgd:steps=50:restarts=5"
STATISTICS = "batch_statistics.json"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def jobs(variants):
    """Name and flags of every training run: the tables' networks, and a second plain one of each kind that black-box examples come from."""
    for variant in variants:
        extra = VARIANTS[variant]
        for training in ("natural", "fgsm"):
            if (variant == "mixed" and training == "natural") or (variant == "long" and training == "fgsm"):
                continue
            how = [*extra, *(["--adversarial", "fgsm"] if training == "fgsm" else [])]
            for name, magnitude in OPERATORS.items():
                yield "-".join(filter(None, (training, name, variant))), ["--magnitude", magnitude, *how]
            if not variant:
                yield f"{training}-source", ["--magnitude", "none", "--seed", "1", *how]


def run_all(commands, parallel, seconds):
    """Runs them, so many at once; when time is up they are asked to stop, and save."""
    until = time.monotonic() + seconds
    waiting, running = list(commands), {}
    while waiting or running:
        while waiting and len(running) < parallel and time.monotonic() < until:
            name, command, log = waiting.pop(0)
            running[name] = subprocess.Popen(command, stdout=log.open("a"), stderr=subprocess.STDOUT)
        for name, process in list(running.items()):
            if process.poll() is not None:
                print(f"{name}: {'done' if process.returncode == 0 else f'exit status {process.returncode}, see its log'}", flush=True)
                del running[name]
        if time.monotonic() >= until:
            for process in running.values():
                process.send_signal(signal.SIGINT)
            for process in running.values():
                process.wait()
            print(f"time is up: {len(running)} stopped, {len(waiting)} not begun", flush=True)
            return
        time.sleep(0.5)


def train(options):
    commands = []
    for name, flags in jobs(options.variants):
        folder = options.runs / name
        if not (folder / "result.json").is_file():
            command = [*DCNET, "train", "--recipe", "paper-adversarial", "--run", str(folder), "--data-root", options.data_root]
            commands.append((name, [*command, *flags, *FAST, *shlex.split(options.flags)], options.runs / f"{name}.log"))
    run_all(commands, options.parallel, options.seconds)


def attack(options):
    """Each call of `dcnet attack` that a run does not have yet; a call records itself in the run's folder."""
    commands = []
    for name, _ in jobs(options.variants):
        folder = options.runs / name
        if not (folder / "result.json").is_file() or name.endswith("source"):
            continue
        done = {call for call, _ in calls_of(folder)}
        calls = {"white": ["--attacks", WHITE, "--separate"], "predicted": ["--attacks", "fgsm,bim", "--separate", "--predicted", "--no-check"]}
        if not name.count("-") > 1:
            calls["sizes"] = ["--attacks", "deepfool,deepfool:norm=linf", "--no-check"]
            for source in ("natural", "fgsm"):
                calls[f"black {source}"] = ["--attacks", "fgsm,bim", "--separate", "--no-check", "--from", str(options.runs / f"{source}-source")]
            if options.auto:
                calls["auto"] = ["--attacks", "auto", "--no-check"]
        for call, flags in calls.items():
            if call not in done:
                command = [*DCNET, "attack", str(folder), "--data-root", options.data_root, *flags, *shlex.split(options.flags)]
                commands.append((f"{name} {call}", command, options.runs / f"{name}.log"))
    # calls on one run write one file: those must not run at once
    rounds = max((sum(name.split()[0] == other.split()[0] for other, *_ in commands) for name, *_ in commands), default=0)
    begun = time.monotonic()
    for _ in range(rounds):
        now = {name.split()[0]: (name, command, log) for name, command, log in reversed(commands)}
        commands = [entry for entry in commands if entry not in now.values()]
        run_all(list(now.values()), options.parallel, options.seconds - (time.monotonic() - begun))


class OfTheBatch(nn.Module):
    """A network whose decoupled layers take E{‖x‖} of the batch at hand, as in training; kept from the check that refuses just that."""

    def __init__(self, model):
        super().__init__()
        for layer in decoupled_layers(model).values():
            layer.train()
            layer.momentum = 0.0  # the averages stay
        self.inside = [model]

    def forward(self, x):
        return self.inside[0](x)


def statistics(options):
    """The tables' networks under attack with statistics in training mode, into a file of its own."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    test = load_data(options.data, options.data_root).test
    images, labels = (test.images[: options.limit].float() / 255.0).to(device), test.labels[: options.limit].to(device)
    for name, _ in jobs([""]):
        folder = options.runs / name
        if (folder / "result.json").is_file() and not name.endswith("source") and not (folder / STATISTICS).is_file():
            model = OfTheBatch(dcnet.load(folder).to(device)).eval()
            with tf32(False):
                result = dcnet.robustness.evaluate(model, images, labels, "fgsm,bim", batch=128, cumulative=False)
            (folder / STATISTICS).write_text(json.dumps(result) + "\n")
            print(f"{name}: {_three(result)}", flush=True)


def calls_of(folder):
    """What a run's attacks.json holds, each result with a name."""
    path = folder / "attacks.json"
    for result in json.loads(path.read_text()) if path.is_file() else []:
        names = [entry["attack"].split(":")[0] for entry in result["attacks"]]
        if result["transfer"]:
            yield f"black {Path(result['from']).name.split('-')[0]}", result
        elif result["labels"] == "predicted":
            yield "predicted", result
        else:
            yield {("fgsm", "bim", "pgd"): "white", ("deepfool", "deepfool"): "sizes", ("auto",): "auto"}.get(tuple(names), "other"), result


def of_batch(folder):
    path = folder / STATISTICS
    return {"statistics": json.loads(path.read_text())} if path.is_file() else {}


def keep(options):
    """Copies everything but the checkpoints."""
    for name, _ in jobs(options.variants):
        folder = options.runs / name
        if (folder / "result.json").is_file():
            (options.into / name).mkdir(parents=True, exist_ok=True)
            for file in ("recipe.json", "metrics.jsonl", "result.json", "attacks.json", STATISTICS):
                if (folder / file).is_file():
                    shutil.copy(folder / file, options.into / name / file)


def tables(options):
    if not options.into.is_file():
        raise SystemExit(f"{options.into} does not exist; it must have the lines {BEGIN} and {END}, for the tables to go between")
    render_into(options.into, rendered(options.runs), BEGIN, END)


def rendered(runs):
    """The tables as Markdown: ours, the paper's in brackets."""
    found = {name: dict(calls_of(runs / name)) | of_batch(runs / name) for name, _ in jobs(VARIANTS) if (runs / name / "result.json").is_file()}
    lines = []
    boxes = {
        "white": "White box",
        "black natural": "Black box, made on a naturally trained plain network",
        "black fgsm": "Black box, made on an FGSM-trained one",
    }
    for box, title in boxes.items():
        lines += ["", f"### {title}", "", *_table(found, box)]
    lines += ["", "### What it depends on", "", *_variants(found)]
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
    """None / FGSM / BIM of all networks, with true labels and with predicted ones."""
    lines = ["| networks | labels | " + " | ".join(TITLES.values()) + " |", "|---" * (2 + len(TITLES)) + "|"]
    for training in ("natural", "fgsm"):
        for variant in VARIANTS:
            for call, labels in (("white", "true"), ("predicted", "predicted"), ("statistics", "true; E of the batch")):
                results = [found.get("-".join(filter(None, (training, name, variant))), {}).get(call) for name in OPERATORS]
                if any(results):
                    cells = ["–" if result is None else _three(result) for result in results]
                    lines.append(f"| {', '.join(filter(None, (training, variant)))} | {labels} | {' | '.join(cells)} |")
    return lines


def _three(result):
    return f"{result['clean']:.1f} / {_accuracy(result, 'fgsm'):.1f} / {_accuracy(result, 'bim'):.1f}"


def _accuracy(result, attack):
    return next(entry["accuracy"] for entry in result["attacks"] if entry["attack"].split(":")[0] == attack)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["train", "attack", "statistics", "keep", "tables"])
    parser.add_argument("--runs", type=Path, default=Path("runs/robustness"))
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--parallel", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9, help="when to stop, saving what is running")
    parser.add_argument("--variants", nargs="*", default=[""], choices=list(VARIANTS), help="which networks; '' for those of the tables")
    parser.add_argument("--flags", default="", help="more flags for each `dcnet train` or `dcnet attack`, as one text")
    parser.add_argument("--data", default="cifar10", help="of statistics")
    parser.add_argument("--limit", type=int, help="of statistics: only so many images")
    parser.add_argument("--auto", action="store_true", help="AutoAttack too (pip install 'dcnet[attacks]')")
    parser.add_argument("--into", type=Path, help="of tables: the file (docs/robustness.md); of keep: the folder (results/robustness)")
    options = parser.parse_args()
    options.into = options.into or Path({"keep": "results/robustness"}.get(options.step, "docs/robustness.md"))
    options.runs.mkdir(parents=True, exist_ok=True)
    {"train": train, "attack": attack, "statistics": statistics, "keep": keep, "tables": tables}[options.step](options)


if __name__ == "__main__":
    main()
