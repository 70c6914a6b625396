"""A layer as a convolution and compiled passes, or h·g alone as one: right, and really used."""

import pytest
import torch
from helpers import assert_close, assert_within_rule
from test_cpu_depthwise import results
from torch import nn

import dcnet
from dcnet.layers import Block
from dcnet.ops.cpu import autograd, native_layer
from dcnet.ops.cpu import passes as epilogues

OPERATORS = [
    ("tanh", "cosine", None),
    ("tanh", "linear", "joint"),
    ("seg", "sigmoid:k=learned", "separate"),
    ("ball", "power_cosine:p=learned", "linear"),
    ("log", "square_cosine", "joint"),
    ("sphere", "relu_cosine", None),
]
GEOMETRIES = {
    "padded": ((5, 4, 9, 9), {"padding": 1}),
    "blocks of positions": ((2, 4, 25, 31), {"padding": 1, "groups": 2}),
    "few positions": ((5, 4, 4, 4), {}),
    "few positions in groups": ((5, 4, 5, 5), {"groups": 2}),
    "uneven": ((3, 4, 13, 17), {"stride": (2, 3), "padding": (2, 1), "dilation": (1, 2)}),
    "far apart": ((3, 4, 8, 8), {"padding": 9, "dilation": 9}),
    "1×1": ((3, 4, 8, 8), {"kernel_size": 1, "stride": 2}),
}


@pytest.fixture
def used(compiled_also_if_small, monkeypatch):
    """Compiled passes also for small maps; the list says what was used of them: "layer", "h·g", or None for nothing."""
    found = []

    def noting(what, real):
        def call(*given):
            result = real(*given)
            found.append(None if result is None else what)
            return result

        return call

    monkeypatch.setattr(epilogues, "_compiled_for", noting("h·g", epilogues._compiled_for))
    monkeypatch.setattr(native_layer, "decouple", noting("layer", native_layer.decouple))
    return found


@pytest.fixture(params=["layer", "h·g"])
def expected(used, request, monkeypatch):
    """What is used: compiled passes for all of a layer, or without them that for h·g."""
    if request.param == "layer":
        return ["layer"]
    monkeypatch.setattr(native_layer, "decouple", lambda *given: None)
    return ["h·g"]


def three(kind, *sizes, **options):
    """Return the layer, the reference, and the reference in float64."""
    layers = [
        kind(*sizes, bias=True, impl=impl, dtype=dtype, **options)
        for impl, dtype in (("eager", None), ("reference", None), ("reference", torch.float64))
    ]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    return layers


def compare(layers, x):
    assert_within_rule(*(results(layer, x.to(next(layer.parameters()).dtype)) for layer in layers))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("magnitude", "angular", "weighting"), OPERATORS)
def test_operators(used, expected, magnitude, angular, weighting, relu):
    operator = {"magnitude": magnitude, "angular": angular, "weighting": weighting}
    layers = three(dcnet.DecoupledConv2d, 4, 12, 3, **operator)
    compare([Block(layer, None, "relu") for layer in layers] if relu else layers, torch.randn(3, 4, 8, 8))
    assert used == ([None, "h·g"] if weighting == "separate" and expected == ["layer"] else expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("shape", "options"), GEOMETRIES.values(), ids=GEOMETRIES)
def test_geometries(used, expected, shape, options, threads):
    torch.set_num_threads(threads)
    options = {"kernel_size": 3, **options}
    compare(three(dcnet.DecoupledConv2d, 4, 12, **options, angular="linear"), torch.randn(shape))
    assert used == expected


def test_channels_last(used):
    x = torch.randn(3, 4, 8, 8).to(memory_format=torch.channels_last)
    compare(three(dcnet.DecoupledConv2d, 4, 12, 3, groups=2, angular="linear"), x)
    assert used == [None, "h·g"]
    # maps of one channel are contiguous in either order, and what follows them is to stay in theirs
    x = torch.randn(3, 1, 8, 8).to(memory_format=torch.channels_last)
    layers = [layer.to(memory_format=torch.channels_last) for layer in three(dcnet.DecoupledConv2d, 1, 12, 3)]
    compare(layers, x)
    assert layers[0](x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(3, 4, 4, 4), (3, 4, 6, 6)], ids=["2×2", "4×4"])
