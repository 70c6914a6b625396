"""Attacks on a trained run: what `dcnet attack`, the tables and the demo do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.data import ImageFolder, Resident
from dcnet.layers import decoupled_layers
from dcnet.robustness import EPS, check_up, evaluate
from dcnet.training.ranks import joined
from dcnet.training.recipe_data import open_data
from dcnet.training.run import Run
from dcnet.training.settings import tf32
from dcnet.util.provenance import provenance

STATISTICS = ("running", "batch")
_FITS = 4 * 2**30  # bytes of images that are loaded without being asked for


class _OfTheBatch(nn.Module):
    """A network whose decoupled layers take E{‖x‖} from the batch, as in training.

    The network is not a submodule, to hide it from the check that refuses networks in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for layer in decoupled_layers(model).values():
            layer.train()
            layer.momentum = 0.0  # the running averages stay
        self.inside = [model]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inside[0](x)
        return logits


def attack_run(
    run: Run,
    attacks: str = "fgsm,bim,pgd",
    eps: float = EPS,
    *,
    source: Run | None = None,
    limit: int | None = None,
    first: int = 0,
    cumulative: bool = True,
    predicted: bool = False,
    statistics: str = "running",
    check_images: int = 0,
    check_queries: int = 500,
    bf16: bool = False,
    batch: int = 500,
    seed: int = 0,
    data_root: str | Path = "data",
    download: bool = False,
    device: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Attack a run's network on its test images.

    Args:
        run: the run to attack.
        attacks: names with parameters, as in "fgsm,pgd:steps=50:restarts=5".
        eps: the largest change of a pixel, images going from 0 to 1.
        source: another run, on whose network the adversarial images are made.
        limit: attack only the first images, this many; of an image folder, this many that are drawn, always the same
            ones. A folder with more than 4 GiB of test images needs it.
        first: the number of the first image to attack, counted from 0; not of an image folder.
        cumulative: each attack sees only what survived those before it.
        predicted: attack what the network predicts, not the true labels.
        statistics: "running" averages, as the network is used, or "batch", E{‖x‖} of the batch as in training, which
            couples images and weakens attacks.
        check_images: make the check-up for misleading gradients on this many images; 0 for none.
        check_queries: queries of the check-up's black-box attack.
        bf16: compute in bfloat16, which is faster and weakens attacks.
        batch: images at once.
        seed: of random starts.
        data_root: the folder of the data sets' official files.
        download: fetch missing files of the data set from its own site.
        device: "cpu" or "cuda"; by default the GPU if there is one.
        progress: called with an attack's name, how many images it has done, and how many there are.

    Returns:
        What `dcnet.robustness.evaluate` finds, with the check-up if there is one, and how and where it was computed:
        a record that `Run.add_attack` keeps.
    """
    if statistics not in STATISTICS:
        raise ValueError(f"unknown statistics {statistics!r}; possible: {', '.join(STATISTICS)}")
    with joined(device) as ranks, tf32(False), torch.autocast(ranks.device.type, torch.bfloat16, enabled=bf16):
        data = open_data(run.recipe, ranks, data_root, download)
        images, labels = _test_images(data, run.recipe.data, limit, first)
        model = run.model.to(ranks.device)
        other = None if source is None else source.model.to(ranks.device)
        options: dict[str, Any] = {
            "batch": batch,
            "cumulative": cumulative,
            "predicted": predicted,
            "seed": seed,
            "progress": progress,
        }
        target = _OfTheBatch(model).eval() if statistics == "batch" else model
        result = evaluate(target, images, labels, attacks, eps, source=other, **options)
        if check_images:
            some, their = images[:check_images], labels[:check_images]
            result["check-up"] = check_up(model, some, their, eps, queries=check_queries, seed=seed)
    found = {"from": _name_beside(run, source), "bf16": bf16, **provenance(ranks.device)}
    return result | found | ({"statistics": statistics} if statistics != "running" else {})


def _test_images(data: "Resident | ImageFolder", name: str, limit: int | None, first: int) -> tuple[Tensor, Tensor]:
    """Return the images in [0, 1] that are to be attacked, and their labels."""
    if isinstance(data, Resident):
        some = slice(first, None if limit is None else first + limit)
        return data.test.images[some].float() / 255.0, data.test.labels[some]
    if first:
        raise ValueError(f"first={first}: images of a folder are drawn; possible: 0")
    if limit is None and (size := 4 * data.channels * data.size**2 * data.test_length) > _FITS:
        raise ValueError(
            f"{name} has {data.test_length} test images, {size / 2**30:.1f} GiB at {data.size}×{data.size}, too many "
            "to attack them all; possible: limit=1000 (--limit 1000), which attacks 1000 of them that are drawn"
        )
    return data.drawn_test_images(data.test_length if limit is None else limit)


def _name_beside(run: Run, source: Run | None) -> str | None:
    """Return the source's name in a record: only its folder's name if it is beside the run, so that both can move."""
    if source is None:
        return None
    beside = source.folder.resolve().parent == run.folder.resolve().parent
    return source.folder.resolve().name if beside else str(source.folder)
