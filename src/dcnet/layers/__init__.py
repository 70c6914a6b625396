"""Layers: decoupled convolutions and linear maps, their statistics, optimization, and conversion of plain models."""

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
from dcnet.layers.convert import DecoupleReport, decouple_
from dcnet.layers.couple import CoupleReport, couple_
from dcnet.layers.decoupled import Decoupled, decoupled_layers
from dcnet.layers.fuse import FuseReport, fuse_, unfuse_
from dcnet.layers.linear import DecoupledLinear
from dcnet.layers.linear_form import Explaining
from dcnet.layers.optimization import WeightProjection, parameter_groups, project_kernels_, project_weights_
from dcnet.layers.options import LayerOptions
from dcnet.layers.penalties import orthogonal_penalty, orthonormal_penalty
from dcnet.layers.plain_state import plain_state_dict
from dcnet.layers.record import conversion_of
from dcnet.layers.restore import from_pretrained, restore_conversion_
from dcnet.layers.statistics import average_statistics_, recalibrate_, sync_norms_
from dcnet.layers.weighted_gradients import weight_gradients_

__all__ = [
    "Block",
    "Chain",
    "CoupleReport",
    "DecoupleReport",
    "Decoupled",
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledLinear",
    "Explaining",
    "FuseReport",
    "HandsOn",
    "LayerOptions",
    "LazyDecoupledConv1d",
    "LazyDecoupledConv2d",
    "LazyDecoupledConv3d",
    "WeightProjection",
    "average_statistics_",
    "conversion_of",
    "couple_",
    "decouple_",
    "decoupled_layers",
    "from_pretrained",
    "fuse_",
    "hand_on",
    "orthogonal_penalty",
    "orthonormal_penalty",
    "parameter_groups",
    "plain_state_dict",
    "project_kernels_",
    "project_weights_",
    "recalibrate_",
    "restore_conversion_",
    "sync_norms_",
    "unfuse_",
    "weight_gradients_",
]
