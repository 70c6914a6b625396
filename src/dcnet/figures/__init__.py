"""Figures: each a function that draws on a matplotlib axis, and by name a whole one."""

from dcnet.figures.explanations import draw_explanation, explanation_captions
from dcnet.figures.features import draw_features
from dcnet.figures.functions import draw_angulars, draw_magnitudes
from dcnet.figures.gallery import FIGURES, attacks_of, make_figure, metrics_of, titles_of
from dcnet.figures.geometry import draw_geometry
from dcnet.figures.layers import draw_angles, draw_correlation, draw_filters, draw_norms
from dcnet.figures.response import draw_plane, draw_response
from dcnet.figures.robustness import (
    draw_deepfool,
    draw_eps,
    draw_example,
    draw_steps,
    example_captions,
    example_pictures,
)
from dcnet.figures.training import draw_convergence, draw_learned, learned_parameters

__all__ = [
    "FIGURES",
    "attacks_of",
    "draw_angles",
    "draw_angulars",
    "draw_convergence",
    "draw_correlation",
    "draw_deepfool",
    "draw_eps",
    "draw_example",
    "draw_explanation",
    "draw_features",
    "draw_filters",
    "draw_geometry",
    "draw_learned",
    "draw_magnitudes",
    "draw_norms",
    "draw_plane",
    "draw_response",
    "draw_steps",
    "example_captions",
    "example_pictures",
    "explanation_captions",
    "learned_parameters",
    "make_figure",
    "metrics_of",
    "titles_of",
]
