"""Decoupling by Triton kernels before and after PyTorch's convolution. Imported only where it is used."""

from dcnet.ops.fused.api import again, decouple

__all__ = ["again", "decouple"]
