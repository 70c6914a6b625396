"""Measure what a trained plain network keeps when it is converted, and what some epochs of training bring back.

For each network, a plain one is trained, then converted to each operator. The test accuracy is measured right after the
conversion, without and with calibration, before and after `recalibrate_`, and after some epochs of fine-tuning. For
comparison, the plain network is fine-tuned for as long, and a decoupled network is trained from scratch for as long as
the plain one was (last of all, since that takes longest).

The record, OUT/conversion.jsonl, gets a line as soon as a figure is known. What it has is not measured again, and
interrupted trainings continue from their checkpoints: the same command goes on after Ctrl-C, a kill, or the end of its
`--budget`. A figure that fails is reported, the others are still measured, and the exit status is 1.

On a GPU:  python benchmarks/conversion.py --out conversion --budget 540
In small:  python benchmarks/conversion.py --out /tmp/small --data digits --recipe demo --networks cnn9_narrow \\
               --finetune-epochs 0.5,1
The table: python benchmarks/conversion.py --out conversion --table
"""

import argparse
import gc
import json
import signal
import time
import traceback
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dcnet
from dcnet.converting.convert import CONVOLUTIONS
from dcnet.layers import decoupled_layers
from dcnet.training import (
    Callback,
    Interrupted,
    NonFiniteLoss,
    Ranks,
    Recipe,
    Run,
    autocast_of,
    build_model,
    evaluate,
    joined,
    open_data,
    settings,
    train,
)
from dcnet.util.files import append_line, write_atomically
from dcnet.util.provenance import provenance
from dcnet.version import __version__

OPERATORS = "tanh+cosine,ball+cosine,seg+cosine,seg+square_cosine"
_SETTINGS = ("data", "recipe", "epochs", "finetune_lr", "seed")  # networks, operators and lengths may be added


def main(arguments: list[str] | None = None) -> "Record":
    """Measure what is missing, and return the record."""
    options = _options(arguments)
    record = Record(Path(options.out) / "conversion.jsonl", {name: getattr(options, name) for name in _SETTINGS})
    if options.table:
        print(record.table())
        return record
    record.begin()
    measure = _Measurements(options, record)
    networks = options.networks.split(",")
    try:
        for network in networks:
            measure.conversions(network)
        for network in networks:
            measure.from_scratch(network)
    except (_TimeIsUp, Interrupted):
        if time.monotonic() < measure.end:  # Ctrl-C
            raise
        print(f"the {options.budget:g} seconds of --budget are over; the same command goes on")
    print(f"written: {record.path}\n\n{record.table()}")
    if measure.failures:
        raise SystemExit(f"{len(measure.failures)} figures failed: {'; '.join(measure.failures)}")
    return record


