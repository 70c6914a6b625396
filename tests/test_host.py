"""The autograd function in C++ computes, bit by bit, what the one in Python does, and autograd treats it the same."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from helpers import OPERATORS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dcnet
from dcnet.layers import Block, Chain

pytest.importorskip("triton")

from dcnet.ops.fused.host import HOST
from dcnet.ops.fused.operands import ALONE, NO_MEAN, Operands, Options
from dcnet.ops.fused.plan import plan_of
from dcnet.ops.operator import make_operator

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, inside the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="in Triton's interpreter; test_host_gpu.py is for a GPU"),
]


@pytest.fixture
def native(built_host, monkeypatch):
    """The module in C++, in use, with kernels launched by Triton's interpreter."""
    monkeypatch.setattr(HOST, "launch_from_python", True)
    monkeypatch.setattr(HOST, "module", built_host)
    HOST.load(0)  # other tests have given it other functions
    return HOST.module


def in_python(function, *arguments):
    module, HOST.module = HOST.module, None
    try:
        return function(*arguments)
    finally:
        HOST.module = module


def conv(*sizes, **options):
    return dcnet.DecoupledConv2d(*sizes, impl="fused", **options)


def steps(make, x, forward=lambda net, x: net(x), count=3):
    """Outputs, gradients and buffers of some steps of a new network."""
    torch.manual_seed(1)
    net, found = make(), []
    for _ in range(count):
        net.zero_grad()
        x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)
        y = forward(net, x)
        y.float().sin().sum().backward()
        found += [y.detach(), x.grad, *[p.grad for p in net.parameters()], *[b.clone() for b in net.buffers()]]
    return found


