"""Training: recipes, runs, checkpoints; the same on one device or under torchrun."""

from dcnet.training.attack import attack_run
from dcnet.training.callback import Callback
from dcnet.training.diagnose import NonFiniteLoss
from dcnet.training.evaluate import Evaluation, evaluate
from dcnet.training.export import export_run
from dcnet.training.finetune import finetune_recipe
from dcnet.training.folder import open_run
from dcnet.training.hub import add_to_hub, is_trained_file, load, open_trained, trained_models
from dcnet.training.interruption import Interrupted
from dcnet.training.ranks import Ranks, joined
from dcnet.training.recipe import Recipe, change
from dcnet.training.recipe_data import find_data, open_data
from dcnet.training.recipes import RECIPES, make_recipe, read_recipe, recipe_differences, recorded
from dcnet.training.restore import restore_run, restored_run
from dcnet.training.run import Run, build_model, run_folders
from dcnet.training.run_evaluation import RunEvaluation, evaluate_run
from dcnet.training.run_prediction import Prediction, classes_of, predict_run
from dcnet.training.settings import autocast_of, settings
from dcnet.training.tensorboard import TensorBoard
from dcnet.training.trainer import train
from dcnet.training.weights import read_about, save_weights
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
    "add_to_hub",
    "attack_run",
    "autocast_of",
    "build_model",
    "change",
    "classes_of",
    "evaluate",
    "evaluate_run",
    "export_run",
    "find_data",
    "finetune_recipe",
    "is_trained_file",
    "joined",
    "load",
    "make_recipe",
    "open_data",
    "open_run",
    "open_trained",
    "predict_run",
    "read_about",
    "read_recipe",
    "recipe_differences",
    "recorded",
    "restore_run",
    "restored_run",
    "run_folders",
    "save_weights",
    "settings",
    "train",
    "trained_models",
]
