"""Measure what a trained plain network keeps when it is converted, and what some epochs of training bring back.

For each network, a plain one is trained, then converted to each operator. The test accuracy is measured right after the
conversion, without and with calibration, before and after `recalibrate_`, and after some epochs of fine-tuning. For
comparison, the plain network is fine-tuned for as long, and a decoupled network is trained from scratch for as long as
the plain one was. The record is a JSON file; what it has is not measured again, and interrupted runs continue.

On a GPU:  python benchmarks/conversion.py --out conversion
In small:  python benchmarks/conversion.py --out /tmp/small --data digits --recipe demo --networks cnn9_narrow \\
               --finetune-epochs 0.5,1
"""

import argparse
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dcnet
from dcnet.layers import decoupled_layers
from dcnet.layers.convert import CONVOLUTIONS
from dcnet.training import Ranks, Recipe, Run, autocast_of, build_model, evaluate, joined, open_data, settings, train
from dcnet.util.files import write_json
from dcnet.util.provenance import provenance
from dcnet.version import __version__

OPERATORS = "tanh+cosine,ball+cosine,seg+cosine,seg+square_cosine"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure what is missing, and return the record."""
    options = _options(arguments)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "conversion.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"settings": _settings(options)}
    if record["settings"] != _settings(options):
        raise SystemExit(f"{path} was measured with other settings, {record['settings']}; choose another --out")

    def once(network: str, key: str, measure: Callable[[], Any]) -> Any:
        """The entry of the record, measured now if it is not there."""
        entries = record.setdefault("networks", {}).setdefault(network, {})
        if key not in entries:
            entries[key] = measure()
            with joined(options.device) as ranks:
                record["where"] = {"dcnet": __version__, **provenance(ranks.device)}
            write_json(path, record, indent=2)
        print(f"{network:12} {key:45} {entries[key]:.2f}", flush=True)
        return entries[key]

    for network in options.networks.split(","):
        _measure(network, options, out / network, lambda key, measure, network=network: once(network, key, measure))
    print(f"written: {path}")
    return record


def _measure(
    network: str, options: argparse.Namespace, folder: Path, once: Callable[[str, Callable[[], Any]], Any]
) -> None:
    fields: dict[str, Any] = {"data": options.data, "model": network, "seed": options.seed, "magnitude": None}
    if options.epochs is not None:
        fields["epochs"] = options.epochs
    base = dcnet.make_recipe(options.recipe, **fields)
    once("plain", lambda: _train(base, folder / "plain", options).accuracy)
    plain = Run(folder / "plain")
    lengths = [float(text) for text in options.finetune_epochs.split(",")]
    for epochs in lengths:
        name = f"plain, {epochs:g} epochs on"
        once(name, lambda epochs=epochs: _tuned(plain, base, epochs, None, "cosine", folder, options))
    for operator in options.operators.split(","):
        magnitude, angular = operator.split("+")
        converted = _Converted(plain, magnitude, angular, options)
        once(f"{operator}, converted", lambda c=converted: c.accuracy(False, False))
        once(f"{operator}, converted, recalibrated", lambda c=converted: c.accuracy(False, True))
        once(f"{operator}, calibrated", lambda c=converted: c.accuracy(True, False))
        once(f"{operator}, calibrated, recalibrated", lambda c=converted: c.accuracy(True, True))
        for epochs in lengths:
            once(
                f"{operator}, calibrated, {epochs:g} epochs on",
                lambda e=epochs, m=magnitude, a=angular: _tuned(plain, base, e, m, a, folder, options),
            )
        scratch = dcnet.training.change(base, magnitude=magnitude, angular=angular)
        once(
            f"{operator}, from scratch",
            lambda s=scratch, o=operator: _train(s, folder / f"scratch-{o}", options).accuracy,
        )


def _train(recipe: Recipe, folder: Path, options: argparse.Namespace) -> Run:
    return train(recipe, folder, data_root=options.data_root, device=options.device, quiet=True)


def _tuned(
    plain: Run,
    base: Recipe,
    epochs: float,
    magnitude: str | None,
    angular: str,
    folder: Path,
    options: argparse.Namespace,
) -> float:
    """Return the accuracy after that many epochs from the plain network's weights, by its recipe at a lower rate."""
    chosen = {"epochs": epochs, "lr": options.finetune_lr, "magnitude": magnitude, "angular": angular}
    recipe = dcnet.finetune_recipe(str(plain.folder), base=base, **chosen, warmup=0.1, schedule="onecycle")
    name = "plain" if magnitude is None else f"{magnitude}+{angular}"
    return _train(recipe, folder / f"{name}-{epochs:g}-epochs", options).accuracy


class _Converted:
    """The plain network converted to an operator, as its decoupled twin has its layers, without training."""

    def __init__(self, plain: Run, magnitude: str, angular: str, options: argparse.Namespace) -> None:
        self.plain, self.magnitude, self.angular, self.options = plain, magnitude, angular, options

    def accuracy(self, calibrated: bool, recalibrated: bool) -> float:
        """On the test images."""
        recipe = self.plain.recipe
        with joined(self.options.device) as ranks, settings(recipe, ranks.device):
            data = open_data(recipe, ranks, self.options.data_root)
            model = self._model(ranks, self._batches(data) if calibrated else None)
            if recalibrated:
                dcnet.recalibrate_(model, self._batches(data))
            return evaluate(model, data, ranks, autocast_of(recipe, ranks.device)).accuracy

    def _model(self, ranks: Ranks, batches: list[torch.Tensor] | None) -> nn.Module:
        model = self.plain.model.to(ranks.device)
        twin = build_model(
            dcnet.training.change(self.plain.recipe, magnitude=self.magnitude, angular=self.angular), self.plain.shape
        )
        names = set(decoupled_layers(twin)) - set(decoupled_layers(model))
        types = (*CONVOLUTIONS, nn.Linear)
        dcnet.decouple_(
            *(model, self.magnitude, self.angular),
            where=lambda name, module: name in names,
            types=types,
            calibrate=batches,
        )
        return model.eval()

    def _batches(self, data: Any) -> list[torch.Tensor]:
        return [images for images, _ in islice(data.train_batches(0, 0, self.plain.recipe.batch), 10)]


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What decides on the figures; networks, operators and lengths may be added to a record."""
    return {name: getattr(options, name) for name in ("data", "recipe", "epochs", "finetune_lr", "seed")}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of the record and of the runs")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--recipe", default="fast-cifar", help="of the plain network, and of those from scratch")
    parser.add_argument("--epochs", type=float, default=None, help="of these; the recipe's own if not given")
    parser.add_argument("--networks", default="cnn9,resnet32")
    parser.add_argument("--operators", default=OPERATORS, help="magnitude+angular, with commas between them")
    parser.add_argument("--finetune-epochs", default="1,5")
    parser.add_argument("--finetune-lr", type=float, default=0.05, help="highest rate of fine-tuning, one cycle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
