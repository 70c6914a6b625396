"""h·g after a convolution or a linear map, and norms, as compiled passes: right, and really used."""

import pytest
import torch
from helpers import assert_close, assert_within_rule
from test_cpu_depthwise import results

import dcnet
from dcnet.layers import Block
from dcnet.ops.cpu import autograd
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
    "uneven": ((3, 4, 13, 17), {"stride": (2, 3), "padding": (2, 1), "dilation": (1, 2)}),
    "far apart": ((3, 4, 8, 8), {"padding": 9, "dilation": 9}),
    "1×1": ((3, 4, 8, 8), {"kernel_size": 1, "stride": 2}),
}


@pytest.fixture
def used(compiled_also_if_small, monkeypatch):
    """Compiled passes also for small maps; the list has what was used of them, and None where there was nothing."""
    found = []

    def noting(real):
        return lambda *given: found.append(real(*given)) or found[-1]

    monkeypatch.setattr(epilogues, "_compiled_for", noting(epilogues._compiled_for))
    monkeypatch.setattr(autograd, "_norms_in_c", noting(autograd._norms_in_c))
    return found


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
def test_operators(used, magnitude, angular, weighting, relu):
    operator = {"magnitude": magnitude, "angular": angular, "weighting": weighting}
    layers = three(dcnet.DecoupledConv2d, 4, 12, 3, **operator)
    compare([Block(layer, None, "relu") for layer in layers] if relu else layers, torch.randn(3, 4, 8, 8))
    assert len(used) == 2
    assert None not in used


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("shape", "options"), GEOMETRIES.values(), ids=GEOMETRIES)
def test_geometries(used, shape, options, threads):
    torch.set_num_threads(threads)
    options = {"kernel_size": 3, **options}
    compare(three(dcnet.DecoupledConv2d, 4, 12, **options, angular="linear"), torch.randn(shape))
    assert len(used) == 2
    assert None not in used


def test_channels_last_and_linear_maps(used):
    x = torch.randn(3, 4, 8, 8).to(memory_format=torch.channels_last)
    compare(three(dcnet.DecoupledConv2d, 4, 12, 3, groups=2, angular="linear"), x)
    assert used[0] is None  # norms of maps in this order are left to PyTorch
    assert used[1] is not None
    compare(three(dcnet.DecoupledLinear, 16, 12), torch.randn(700, 16))
    compare(three(dcnet.DecoupledConv1d, 4, 12, 5, padding=2), torch.randn(3, 4, 40))
    assert None not in used[2:]


def test_second_derivatives_and_batches_of_gradients(used):
    ours, reference, _ = three(dcnet.DecoupledConv2d, 4, 8, 3, angular="linear")
    x = torch.randn(3, 4, 6, 6)
    assert_close(results(ours, x, create_graph=True), results(reference, x, create_graph=True), 1e-3)
    y = ours(x.requires_grad_())
    leaves, gradients = [x, *ours.parameters()], torch.randn(4, *y.shape)
    batched = torch.autograd.grad(y, leaves, gradients, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(y, leaves, gradient, retain_graph=True) for gradient in gradients]
    for together, separate in zip(batched, zip(*singly, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(separate), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("wanted", [["x"], ["weight"], ["raw_radius"], ["bias"]], ids=str)
def test_only_some_gradients(used, wanted):
    layers = three(dcnet.DecoupledConv2d, 4, 8, 3)
    x = torch.randn(3, 4, 6, 6)
    for layer in layers:
        layer.requires_grad_(False)
        for name in set(wanted) - {"x"}:
            layer.get_parameter(name).requires_grad_(True)
    assert_within_rule(*(results(layer, x.to(layer.weight.dtype), wanted=wanted) for layer in layers))


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


def test_the_same_on_any_number_of_threads(used):
    layer, x = three(dcnet.DecoupledConv2d, 4, 24, 3)[0], torch.randn(6, 4, 30, 30)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        with torch.no_grad():
            dot, norms = torch.randn(6, 24, 30, 30, generator=torch.Generator().manual_seed(0)), x[:, :1].abs() + 1.0
        dot.requires_grad_()
        radius = torch.ones(24, requires_grad=True)
        y = epilogues.epilogue(dot, norms, layer.operator, (None, None, radius, None), 1e-4, 1, False)
        found.append((y, *torch.autograd.grad(y.square().sum(), [dot, radius])))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert None not in used
