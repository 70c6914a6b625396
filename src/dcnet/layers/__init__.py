"""Layers: decoupled convolutions and linear maps, their statistics, optimization, and conversion of plain models."""

from dcnet.layers.block import Block, Carrying, Chain, hooked, takes_carry
from dcnet.layers.conv import (
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    LazyDecoupledConv1d,
    LazyDecoupledConv2d,
    LazyDecoupledConv3d,
)
from dcnet.layers.convert import DecoupleReport, decouple_
from dcnet.layers.decoupled import Decoupled, decoupled_layers
from dcnet.layers.linear import DecoupledLinear
from dcnet.layers.optimization import WeightProjection, parameter_groups, project_kernels_, project_weights_
from dcnet.layers.penalties import orthogonal_penalty, orthonormal_penalty
from dcnet.layers.plain_state import plain_state_dict
from dcnet.layers.record import conversion_of
from dcnet.layers.restore import from_pretrained, restore_conversion_
from dcnet.layers.statistics import average_statistics_, recalibrate_, sync_norms_
from dcnet.layers.weighted_gradients import weight_gradients_

__all__ = [
    "Block",
    "Carrying",
    "Chain",
    "DecoupleReport",
    "Decoupled",
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledLinear",
    "LazyDecoupledConv1d",
    "LazyDecoupledConv2d",
    "LazyDecoupledConv3d",
    "WeightProjection",
    "average_statistics_",
    "conversion_of",
    "decouple_",
    "decoupled_layers",
    "from_pretrained",
    "hooked",
    "orthogonal_penalty",
    "orthonormal_penalty",
    "parameter_groups",
    "plain_state_dict",
    "project_kernels_",
    "project_weights_",
    "recalibrate_",
    "restore_conversion_",
    "sync_norms_",
    "takes_carry",
    "weight_gradients_",
]
