"""`dcnet finetune`: convert a trained network to a decoupled operator and train it further.

Its other flags are those of `dcnet train`.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from dcnet.cli.common import DataRoot, Device, Download
from dcnet.cli.own_formulas import Formulas, TrustFormulas, register
from dcnet.cli.train import Overwrite, RecipeOption, RunOption, WithTensorBoard, base_recipe, carry_out
from dcnet.models import is_own, trust_model
from dcnet.training import Recipe, finetune_recipe, open_trained
from dcnet.training.hub import is_trained_file


def finetune(
    given: dict[str, Any],
    model: Annotated[
        str,
        typer.Argument(
            help="timm:NAME, torchvision:NAME, a run folder, a .safetensors file of its weights, hub:NAME (dcnet "
            "models), a network of dcnet, or MODULE:CALLABLE, which is imported and called.",
            metavar="MODEL",
        ),
    ],
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            help="Its trained weights: a .safetensors file, a run folder, or library for those that timm or "
            "torchvision downloads. Runs, their files and hub:NAME have their own, and MODULE:CALLABLE may.",
            metavar="WEIGHTS",
        ),
    ] = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    overwrite: Overwrite = False,
    data_root: DataRoot = Path("data"),
    download: Download = False,
    device: Device = None,
    formulas: Formulas = None,
    trust_formulas: TrustFormulas = False,
    tensorboard: WithTensorBoard = False,
) -> None:
    """Convert a trained network to a decoupled operator, calibrate it, and train it further.

    Without --recipe: 5 epochs of Adam, 3e-4, one cycle, and 10 batches of calibration. The same command continues a run
    that was interrupted, and so does dcnet train --resume. With --magnitude none the plain network is trained further.

    For example: dcnet finetune torchvision:resnet18 --weights library --data imagefolder:flowers --magnitude seg
    """

    def choose() -> tuple[Recipe, Path | None]:
        theirs = [Path(name) for name in (model, weights) if name is not None and Path(name).is_dir()]
        register(formulas, theirs if trust_formulas else ())
        if trust_formulas and is_trained_file(model):
            open_trained(model, trust_formulas=True)  # which registers the formulas in it
        if is_own(model):
            trust_model(model)  # the user has named it here
        return finetune_recipe(model, weights, None if recipe is None else base_recipe(recipe), **given), run

    options = {"data_root": data_root, "download": download, "device": device, "tensorboard": tensorboard}
    carry_out(choose, **options, overwrite=overwrite, extend=False)