def assert_same_bits(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        if e is None:
            assert a is None
        else:
            assert (a.dtype, a.shape, a.stride()) == (e.dtype, e.shape, e.stride())
            assert torch.equal(a.nan_to_num(7.5), e.nan_to_num(7.5))


def check(native, make, x, layers=1, **options):
    """Compare three steps; from the second on, C++ must have run every layer."""
    expected = in_python(lambda: steps(make, x, **options))
    before = native.counts()
    assert_same_bits(steps(make, x, **options), expected)
    after = native.counts()
    assert after["forward"] - before["forward"] == 2 * layers
    assert after["backward"] - before["backward"] == 2 * layers
    assert after["backward in Python"] == before["backward in Python"]


def image(*shape, last=False, grad=True):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    x = x.to(memory_format=torch.channels_last) if last else x
    return x.requires_grad_(grad)


USUAL = [o for o in OPERATORS if o[2] != "separate" and o[:2] != ("linear", "cosine")]


@pytest.mark.parametrize("operator", USUAL[::16], ids=str)
def test_operators(native, operator):
    magnitude, angular, weighting = operator

    def make():
        return conv(3, 4, 3, bias=True, padding=1, magnitude=magnitude, angular=angular, weighting=weighting)

    check(native, make, image(2, 3, 4, 5))


@pytest.mark.parametrize("activation", [None, "relu", "prelu", "gelu"])
@pytest.mark.parametrize("last", [False, True])
def test_blocks(native, activation, last):
    def make():
        return Block(conv(4, 8, 3, padding=1, angular="sigmoid:k=learned"), nn.BatchNorm2d(8), activation)

    check(native, make, image(2, 4, 5, 4, last=last))


@pytest.mark.parametrize(("activation", "bias"), [("relu", False), ("relu", True), ("gelu", True)])
def test_blocks_without_norm(native, activation, bias):
    """With a ReLU and no bias, backward recovers the dot product from the output."""

    def make():
        last = Block(conv(8, 8, 3, bias=bias), None, activation)
        return Chain(Block(conv(4, 8, 3, padding=1, bias=bias), None, activation), last)

    check(native, make, image(2, 4, 5, 4, last=True), layers=2)


class Residual(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.first = Chain(
            Block(conv(8, 8, 3, padding=1), nn.BatchNorm2d(8)), Block(conv(8, 16, 1), nn.BatchNorm2d(16))
        )
        self.last = Block(conv(16, 8, 1, magnitude="seg"), nn.BatchNorm2d(8), activation)

    def forward(self, x):
        y, energy = self.first(x), None
        z, energy = self.last.with_energy(y, energy, True, x.transpose(2, 3).contiguous().transpose(2, 3))
        return z if energy is None else z + energy.sum(0)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_residuals_and_energies(native, activation):
    check(native, lambda: Residual(activation), image(2, 8, 4, 4, last=True), layers=3)


@pytest.mark.parametrize("shape", [(2, 8, 1, 1), (8, 1, 1), (2, 1, 4, 4)], ids=str)
def test_residuals_are_broadcast(native, shape):
    """As y + residual would; kernels read a map of the output's size."""
    torch.manual_seed(1)
    block = Block(conv(8, 8, 1), nn.BatchNorm2d(8))
    other = copy.deepcopy(block)
    other.conv.impl = "eager"
    x, residual = image(2, 8, 4, 4), torch.randn(shape, requires_grad=True)
    block(x, torch.zeros(2, 8, 4, 4)), other(x, torch.zeros(2, 8, 4, 4))  # now C++ knows the layer
    results = []
    for net in (block, other):
        y = net(x, residual)
        results.append((y, *torch.autograd.grad(y.sin().sum(), [x, residual])))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


OTHERS = {
    "groups": lambda: conv(4, 6, 3, groups=2, padding=(1, 2), stride=(2, 1), dilation=(1, 2)),
    "cumulative": lambda: Block(conv(4, 4, 3, momentum=None), nn.BatchNorm2d(4, momentum=None)),
    "without averages": lambda: Block(conv(4, 4, 3), nn.BatchNorm2d(4, affine=False, track_running_stats=False)),
    "literal radius": lambda: conv(4, 4, 3, radius=0.5),
    "padding written out": lambda: conv(4, 4, 3, padding=1, padding_mode="reflect"),
    "frozen": lambda: conv(4, 4, 3, bias=True).requires_grad_(False),
    "frozen kernels": lambda: freeze(conv(4, 4, 3, bias=True), "weight"),
}


def freeze(layer, name):
    getattr(layer, name).requires_grad_(False)
    return layer


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_layers(native, make):
    check(native, make, image(2, 4, 6, 7))


@pytest.mark.parametrize("block", [False, True])
def test_depthwise_layers(native, block):
    """In channels_last order; their dot products and norms are computed again in backward."""

    def make():
        layer = conv(4, 4, 3, groups=4, stride=2, padding=1)
        return Block(layer, nn.BatchNorm2d(4), "relu") if block else layer

    check(native, make, image(2, 4, 6, 7).detach().to(memory_format=torch.channels_last).requires_grad_())


def test_first_layer(native):
    check(native, lambda: conv(4, 4, 3), image(2, 4, 5, 5, grad=False))


def test_evaluation_mode(native):
    """The average is given, and has no gradient; BatchNorm uses its own."""
    check(native, lambda: Block(conv(4, 4, 3), nn.BatchNorm2d(4)).eval(), image(2, 4, 5, 5))


@pytest.mark.parametrize(
    ("kind", "shape"), [(dcnet.DecoupledConv1d, (2, 4, 6)), (dcnet.DecoupledConv3d, (1, 4, 3, 4, 3))]
)
def test_dimensions(native, kind, shape):
    check(native, lambda: kind(4, 4, 3, impl="fused"), image(*shape))


def test_given_mean_with_gradient(native):
    mean = torch.tensor([1.5]).requires_grad_()

    def forward(net, x):
        options = {"magnitude": "tanh", "angular": "cosine", "radius": torch.full((4,), 0.7), "mean_norm": mean}
        return dcnet.decoupled_conv2d(x, net.weight, None, impl="fused", **options)

    check(native, lambda: nn.Conv2d(4, 4, 3, bias=False), image(2, 4, 5, 5), forward=forward)
    by_python = in_python(lambda: torch.autograd.grad(forward(nn.Conv2d(4, 4, 3), image(2, 4, 5, 5)).sum(), mean))
    torch.manual_seed(0)
    assert by_python[0].shape == mean.grad.shape


def test_half_precision(native):
    check(native, lambda: Block(conv(4, 8, 3, bias=True), nn.BatchNorm2d(8)).half(), image(2, 4, 5, 5).half().detach())


def test_autocast(native):
    def forward(net, x):
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    make = lambda: Chain(Block(conv(4, 8, 3), nn.BatchNorm2d(8)), Block(conv(8, 8, 1), nn.BatchNorm2d(8)))  # noqa: E731
    check(native, make, image(2, 4, 5, 5), layers=2, forward=forward)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(native, mode):
    net = Block(conv(4, 4, 3), nn.BatchNorm2d(4))
    other = copy.deepcopy(net)
    with mode():
        expected = in_python(lambda: [net(image(2, 4, 5, 5)) for _ in range(3)])
        actual = [other(image(2, 4, 5, 5)) for _ in range(3)]
    assert_same_bits([*actual, *other.buffers()], [*expected, *net.buffers()])
    assert native.counts()["plans"] == 1
    assert not actual[-1].requires_grad


def learned_layer(**options):
    """A layer whose next call is C++'s, and its input."""
    layer, x = conv(4, 4, 3, **options), image(2, 4, 5, 5)
    layer(x).sum().backward()
    layer.zero_grad()
    return layer, image(2, 4, 5, 5)


def test_name(native):
    layer, x = learned_layer()
    y = layer(x)
    assert y.grad_fn.name() == "DecoupledBackward"
    assert len(y.grad_fn.next_functions) == 13


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(native, reentrant, monkeypatch):
    """Also with a new plan, and where forward ran in Python and its repetition in C++, or the other way round."""
    layer = conv(4, 4, 3)
    monkeypatch.setattr("dcnet.ops.fused.plan._PLANS", {})
    checkpoint(copy.deepcopy(layer), image(2, 4, 5, 5), use_reentrant=reentrant).sin().sum().backward()
    expected = steps(lambda: copy.deepcopy(layer), image(2, 4, 5, 5), count=1)
    for forward_in_python in (False, True, False):
        other, x = copy.deepcopy(layer), image(2, 4, 5, 5)

        def run(other=other, x=x):
            return checkpoint(other, x, use_reentrant=reentrant)

        y = in_python(run) if forward_in_python else run()
        y.sin().sum().backward()
        assert_same_bits([y.detach(), x.grad, *[p.grad for p in other.parameters()], *other.buffers()], expected)


def test_saved_tensor_hooks(native):
    layer, x = learned_layer()

    def packed():
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t.clone(), lambda t: t):
            y = layer(x)
        y.sin().sum().backward()
        return shapes

    shapes = packed()
    first, layer.weight.grad = layer.weight.grad, None
    assert shapes == in_python(packed)
    assert torch.equal(first, layer.weight.grad)


def test_tensor_hooks(native):
    layer, x = learned_layer()
    seen = []
    y = layer(x)
    y.register_hook(lambda g: seen.append("y") or 2 * g)
    layer.weight.register_hook(lambda g: seen.append("weight"))
    y.grad_fn.register_prehook(lambda g: seen.append("node"))
    y.sum().backward()
    doubled, layer.weight.grad = layer.weight.grad, None
    (2 * layer(x)).sum().backward()
    assert torch.equal(doubled, layer.weight.grad)
    assert seen[:3] == ["y", "node", "weight"]


def test_retained_graph(native):
    layer, x = learned_layer()
    y = layer(x).sum()
    first = torch.autograd.grad(y, [x, layer.weight], retain_graph=True)
    second = torch.autograd.grad(y, [x, layer.weight])
    assert_same_bits(second, first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, [x, layer.weight])


def test_some_gradients(native):
    """What is not asked for is not computed, and what is asked for is the same."""
    layer, x = learned_layer(bias=True)
    inputs = [x, layer.weight, layer.bias, layer.raw_radius]
    every = torch.autograd.grad(layer(x).sin().sum(), inputs)
    for wanted, expected in zip(inputs, every, strict=True):
        for _ in range(2):  # the first time its kernels may not be packed
            (found,) = torch.autograd.grad(layer(x).sin().sum(), [wanted])
            assert torch.equal(found, expected)


def test_only_the_energy_has_a_gradient(native):
    def gradients():
        torch.manual_seed(3)
        block, x = Block(conv(4, 8, 1), nn.BatchNorm2d(8)), image(2, 4, 3, 3)
        found = []
        for _ in range(3):
            _, energy = block.with_energy(x, None, True)
            found += torch.autograd.grad(energy.sin().sum(), [x, *block.parameters()])
        return found

    assert_same_bits(gradients(), in_python(gradients))
    assert native.counts()["forward"] >= 2


def test_second_derivative_raises(native):
    layer, x = learned_layer()
    (gradient,) = torch.autograd.grad(layer(x).sin().sum(), [x], create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match="second derivative through the fused kernels"):
        gradient.sum().backward()


def test_changed_input_raises(native):
    layer, _ = learned_layer()
    x = image(2, 4, 5, 5) * 1.0
    y = layer(x)
    x.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_changed_weight_raises(native):
    layer, x = learned_layer()
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_error_in_forward_is_raised(native, monkeypatch):
    layer, x = learned_layer()
    monkeypatch.setattr("dcnet.ops.fused.native.Launches.__call__", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer(x)


def test_an_error_in_backward_is_raised(native, monkeypatch):
    layer, x = learned_layer()
    y = layer(x).sum()
    monkeypatch.setattr("dcnet.ops.fused.native.Launches.__call__", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.backward()


def test_no_leak(native):
    layer, x = learned_layer()
    for _ in range(3):
        layer(x).sum().backward()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(10):
        y = layer(x)
        y.sum().backward()
    for _ in range(10):
        y = layer(x)  # without a backward
    alive = weakref.ref(y)
    del y
    assert alive() is None
    gc.collect()
    assert len(gc.get_objects()) - before < 10


def test_saved_tensors_are_freed(native):
    layer, _ = learned_layer()
    inner = image(2, 4, 5, 5) * 1.0
    alive = weakref.ref(inner)
    y = layer(inner)
    del inner
    assert alive() is not None
    y.sum().backward()
    assert alive() is None
    assert y is not None


def test_threads(native, monkeypatch):
    from dcnet.ops.fused.native import Launches

    lock, call = threading.Lock(), Launches.__call__

    def one_at_a_time(*arguments):  # Triton's interpreter can do no more
        with lock:
            call(*arguments)

    monkeypatch.setattr(Launches, "__call__", one_at_a_time)
    layer, _ = learned_layer()
    inputs = [image(2, 4, 5, 5) for _ in range(4)]
    expected = torch.autograd.grad(layer(inputs[0]).sin().sum(), inputs[0])[0]
    found = {}

    def work(i):
        for _ in range(5):
            found[i] = torch.autograd.grad(layer(inputs[i]).sin().sum(), inputs[i])[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], expected) for i in range(4))


def test_copies_and_pickles(native):
    layer, x = learned_layer()
    y = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), y)


