"""Training: a loop one reads from top to bottom."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from shlex import quote
from typing import Any

from torch import nn

from dcnet.data import FOLDER, ImageFolder, Resident, load_data
from dcnet.training.calibration import calibrated
from dcnet.training.callback import Callback, Callbacks
from dcnet.training.diagnose import NonFiniteLoss, first_non_finite
from dcnet.training.evaluate import Evaluation, evaluate
from dcnet.training.folder import Place, check_length, total_steps
from dcnet.training.interruption import Interrupted, Interruption
from dcnet.training.learned import learned_quantiles
from dcnet.training.progress import progress_for, say_finished, showing_downloads
from dcnet.training.ranks import Ranks, joined
from dcnet.training.recipe import Recipe, make_recipe
from dcnet.training.run import Run
from dcnet.training.settings import settings
from dcnet.training.start import begin, go_on
from dcnet.training.state import TrainingState
from dcnet.training.tensorboard import TensorBoard
from dcnet.util.provenance import provenance
from dcnet.version import __version__

_LOOK = 50  # steps between looks at the device, where looking makes it wait


def train(
    recipe: Recipe | str,
    folder: str | Path | None = None,
    *,
    data_root: str | Path = "data",
    download: bool = False,
    device: str | None = None,
    quiet: bool = False,
    tensorboard: bool = False,
    callbacks: Sequence[Callback] = (),
    overwrite: bool = False,
    extend: bool = False,
) -> Run:
    """Train the run that the recipe describes to its end, from where it was left if it was begun, and return it.

    recipe: one, or the name of one. folder: runs/TITLE if none is given, with a short suffix where another recipe's run has that name.
    device: "cpu" or "cuda"; the GPU if there is one. callbacks: told about every step and epoch (`dcnet.Callback`). overwrite: start
    again in a folder that has a run. extend: go on with a run of that recipe but for `epochs` and `steps`. Under torchrun, all its
    processes train together.
    """
    recipe = _recipe(recipe)
    told = Callbacks([*callbacks, *([TensorBoard()] if tensorboard else [])])  # an error now rather than later
    with joined(device) as ranks, settings(recipe, ranks.device), ExitStack() as held:
        place = Place(recipe, folder, held, overwrite, extend)
        where, finished = ranks.from_first(place.find)
        if finished:
            if ranks.first and not quiet:
                say_finished(Run(where))
            return Run(where)
        # a recipe that cannot be trained leaves no folder behind, and overwrites none
        data = open_data(recipe, ranks, data_root, download)
        checkpoint = where / "checkpoint.safetensors"
        begun = not overwrite and checkpoint.is_file()
        state, per_epoch = _prepare(recipe, data, ranks, checkpoint if begun else None)
        if begun and (where / "recipe.json").is_file():
            check_length(Run(where), recipe, per_epoch)
        run = Run(ranks.from_first(lambda: place.enter(where)))
        progress = Callbacks([*([] if quiet else [progress_for()]), *told.parts] if ranks.first else [])
        with closing(progress), Interruption() as interruption:
            try:
                _train(state, run, data, per_epoch, progress, interruption)
            except Interrupted as stopped:
                options = f" --data-root {quote(str(data_root))}" if str(data_root) != "data" else ""
                options += f" --device {device}" if device is not None else ""
                raise Interrupted(
                    f"{stopped}. Go on with: dcnet train --resume {quote(str(run.folder))}{options}"
                ) from None
            except NonFiniteLoss as error:
                if ranks.first:
                    run.diverge(
                        {"step": error.step, "epoch": error.epoch, "why": str(error), **_provenance(state, data)}
                    )
                raise
        ranks.wait()  # for the result
        return run


def _recipe(given: Recipe | str) -> Recipe:
    if isinstance(given, str):
        return make_recipe(given)
    if not isinstance(given, Recipe):
        raise TypeError(
            f"recipe must be a dcnet.Recipe, or the name of one, got {given!r}; possible: 'demo', dcnet.make_recipe('demo', epochs=3), "
            "dcnet.read_recipe('recipe.json')"
        )
    return given


def open_data(
    recipe: Recipe, ranks: Ranks, root: str | Path = "data", download: bool = False
) -> "Resident | ImageFolder":
    """The recipe's data, ready to give batches on the ranks' device."""
    if recipe.data.startswith(FOLDER):
        if recipe.augment != "none":
            raise ValueError(
                f"augment={recipe.augment!r}: an image folder is always resized, cropped and flipped as in the paper; possible: none"
            )
        size = 224 if recipe.image_size is None else recipe.image_size
        return ImageFolder(recipe.data.removeprefix(FOLDER), ranks.device, recipe.seed, size)
    if recipe.image_size is not None:
        raise ValueError(
            f"image_size={recipe.image_size} is for image folders; the images of {recipe.data} have one size"
        )
    if download and not ranks.first:  # one process fetches, the others wait for it
        ranks.wait()
    with showing_downloads(download and ranks.first) as shown:
        data = load_data(recipe.data, root, download, shown)
    if download and ranks.first:
        ranks.wait()
    return Resident(data, ranks.device, recipe.seed, recipe.augment, recipe.pad)


def _prepare(
    recipe: Recipe, data: "Resident | ImageFolder", ranks: Ranks, begun: Path | None
) -> tuple[TrainingState, int]:
    """The state at its start, and the steps of an epoch. begun: the checkpoint of a run that has begun, which is yet to be restored."""
    per_epoch = data.train_length // recipe.batch
    if per_epoch == 0:
        raise ValueError(
            f"batch={recipe.batch} is larger than the {data.train_length} training images of {recipe.data}"
        )
    if recipe.batch % (ranks.world * recipe.accumulate):
        raise ValueError(
            f"batch={recipe.batch} cannot be divided among {ranks.world} processes × accumulate={recipe.accumulate}"
        )
    steps = total_steps(recipe, per_epoch)
    shape = {"num_classes": len(data.classes), "in_channels": data.channels, "input_size": data.size}
    start = begin(recipe, shape, data, ranks) if begun is None else go_on(recipe, shape, begun)
    state = TrainingState(recipe, shape, steps, ranks, start)
    alone = recipe.batch == ranks.world * recipe.accumulate
    if alone and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in state.model.modules()):
        raise ValueError(
            f"batch={recipe.batch} in parts of one image (× {ranks.world * recipe.accumulate}) does not go with BatchNorm"
        )
    return state, per_epoch


def _train(
    state: TrainingState,
    run: Run,
    data: "Resident | ImageFolder",
    per_epoch: int,
    progress: Callback,
    interruption: Interruption,
) -> None:
    recipe, ranks, steps = state.recipe, state.ranks, state.schedule.steps
    if run.checkpoint.is_file():
        state.restore(run)
    state.check_together()
    if ranks.first:
        run.keep_metrics(state.step)
    progress.begin(run, steps, state.step, per_epoch)

    look_every = 1 if ranks.device.type == "cpu" else _LOOK
    started = time.perf_counter() - state.seconds
    evaluation = None
    while state.step < steps:
        epoch, first = divmod(state.step, per_epoch)
        for images, labels in data.train_batches(epoch, first, recipe.batch, ranks.rank, ranks.world):
            state.train_step(images, labels)
            state.seconds = time.perf_counter() - started
            progress.step(state.step, state.seconds, state.local_means)
            if state.step == steps or state.step % per_epoch == 0:
                break
            if state.step % recipe.save_every == 0:
                _save(state, run, data, per_epoch)
            elif state.step % look_every == 0:
                _stop_if_not_finite(state, data, per_epoch)
            if _asked(interruption, ranks, state.step % look_every == 0):
                _leave(state, run, data, per_epoch)
                raise Interrupted(f"stopped at step {state.step} of {steps}")
        evaluation = _end_epoch(state, run, data, steps, per_epoch, progress)
        started = time.perf_counter() - state.seconds  # which have the evaluation, but not the writing
        if state.step < steps and _asked(interruption, ranks, True):
            if evaluation is None:  # whose averages the checkpoint would have
                _leave(state, run, data, per_epoch)
            elif state.saved_step != state.step:
                state.save(run)
            raise Interrupted(f"stopped at step {state.step} of {steps}")
    if evaluation is None:  # the run had reached its end, but not its result
        evaluation = _evaluate(state, data, per_epoch)
    if ranks.first:
        run.finish(_result(state, data, evaluation, per_epoch))
        progress.end(run)


def _asked(interruption: Interruption, ranks: Ranks, together: bool) -> bool:
    """Whether to stop; several ranks agree on it, at steps where all of them ask."""
    if ranks.world == 1:
        return interruption.asked
    return together and ranks.agree(float(interruption.asked)) > 0.0


def _save(state: TrainingState, run: Run, data: "Resident | ImageFolder", per_epoch: int) -> None:
    """A checkpoint, of a run that is in order."""
    _stop_if_not_finite(state, data, per_epoch)
    state.save(run)


def _leave(state: TrainingState, run: Run, data: "Resident | ImageFolder", per_epoch: int) -> None:
    """A checkpoint to stay for a while: the network in it can be evaluated as it is."""
    _stop_if_not_finite(state, data, per_epoch)
    with calibrated(state, data, per_epoch):
        pass
    state.save(run)


def _end_epoch(
    state: TrainingState, run: Run, data: "Resident | ImageFolder", steps: int, per_epoch: int, progress: Callback
) -> Evaluation | None:
    """Evaluation, metrics, checkpoint."""
    _stop_if_not_finite(state, data, per_epoch)
    recipe, ranks, begun = state.recipe, state.ranks, time.perf_counter()
    loss, accuracy = state.epoch_means()
    rate = recipe.lr * state.schedule.factor(state.step - 1)
    whole = state.step % per_epoch == 0
    epoch = state.step / per_epoch
    state.average_statistics()
    due = state.step == steps or (whole and recipe.evaluate_every and round(epoch) % recipe.evaluate_every == 0)
    evaluation = _evaluate(state, data, per_epoch) if due else None
    if whole:
        state.schedule.epoch_ended(100.0 - accuracy)
    state.epoch_ended()
    state.seconds += time.perf_counter() - begun
    entry: dict[str, Any] = {
        "epoch": round(epoch, 4),
        "step": state.step,
        "lr": rate,
        "train_loss": loss,
        "train_accuracy": accuracy,
    }
    if evaluation is not None:
        entry |= {"test_loss": evaluation.loss, "test_accuracy": evaluation.accuracy}
    learned = learned_quantiles(state.evaluated)
    if learned:
        entry["learned"] = learned
    entry["seconds"] = round(state.seconds, 3)
    if ranks.first:
        run.add_metrics(entry)
        progress.epoch(entry)
    if state.step == steps or state.save_is_due():
        state.save(run)
    return evaluation


def _evaluate(state: TrainingState, data: "Resident | ImageFolder", per_epoch: int) -> Evaluation:
    """The network on the test images, with running averages that fit its weights."""
    with calibrated(state, data, per_epoch):
        evaluation = evaluate(state.evaluated, data, state.ranks, state.autocast, state.order)
        if not math.isfinite(evaluation.loss):
            images, _ = next(iter(data.test_batches(200)))
            why = first_non_finite(state.evaluated.eval(), images)
            words = f"the loss on the test images is not finite after step {state.step}: {why}"
            raise NonFiniteLoss(words, state.step, state.step / per_epoch)
    return evaluation


def _stop_if_not_finite(state: TrainingState, data: "Resident | ImageFolder", per_epoch: int) -> None:
    bad = int(state.bad_step)
    if bad < 0:
        return
    epoch, number = divmod(bad, per_epoch)
    images, _ = next(iter(data.train_batches(epoch, number, state.recipe.batch, state.ranks.rank, state.ranks.world)))
    with state.autocast():
        why = first_non_finite(state.model, images.contiguous(memory_format=state.order))
    rate = state.recipe.lr * state.schedule.factor(bad)
    words = f"the loss is not finite at step {bad + 1} (epoch {epoch + 1}, batch {number + 1}, learning rate {rate:.3g}): {why}"
    raise NonFiniteLoss(words, bad + 1, (bad + 1) / per_epoch)


def _result(
    state: TrainingState, data: "Resident | ImageFolder", evaluation: Evaluation, per_epoch: int
) -> dict[str, Any]:
    return {
        "accuracy": evaluation.accuracy,
        "top5_accuracy": evaluation.top5_accuracy,
        "loss": evaluation.loss,
        "epochs": state.step / per_epoch,
        "steps": state.step,
        "images_per_second": round(state.step * state.recipe.batch / max(1e-9, state.seconds), 1),
        "parameters": sum(p.numel() for p in state.model.parameters()),
        **_provenance(state, data),
    }


def _provenance(state: TrainingState, data: "Resident | ImageFolder") -> dict[str, Any]:
    """Return how long a run took, on what data and where."""
    return {
        "seconds": round(state.seconds, 3),
        "data": state.recipe.data,
        "classes": len(data.classes),
        "train_images": data.train_length,
        "test_images": data.test_length,
        "devices": state.ranks.world,
        "dcnet": __version__,
        **provenance(state.ranks.device),
    }
