"""In compiled graphs, kernels add up two incoming gradients, and normalized kernels are computed again in backward."""

import copy
import operator

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dcnet
from dcnet.layers import Block, Chain, HandsOn, hand_on

pytest.importorskip("triton")

from dcnet.ops.fused import graph_sums, operands
from dcnet.util import provenance

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, inside the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKWARD = torch.ops.dcnet.decoupled_backward.default
ADD = torch.ops.aten.add.Tensor


def block(*sizes, activation="relu", norm=True, **options):
    conv = dcnet.DecoupledConv2d(*sizes, 3, padding=1, impl="fused", **options)
    return Block(conv, nn.BatchNorm2d(sizes[1]) if norm else None, activation)


class Residual(HandsOn):
    def __init__(self, width):
        super().__init__()
        self.first, self.last = block(width, width), block(width, width, magnitude="seg")

    def with_energy(self, x, energy, leave):
        y, of_y = hand_on(self.first, x, energy, True)
        return hand_on(self.last, y, of_y, leave, x)


def image(*shape):
    return torch.randn(*shape, device=DEVICE).to(memory_format=torch.channels_last)


# -- the graph ---------------------------------------------------------------------------------------------------------


def test_a_residual_network(monkeypatch):
    """Its gradients stay what they are, and its graph has no sum left."""
    graphs = []
    take_sum = graph_sums.take_sum
    monkeypatch.setattr(graph_sums, "take_sum", lambda node: (graphs.append(node.graph), take_sum(node)))
    torch.manual_seed(0)
    net = Chain(block(3, 8), Residual(8), Residual(8)).to(DEVICE, memory_format=torch.channels_last)
    twin, x, e = copy.deepcopy(net), image(2, 3, 5, 4), image(2, 8, 5, 4)
    torch.compiler.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        y = torch.compile(net, fullgraph=True)(x)
        y.backward(e)
    expected = twin(x)
    expected.backward(e)
    torch.testing.assert_close(y, expected)
    for (name, one), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    calls = [node for node in graphs[-1].nodes if node.target is BACKWARD]
    assert [node.args[1] is not None for node in calls] == [False, False, True, False, True]
    for node in calls:  # what Inductor knows of the arguments is still true of them
        (first, second, *_), _ = node.meta.get("eager_input_vals", (node.args, {}))
        assert (first is None, second is None) == (False, node.args[1] is None)
    assert not any(node.target is ADD for node in graphs[-1].nodes)


def graph_with(parts=2, alpha=1, readers=1, shape=(2, 4, 3, 3), source=BACKWARD, twice=False, known=True):
    """The call whose incoming gradient is a sum, in a graph made by hand."""
    graph = torch.fx.Graph()

    def put(target, *arguments, val=None, **options):
        node = graph.call_function(target, arguments, options)
        node.meta["val"] = torch.empty(2, 4, 3, 3) if val is None else val
        return node

    x = graph.placeholder("x")
    one = put(operator.getitem, put(BACKWARD, x, None, x), 0)
    other = put(operator.getitem, put(source, x, None, x), 5, val=torch.empty(shape))
    options = {} if alpha == 1 else {"alpha": alpha}
    total = put(ADD, one, other, **options)
    for _ in range(parts - 2):
        total = put(ADD, total, put(operator.getitem, put(BACKWARD, x, None, x), 0))
    call = put(BACKWARD, total, None, total if twice else x)
    if not known:
        del other.meta["val"]
    graph.output([call, *[total] * (readers - 1)])
    return graph, call, (one, other)


@pytest.mark.parametrize("source", [BACKWARD, torch.ops.aten.convolution_backward.default])
def test_a_sum_is_taken(source):
    graph, call, parts = graph_with(source=source)
    graph_sums.take_sum(call)
    assert call.args[:2] == parts
    assert call.args[2].op == "placeholder"
    assert not any(node.target is ADD for node in graph.nodes)
    graph.lint()


@pytest.mark.parametrize(
    "case",
    [
        {"readers": 2},  # somebody else needs the sum
        {"alpha": 2},
        {"shape": (1, 4, 1, 1)},  # broadcast
        {"parts": 3},  # Inductor adds all three in one pass
        {"source": torch.ops.aten.split.Tensor},  # not kernels, so Inductor adds where it computes the summand
        {"twice": True},  # the call itself reads the sum in another place
        {"known": False},  # a pass of somebody else's made a summand, and did not say what it is
    ],
    ids=str,
)
def test_other_sums_stay(case):
    graph, call, _ = graph_with(**case)
    before = str(graph)
    graph_sums.take_sum(call)
    assert str(graph) == before