def test_who_watches_gets_pythons_way(native):
    from torch.utils.flop_counter import FlopCounterMode

    layer, x = learned_layer()
    before = native.counts()["forward"]
    with FlopCounterMode(display=False) as flops:
        layer(x)
    assert native.counts()["forward"] == before
    assert flops.get_total_flops() > 0


def test_forward_mode_raises(native):
    layer, x = learned_layer()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError):
            layer(dual)


class Subclass(torch.Tensor):
    pass


def test_subclass_goes_through_python(native):
    layer, x = learned_layer()
    before = native.counts()["forward"]
    layer(x.detach().as_subclass(Subclass))
    assert native.counts()["forward"] == before


def test_unaligned_memory_goes_through_python(native):
    layer, x = learned_layer()
    expected = torch.autograd.grad(layer(x).sum(), layer.weight)[0]
    before = native.counts()
    shifted = torch.cat([torch.zeros(1), x.detach().flatten()])[1:].view(x.shape)
    assert torch.equal(torch.autograd.grad(layer(shifted).sum(), layer.weight)[0], expected)
    assert native.counts()["forward"] == before["forward"]
    e = torch.ones(2 * 4 * 3 * 3 + 1)[1:].view(2, 4, 3, 3)
    assert torch.equal(torch.autograd.grad(layer(x), layer.weight, e)[0], expected)
    assert native.counts()["backward in Python"] == before["backward in Python"] + 1


