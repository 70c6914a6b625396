"""Inspection: what a trained network does inside, measured on real images and kept as JSON beside its run."""

from dcnet.inspection.examples import adversarial_examples
from dcnet.inspection.explanations import explained_examples
from dcnet.inspection.layers import filters_of, layer_statistics
from dcnet.inspection.run import FILE, inspect_run

__all__ = ["FILE", "adversarial_examples", "explained_examples", "filters_of", "inspect_run", "layer_statistics"]
