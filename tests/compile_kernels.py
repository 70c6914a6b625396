"""Compile the kernels of one operator for a GPU that need not be there, and print what was compiled.

Run by test_fused_compiles.py in a process of its own, with the magnitude as argument: `tanh` or `log`.
Triton's interpreter accepts what its compiler does not; ptxas comes with Triton.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcnet.ops.fused.layout import NormPlan, kernel_launchers
from dcnet.ops.fused.plan import ForwardFlags, GradientFlags, Plan
from dcnet.ops.operator import make_operator

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {"norm_batches": "*i64"}  # the others are half or float32, which only the maps differ in
MAPS = (
    "d_ptr",
    "y_ptr",
    "residual_ptr",
    "e_ptr",
    "out_ptr",
    "grad_d",
    "grad_residual",
    "x_ptr",
    "grad_ptr",
    "unit_ptr",
)


def compile_launcher(launcher, pointers, half):
    """Return the compiled kernel, as Triton would specialize it for this launcher."""
    kernel = launcher.kernel
    runtime = len(kernel.params) - len(launcher.fixed)
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if i < pointers:
            signature[name] = POINTERS.get(name, half if name in MAPS else "*fp32")
            attributes[i,] = [["tt.divisibility", 16]]
        elif i < runtime or (isinstance(launcher.fixed[i - runtime], float) and not parameter.is_constexpr):
            signature[name] = "fp32"
        else:
            value = launcher.fixed[i - runtime]
            if parameter.is_constexpr or value == 1:
                signature[name], constants[i,] = "constexpr", value
            else:
                signature[name] = "i32"
                if value % 16 == 0:
                    attributes[i,] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=TARGET, options={"num_warps": launcher.warps}
    )


def launchers(magnitude, angular, weighting, dtype):
    """Yield launchers of every kernel for this operator: (name, launcher, how many pointers it takes)."""
    operator = make_operator(magnitude, angular, weighting)
    radius = operator.magnitude.formula.has_radius
    shape, stride = (8, 96, 16, 16), (96 * 256, 1, 96 * 16, 96)
    there = (weighting == "linear", weighting == "joint", radius, weighting is not None)
    plan = Plan(shape, stride, dtype, torch.device("cpu"), 1, operator, there, 2, radius)
    mean = 2 if radius else 0
    for name, flags in {
        "statistics": (8, True, mean, min(1, mean), 0, False, False, False, False, 0, True, True, False),
        "output": (8, True, min(1, mean), 0, 2, True, True, True, True, 1, False, False, True),
        "evaluation": (8, True, min(1, mean), 0, 1, True, True, False, False, 2, False, False, False),
        "alone": (8, True, mean, 2 if mean else 0, 0, False, False, False, False, 0, False, False, False),
    }.items():
        yield name, plan.forward_launcher([], (1.0,) * 4, ForwardFlags(*flags)), 22
    for name, flags in {
        "reduce": (True, True, 1, True, False, True, False),
        "gradients": (True, False, 2, False, True, True, True),
        "gradients alone": (False, False, 0, False, False, False, False),
    }.items():
        yield name, plan.backward_launcher([], GradientFlags(*flags)), 19
    if plan.rows:
        yield "vectors", plan.vector_gradients_launcher([]), 5
    norms = NormPlan(shape, stride, (3, 3), (1, 1), (1, 1), (1, 1), 1)
    yield "energies", norms.energies_launcher([]), 2
    yield "box", norms.box_launcher([], 1e-4, 3, True), 3
    yield "box gradient", norms.box_gradient_launcher([], 3, 6, 0.5), 4
    yield "product", norms.product_launcher([]), 3
    forward, backward = kernel_launchers(96, 864, [], [], 1e-4, weighting is not None)
    yield "normalize", forward, 3
    yield "normalize gradient", backward, 5


OPERATORS = {
    "tanh": ("sigmoid:k=learned", "linear", torch.bfloat16),
    "log": ("power_cosine", "joint", torch.float32),
}


def main(magnitude: str) -> None:
    angular, weighting, dtype = OPERATORS[magnitude]
    half = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    for name, launcher, pointers in launchers(magnitude, angular, weighting, dtype):
        compiled = compile_launcher(launcher, pointers, half)
        sys.stdout.write(f"{magnitude} + {angular}: {name}, {len(compiled.asm['cubin'])} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1])
