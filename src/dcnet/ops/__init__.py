"""Operators: the stateless decoupled convolutions, their implementations, and norms."""

from dcnet.ops.activations import ACTIVATIONS, activate
from dcnet.ops.api import decoupled_conv1d, decoupled_conv2d, decoupled_conv3d, decoupled_linear, patch_norm
from dcnet.ops.checks import check_eps, check_impl, check_input, check_literal_radius
from dcnet.ops.dispatch import decouple
from dcnet.ops.flops import fvcore_handles
from dcnet.ops.geometry import LINEAR, Geometry, convolve, known_geometry, make_geometry
from dcnet.ops.inputs import Inputs, LearnedRadius, MeanNorm
from dcnet.ops.mean_norm import BatchMean, distributed
from dcnet.ops.norms import EPS, compute_dtype, kernel_norm, root
from dcnet.ops.operator import Operator, make_operator
from dcnet.ops.post_ops import ONLY, PostOps

__all__ = [
    "ACTIVATIONS",
    "EPS",
    "LINEAR",
    "ONLY",
    "BatchMean",
    "Geometry",
    "Inputs",
    "LearnedRadius",
    "MeanNorm",
    "Operator",
    "PostOps",
    "activate",
    "check_eps",
    "check_impl",
    "check_input",
    "check_literal_radius",
    "compute_dtype",
    "convolve",
    "decouple",
    "decoupled_conv1d",
    "decoupled_conv2d",
    "decoupled_conv3d",
    "decoupled_linear",
    "distributed",
    "fvcore_handles",
    "kernel_norm",
    "known_geometry",
    "make_geometry",
    "make_operator",
    "patch_norm",
    "root",
]
