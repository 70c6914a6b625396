"""The training loop."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from shlex import quote
from typing import Any

from dcnet.data import ImageFolder, Resident
from dcnet.layers import decoupled_layers
from dcnet.training.calibration import calibrated
from dcnet.training.callback import Callback, Callbacks
from dcnet.training.diagnose import NonFiniteLoss, first_non_finite
from dcnet.training.evaluate import Evaluation, evaluate
from dcnet.training.folder import Place, check_length
from dcnet.training.interruption import Interrupted, Interruption
from dcnet.training.learned import learned_quantiles
from dcnet.training.prepare import given_recipe, prepare
from dcnet.training.processors import SharedProcessors
from dcnet.training.progress import progress_for, say_finished
from dcnet.training.ranks import Ranks, joined
from dcnet.training.recipe import Recipe
from dcnet.training.recipe_data import open_data
from dcnet.training.run import Run
from dcnet.training.settings import settings
from dcnet.training.state import TrainingState
from dcnet.training.tensorboard import TensorBoard
from dcnet.util.provenance import provenance
from dcnet.version import __version__

_LOOK = 50  # steps between checks on a device that a check has to wait for


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
    """Train a run to its end, from its last checkpoint if it has begun, and return it.

    Under torchrun, all its processes train together.

    Args:
        recipe: what to train, or the name of a recipe.
        folder: the run folder; runs/TITLE by default, with a short suffix if another recipe's run has that name.
        data_root: the folder of the data sets' official files.
        download: fetch missing files of the data set from its own site.
        device: "cpu" or "cuda"; by default the GPU if there is one.
        quiet: show no progress.
        tensorboard: write TensorBoard's files into the run folder too.
        callbacks: called after every step and epoch; see `Callback`.
        overwrite: start again in a folder that has a run.
        extend: continue a run of the same recipe except for `epochs` and `steps`.

    Raises:
        Interrupted: on Ctrl-C or SIGTERM, after a checkpoint; training again goes on from there.
        NonFiniteLoss: if the loss is not finite; it names the step and what was not finite first.

    Examples:
        >>> import tempfile, dcnet
        >>> from pathlib import Path
        >>> recipe = dcnet.make_recipe("demo", steps=1, recalibrate=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = dcnet.train(recipe, Path(folder) / "run", device="cpu", quiet=True)
        ...     [entry["step"] for entry in run.metrics]
        [1]
    """
    recipe = given_recipe(recipe)
    told = Callbacks([*callbacks, *([TensorBoard()] if tensorboard else [])])  # raises now rather than later
    with joined(device) as ranks, settings(recipe, ranks.device), ExitStack() as held:
        place = Place(recipe, folder, held, overwrite, extend)
        where, finished = ranks.from_first(place.find)
        if finished:
            if ranks.first and not quiet:
                say_finished(Run(where))
            return Run(where)
        # before the folder is entered: a recipe that cannot be trained neither makes nor overwrites one
        data = open_data(recipe, ranks, data_root, download)
        checkpoint = where / "checkpoint.safetensors"
        begun = not overwrite and checkpoint.is_file()
        state, per_epoch = prepare(recipe, data, ranks, checkpoint if begun else None)
        if not overwrite and (where / "recipe.json").is_file():
            check_length(Run(where), recipe, per_epoch)
        run = Run(ranks.from_first(lambda: place.enter(where)))
        shown = [] if quiet else [progress_for()]
        if shown and ranks.world == 1 and ranks.device.type == "cpu" and isinstance(data, Resident):
            shown.append(SharedProcessors(shown[0].note))
        progress = Callbacks([*shown, *told.parts] if ranks.first else [])
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
        ranks.wait()  # until the first rank has written the result
        return run


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
    state.say = progress.note
    if ranks.device.type == "cuda" and decoupled_layers(state.model):
        progress.note("the first step compiles the kernels that no earlier run has left in Triton's cache: 5 to 15 s")
    if state.of_graphs:
        progress.note(state.of_graphs)

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
        started = time.perf_counter() - state.seconds  # these include the evaluation, but not the writing
        if state.step < steps and _asked(interruption, ranks, True):
            if evaluation is None:  # then the checkpoint lacks the averages of an evaluation
                _leave(state, run, data, per_epoch)
            elif state.saved_step != state.step:
                state.save(run)
            raise Interrupted(f"stopped at step {state.step} of {steps}")
    if evaluation is None:  # the run was at its last step already, without a result
        evaluation = _evaluate(state, data, per_epoch)
    if ranks.first:
        run.finish(_result(state, data, evaluation, per_epoch))
        progress.end(run)


def _asked(interruption: Interruption, ranks: Ranks, together: bool) -> bool:
    """Return whether to stop; several ranks agree on it, at steps at which all of them ask."""
    if ranks.world == 1:
        return interruption.asked
    return together and ranks.agree(float(interruption.asked)) > 0.0


def _save(state: TrainingState, run: Run, data: "Resident | ImageFolder", per_epoch: int) -> None:
    """Save a checkpoint, if the loss is finite."""
    _stop_if_not_finite(state, data, per_epoch)
    state.save(run)


def _leave(state: TrainingState, run: Run, data: "Resident | ImageFolder", per_epoch: int) -> None:
    """Save a checkpoint before an interruption, with averages that fit its weights, so that it can be evaluated."""
    _stop_if_not_finite(state, data, per_epoch)
    with calibrated(state, data, per_epoch):
        pass
    state.save(run)


def _end_epoch(
    state: TrainingState, run: Run, data: "Resident | ImageFolder", steps: int, per_epoch: int, progress: Callback
) -> Evaluation | None:
    """Evaluate, add to the metrics, and save a checkpoint if one is due."""
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
    """Evaluate the network on the test images, with running averages that fit its weights."""
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
    place = f"step {bad + 1} (epoch {epoch + 1}, batch {number + 1}, learning rate {rate:.3g})"
    words = f"the loss is not finite at {place}: {why}"
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
    """Return how long a run took, on which data and device."""
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
