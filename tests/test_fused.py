"""The fused kernels against the reference: on a GPU, or, at small sizes, in Triton's interpreter."""

import math
import os

import pytest
import torch
from helpers import OPERATORS, Case, as_float64, assert_within_rule, operands, run

import dcnet
from dcnet import m
from dcnet.training.settings import tf32

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, inside the interpreter

SMALL = {
    "grouped": Case(2, (2, 4, 4, 5), (6, 2, 3, 3), True, (("padding", 1), ("groups", 2), ("stride", (2, 1)))),
    "channels last": Case(
        2, (2, 3, 5, 4), (5, 3, 3, 2), False, (("padding", "same"), ("dilation", (2, 1))), channels_last=True
    ),
    "grouped, channels last": Case(2, (2, 4, 4, 5), (6, 2, 2, 2), True, (("groups", 2),), channels_last=True),
    "depthwise, channels last": Case(
        2, (2, 6, 5, 4), (6, 1, 3, 3), True, (("padding", 1), ("stride", (2, 1)), ("groups", 6)), channels_last=True
    ),
    "1d": Case(1, (2, 3, 7), (5, 3, 3), True, (("padding", 1), ("padding_mode", "circular"))),
    "linear": Case(0, (7, 9), (5, 9), True, ()),
    "3d": Case(3, (1, 2, 4, 4, 4), (3, 2, 2, 2, 2), False, (("stride", 2),)),
}
AWKWARD = {
    f"{channels} channels, {h}×{w}{', channels last' if last else ''}": Case(
        2, (3, channels, h, w), (kernels, channels, 3, 3), True, (("padding", 1),), channels_last=last
    )
    for channels, kernels in ((1, 3), (3, 50), (50, 257), (257, 1))
    for h, w in ((1, 1), (7, 9))
    for last in (False, True)
} | {
    f"depthwise, {channels} channels, {k}×{k}": Case(
        2,
        (3, channels, 9, 7),
        (channels, 1, k, k),
        True,
        (("padding", k // 2), ("groups", channels)),
        channels_last=True,
    )
    for channels, k in ((72, 5), (257, 3), (96, 7))
}
CASES = SMALL | AWKWARD if GPU else SMALL


@pytest.fixture(autouse=True)
def exact_convolutions():
    """Test our kernels, not cuDNN.

    Its Winograd gradients of the weight are outside the rule by themselves (benchmarks/NOTES.md).
    """
    with torch.backends.cudnn.flags(enabled=False):
        yield


def on_device(tensors):
    return {name: t.detach().to(DEVICE).requires_grad_() for name, t in tensors.items()}


def check(case, dtype, magnitude, angular, weighting, mean_norm="batch"):
    tensors = on_device(operands(case, magnitude, angular, dtype))
    exact = run(case, as_float64(tensors), magnitude, angular, weighting, "reference", mean_norm)
    reference = run(case, tensors, magnitude, angular, weighting, "reference", mean_norm)
    assert_within_rule(run(case, tensors, magnitude, angular, weighting, "fused", mean_norm), reference, exact)


# Every operator sees one geometry in turn in the interpreter, two on a GPU, all of them there with DCNET_ALL=1 (an hour
# of compiling).
TURNS = len(CASES) if os.environ.get("DCNET_ALL") == "1" else 2 if GPU else 1
PAIRS = [
    (operator, name)
    for i, operator in enumerate(OPERATORS)
    for j, name in enumerate(CASES)
    if (j - i * TURNS) % len(CASES) < TURNS
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32])
@pytest.mark.parametrize(("operator", "name"), PAIRS, ids=str)
def test_every_operator(operator, name, dtype):
    if (operator, name, dtype) == (("sphere", "sigmoid", None), "1 channels, 1×1, channels last", torch.float16):
        pytest.xfail("three numbers in which two larger ones cancel: 10 % outside the rule (benchmarks/NOTES.md)")
    check(CASES[name], dtype, *operator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SMALL)
def test_half_precision(name, dtype):
    if dtype == torch.bfloat16 and not GPU:
        pytest.skip("Triton's interpreter truncates to bfloat16 where a GPU rounds")
    check(SMALL[name], dtype, "tanh", "sigmoid:k=learned", "linear")


@pytest.mark.skipif(not GPU, reason="TF32 is a GPU's")
@pytest.mark.parametrize("operator", [("tanh", "cosine", None), ("seg", "sigmoid", "linear")], ids=str)
def test_tf32(operator):
    """Only the dot product is rounded: norms, angle and magnitude are float32.

    The rule holds against a reference that rounds as well.
    """
    case = Case(2, (8, 64, 16, 16), (64, 64, 3, 3), False, (("padding", 1),), channels_last=True)
    tensors = on_device(operands(case, operator[0], operator[1], torch.float32))
    exact = run(case, as_float64(tensors), *operator, "reference", "batch")
    errors = {}
    for allowed in (False, True):
        with tf32(allowed), torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
            reference, fused = (run(case, tensors, *operator, impl, "batch") for impl in ("reference", "fused"))
        if allowed:
            assert_within_rule(fused, reference, exact)
        name = next(iter(fused))
        errors[allowed] = float((fused[name].double() - exact[name].double()).square().mean().sqrt())
    assert errors[True] > 10 * errors[False]  # it was in effect


@pytest.mark.parametrize("mean_norm", [None, "batch"])
def test_literal_radius(mean_norm):
    check(SMALL["channels last"], torch.float32, "seg", "linear", None, mean_norm)


def test_same_in_every_run():
    case = CASES["50 channels, 7×9, channels last"] if GPU else SMALL["grouped"]
    tensors = on_device(operands(case, "tanh", "sigmoid:k=learned", torch.float32))
    first, second = (run(case, tensors, "tanh", "sigmoid:k=learned", "separate", "fused") for _ in range(2))
    for name in ("output", "radius", "k"):  # the convolution's own gradients need not be, on a GPU
        assert torch.equal(first[name], second[name])


def test_a_users_formula_is_fused(catalogue):
    @dcnet.magnitude
    def rational(n, rho, alpha: dcnet.positive = 1.0):
        """α·‖x‖/(‖x‖ + ρ)"""
        s = 1.0 / (n + rho)
        return alpha * n * s, alpha * rho * s * s, -alpha * n * s * s

    @dcnet.angular
    def blend(c, a: dcnet.learnable(start=0.5, floor=0.01) = 0.3):
        """a·cos θ + (1 − a)·sign(cos θ)·cos²θ"""
        square = c * m.abs(c)
        return a * c + (1.0 - a) * square, a + (1.0 - a) * 2.0 * m.abs(c), c - square

    layers = [
        dcnet.DecoupledConv2d(3, 4, 3, magnitude="rational:alpha=2", angular="blend:a=learned", impl=impl).to(DEVICE)
        for impl in ("reference", "fused")
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 3, 5, 5, device=DEVICE, requires_grad=True)
    results = [torch.autograd.grad(layer(x).sin().sum(), [x, *layer.parameters()]) for layer in layers]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", SMALL if GPU else ["grouped, channels last", pytest.param("1d", marks=pytest.mark.slow), "linear"]
)
def test_registered_properly(name):
    """PyTorch's own check of schema, fake implementation and gradients."""
    from dcnet.ops.fused import layout
    from dcnet.ops.fused.autograd import decoupled
    from dcnet.ops.fused.operands import Effects, Operands, Options, as_arguments
    from dcnet.ops.operator import make_operator

    case = SMALL[name]
    tensors = on_device(operands(case, "tanh", "sigmoid:k=learned", torch.float32))
    dims = case.dims
    x = layout.dense(tensors["x"].detach()).requires_grad_()
    groups, kernels = case.arguments.get("groups", 1), tensors["weight"].shape[0]
    k = tensors["k"].detach()[None].requires_grad_()
    gamma, beta, running_mean, running_var, slope, bias = (torch.rand(kernels, device=DEVICE) for _ in range(6))
    mean_norm = torch.rand(groups, device=DEVICE).requires_grad_()
    geometry = ((1,) * dims, (1,) * dims, (1,) * dims, groups, 1e-4)

    def options_of(*kinds, weighting=None):
        """Options of these kinds of radius, mean and BatchNorm, BatchNorm's eps, and an activation."""
        return Options(*geometry, *kinds, False, False, make_operator("tanh", "sigmoid:k=learned", weighting))

    def check(tensors, *kinds, weighting=None, effects=(None,) * 7):
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        for op in (torch.ops.dcnet.decoupled, torch.ops.dcnet.decoupled_backward):
            names = [argument.name for argument in op.default._schema.arguments]
            assert len(set(names)) == len(names)  # torch.compile calls by name
        options = as_arguments(options_of(*kinds, weighting=weighting))
        torch.library.opcheck(torch.ops.dcnet.decoupled.default, (*tensors, *effects, *options), test_utils=checks)

    plain = Operands(x, tensors["weight"], bias.requires_grad_(), tensors["radius"], mean_norm, k, *[None] * 7)
    check(plain, 1, 1, 0, 0.0, 0, weighting="linear")
    check(plain._replace(mean_norm=None), 1, 2, 0, 0.0, 0, weighting="separate")
    residual = torch.rand_like(decoupled(plain, options_of(1, 1, 0, 0.0, 0), Effects())[0]).requires_grad_()
    parameters = {
        "gamma": gamma.requires_grad_(),
        "beta": beta.requires_grad_(),
        "running_mean": running_mean,
        "running_var": running_var,
    }
    block = plain._replace(mean_norm=None, **parameters)
    check(block._replace(residual=residual), 2, 3, 2, 1e-3, 1, weighting="joint")
    check(block._replace(slope=slope.requires_grad_()), 2, 2, 1, 1e-3, 2)
    moving = (
        torch.rand(groups, device=DEVICE),
        torch.ones((), device=DEVICE),
        0.1,
        running_mean,
        running_var,
        torch.tensor(3, device=DEVICE),
        0.2,
    )
    check(block._replace(running_mean=None, running_var=None), 2, 2, 2, 1e-3, 1, effects=moving)