class Record:
    """The figures in a file of JSON lines: the settings first, then one figure a line."""

    def __init__(self, path: Path, wanted: dict[str, Any]) -> None:
        self.path, self.settings = path, wanted
        self.figures: dict[str, dict[str, float | None]] = {}
        if not path.is_file():
            return
        *whole, cut = path.read_text().split("\n")  # the last is empty, or cut off by a kill
        lines = [json.loads(line) for line in whole]
        if cut:
            write_atomically(path, "".join(f"{line}\n" for line in whole).encode())
        if lines and lines[0] != {"settings": wanted}:
            raise SystemExit(f"{path} was measured with other settings, {lines[0]}, not {wanted}; choose another --out")
        for line in lines[1:]:
            self.figures.setdefault(line["network"], {})[line["figure"]] = line["accuracy"]

    def begin(self) -> None:
        """Write the settings, if the file is new."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.is_file() or not self.path.read_text():
            append_line(self.path, json.dumps({"settings": self.settings}))

    def add(self, network: str, figure: str, accuracy: float | None, **more: Any) -> None:
        """Write a figure; its accuracy is None where a training diverged."""
        self.figures.setdefault(network, {})[figure] = accuracy
        append_line(self.path, json.dumps({"network": network, "figure": figure, "accuracy": accuracy, **more}))

    def table(self) -> str:
        """Return a table for each network, in Markdown: a row for each operator, a column for each treatment."""
        lines: list[str] = []
        for network, figures in self.figures.items():
            rows: dict[str, dict[str, float | None]] = {}
            for figure, accuracy in figures.items():
                operator, _, treatment = figure.partition(", ")
                rows.setdefault(operator, {})[treatment or "as trained"] = accuracy
            columns = list(dict.fromkeys(treatment for row in rows.values() for treatment in row))
            lines += [f"| {network} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
            for operator, row in rows.items():
                cells = (("diverged" if row[c] is None else f"{row[c]:.2f}") if c in row else "" for c in columns)
                lines.append(f"| {operator} | {' | '.join(cells)} |")
            lines.append("")
        return "\n".join(lines)


class _TimeIsUp(Exception):
    pass


class _Deadline(Callback):
    """Ends a training when the time is up, as a signal does: after a checkpoint, between two steps."""

    def __init__(self, at: float) -> None:
        self.at = at

    def step(self, step: int, seconds: float, numbers: Any) -> None:
        if time.monotonic() > self.at:
            signal.raise_signal(signal.SIGTERM)


class _Measurements:
    """The figures that the record lacks, measured one after the other."""

    def __init__(self, options: argparse.Namespace, record: Record) -> None:
        self.options, self.record = options, record
        self.runs = Path(options.runs or options.out)
        self.end = time.monotonic() + options.budget
        self.failures: list[str] = []
        with joined(options.device) as ranks:
            self.device = ranks.device
        self.where = {"dcnet": __version__, **provenance(self.device)}
        self.lengths = [float(text) for text in options.finetune_epochs.split(",")]
        self.operators = [tuple(text.split("+")) for text in options.operators.split(",")]

    def once(self, network: str, figure: str, measure: Callable[[], float]) -> bool:
        """Measure what the record does not have; return whether it has it now."""
        known = self.record.figures.get(network, {})
        if figure not in known:
            if time.monotonic() > self.end:
                raise _TimeIsUp
            started, diverged = time.perf_counter(), {}
            accuracy: float | None = None
            try:
                accuracy = measure()
            except NonFiniteLoss as error:
                diverged = {"diverged": str(error)}
            except Exception as error:  # the other figures are still wanted
                traceback.print_exc()
                self.failures.append(f"{network}, {figure}: {error}")
                return False
            finally:
                gc.collect()  # a graph and its memory
            seconds = round(time.perf_counter() - started, 1)
            self.record.add(network, figure, accuracy, seconds=seconds, **diverged, where=self.where)
            known = self.record.figures[network]
        shown = "diverged" if known[figure] is None else f"{known[figure]:.2f}"
        print(f"{network:12} {figure:45} {shown}", flush=True)
        return known[figure] is not None

    def conversions(self, network: str) -> None:
        """Train the plain network, convert it, and fine-tune."""
        base, folder = self.base(network), self.runs / network
        if not self.once(network, "plain", lambda: self.train(base, folder / "plain")):
            return
        plain = Run(folder / "plain") if (folder / "plain" / "recipe.json").is_file() else None
        for epochs in self.lengths:
            name = f"plain, {epochs:g} epochs on"
            self.once(network, name, lambda epochs=epochs: self.tuned(plain, base, epochs, None, "cosine"))
        for magnitude, angular in self.operators:
            operator = f"{magnitude}+{angular}"
            for calibrated in (False, True):
                for recalibrated in (False, True):
                    name = f"{operator}, {'calibrated' if calibrated else 'converted'}"
                    name += ", recalibrated" if recalibrated else ""
                    how = (plain, magnitude, angular, calibrated, recalibrated)
                    self.once(network, name, lambda how=how: self.converted(*how))
            for epochs in self.lengths:
                name, how = f"{operator}, calibrated, {epochs:g} epochs on", (plain, base, epochs, magnitude, angular)
                self.once(network, name, lambda how=how: self.tuned(*how))

    def from_scratch(self, network: str) -> None:
        """Train a decoupled network of each operator by the plain one's recipe."""
        for magnitude, angular in self.operators:
            operator = f"{magnitude}+{angular}"
            recipe = dcnet.training.change(self.base(network), magnitude=magnitude, angular=angular)
            folder = self.runs / network / f"scratch-{operator}"
            self.once(network, f"{operator}, from scratch", lambda r=recipe, f=folder: self.train(r, f))

    def base(self, network: str) -> Recipe:
        """Return the plain network's recipe; CUDA graphs only where there is a GPU."""
        options = self.options
        fields: dict[str, Any] = {"data": options.data, "model": network, "seed": options.seed, "magnitude": None}
        if options.epochs is not None:
            fields["epochs"] = options.epochs
        if self.device.type != "cuda":
            fields["graphs"] = False
        return dcnet.make_recipe(options.recipe, **fields)

    def train(self, recipe: Recipe, folder: Path) -> float:
        """Train by the recipe, from where it was left, and return the accuracy."""
        return train(
            *(recipe, folder),
            data_root=self.options.data_root,
            device=self.options.device,
            quiet=True,
            callbacks=[_Deadline(self.end)],
        ).accuracy

    def tuned(self, plain: Run | None, base: Recipe, epochs: float, magnitude: str | None, angular: str) -> float:
        """Return the accuracy after that many epochs from the plain network's weights, at a lower rate."""
        run = _there(plain)
        chosen = {"epochs": epochs, "lr": self.options.finetune_lr, "magnitude": magnitude, "angular": angular}
        recipe = dcnet.finetune_recipe(str(run.folder), base=base, **chosen, warmup=0.1, schedule="onecycle")
        name = "plain" if magnitude is None else f"{magnitude}+{angular}"
        return self.train(recipe, run.folder.parent / f"{name}-{epochs:g}-epochs")

    def converted(self, plain: Run | None, magnitude: str, angular: str, calibrated: bool, recalibrated: bool) -> float:
        """Return the accuracy of the plain network converted to an operator, without training."""
        run = _there(plain)
        recipe = run.recipe
        order = torch.channels_last if recipe.channels_last else torch.contiguous_format
        with joined(self.options.device) as ranks, settings(recipe, ranks.device):
            data = open_data(recipe, ranks, self.options.data_root)
            batches = [
                images.contiguous(memory_format=order)
                for images, _ in islice(data.train_batches(0, 0, recipe.batch), 10)
            ]
            model = _decoupled(run, magnitude, angular, ranks, batches if calibrated else None)
            model = model.to(memory_format=order)
            autocast = autocast_of(recipe, ranks.device)
            if recalibrated:
                with autocast():  # as evaluations of trainings do it
                    dcnet.recalibrate_(model, batches)
            return evaluate(model, data, ranks, autocast, order).accuracy


