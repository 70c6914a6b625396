"""Energies handed from block to block by the fused kernels: the same results, without the passes they save."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

import dcnet
from dcnet.layers import Block, Chain
from dcnet.models.parts import Parts
from dcnet.models.resnet import Unit

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, inside the interpreter


@pytest.fixture(autouse=True)
def exact_convolutions():
    with torch.backends.cudnn.flags(enabled=False):
        yield


def small(impl, activation="relu"):
    """Three blocks in a row, the last behind a pooling."""
    torch.manual_seed(0)
    parts = Parts(activation=activation, options={"impl": impl})
    return livened(Chain(parts.block(3, 8), parts.block(8, 16), nn.MaxPool2d(2), parts.block(16, 8)))


def livened(net):
    """With BatchNorms that do something, on the device."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return net.to(DEVICE)


def images(channels=3, size=4):
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(3)).to(DEVICE)


def results(net, x, call=None):
    """Output, gradients and running averages of a training step, then the output in evaluation."""
    x = x.clone().requires_grad_()
    y = (call or net)(x)
    e = torch.cos(torch.arange(y.numel(), device=DEVICE, dtype=torch.float32)).reshape(y.shape)
    y.backward(e)  # which a reentrant checkpoint wants
    found = [y.detach(), x.grad, *[p.grad for p in net.parameters()], *net.buffers()]
    net.eval()
    with torch.no_grad():
        found.append(net(x))
    net.train()
    return found


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were launched, from Python or by the compiled launcher; nothing runs in C++."""
    from dcnet.ops.fused import native
    from dcnet.ops.fused.host import HOST

    if HOST.module is not None:
        HOST.module.forget()  # what it has learned of graphs, whose operators stay registered
    monkeypatch.setattr(HOST, "module", None)
    monkeypatch.setattr(type(HOST), "ready", lambda *_: None)
    names = []
    launch = native.Launches.__call__

    def noted(self, memory, *floats):
        names.extend(launcher.kernel.fn.__name__ for launcher in self.launchers)
        launch(self, memory, *floats)

    monkeypatch.setattr(native.Launches, "__call__", noted)
    return names


@pytest.mark.parametrize(
    ("activation", "last"),
    [("relu", True), pytest.param("relu", False, marks=pytest.mark.slow), (None, False), ("prelu", True)],
)
def test_units(activation, last, launched):
    """Behind an activation or not, with a residual or not, one map or two, at either stride."""
    found = []
    for impl in ("reference", "fused"):
        torch.manual_seed(0)
        parts = Parts(angular="linear", activation=activation, options={"impl": impl})
        net = livened(
            Chain(parts.block(3, 8), Unit(parts, 8, 8, 1, last), Unit(parts, 8, 64, 2, last), parts.block(64, 8))
        )
        x = images(size=4)
        found.append(results(net, x if last else x.to(memory_format=torch.channels_last)))
    assert_same(found[1], found[0])
    # in training and in evaluation: of the first input, and behind PReLU and a residual, which are not fused
    energies = 3 if activation == "prelu" and last else 1
    assert launched.count("energies") == 2 * energies
    assert launched.count("add_product") == energies


def test_what_is_left():
    """½·Σ of the output's squares, and its gradient."""
    torch.manual_seed(0)
    block = livened(Chain(Block(dcnet.DecoupledConv2d(3, 64, 3, impl="fused"), nn.BatchNorm2d(64))))[0]
    x = images(size=5).requires_grad_()
    y, left = block.with_energy(x, None, True)
    assert left.shape == (2, 2, 1, 3, 3)  # 2 maps of 2 images
    energy = 0.5 * y.square().sum(1, keepdim=True)
    torch.testing.assert_close(left.sum(0), energy)
    e = torch.rand(2, 1, 3, 3, device=DEVICE)
    wanted = [x, *block.parameters()]
    expected = torch.autograd.grad(energy, wanted, e, retain_graph=True)
    for incoming in (e.expand(2, 2, 1, 3, 3), e.mT.contiguous().mT.expand(2, 2, 1, 3, 3)):  # in any order
        actual = torch.autograd.grad(left, wanted, incoming, retain_graph=True)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def test_only_where_somebody_takes_it(launched):
    results(small("fused"), images())
    assert launched.count("energies") == 2 * 2  # of the images, and behind the pooling; in training and in evaluation
    assert launched.count("normalize_and_box") == 2 * 3
    # 3 maps for 12 channels are no gain
    odd = Block(dcnet.DecoupledConv2d(3, 12, 3, impl="fused"), nn.BatchNorm2d(12)).to(DEVICE)
    assert odd.with_energy(images(), None, True)[1] is None
    assert small("eager")[0].with_energy(images(), None, True)[1] is None


