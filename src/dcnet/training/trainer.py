"""Training: a loop one reads from top to bottom."""

import math
import time
from pathlib import Path
from typing import Any

from dcnet.circumstances import circumstances
from dcnet.data import FOLDER, ImageFolder, Resident, load_data
from dcnet.layers import average_statistics_
from dcnet.training.diagnose import NonFiniteLoss, first_non_finite
from dcnet.training.evaluate import Evaluation, evaluate
from dcnet.training.job import Job
from dcnet.training.progress import Progress, Quiet, progress_for, showing_downloads
from dcnet.training.ranks import Ranks, joined
from dcnet.training.recipe import Recipe
from dcnet.training.run import Run, check_free, open_run
from dcnet.training.settings import settings
from dcnet.version import __version__

_LOOK = 50  # steps between looks at the device, where looking makes it wait


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after a checkpoint has been written."""


def train(
    recipe: Recipe,
    folder: str | Path | None = None,
    *,
    data_root: str | Path = "data",
    download: bool = False,
    device: str | None = None,
    quiet: bool = False,
    tensorboard: bool = False,
) -> Run:
    """The run that the recipe describes, in the folder (runs/TITLE if none is given): trained to its end, from where it was left if it was begun.

    Under torchrun, all its processes train together. device: "cpu" or "cuda"; the GPU if there is one.
    """
    with joined(device) as ranks, settings(recipe, ranks.device):
        where = Path(folder) if folder is not None else Path("runs") / recipe.title
        check_free(where, recipe)
        if (where / "result.json").is_file():
            return Run(where)
        # a recipe that cannot be trained leaves no folder behind
        data = open_data(recipe, ranks, data_root, download)
        job, per_epoch = _prepare(recipe, data, ranks)
        if ranks.first:
            open_run(where, recipe)
        ranks.wait()
        run = Run(where)
        progress: Progress = Quiet() if quiet or not ranks.first else progress_for(run, tensorboard)
        with progress:
            _train(job, run, data, per_epoch, progress)
        ranks.wait()  # for the result
        return run


def open_data(recipe: Recipe, ranks: Ranks, root: str | Path = "data", download: bool = False) -> "Resident | ImageFolder":
    """The recipe's data, ready to give batches on the ranks' device."""
    if recipe.data.startswith(FOLDER):
        if recipe.augment != "none":
            raise ValueError(f"augment={recipe.augment!r}: an image folder is always resized, cropped and flipped as in the paper; possible: none")
        return ImageFolder(recipe.data.removeprefix(FOLDER), ranks.device, recipe.seed, recipe.image_size or 224)
    if recipe.image_size is not None:
        raise ValueError(f"image_size={recipe.image_size} is for image folders; the images of {recipe.data} have one size")
    if download and not ranks.first:  # one process fetches, the others wait for it
        ranks.wait()
    with showing_downloads(download and ranks.first) as shown:
        data = load_data(recipe.data, root, download, shown)
    if download and ranks.first:
        ranks.wait()
    return Resident(data, ranks.device, recipe.seed, recipe.augment, recipe.pad)


def _prepare(recipe: Recipe, data: "Resident | ImageFolder", ranks: Ranks) -> tuple[Job, int]:
    """The job at its start, and the steps of an epoch."""
    per_epoch = data.train_length // recipe.batch
    if per_epoch == 0:
        raise ValueError(f"batch={recipe.batch} is larger than the {data.train_length} training images of {recipe.data}")
    if recipe.batch % (ranks.world * recipe.accumulate):
        raise ValueError(f"batch={recipe.batch} cannot be divided among {ranks.world} processes × accumulate={recipe.accumulate}")
    steps = recipe.steps or max(1, round(recipe.epochs * per_epoch))
    shape = {"num_classes": len(data.classes), "in_channels": data.channels, "input_size": data.size}
    return Job(recipe, shape, steps, ranks), per_epoch


def _train(job: Job, run: Run, data: "Resident | ImageFolder", per_epoch: int, progress: Progress) -> None:
    recipe, ranks, steps = job.recipe, job.ranks, job.schedule.steps
    if run.checkpoint.is_file():
        job.restore(run)
    if ranks.first:
        run.keep_metrics(job.step)
    progress.begin(steps, job.step, per_epoch)

    started = time.perf_counter() - job.seconds
    evaluation = None
    try:
        while job.step < steps:
            epoch, first = divmod(job.step, per_epoch)
            for images, labels in data.train_batches(epoch, first, recipe.batch, ranks.rank, ranks.world):
                job.train_step(images, labels)
                job.seconds = time.perf_counter() - started
                if job.step % _LOOK == 0 or ranks.device.type == "cpu":
                    _stop_if_not_finite(job, data, per_epoch)
                progress.step(job.step, job.seconds, lambda: job.epoch_sums() if ranks.world == 1 else (math.nan, math.nan))
                if job.step == steps or job.step % per_epoch == 0:
                    break
                if job.step % recipe.save_every == 0:
                    job.save(run)
            _stop_if_not_finite(job, data, per_epoch)
            evaluation = _end_epoch(job, run, data, steps, per_epoch, progress)
            started = time.perf_counter() - job.seconds  # writing and evaluating are in the seconds already
    except KeyboardInterrupt:
        if ranks.world == 1:
            job.save(run)
        kept = "" if ranks.world == 1 else " The last checkpoint is kept."
        raise Interrupted(f"stopped at step {job.step} of {steps}.{kept} Go on with: dcnet train --resume {run.folder}") from None
    if evaluation is None:  # the run had reached its end, but not its result
        evaluation = evaluate(job.evaluated, data, ranks, job.autocast)
    if ranks.first:
        run.finish(_result(job, data, evaluation, per_epoch))
        progress.end(run)


def _end_epoch(job: Job, run: Run, data: "Resident | ImageFolder", steps: int, per_epoch: int, progress: Progress) -> Evaluation | None:
    """Evaluation, metrics, checkpoint."""
    recipe, ranks, begun = job.recipe, job.ranks, time.perf_counter()
    loss, accuracy = job.epoch_sums()
    rate = recipe.lr * job.schedule.factor(job.step - 1)
    whole = job.step % per_epoch == 0
    epoch = job.step / per_epoch
    average_statistics_(job.model)
    due = job.step == steps or (whole and recipe.evaluate_every and round(epoch) % recipe.evaluate_every == 0)
    evaluation = evaluate(job.evaluated, data, ranks, job.autocast) if due else None
    if whole:
        job.schedule.epoch_ended(loss)
    job.epoch_ended()
    job.seconds += time.perf_counter() - begun
    entry = {"epoch": round(epoch, 4), "step": job.step, "lr": rate, "train_loss": loss, "train_accuracy": accuracy}
    if evaluation is not None:
        entry |= {"test_loss": evaluation.loss, "test_accuracy": evaluation.accuracy}
    entry["seconds"] = round(job.seconds, 3)
    if ranks.first:
        run.add_metrics(entry)
        progress.epoch(entry)
    job.save(run)
    return evaluation


def _stop_if_not_finite(job: Job, data: "Resident | ImageFolder", per_epoch: int) -> None:
    bad = int(job.bad)
    if bad < 0:
        return
    epoch, number = divmod(bad, per_epoch)
    images, _ = next(iter(data.train_batches(epoch, number, job.recipe.batch, job.ranks.rank, job.ranks.world)))
    with job.autocast():
        why = first_non_finite(job.model, images.contiguous(memory_format=job.order))
    rate = job.recipe.lr * job.schedule.factor(bad)
    raise NonFiniteLoss(f"the loss is not finite at step {bad + 1} (epoch {epoch + 1}, learning rate {rate:.3g}): {why}")


def _result(job: Job, data: "Resident | ImageFolder", evaluation: Evaluation, per_epoch: int) -> dict[str, Any]:
    recipe = job.recipe
    return {
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        "epochs": job.step / per_epoch,
        "steps": job.step,
        "seconds": round(job.seconds, 3),
        "images_per_second": round(job.step * recipe.batch / max(1e-9, job.seconds), 1),
        "parameters": sum(p.numel() for p in job.model.parameters()),
        "data": recipe.data,
        "train_images": data.train_length,
        "test_images": data.test_length,
        "devices": job.ranks.world,
        "dcnet": __version__,
        **circumstances(job.ranks.device),
    }