def test_few_positions_of_many_kernels(used, expected, shape):
    compare(three(dcnet.DecoupledConv2d, 4, 39, 3), torch.randn(shape))
    assert used == expected


def test_linear_maps_and_one_dimension(used, expected):
    compare(three(dcnet.DecoupledLinear, 16, 12), torch.randn(700, 16))
    compare(three(dcnet.DecoupledLinear, 1000, 12, weighting="joint"), torch.randn(3, 5, 1000))
    compare(three(dcnet.DecoupledConv1d, 4, 12, 5, padding=2), torch.randn(3, 4, 40))
    assert used == expected * 3


def test_second_derivatives_and_batches_of_gradients(used, expected):
    ours, reference, _ = three(dcnet.DecoupledConv2d, 4, 8, 3, angular="linear")
    x = torch.randn(3, 4, 6, 6)
    assert_close(results(ours, x, create_graph=True), results(reference, x, create_graph=True), 1e-3)
    y = ours(x.requires_grad_())
    leaves, gradients = [x, *ours.parameters()], torch.randn(4, *y.shape)
    batched = torch.autograd.grad(y, leaves, gradients, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(y, leaves, gradient, retain_graph=True) for gradient in gradients]
    for together, separate in zip(batched, zip(*singly, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(separate), rtol=1e-4, atol=1e-3)
    assert used[0] == expected[0]


def test_second_derivatives_of_a_layer_used_twice(used):
    ours, reference, _ = three(dcnet.DecoupledConv2d, 4, 4, 3, padding=1)
    x = torch.randn(3, 4, 6, 6)
    twice = [nn.Sequential(layer, layer) for layer in (ours, reference)]
    assert_close(*(results(net, x, create_graph=True) for net in twice), 1e-3)
    assert used[:2] == ["layer", "layer"]


@pytest.mark.parametrize("wanted", [["x"], ["weight"], ["raw_radius"], ["bias"]], ids=str)
def test_only_some_gradients(used, expected, wanted):
    layers = three(dcnet.DecoupledConv2d, 4, 8, 3)
    x = torch.randn(3, 4, 6, 6)
    for layer in layers:
        layer.requires_grad_(False)
        for name in set(wanted) - {"x"}:
            layer.get_parameter(name).requires_grad_(True)
    assert_within_rule(*(results(layer, x.to(layer.weight.dtype), wanted=wanted) for layer in layers))
    assert used == expected


def test_zeros_without_eps_and_numbers_that_are_none(used):
    ours, reference, _ = three(dcnet.DecoupledConv2d, 4, 8, 3, padding=1, eps=0.0)
    x = torch.randn(2, 4, 8, 8)
    x[0, :, :5] = 0.0
    assert_close(results(ours, x), results(reference, x), 1e-4)
    ours, reference, _ = three(dcnet.DecoupledConv2d, 4, 8, 3, radius=1.0)
    for bad in (float("nan"), float("inf")):
        x[1, 2, 3, 4] = bad
        found = results(ours, x)
        for name, value in results(reference, x).items():
            assert torch.equal(found[name].isnan(), value.isnan()), name


def test_the_same_on_any_number_of_threads(used, expected, monkeypatch):
    def on_one_thread(convolution):
        def call(*given):
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            result = convolution(*given)
            torch.set_num_threads(threads)
            return result

        return call

    for module in (native_layer, autograd):  # what a convolution adds up may depend on its threads
        for name in ("convolve", "convolution_gradients"):
            monkeypatch.setattr(module, name, on_one_thread(getattr(module, name)))
    layer = three(dcnet.DecoupledConv2d, 8, 24, 3, groups=2)[0]
    x, e = torch.randn(11, 8, 30, 30, requires_grad=True), torch.randn(11, 24, 28, 28)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        y = layer(x)
        found.append((y, *torch.autograd.grad(y, [x, *layer.parameters()], e)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert used == expected * 3
