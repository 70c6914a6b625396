"""Models taken elsewhere: ONNX, exported and compiled programs, weights, each checked before it is written."""

from dcnet.deploy.export_model import FORMATS, ExportReport, export
from dcnet.deploy.prepare import prepare
from dcnet.deploy.weights import load_weights_

__all__ = ["FORMATS", "ExportReport", "export", "load_weights_", "prepare"]
