"""Compiles the kernels for a GPU that need not be there, and prints what was compiled. Run by test_fused_compiles.py in a process of its own.

Triton's interpreter accepts what its compiler does not; ptxas comes with Triton.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcnet.ops.fused import fast, statistics
from dcnet.ops.fused.launch import _kernel_launchers, norm_plan
from dcnet.ops.fused.plan import ForwardFlags, GradientFlags, Plan
from dcnet.ops.operator import make_operator

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {"norm_batches": "*i64"}  # the others are half or float32, which only the maps differ in
MAPS = ("d_ptr", "y_ptr", "residual_ptr", "e_ptr", "out_ptr", "grad_d", "grad_residual", "x_ptr", "grad_ptr", "unit_ptr")


def compile_launcher(launcher, tensors, floats, half):
    """The compiled kernel, as Triton would specialise it for this launcher."""
    kernel = launcher.kernel
    runtime = len(kernel.params) - len(launcher.fixed) - floats
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if i < runtime:
            is_map = name in MAPS and i < tensors
            signature[name] = POINTERS.get(name, half if is_map else "*fp32")
            attributes[i,] = [["tt.divisibility", 16]]
        elif i < runtime + floats:
            signature[name] = "fp32"
        else:
            value = launcher.fixed[i - runtime - floats]
            if parameter.is_constexpr or value == 1:
                signature[name], constants[i,] = "constexpr", value
            else:
                signature[name] = "i32"
                if value % 16 == 0:
                    attributes[i,] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=TARGET, options={"num_warps": launcher.warps})


def launchers(magnitude, angular, weighting, dtype):
    """Launchers of every kernel for this operator: (name, launcher, how many tensors it takes, how many floats)."""
    operator = make_operator(magnitude, angular, weighting)
    radius = operator.magnitude.formula.has_radius
    shape, stride = (8, 96, 16, 16), (96 * 256, 1, 96 * 16, 96)
    there = (weighting == "linear", weighting == "joint", radius, weighting is not None)
    plan = Plan(shape, stride, dtype, torch.device("cpu"), 1, operator, there, 2, radius)
    mean = 2 if radius else 0
    for name, flags in {
        "statistics": (8, True, mean, min(1, mean), 0, False, False, False, False, 0, True, True),
        "output": (8, True, min(1, mean), 0, 2, True, True, True, True, 1, False, False),
        "evaluation": (8, True, min(1, mean), 0, 1, True, True, False, False, 2, False, False),
        "alone": (8, True, mean, 2 if mean else 0, 0, False, False, False, False, 0, False, False),
    }.items():
        yield name, plan.launcher("forward", ForwardFlags(*flags)), 15, 6
    for name, flags in {
        "reduce": (True, True, 1, True, False, False),
        "gradients": (True, False, 2, False, True, True),
        "gradients alone": (False, False, 0, False, False, False),
    }.items():
        yield name, plan.launcher("backward", GradientFlags(*flags)), 10, 1
    if plan.rows:
        yield "vectors", plan.launcher("vector_gradients"), 1, 0
    norms = norm_plan(shape, stride, dtype, torch.device("cpu"), (3, 3), (1, 1), (1, 1), (1, 1), 1)
    yield "squares", norms.launcher("of_squares"), 1, 0
    yield "box", norms.launcher("of_box", True), 1, 1
    yield "box gradient", norms.launcher("of_box_gradient", 3, 6), 1, 1
    yield "product", norms.launcher("of_product"), 2, 0
    forward, backward = _kernel_launchers(96, 864, weighting is not None, torch.float32, dtype)
    yield "normalise", forward, 2, 1
    yield "normalise gradient", backward, 3, 0
    yield "averages", fast.Launcher(statistics.move_averages, (1,), (1, 96, 1, True, True, 128)), 5, 3


def main() -> None:
    for magnitude, angular, weighting, dtype in (
        ("tanh", "sigmoid:k=learned", "linear", torch.bfloat16),
        ("log", "power_cosine", "joint", torch.float32),
    ):
        half = "*bf16" if dtype == torch.bfloat16 else "*fp32"
        for name, launcher, tensors, floats in launchers(magnitude, angular, weighting, dtype):
            compiled = compile_launcher(launcher, tensors, floats, half)
            sys.stdout.write(f"{magnitude} + {angular}: {name}, {len(compiled.asm['cubin'])} bytes\n")


if __name__ == "__main__":
    main()
