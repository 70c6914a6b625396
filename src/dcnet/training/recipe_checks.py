"""Check that the fields of a recipe go together."""

from typing import TYPE_CHECKING

from dcnet.data import FOLDER

if TYPE_CHECKING:
    from dcnet.training.recipe import Recipe


def check_together(recipe: "Recipe") -> None:
    """Raise a `ValueError` that names the field which does not go with the others, and why."""
    if recipe.data.startswith(FOLDER) and not recipe.data.removeprefix(FOLDER).strip():
        raise ValueError(
            f"recipe: data={recipe.data!r} has no path; possible: {FOLDER}PATH, {FOLDER}. for the current folder"
        )
    if any(isinstance(m, bool) or not isinstance(m, int | float) for m in recipe.milestones):
        raise ValueError(f"recipe: milestones={recipe.milestones} must be numbers")
    if list(recipe.milestones) != sorted(recipe.milestones) or any(not 0.0 < m < 1.0 for m in recipe.milestones):
        raise ValueError(f"recipe: milestones={recipe.milestones} must be rising fractions between 0 and 1")
    plain, weighted = recipe.magnitude is None, recipe.weighting is not None
    decoupled = "is for decoupled layers, but magnitude=None asks for the plain network"
    for name, applies, why in (
        (
            "milestones",
            bool(recipe.milestones) and recipe.schedule != "step",
            f"are for schedule='step', not {recipe.schedule!r}",
        ),
        ("schedule", recipe.schedule == "step" and not recipe.milestones, "needs milestones"),
        ("plain_kernels", recipe.plain_kernels == "projected" and not recipe.projection, "needs projection > 0"),
        (
            "augment",
            "cutmix" in recipe.augment and recipe.adversarial != "none",
            f"mixes labels, which adversarial={recipe.adversarial!r} has no use for",
        ),
        ("decay_unweighted", (plain or weighted) and recipe.decay_unweighted, "is for unweighted decoupled kernels"),
        ("nesterov", recipe.nesterov and recipe.optimizer != "sgd", "is for optimizer='sgd'"),
        ("where", plain and bool(recipe.where), decoupled),
        ("weighting", plain and weighted, decoupled),
        ("radius", plain and recipe.radius != "learned", decoupled),
        ("sync", plain and recipe.sync, decoupled),
        ("calibrate", plain and recipe.calibrate > 0, decoupled),
        (
            "projection",
            weighted and recipe.projection > 0,
            f"is for unweighted kernels; with weighting={recipe.weighting!r} it must be 0",
        ),
        (
            "weighted_gradients",
            weighted and recipe.weighted_gradients,
            f"is for unweighted kernels, not for weighting={recipe.weighting!r}",
        ),
    ):
        if applies:
            raise ValueError(f"recipe: {name}={getattr(recipe, name)!r} {why}")
