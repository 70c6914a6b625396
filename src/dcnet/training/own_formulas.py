"""A user's formulas belong to a run: their source lies in its folder as `formulas.py`.

It is executed only when that is asked for.
"""

from pathlib import Path

from dcnet.formulas.sources import FILE, MissingFormula, check_source, execute_source, formula_names, source_of
from dcnet.training.recipe import Recipe
from dcnet.util.files import write_atomically

__all__ = ["FILE", "MissingFormula", "check_formulas", "keep_formulas", "names_of", "trust_formulas"]


def names_of(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the kinds and names of the recipe's formulas, known or not."""
    return [] if recipe.magnitude is None else formula_names([(recipe.magnitude, recipe.angular)])


def keep_formulas(folder: Path, recipe: Recipe) -> None:
    """Write the source of the recipe's formulas into the folder, of those that do not come with dcnet.

    Check those that are there already.
    """
    if (folder / FILE).is_file():
        check_formulas(folder, recipe)
        return
    source = source_of(names_of(recipe), folder)
    if source is not None:
        write_atomically(folder / FILE, source.encode())


def check_formulas(folder: Path, recipe: Recipe) -> None:
    """Raise where one of the recipe's formulas is not known here, or is not the one that the run was trained with."""
    check_source(_stored(folder), names_of(recipe), folder, folder / FILE)


def trust_formulas(folder: Path) -> None:
    """Execute the folder's own formulas, which registers them; raise where they are not what training wrote."""
    source = _stored(folder)
    if source is not None:
        execute_source(source, folder / FILE)


def _stored(folder: Path) -> str | None:
    path = folder / FILE
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; remove it, and give the formulas by --formulas FILE") from error