def test_grouped_and_other_shapes_take_nothing():
    torch.manual_seed(0)
    nets = []
    for impl in ("reference", "fused"):
        torch.manual_seed(0)
        grouped = dcnet.DecoupledConv2d(8, 8, 3, padding=1, groups=2, impl=impl)
        padded = dcnet.DecoupledConv2d(8, 8, 3, padding=1, padding_mode="circular", impl=impl)
        first = dcnet.DecoupledConv2d(3, 8, 3, padding=1, impl=impl)
        nets.append(livened(Chain(*[Block(conv, nn.BatchNorm2d(8)) for conv in (first, padded, grouped)])))
    assert_same(results(nets[1], images()), results(nets[0], images()))


def test_many_maps():
    """More maps of energies, and of gradients of norms, than kernels read at once: one for every 32 channels."""
    nets = []
    for impl in ("reference", "fused"):
        torch.manual_seed(0)
        parts = Parts(options={"impl": impl})
        nets.append(livened(Chain(parts.block(3, 96), parts.block(96, 8))))
    assert_same(results(nets[1], images()), results(nets[0], images()))


def shifted(module, *arguments):
    """A hook that changes what it sees, in place: a tuple before a call, the output after it."""
    seen = arguments[-1]
    (seen[0] if isinstance(seen, tuple) else seen).add_(1.0)


@pytest.mark.parametrize(
    ("compiled", "where"),
    [
        *((False, where) for where in ("block", "convolution", "before", "everywhere")),
        (True, "block"),
        *(pytest.param(True, where, marks=pytest.mark.slow) for where in ("convolution", "before", "everywhere")),
    ],
)
def test_hooks_that_change_what_passes(where, compiled):
    """A map that is changed in between gives the results of the changed map."""
    outputs = []
    for impl in ("reference", "fused"):
        net = small(impl)
        if where == "before":
            handle = net[1].register_forward_pre_hook(shifted)
        elif where == "everywhere":
            first = net[0]
            handle = nn.modules.module.register_module_forward_hook(
                lambda *a, first=first: shifted(*a) if a[0] is first else None
            )
        else:
            handle = (net[0] if where == "block" else net[0].conv).register_forward_hook(shifted)
        if compiled and impl == "fused":
            net.compile(fullgraph=True, backend="aot_eager")
        try:
            with torch.no_grad():
                outputs.append(net(images()))
        finally:
            handle.remove()
    assert not torch.allclose(outputs[0], small("reference")(images()))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-4, atol=2e-5)


def backward_hook(net, where):
    if where == "after":
        return net[1].register_full_backward_hook(lambda module, of_inputs, _: (2.0 * of_inputs[0],))
    return net[0].register_full_backward_pre_hook(lambda module, of_outputs: (2.0 * of_outputs[0],))


@pytest.mark.parametrize("where", ["after", "before"])
def test_hooks_that_change_gradients(where):
    """They see, and change, the whole gradient."""
    found = []
    for impl in ("reference", "fused"):
        net = small(impl)
        backward_hook(net, where)
        found.append(results(net, images()))
    assert_same(found[1], found[0])


