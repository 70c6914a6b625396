"""An operator for `torch.compile` and `torch.export`, and the same function for everybody else.

Going through `torch.library` costs a third of a millisecond a call in eager mode, more than many of our kernels; there the
same functions run as an ordinary autograd function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def register(name: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The operator dcnet::name, without a gradient: a second derivative is an error, not a wrong number."""
    op = torch.library.custom_op(f"dcnet::{name}", implementation, mutates_args=())
    op.register_fake(fake)
    return op


def register_differentiable(
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    context: Callable[..., None],
    gradient: Callable[..., Any],
    backward: Callable[..., Any],
    backward_implementation: Callable[..., Any],
) -> Callable[..., Any]:
    """A function that is the operator dcnet::name while compiling; `gradient(ctx, backward, *grads)` is its gradient."""
    op = torch.library.custom_op(f"dcnet::{name}", implementation, mutates_args=())
    op.register_fake(fake)
    op.register_autograd(lambda ctx, *grads: gradient(ctx, backward, *grads), setup_context=context)

    @once_differentiable
    def eager_gradient(ctx: Any, *grads: Any) -> Any:
        return gradient(ctx, backward_implementation, *grads)

    eager: Any = type(
        f"Eager_{name}",
        (torch.autograd.Function,),
        {"forward": staticmethod(implementation), "setup_context": staticmethod(context), "backward": staticmethod(eager_gradient)},
    )

    def call(*arguments: Any) -> Any:
        return op(*arguments) if torch.compiler.is_compiling() else eager.apply(*arguments)

    call.op = op  # type: ignore[attr-defined]
    return call
