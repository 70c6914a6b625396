"""Depthwise layers on a CPU, which work some images at a time and keep next to nothing: against the reference."""

import itertools

import pytest
import torch
from helpers import assert_close, assert_within_rule
from torch import nn

import dcnet
from dcnet.ops.cpu import chunks, depthwise

GEOMETRIES = {
    "padded": {"padding": 1},
    "bare": {},
    "stride": {"stride": 2, "padding": 1},
    "dilated": {"padding": 3, "dilation": 3},
    "two kernels": {"padding": 1, "out_channels": 12},
}
FORMATS = [torch.contiguous_format, torch.channels_last]


def pair(channels=6, out_channels=6, dtype=torch.float64, **options):
    options = {"bias": True, "angular": "linear", "weighting": "joint", "dtype": dtype, **options}
    layers = [
        dcnet.DecoupledConv2d(channels, out_channels, 3, groups=channels, impl=impl, **options)
        for impl in ("eager", "reference")
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers


def results(layer, x, create_graph=False, wanted=None):
    x = x.clone().requires_grad_()
    y = layer(x)
    e = torch.arange(y.numel(), dtype=torch.float64).cos().float().reshape(y.shape).to(y.dtype)
    leaves = {"x": x, **dict(layer.named_parameters())}
    leaves = {name: leaf for name, leaf in leaves.items() if wanted is None or name in wanted}
    first = torch.autograd.grad(y, list(leaves.values()), e, create_graph=create_graph)
    found = {"y": y, **dict(zip(leaves, first, strict=True))}
    if create_graph:
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), list(leaves.values()), materialize_grads=True)
        found |= {f"{name} twice": g for name, g in zip(leaves, second, strict=True)}
    return {name: value.detach() for name, value in found.items()}


