"""Layers: decoupled convolutions and linear maps, their statistics, and optimization."""

from dcnet.layers.block import Block
from dcnet.layers.chain import Chain, HandsOn, hand_on
from dcnet.layers.conv import (
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    LazyDecoupledConv1d,
    LazyDecoupledConv2d,
    LazyDecoupledConv3d,
)
from dcnet.layers.decoupled import Decoupled, decoupled_layers
from dcnet.layers.linear import DecoupledLinear
from dcnet.layers.linear_form import Explaining
from dcnet.layers.optimization import WeightProjection, parameter_groups, project_kernels_, project_weights_
from dcnet.layers.options import LayerOptions
from dcnet.layers.penalties import orthogonal_penalty, orthonormal_penalty
from dcnet.layers.statistics import average_statistics_, recalibrate_, sync_norms_
from dcnet.layers.weighted_gradients import weight_gradients_

__all__ = [
    "Block",
    "Chain",
    "Decoupled",
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledLinear",
    "Explaining",
    "HandsOn",
    "LayerOptions",
    "LazyDecoupledConv1d",
    "LazyDecoupledConv2d",
    "LazyDecoupledConv3d",
    "WeightProjection",
    "average_statistics_",
    "decoupled_layers",
    "hand_on",
    "orthogonal_penalty",
    "orthonormal_penalty",
    "parameter_groups",
    "project_kernels_",
    "project_weights_",
    "recalibrate_",
    "sync_norms_",
    "weight_gradients_",
]
