"""Training: recipes, runs, checkpoints; the same on one device or under torchrun."""

from dcnet.training.attack import attack_run
from dcnet.training.callback import Callback
from dcnet.training.diagnose import NonFiniteLoss
from dcnet.training.evaluate import Evaluation, evaluate
from dcnet.training.export import export_run
from dcnet.training.folder import open_run
from dcnet.training.interruption import Interrupted
from dcnet.training.ranks import Ranks, joined
from dcnet.training.recipe import RECIPES, Recipe, change, make_recipe, read_recipe, recorded
from dcnet.training.run import Run, build_model, find_runs, load, save_weights
from dcnet.training.settings import autocast_of, settings
from dcnet.training.tensorboard import TensorBoard
from dcnet.training.trainer import open_data, train
from dcnet.util.lock import InUse

__all__ = [
    "RECIPES",
    "Callback",
    "Evaluation",
    "InUse",
    "Interrupted",
    "NonFiniteLoss",
    "Ranks",
    "Recipe",
    "Run",
    "TensorBoard",
    "attack_run",
    "autocast_of",
    "build_model",
    "change",
    "evaluate",
    "export_run",
    "find_runs",
    "joined",
    "load",
    "make_recipe",
    "open_data",
    "open_run",
    "read_recipe",
    "recorded",
    "save_weights",
    "settings",
    "train",
]
