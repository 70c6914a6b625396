"""Explanations: a decoupled network as a linear map for one image, and contributions that add up to the logit."""

import copy
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import OPERATORS, learned_by, needs
from torch import nn

import dcnet
from dcnet.explaining import grad_cam, integrated_gradients
from dcnet.layers import Block, Decoupled, decoupled_layers
from dcnet.models import Normalize

EXACT = {"rtol": 1e-10, "atol": 1e-11}  # float64, after some hundred operations


def stirred(model):
    """The model in float64 and evaluation mode, with every parameter and average somewhere else than at its start."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.double().parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)
        if isinstance(module, Decoupled) and module.running_norm is not None:
            module.running_norm.uniform_(0.5, 2.0, generator=generator)
    return model.eval()


def images(*sizes, seed=0):
    return torch.rand(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shift_of(module):
    """The constant that a module adds to its output, in the shape that goes with it; None where it adds nothing."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        shift = module.bias - module.weight * module.running_mean / (module.running_var + module.eps).sqrt()
        return shift.reshape(-1, *[1] * (2 if isinstance(module, nn.BatchNorm2d) else 0))
    if isinstance(module, Normalize):
        return -module.mean / module.std
    if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
        return module.bias.reshape(-1, *[1] * (2 if isinstance(module, nn.Conv2d) else 0))
    return None


def constants_share(model, x, target):
    """What the constants of a network add to the logits, each by its own: constant × gradient of the logit in it."""
    outputs = []

    def keep(module, inputs, output):
        outputs.append((output, shift_of(module)))
        return output.clone()  # which an activation in place may write over

    with dcnet.explanations(model):
        handles = [module.register_forward_hook(keep) for module in model.modules() if shift_of(module) is not None]
        logits = model(x.clone().requires_grad_()).gather(1, target[:, None]).sum()
        for handle in handles:
            handle.remove()
        gradients = torch.autograd.grad(logits, [output for output, _ in outputs]) if outputs else ()
    shares = [(g * shift).flatten(1).sum(1).detach() for g, (_, shift) in zip(gradients, outputs, strict=True)]
    return sum(shares, torch.zeros(len(x), dtype=torch.float64))


def check(model, x, target=None):
    """Contributions and the constants' own share, which are computed apart, make the logit that the network gives."""
    with torch.no_grad():
        outputs = model(x)
    found = dcnet.explain(model, x, target)
    expected = outputs.gather(1, found.target[:, None]).squeeze(1)
    torch.testing.assert_close(found.logits, expected, **EXACT)
    scale = found.contributions.abs().sum() / len(x) + 1.0
    pixels, constants = found.contributions.flatten(1).sum(1), constants_share(model, x, found.target)
    assert float((pixels + constants - expected).abs().max()) < 1e-11 * float(scale)
    assert float((pixels + found.bias - expected).abs().max()) < 1e-12 * float(scale)
    assert found.contributions.shape == x.shape
    torch.testing.assert_close(found.maps.flatten(1).sum(1), pixels)
    return found


# -- layers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("magnitude", "angular", "weighting"), OPERATORS)
def test_every_operator_is_its_kernel_times_a_fixed_factor(magnitude, angular, weighting):
    layer = dcnet.DecoupledLinear(6, 4, bias=True, magnitude=magnitude, angular=angular, weighting=weighting)
    layer, x = stirred(layer), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    expected = layer(x).detach()
    with dcnet.explanations(layer):
        y = layer(x)
        torch.testing.assert_close(y.detach(), expected, **EXACT)
        jacobian = torch.stack([torch.autograd.grad(y[:, o].sum(), x, retain_graph=True)[0] for o in range(4)], 1)
    torch.testing.assert_close((jacobian * x[:, None]).sum(2).detach() + layer.bias.detach(), expected, **EXACT)
    factors = (expected - layer.bias.detach()) / (x @ layer.weight.T).detach()
    torch.testing.assert_close(jacobian, factors[:, :, None] * layer.weight.detach(), **EXACT)
    if angular not in ("cosine", "relu_cosine") or magnitude not in (
        "linear",
        "sphere",
    ):  # outside, the gradient is another
        (outside,) = torch.autograd.grad(layer(x)[:, 0].sum(), x)
        assert not torch.allclose(outside, jacobian[:, 0])