@pytest.mark.parametrize(
    "layer",
    [
        lambda: conv(4, 4, 3, weighting="separate"),
        lambda: dcnet.DecoupledLinear(5, 4, impl="fused"),
        lambda: conv(4, 4, 3, sync=True),
    ],
    ids=["separate", "linear", "over ranks"],
)
def test_unusual_layers_stay_in_python(native, layer):
    layer = layer()
    for _ in range(3):
        layer(image(2, 4, 5, 5)).sum().backward()
    assert native.counts()["plans"] == 0


def test_padding_is_not_forgotten(native):
    """A layer that writes out its padding, then gets an input as large as a padded one was."""
    layer = conv(4, 4, 3, padding=1, padding_mode="reflect")
    for size in (5, 5, 7, 5, 7):
        x = image(2, 4, size, size)
        assert torch.equal(layer(x), in_python(lambda x=x: layer(x)))


def test_vectors_in_another_order(native):
    """Only where they are contiguous do kernels read them in place."""
    layer, x = learned_layer(bias=True)
    expected = layer(x)
    layer.bias = nn.Parameter(torch.stack([layer.bias.detach()] * 2, 1)[:, 0])
    assert not layer.bias.is_contiguous()
    assert torch.equal(layer(x), expected)


def test_wrong_sizes_raise(native):
    layer, _ = learned_layer()
    for shape, error in (((2, 3, 5, 5), "3 channels"), ((2, 4, 2, 5), "kernel spans"), ((4,), "unbatched")):
        with pytest.raises(ValueError, match=error):
            layer(torch.zeros(shape))


