"""The compiled launcher hands a kernel the arguments, grid and stream that Triton's own launcher would."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import driver as triton_driver

from dcnet.ops.fused import launcher, native
from dcnet.ops.fused.launcher import Changing, Launcher, Memory, Place
from dcnet.ops.fused.native import Launches
from dcnet.util.compat_triton import build_c_module, load_kernel

NUMBER = ctypes.c_uint
ENTRY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[NUMBER] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)


class Driver:
    """Stands for the CUDA driver: notes what is launched, and answers with an error code."""

    def __init__(self):
        self.launches, self.error = [], 0
        self.entry = ENTRY(self.launch)
        self.parameters = {}  # of each function, the C types

    def launch(self, function, *rest):
        *sizes, stream, parameters, _ = rest
        if self.error:
            return self.error
        read = [ctypes.cast(parameters[i], ctypes.POINTER(t))[0] for i, t in enumerate(self.parameters[function])]
        self.launches.append((function, sizes, stream, read))
        return 0


class Compiled:
    def __init__(self, function, signature, **facts):
        self.function, self.packed_metadata, self.runs = function, None, []
        self.src = SimpleNamespace(signature=signature)
        metadata = {"num_warps": 4, "num_ctas": 1, "shared": 96, "target": SimpleNamespace(backend="cuda")}
        self.metadata = SimpleNamespace(**(metadata | facts))

    def run(self, *arguments):
        self.runs.append(arguments)


class Kernel:
    def __init__(self, compiled):
        self.compiled, self.arg_names, self.fn = compiled, list(compiled.src.signature), lambda: None
        self.launches = 0

    def warmup(self, *arguments, grid, num_warps):
        return self.compiled

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launches += 1
            return self.compiled

        return launch


@pytest.fixture
def driver(monkeypatch):
    module = build_c_module(native.launcher_source(), "dcnet_launch")
    driver = Driver()
    module.use(ctypes.cast(driver.entry, ctypes.c_void_p).value)
    monkeypatch.setattr(native, "compiled_launcher", lambda: module.launch)
    monkeypatch.setattr(launcher, "load_kernel", lambda compiled, with_launcher: None)
    return driver


SIGNATURE = {"x": "*fp32", "n": "i32", "big": "i64", "rate": "fp32", "one": "constexpr", "fixed": ("fp32", "constexpr")}
VALUES = {"x": Place(1, 2), "n": -3, "big": 2**40, "rate": Changing(1), "one": 1, "fixed": (0.25, 7)}


def two_kernels(driver, **facts):
    pointer, single = ctypes.c_uint64, ctypes.c_float
    driver.parameters = {11: [pointer, ctypes.c_int, ctypes.c_int64, single, single, *[pointer] * 2], 12: [pointer] * 3}
    kernels = Kernel(Compiled(11, SIGNATURE)), Kernel(Compiled(12, {"y": "*bf16"}, **facts))
    launchers = Launcher(kernels[0], (5, 2), VALUES), Launcher(kernels[1], (7,), {"y": Place(0)}, warps=4)
    return kernels, Launches(*launchers)


def test_arguments(driver):
    kernels, launches = two_kernels(driver)
    tensors = (torch.zeros(4), torch.zeros(8))
    launches(Memory(tensors), 0.5, 0.125)
    first, second = (tensor.data_ptr() for tensor in tensors)
    assert driver.launches == [
        (11, [5, 2, 1, 128, 1, 1, 96], None, [second + 8, -3, 2**40, 0.125, 0.25, 0, 0]),
        (12, [7, 1, 1, 128, 1, 1, 96], None, [first, 0, 0]),
    ]
    driver.launches.clear()
    others = (torch.zeros(4), torch.zeros(8))
    memory = Memory(others)
    memory.stream = 77
    launches(memory, 0.5, 0.75)
    first, second = others[0].data_ptr(), others[1].data_ptr()
    assert driver.launches == [
        (11, [5, 2, 1, 128, 1, 1, 96], 77, [second + 8, -3, 2**40, 0.75, 0.25, 0, 0]),
        (12, [7, 1, 1, 128, 1, 1, 96], 77, [first, 0, 0]),
    ]
    assert [kernel.launches for kernel in kernels] == [0, 0]  # never by Triton, which would build a launcher


def test_unaligned_memory_goes_through_triton(driver):
    kernels, launches = two_kernels(driver)
    memory = Memory((torch.zeros(5)[1:], torch.zeros(8)))
    launches(memory, 0.5, 0.125)
    assert [kernel.launches for kernel in kernels] == [1, 1]
    launches(Memory((torch.zeros(4), torch.zeros(8))), 0.5, 0.125)
    assert len(driver.launches) == 2
    launches(memory, 0.5, 0.125)
    assert len(driver.launches) == 2
    assert [kernel.launches for kernel in kernels] == [2, 2]


@pytest.mark.parametrize(
    "facts",
    [{"num_ctas": 2}, {"global_scratch_size": 8}, {"launch_pdl": True}, {"target": SimpleNamespace(backend="hip")}],
)
def test_a_variant_that_needs_more_is_launched_from_python(driver, facts):
    kernels, launches = two_kernels(driver, **facts)
    tensors = (torch.zeros(4), torch.zeros(8))
    for _ in range(3):
        launches(Memory(tensors), 0.5, 0.125)
    assert driver.launches == []
    assert [len(kernel.compiled.runs) for kernel in kernels] == [3, 3]


def test_a_thread_without_a_context(driver):
    """Triton's launcher, which makes the device's context current, steps in."""
    kernels, launches = two_kernels(driver)
    memory = Memory((torch.zeros(4), torch.zeros(8)))
    launches(memory, 0.5, 0.125)
    driver.error = 201
    launches(memory, 0.5, 0.125)
    assert [len(kernel.compiled.runs) for kernel in kernels] == [1, 1]


def test_an_error_of_the_driver_is_raised(driver):
    _, launches = two_kernels(driver)
    memory = Memory((torch.zeros(4), torch.zeros(8)))
    launches(memory, 0.5, 0.125)
    driver.error = 700
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        launches(memory, 0.5, 0.125)


def test_without_a_compiler(monkeypatch):
    """The reason is said once, and kernels run from Python."""

    def fails(source, name):
        raise RuntimeError("Failed to find C compiler")

    native.compiled_launcher.cache_clear()
    monkeypatch.setattr(native, "build_c_module", fails)
    try:
        with pytest.warns(UserWarning, match="launched from Python.*Failed to find C compiler"):
            assert native.compiled_launcher() is None
    finally:
        native.compiled_launcher.cache_clear()
    monkeypatch.setattr(native, "compiled_launcher", lambda: None)
    monkeypatch.setattr(launcher, "load_kernel", lambda compiled, with_launcher: None)
    driver = Driver()
    kernels, launches = two_kernels(driver)
    for _ in range(3):
        launches(Memory((torch.zeros(4), torch.zeros(8))), 0.5, 0.125)
    assert [len(kernel.compiled.runs) for kernel in kernels] == [3, 3]


class Built:
    """What Triton launches with."""

    global_scratch_size = 8

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, *arguments):
        self.calls.append(arguments)


@pytest.mark.parametrize(
    ("with_launcher", "facts"),
    [(False, {}), (True, {}), (False, {"num_ctas": 2}), (False, {"target": SimpleNamespace(backend="hip")})],
)
def test_a_launcher_is_built_when_it_is_needed(monkeypatch, with_launcher, facts):
    """Triton 3.6 has a C compiler make it, which takes half as long as to compile the kernel."""
    built, calls = [], []

    def build(*made_of):
        built.append(made_of)
        return Built(calls)

    class Kernel(Compiled):
        def _init_handles(self):
            self.run = triton_driver.active.launcher_cls("source", "metadata")

    active = SimpleNamespace(launcher_cls=build)
    monkeypatch.setattr(triton_driver, "_active", active)
    kernel = Kernel(11, SIGNATURE, **facts)
    load_kernel(kernel, with_launcher)
    assert len(built) == (with_launcher or bool(facts))
    assert active.launcher_cls is build
    for number in (1, 2):
        kernel.run(number)
    assert (built, calls) == ([("source", "metadata")], [(1,), (2,)])
    assert kernel.run.global_scratch_size == 8


def test_a_triton_that_describes_kernels_in_another_way(driver):
    """The reason is said, and kernels run from Python."""
    kernels, launches = two_kernels(driver)
    kernels[0].compiled.function = "a handle"
    memory = Memory((torch.zeros(4), torch.zeros(8)))
    with pytest.warns(UserWarning, match="this Triton describes them in another way"):
        launches(memory, 0.5, 0.125)
    launches(memory, 0.5, 0.125)
    assert driver.launches == []
    assert [len(kernel.compiled.runs) for kernel in kernels] == [2, 2]
