"""In graphs that Inductor compiles, let `decoupled_backward` add up two incoming gradients itself.

Where the output of a layer is read twice, as in a residual network, its gradient is the sum of two maps. Inductor fuses
an addition with its own code before or after it, but not with other kernels: a sum between two operators of this
package would be an extra pass over three maps. Here it costs one more read. In 16 bits the sum is not rounded, unlike
a sum that autograd computes.
"""

import operator
import sys
from functools import cache
from typing import TypeGuard

import torch
from torch.fx import Node

from dcnet.util.compat import EAGER_INPUTS, rewrite_in_inductor


def rewrite_sums() -> None:
    """Rewrite the graphs that are compiled from now on, if Inductor is what compiles them."""
    if "torch._inductor.compile_fx" in sys.modules:  # importing it takes seconds
        _rewrite_sums()


@cache
def _rewrite_sums() -> None:
    # the lambda looks up take_sum at every call, so that a test can replace it for a while
    rewrite_in_inductor(torch.ops.dcnet.decoupled_backward.default, lambda node: take_sum(node))


def take_sum(node: Node) -> None:
    """Give a call of `decoupled_backward` the two summands of its incoming gradient instead of their sum."""
    if node.kwargs:
        return
    total, more, *rest = node.args
    if more is not None or not isinstance(total, Node) or not _is_plain_sum(total) or total in rest:
        return
    parts = [part for part in total.args if _written_by_kernels(part, total)]
    if len(parts) < 2:
        return  # Inductor computes the sum together with a summand
    node.args = (*parts, *rest)
    if EAGER_INPUTS in node.meta:
        (_, _, *others), options = node.meta[EAGER_INPUTS]
        node.meta[EAGER_INPUTS] = ((*[part.meta["val"] for part in parts], *others), options)
    total.graph.erase_node(total)


def _is_plain_sum(node: Node) -> bool:
    """Tell whether a node adds two maps, and nothing else reads the sum."""
    return node.target is torch.ops.aten.add.Tensor and not node.kwargs and len(node.users) == 1


def _written_by_kernels(part: object, total: Node) -> TypeGuard[Node]:
    """Tell whether a summand was computed by kernels that Inductor did not write, and has the shape of the sum."""
    if not isinstance(part, Node) or part.target is not operator.getitem:
        return False
    source = part.args[0]
    kernels = (torch.ops.dcnet.decoupled_backward.default, torch.ops.aten.convolution_backward.default)
    if not isinstance(source, Node) or source.target not in kernels:
        return False
    there, wanted = part.meta.get("val"), total.meta.get("val")
    if there is None or wanted is None:
        return False
    return bool(there.shape == wanted.shape and there.dtype == wanted.dtype)
