"""Learning rates: a factor for each step, so that a resumed run needs only the number of steps.

The plateau schedule has a memory, which is saved.
"""

import math
from typing import Any

from dcnet.training.recipe import Recipe


class Schedule:
    """The factor of the learning rate for each step."""

    def __init__(self, recipe: Recipe, steps: int) -> None:
        self.recipe, self.steps = recipe, steps
        self.best, self.since, self.drops = math.inf, 0, 0  # of the plateau schedule

    def factor(self, step: int) -> float:
        """Return the factor for the step of that number, counted from 0."""
        recipe = self.recipe
        if recipe.schedule == "step":
            return recipe.gamma ** sum(step >= round(milestone * self.steps) for milestone in recipe.milestones)
        if recipe.schedule == "plateau":
            return recipe.gamma**self.drops
        if recipe.schedule == "onecycle":  # up and down in straight lines, to 0 after the last step
            rise = recipe.warmup * self.steps
            return (step + 1) / rise if step + 1 < rise else (self.steps - step) / (self.steps - rise + 1)
        return 1.0

    def epoch_ended(self, error: float) -> None:
        """Tell the plateau schedule the training error of an epoch, in percent."""
        if error < self.best * (1.0 - self.recipe.threshold):
            self.best, self.since = error, 0
            return
        self.since += 1
        if self.since >= self.recipe.patience:
            self.drops, self.since = self.drops + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": None if self.best == math.inf else self.best, "since": self.since, "drops": self.drops}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = math.inf if state["best"] is None else state["best"]
        self.since, self.drops = state["since"], state["drops"]