@pytest.mark.parametrize(
    ("kind", "sizes", "geometry"),
    [
        (dcnet.DecoupledConv1d, (2, 4, 9), {"stride": 2, "padding": 2, "dilation": 2, "groups": 2}),
        (dcnet.DecoupledConv2d, (2, 4, 7, 6), {"padding": "same", "padding_mode": "reflect"}),
        (dcnet.DecoupledConv2d, (2, 4, 7, 6), {"padding": 1, "padding_mode": "circular", "groups": 4}),
        (dcnet.DecoupledConv2d, (4, 7, 6), {"padding": "same", "padding_mode": "circular", "dilation": (2, 3)}),
        (dcnet.DecoupledConv1d, (2, 4, 9), {"padding": 9, "padding_mode": "circular", "stride": 2}),
        (dcnet.DecoupledConv2d, (4, 7, 6), {"stride": (2, 1), "padding": (0, 2), "groups": 2}),
        (dcnet.DecoupledConv3d, (2, 4, 4, 5, 4), {"padding": 1, "padding_mode": "replicate"}),
    ],
)
@pytest.mark.parametrize(("magnitude", "angular"), [("tanh", "sigmoid:k=learned"), ("log", "linear")])
def test_every_geometry(kind, sizes, geometry, magnitude, angular):
    layer = stirred(kind(4, 8, 3, bias=True, magnitude=magnitude, angular=angular, **geometry))
    x = torch.randn(sizes, dtype=torch.float64, requires_grad=True)
    expected = layer(x).detach()
    with dcnet.explanations(layer):
        y = layer(x)
    torch.testing.assert_close(y.detach(), expected, **EXACT)
    given = torch.randn_like(y)
    (slope,) = torch.autograd.grad(y, x, given)
    bias = layer.bias.reshape(-1, *[1] * (layer.weight.dim() - 2))
    torch.testing.assert_close((slope * x).sum(), ((y - bias) * given).sum(), **EXACT)


