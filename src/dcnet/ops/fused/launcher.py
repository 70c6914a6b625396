"""Launch a kernel again without asking Triton which compiled variant to run.

Triton finds the variant by looking at every argument, which takes longer than most of our kernels do. The variant
depends on few things: dtypes, sizes, flags, and whether pointers are aligned. A launcher fixes all arguments but the
memory and a few floats, which do not change the variant; once Triton has chosen it, it is run directly. Its tensors
must have the same dtypes, on the same device, at every launch. Plans keep the launchers, and there is a plan for each
combination of dtypes and device.

An allocation costs as much as a launch. So the many small float32 buffers of a call are regions of a few tensors, and
a pointer argument of a kernel is a `Place`: a tensor of the call, and an offset in it.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcnet.util.cache import native_code
from dcnet.util.compat import raw_stream
from dcnet.util.compat_triton import direct_launch, load_kernel


class Place(NamedTuple):
    """Where a pointer argument points: to which tensor of the call, and how many float32 elements from its start."""

    slot: int
    offset: int = 0


class Changing(NamedTuple):
    """An argument that is a float given at every launch; number: its position among them."""

    number: int


class Memory:
    """The tensors of one call by slot, their addresses, and the stream of the first tensor, on which kernels run."""

    __slots__ = ("addresses", "aligned", "stream", "tensors")

    def __init__(self, tensors: tuple[Tensor | None, ...]) -> None:
        first = tensors[0]
        assert first is not None
        self.tensors = list(tensors)
        self.addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self.aligned = reduce(or_, self.addresses) % 16 == 0
        self.stream = raw_stream(first)

    def put(self, slot: int, tensor: Tensor) -> None:
        """Put a tensor into a slot, in place of what was there."""
        self.tensors[slot] = tensor
        address = self.addresses[slot] = tensor.data_ptr()
        if address % 16:
            self.aligned = False


class Launcher:
    """A kernel with its grid and its arguments, given by the kernel's own parameter names.

    An argument is a `Place` (a pointer), a `Changing` (a float given at each launch), a value, or None.
    """

    __slots__ = ("before", "changing", "compiled", "grid", "kernel", "places", "values", "variant", "warps")

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], warps: int = 4) -> None:
        names = list(kernel.arg_names)
        if set(names) != set(arguments):
            missing, unknown = [n for n in names if n not in arguments], [n for n in arguments if n not in names]
            raise TypeError(
                f"{kernel.fn.__name__} needs {missing or 'nothing more'} and knows no {unknown or 'others'}"
            )
        self.kernel, self.grid, self.warps = kernel, (*grid, 1, 1)[:3], warps
        values = [arguments[name] for name in names]
        self.places = [(i, v.slot, 4 * v.offset) for i, v in enumerate(values) if isinstance(v, Place)]  # in bytes
        self.changing = [(i, v.number) for i, v in enumerate(values) if isinstance(v, Changing)]
        self.values = values
        self.compiled: Any = None
        self.variant: Any = None
        self.before: tuple[Any, ...] = ()  # what the variant takes before the kernel's arguments

    def __call__(self, memory: Memory, *floats: float) -> None:
        """Run the kernel on the memory's stream."""
        if self.variant is None or not memory.aligned:
            self._ask_triton(memory, floats)
            return
        values, at = self._values(floats), memory.addresses
        for i, slot, offset in self.places:
            values[i] = at[slot] + offset
        self.variant(*self.grid, memory.stream, *self.before, *values)

    def choose(self, memory: Memory, floats: Sequence[float]) -> None:
        """Let Triton choose the variant for aligned memory, and load it, without running it.

        Triton's interpreter has no variants.
        """
        if self.variant is not None or not memory.aligned:
            return
        compiled = self.kernel.warmup(*self._operands(memory, floats), grid=self.grid, num_warps=self.warps)
        if hasattr(compiled, "future"):  # Triton 3.7, of a kernel that nobody has waited for
            compiled = compiled.result()
        if compiled is not None:
            load_kernel(compiled, with_launcher=not native_code())
            self._keep(compiled)

    def warm_up(self, dtypes: Sequence[torch.dtype]) -> Any:
        """Compile the variant for aligned tensors of these dtypes, by slot, without running it; return it."""
        values = self._values([0.5] * len(self.values))
        for i, slot, _ in self.places:
            values[i] = dtypes[slot]
        return self.kernel.warmup(*values, grid=self.grid, num_warps=self.warps)

    def _values(self, floats: Sequence[float]) -> list[Any]:
        values = self.values.copy()
        for i, number in self.changing:
            values[i] = floats[number]
        return values

    def _operands(self, memory: Memory, floats: Sequence[float]) -> list[Any]:
        """Return the arguments as Triton takes them."""
        values = self._values(floats)
        for i, slot, offset in self.places:
            tensor = memory.tensors[slot]
            assert tensor is not None, f"{self.kernel.fn.__name__}: {self.kernel.arg_names[i]} is not there"
            values[i] = tensor.view(-1)[offset // 4 :] if offset else tensor
        return values

    def _ask_triton(self, memory: Memory, floats: Sequence[float]) -> None:
        compiled = self.kernel[self.grid](*self._operands(memory, floats), num_warps=self.warps)
        if compiled is not None and memory.aligned:  # None in the interpreter
            self._keep(compiled)

    def _keep(self, compiled: Any) -> None:
        self.compiled = compiled
        self.variant, self.before = direct_launch(compiled)
