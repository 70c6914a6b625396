"""An operator for `torch.compile` and `torch.export`, and the same functions for everybody else.

Going through `torch.library` costs a third of a millisecond a call in eager mode, more than many of our kernels; there the
same functions run as an ordinary autograd function. That one also takes `effects`: running averages the kernels move on
the way. A registered operator with a gradient may not write to its inputs, so a compiled graph moves them afterwards.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_LIBRARY = torch.library.Library("dcnet", "FRAGMENT")


def register(name: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The operator dcnet::name, without a gradient: a second derivative is an error, not a wrong number.

    Defined directly rather than by `torch.library.custom_op`, whose checks of every call cost more than the launches.
    """
    signature = inspect.signature(implementation)
    parameters = [p for p in signature.parameters.values() if p.name != "effects"]

    def call(*arguments: Any) -> Any:
        return implementation(*arguments)

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    _LIBRARY.define(f"{name}{torch.library.infer_schema(call, mutates_args=())}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dcnet::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.dcnet, name).default


def register_differentiable(
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    context: Callable[..., None],
    gradient: Callable[..., Any],
    backward: Callable[..., Any],
    backward_fake: Callable[..., Any],
) -> Callable[..., Any]:
    """A function (*arguments, effects=None), which is the operator dcnet::name while compiling.

    `context(ctx, inputs, output)` keeps what `gradient(ctx, backward, *grads)` needs, which gives a gradient for every argument.
    """
    op = register(name, implementation, fake)
    backward_op = register(f"{name}_backward", backward, backward_fake)
    torch.library.register_autograd(
        f"dcnet::{name}", lambda ctx, *grads: gradient(ctx, backward_op, *grads), setup_context=context, lib=_LIBRARY
    )

    def eager_forward(*arguments: Any) -> Any:
        return implementation(*arguments[:-1], effects=arguments[-1])

    def eager_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        context(ctx, inputs[:-1], output)

    @once_differentiable
    def eager_gradient(ctx: Any, *grads: Any) -> Any:
        return *gradient(ctx, backward, *grads), None

    eager: Any = type(
        f"Eager_{name}",
        (torch.autograd.Function,),
        {"forward": staticmethod(eager_forward), "setup_context": staticmethod(eager_context), "backward": staticmethod(eager_gradient)},
    )

    def call(*arguments: Any, effects: Any = None) -> Any:
        return op(*arguments) if torch.compiler.is_compiling() else eager.apply(*arguments, effects)

    call.op = op  # type: ignore[attr-defined]
    return call
