"""The autograd function in C++: its build at the user's place, and the launches that it packs off to the driver."""

import ctypes
import os
import struct
import subprocess
import sys
import time
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dcnet
from dcnet.util import cpp
from dcnet.util.cache import cache_folder, made_once

pytest.importorskip("triton")

from dcnet.ops.fused import host, native
from dcnet.ops.fused.host import HOST, Host

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, inside the interpreter

in_the_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="in Triton's interpreter")
ROOT = Path(dcnet.__file__).parents[2]
NUMBER = ctypes.c_uint
ENTRY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[NUMBER] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
ON_GPU = SimpleNamespace(is_cuda=True)


class Driver:
    """Stands for the CUDA driver: runs launcher number `function` in the interpreter, given the addresses it gets."""

    def __init__(self):
        self.launchers, self.slots, self.seen, self.errors = [], [], [], []
        self.entry = ENTRY(self.launch)

    def launch(self, function, *rest):
        if self.errors and (error := self.errors.pop()):
            return error
        *sizes, _stream, parameters, _ = rest
        launcher = self.launchers[function - 1]
        assert sizes == [*launcher.grid, 32 * launcher.warps, 1, 1, 0]
        values = [ctypes.cast(parameters[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in range(len(launcher.places))]
        floats = [
            ctypes.cast(parameters[len(launcher.places) + i], ctypes.POINTER(ctypes.c_float))[0]
            for i in range(len(launcher.changing))
        ]
        self.seen.append((launcher, values, floats))
        return 0

    def pack(self, launches):
        """Words for the launchers: their places as parameters, then their changing floats."""
        words = b""
        for launcher in launches.launchers:
            self.launchers.append(launcher)
            places, floats = launcher.places, launcher.changing
            head = (len(self.launchers), *launcher.grid, 32 * launcher.warps, 0, len(places) + len(floats))
            words += struct.pack("<9Q", *head, len(places), len(floats)) + bytes(8 * (len(places) + len(floats)))
            words += b"".join(struct.pack("<QQQ", i, slot, offset) for i, (_, slot, offset) in enumerate(places))
            words += b"".join(struct.pack("<QQ", len(places) + i, number) for i, (_, number) in enumerate(floats))
        return words


@pytest.fixture
def driver(built_host, monkeypatch):
    driver = Driver()
    HOST.load(ctypes.cast(driver.entry, ctypes.c_void_p).value)
    monkeypatch.setattr(HOST, "_kernels", driver.pack)
    yield driver
    HOST.module = None
    built_host.forget()


def block():
    layer = dcnet.DecoupledConv2d(4, 4, 3, bias=True, impl="fused")
    block = dcnet.Block(layer, torch.nn.BatchNorm2d(4, momentum=0.25))
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    block(x).sum().backward()
    return block, x


def pointers(launcher, values):
    """The pointer arguments of a launch by the kernel's names."""
    names = launcher.kernel.arg_names
    return {names[i]: value for (i, _, _), value in zip(launcher.places, values, strict=True)}


@in_the_interpreter
def test_maps_are_freed_before_the_convolution(driver, monkeypatch):
    """Incoming gradient and dot product, as between the nodes of a plain network: the peak is not a map higher."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from in_turns import held_and_peak

    class Residual(torch.nn.Module):
        def __init__(self, conv):
            super().__init__()
            self.blocks = torch.nn.ModuleList([dcnet.Block(conv(), torch.nn.BatchNorm2d(16)) for _ in range(2)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x, x)
            return x

    nets = {
        "plain": Residual(lambda: torch.nn.Conv2d(16, 16, 1, bias=False)),
        "ours": Residual(lambda: dcnet.DecoupledConv2d(16, 16, 1, impl="fused")),
    }
    for _ in range(2):
        nets["ours"](torch.randn(2, 16, 32, 32, requires_grad=True)).sum().backward()
    peaks = {name: held_and_peak(net, (2, 16, 32, 32))[1] for name, net in nets.items()}
    assert HOST.module.counts()["backward"] > 0
    assert peaks["ours"] < peaks["plain"] + 0.5 * 2 * 16 * 32**2 * 4 / 2**20


@in_the_interpreter
def test_launches(driver):
    """Every kernel of a step gets the addresses of this step's tensors, and the floats."""
    net, x = block()
    driver.seen.clear()
    y = net(x)
    seen = {}
    for launcher, values, floats in driver.seen:
        seen.setdefault(launcher.kernel.fn.__name__, []).append((pointers(launcher, values), floats))
    layer, norm = net.conv, net.norm
    assert seen["normalize_and_box"][0][0]["w_ptr"] == layer.weight.data_ptr()
    assert seen["energies"][0][0]["x_ptr"] == x.data_ptr()
    (statistics, _), (last, floats) = seen["forward"]
    assert statistics["running_norm"] == layer.running_norm.data_ptr()
    assert last["y_ptr"] == y.data_ptr()
    assert last["bias"] == layer.bias.data_ptr()
    assert (last["running_mean"], last["running_var"]) == (norm.running_mean.data_ptr(), norm.running_var.data_ptr())
    assert last["norm_batches"] == norm.num_batches_tracked.data_ptr()
    assert floats == pytest.approx([0.25, 0.1])
    driver.seen.clear()
    e = torch.ones_like(y)
    y.backward(e)
    seen = [(launcher.kernel.fn.__name__, pointers(launcher, values)) for launcher, values, _ in driver.seen]
    assert [name for name, _ in seen[:2]] == ["backward", "backward"]
    assert all(pointer["e_ptr"] == e.data_ptr() for name, pointer in seen if name == "backward")
    added = next(pointer for name, pointer in seen if name == "add_product")
    assert added["x_ptr"] == x.data_ptr()
    assert driver.launchers


@in_the_interpreter
def test_a_thread_without_a_context(driver):
    """A call of CUDA's runtime makes the context current; then the launch is tried again."""
    net, x = block()
    driver.errors = [0, 201]
    assert net(x) is not None


@in_the_interpreter
def test_an_error_of_the_driver_is_raised(driver):
    net, x = block()
    driver.errors = [700]
    with pytest.raises(RuntimeError, match="cuLaunchKernel failed with CUDA error 700"):
        net(x)


# -- the build ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def started(host):
    """What `ready` gives once the build has ended."""
    host.ready(ON_GPU)
    host._thread.join()
    return host.ready(ON_GPU)


def test_without_a_compiler(own_cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(own_cache))
    monkeypatch.setattr(host, "kernel_launch_address", lambda: 0)
    with pytest.warns(UserWarning, match=r"layers run from Python.*no C\+\+ compiler: none of c\+\+, g\+\+") as warned:
        assert started(Host()) is None
    assert len(warned) == 1


def test_a_compiler_that_fails(own_cache, monkeypatch):
    """The warning names the command and what it said, once, and nothing stays in the cache."""
    compiler = own_cache / "failing"
    compiler.write_text("#!/bin/sh\n[ \"$2\" = --version ] && exit\necho 'error: no such flag'\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} --strict")
    monkeypatch.setattr(host, "kernel_launch_address", lambda: 0)
    mine = Host()
    with pytest.warns(UserWarning, match=r"(?s)failing --strict .*module\.cpp.*status 3:\nerror: no such flag"):
        assert started(mine) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mine.ready(ON_GPU) is None
    assert [path for path in own_cache.rglob("*") if path.is_file()] == [compiler]


def test_a_compiler_that_is_not_there(own_cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(host, "kernel_launch_address", lambda: 0)
    with pytest.warns(UserWarning, match="no-such-compiler cannot be started"):
        started(Host())


def test_switched_off(monkeypatch):
    monkeypatch.setenv("DCNET_NATIVE", "0")
    mine = Host()
    assert mine.ready(ON_GPU) is None
    assert mine._thread is None
    native.compiled_launcher.cache_clear()
    monkeypatch.setattr(native, "build_c_module", lambda *_: pytest.fail("built"))
    assert native.compiled_launcher() is None
    native.compiled_launcher.cache_clear()


def test_waiting(built_host, monkeypatch):
    monkeypatch.setenv("DCNET_NATIVE", "wait")
    monkeypatch.setattr(host, "kernel_launch_address", lambda: 0)
    assert Host().ready(ON_GPU) is not None


def test_never_on_a_cpu():
    mine = Host()
    assert mine.ready(torch.zeros(1)) is None
    assert mine._thread is None


def test_a_build_does_not_keep_a_step_waiting(own_cache, monkeypatch):
    slow = own_cache / "slow"
    slow.write_text("#!/bin/sh\nsleep 1\nexit 1\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(host, "kernel_launch_address", lambda: 0)
    mine, start = Host(), time.perf_counter()
    for _ in range(3):
        assert mine.ready(ON_GPU) is None
    assert time.perf_counter() - start < 0.5
    mine._thread.join()


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/dcnet")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_folder() == Path.home() / ".cache" / "dcnet"


MAKES = """
import sys, time
from pathlib import Path
from dcnet.util.cache import made_once
folder = Path(sys.argv[1])
def make(workshop):
    with (folder.parent / "made").open("a") as file:
        file.write("x")
    time.sleep(0.5)
    (workshop / "a").write_text("whole")
    return workshop / "a"
assert made_once(folder, "thing", make).read_text() == "whole"
"""


def test_two_processes_at_once(tmp_path):
    """One makes it, the other waits for it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", MAKES, str(tmp_path / "folder")]
    for process in [subprocess.Popen(command, env=environment) for _ in range(2)]:
        assert process.wait() == 0
    assert (tmp_path / "made").read_text() == "x"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["thing"]


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        made_once(tmp_path / "folder", "thing", lambda _: 1 / 0)
    assert list((tmp_path / "folder").iterdir()) == []


def test_the_key_knows_what_it_is_made_of(built_host, own_cache, monkeypatch):
    """Another source or compiler is another module; the same is taken from the cache."""
    made = []
    monkeypatch.setattr(cpp, "_load", lambda name, path: path)
    monkeypatch.setattr(cpp, "_version", lambda compiler: "1")
    monkeypatch.setattr(
        cpp, "_run", lambda command: made.append(Path(command[-1 - len(cpp._options())]).write_text(""))
    )
    first = cpp.build_cpp_module("a", {"a.cpp": "int a;"}, "a.cpp")
    assert cpp.build_cpp_module("a", {"a.cpp": "int a;"}, "a.cpp") == first
    assert len(made) == 1
    second = cpp.build_cpp_module("a", {"a.cpp": "int b;"}, "a.cpp")
    monkeypatch.setattr(cpp, "_version", lambda compiler: "2")
    third = cpp.build_cpp_module("a", {"a.cpp": "int a;"}, "a.cpp")
    assert len({first, second, third}) == len(made) == 3


def test_sources_are_in_the_package():
    """A wheel contains what is built at the user's place."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["dcnet"]
    package = ROOT / "src/dcnet"
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    sources = {path for path in package.rglob("*") if path.suffix in (".c", ".h", ".cpp")}
    assert {package / "ops/fused" / name for name in host._SOURCES} <= sources
    assert sources <= packed
    assert not [path for path in sources if len(path.read_text().splitlines()) > 300]
