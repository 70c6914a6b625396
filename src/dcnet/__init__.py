"""dcnet: decoupled networks (Liu et al., CVPR 2018) for PyTorch.

A convolution's output is ⟨w, x⟩ = ‖w‖‖x‖cos θ. A decoupled operator replaces it by h(‖w‖, ‖x‖)·g(θ), with the
magnitude function h and the angular function g chosen from a catalogue, learned, or one's own.
"""

from typing import Any

from dcnet import robustness
from dcnet.formulas import angular, angulars, at_least, learnable, m, magnitude, magnitudes, positive
from dcnet.layers import (
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    DecoupledLinear,
    DecoupleReport,
    LazyDecoupledConv1d,
    LazyDecoupledConv2d,
    LazyDecoupledConv3d,
    WeightProjection,
    average_statistics_,
    conversion_of,
    decouple_,
    from_pretrained,
    orthogonal_penalty,
    orthonormal_penalty,
    parameter_groups,
    plain_state_dict,
    project_weights_,
    recalibrate_,
    restore_conversion_,
    sync_norms_,
    weight_gradients_,
)
from dcnet.models import create_model, list_models, trust_model
from dcnet.ops import decoupled_conv1d, decoupled_conv2d, decoupled_conv3d, decoupled_linear, fvcore_handles, patch_norm
from dcnet.training import Callback, Recipe, Run, finetune_recipe, load, make_recipe, read_recipe, train, trained_models
from dcnet.version import __version__


def __getattr__(name: str) -> Any:
    """`HubModel` needs huggingface_hub, which is looked for only when it is asked for."""
    if name == "HubModel":
        from dcnet.training.huggingface import hub_model

        return hub_model()
    raise AttributeError(f"module 'dcnet' has no attribute {name!r}")


__all__ = [
    "Callback",
    "DecoupleReport",
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledLinear",
    "LazyDecoupledConv1d",
    "LazyDecoupledConv2d",
    "LazyDecoupledConv3d",
    "Recipe",
    "Run",
    "WeightProjection",
    "__version__",
    "angular",
    "angulars",
    "at_least",
    "average_statistics_",
    "conversion_of",
    "create_model",
    "decouple_",
    "decoupled_conv1d",
    "decoupled_conv2d",
    "decoupled_conv3d",
    "decoupled_linear",
    "finetune_recipe",
    "from_pretrained",
    "fvcore_handles",
    "learnable",
    "list_models",
    "load",
    "m",
    "magnitude",
    "magnitudes",
    "make_recipe",
    "orthogonal_penalty",
    "orthonormal_penalty",
    "parameter_groups",
    "patch_norm",
    "plain_state_dict",
    "positive",
    "project_weights_",
    "read_recipe",
    "recalibrate_",
    "restore_conversion_",
    "robustness",
    "sync_norms_",
    "train",
    "trained_models",
    "trust_model",
    "weight_gradients_",
]
