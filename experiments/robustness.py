"""The paper's robustness tables on CIFAR-10, with attacks that are expected today: train, attack, keep records.

    python experiments/robustness.py train  --runs runs/robustness --seconds 500     # goes on where it was left
    python experiments/robustness.py attack --runs runs/robustness
    python experiments/robustness.py statistics --runs runs/robustness               # attacks with E{‖x‖} of the batch
    python experiments/robustness.py coupling --runs runs/robustness                 # and why those are weak
    python experiments/robustness.py keep   --runs runs/robustness --into results/robustness   # all but the checkpoints
    python experiments/robustness_tables.py --runs results/robustness --into docs/robustness.md

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
from dcnet.data import load_data
from dcnet.layers import decoupled_layers
from dcnet.robustness import EPS
from dcnet.training.settings import tf32
from dcnet.util.provenance import provenance

OPERATORS = {"plain": "none", "sphere": "sphere", "ball": "ball", "tanh": "tanh"}
DCNET = [sys.executable, "-m", "dcnet"]
FAST = ["--precision", "tf32", "--channels-last", "--graphs", "--evaluate-every", "10", "--schedule", "plateau"]
# what is trained beside the networks of the tables, to see what their numbers depend on
VARIANTS = {
    "": [],
    "relu": ["--penultimate-activation"],
    "long": ["--epochs", "200"],
    "mixed": ["--adversarial-share", "0.5"],  # half the loss on the images as they are, as libraries of the time had it
}
WHITE = "fgsm,bim,pgd:steps=50:restarts=5"
STATISTICS = "batch_statistics.json"
COUPLING = "coupling.json"


def jobs(variants):
    """Return name and flags of every training run.

    The tables' networks, and a second plain one of each kind that black-box examples come from.
    """
    for variant in variants:
        extra = VARIANTS[variant]
        for training in ("natural", "fgsm"):
            if variant and training != ("fgsm" if variant == "mixed" else "natural"):
                continue
            how = [*extra, *(["--adversarial", "fgsm"] if training == "fgsm" else [])]
            for name, magnitude in OPERATORS.items():
                # with seed 0 the plain network dies in the first epoch of FGSM training: all its logits are equal ever
                # after
                seed = ["--seed", "2"] if (training, name) == ("fgsm", "plain") else []
                yield "-".join(filter(None, (training, name, variant))), ["--magnitude", magnitude, *seed, *how]
            if not variant:
                yield f"{training}-source", ["--magnitude", "none", "--seed", "1", *how]
    if "" in variants:
        yield "fgsm-plain-seed0", ["--magnitude", "none", "--adversarial", "fgsm"]


def run_all(queues, parallel, seconds):
    """Run the commands of each queue one after the other, several queues at once; stop them when time is up.

    The names of those that failed.
    """
    until = time.monotonic() + seconds
    waiting, running, failed = [list(queue) for queue in queues if queue], [], []
    while waiting or running:
        while waiting and len(running) < parallel and time.monotonic() < until:
            queue = waiting.pop(0)
            name, command, log = queue.pop(0)
            with log.open("a") as file:
                running.append((name, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT), queue))
        for entry in list(running):
            name, process, queue = entry
            if process.poll() is not None:
                print(
                    f"{name}: "
                    f"{'done' if process.returncode == 0 else f'exit status {process.returncode}, see its log'}",
                    flush=True,
                )
                failed += [name] if process.returncode else []
                running.remove(entry)
                waiting += [queue] if queue else []
        if time.monotonic() >= until:
            for _, process, _ in running:
                process.send_signal(signal.SIGINT)
            for _, process, _ in running:
                process.wait()
            left = [name for _, _, queue in running for name, _, _ in queue] + [
                name for queue in waiting for name, _, _ in queue
            ]
            print(
                f"time is up; stopped: {', '.join(name for name, _, _ in running) or 'none'}; not begun: "
                f"{', '.join(left) or 'none'}",
                flush=True,
            )
            return failed
        time.sleep(0.5)
    return failed


def train(options):
    queues = []
    for name, flags in jobs(options.variants):
        folder = options.runs / name
        if not (folder / "result.json").is_file():
            command = [
                *DCNET,
                "train",
                "--recipe",
                "paper-adversarial",
                "--run",
                str(folder),
                "--data-root",
                options.data_root,
            ]
            queues.append(
                [(name, [*command, *flags, *FAST, *shlex.split(options.flags)], options.runs / f"{name}.log")]
            )
    return run_all(queues, options.parallel, options.seconds)


def attack(options):
    """Make each call of `dcnet attack` that a run does not have yet; a call records itself in the run's folder."""
    queues = []  # of a run each: its calls write one file, and must not run at once
    for name, _ in jobs(options.variants):
        folder = options.runs / name
        if not (folder / "result.json").is_file() or name.endswith("source"):
            continue
        of_the_tables = name.count("-") == 1  # the others have a variant or a seed behind
        done = {call for call, _ in calls_of(folder)}
        calls = {
            "white": ["--attacks", WHITE, "--separate"],
            "predicted": ["--attacks", "fgsm,bim", "--separate", "--predicted", "--no-check"],
        }
        if of_the_tables:
            calls["sizes"] = ["--attacks", "deepfool,deepfool:norm=linf", "--no-check"]
            for source in ("natural", "fgsm"):
                calls[f"black {source}"] = [
                    "--attacks",
                    "fgsm,bim",
                    "--separate",
                    "--no-check",
                    "--from",
                    str(options.runs / f"{source}-source"),
                ]
            if options.auto:
                # many images at once: its thousands of steps wait for the host with few
                calls["auto"] = ["--attacks", "auto:batch=5000", "--batch", "5000", "--no-check"]
        command, more = [*DCNET, "attack", str(folder), "--data-root", options.data_root], shlex.split(options.flags)
        log = options.runs / f"{name}.log"
        queues.append(
            [(f"{name} {call}", [*command, *flags, *more], log) for call, flags in calls.items() if call not in done]
        )
    return run_all(queues, options.parallel, options.seconds)