@pytest.mark.parametrize("eps", [1e-4, 0.0])
@pytest.mark.parametrize("angular", [*dcnet.angulars(), "power_cosine:p=1"])
def test_right_angles_and_empty_patches(angular, eps):
    """At a right angle the factor is the limit of those close to it; nothing is infinite."""
    layer = dcnet.DecoupledLinear(3, 1, magnitude="linear", angular=angular, eps=eps).double().eval()
    layer.weight.data = torch.tensor([[2.0, 0.0, 0.0]], dtype=torch.float64)
    x = torch.tensor([[0.0, 3.0, 0.0], [1e-9, 3.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    with dcnet.explanations(layer):
        y = layer(x)
        (slopes,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, layer(x), **EXACT)
    assert bool(slopes.isfinite().all())
    assert y[0].item() == y[2].item() == 0.0
    if angular != "relu_cosine":  # which has a kink there
        torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-6, atol=1e-8)


def test_an_angular_function_that_is_not_0_at_a_right_angle(catalogue):
    @dcnet.angular
    def lifted(c):
        """½ + ½·cos θ"""
        return 0.5 + 0.5 * c, 0.5

    layer = stirred(dcnet.DecoupledConv2d(3, 5, 3, magnitude="tanh", angular="lifted", bias=True))
    x = images(2, 3, 6, 6).requires_grad_()
    with dcnet.explanations(layer):
        y = layer(x)
    torch.testing.assert_close(y, layer(x), **EXACT)
    (slopes,) = torch.autograd.grad(y.sum(), x)
    # half of h is there at every angle: no pixel's, but a constant as the bias is
    half = stirred(dcnet.DecoupledConv2d(3, 5, 3, magnitude="tanh:alpha=0.5", angular="cosine"))
    half.load_state_dict({key: value for key, value in layer.state_dict().items() if key != "bias"})
    torch.testing.assert_close((slopes * x).sum(), half(x).sum(), **EXACT)


# -- networks ----------------------------------------------------------------------------------------------------------


def small(magnitude, angular, norm, bias):
    def conv(*sizes):
        return dcnet.DecoupledConv2d(*sizes, 3, padding=1, bias=bias, magnitude=magnitude, angular=angular)

    def normalized(channels):
        return nn.BatchNorm2d(channels) if norm else nn.Identity()

    return nn.Sequential(
        Normalize(),
        conv(3, 6),
        normalized(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Block(conv(6, 6), normalized(6) if norm else None, "prelu"),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        dcnet.DecoupledLinear(24, 8, bias=bias, magnitude=magnitude, angular=angular),
        nn.Linear(8, 4, bias=bias),
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("magnitude", "angular"), [o[:2] for o in OPERATORS if o[2] is None])
def test_contributions_add_up(magnitude, angular, norm, bias):
    check(stirred(small(magnitude, angular, norm, bias)), images(3, 3, 8, 8))


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
def test_every_padding_mode(padding_mode):
    model = nn.Sequential(
        dcnet.DecoupledConv2d(3, 6, 3, padding=(1, 2), bias=True, padding_mode=padding_mode),
        nn.ReLU(),
        dcnet.DecoupledConv2d(6, 6, 3, padding="same", groups=3, padding_mode=padding_mode, magnitude="ball"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )
    check(stirred(model), images(2, 3, 7, 6))


def test_without_constants_pixels_are_the_whole_logit():
    model = stirred(small("tanh", "linear", norm=False, bias=False))
    model[0] = nn.Identity().eval()
    found = check(model, images(4, 3, 8, 8), target=[0, 1, 2, 3])
    assert float(found.bias.abs().max()) < 1e-13
    assert float(found.contributions.abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet32", {}),
        ("resnet32", {"magnitude": "seg", "angular": "sigmoid:k=learned", "activation": None, "head": "normalized"}),
        ("resnet18", {"magnitude": "linear", "angular": "power_cosine:p=learned", "weighting": "linear"}),
        ("resnet18_modified", {"magnitude": "log", "angular": "linear"}),
        ("cnn9_narrow", {"magnitude": "ball", "angular": "linear", "norm": "batch"}),
        ("cnn6_2d", {"magnitude": "sphere", "angular": "relu_cosine"}),
        ("cnn9_narrow", {"magnitude": None}),
    ],
)
def test_our_networks(name, options):
    torch.manual_seed(1)
    model, x = dcnet.create_model(name, input_size=8, **options), images(4, 3, 8, 8)
    found = check(dcnet.recalibrate_(stirred(model), [x]), x, target=3)
    assert bool((found.contributions.abs().flatten(1).sum(1) > 0.1 * found.logits.abs()).all())


@pytest.mark.parametrize(("package", "magnitude"), [("torchvision", "tanh"), ("timm", "seg")])
def test_converted_networks_of_other_packages(package, magnitude):
    needs(package)
    if package == "timm":
        import timm

        model = timm.create_model("resnet10t", num_classes=7)
    else:
        from torchvision.models import resnet18

        model = resnet18(num_classes=7)
    assert len(dcnet.decouple_(model, magnitude, "linear").converted) > 8
    x = images(4, 3, 64, 64)
    found = check(dcnet.recalibrate_(stirred(model), [x]), x)
    assert bool((found.contributions.abs().flatten(1).sum(1) > 0.1 * found.logits.abs()).all())


def test_captum_agrees():
    """In this mode its input × gradient is our contribution."""
    attr = needs("captum.attr")
    model, x = stirred(small("ball", "sigmoid", norm=True, bias=True)), images(3, 3, 8, 8)
    found = dcnet.explain(model, x, target=2)
    with dcnet.explanations(model):
        theirs = attr.InputXGradient(model).attribute(x.clone().requires_grad_(), target=2)
    torch.testing.assert_close(theirs, found.contributions, **EXACT)


def test_grad_cam_and_integrated_gradients():
    needs("captum")
    model, x = stirred(small("tanh", "cosine", norm=True, bias=True)), images(3, 3, 8, 8)
    target = torch.tensor([0, 1, 2])
    map_of = grad_cam(model, x, target)
    assert map_of.shape == (3, 8, 8)
    assert float(map_of.min()) >= 0.0
    found = integrated_gradients(model, x, target, steps=200)
    with torch.no_grad():
        change = (model(x) - model(torch.zeros_like(x))).gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(found.flatten(1).sum(1), change, rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match="has no two-dimensional convolution for Grad-CAM"):
        grad_cam(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)).double().eval(), x, target)


def test_without_captum_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "captum", None)
    model, x = stirred(small("tanh", "cosine", norm=True, bias=True)), images(1, 3, 8, 8)
    for method in (grad_cam, integrated_gradients):
        with pytest.raises(ModuleNotFoundError, match=r"run: pip install 'dcnet\[explanations\]'"):
            method(model, x, torch.tensor([0]))


# -- what is not linear ------------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """An operation on a part, in place, of which autograd's record does not say what it is."""

    def forward(self, x):
        x = x.clone()
        x[:, :2].sigmoid_()
        return x


