"""A user's formulas are a part of a run: their source is in its folder as `formulas.py`.

It is only executed on request.
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
    """Write the source of the recipe's formulas that do not come with dcnet into the folder.

    If the source is there already, check it.
    """
    if (folder / FILE).is_file():
        check_formulas(folder, recipe)
        return
    source = source_of(names_of(recipe), folder)
    if source is not None:
        write_atomically(folder / FILE, source.encode())


def check_formulas(folder: Path, recipe: Recipe) -> None:
    """Raise if one of the recipe's formulas is not registered here, or differs from the one used in training."""
    check_source(_stored(folder), names_of(recipe), folder, folder / FILE)


def trust_formulas(folder: Path) -> None:
    """Execute the folder's own formulas, which registers them; raise if they are not what training wrote."""
    source = _stored(folder)
    if source is not None:
        execute_source(source, folder / FILE)


def _stored(folder: Path) -> str | None:
    path = folder / FILE
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; remove it, and give the formulas by --formulas FILE") from error
