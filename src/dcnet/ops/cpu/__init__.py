"""The steps of decoupling as autograd functions with hand-derived gradients: few passes over memory, little kept.

They need tensors that hold data, on any device, and are tuned for a CPU. Second derivatives are correct.
"""

from dcnet.ops.cpu.autograd import AutogradFunctions

__all__ = ["AutogradFunctions"]