def test_function_transforms_raise(native):
    layer, x = learned_layer()
    with pytest.raises(ValueError, match="function transform"):
        torch.func.vmap(layer)(x.detach().unsqueeze(0))


def test_nothing_is_read_before_it_is_written(native):
    """New memory is filled with NaN."""

    def make():
        return Chain(
            Block(conv(4, 8, 3), nn.BatchNorm2d(8)), Block(conv(8, 8, 1, bias=True), nn.BatchNorm2d(8), "prelu")
        )

    expected = steps(make, image(2, 4, 5, 5))
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert_same_bits(steps(make, image(2, 4, 5, 5)), expected)
    finally:
        torch.use_deterministic_algorithms(False)


GRAPHS = {
    "a layer": lambda: conv(4, 4, 3, bias=True, angular="sigmoid:k=learned"),
    "separate": lambda: conv(4, 4, 3, weighting="separate"),
    "blocks": lambda: Chain(Block(conv(4, 8, 3), nn.BatchNorm2d(8)), Block(conv(8, 8, 1), nn.BatchNorm2d(8), "prelu")),
    "without BatchNorm": lambda: Chain(Block(conv(4, 8, 3)), Block(conv(8, 8, 1, groups=2), None, "silu")),
    "depthwise": lambda: Block(conv(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4)),
    "cumulative": lambda: Block(conv(4, 4, 3, momentum=None), nn.BatchNorm2d(4)),
}


