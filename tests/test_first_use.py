"""Kernels compile side by side before their first use: the variants that a step launches, and no others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Compiles for a GPU that is not there: a driver that only says which one it is.
CODE = """
import sys
from concurrent.futures import ThreadPoolExecutor
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())
import dcnet
from dcnet.ops.fused import first_use
from dcnet.ops.fused.operands import BACKWARD, FORWARD, OF_BATCH, STATISTICS, Effects, Operands, Options
from dcnet.ops.fused.plan import plan_of
from dcnet.ops.mean_norm import BatchMean
from dcnet.ops.operator import make_operator

vector = torch.ones(32)
x = torch.zeros(2, 32, 8, 8, dtype=torch.bfloat16).to(memory_format=torch.channels_last).requires_grad_()
weight = torch.zeros(32, 32, 3, 3, requires_grad=True)
operator = make_operator("tanh", "cosine", None)
options = Options((1, 1), (1, 1), (1, 1), 1, 1e-4, 2, OF_BATCH, STATISTICS, 1e-3, 1, True, False, operator)
t = Operands(x, weight, None, vector, None, None, vector, vector, vector, vector, None, None, None)
plan = plan_of(t, options, torch.zeros(2, 32, 8, 8, dtype=torch.bfloat16).to(memory_format=torch.channels_last))
count = torch.zeros((), dtype=torch.int64)
effects = Effects(BatchMean(vector[:1], count, 0.1), 0.1, count)

sizes = []
real = ThreadPoolExecutor.submit
ThreadPoolExecutor.submit = lambda self, *rest: (sizes.append(1), real(self, *rest))[1]
first_use.compile_ahead(plan, t, effects, True)
first_use.COMPILERS.wait()
ahead = len(sizes)

# what a step launches, with tensors as it would have them
slots = {"batches": torch.int64, "mean_batches": torch.int64}
half = ("x", "residual", "unit", "dot", "out", "e", "grad_d", "behind", "grad_x", "grad_unit")
def tensor(name):
    return torch.zeros(64, dtype=torch.bfloat16 if name in half else slots.get(name, torch.float32))
back = plan.backward(False, True, True, True, True)
compiled = []
passes = (FORWARD, plan.ahead), (FORWARD, plan.epilogue(1, True)), (BACKWARD, back.epilogue), (BACKWARD, back.ends)
for names, launches in passes:
    for launcher in launches.launchers:
        values = launcher.values.copy()
        for i, _ in launcher.changing:
            values[i] = 0.125
        for i, slot, _ in launcher.places:
            values[i] = tensor(names[slot])
        launcher.kernel.compile = lambda src, **rest: compiled.append(src.fn.fn.__name__)
        launcher.kernel.run(*values, grid=launcher.grid, warmup=True, num_warps=launcher.warps)
print(ahead, compiled)
"""


@pytest.mark.slow
def test_a_step_finds_its_kernels_compiled(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    code = Path(tmp_path) / "code.py"
    code.write_text(CODE)
    done = subprocess.run([sys.executable, str(code)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["9", "[]"]


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
