"""The recorded passes of the epilogue write over nothing of the caller's; a ReLU in the same pass changes nothing."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import dcnet
from dcnet import learnable, m
from dcnet.layers import Block
from dcnet.ops.cpu import autograd, passes
from dcnet.ops.cpu.record import record

FULL = (2, 3, 5, 7)


def forward(x, row):
    t = torch.tanh(x * row)
    return t * x + 1.0 * row, t.sum(0)


def backward(x, row, e):
    t = torch.tanh(x * row)
    slope = 1.0 - t * t
    return e * (t + x * slope * row), (e * x * slope * x).sum((0, 3)).unsqueeze(-1)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_results_are_right_and_inputs_as_they_were(keep, once):
    x, row = {"x": torch.randn(FULL, dtype=torch.float64)}, {"row": torch.randn(3, 5, 1, dtype=torch.float64)}
    later = {"e": torch.randn(FULL, dtype=torch.float64)}
    inputs, same = (x, row) if once else ({**x, **row}, {})
    pair = record(forward, backward, inputs, later, torch.Size(FULL), keep, once=same)
    before = {name: tensor.clone() for name, tensor in {**x, **row, **later}.items()}
    y, grad_x = torch.empty(FULL, dtype=torch.float64), torch.empty(FULL, dtype=torch.float64)
    kept = [torch.empty(FULL, dtype=torch.float64) for _ in range(pair.kept)]
    ahead, behind = pair.forward(*same.values()), pair.backward(*same.values())
    for _ in range(2):  # what is made ready is there for every chunk
        (total,) = ahead(y, *kept, *inputs.values())
        (of_row,) = behind(grad_x, *kept, *inputs.values(), *later.values())
        torch.testing.assert_close((y, total), forward(**x, **row))
        torch.testing.assert_close((grad_x, of_row), backward(**x, **row, **later))
        of_row.zero_()  # the caller's own
    for name, tensor in {**x, **row, **later}.items():
        assert torch.equal(tensor, before[name]), name
    if keep:  # the one slow function, and backward takes it from there
        (t,) = kept
        torch.testing.assert_close(t, torch.tanh(x["x"] * row["row"]))
        behind(grad_x, torch.zeros(FULL, dtype=torch.float64), *inputs.values(), *later.values())
        torch.testing.assert_close(grad_x, later["e"] * x["x"] * row["row"])


def test_what_is_the_same_for_every_piece_is_computed_once():
    def formula(x, row):
        tripled = torch.exp(row) * 3.0
        return x * tripled + tripled, tripled

    one = torch.ones(FULL, dtype=torch.float64)
    pair = record(
        formula,
        lambda x, e, row: (e * row,),
        {"x": one},
        {"e": one},
        torch.Size(FULL),
        True,
        once={"row": one[0, ..., :1]},
    )
    row = torch.randn(3, 5, 1, dtype=torch.float64)
    program, expected = pair.forward(row), torch.exp(row) * 3.0
    row.zero_()  # too late
    for _ in range(2):
        x, y = torch.randn(FULL, dtype=torch.float64), torch.empty(FULL, dtype=torch.float64)
        (tripled,) = program(y, x)
        torch.testing.assert_close((y, tripled), (x * expected + expected, expected))
        tripled.zero_()  # the caller's own: the next chunk does not change


def test_what_is_read_later_or_handed_out_is_not_written_over():
    def formula(x, row):
        doubled, tripled = x * 2.0, x * 3.0
        y = (tripled - row) * row
        return (doubled + 1.0) * row, doubled, (y * tripled).sum(0)

    def later(x, row, e):
        a = e * row
        return a + 1.0, (a * x).sum(0)

    one = torch.ones(FULL, dtype=torch.float64)
    pair = record(formula, later, {"x": one, "row": one[0, ..., :1]}, {"e": one}, torch.Size(FULL), True)
    x, row, e = (
        torch.randn(FULL, dtype=torch.float64),
        torch.randn(3, 5, 1, dtype=torch.float64),
        torch.randn(FULL, dtype=torch.float64),
    )
    y, grad_x = torch.empty(FULL, dtype=torch.float64), torch.empty(FULL, dtype=torch.float64)
    program, expected = pair.forward(), formula(x, row)
    results = program(y, x, row)
    torch.testing.assert_close((y, *results), expected)
    program(torch.empty_like(y), x + 1.0, row)  # the next chunk leaves the results of the first as they are
    torch.testing.assert_close((y, *results), expected)
    (total,) = pair.backward()(grad_x, x, row, e)
    torch.testing.assert_close((grad_x, total), later(x, row, e))


def test_what_is_kept_stays():
    def forward(x):
        return (torch.tanh(x) * x + 2.0,)

    pair = record(
        forward,
        lambda x, e: (e * torch.tanh(x),),
        {"x": torch.ones(FULL, dtype=torch.float64)},
        {"e": torch.ones(FULL, dtype=torch.float64)},
        torch.Size(FULL),
        keep=True,
    )
    x, y, kept = (
        torch.randn(FULL, dtype=torch.float64),
        torch.empty(FULL, dtype=torch.float64),
        torch.empty(FULL, dtype=torch.float64),
    )
    pair.forward()(y, kept, x)
    torch.testing.assert_close(kept, torch.tanh(x))  # the product that reads it last does not write over it
    torch.testing.assert_close(y, *forward(x))


def run_of(program):
    """The module behind the pass over a chunk."""
    return inspect.getclosurevars(program).nonlocals["run"].__self__


def test_a_number_of_one_and_repetitions_cost_nothing():
    def twice(x):
        return (1.0 * x) * torch.tanh(x) + x * torch.tanh(x) / 1.0, None

    pair = record(
        twice,
        lambda x, e: (None, None),
        {"x": torch.ones(FULL, dtype=torch.float64)},
        {"e": torch.ones(FULL, dtype=torch.float64)},
        torch.Size(FULL),
        keep=True,
    )
    operations = [node for node in run_of(pair.forward).graph.nodes if node.op.startswith("call")]
    assert len(operations) == 3  # tanh, one product, one sum
    assert pair.kept == 0  # no gradient needs it


class Counted(TorchDispatchMode):
    """Counts the operators that give tensors of a certain size."""

    def __init__(self, size):
        super().__init__()
        self.size, self.counts = size, {}

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self.size:
            name = function.overloadpacket.__name__
            self.counts[name] = self.counts.get(name, 0) + 1
        return result


def test_a_fixed_exponent_costs_nothing_more():
    """The slope in p, with its logarithm, is computed only where p is learned; the power once, kept for backward."""
    found = {}
    for p in ("3", "learned"):
        layer = dcnet.DecoupledConv2d(2, 4, 3, magnitude="linear", angular=f"power_cosine:p={p}")
        layer(torch.randn(3, 2, 6, 6, requires_grad=True)).sum().backward()  # records the programs
        with Counted(3 * 4 * 4 * 4) as counted:
            layer(torch.randn(3, 2, 6, 6, requires_grad=True)).sum().backward()
        found[p] = counted.counts
    assert "log" not in found["3"]
    assert found["3"]["pow"] == found["learned"]["pow"] == 1
    assert found["learned"]["log"] == 1


def test_no_map_is_kept_where_no_gradient_is_wanted(monkeypatch):
    counts = []
    programs = passes.programs_of
    monkeypatch.setattr(
        passes, "programs_of", lambda *arguments: counts.append(programs(*arguments).kept) or programs(*arguments)
    )
    layer, x = dcnet.DecoupledConv2d(3, 4, 3), torch.randn(2, 3, 5, 5)
    layer(x)
    with torch.no_grad():
        layer(x)
    with torch.inference_mode():
        layer(x)
    assert counts == [1, 0, 0]


OPERATORS = [
    ("tanh", "cosine", None),
    ("sphere", "cosine", None),
    ("seg", "sigmoid:k=learned", "linear"),
    ("ball", "power_cosine", "joint"),
]


def blocks(magnitude, angular, weighting, bias):
    """A block as it is, and one whose ReLU follows by itself."""
    torch.manual_seed(0)
    conv = dcnet.DecoupledConv2d(
        4, 6, 3, padding=1, groups=2, bias=bias, magnitude=magnitude, angular=angular, weighting=weighting
    ).double()
    block = Block(conv)
    return block, nn.Sequential(conv, nn.ReLU())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("magnitude", "angular", "weighting"), OPERATORS)
def test_relu_in_the_same_pass(magnitude, angular, weighting, bias, channels_last):
    results = []
    for model in blocks(magnitude, angular, weighting, bias):
        x = torch.randn(3, 4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x = x.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format).requires_grad_()
        y = model(x)
        given = [x, *model.parameters()]
        first = torch.autograd.grad((y * y.detach().cos()).sum(), given, retain_graph=True)
        with_graph = torch.autograd.grad((y * y).sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(gradient.square().sum() for gradient in with_graph), given)
        results.append([y, *first, *second])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert 0.2 < float((results[0][0] == 0.0).float().mean()) < 0.8


def test_relu_of_a_clamped_angle():
    """Where d/n is rounded to 1 or beyond, the clamp lets no gradient through: the other program."""
    x = torch.full((1, 1, 2, 2), 1000.0, requires_grad=True)
    layer = dcnet.DecoupledConv2d(1, 2, 1, magnitude="linear", angular="square_cosine", eps=0.0)
    layer.weight.data = torch.tensor([1.0, -1.0]).reshape(2, 1, 1, 1)
    y = Block(layer)(x)
    assert torch.equal(y, torch.tensor([1000.0, 0.0]).reshape(1, 2, 1, 1).expand(1, 2, 2, 2))
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))  # h' alone: cos θ is stuck at 1


def test_angles_beyond_one_in_one_piece(monkeypatch):
    """Rounding brings d/n above 1 in some of the patches of the third image, and nowhere else."""
    monkeypatch.setattr("dcnet.ops.cpu.chunks.CHUNK", 128)
    torch.manual_seed(0)
    layer = dcnet.DecoupledConv2d(16, 4, 1, angular="linear", eps=0.0, impl="eager")
    reference = copy.deepcopy(layer)
    reference.impl = "reference"
    x = torch.randn(5, 16, 8, 8)
    x[2] = layer.weight.detach()[0].reshape(16, 1, 1) * torch.rand(8, 8)
    unit = layer.weight.detach() / layer.weight.detach().flatten(1).norm(dim=1).reshape(4, 1, 1, 1)
    beyond = nn.functional.conv2d(x, unit) / x.square().sum(1, keepdim=True).sqrt() > 1.0
    others = [0, 1, 3, 4]
    assert beyond[2].any()
    assert not beyond[others].any()
    results = []
    for each in (layer, reference):
        given = x.clone().requires_grad_()
        y = each(given)
        y.sum().backward()
        results.append((y.detach(), given.grad, each.weight.grad))
    assert all(result.isfinite().all() for result in results[0])
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-3)  # asin is steep at 1
    torch.testing.assert_close(results[0][1][others], results[1][1][others], rtol=1e-3, atol=1e-4)


def test_half_precision_block():
    torch.manual_seed(0)
    layer = dcnet.DecoupledConv2d(4, 6, 3, padding=1)
    x = torch.randn(2, 4, 6, 6).bfloat16()
    block, apart = Block(layer.bfloat16()), nn.Sequential(layer, nn.ReLU())
    gradients = []
    for model in (block, apart):
        given = x.clone().requires_grad_()
        y = model(given)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        gradients.append((y.detach(), given.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def register_awkward():
    """Formulas that registration admits and that a careless rewriting gets wrong."""

    @dcnet.magnitude
    def hat(n, rho):
        """min(‖x‖/ρ, 1)"""
        inside = n < rho
        return m.minimum(n / rho, 1.0), inside / rho, -(inside / rho) * n / rho

    @dcnet.magnitude
    def clamped(n, rho):
        """‖x‖·max(ρ, 0.1): a clamp before the first chunk"""
        r = m.maximum(rho, 0.1)
        return n * r, r, n * m.step(rho - 0.1)

    @dcnet.angular
    def kinked(c):
        """comparisons as numbers"""
        return m.maximum(c, 0.0) + m.maximum(c - 0.5, 0.0), (c > 0.0) * 1.0 + (c > 0.5) * 1.0

    @dcnet.angular
    def leaky(c):
        """cos θ, an eighth of it below 0"""
        on = (c > 0.0) * 1.0
        return c * on + 0.125 * c * (1.0 - on), on + 0.125 * (1.0 - on)

    @dcnet.angular
    def plus(c):
        """3·cos θ"""
        p = +c
        return p * 2.0 + c, 3.0

    @dcnet.angular
    def shifted(c, bias: learnable(start=0.5, floor=0.01) = 0.3):
        """cos θ + a number whose gradient is that of the layer's bias"""
        return c + bias, 1.0, 1.0


