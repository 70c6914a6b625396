"""`dcnet models`, `recipes`, `data` and `operators`: lists with a line for each."""

from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from torch import nn

from dcnet.cli.common import DataRoot, fail, show_table
from dcnet.cli.own_formulas import Formulas, register
from dcnet.data import FOLDER, NAMES, load_data
from dcnet.data.official import OFFICIAL
from dcnet.formulas import Formula, angulars, magnitudes
from dcnet.models import create_model, list_models
from dcnet.training import RECIPES, make_recipe, trained_models


def models() -> None:
    """List the networks, and the trained ones that come with dcnet."""
    rows = []
    for name in list_models():
        model = create_model(name, magnitude=None)
        rows.append([name, _structure(model), f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million"])
    show_table(
        ("model", "structure", "parameters"),
        rows,
        "Networks, with 10 classes of 32×32 images in color",
        right=("parameters",),
    )
    trained = [
        [f"hub:{name}", f"{entry['data']}, {entry['model']}", entry["operator"], f"{entry['accuracy']:.2f}%"]
        for name, entry in trained_models().items()
    ]
    if trained:
        columns = ("name", "data, model", "operator", "test accuracy")
        title = 'Trained networks: dcnet.load("hub:NAME"); dcnet evaluate, predict, attack, export or finetune hub:NAME'
        show_table(columns, trained, title, right=columns[3:])


def _structure(model: nn.Module) -> str:
    """Return the channels of the convolutions (other than 1×1) in order, then the features of linear layers."""
    convolutions = [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1)]
    connected = [m.out_features for m in model.modules() if isinstance(m, nn.Linear)][:-1]
    return ", ".join(
        [
            *(f"[{width}]×{len(list(run))}" for width, run in groupby(convolutions)),
            *(f"{width}-d" for width in connected),
        ]
    )


def recipes() -> None:
    """List the named recipes: dcnet train --recipe NAME."""
    rows = []
    for name in RECIPES:
        recipe = make_recipe(name)
        length = f"{recipe.steps:,} steps" if recipe.steps is not None else f"{recipe.epochs:g} epochs"
        how = f"{recipe.optimizer} {recipe.lr:g}, {recipe.schedule}, batch {recipe.batch}"
        rows.append([name, f"{recipe.data}, {recipe.model}", length, how])
    show_table(("recipe", "data, model", "length", "how"), rows)


def data(data_root: DataRoot = Path("data")) -> None:
    """List the data sets, and which of them are here."""
    rows = []
    for name in NAMES:
        if name not in OFFICIAL:
            known = load_data(name)
            classes, where = len(known.classes), "in the package"
        else:
            classes = len(OFFICIAL[name].classes)
            missing = [file for file in OFFICIAL[name].files if not (data_root / file).is_file()]
            flag = "" if data_root == Path("data") else f" --data-root {quote(str(data_root))}"
            where = (
                f"under {data_root}"
                if not missing
                else f"not under {data_root}: dcnet train --data {name}{flag} --download"
            )
        rows.append([name, classes, where])
    rows.append([f"{FOLDER}PATH", "", "a folder of yours: PATH/train/CLASS/… and PATH/val/CLASS/…"])
    show_table(("data set", "classes", "where"), rows, right=("classes",))


def operators(
    formulas: Formulas = None,
    kind: Annotated[str, typer.Option("--kind", help="Which: all, magnitude or angular.", metavar="KIND")] = "all",
) -> None:
    """List the magnitude functions h and the angular functions g, with their parameters."""
    try:
        register(formulas)
        if kind not in ("all", "magnitude", "angular"):
            raise ValueError(f"unknown kind {kind!r}; possible: all, magnitude, angular")
    except (ValueError, OSError) as error:
        fail(error)
    for which, title, known in (
        ("magnitude", "Magnitude functions h", magnitudes()),
        ("angular", "Angular functions g", angulars()),
    ):
        if kind in ("all", which):
            show_table(
                ("name", "formula", "parameters", "notes"), [_operator(formula) for formula in known.values()], title
            )


def _operator(formula: Formula) -> list[str]:
    parameters = ", ".join(
        f"{p.name}={p.default:g}" + (" or learned" if p.range.learnable else "") for p in formula.parameters.values()
    )
    notes = []
    if formula.kind == "magnitude":
        notes = ["bounded"] * formula.bounded + ["has a radius"] * formula.has_radius
    return [formula.name, formula.text, parameters, ", ".join(notes)]
