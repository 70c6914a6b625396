"""Make torchvision importable where it has no build for this PyTorch.

Its compiled operators are defined, but have no code.
"""

import importlib
import sys
from importlib.util import find_spec

import torch

_KEPT = []  # an operator exists only as long as its library


def make_torchvision_importable():
    """Import torchvision, where it is installed; define the operators that its import needs if they are missing."""
    if find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        importlib.import_module("torchvision")