class Gated(nn.Module):
    """Features times a gate made of them, as in squeeze and excitation."""

    def forward(self, x):
        return x * x.mean((2, 3), keepdim=True)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.GELU(), r"GeluBackward0 in '1' \(GELU\) is not linear"),
        (nn.GroupNorm(2, 6), r"NativeGroupNormBackward0 in '1' \(GroupNorm\) is not linear"),
        (Gated(), r"MulBackward0 in '1' \(Gated\) multiplies two results that depend on the image"),
        (nn.Softmax(1), "SoftmaxBackward0 in '1'"),
        (InPlace(), "CopySlices .*is not linear"),
    ],
)
def test_what_is_not_linear_is_named(module, message):
    layers = dcnet.DecoupledConv2d(3, 6, 3), module, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    with pytest.raises(ValueError, match=message):
        dcnet.explain(nn.Sequential(*layers).double().eval(), images(2, 3, 8, 8))


def test_what_is_linear_however_it_is_written():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = dcnet.DecoupledConv2d(6, 6, 3, padding=1)
            self.scale = nn.Parameter(torch.rand(6, 1, 1))

        def forward(self, x):
            x = torch.cat([x, 1.0 - x], 1)  # B-cos networks take images so
            y = nn.functional.pad(self.conv(x), (1, 0, 0, 1), mode="reflect")
            y = (
                nn.functional.hardtanh(y * self.scale, -0.5, 0.2)
                + nn.functional.leaky_relu(y)[:, [1, 0, 2, 3, 4, 5]] / 3
            )
            y = nn.functional.interpolate(y.abs(), scale_factor=2.0, mode="bilinear")
            return torch.einsum("nchw,kc->nk", y, self.scale.flatten(1).expand(6, 4).T).clamp(max=1e3)

    model, x = stirred(Written()), images(2, 3, 8, 8)
    found = dcnet.explain(model, x)
    torch.testing.assert_close(
        found.contributions.flatten(1).sum(1) + found.bias, model(x).max(1).values.detach(), **EXACT
    )


@pytest.mark.parametrize(
    ("x", "target", "error", "message"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), None, TypeError, "floating-point numbers, got torch.uint8"),
        ([1.0], None, TypeError, "got list"),
        (torch.rand(8, 8), None, ValueError, r"got the shape \(8, 8\)"),
        (torch.rand(0, 3, 8, 8), None, ValueError, "one image or more"),
        (torch.rand(2, 3, 8, 8), 4, ValueError, "a class from 0 to 3, got 4"),
        (torch.rand(2, 3, 8, 8), -1, ValueError, "a class from 0 to 3, got -1"),
        (torch.rand(2, 3, 8, 8), [0, 1, 2], ValueError, r"one for each of the 2 images, got the shape \(3,\)"),
        (torch.rand(2, 3, 8, 8), 0.5, TypeError, "as whole numbers; got 0.5"),
    ],
)
def test_refusals(x, target, error, message):
    model = small("tanh", "cosine", norm=True, bias=True).eval()
    with pytest.raises(error, match=message):
        dcnet.explain(model, x, target)
    assert not any(layer.explained_by for layer in decoupled_layers(model).values())


def test_models_that_give_something_else():
    x = torch.rand(2, 3, 8, 8)
    with pytest.raises(ValueError, match=r"must give logits \(2, classes\), got \(2, 5, 6, 6\)"):
        dcnet.explain(dcnet.DecoupledConv2d(3, 5, 3).eval(), x)
    with pytest.raises(TypeError, match=r"explanations are of an nn\.Module, got function"):
        dcnet.explain(lambda x: x, x)

    class Detached(nn.Module):
        def forward(self, x):
            return x.detach().flatten(1)

    with pytest.raises(ValueError, match="does not depend on the images, or was detached"):
        dcnet.explain(Detached().eval(), x)


# -- the context -------------------------------------------------------------------------------------------------------


def input_gradient(model, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x)[:, 0].sum(), x)[0]


def test_training_mode_is_refused():
    model, x = stirred(small("tanh", "cosine", norm=True, bias=True)), images(2, 3, 8, 8)
    model.train()
    with pytest.raises(ValueError, match=r"in training mode .* call model.eval\(\) first"), dcnet.explanations(model):
        pass
    model.eval()
    with dcnet.explanations(model):
        model[1].train()
        with pytest.raises(RuntimeError, match="DecoupledConv2d was put into training mode inside"):
            model(x)
        model[1].eval()
        model[2].train()
    with pytest.raises(ValueError, match="training mode"):
        dcnet.explain(model, x)