def _there(plain: Run | None) -> Run:
    if plain is None:
        raise ValueError("the record has the plain network's accuracy, but --runs does not have its weights")
    return plain


def _decoupled(plain: Run, magnitude: str, angular: str, ranks: Ranks, batches: list[torch.Tensor] | None) -> nn.Module:
    """Return the plain network, with the layers converted that its decoupled twin has."""
    model = plain.model.to(ranks.device)
    twin = build_model(dcnet.training.change(plain.recipe, magnitude=magnitude, angular=angular), plain.shape)
    names = set(decoupled_layers(twin)) - set(decoupled_layers(model))
    types = (*CONVOLUTIONS, nn.Linear)
    chosen = {"where": lambda name, module: name in names, "types": types, "calibrate": batches}
    dcnet.decouple_(model, magnitude, angular, **chosen)
    return model.eval()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of the record")
    parser.add_argument("--runs", default=None, help="folder of the runs, with their weights; --out if not given")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--recipe", default="fast-cifar", help="of the plain network, and of those from scratch")
    parser.add_argument("--epochs", type=float, default=None, help="of these; the recipe's own if not given")
    parser.add_argument("--networks", default="cnn9,resnet32")
    parser.add_argument("--operators", default=OPERATORS, help="magnitude+angular, with commas between them")
    parser.add_argument("--finetune-epochs", default="1,5")
    parser.add_argument("--finetune-lr", type=float, default=0.05, help="highest rate of fine-tuning, one cycle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None, help="cpu or cuda; the GPU if there is one")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which to stop")
    parser.add_argument("--table", action="store_true", help="print what the record has, and measure nothing")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
