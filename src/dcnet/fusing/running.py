"""Run a model once, on an example, and record which module made which tensor and which modules read it."""

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dcnet.layers.types import ExampleInput

_tensor: Any = Tensor
# Ask for no value. Properties are not here: those that give no tensor never ask for one.
_ABOUT_THE_TENSOR = {
    *(
        "size",
        "dim",
        "ndimension",
        "stride",
        "numel",
        "nelement",
        "element_size",
        "storage_offset",
        "get_device",
        "type",
    ),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_pinned", "is_shared"),
    *("is_same_size", "dim_order", "__len__", "__hash__"),
}
_ASKS_FOR_GRADIENTS = (_tensor.requires_grad.__get__, _tensor.grad_fn.__get__)


class Made:
    """A tensor that a module returned.

    readers: for every PyTorch function that read it, in order, the innermost watched module that was running, or None.
    Functions that ask for no value, such as those for a shape, do not count. Those that ask whether it has a gradient
    do count: it has none here, but code that asks would use a gradient if there were one.
    """

    def __init__(self) -> None:
        self.readers: list[nn.Module | None] = []


class Call(NamedTuple):
    """A call of a watched module. Its first input and its output are None unless they are watched tensors."""

    module: nn.Module
    input: Made | None
    single: bool  # whether the input was its only one
    output: Made | None


class Flow(TorchFunctionMode):
    """Watches modules inside this context: `calls` has their calls, in the order in which they ended.

    Tensors are not kept alive. A tensor that several modules return unchanged, or change in place, counts as one.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.modules = list(dict.fromkeys(modules))
        self.calls: list[Call] = []
        self._running: list[tuple[nn.Module, Made | None]] = []
        self._known: dict[int, tuple[weakref.ref[Tensor], Made]] = {}
        self._handles: list[Any] = []
        self._paused = False

    def of(self, value: object) -> Made | None:
        """Return what is known about a tensor; None if no watched module has returned it."""
        reference, made = self._known.get(id(value), (None, None))
        return made if reference is not None and reference() is value else None  # a dead tensor may have had that id

    def watch(self, tensor: Tensor) -> Made:
        """Record from now on which modules read a tensor."""
        made = Made()
        self._known[id(tensor)] = weakref.ref(tensor), made
        return made

    @property
    def alive(self) -> set[Made]:
        """The tensors that are still referenced."""
        return {made for reference, made in self._known.values() if reference() is not None}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore reads inside this context."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __enter__(self) -> "Flow":
        for module in self.modules:
            self._handles.append(module.register_forward_pre_hook(self._begun))
            self._handles.append(module.register_forward_hook(self._ended))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begun(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._running.append((module, self.of(inputs[0]) if inputs else None))

    def _ended(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        _, given = self._running.pop()
        made = self.of(output)
        if made is None and isinstance(output, Tensor):
            made = self.watch(output)
        self.calls.append(Call(module, given, len(inputs) == 1, made))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        counts = any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)) or _asks_for_values(func)
        if func in _ASKS_FOR_GRADIENTS:  # PyTorch's own code also asks, which does not count
            counts = not sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
        if not self._paused and counts:
            for leaf in tree_leaves((args, kwargs)):
                made = self.of(leaf) if isinstance(leaf, Tensor) else None
                if made is not None:
                    made.readers.append(self._running[-1][0] if self._running else None)
        return result


def _asks_for_values(func: Any) -> bool:
    """Tell whether a function that returns no tensor looks into those that it gets."""
    name = getattr(func, "__name__", "")
    return name not in _ABOUT_THE_TENSOR and name not in ("__get__", "__set__")


def run_once(
    model: nn.Module,
    example_input: ExampleInput,
    modules: Iterable[nn.Module],
    tensors: Iterable[Tensor] = (),
    training: bool = False,
) -> tuple[Flow, set[Made]]:
    """Call the model with the example; return what the modules did, and what the model returned.

    In training mode buffers and random states are restored afterward. tensors: others to watch, such as parameters.
    """
    flow = Flow(modules)
    for tensor in tensors:
        flow.watch(tensor)
    with torch.no_grad(), (_tried if training else evaluating)(model), flow:
        outputs = call(model, example_input)
    return flow, {made for value in tree_leaves(outputs) if (made := flow.of(value)) is not None}


def call(model: nn.Module, example_input: ExampleInput) -> Any:
    """Return the model's output for an example: a tensor, a tuple or list of arguments, or a dict of named ones."""
    example_input = tree_map_only(Tensor, torch.clone, example_input)  # a model may change its input in place
    if isinstance(example_input, Mapping):
        return model(**example_input)
    return model(*example_input) if isinstance(example_input, tuple | list) else model(example_input)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode; restore the modes of its modules at the end.

    A compiled model runs eagerly: otherwise the hooks that watch it would be compiled too.
    """
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Put a model into evaluation mode; restore the modes of its modules at the end."""
    return in_mode(model, training=False)


@contextmanager
def _tried(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode; at the end restore modes, buffers such as running averages, and generators."""
    kept = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cuda"}
    try:
        with in_mode(model, training=True), torch.random.fork_rng(devices):
            yield
    finally:
        for buffers, name, buffer, before in kept:
            buffers[name] = buffer.copy_(before)


@contextmanager
def hooks() -> Iterator[list[Any]]:
    """Yield a list for handles of hooks, which are removed at the end."""
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()
