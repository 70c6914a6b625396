"""Training: recipes, runs, checkpoints; the same on one device or under torchrun."""

from dcnet.training.attack import attack_run
from dcnet.training.callback import Callback
from dcnet.training.diagnose import NonFiniteLoss
from dcnet.training.evaluate import Evaluation, evaluate
from dcnet.training.finetune import finetune_recipe
from dcnet.training.folder import open_run
from dcnet.training.hub import add_to_hub, load, trained_models
from dcnet.training.interruption import Interrupted
from dcnet.training.ranks import Ranks, joined
from dcnet.training.recipe import RECIPES, Recipe, change, make_recipe, read_recipe, recorded
from dcnet.training.run import Run, build_model, find_runs
from dcnet.training.settings import autocast_of, settings
from dcnet.training.tensorboard import TensorBoard
from dcnet.training.trainer import open_data, train
from dcnet.training.weights import save_weights
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
    "add_to_hub",
    "attack_run",
    "autocast_of",
    "build_model",
    "change",
    "evaluate",
    "find_runs",
    "finetune_recipe",
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
    "trained_models",
]
