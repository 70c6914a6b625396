"""The steps of decoupling as autograd functions with hand-derived gradients: few passes over memory, little kept.

For tensors with numbers in them, on any device, and tuned for a CPU; second derivatives are right.
"""

from dcnet.ops.cpu.autograd import AutogradFunctions

__all__ = ["AutogradFunctions"]