def test_graphs_name_the_code_they_were_made_for():
    """Or a graph in PyTorch's cache on disk, made by another version, would call this version's operators."""
    graphs = []

    def keep(module, inputs):
        graphs.append(module.graph)
        return module

    torch.compiler.reset()
    torch.compile(block(3, 8).to(DEVICE), fullgraph=True, backend=keep)(image(2, 3, 5, 4))
    (call,) = [
        node
        for node in graphs[0].nodes
        if node.target in (torch.ops.dcnet.decoupled, torch.ops.dcnet.decoupled.default)
    ]
    assert operands.CODE in call.args[-3]
    assert operands.as_options(*call.args[-3:]).operator.names[:2] == ("tanh", "cosine")


def test_the_code_has_a_number_of_its_own(tmp_path):
    found = []
    for name, text in (("__init__", ""), ("one", "1"), ("one", "2"), ("two", "")):
        (tmp_path / f"{name}.py").write_text(text)
        found.append(provenance.code_hash(tmp_path))
    assert len(set(found)) == 4


# -- the operator ------------------------------------------------------------------------------------------------------


class Split(TorchDispatchMode):
    """Gives each call of `decoupled_backward` its incoming gradient in two parts, and compares the results."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func is BACKWARD:
            self.calls += 1
            e = args[0]
            part = torch.randint_like(e, -4, 5)
            # another memory order, and a sum that is exact
            parts = (e - part, part.contiguous())
            assert torch.equal(parts[0] + parts[1], e)
            for one, other in zip(results, func(*parts, *args[2:]), strict=True):
                assert torch.equal(one, other)
        return results


LAYERS = {
    "BatchNorm": lambda: block(4, 8),
    "BatchNorm, PReLU": lambda: block(4, 8, activation="prelu"),
    "no activation": lambda: block(4, 8, activation=None),
    "alone": lambda: block(4, 8, activation=None, norm=False, bias=True),
    "depthwise": lambda: block(4, 4, groups=4),
    "residual": lambda: Residual(4).last,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_the_sum_of_two_gradients(name, dtype, monkeypatch):
    torch.manual_seed(0)
    layer = LAYERS[name]().to(DEVICE)
    x = image(2, 4, 5, 4).requires_grad_()
    inputs = (x, image(2, 4, 5, 4)) if name == "residual" else (x,)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype is torch.bfloat16):
        layer(*inputs)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as a graph does, call the operators
        y = layer(*inputs)
    e = torch.randint(-8, 9, y.shape, device=DEVICE).to(y.dtype, memory_format=torch.channels_last)
    with Split() as split:
        y.backward(e)
    assert split.calls == 1


def test_kernels_are_not_kept(monkeypatch):
    """A graph saves no second copy of the weight; backward computes what forward did, up to a rounding."""
    torch.manual_seed(0)
    layer, x = block(4, 8).to(DEVICE), image(2, 4, 5, 4)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    saved, units = [], []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = func(*args, **(kwargs or {}))
            if func is torch.ops.dcnet.decoupled_forward.default:
                units.append(results[4])
            if func is BACKWARD:
                units.append(args[-5])
            return results

    with (
        torch.autocast(DEVICE, torch.bfloat16),
        Look(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        layer(x).sum().backward()
    weights = {t.data_ptr() for t in saved if t.shape == (8, 4, 3, 3)}
    assert weights == {layer.conv.weight.data_ptr()}
    assert units[0].dtype is torch.bfloat16
    torch.testing.assert_close(*units, rtol=2**-7, atol=0)


def test_kernels_of_length_zero(monkeypatch):
    """They stay zero, and their gradients finite, as in eager mode."""
    torch.manual_seed(0)
    layer, x = block(4, 8, eps=0.0).to(DEVICE), image(2, 4, 5, 4).requires_grad_()
    with torch.no_grad():
        layer.conv.weight[3] = 0.0
    found = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        found.append(torch.autograd.grad(layer(x).square().sum(), [x, layer.conv.weight]))
    for eager, traced in zip(*found, strict=True):
        assert traced.isfinite().all()
        torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-5 * eager.abs().max().item())