def test_second_derivatives_raise():
    x = torch.randn(2, 3, 5, 5, device=DEVICE, requires_grad=True)
    w = torch.randn(4, 3, 3, 3, device=DEVICE, requires_grad=True)
    for magnitude, wanted in (("tanh", x), ("linear", w)):

        def call(x, w, magnitude=magnitude):
            return dcnet.decoupled_conv2d(x, w, magnitude=magnitude, impl="fused")

        # a compiled `linear` consists of PyTorch's own operations, which have second derivatives
        for function in (
            (call, torch.compile(call, backend="eager", fullgraph=True)) if magnitude == "tanh" else (call,)
        ):
            for inside in (torch.sin, torch.clone):  # the incoming gradient depends on x and w, or not
                y = function(x, w)
                (penalized,) = torch.autograd.grad(inside(y).sum(), wanted, create_graph=True)
                with pytest.raises(RuntimeError, match="impl='eager' has"):
                    torch.autograd.grad(penalized.square().sum() + y.sum(), wanted)


def test_autocast():
    layer = dcnet.DecoupledConv2d(3, 4, 3, angular="linear", impl="fused").to(DEVICE)
    x = torch.randn(2, 3, 5, 5, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.weight.grad.dtype == x.grad.dtype == torch.float32


@pytest.mark.parametrize("groups", [1, 2])
def test_compiled(groups):
    """A whole block compiled, training and evaluation: outputs, gradients and every running average."""
    from dcnet.layers import Block

    blocks = []
    for impl in ("eager", "fused"):
        torch.manual_seed(0)
        conv = dcnet.DecoupledConv2d(
            4, 6, 3, padding=1, groups=groups, momentum=None if groups == 2 else 0.1, impl=impl
        )
        blocks.append(Block(conv, torch.nn.BatchNorm2d(6), "relu").to(DEVICE))
    expected, actual = blocks
    compiled = torch.compile(actual, fullgraph=True)
    for _ in range(2):
        x = torch.randn(2, 4, 5, 5, device=DEVICE)
        inputs = [x.clone().requires_grad_() for _ in blocks]
        outputs = [expected(inputs[0]), compiled(inputs[1])]
        gradients = [
            torch.autograd.grad(y.sin().sum(), [z, *b.parameters()])
            for y, z, b in zip(outputs, inputs, blocks, strict=True)
        ]
        for a, b in zip((outputs[0], *gradients[0]), (outputs[1], *gradients[1]), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5)
    for (name, a), b in zip(expected.state_dict().items(), actual.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=name)
    for b in blocks:
        b.eval()
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), expected(x), rtol=1e-4, atol=1e-5)


