"""Decoupling with Triton kernels of our own around PyTorch's convolution. Imported only where it is used."""

from dcnet.ops.fused.api import decouple

__all__ = ["decouple"]