def wrapped(kind, block):
    class Scaled(Block):
        def forward(self, *arguments, **options):
            return 2.0 * super().forward(*arguments, **options)

    class Old(Block):
        def forward(self, x, residual=None):
            return super().forward(x, residual)

    class Odd(dcnet.DecoupledConv2d):
        def forward(self, x, post_ops=None):
            return 2.0 * super().forward(x + 1.0, post_ops)

    if kind == "convolution":
        block.conv.__class__ = Odd
        return block
    if kind in ("checkpoint", "reentrant checkpoint"):
        implementation = CheckpointImpl.REENTRANT if kind == "reentrant checkpoint" else CheckpointImpl.NO_REENTRANT
        return checkpoint_wrapper(block, checkpoint_impl=implementation)
    if kind == "patched":
        plain = block.forward
        block.forward = lambda *arguments, **options: plain(*arguments, **options) + 1.0
        return block
    return {"scaled": Scaled, "old": Old}[kind](block.conv, block.norm)


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*")
@pytest.mark.parametrize(
    "which",
    [pytest.param((0,), marks=pytest.mark.slow), pytest.param((1,), marks=pytest.mark.slow), (0, 1, 2)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["checkpoint", "reentrant checkpoint", "scaled", "old", "patched", "convolution"])
def test_blocks_in_disguise(kind, which):
    """Wrappers and subclasses, which may compute again later or something else: right, if not as fast."""
    found = []
    for impl in ("reference", "fused"):
        torch.manual_seed(0)
        parts = Parts(options={"impl": impl})
        net = livened(Chain(parts.block(3, 8), parts.block(8, 8), parts.block(8, 8)))
        for i in which:
            net[i] = wrapped(kind, net[i])
        found.append(results(net, images()))
    assert_same(found[1], found[0])


def test_a_unit_with_other_parts():
    nets = []
    for impl in ("reference", "fused"):
        torch.manual_seed(0)
        parts = Parts(options={"impl": impl})
        unit = Unit(parts, 3, 8, 1)
        unit.first = nn.Sequential(unit.first, nn.Hardtanh(0.0, 0.5))
        nets.append(livened(Chain(unit, parts.block(8, 8))))
    assert_same(results(nets[1], images()), results(nets[0], images()))


def test_nothing_in_it():
    x = images()
    assert Chain()(x) is x
    assert small("fused")[:0](x) is x


def test_something_in_between():
    """An activation in place between two blocks."""
    nets = []
    for impl in ("reference", "fused"):
        net = small(impl)
        nets.append(Chain(net[0], nn.Hardtanh(0.0, 0.5, inplace=True), net[1]).to(DEVICE))
    with torch.no_grad():
        expected, actual = (net(images()) for net in nets)
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-5)


def test_a_block_that_takes_and_leaves_nothing():
    """What was meant for it is not the next one's."""
    nets = []
    for impls in (("reference",) * 3, ("fused", "eager", "fused")):
        torch.manual_seed(0)
        blocks = [
            Parts(options={"impl": impl}).block(channels, 8) for impl, channels in zip(impls, (3, 8, 8), strict=True)
        ]
        nets.append(livened(Chain(*blocks)))
    assert_same(results(nets[1], images()), results(nets[0], images()))


def test_frozen_layers():
    nets = [small(impl) for impl in ("reference", "fused")]
    for net in nets:
        net[0].requires_grad_(False)
    x = images()
    for net in nets:
        net(x).square().sum().backward()
    expected, actual = ([p.grad for p in net.parameters() if p.requires_grad] for net in nets)
    assert_same(actual, expected)


def test_compiled(launched):
    """Also where sizes, and all other numbers, are left open."""
    expected = results(small("reference"), images())
    net = small("fused")
    torch.compiler.reset()
    assert_same(results(net, images(), torch.compile(net, fullgraph=True, dynamic=True)), expected)
    assert launched.count("energies") == 2 * 2


def test_slices_are_chains():
    net = small("fused")
    assert isinstance(net[:2], Chain)
    torch.testing.assert_close(net[2:](net[:2](images())), small("fused")(images()))


def test_inference_mode(launched):
    net = small("fused").eval()
    expected = small("reference").eval()(images())
    with torch.inference_mode():
        torch.testing.assert_close(net(images()), expected, rtol=2e-4, atol=2e-5)
    assert launched.count("energies") == 2