class OfTheBatch(nn.Module):
    """A network whose decoupled layers take E{‖x‖} from the batch, as in training.

    It is hidden from the check that refuses training mode.
    """

    def __init__(self, model):
        super().__init__()
        for layer in decoupled_layers(model).values():
            layer.train()
            layer.momentum = 0.0  # the averages stay
        self.inside = [model]

    def forward(self, x):
        return self.inside[0](x)


def statistics(options):
    """Attack the tables' networks with statistics in training mode, and record that in a separate file."""
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
            print(f"{name}: {result}", flush=True)


def coupling(options):
    """Measure why attacks through E{‖x‖} of the batch are weak.

    FGSM by the gradient of the batch's loss, of each image's own loss, and with E frozen.

    Each of the three is tried on the network as it is used, with E frozen. One batch: a gradient for each image takes a
    pass for each.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    test = load_data(options.data, options.data_root).test
    count = options.limit or 128
    images, labels = (test.images[:count].float() / 255.0).to(device), test.labels[:count].to(device)
    for name in ("natural-ball", "natural-tanh"):
        folder = options.runs / name
        if not (folder / "result.json").is_file() or (folder / COUPLING).is_file():
            continue
        frozen = dcnet.load(folder).to(device).requires_grad_(False)
        coupled = OfTheBatch(dcnet.load(folder).to(device).requires_grad_(False)).eval()
        with tf32(False):
            gradients = {"E frozen": _gradients(frozen, images, labels)[0]}
            gradients["E of the batch"], gradients["E of the batch, each image's own loss"] = _gradients(
                coupled, images, labels, own=True
            )
            result = {"images": count, "eps": EPS, **provenance(torch.device(device))}
            for way, gradient in gradients.items():
                changed = (images + EPS * gradient.sign()).clamp(0.0, 1.0)
                with torch.no_grad():
                    right = frozen(changed).argmax(1) == labels
                same = gradient.sign() == gradients["E frozen"].sign()
                result[way] = {
                    "accuracy": 100.0 * right.float().mean().item(),
                    "signs as with E frozen": 100.0 * same.float().mean().item(),
                }
        (folder / COUPLING).write_text(json.dumps(result) + "\n")
        print(f"{name}: {result}", flush=True)


def _gradients(model, images, labels, own=False):
    """Return the gradient in the images of the sum of losses; with `own` also that of each image's own loss."""
    images = images.clone().requires_grad_(True)
    losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
    found = [torch.autograd.grad(losses.sum(), images, retain_graph=own)[0]]
    if own:
        found.append(
            torch.stack(
                [torch.autograd.grad(loss, images, retain_graph=True)[0][number] for number, loss in enumerate(losses)]
            )
        )
    return found


def calls_of(folder):
    """Return what a run's attacks.json holds, each result with a name."""
    path = folder / "attacks.json"
    for result in json.loads(path.read_text()) if path.is_file() else []:
        names = [entry["attack"].split(":")[0] for entry in result["attacks"]]
        if result["transfer"]:
            yield f"black {Path(result['from']).name.split('-')[0]}", result
        elif result["labels"] == "predicted":
            yield "predicted", result
        else:
            yield (
                {("fgsm", "bim", "pgd"): "white", ("deepfool", "deepfool"): "sizes", ("auto",): "auto"}.get(
                    tuple(names), "other"
                ),
                result,
            )


def keep(options):
    """Copy everything but the checkpoints; of other runs only the name."""
    for name, _ in jobs(options.variants):
        folder = options.runs / name
        if (folder / "result.json").is_file():
            (options.into / name).mkdir(parents=True, exist_ok=True)
            for file in ("recipe.json", "metrics.jsonl", "result.json", STATISTICS, COUPLING):
                if (folder / file).is_file():
                    shutil.copy(folder / file, options.into / name / file)
            attacks = [
                {**result, "from": result["from"] and Path(result["from"]).name} for _, result in calls_of(folder)
            ]
            if attacks:  # where the runs lay on that machine is nobody's business
                (options.into / name / "attacks.json").write_text(json.dumps(attacks, ensure_ascii=False) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["train", "attack", "statistics", "coupling", "keep"])
    parser.add_argument("--runs", type=Path, default=Path("runs/robustness"))
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--parallel", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9, help="when to stop, saving what is running")
    parser.add_argument(
        "--variants", nargs="*", default=[""], choices=list(VARIANTS), help="which networks; '' for those of the tables"
    )
    parser.add_argument("--flags", default="", help="more flags for each `dcnet train` or `dcnet attack`, as one text")
    parser.add_argument("--data", default="cifar10", help="of statistics and coupling")
    parser.add_argument("--limit", type=int, help="of statistics and coupling: only this many images")
    parser.add_argument("--auto", action="store_true", help="AutoAttack too (pip install 'dcnet[attacks]')")
    parser.add_argument("--into", type=Path, default=Path("results/robustness"), help="of keep: the folder")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    failed = {"train": train, "attack": attack, "statistics": statistics, "coupling": coupling, "keep": keep}[
        options.step
    ](options)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the logs are in {options.runs}")


if __name__ == "__main__":
    main()
