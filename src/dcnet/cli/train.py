"""`dcnet train`. Its flags are the fields of a recipe."""

import contextlib
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from dcnet.cli.common import DataRoot, Device, Download, fail, folder_path, run_row, say, show_runs
from dcnet.cli.help import RECIPE
from dcnet.cli.own_formulas import Formulas, TrustFormulas, register
from dcnet.data import NAMES
from dcnet.formulas import angulars, magnitudes, parse_number
from dcnet.inspection import inspect_run
from dcnet.layers.selection import PRESETS
from dcnet.models import is_own, list_models, trust_model
from dcnet.training import RECIPES, NonFiniteLoss, Recipe, Run, change, make_recipe, read_recipe
from dcnet.training import train as train_recipe
from dcnet.training.folder import LENGTH
from dcnet.training.recipe import hints


def _kinds(name: str) -> tuple[Any, ...]:
    hint = hints[name]
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _is_names(name: str) -> bool:
    """Tell whether a field is a list of names, whose flag can be given several times."""
    return bool(hints[name] == tuple[str, ...])


def _flag(name: str) -> Any:
    """Return the type of a field's flag: text where None, a fraction or a list of numbers can be written."""
    kinds = _kinds(name)
    if bool in kinds:  # a flag and its opposite; neither of them for None
        return bool | None
    if _is_names(name):
        return list[str] | None
    if types.NoneType in kinds or float in kinds or typing.get_origin(kinds[0]) is tuple:
        return str | None
    return kinds[0] | None


_WORDS: dict[Any, str] = {int: "a whole number", float: "a number"}


def value_of_flag(name: str, given: Any) -> Any:
    """Return what a flag says, as the field takes it."""
    kinds = _kinds(name)
    if _is_names(name):
        names = [part.strip() for text in ([given] if isinstance(given, str) else given) for part in text.split(",")]
        return () if names == ["none"] else tuple(names)
    if types.NoneType in kinds and given == "none":
        return None
    try:
        if typing.get_origin(kinds[0]) is tuple:
            given = "" if given == "none" else given
            return tuple(parse_number(part) for part in given.split(",") if part)
        return parse_number(given) if kinds[0] is float else kinds[0](given)
    except ValueError:
        wanted = _WORDS.get(kinds[0], "numbers with commas between them")
        raise typer.BadParameter(f"{given!r} is not {wanted}", param_hint=f"--{name.replace('_', '-')}") from None


def _short(default: Any) -> Any:
    """Return a default as one writes it: a number with endless digits, such as 8/255, as a fraction."""
    endless = isinstance(default, float) and default != round(default, 6)
    return f"{255 * default:g}/255" if endless else default


_KNOWN = {
    "where": PRESETS,
    "data": NAMES,
    "model": list_models(),
    "magnitude": ["none", *magnitudes()],
    "angular": list(angulars()),
}


def _completion(known: Iterable[str]) -> Callable[[str], list[str]] | None:
    """Return the function for a shell's completions of a flag's value; None if no values are known."""
    words = list(known)
    return (lambda incomplete: [word for word in words if word.startswith(incomplete)]) if words else None


def with_recipe_flags(command: Callable[..., None], without: Sequence[str] = ()) -> Callable[..., None]:
    """Return the command with a flag for each recipe field except `without`; it gets the flags in use as `given`."""
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "given"]
    entries = [entry for entry in fields(Recipe) if entry.name not in without]

    def called(**values: Any) -> None:
        given = {
            entry.name: value_of_flag(entry.name, values[entry.name])
            for entry in entries
            if values[entry.name] is not None and values[entry.name] != []
        }
        if "epochs" in given and given.get("steps") is not None:
            both = f"--epochs {values['epochs']} and --steps {values['steps']}"
            fail(ValueError(f"{both} are two lengths of one run; possible: one of them"))
        command(given=given, **{p.name: values[p.name] for p in own})

    flags = []
    for entry in entries:
        default = ("auto" if bool in _kinds(entry.name) else "none") if entry.default is None else _short(entry.default)
        flag = f"--{entry.name.replace('_', '-')}"
        switch = f"{flag}/--no-{flag[2:]}" if bool in _kinds(entry.name) else flag
        several = " Several flags, or commas between them." if _is_names(entry.name) else ""
        text = f"{entry.metadata['help']}{several} Default: {default if default != () else 'none'}."
        known = _KNOWN.get(entry.name, entry.metadata["possible"])
        option = typer.Option(
            switch, help=text, rich_help_panel=RECIPE, show_default=False, autocompletion=_completion(known)
        )
        flags.append(
            inspect.Parameter(
                entry.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[_flag(entry.name), option],
            )
        )
    called.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in [*own, *flags]}
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    return called


RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help=f"A named recipe ({', '.join(RECIPES)}), or a JSON file; flags override it.",
        autocompletion=lambda: list(RECIPES),
        metavar="RECIPE",
    ),
]
RunOption = Annotated[
    Path | None,
    typer.Option(
        help="Run folder; runs/… by name of data, network and operator if not given.",
        parser=folder_path,
        metavar="FOLDER",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start again, whatever run is in the folder.")]
WithTensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Write TensorBoard's files into the run folder too.")
]


def train(
    given: dict[str, Any],
    recipe: RecipeOption = None,
    run: RunOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Run folder to go on with, after any interruption; with --epochs or --steps, to another length.",
            parser=folder_path,
            metavar="FOLDER",
        ),
    ] = None,
    overwrite: Overwrite = False,
    data_root: DataRoot = Path("data"),
    download: Download = False,
    device: Device = None,
    formulas: Formulas = None,
    trust_formulas: TrustFormulas = False,
    tensorboard: WithTensorBoard = False,
) -> None:
    """Train a network by a recipe; under torchrun on several devices.

    For example: dcnet train --recipe paper-cifar --magnitude tanh --angular cosine --run runs/tanh
    """
    if resume is not None:
        _check_resumed(given, recipe, run, overwrite)

    def choose() -> tuple[Recipe, Path | None]:
        theirs = [folder for folder in (resume, run, given.get("pretrained")) if folder is not None]
        register(formulas, map(Path, theirs) if trust_formulas else ())
        if resume is not None:
            return change(Run(resume).recipe, **given), resume
        if is_own(given.get("model", "")):
            trust_model(given["model"])  # the user has named it here
        return change(base_recipe(recipe), **given), run

    options = {"data_root": data_root, "download": download, "device": device, "tensorboard": tensorboard}
    carry_out(choose, **options, overwrite=overwrite, extend=resume is not None)


def carry_out(choose: Callable[[], tuple[Recipe, Path | None]], **options: Any) -> None:
    """Train the recipe that is chosen, in its folder, and show what came out; `options` are those of `dcnet.train`."""
    first = os.environ.get("RANK", "0") == "0"  # torchrun's other processes stay silent
    try:
        done = train_recipe(*choose(), **options)
        row = run_row(done)
    except (ValueError, OSError, RuntimeError, NonFiniteLoss, ImportError) as error:
        fail(_with_flag(error))
    except KeyboardInterrupt as interruption:
        if first:
            say(str(interruption) or "interrupted; what the last checkpoint has is kept", stderr=True)
        raise typer.Exit(130) from None
    if first:
        show_runs([row])
        with contextlib.suppress(
            ValueError, OSError, KeyboardInterrupt
        ):  # `dcnet report` makes what is missing, or says why it cannot
            inspect_run(done, options["data_root"])


def _with_flag(error: Exception) -> Exception:
    """Return the error; that of an unknown formula with the flag that makes one's own known."""
    if isinstance(error, ValueError) and str(error).startswith(("unknown magnitude ", "unknown angular ")):
        return ValueError(f"{error}; for a formula of your own, give its file: --formulas FILE")
    return error


def _check_resumed(given: dict[str, Any], recipe: str | None, run: Path | None, overwrite: bool) -> None:
    """Raise where something else than the length of a run is to be changed."""
    other = [f"--{name.replace('_', '-')}" for name in given if name not in LENGTH]
    other += [
        flag
        for flag, used in (("--recipe", recipe), ("--run", run), ("--overwrite", overwrite or None))
        if used is not None
    ]
    if other:
        raise typer.BadParameter(
            f"the run's own recipe is resumed; {', '.join(other)} cannot change it. Possible: --epochs, --steps",
            param_hint="--resume",
        )


def base_recipe(recipe: str | None) -> Recipe:
    """Return the recipe of that name, or the one that the file holds."""
    if recipe is None or recipe in RECIPES or not (recipe.endswith(".json") or Path(recipe).is_file()):
        return make_recipe(recipe)
    if not Path(recipe).is_file():
        what = "is a folder" if Path(recipe).is_dir() else "does not exist"
        raise ValueError(f"--recipe {recipe} {what}; possible: a JSON file, or {', '.join(RECIPES)}")
    try:
        return read_recipe(recipe)
    except UnicodeDecodeError as error:
        raise ValueError(f"--recipe {recipe} is not text: {error}") from error
