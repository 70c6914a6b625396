"""Training: recipes, runs, checkpoints; the same on one device or under torchrun."""

from dcnet.training.attack import attack_run
from dcnet.training.callback import Callback
from dcnet.training.diagnose import NonFiniteLoss
from dcnet.training.evaluate import Evaluation, evaluate
from dcnet.training.export import export_run
from dcnet.training.folder import open_run
from dcnet.training.interruption import Interrupted
from dcnet.training.ranks import Ranks, joined
from dcnet.training.recipe import Recipe, change
from dcnet.training.recipe_data import open_data
from dcnet.training.recipes import RECIPES, make_recipe, read_recipe, recorded
from dcnet.training.run import Run, build_model, load, run_folders, save_weights
from dcnet.training.run_evaluation import RunEvaluation, evaluate_run
from dcnet.training.run_prediction import Prediction, classes_of, predict_run
from dcnet.training.settings import autocast_of, settings
from dcnet.training.tensorboard import TensorBoard
from dcnet.training.trainer import train
from dcnet.util.lock import InUse

__all__ = [
    "RECIPES",
    "Callback",
    "Evaluation",
    "InUse",
    "Interrupted",
    "NonFiniteLoss",
    "Prediction",
    "Ranks",
    "Recipe",
    "Run",
    "RunEvaluation",
    "TensorBoard",
    "attack_run",
    "autocast_of",
    "build_model",
    "change",
    "classes_of",
    "evaluate",
    "evaluate_run",
    "export_run",
    "joined",
    "load",
    "make_recipe",
    "open_data",
    "open_run",
    "predict_run",
    "read_recipe",
    "recorded",
    "run_folders",
    "save_weights",
    "settings",
    "train",
]
