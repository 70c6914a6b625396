"""Every private name of PyTorch that this package uses, with the versions that have it.

A release that drops one of them breaks only this file. Checked with torch 2.11 and 2.13. Triton's are in
`compat_triton.py`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _LazyConvXdMixin as LazyConvXdMixin

__all__ = ["BatchNorm", "LazyConvXdMixin"]


# -- who is watching ---------------------------------------------------------------------------------------------------


def recorded_by_jit() -> bool:
    """Tell whether torch.jit.trace is recording; sizes are then tensors, whose values code must not read."""
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


def function_transform_active() -> bool:
    """Tell whether vmap, jvp or another transform of torch.func is active."""
    return torch._C._are_functorch_transforms_active()


def only_ordinary_operations() -> bool:
    """Tell whether a tracer or transform is active that cannot handle custom autograd functions.

    Some back ends of torch.compile silently lose the second derivative of an autograd function. Function transforms
    (vmap, jvp, …) and forward-mode differentiation need rules, which only ordinary operations have. torch.jit.trace and
    its users (TensorBoard's graphs, counts by fvcore, the old ONNX exporter) cannot follow a function. make_fx records
    operations, and fake tensors have no values.
    """
    if recorded_by_jit():
        return True
    if torch.compiler.is_compiling() or function_transform_active() or forward_ad._current_level >= 0:
        return True
    modes = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (modes.PROXY, modes.FAKE))


def operations_watched() -> bool:
    """Tell whether a `TorchDispatchMode`, such as a counter of operations, sees every operation."""
    return torch._C._len_torch_dispatch_stack() > 0


def backward_pass() -> int:
    """Return which backward pass of autograd runs in this thread; -1 for none."""
    return torch._C._current_graph_task_id()


def recomputing() -> bool:
    """Tell whether this forward pass runs inside a backward pass: activation checkpointing repeats counted batches."""
    return backward_pass() != -1


def release_saved_tensors(ctx: Any) -> None:
    """Free, within an autograd function's backward, what its forward saved, unless backward may run again."""
    ctx.maybe_clear_saved_tensors()


def wanted_gradients(ctx: Any) -> tuple[bool, ...]:
    """Return, within an autograd function's backward, for each of its inputs whether its gradient will be used.

    `ctx.needs_input_grad` is also true for kernels if only the gradient of an image is asked for, as by every attack.
    Nodes in C++ know the difference, and save a convolution.
    """
    nodes = (node for node, _ in ctx.next_functions if node is not None)  # one for each True below, in order
    return tuple(needed and _will_run(next(nodes)) for needed in ctx.needs_input_grad)


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it is a leaf, and `torch.autograd.grad` was asked for it
        return True


def is_grads_batched(gradient: Tensor) -> bool:
    """Tell whether a gradient is a batch of gradients (`is_grads_batched=True`), which has no data to write to."""
    return torch._C._functorch.is_legacy_batchedtensor(gradient)


def compiled_model(module: nn.Module) -> nn.Module | None:
    """Return the model that torch.compile has wrapped; None for other modules.

    It compares names (2.11, 2.13), since importing the wrapper's class would import all of Dynamo.
    """
    return module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None


def hooked(module: nn.Module) -> bool:
    """Tell whether a module has to be called, since its input, output or gradients may otherwise be different.

    This is so with hooks, with a forward that was set on the module itself, and after `module.compile()`.
    """
    if "forward" in module.__dict__ or module._compiled_call_impl is not None:
        return True
    hooks = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(hooks) or nn.modules.module._has_any_global_hook()


def changed_by_fsdp(module: nn.Module) -> bool:
    """Tell whether a hook receives the keyword arguments of a module's forward, as FSDP2's does to cast them."""
    return bool(module._forward_pre_hooks_with_kwargs)


def lerp_all_(tensors: list[Tensor], others: list[Tensor], weight: float) -> None:
    """Move each tensor toward its other by the weight, in one launch for many."""
    torch._foreach_lerp_(tensors, others, weight)


# -- shortcuts ---------------------------------------------------------------------------------------------------------


def parameter(module: nn.Module, name: str) -> Any:
    """Return a parameter of a module, as the attribute of that name would.

    The attribute is slow: Python first searches all classes of the module before it asks nn.Module.
    """
    own = module._parameters
    return own[name] if name in own else getattr(module, name)


def buffer(module: nn.Module, name: str) -> Any:
    """Return a buffer of a module, as the attribute of that name would."""
    own = module._buffers
    return own[name] if name in own else getattr(module, name)


def below_autograd() -> Any:
    """Return a context in which an operator runs without its gradient."""
    return torch._C._AutoDispatchBelowAutograd()


def unprepared_apply(function: type[torch.autograd.Function]) -> Any:
    """Return `function.apply` without its preparations for function transforms, which cost as much as a launch."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def raw_stream(x: Tensor) -> int:
    """Return the handle of the stream that kernels on the device of x run on; 0 on a CPU, for Triton's interpreter."""
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0


# The key under which a node of Inductor's graphs stores its arguments in eager mode, which decide memory orders (2.11)
EAGER_INPUTS = "eager_input_vals"


_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_in_graphs(function: _Function) -> _Function:
    """Let torch.compile treat the results of a function as constants, like `torch.compiler.assume_constant_result`.

    Unlike that, this does not import the whole compiler.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def rewrite_in_inductor(operator: Any, rewrite: Callable[[Any], None]) -> None:
    """Let Inductor call `rewrite` for each call of an operator in a graph, after gradients were traced."""
    from torch._inductor.fx_passes.post_grad import pass_patterns
    from torch._inductor.pattern_matcher import CallFunctionVarArgs, register_graph_pattern

    register_graph_pattern(CallFunctionVarArgs(operator), pass_dict=pass_patterns[0])(
        lambda match, *_, **__: rewrite(match.output_node())
    )