@pytest.mark.parametrize(
    ("magnitude", "angular"),
    [
        ("hat", "cosine"),
        ("clamped", "cosine"),
        ("sphere", "kinked"),
        ("tanh", "kinked"),
        ("tanh", "leaky"),
        ("tanh", "plus"),
        ("sphere", "shifted:bias=learned"),
    ],
)
def test_awkward_formulas(magnitude, angular, monkeypatch):
    register_awkward()
    monkeypatch.setattr("dcnet.ops.cpu.chunks.CHUNK", 100)  # several chunks
    torch.manual_seed(0)
    eager = dcnet.DecoupledConv2d(
        3, 5, 3, padding=1, bias=True, magnitude=magnitude, angular=angular, impl="eager"
    ).double()
    reference = copy.deepcopy(eager)
    reference.impl = "reference"
    results = []
    for layer in (eager, reference):
        x = torch.randn(6, 3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        for _ in range(2):  # gradients add up, each in memory of its own
            layer(x).sin().sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_batched_gradients_of_a_convolution():
    layer = dcnet.DecoupledConv2d(2, 4, 3, groups=2).double().eval()
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    both = [torch.autograd.functional.jacobian(layer, x, vectorize=vectorize) for vectorize in (False, True)]
    torch.testing.assert_close(*both)


@pytest.mark.parametrize("weighting", [None, "linear", "joint"])
def test_batched_gradients_of_kernels(weighting):
    x, weight = torch.randn(2, 2, 4, 4, dtype=torch.float64), torch.randn(4, 2, 3, 3, dtype=torch.float64)

    def of(weight):
        return dcnet.decoupled_conv2d(x, weight, magnitude="tanh", radius=1.0, weighting=weighting, impl="eager")

    both = [torch.autograd.functional.jacobian(of, weight, vectorize=vectorize) for vectorize in (False, True)]
    torch.testing.assert_close(*both)


@pytest.mark.parametrize("angular", ["linear", "sigmoid", "square_cosine"])
@pytest.mark.parametrize("magnitude", ["linear", "tanh", "mix"])
def test_patches_of_zeros_without_eps(magnitude, angular):
    """1/‖x‖ is 0 there, not the inverse of ‖x‖."""
    x, weight = torch.randn(2, 4, 6, 6, dtype=torch.float64), torch.randn(8, 4, 3, 3, dtype=torch.float64)
    x[0] = 0.0
    radius = 1.0 if magnitude == "tanh" else None
    gradients = []
    for impl in ("eager", "reference"):
        given = x.clone().requires_grad_()
        dcnet.decoupled_conv2d(
            given, weight, magnitude=magnitude, angular=angular, radius=radius, eps=0.0, impl=impl
        ).sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("size", [1e-14, 1.0, 1e15])
def test_gradients_of_kernels_of_any_size(size):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 6, 6), size * torch.randn(8, 4, 3, 3)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        given = weight.detach().clone().to(dtype).requires_grad_()
        dcnet.decoupled_conv2d(x.to(dtype), given, magnitude="tanh", radius=1.0, eps=0.0, impl="eager").sum().backward()
        gradients.append(given.grad.double() * size)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def test_meta_fake_and_recorded():
    layer = dcnet.DecoupledConv2d(2, 4, 3, padding=1, device="meta")
    assert layer(torch.empty(1, 2, 6, 6, device="meta")).shape == (1, 4, 6, 6)
    layer, x = dcnet.DecoupledConv2d(2, 4, 3).eval(), torch.randn(1, 2, 6, 6)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (1, 4, 4, 4)
    for tracing in ("real", "fake", "symbolic"):
        torch.testing.assert_close(make_fx(layer, tracing_mode=tracing, _allow_non_fake_inputs=True)(x)(x), layer(x))


def test_norms_without_a_gradient_have_none():
    layer, x = dcnet.DecoupledConv2d(2, 4, 3, impl="eager"), torch.randn(2, 2, 6, 6)
    seen = []
    real = autograd.AutogradFunctions.epilogue
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            autograd.AutogradFunctions,
            "epilogue",
            staticmethod(lambda dot, norms, *rest, **more: seen.append(norms) or real(dot, norms, *rest, **more)),
        )
        layer(x)
        layer(x.requires_grad_())
    assert [norms.requires_grad for norms in seen] == [False, True]


def test_an_empty_batch_has_gradients_of_zero():
    layer = dcnet.DecoupledConv2d(2, 4, 3, bias=True, angular="sigmoid:k=learned", radius=1.0)
    layer(torch.empty(0, 2, 6, 6)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
