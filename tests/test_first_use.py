"""Kernels compile side by side before their first use: the variants that a step launches, and no others."""

import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("triton")

# The first step of several networks on a GPU that is not there: a driver that only says which one it is, kernels that
# are noted instead of compiled, and launches that only ask Triton for their variant.
CODE = """
import os, sys, threading
import torch, triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())
import dcnet
from dcnet.layers import Block, Chain, HandsOn, hand_on
from dcnet.ops.fused import compilers, first_use, formulas, launcher, native, plan
from dcnet.ops.fused.kernels import backward, depthwise, norms, statistics

compiled, missed = [], []
launching = None  # the thread that launches

class Variant:
    pass

def note(src, **options):
    here = threading.get_ident() == launching  # others compile what a later pass will launch
    (missed if here else compiled).append(src.fn.fn.__name__)
    return Variant()

def ask_triton(self, memory, floats):
    global launching
    launching = threading.get_ident()
    self.kernel.warmup(*self._operands(memory, floats), grid=self.grid, num_warps=self.warps)
    launching = None

def for_a_gpu(*arguments, jit=formulas.jit):
    os.environ["TRITON_INTERPRET"] = "0"
    try:
        return jit(*arguments)
    finally:
        os.environ["TRITON_INTERPRET"] = "1"

triton.compiler.compile = note
compilers.Processes.compile = lambda self, compile_kernel: False
launcher.Launcher.choose = lambda self, memory, floats: None
launcher.Launcher._ask_triton = ask_triton
launcher.raw_stream = lambda x: 0
native.compiled_launcher = first_use.compiled_launcher = lambda: None
first_use._compiles = lambda x: True
formulas.jit = for_a_gpu
os.environ["TRITON_INTERPRET"] = "1"  # or layers on a CPU would not take these kernels


def network(kind):
    if kind == "depthwise":
        first = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.SiLU()
        second = nn.Conv2d(32, 32, 3, groups=32), nn.BatchNorm2d(32), nn.ReLU()
        model = nn.Sequential(*first, *second, nn.Conv2d(32, 32, 3, groups=2), nn.Flatten(), nn.LazyLinear(9))
        model(torch.zeros(2, 3, 16, 16))
        dcnet.decouple_(model, magnitude="seg", impl="fused")
        return model
    return dcnet.create_model(kind, num_classes=10, magnitude="tanh", impl="fused")


def report(*what, before):
    print(*what, len(compiled) - before, *missed)
    missed.clear()


for kind in ("cnn9_narrow", "resnet32", "depthwise"):
    for half in (False, True):
        model = network(kind).to(memory_format=torch.channels_last)
        size = 16 if kind == "depthwise" else 32
        x = torch.rand(2, 3, size, size).to(memory_format=torch.channels_last)
        for training in (True, False):
            model.train(training)
            before = len(compiled)
            with torch.autocast("cpu", torch.bfloat16, half), torch.set_grad_enabled(training):
                y = model(x)
            if training:
                y.float().sum().backward()
            report(kind, half, training, before=before)


def forget():
    plan._PLANS.clear()
    for module in (backward, norms, statistics, depthwise):
        for kernel in vars(module).values():
            getattr(kernel, "device_caches", {}).clear()


class Residual(HandsOn):
    def __init__(self, groups):
        super().__init__()
        self.first, self.last = block(32, 32, groups), block(32, 32, 1)

    def with_energy(self, x, energy, leave):
        y, of_y = hand_on(self.first, x, energy, True)
        return hand_on(self.last, y, of_y, leave, x)


def block(inputs, outputs, groups):
    conv = dcnet.DecoupledConv2d(inputs, outputs, 3, padding=1, groups=groups, impl="fused")
    return Block(conv, nn.BatchNorm2d(outputs), "relu")


x = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
for kind in ("after_inference", "compiled"):
    forget()
    model = Chain(block(3, 32, 1), Residual(1), Residual(32)).to(memory_format=torch.channels_last)
    before = len(compiled)
    if kind == "compiled":
        model = torch.compile(model)
    else:
        with torch.no_grad():
            model(x)
    with torch.autocast("cpu", torch.bfloat16, kind == "compiled"):
        y = model(x)
    y.float().sum().backward()
    report(kind, "-", "-", before=before)
"""


def test_a_step_finds_its_kernels_compiled(tmp_path):
    # a GPU that is there would be asked to load what was not compiled
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    environment = os.environ | hidden | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = Path(tmp_path) / "code.py"
    code.write_text(CODE)
    done = subprocess.run([sys.executable, str(code)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 14
    for kind, half, training, count, *missed in lines:
        assert not missed, (kind, half, training, missed)
        assert int(count) > 2


def test_no_thread_ends_what_another_one_uses():
    """Backward runs in a thread for each device: one may wait for all kernels while another one still names some."""
    from dcnet.ops.fused.compilers import KernelCompilers

    compilers = KernelCompilers(1)
    with compilers.collecting() as can:
        assert can
        mode = compilers._mode
        other = Thread(target=compilers.wait)
        other.start()
        other.join(0.5)
        future = mode.executor.submit(lambda: None)  # raises after the end
    other.join(10)
    assert not other.is_alive()
    future.exception(10)
    with compilers.collecting():
        assert compilers._mode is not mode


# Arguments that are not constants of a kernel: sizes, of which Triton only knows whether 16 divides them
_NUMBERS = {"P", "D", "K", *(f"{letter}{axis}" for letter in "IOSPD" for axis in "DHW")}


def test_widths_share_their_variants(monkeypatch):
    """The kernels of layers that differ in width and size only, on a GPU with many processors, have equal constants."""
    import torch

    from dcnet.ops.fused import tiles
    from dcnet.ops.fused.operands import OF_BATCH, STATISTICS, Operands, Options
    from dcnet.ops.fused.plan import Plan
    from dcnet.ops.operator import make_operator

    monkeypatch.setattr(tiles, "programs_for", lambda device, each: 132 * each)
    one, operator = (1, 1), make_operator("tanh", "cosine", None)
    options = Options(one, one, one, 1, 1e-4, 2, OF_BATCH, STATISTICS, 1e-3, 1, True, False, operator)

    def constants(width, size):
        vector = torch.ones(width)
        x = torch.empty(64, width, size, size, dtype=torch.bfloat16, device="meta").to(
            memory_format=torch.channels_last
        )
        weight, energy = torch.empty(width, width, 3, 3, device="meta"), torch.empty(width // 32, 64, 1, size, size)
        plan = Plan(Operands(x, weight, None, vector, None, None, *[vector] * 4, None, None, energy), options, x)
        back = plan.backward(False, True, False, True, True)
        launches = (plan.ahead, plan.epilogue(1, True), back.epilogue, back.ends)
        return [
            (launcher.kernel.fn.__name__, launcher.warps, {n: a[n] for n in a if n.isupper() and n not in _NUMBERS})
            for launcher in (each for launch in launches for each in launch.launchers)
            for a in [dict(zip(launcher.kernel.arg_names, launcher.values, strict=True))]
        ]

    assert constants(96, 32) == constants(384, 8)
