"""Explaining: a network as a linear map for one image, and what each pixel adds to a logit."""

from dcnet.explaining.context import explanations
from dcnet.explaining.explain import Explanation, explain
from dcnet.explaining.others import grad_cam, integrated_gradients

__all__ = ["Explanation", "explain", "explanations", "grad_cam", "integrated_gradients"]
