"""First and second derivatives, numerically; what torch.compile and function transforms make of them."""

import pytest
import torch
from helpers import ANGULARS, LEARNED_LEAST, learned_by
from torch.autograd import gradcheck, gradgradcheck

import dcnet

CHECKED = [
    *((magnitude, "cosine", None) for magnitude in dcnet.magnitudes()),
    *(("tanh", angular, None) for angular in ANGULARS),
    *(
        (magnitude, "sigmoid:k=learned", weighting)
        for magnitude in ("tanh", "seg", "log")
        for weighting in ("linear", "joint", "separate")
    ),
    ("sphere", "linear", "linear"),
]


def function_of_all(magnitude, angular, weighting):
    """The operator as a function of every tensor it is differentiable in, and those tensors."""
    tensors = {"x": torch.randn(2, 4, 4, 3), "w": torch.randn(4, 2, 2, 2), "bias": torch.randn(4)}
    if dcnet.magnitudes()[magnitude].has_radius:
        tensors["radius"] = torch.rand(4) + 0.5
    for name in learned_by(angular):
        tensors[name] = torch.rand(4) + LEARNED_LEAST[name]
    tensors = {name: t.double().requires_grad_() for name, t in tensors.items()}

    def function(*values):
        given = dict(zip(tensors, values, strict=True))
        return dcnet.decoupled_conv2d(
            given["x"],
            given["w"],
            given["bias"],
            stride=(2, 1),
            padding=1,
            groups=2,
            magnitude=magnitude,
            angular=angular,
            weighting=weighting,
            radius=given.get("radius"),
            mean_norm="batch",
            parameters={name: given[name] for name in learned_by(angular)} or None,
            impl="eager",
        )

    return function, tuple(tensors.values())


@pytest.mark.parametrize(("magnitude", "angular", "weighting"), CHECKED)
def test_gradcheck(magnitude, angular, weighting):
    function, values = function_of_all(magnitude, angular, weighting)
    assert gradcheck(function, values)


@pytest.mark.parametrize(("magnitude", "angular", "weighting"), CHECKED)
def test_gradgradcheck(magnitude, angular, weighting):
    function, values = function_of_all(magnitude, angular, weighting)
    if angular in ("relu_cosine", "power_cosine:p=1.5", "power_cosine:p=learned"):
        pytest.skip("its second derivative jumps, or is unbounded, at cos θ = 0")
    assert gradgradcheck(function, values)


@pytest.mark.parametrize("angular", ["linear", "cosine", "square_cosine"])
def test_second_derivatives_through_a_network(angular):
    """A gradient penalty over two layers, eager against reference: every path of the second derivative."""
    results = []
    for impl in ("reference", "eager"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            dcnet.DecoupledConv2d(3, 4, 3, padding=1, angular=angular, impl=impl),
            torch.nn.Tanh(),
            dcnet.DecoupledConv2d(4, 4, 3, magnitude="log", angular=angular, impl=impl),
        ).double()
        x = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(net(x).sin().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), list(net.parameters())))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("magnitude", "angular"),
    [("tanh", "cosine"), pytest.param("ball", "linear", marks=pytest.mark.slow), ("log", "sigmoid:k=learned")],
)
def test_compiled(magnitude, angular):
    layer = dcnet.DecoupledConv2d(3, 4, 3, padding=1, magnitude=magnitude, angular=angular, bias=True).double()
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    wanted = [x, *layer.parameters()]
    expected = layer(x)
    actual = compiled(x)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    first = [torch.autograd.grad(y.sin().sum(), wanted) for y in (expected, actual)]
    for a, b in zip(*first, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11)
    if layer.num_batches_tracked is not None:
        assert layer.num_batches_tracked == 2
    layer.eval()
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-10, atol=1e-12)


def test_compiled_for_unknown_sizes():
    layer = dcnet.DecoupledConv2d(4, 4, 3, padding=1, stride=2, groups=2, angular="linear", bias=True)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for shape in ((2, 4, 5, 6), (3, 4, 9, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_second_derivatives_of_compiled_layers_raise(backend):
    layer = dcnet.DecoupledConv2d(3, 4, 3, angular="linear").double()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    y = torch.compile(layer, fullgraph=True, backend=backend)(x)
    with pytest.raises(RuntimeError, match=r"double backward|create_graph"):
        torch.autograd.grad(torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0].sum(), x)


def test_second_derivatives_under_a_backend_without_aot_are_right():
    layer = dcnet.DecoupledConv2d(3, 4, 3, angular="sigmoid:k=learned").double()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="eager")):
        (grad,) = torch.autograd.grad(call(x).sin().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(grad.cos().sum(), [x, layer.weight]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11)


def test_compiled_functional_form():
    x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)

    def call(x, w):
        return dcnet.decoupled_conv2d(
            x, w, magnitude="seg:beta=0.2", angular="sigmoid:k=0.2", radius=2.0, mean_norm="batch"
        )

    torch.testing.assert_close(torch.compile(call, fullgraph=True)(x, w), call(x, w))


def test_function_transforms():
    """Per-sample gradients by vmap and grad, and forward-mode derivatives, agree with reverse mode."""
    x, w = torch.randn(2, 4, 4, 3, dtype=torch.float64), torch.randn(4, 2, 2, 2, dtype=torch.float64)

    def loss(w, sample):
        return (
            dcnet.decoupled_conv2d(sample[None], w, groups=2, magnitude="tanh", angular="linear", radius=2.0)
            .sin()
            .sum()
        )

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    for i, sample in enumerate(x):
        leaf = w.clone().requires_grad_()
        torch.testing.assert_close(per_sample[i], torch.autograd.grad(loss(leaf, sample), leaf)[0])
    direction = torch.randn_like(w)
    _, forward = torch.func.jvp(lambda w: loss(w, x[0]), (w,), (direction,))
    torch.testing.assert_close(forward, (per_sample[0] * direction).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, direction)
        tangent = torch.autograd.forward_ad.unpack_dual(loss(dual, x[0])).tangent
    torch.testing.assert_close(tangent, forward)


def test_transforms_of_layers_in_training_mode_say_what_to_do():
    layer, x = dcnet.DecoupledConv2d(2, 3, 3), torch.randn(4, 2, 5, 5)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, image):
        return torch.func.functional_call(layer, parameters, (image.unsqueeze(0),)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    with pytest.raises(RuntimeError, match=r"moves the running average of E.*call model\.eval\(\) first"):
        per_sample(parameters, x)
    layer.eval()
    assert per_sample(parameters, x)["weight"].shape == (4, 3, 2, 3, 3)
