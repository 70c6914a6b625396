"""`dcnet train`, `evaluate` and `runs`. The flags of `train` are the fields of a recipe."""

import contextlib
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from dcnet.cli.own_formulas import Formulas, register
from dcnet.data import FOLDER
from dcnet.formulas import parse_number
from dcnet.inspection import inspect_run
from dcnet.training import RECIPES, NonFiniteLoss, Recipe, Run, autocast_of, change, joined, make_recipe, open_data, read_recipe, settings
from dcnet.training import evaluate as evaluate_model
from dcnet.training import train as train_recipe
from dcnet.training.recipe import hints
from dcnet.training.run import run_folders

DataRoot = Annotated[Path, typer.Option("--data-root", help="Folder of the data sets' official files.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch missing files of the data set from its own site.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")]


def _kinds(name: str) -> tuple[Any, ...]:
    hint = hints[name]
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _flag(name: str) -> Any:
    """The type of a field's flag: text where None, a fraction or a list of numbers can be written."""
    kinds = _kinds(name)
    if types.NoneType in kinds or float in kinds or typing.get_origin(kinds[0]) is tuple:
        return str | None
    return kinds[0] | None


def _value(name: str, given: Any) -> Any:
    """What a flag says, as the field takes it."""
    kinds = _kinds(name)
    if types.NoneType in kinds and given == "none":
        return None
    try:
        if typing.get_origin(kinds[0]) is tuple:
            given = "" if given == "none" else given
            return tuple(parse_number(part) for part in given.split(",") if part)
        return parse_number(given) if kinds[0] is float else kinds[0](given)
    except ValueError:
        raise typer.BadParameter(f"{given!r} is not {getattr(kinds[0], '__name__', '')}", param_hint=f"--{name.replace('_', '-')}") from None


