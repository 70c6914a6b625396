"""The data of a recipe, ready for training."""

from pathlib import Path

from dcnet.data import FOLDER, ImageFolder, Resident, load_data
from dcnet.training.progress import showing_downloads
from dcnet.training.ranks import Ranks
from dcnet.training.recipe import Recipe


def open_data(
    recipe: Recipe, ranks: Ranks, root: str | Path = "data", download: bool = False
) -> "Resident | ImageFolder":
    """Return the recipe's data, ready to give batches on the ranks' device."""
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