def test_any_number_of_parameters(catalogue):
    @dcnet.magnitude
    def many(n, a=1.0, b=1.0, c=1.0, d=1.0):
        """a·b·c·d·‖x‖"""
        return a * b * c * d * n, a * b * c * d

    x, weight = torch.randn(1, 3, 5, 5, device=DEVICE), torch.randn(4, 3, 3, 3, device=DEVICE)
    fused, expected = (
        dcnet.decoupled_conv2d(x, weight, magnitude="many:a=2,c=0.5,d=3", impl=impl) for impl in ("fused", "reference")
    )
    torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-5)


def test_reasons(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, weight = torch.randn(1, 3, 5, 5).double(), torch.randn(4, 3, 3, 3).double()
    with pytest.raises(ValueError, match=r"impl='fused' cannot run here: the input is on cpu.*; the input is float64"):
        dcnet.decoupled_conv2d(x, weight, impl="fused")
    assert "TRITON_INTERPRET" not in os.environ


def test_empty_batch():
    layer = dcnet.DecoupledConv2d(3, 4, 3, impl="fused").to(DEVICE)
    assert layer(torch.randn(0, 3, 5, 5, device=DEVICE)).shape == (0, 4, 3, 3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("activation", "with_residual"),
    [(None, False), ("relu", False), ("relu", True), (None, True), ("prelu", False), ("prelu", True)],
)
def test_block(activation, with_residual, training):
    """Epilogue, BatchNorm, residual and activation in shared passes against the same one after the other."""
    from dcnet.layers import Block

    for channels_last in (False, True):
        results = []
        for impl in ("reference", "fused"):
            torch.manual_seed(0)
            conv = dcnet.DecoupledConv2d(
                4, 6, 3, padding=1, groups=1 if channels_last else 2, angular="sigmoid:k=learned", impl=impl
            )
            block = Block(conv, torch.nn.BatchNorm2d(6), activation).to(DEVICE)
            torch.nn.init.normal_(block.norm.weight)
            torch.nn.init.normal_(block.norm.bias)
            if activation == "prelu":
                block.slope.data.fill_(0.2)
            x = torch.randn(3, 4, 5, 4, device=DEVICE)
            residual = torch.randn(3, 6, 5, 4, device=DEVICE)
            if channels_last:
                x, residual = x.to(memory_format=torch.channels_last), residual.to(memory_format=torch.channels_last)
            x.requires_grad_()
            residual.requires_grad_()
            block(x)  # gives the averages something to hold
            block.train(training)
            y = block(x, residual if with_residual else None)
            wanted = [x, *block.parameters(), *([residual] if with_residual else [])]
            incoming = torch.cos(torch.arange(y.numel(), device=DEVICE, dtype=torch.float32)).reshape(y.shape)
            results.append([y, *torch.autograd.grad(y, wanted, incoming), *block.buffers()])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(b, a, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("activation", "magnitude", "angular", "weighting", "bias", "compiled"),
    [
        ("relu", "tanh", "cosine", None, False, False),  # backward recovers the dot product from the output
        ("relu", "sphere", "cosine", "linear", False, False),
        ("relu", "seg", "cosine", "joint", False, False),
        ("relu", "log", "cosine", "separate", False, False),
        ("relu", "tanh", "cosine", None, True, False),
        ("relu", "ball", "square_cosine", None, False, False),
        ("silu", "tanh", "cosine", None, False, False),
        ("gelu", "linear", "sigmoid:k=learned", None, True, False),
        ("prelu", "tanh", "cosine", None, False, False),
        ("relu", "tanh", "cosine", None, False, True),
        ("silu", "seg", "cosine", None, True, True),
    ],
)
def test_block_without_norm(activation, magnitude, angular, weighting, bias, compiled):
    """Two blocks, the first of which hands its energy on, against the same one operation after the other."""
    from dcnet.layers import Block, Chain

    results = []
    for impl in ("reference", "fused"):
        torch.manual_seed(0)
        options = {"magnitude": magnitude, "angular": angular, "weighting": weighting, "bias": bias, "impl": impl}
        first = Block(dcnet.DecoupledConv2d(4, 8, 3, padding=1, groups=1, **options), None, activation)
        chain = Chain(first, Block(dcnet.DecoupledConv2d(8, 6, 3, groups=2, **options), None, activation)).to(DEVICE)
        x = torch.randn(3, 4, 5, 4, device=DEVICE).to(memory_format=torch.channels_last).requires_grad_()
        call = torch.compile(chain, fullgraph=True, dynamic=False) if compiled and impl == "fused" else chain
        y = call(x)
        incoming = torch.cos(torch.arange(y.numel(), device=DEVICE, dtype=torch.float32)).reshape(y.shape)
        wanted = [x, *chain.parameters()]
        results.append([y, *torch.autograd.grad(y, wanted, incoming), *chain.buffers()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-4, atol=2e-5)


def test_a_relu_block_keeps_no_map_but_its_output():
    from dcnet.layers import Block

    block = Block(dcnet.DecoupledConv2d(4, 8, 3, padding=1, impl="fused"), None, "relu").to(DEVICE)
    x = torch.randn(2, 4, 6, 6, device=DEVICE, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = block(x)
    maps = {t.data_ptr() for t in kept if t.shape == y.shape}
    assert maps == {y.data_ptr()}
    y = block(x)
    y.detach().mul_(2.0)  # backward would read it; a plain ReLU refuses likewise
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.skipif(GPU, reason="the interpreter takes functions one by one")
def test_lean_arithmetic_for_16_bits():
    """`triton_math16` against float64: a few 1e-7, 0 stays 0 and ±1 stays ±1, and no name is missing."""
    import triton
    import triton.language as tl

    from dcnet.ops.fused import triton_math16

    assert set(triton_math16.__all__) == m.NAMES

    @triton.jit
    def apply(x_ptr, y_ptr, F: tl.constexpr, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(y_ptr + i, F(tl.load(x_ptr + i)))

    def values(function, x):
        y = torch.empty_like(x)
        apply[(1,)](x, y, function, x.numel())
        return y

    angles = torch.linspace(-1.0, 1.0, 513)[:512].contiguous()
    norms = torch.logspace(-4, 2, 512)
    for function, x, exact in (
        (triton_math16.tanh, norms, torch.tanh),
        (triton_math16.tanh, angles, torch.tanh),
        (triton_math16.asin, angles, torch.asin),
        (triton_math16.log1p, norms, torch.log1p),
        (triton_math16.rsqrt, norms, torch.rsqrt),
    ):
        expected = exact(x.double())
        assert ((values(function, x) - expected).abs() / (1.0 + expected.abs())).max() < 4e-6
    ends = torch.tensor([0.0, 1.0, -1.0, 0.0])
    assert values(triton_math16.asin, ends).tolist() == pytest.approx(
        [0.0, math.pi / 2, -math.pi / 2, 0.0], abs=0.0, rel=1e-7
    )
    assert values(triton_math16.tanh, torch.tensor([0.0, 100.0, -100.0, 0.0])).tolist() == pytest.approx(
        [0.0, 1.0, -1.0, 0.0], abs=0.0, rel=2e-7
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_a_residual_is_broadcast(compiled):
    from dcnet.layers import Block

    results = []
    for impl in ("eager", "fused"):
        torch.manual_seed(0)
        block = Block(dcnet.DecoupledConv2d(4, 6, 3, padding=1, impl=impl), torch.nn.BatchNorm2d(6), "relu").to(DEVICE)
        if compiled and impl == "fused":
            block.compile(fullgraph=True)
        x, residual = torch.randn(2, 4, 5, 5, device=DEVICE), torch.randn(2, 6, 1, 1, device=DEVICE, requires_grad=True)
        y = block(x, residual)
        results.append((y, *torch.autograd.grad(y.sin().sum(), [residual, *block.parameters()])))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)