@pytest.mark.parametrize(("name", "grad"), [*((name, True) for name in GRAPHS), ("a layer", False)], ids=str)
def test_operators_of_a_compiled_graph(native, name, grad):
    """C++ runs them from the second step on, with the bits of Python."""

    make = GRAPHS[name]

    def compiled():
        torch.compiler.reset()
        net = make()
        net.compile(backend="aot_eager", fullgraph=True)
        return net

    x = image(2, 4, 5, 4, last=True, grad=grad)
    expected = in_python(lambda: steps(compiled, x))
    native.forget()
    before = native.counts()
    assert_same_bits(steps(compiled, x), expected)
    after = native.counts()
    layers = {"separate": 0, "blocks": 2, "without BatchNorm": 2}.get(name, 1)
    assert after["forward"] - before["forward"] == 2 * layers
    assert after["backward"] - before["backward"] == 2 * layers


@pytest.mark.parametrize("residual", [False, True])
def test_two_incoming_gradients_in_a_graph(native, residual, monkeypatch):
    """Inductor lets `decoupled_backward` add them up."""
    operator = torch.ops.dcnet.decoupled_backward.default
    calls = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is operator:
                calls.append(args)
            return func(*args, **(kwargs or {}))

    block, x = Block(conv(4, 8, 1), nn.BatchNorm2d(8)), image(2, 4, 5, 4, last=True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    y = block(x, image(2, 8, 5, 4, last=True)) if residual else block(x)
    with Look():
        y.sum().backward()
    ((e, _, *rest),) = calls
    e = torch.randint_like(e, -8, 9)
    part = torch.randint_like(e, -4, 5)
    expected = operator(e, None, *rest)
    before = native.counts()["backward"]
    for _ in range(3):
        assert_same_bits(operator(e - part, part, *rest), expected)
    assert native.counts()["backward"] - before >= 2


def test_a_graph_needs_no_dot_product_again(monkeypatch):
    """It keeps a depthwise layer's, so kernels that never ran do not keep C++ from running."""
    t = Operands(image(2, 4, 5, 4, last=True), torch.ones(4, 1, 3, 3), *[None] * (len(Operands._fields) - 2))
    one = (1, 1)
    plan = plan_of(
        t,
        Options(
            one, one, one, 4, 1e-4, 0, NO_MEAN, ALONE, 0.0, 0, False, False, make_operator("sphere", "cosine", None)
        ),
    )
    monkeypatch.setattr(HOST, "_kernels", lambda launches: None if launches is plan.again else b"packed")
    key = (False, False, True, True, True)
    assert HOST._backward(plan, True, *key) is None
    assert HOST._backward(plan, False, *key)[:3] == (b"packed", b"packed", b"")


def test_inference_of_a_compiled_graph(native):
    block = Block(conv(4, 8, 3), nn.BatchNorm2d(8)).eval()
    x = image(2, 4, 5, 4, last=True, grad=False)
    with torch.no_grad():
        expected = block(x)
        torch.compiler.reset()
        block.compile(backend="aot_eager", fullgraph=True)
        before = native.counts()["forward"]
        for _ in range(3):
            assert torch.equal(block(x), expected)
    assert native.counts()["forward"] - before == 2


def test_a_graph_sees_another_formula_of_the_same_name(native, catalogue):
    @dcnet.magnitude
    def scaled(n):
        """‖x‖"""
        return n, 1.0

    layer = conv(4, 4, 3, magnitude="scaled")
    torch.compiler.reset()
    layer.compile(backend="aot_eager", fullgraph=True)
    x = image(2, 4, 5, 4, grad=False)
    with torch.no_grad():
        ones = [layer(x) for _ in range(3)][-1]

        @dcnet.magnitude(replace=True)
        def scaled(n):
            """2·‖x‖"""
            return 2.0 * n, 2.0

        assert torch.equal(layer(x), 2.0 * ones)


def test_a_compiled_graph_stays_as_it_is(native):
    """It is not compiled again when C++ gets ready."""
    layer = conv(4, 4, 3)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    in_python(lambda: compiled(image(2, 4, 5, 5)))
    layer(image(2, 4, 5, 5))
    before = native.counts()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert compiled(image(2, 4, 5, 5)).shape == (2, 4, 3, 3)
    assert native.counts()["forward"] == before["forward"]