def test_nested_and_left_by_an_error():
    model, x = stirred(small("tanh", "cosine", norm=True, bias=True)), images(2, 3, 8, 8)
    outside = input_gradient(model, x)
    with dcnet.explanations(model) as same:
        assert same is model
        inside = input_gradient(model, x)
        with dcnet.explanations(model[1]):
            torch.testing.assert_close(input_gradient(model, x), inside)
        torch.testing.assert_close(input_gradient(model, x), inside)
        dcnet.explain(model, x)
        torch.testing.assert_close(input_gradient(model, x), inside)
    assert not torch.allclose(inside, outside)
    torch.testing.assert_close(input_gradient(model, x), outside, rtol=0.0, atol=0.0)
    with pytest.raises(KeyError), dcnet.explanations(model):
        raise KeyError
    torch.testing.assert_close(input_gradient(model, x), outside, rtol=0.0, atol=0.0)


def test_copies_and_files():
    model, x = stirred(small("tanh", "cosine", norm=True, bias=True)), images(2, 3, 8, 8)
    outside = input_gradient(model, x)
    with dcnet.explanations(model):
        inside = input_gradient(model, x)
        copied, stored = copy.deepcopy(model), pickle.dumps(model)
        assert set(copied.state_dict()) == set(model.state_dict())
        torch.testing.assert_close(input_gradient(copied, x), inside)
        torch.testing.assert_close(input_gradient(pickle.loads(stored), x), outside)
    torch.testing.assert_close(input_gradient(copied, x), outside, rtol=0.0, atol=0.0)
    torch.testing.assert_close(input_gradient(model, x), outside, rtol=0.0, atol=0.0)


def test_hooks_see_every_module():
    model, x = stirred(dcnet.create_model("cnn9_narrow", input_size=8, norm="batch")), images(2, 3, 8, 8)
    seen = []
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d | dcnet.DecoupledConv2d):
            module.register_forward_hook(lambda module, inputs, output, name=name: seen.append(name))
    expected = model(x).detach()
    seen.clear()
    with dcnet.explanations(model):
        torch.testing.assert_close(model(x).detach(), expected, **EXACT)
    assert len(seen) == 18


def test_no_gradient_for_parameters_of_decoupled_layers_and_none_left_behind():
    model, x = stirred(small("tanh", "cosine", norm=True, bias=True)), images(2, 3, 8, 8)
    with torch.no_grad():
        dcnet.explain(model, x)
    with torch.inference_mode():
        dcnet.explain(model, torch.rand(2, 3, 8, 8, dtype=torch.float64))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not x.requires_grad
    with dcnet.explanations(model):
        model(x).sum().backward()
    assert all(p.grad is None for layer in decoupled_layers(model).values() for p in layer.parameters())
    assert model[-1].weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype):
    model, x = stirred(small("tanh", "sigmoid", norm=True, bias=True)), images(3, 3, 8, 8)
    exact = dcnet.explain(model, x, target=1)
    found = dcnet.explain(copy.deepcopy(model).to(dtype), x.to(dtype), target=1)
    assert found.contributions.dtype == dtype
    error = (found.contributions.double() - exact.contributions).norm() / exact.contributions.norm()
    assert float(error) < (1e-4 if dtype == torch.float32 else 0.2)


def test_compiled():
    model = stirred(nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 3)))
    x = images(2, 3, 5, 5)
    outside = input_gradient(model, x)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(input_gradient(compiled, x), outside, **EXACT)
    with dcnet.explanations(model):
        inside = input_gradient(model, x)
        torch.testing.assert_close(input_gradient(compiled, x), inside, **EXACT)
        with pytest.raises(ValueError, match="CompiledFunction"):
            dcnet.explain(compiled, x)


def test_learned_parameters_are_covered():
    assert {name for _, angular, _ in OPERATORS for name in learned_by(angular)} == {"k", "p"}


def test_the_code_of_the_page_runs():
    page = (Path(__file__).parent.parent / "docs" / "explanations.md").read_text(encoding="utf-8")
    scope = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, scope)
    found = scope["found"]
    torch.testing.assert_close(found.contributions.flatten(1).sum(1) + found.bias, scope["logits"].max(1).values)
    assert found.maps.shape == (4, 8, 8)