@pytest.fixture(params=[1, 131072], ids=["image by image", "larger chunks"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(depthwise, "_CHUNK", request.param)


@pytest.mark.parametrize("order", FORMATS, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_values_gradients_and_second_derivatives(geometry, order, chunk):
    ours, reference = pair(**geometry)
    x = torch.randn(5, 6, 9, 11, dtype=torch.float64).to(memory_format=order)
    assert ours(x).is_contiguous(memory_format=order)
    for create_graph in (False, True):
        assert_close(results(ours, x, create_graph), results(reference, x, create_graph), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("images", [1, 2, 9])
def test_a_part_of_the_channels_in_channels_last_order(dims, images, dtype):
    """As after `split` or `chunk`. Such maps are in channels_last order, but have room between them."""
    kind = (dcnet.DecoupledConv1d, dcnet.DecoupledConv2d, dcnet.DecoupledConv3d)[dims - 1]
    torch.manual_seed(0)
    ours, reference = (kind(8, 8, 3, padding=1, groups=8, impl=impl) for impl in ("eager", "reference"))
    reference.load_state_dict(ours.to(dtype).state_dict())
    reference.double()
    x = torch.randn(images, *[7] * dims, 24).to(dtype).movedim(-1, 1)
    e = torch.randn(images, 8, *[7] * dims).to(dtype)

    def gradients(layer, x, e):
        x = x.detach().requires_grad_()
        y = layer(x[:, 8:16])
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], e)]

    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for ours_is, exact in zip(gradients(ours, x, e), gradients(reference, x.double(), e.double()), strict=True):
        assert float((ours_is.double() - exact).abs().max()) < tolerance * float(exact.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_within_the_error_rule(geometry, dtype):
    """In float32, windows are summed by a convolution; in the test above by slices."""
    ours, reference = pair(dtype=dtype, **geometry)
    exact = pair(**geometry)[1]
    exact.load_state_dict(ours.state_dict())
    x = torch.randn(5, 6, 17, 19).to(dtype)
    assert_within_rule(results(ours, x), results(reference, x), results(exact, x.double()))


def test_every_operator():
    for magnitude, angular in itertools.product(dcnet.magnitudes(), dcnet.angulars()):
        ours, reference = pair(magnitude=magnitude, angular=angular, weighting=None, padding=1)
        if not ours.operator.is_inner_product:
            x = torch.randn(3, 6, 5, 5, dtype=torch.float64)
            assert_close(results(ours, x), results(reference, x), 1e-10)


@pytest.mark.parametrize("wanted", [["x"], ["weight"], ["raw_radius"], ["bias"], ["x", "raw_radius"]], ids=str)
def test_only_some_gradients(wanted):
    ours, reference = pair(padding=1)
    x = torch.randn(3, 6, 5, 5, dtype=torch.float64)
    for layer in (ours, reference):
        layer.requires_grad_(False)
        for name in set(wanted) - {"x"}:
            layer.get_parameter(name).requires_grad_(True)
    assert_close(results(ours, x, wanted=wanted), results(reference, x, wanted=wanted), 1e-10)


@pytest.mark.parametrize("training", [True, False])
def test_relu_and_evaluation(training):
    ours, reference = (dcnet.layers.Block(layer, None, "relu").train(training) for layer in pair(padding=1))
    x = torch.randn(3, 6, 5, 5, dtype=torch.float64)
    assert_close(results(ours, x), results(reference, x), 1e-10)


def test_a_batch_of_gradients():
    layer, _ = pair(padding=1)
    x = torch.randn(3, 6, 5, 5, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    gradients = torch.randn(4, *y.shape, dtype=y.dtype)
    leaves = [x, *layer.parameters()]
    batched = torch.autograd.grad(y, leaves, gradients, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(y, leaves, gradient, retain_graph=True) for gradient in gradients]
    for together, separate in zip(batched, zip(*singly, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(separate))


def test_clamped_in_a_later_chunk(monkeypatch):
    """cos θ is looked at in each chunk; where the second has ±1, its gradient there is 0."""
    monkeypatch.setattr(depthwise, "_CHUNK", 1)
    ours, reference = pair(channels=2, out_channels=2, bias=False, eps=0.0)
    x = torch.randn(3, 2, 3, 3, dtype=torch.float64)
    x[1] = ours.weight.detach().squeeze(1)
    assert_close(results(ours, x), results(reference, x), 1e-6)


def test_without_eps_and_with_zeros():
    ours, reference = pair(padding=1, eps=0.0)
    x = torch.randn(2, 6, 8, 8, dtype=torch.float64)
    x[0, :, :5] = 0.0
    assert_close(results(ours, x), results(reference, x), 1e-10)


def test_without_exact_convolutions_sums_are_still_exact(monkeypatch):
    """Where PyTorch is told that convolutions may round, norms are summed by slices."""
    layer = dcnet.DecoupledConv2d(16, 16, 3, groups=16, magnitude="sphere", angular="cosine")
    sums = depthwise._Sums(layer._geometry(), torch.randn(2, 16, 8, 8))
    assert sums.ones is not None
    monkeypatch.setattr(depthwise, "exact_convolutions", lambda: False)
    sliced = depthwise._Sums(layer._geometry(), torch.randn(2, 16, 8, 8))
    assert sliced.ones is None
    maps = torch.rand(2, 16, 8, 8)
    torch.testing.assert_close(sums.of(maps), sliced.of(maps))
    back = torch.rand_like(sliced.of(maps))
    torch.testing.assert_close(sums.transposed(back, maps), sliced.transposed(back, maps))


def test_scratch_memory_is_used_again_but_never_given_out():
    layer = dcnet.DecoupledConv2d(8, 16, 3)
    inputs = [torch.randn(4, 8, 12, 12) for _ in range(2)]
    with torch.inference_mode():  # whose tensors could be used nowhere else
        chunks._kept.__init__()  # as in a new thread
        layer(inputs[0])
    found = [results(layer, x) for x in inputs]
    again = [results(layer, x) for x in inputs]
    for first, second in zip(found, again, strict=True):
        for name, value in first.items():
            assert torch.equal(value, second[name]), name
    buffers = chunks.scratch(2, [torch.empty(3, 4), torch.empty(3, 1, dtype=torch.float64)])
    assert [(tuple(b.shape), b.dtype) for b in buffers] == [((3, 4), torch.float64)] * 2
    assert buffers[0].data_ptr() != buffers[1].data_ptr()
    assert chunks.scratch(1, [torch.empty(12, dtype=torch.float64)])[0].data_ptr() == buffers[0].data_ptr()


def test_scratch_memory_has_a_limit(monkeypatch):
    chunks._kept.__init__()  # as in a new thread
    monkeypatch.setattr(chunks, "_MOST", 100)
    assert [len(b) for b in chunks.scratch(2, [torch.empty(51)])] == [51, 51]
    assert not chunks._kept.buffers


def test_a_network_of_separable_convolutions_learns():
    torch.manual_seed(0)
    net = nn.Sequential(
        dcnet.DecoupledConv2d(3, 16, 3, padding=1),
        dcnet.DecoupledConv2d(16, 16, 3, padding=1, groups=16),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    x, target = torch.randn(16, 3, 8, 8), torch.arange(16) % 2
    x[target == 1] *= 2.0
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(net(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
