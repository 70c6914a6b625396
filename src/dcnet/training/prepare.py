"""Prepare a run before its first step: a recipe, and a state that fits the data."""

from dataclasses import replace
from pathlib import Path

from dcnet.data import ImageFolder, Resident
from dcnet.models.external import HUB
from dcnet.training.folder import total_steps
from dcnet.training.hub import weights_file
from dcnet.training.ranks import Ranks
from dcnet.training.recipe import Recipe
from dcnet.training.recipe_data import facts_of
from dcnet.training.recipes import make_recipe
from dcnet.training.start import begin, go_on
from dcnet.training.state import TrainingState
from dcnet.util.compat import BatchNorm


def given_recipe(given: Recipe | str) -> Recipe:
    """Return the recipe itself, or the recipe of that name."""
    if isinstance(given, str):
        return make_recipe(given)
    if not isinstance(given, Recipe):
        raise TypeError(
            f"recipe must be a dcnet.Recipe, or the name of one, got {given!r}; possible: 'demo', "
            "dcnet.make_recipe('demo', epochs=3), "
            "dcnet.read_recipe('recipe.json')"
        )
    return given


def prepare(
    recipe: Recipe, data: "Resident | ImageFolder", ranks: Ranks, begun: Path | None
) -> tuple[TrainingState, int]:
    """Return the initial state, and the steps of an epoch.

    begun: the checkpoint of a run that has begun, which the caller restores afterward.
    """
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
    start = begin(_with_file(recipe), shape, data, ranks) if begun is None else go_on(recipe, shape, begun)
    state = TrainingState(recipe, shape, facts_of(data), steps, ranks, start)
    alone = recipe.batch == ranks.world * recipe.accumulate
    if alone and any(isinstance(module, BatchNorm) for module in state.model.modules()):
        raise ValueError(
            f"batch={recipe.batch} in parts of one image (× {ranks.world * recipe.accumulate}) does not go with "
            "BatchNorm"
        )
    return state, per_epoch


def _with_file(recipe: Recipe) -> Recipe:
    """Return the recipe with the file of weights that it names as hub:NAME; the run's own recipe keeps the name."""
    if recipe.pretrained is None or not recipe.pretrained.startswith(HUB):
        return recipe
    return replace(recipe, pretrained=str(weights_file(recipe.pretrained)))