def with_recipe_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with a flag for each field of a recipe; those that are given come as `given`."""
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "given"]

    def called(**values: Any) -> None:
        given = {entry.name: _value(entry.name, values[entry.name]) for entry in fields(Recipe) if values[entry.name] is not None}
        command(given=given, **{p.name: values[p.name] for p in own})

    flags = []
    for entry in fields(Recipe):
        default = "none" if entry.default is None else entry.default
        flag = f"--{entry.name.replace('_', '-')}"
        switch = f"{flag}/--no-{flag[2:]}" if hints[entry.name] is bool else flag
        text = f"{entry.metadata['help']} Default: {default if default != () else 'none'}."
        option = typer.Option(switch, help=text, rich_help_panel="Recipe", show_default=False)
        flags.append(inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[_flag(entry.name), option]))
    called.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in [*own, *flags]}
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    return called


def train(
    given: dict[str, Any],
    recipe: Annotated[str | None, typer.Option(help=f"A named recipe ({', '.join(RECIPES)}), or a JSON file; flags override it.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder; runs/… by name of data, network and operator if not given.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Run folder to go on with, after any interruption.")] = None,
    data_root: DataRoot = Path("data"),
    download: Download = False,
    device: Device = None,
    formulas: Formulas = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard's files into the run folder too.")] = False,
) -> None:
    """Train a network by a recipe; under torchrun on several devices.

    For example: dcnet train --recipe paper-cifar --magnitude tanh --angular cosine --run runs/tanh
    """
    try:
        register(formulas)
        if resume is not None:
            if given or recipe is not None or run is not None:
                other = [f"--{name.replace('_', '-')}" for name in given] + ["--recipe"] * (recipe is not None) + ["--run"] * (run is not None)
                raise typer.BadParameter(f"the run's own recipe is resumed; {', '.join(other)} cannot change it", param_hint="--resume")
            folder: Path | None = resume
            chosen = Run(resume).recipe
        else:
            chosen, folder = change(_base(recipe), **given), run
        done = train_recipe(chosen, folder, data_root=data_root, download=download, device=device, tensorboard=tensorboard)
        row = _row(done)
    except (ValueError, OSError, RuntimeError, NonFiniteLoss, ImportError) as error:
        fail(error)
    except KeyboardInterrupt as interruption:
        if os.environ.get("RANK", "0") == "0":
            words = str(interruption) or "interrupted; what the last checkpoint has is kept"
            Console(stderr=True, soft_wrap=True).print(words, highlight=False, markup=False)
        raise typer.Exit(130) from None
    if os.environ.get("RANK", "0") == "0":  # torchrun's other processes stay silent
        _show([row])
        with contextlib.suppress(ValueError, OSError, KeyboardInterrupt):  # `dcnet report` makes what is missing, or says why it cannot
            inspect_run(done, data_root)


def _base(recipe: str | None) -> Recipe:
    """The recipe of that name, or the one that the file holds."""
    if recipe is None or recipe in RECIPES or not (recipe.endswith(".json") or Path(recipe).is_file()):
        return make_recipe(recipe)
    return read_recipe(recipe)


def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    data: Annotated[str | None, typer.Option(help="Another data set with the same classes and image size.")] = None,
    data_root: DataRoot = Path("data"),
    download: Download = False,
    device: Device = None,
    formulas: Formulas = None,
) -> None:
    """Accuracy and loss of a trained network on the test images, in all and by class."""
    try:
        register(formulas)
        found = Run(run)
        shape = found.shape
        recipe = found.recipe
        if data is not None:  # only its test images are looked at
            folder = data.startswith(FOLDER)
            recipe = change(recipe, data=data, augment="none", image_size=shape["input_size"] if folder else None)
        with joined(device) as ranks, settings(recipe, ranks.device):
            source = open_data(recipe, ranks, data_root, download)
            theirs = {"num_classes": len(source.classes), "in_channels": source.channels, "input_size": source.size}
            if theirs != shape:
                raise ValueError(f"{run} was trained for {_described(shape)}; {recipe.data} has {_described(theirs)}")
            result = evaluate_model(found.model.to(ranks.device), source, ranks, autocast_of(recipe, ranks.device))
    except (ValueError, OSError, RuntimeError) as error:
        fail(error)
    if not ranks.first:
        return
    table = Table("class", "images", "right", "accuracy", title=f"{run} on {recipe.data}")
    for name, count, right in zip(source.classes, result.counts.tolist(), result.correct.tolist(), strict=True):
        table.add_row(name, str(count), str(right), f"{100 * right / max(1, count):.2f}%")
    console = Console()
    console.print(table)
    total = int(result.counts.sum())
    console.print(f"accuracy {result.accuracy:.2f}% ({int(result.correct.sum())} of {total}), loss {result.loss:.4f}", highlight=False)


def _described(shape: dict[str, int]) -> str:
    size = shape["input_size"]
    return f"{shape['num_classes']} classes and images of {shape['in_channels']}×{size}×{size}"


def runs(folder: Annotated[Path, typer.Argument(help="Folder to look in.")] = Path("runs")) -> None:
    """List the run folders and their results."""
    rows, unreadable = [], []
    for path in run_folders(folder):
        try:
            rows.append(_row(Run(path)))
        except (ValueError, OSError) as error:
            unreadable.append(f"{path} cannot be read: {error}")
    if rows:
        _show(rows)
    elif not unreadable:
        Console(soft_wrap=True).print(f"no runs under {folder}", highlight=False, markup=False)
    for line in unreadable:
        Console(stderr=True, soft_wrap=True).print(line, highlight=False, markup=False)


def _row(run: Run) -> list[str]:
    """What was trained, and what came out."""
    recipe, result = run.recipe, run.result
    operator = "plain" if recipe.magnitude is None else f"{recipe.magnitude} + {recipe.angular}"
    if recipe.weighting is not None:
        operator += f", {recipe.weighting}"
    if result is not None:
        numbers = [f"{result['parameters']:,}", f"{result['epochs']:.4g}", f"{result['accuracy']:.2f}%", f"{result['loss']:.4f}"]
        numbers.append(f"{result['seconds']:.1f}")
    else:
        last = (run.metrics or [{"epoch": 0, "seconds": 0}])[-1]
        numbers = ["", f"{last['epoch']:g}", "unfinished", "", f"{last['seconds']:.1f}"]
    return [str(run.folder), f"{recipe.data}, {recipe.model}", operator, *numbers]


def _show(rows: list[list[str]]) -> None:
    """A table of runs."""
    table = Table(*(Column(name, overflow="fold") for name in ("run", "data, model", "operator")))
    for name in ("parameters", "epochs", "test accuracy", "loss", "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def fail(error: Exception) -> typing.NoReturn:
    """Ends the command with the error's words."""
    Console(stderr=True, soft_wrap=True).print(f"error: {error}", highlight=False, markup=False)
    raise typer.Exit(1) from error
