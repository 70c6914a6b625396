"""Depthwise layers in channels_last order, which have kernels of their own: blocks, means, memory, graphs."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dcnet
from dcnet.layers import Block
from dcnet.ops.fused import plan as plans

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, inside the interpreter
LAYERS = (dcnet.DecoupledConv1d, dcnet.DecoupledConv2d, dcnet.DecoupledConv3d)


@pytest.fixture(autouse=True)
def exact_convolutions():
    with torch.backends.cudnn.flags(enabled=False):
        yield


@pytest.fixture
def made(monkeypatch):
    """The plans made during a test."""
    found = []

    class Plan(plans.Plan):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            found.append(self)

    monkeypatch.setattr(plans, "Plan", Plan)
    monkeypatch.setattr(plans, "_PLANS", {})
    return found


def channels_last(*shape):
    """Random numbers in an order in which channels lie next to each other, for any number of dimensions."""
    generator = torch.Generator().manual_seed(2)
    batch, channels, *sizes = shape
    return torch.randn(batch, *sizes, channels, generator=generator).to(DEVICE).movedim(-1, 1)


def compare(modules, x, steps=1, **tolerances):
    """Compare outputs, gradients and averages of two modules over some steps."""
    tolerances = tolerances or {"rtol": 1e-3, "atol": 1e-5}
    modules[1].load_state_dict(modules[0].state_dict())
    for _ in range(steps):
        results = []
        for module in modules:
            z = x.detach().requires_grad_()
            y = module(z)
            gradients = torch.autograd.grad(
                (y * torch.linspace(0, 3, y.shape[-1], device=DEVICE)).sin().sum(), [z, *module.parameters()]
            )
            results.append(
                {"output": y, "x": gradients[0]}
                | dict(zip(dict(module.named_parameters()), gradients[1:], strict=True))
            )
        for name, expected in results[0].items():
            torch.testing.assert_close(
                results[1][name], expected, msg=lambda m, name=name: f"{name}: {m}", **tolerances
            )
    for (name, a), b in zip(modules[0].state_dict().items(), modules[1].state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "geometry", [{"padding": 1}, {"stride": 2, "padding": 2}, {"dilation": 2, "padding": 1}], ids=str
)
def test_geometries(dims, geometry, made):
    x = channels_last(2, 5, *(7, 6, 5)[:dims])
    layers = [
        LAYERS[dims - 1](5, 5, 3, groups=5, weighting="linear", angular="sigmoid:k=learned", impl=impl, **geometry)
        for impl in ("reference", "fused")
    ]
    compare([layer.to(DEVICE) for layer in layers], x)
    assert [plan.depthwise for plan in made] == [True]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("activation", [None, "relu", "prelu", "silu"])
def test_blocks(activation, momentum, training, made):
    blocks = []
    for impl in ("eager", "fused"):
        torch.manual_seed(0)
        layer = dcnet.DecoupledConv2d(6, 6, 3, padding=1, groups=6, magnitude="seg", momentum=momentum, impl=impl)
        blocks.append(Block(layer, nn.BatchNorm2d(6), activation).to(DEVICE).train(training))
    compare(blocks, channels_last(3, 6, 5, 4), steps=2)
    assert all(plan.depthwise for plan in made)


def test_with_a_residual():
    results = []
    for impl in ("eager", "fused"):
        torch.manual_seed(0)
        block = Block(dcnet.DecoupledConv2d(6, 6, 3, padding=1, groups=6, impl=impl), nn.BatchNorm2d(6), "relu").to(
            DEVICE
        )
        x, residual = (channels_last(3, 6, 5, 4).requires_grad_() for _ in range(2))
        y = block(x, residual)
        results.append((y, *torch.autograd.grad(y.sin().sum(), [x, residual, *block.parameters()])))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5)


def test_nothing_is_kept_but_the_input(made):
    """The dot product and the norms, each a map, are computed again in backward."""
    layer = dcnet.DecoupledConv2d(8, 8, 3, padding=1, groups=8, impl="fused").to(DEVICE)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        layer(channels_last(2, 8, 9, 9).requires_grad_())
    assert [t.shape for t in kept if t.numel() >= 2 * 8 * 9 * 9] == [(2, 8, 9, 9)]
    (plan,) = made
    assert plan.depthwise


def test_checkpoint():
    layer = dcnet.DecoupledConv2d(6, 6, 3, padding=1, groups=6, impl="fused").to(DEVICE)
    again = dcnet.DecoupledConv2d(6, 6, 3, padding=1, groups=6, impl="fused").to(DEVICE)
    compare([layer, _Checkpointed(again)], channels_last(2, 6, 5, 5), rtol=0, atol=0)


class _Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def load_state_dict(self, state):
        self.layer.load_state_dict(state)

    def named_parameters(self, *_, **__):
        return self.layer.named_parameters()

    def state_dict(self, *_, **__):
        return self.layer.state_dict()

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def test_compiled():
    blocks = []
    for impl in ("eager", "fused"):
        torch.manual_seed(0)
        layer = dcnet.DecoupledConv2d(6, 6, 3, padding=1, stride=2, groups=6, impl=impl)
        blocks.append(Block(layer, nn.BatchNorm2d(6), "relu").to(DEVICE))
    blocks[1].compile(fullgraph=True)
    compare(blocks, channels_last(2, 6, 6, 5), steps=2)
    for block in blocks:
        block.eval()
    with torch.inference_mode():
        x = channels_last(2, 6, 6, 5)
        torch.testing.assert_close(blocks[1](x), blocks[0](x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mean_norm", [None, "given"])
def test_other_means(mean_norm):
    x = channels_last(2, 6, 5, 4).requires_grad_()
    weight = torch.randn(6, 1, 3, 3, device=DEVICE, requires_grad=True)
    radius = torch.rand(6, device=DEVICE).add(0.5).requires_grad_()
    mean = torch.rand(6, device=DEVICE).add(1.0).requires_grad_() if mean_norm else None
    results = []
    for impl in ("reference", "fused"):
        y = dcnet.decoupled_conv2d(
            x, weight, padding=1, groups=6, magnitude="tanh", radius=radius, mean_norm=mean, impl=impl
        )
        wanted = [x, weight, radius, *([] if mean is None else [mean])]
        results.append((y, *torch.autograd.grad(y.sin().sum(), wanted)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5)


def test_nan_is_not_averaged():
    layer = dcnet.DecoupledConv2d(4, 4, 3, padding=1, groups=4, impl="fused").to(DEVICE)
    layer(channels_last(2, 4, 5, 5))
    before = {name: value.clone() for name, value in layer.named_buffers()}
    x = channels_last(2, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    x[0, 1] = torch.nan
    layer(x)
    after = dict(layer.named_buffers())
    assert after["running_norm"][1] == before["running_norm"][1]
    assert after["running_norm"].isfinite().all()
    assert before["num_batches_tracked"] == after["num_batches_tracked"] == 1  # that batch does not count


def test_an_empty_batch():
    layer = dcnet.DecoupledConv2d(4, 4, 3, padding=1, groups=4, impl="fused").to(DEVICE)
    x = torch.empty(0, 4, 5, 5, device=DEVICE).to(memory_format=torch.channels_last).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 4, 5, 5)
