"""dcnet: decoupled networks (Liu et al., CVPR 2018) for PyTorch.

A convolution's output is ⟨w, x⟩ = ‖w‖‖x‖cos θ. A decoupled operator replaces it by h(‖w‖, ‖x‖)·g(θ), with the
magnitude function h and the angular function g chosen from a catalogue, learned, or your own.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dcnet import formulas, robustness
from dcnet.converting import (
    CoupleReport,
    DecoupleReport,
    conversion_of,
    couple_,
    decouple_,
    from_pretrained,
    plain_state_dict,
    restore_conversion_,
)
from dcnet.deploy import ExportReport, export, load_weights_
from dcnet.explaining import Explanation, explain, explanations
from dcnet.formulas import angular, angulars, learnable, magnitude, magnitudes
from dcnet.fusing import FuseReport, fuse_, unfuse_
from dcnet.layers import (
    Block,
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    DecoupledLinear,
    LazyDecoupledConv1d,
    LazyDecoupledConv2d,
    LazyDecoupledConv3d,
    WeightProjection,
    average_statistics_,
    orthogonal_penalty,
    orthonormal_penalty,
    parameter_groups,
    project_weights_,
    recalibrate_,
    sync_norms_,
    weight_gradients_,
)
from dcnet.models import create_model, list_models, trust_model
from dcnet.ops import decoupled_conv1d, decoupled_conv2d, decoupled_conv3d, decoupled_linear, fvcore_handles, patch_norm
from dcnet.training import Callback, Recipe, Run, finetune_recipe, load, make_recipe, read_recipe, train, trained_models
from dcnet.version import __version__

if TYPE_CHECKING:  # what `__getattr__` finds, so that type checkers know these names, and no others
    from dcnet import bench as bench
    from dcnet import explorer as explorer
    from dcnet import figures as figures
    from dcnet import inspection as inspection
    from dcnet import report as report
    from dcnet import tables as tables
    from dcnet.formulas import at_least as at_least
    from dcnet.formulas import m as m
    from dcnet.formulas import positive as positive
    from dcnet.training.huggingface import HubModel as HubModel

# Imported when they are asked for: they need matplotlib, or are for one command.
_LAZY = ("bench", "explorer", "figures", "inspection", "report", "tables")
# What formulas are written with is in `dcnet.formulas`; these names were here first.
_MOVED = ("at_least", "m", "positive")


if not TYPE_CHECKING:  # to a type checker it would say that every name exists

    def __getattr__(name):
        if name in _LAZY:
            return importlib.import_module(f"dcnet.{name}")
        if name in _MOVED:
            return getattr(formulas, name)
        if name == "HubModel":  # needs huggingface_hub
            from dcnet.training.huggingface import HubModel

            return HubModel
        raise AttributeError(f"module 'dcnet' has no attribute {name!r}")


def __dir__() -> list[str]:
    # what asks for every name in it, such as help(), must not meet an ImportError
    return sorted({*globals(), *_LAZY, *(["HubModel"] if find_spec("huggingface_hub") else [])})


__all__ = [
    "Block",
    "Callback",
    "CoupleReport",
    "DecoupleReport",
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledLinear",
    "Explanation",
    "ExportReport",
    "FuseReport",
    "LazyDecoupledConv1d",
    "LazyDecoupledConv2d",
    "LazyDecoupledConv3d",
    "Recipe",
    "Run",
    "WeightProjection",
    "__version__",
    "angular",
    "angulars",
    "average_statistics_",
    "conversion_of",
    "couple_",
    "create_model",
    "decouple_",
    "decoupled_conv1d",
    "decoupled_conv2d",
    "decoupled_conv3d",
    "decoupled_linear",
    "explain",
    "explanations",
    "export",
    "finetune_recipe",
    "formulas",
    "from_pretrained",
    "fuse_",
    "fvcore_handles",
    "learnable",
    "list_models",
    "load",
    "load_weights_",
    "magnitude",
    "magnitudes",
    "make_recipe",
    "orthogonal_penalty",
    "orthonormal_penalty",
    "parameter_groups",
    "patch_norm",
    "plain_state_dict",
    "project_weights_",
    "read_recipe",
    "recalibrate_",
    "restore_conversion_",
    "robustness",
    "sync_norms_",
    "train",
    "trained_models",
    "trust_model",
    "unfuse_",
    "weight_gradients_",
]
