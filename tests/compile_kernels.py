"""Compile the kernels of one operator for a GPU that need not be there, and print what was compiled.

Run by test_fused_compiles.py in a process of its own, with the magnitude as argument.
Triton's interpreter accepts what its compiler does not; ptxas comes with Triton.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcnet.ops.fused.launcher import Changing, Place
from dcnet.ops.fused.operands import ALONE, AVERAGES, NO_MEAN, OF_BATCH, PRELU, STATISTICS, Operands, Options
from dcnet.ops.fused.plan import plan_of
from dcnet.ops.operator import make_operator

TARGET = GPUTarget("cuda", 90, 32)
MAPS = {
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
}
RELU = 1


def compile_launcher(launcher, half):
    """The compiled kernel, as Triton would specialize it for this launcher."""
    kernel = launcher.kernel
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, launcher.values, strict=True)):
        name = parameter.name
        if isinstance(value, Place):
            signature[name] = "*i64" if name in ("norm_batches", "batches") else half if name in MAPS else "*fp32"
            attributes[i,] = [["tt.divisibility", 16]]
        elif isinstance(value, Changing) or (isinstance(value, float) and not parameter.is_constexpr):
            signature[name] = "fp32"
        elif parameter.is_constexpr or value is None or value == 1:
            signature[name], constants[i,] = "constexpr", value
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGET, options={"num_warps": launcher.warps})


def launchers(magnitude, angular, weighting, dtype):
    """Launchers of every kernel for this operator, by name."""
    operator = make_operator(magnitude, angular, weighting)
    radius = torch.ones(96) if operator.magnitude.formula.has_radius else None
    order = {"memory_format": torch.channels_last}
    x, weight = torch.zeros(2, 96, 16, 16, dtype=dtype).to(**order), torch.zeros(96, 96, 3, 3)
    vector = torch.ones(96)

    def plan(follows, activation=0, residual=None, leaves=False, energy=None, weight=weight, recovers=False):
        mean = OF_BATCH if radius is not None else NO_MEAN
        options = Options(
            *(
                (1, 1),
                (1, 1),
                (1, 1),
                96 // weight.shape[1],
                1e-4,
                2,
                mean,
                follows,
                1e-3,
                activation,
                leaves,
                recovers,
                operator,
            ),
        )
        bias = vector if weighting else None
        learned = vector[None] if operator.learned else None
        norm = (vector,) * 4 if follows else (None,) * 4
        slope = vector if activation == PRELU else None
        operands = Operands(x, weight, bias, radius, None, learned, *norm, residual, slope, energy)
        return plan_of(operands, options, torch.zeros(2, 96, 16, 16, dtype=dtype).to(**order))

    tracked = int(radius is not None)
    training = plan(STATISTICS, RELU, residual=x, leaves=True, energy=torch.zeros(3, 2, 1, 16, 16))
    yield from zip(("statistics", "output"), training.epilogue(tracked, True).launchers, strict=True)
    yield from zip(("normalize and box of maps",), training.ahead.launchers, strict=True)
    back = training.backward(True, True, True, True, True)
    yield from zip(("reduce", "gradients", "vectors"), back.epilogue.launchers, strict=False)
    yield from zip(("box and normalize gradient", "product"), back.ends.launchers, strict=True)
    evaluation = plan(AVERAGES, PRELU)
    yield "evaluation", evaluation.epilogue(0, False).launchers[0]
    back = evaluation.backward(False, True, False, True, True)
    yield from zip(("reduce evaluation", "gradients evaluation"), back.epilogue.launchers, strict=False)
    alone = plan(ALONE)
    yield from {"alone": alone.epilogue(2 * tracked, False).launchers[0], "energies": alone.ahead.launchers[0]}.items()
    yield "gradients alone", alone.backward(False, False, True, True, True).epilogue.launchers[0]
    activated = plan(ALONE, RELU, leaves=True, recovers=angular == "cosine" and not weighting)
    yield "activated", activated.epilogue(0, False).launchers[0]
    yield "gradients activated", activated.backward(False, True, True, True, True).epilogue.launchers[0]
    depthwise = plan(STATISTICS, RELU, weight=torch.zeros(96, 1, 3, 3))
    yield "windows", depthwise.ahead.launchers[1]
    yield from zip(
        ("depthwise statistics", "depthwise output", "count"), depthwise.epilogue(tracked, True).launchers, strict=False
    )
    back = depthwise.backward(False, False, True, True, True)
    yield from zip(("depthwise reduce", "depthwise gradients"), back.epilogue.launchers, strict=False)
    yield from zip(("columns", "gradient of x"), back.ends.launchers, strict=False)


OPERATORS = {
    "tanh": ("sigmoid:k=learned", "linear", torch.bfloat16),
    "log": ("power_cosine", "joint", torch.float32),
    "sphere": ("cosine", None, torch.float32),  # no vectors, whose gradients would be added up
}


def main(magnitude: str) -> None:
    angular, weighting, dtype = OPERATORS[magnitude]
    for name, launcher in launchers(magnitude, angular, weighting, dtype):
        compiled = compile_launcher(launcher, "*bf16" if dtype == torch.bfloat16 else "*fp32")
        sys.stdout.write(f"{magnitude} + {angular}: {name}, {len(compiled.asm['cubin'])} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1])
