"""Operators: the stateless decoupled convolutions, their implementations, and norms."""

from dcnet.ops.dispatch import check_impl
from dcnet.ops.flops import fvcore_handles
from dcnet.ops.functional import (
    LINEAR,
    check_literal_radius,
    decouple,
    decoupled_conv1d,
    decoupled_conv2d,
    decoupled_conv3d,
    decoupled_linear,
)
from dcnet.ops.geometry import geometry, known_geometry
from dcnet.ops.inputs import LearnedRadius, MeanNorm
from dcnet.ops.mean_norm import BatchMean, distributed
from dcnet.ops.norms import EPS, check_eps, check_input, compute_dtype, kernel_norm, patch_norm, recorded_by_jit, root
from dcnet.ops.operator import Operator, make_operator
from dcnet.ops.post_ops import ACTIVATIONS, ONLY_RELU, Carry, Finish

__all__ = [
    "ACTIVATIONS",
    "EPS",
    "LINEAR",
    "ONLY_RELU",
    "BatchMean",
    "Carry",
    "Finish",
    "LearnedRadius",
    "MeanNorm",
    "Operator",
    "check_eps",
    "check_impl",
    "check_input",
    "check_literal_radius",
    "compute_dtype",
    "decouple",
    "decoupled_conv1d",
    "decoupled_conv2d",
    "decoupled_conv3d",
    "decoupled_linear",
    "distributed",
    "fvcore_handles",
    "geometry",
    "kernel_norm",
    "known_geometry",
    "make_operator",
    "patch_norm",
    "recorded_by_jit",
    "root",
]
