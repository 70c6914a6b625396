"""The data of a recipe, ready for training."""

from pathlib import Path
from typing import Any

from dcnet.data import FOLDER, ImageFolder, Resident, load_data
from dcnet.training.progress import showing_downloads
from dcnet.training.ranks import Ranks
from dcnet.training.recipe import Recipe
from dcnet.util.text import few


def open_data(
    recipe: Recipe, ranks: Ranks, root: str | Path = "data", download: bool = False
) -> "Resident | ImageFolder":
    """Return the recipe's data, ready to give batches on the ranks' device.

    Args:
        recipe: the recipe.
        ranks: the processes that train together, as `dcnet.training.joined()` gives them.
        root: the folder of the data sets' official files.
        download: fetch missing files of the data set from its own site.
    """
    if recipe.data.startswith(FOLDER):
        if recipe.augment != "none":
            raise ValueError(
                f"augment={recipe.augment!r}: an image folder is always resized, cropped and flipped as in the "
                "paper; possible: none"
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
    return Resident(data, ranks.device, recipe.seed, recipe.augment, recipe.pad, recipe.cutout)


def find_data(name: str, root: str | Path = "data", download: bool = False) -> None:
    """Raise if the data of that name is missing; fetch it if asked to."""
    if not name.startswith(FOLDER):
        load_data(name, root, download)
    elif not (folder := Path(name.removeprefix(FOLDER))).is_dir():
        raise FileNotFoundError(f"image folder {folder} does not exist (looked at {folder.resolve()})")


def facts_of(data: "Resident | ImageFolder") -> dict[str, Any]:
    """Return what must not change until a run is continued: the names of the classes, and the number of images."""
    return {"classes": list(data.classes), "train_images": data.train_length}


def check_same_data(run: Path, recipe: Recipe, then: dict[str, Any] | None, now: dict[str, Any]) -> None:
    """Raise if the data of a run has changed; then: the facts in its checkpoint, None in older checkpoints."""
    if then not in (None, now):
        words = [f"{facts['train_images']} training images of {few(facts['classes'])}" for facts in (then, now)]
        raise ValueError(f"{run} cannot go on, since {recipe.data} is not what it was: {words[0]} then, {words[1]} now")
