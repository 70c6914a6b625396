"""The autograd function in C++ (`cpp/`): built in the background at its first use, and given the plans it can run.

It launches the same kernels as op.py. So results are equal bit by bit, and every step can use either of the two. In
Python, the host would take longer for a layer than the device takes for most kernels.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from importlib.resources import files
from threading import Thread
from typing import Any, ClassVar

from torch import Tensor

from dcnet.formulas import on_replacement
from dcnet.ops.fused.launcher import Memory
from dcnet.ops.fused.layout import Regions
from dcnet.ops.fused.native import Launches
from dcnet.ops.fused.once import once
from dcnet.ops.fused.op import backward, recompute
from dcnet.ops.fused.operands import (
    BACKWARD,
    FORWARD,
    GIVEN,
    OF_BATCH,
    READ_BY_BACKWARD,
    Kept,
    Operands,
    Options,
    arrived,
    known_to_cpp,
    operand_gradients,
)
from dcnet.ops.fused.plan import Plan
from dcnet.util.cache import SWITCH, native_code
from dcnet.util.compat_triton import kernel_launch_address
from dcnet.util.cpp import build_cpp_module

_SOURCES = ("launch.h", "cpp/plan.h", "cpp/passes.h", "cpp/node.h", "cpp/graph.h", "cpp/module.cpp")
# The slots that cpp/plan.h numbers after the operands, in its order
_FORWARD = ("batches", "running_norm", "mean_batches", "vectors", "unit", "norms", "scratch", "left", "dot", "out")
_BACKWARD = (
    *("e", "e_more", "of_left", "out", "dot", "norms", "unit", "vectors"),
    *("grad_d", "of_vectors", "behind", "scratch"),
    *("products", "grad_x", "grad_unit", "grad_weight"),
)


class Host:
    """The module in C++, once it is there; `launch_from_python` is for tests and for debugging without a GPU."""

    in_graph: ClassVar[Sequence[Callable[..., Any]]] = ()  # the operators of graphs in Python, given by library.py

    def __init__(self) -> None:
        self.module: Any = None
        self.launch_from_python = False
        self._thread: Thread | None = None
        self._failed: Exception | None = None

    def ready(self, x: Tensor) -> Any:
        """Return the module, or None; at the first layer on a GPU, start to build it.

        $DCNET_NATIVE: "0" for never, "wait" to wait until it is built.
        """
        if self.module is not None or not x.is_cuda or not native_code():
            return self.module
        if self._thread is None:
            self._thread = Thread(target=self._build, name="dcnet: C++ build", daemon=True)
            self._thread.start()
        if os.environ.get(SWITCH) == "wait":
            self._thread.join()
        if self._failed is not None:
            error, self._failed = self._failed, None
            warnings.warn(f"layers run from Python, which is slower, since C++ cannot be built: {error}", stacklevel=2)
        return self.module

    def _build(self) -> None:
        try:
            self.load(kernel_launch_address())
        except Exception as error:  # the next layer warns; nobody would see what this thread raises
            self._failed = error

    def load(self, launch_address: int) -> None:
        """Build the module, or take it from the cache; raise `util.cpp.CannotBuild`."""
        folder = files("dcnet.ops.fused")
        module = build_cpp_module(
            "dcnet_host", {p: folder.joinpath(p).read_text("utf-8") for p in _SOURCES}, _SOURCES[-1]
        )
        ahead = [FORWARD.index(name) for name in (*Operands._fields, *_FORWARD)]
        back = [BACKWARD.index(name) for name in (*READ_BY_BACKWARD, *_BACKWARD)]
        functions = self._epilogue, self._backward, gradients_of_saved, self.in_graph
        module.use(launch_address, Operands._fields, *functions, ahead, back)
        on_replacement(module.forget)  # graph operators refer to formulas by name
        self.module = module

    def learn(self, plan: Plan, t: Operands, o: Options) -> None:
        """Let C++ run calls like this one from now on, if it can and its kernels are packed."""
        if self.module is None or not _is_usual(plan):
            return
        ahead = self._kernels(plan.ahead)
        if ahead is not None:
            self.module.learn(o, t, plan, {"ahead": ahead, **_numbers(plan)})

    def learn_in_graph(self, plan: Plan, t: Operands, arguments: Sequence[Any], backward: bool) -> None:
        """Register this plan for calls of the graph operator with the same key; arguments: the options as text."""
        if self.ready(t.x) is None or not _is_usual(plan):
            return
        ahead = b"" if backward else self._kernels(plan.ahead)
        if ahead is not None:
            self.module.learn_in_graph(backward, *arguments, t, plan, {"ahead": ahead, **_numbers(plan)})

    def _kernels(self, launches: Launches) -> bytes | Callable[..., None] | None:
        """Return the kernels as C++ runs them, None where they are not packed (yet)."""
        if not launches.launchers:
            return b""
        if self.launch_from_python:
            return lambda tensors, *floats: launches(Memory(tensors), *floats)
        return launches.packed or None

    def _epilogue(self, plan: Plan, track: int, moves: bool) -> Any:
        return self._kernels(plan.epilogue(track, moves))

    def _backward(self, plan: Plan, again: bool, *key: bool) -> Any:
        found = plan.backward(*key)
        kernels = [self._kernels(launches) for launches in (found.epilogue, found.ends)]
        kernels.append(self._kernels(plan.again) if again else b"")
        return None if None in kernels else (*kernels, found.scratch)


HOST = Host()


def counts() -> dict[str, int]:
    """Return how often C++ has run, forward and backward; empty if it is not built (yet)."""
    return {} if HOST.module is None else HOST.module.counts()


def _is_usual(plan: Plan) -> bool:
    """Tell whether C++ can run this plan: it supports the options, and no map is empty."""
    return known_to_cpp(plan.options) and plan.has_output and plan.norms.count > 0 and all(plan.norms.shape)


def _numbers(plan: Plan) -> dict[str, Any]:
    """Return what cpp/plan.h reads of a plan."""
    o = plan.options
    return {
        "stride": o.stride,
        "padding": o.padding,
        "dilation": o.dilation,
        "groups": o.groups,
        "of_batch": o.mean_kind == OF_BATCH,
        "activates": o.activation != 0,
        "depthwise": plan.depthwise,
        "recovers": o.recovers,
        "maps": plan.maps,
        "vectors": plan.vectors.size,
        "norms": plan.norms.output,
        "scratch": plan.tiles.scratch.size,
        "left": plan.left or (),
        "out": output_shape(plan),
        "out_stride": plan.stride,
        "positions": plan.positions,
        "of_vectors": plan.of_vectors.size,
        "of_mean": _region(plan.tiles.back_scratch, "mean") if o.mean_kind == GIVEN else (0, 0),
        "gradients": [_region(plan.of_vectors, name) for name in Operands._fields],
    }


def output_shape(plan: Plan) -> tuple[int, ...]:
    return (plan.norms.output[0], plan.kernels, *plan.norms.output[2:])


def _region(regions: Regions, name: str) -> tuple[int, int]:
    found = regions.slices.get(name, slice(0, 0))
    return found.start, found.stop - found.start


def gradients_of_saved(
    plan: Plan, incoming: Sequence[Tensor | None], saved: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Any, ...]:
    """Return the gradients of the operands; saved: what forward kept, the output or None, and the operands."""

    def gradients() -> tuple[Any, ...]:
        e, of_left = incoming
        kept, t = Kept(*saved[:4]), Operands(*saved[5:])  # type: ignore[arg-type]
        if plan.depthwise:
            kept = Kept(*recompute(plan, t.x, kept.unit), *kept[2:])
        out = saved[4]
        if plan.options.recovers and out is not None:
            kept, out = kept._replace(dot=out), None
        e, out = arrived(e, of_left, out, kept.dot, plan.options)
        found = backward(plan, e, of_left, t, kept, out, wanted[0], wanted[1], add=plan.maps == 0)
        return operand_gradients(found, e, plan.of_vectors, t, plan.options, wanted, plan.maps)

    return once(gradients, lambda: (*incoming, *saved))
