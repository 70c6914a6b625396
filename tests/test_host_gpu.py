"""The autograd function in C++ on a GPU: the same bits as from Python; `test_host.py` has the rest."""

import pytest
import torch
from torch import nn

import dcnet
from dcnet.layers import Block, Chain

pytest.importorskip("triton")
from dcnet.ops.fused.host import HOST

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def same_convolutions():
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
        yield


@pytest.fixture
def native(monkeypatch):
    """The module in C++, waited for."""
    monkeypatch.setenv("DCNET_NATIVE", "wait")
    module = HOST.ready(torch.zeros(1, device=DEVICE))
    if module is None:
        pytest.skip("C++ cannot be built here")
    return module


def conv(*sizes, **options):
    return dcnet.DecoupledConv2d(*sizes, impl="fused", **options)


def block(layer, activation="relu"):
    return Block(layer, nn.BatchNorm2d(layer.out_channels), activation)


NETWORKS = {
    "a layer": lambda: conv(16, 24, 3, padding=1, weighting="linear", angular="sigmoid:k=learned", bias=True),
    "a chain": lambda: Chain(block(conv(16, 32, 3, padding=1)), block(conv(32, 32, 3, stride=2), "prelu")),
    "grouped": lambda: block(conv(16, 32, 3, groups=4, magnitude="seg")),
    "depthwise": lambda: block(conv(16, 16, 5, padding=2, groups=16), "silu"),
    "1×1": lambda: block(conv(16, 40, 1)),
    "without BatchNorm": lambda: Chain(Block(conv(16, 32, 3)), Block(conv(32, 32, 3, bias=True), None, "gelu")),
}


def steps(make, dtype):
    """Outputs, gradients and buffers of four steps."""
    torch.manual_seed(1)
    net = make().to(DEVICE, memory_format=torch.channels_last)
    found = []
    for i in range(4):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(4, 16, 9, 9, generator=generator).to(DEVICE, memory_format=torch.channels_last)
        x.requires_grad_()
        net.zero_grad()
        with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
            y = net(x)
        y.float().sin().sum().backward()
        found += [y.detach(), x.grad, *[p.grad for p in net.parameters()], *[b.clone() for b in net.buffers()]]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_same_bits(native, make, dtype, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(HOST, "module", None)
        expected = steps(make, dtype)
    before = native.counts()
    actual = steps(make, dtype)
    after = native.counts()
    assert after["forward"] > before["forward"]
    assert after["backward"] > before["backward"]
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_compiled_graphs(native, make):
    """Operators of a graph run in C++ from the second step on, with the results of eager mode."""
    expected = steps(make, torch.float32)

    def compiled():
        torch.compiler.reset()
        net = make()
        net.compile(dynamic=False)
        return net

    before = native.counts()
    actual = steps(compiled, torch.float32)
    after = native.counts()
    assert after["forward"] > before["forward"]
    assert after["backward"] > before["backward"]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_side_streams_and_threads(native):
    """Backward runs in a thread of the autograd engine, on the stream of forward."""
    layer = conv(16, 16, 3, padding=1).to(DEVICE)
    x = torch.randn(4, 16, 9, 9, device=DEVICE, requires_grad=True)
    for _ in range(3):
        expected = torch.autograd.grad(layer(x).sin().sum(), x)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = torch.autograd.grad(layer(x).sin().sum(), x)[0]
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
