"""Figures: each a function that draws on a matplotlib axis."""

from dcnet.figures.functions import draw_angulars, draw_functions, draw_magnitudes

__all__ = ["draw_angulars", "draw_functions", "draw_magnitudes"]
