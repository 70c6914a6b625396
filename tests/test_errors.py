"""Bad input: an error that names the culprit, the value and what was possible."""

import numpy
import pytest
import torch

import dcnet

X, W = torch.randn(2, 4, 6, 6), torch.randn(6, 4, 3, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"magnitude": "tahn"}, r"unknown magnitude 'tahn'\. Did you mean 'tanh'\? Known: sphere, ball"),
        ({"angular": "cosinus"}, r"unknown angular 'cosinus'\. Did you mean 'cosine'\? Known: cosine, linear"),
        (
            {"weighting": "joined"},
            r"unknown weighting 'joined'\. Did you mean 'joint'\? Possible: None, 'linear', 'joint', 'separate'",
        ),
        (
            {"magnitude": "sphere", "weighting": "joint"},
            r"weighting='joint' bends a norm, but the magnitude 'sphere' has none to bend",
        ),
        ({"magnitude": "sphere", "weighting": "separate"}, r"possible here: None, 'linear'"),
        ({"radius": 0.0}, "radius must be a finite number > 0, .*got 0.0"),
        ({"radius": -1.0}, "got -1.0"),
        ({"radius": float("nan")}, "got nan"),
        ({"radius": True}, "got True"),
        ({"magnitude": "log", "radius": 2.5}, "radius=2.5: the magnitude 'log' has no radius"),
        ({"eps": -1e-4}, "eps must be a finite number ≥ 0, got -0.0001"),
    ],
)
def test_layers_and_functions_alike(options, message):
    with pytest.raises(ValueError, match=message):
        dcnet.DecoupledConv2d(4, 6, 3, **options)
    with pytest.raises(ValueError, match=message):
        dcnet.DecoupledLinear(4, 6, **options)
    with pytest.raises(ValueError, match=message):
        dcnet.decoupled_conv2d(X, W, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": "learnt"}, "unknown radius 'learnt'; possible: 'learned', or a number > 0"),
        ({"impl": "fast"}, "unknown impl 'fast'"),
        ({"momentum": 2.0}, "momentum must be a number from 0 to 1, or None"),
        ({"groups": 3}, "divisible by groups"),
        ({"padding_mode": "mirror"}, "padding_mode"),
        ({"padding": "full"}, "padding"),
        ({"padding": "same", "stride": 2}, "padding='same'"),
        ({"angular": "sigmoid:k=0"}, "k must be a number > 0, got 0"),
        ({"angular": "power_cosine:p=0.9"}, "p must be a number ≥ 1, got 0.9"),
        ({"magnitude": "mix:alpha=0"}, "alpha must be a number > 0, got 0"),
    ],
)
def test_layers(options, message):
    with pytest.raises(ValueError, match=message):
        dcnet.DecoupledConv2d(4, 6, 3, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": torch.ones(5)}, r"radius must be a number or have the shape \(6,\).*got \(5,\)"),
        ({"mean_norm": "mean"}, r"unknown mean_norm 'mean'; possible: None, 'batch', or a tensor of shape \(1,\)"),
        ({"mean_norm": torch.ones(2)}, r"mean_norm must be a tensor of shape \(1,\), one for each group, got \(2,\)"),
        ({"mean_norm": 2.0}, r"mean_norm must be a tensor of shape \(1,\), one for each group, got 2.0"),
        ({"angular": "sigmoid:k=learned"}, r"k=learned: give its values as parameters=\{'k'"),
        (
            {"parameters": {"k": torch.ones(6)}},
            r"parameters\['k'\]: neither 'tanh' nor 'cosine' can learn it.*Learnable here: none",
        ),
        (
            {"angular": "sigmoid", "parameters": {"k": torch.ones(5)}},
            r"parameters\['k'\] must be a tensor of shape \(6,\).*got \(5,\)",
        ),
        ({"angular": "sigmoid", "parameters": {"kk": torch.ones(6)}}, "Did you mean 'k'|Learnable here: k"),
        (
            {"impl": "egaer"},
            r"unknown impl 'egaer'\. Did you mean 'eager'\? Possible: 'auto', 'reference', 'eager', 'fused'",
        ),
        ({"stride": 0}, "stride must be a whole number ≥ 1, or 2 of them, got 0"),
        ({"dilation": (1, 2, 3)}, r"dilation must be a whole number ≥ 1, or 2 of them, got \(1, 2, 3\)"),
        ({"padding": -1}, "padding must be a whole number ≥ 0"),
        ({"padding": "full"}, "unknown padding 'full'; possible: 'same', 'valid', or numbers"),
        ({"padding": "same", "stride": 2}, r"padding='same' needs stride 1, got stride=\(2, 2\)"),
        ({"padding_mode": "mirror"}, "unknown padding_mode 'mirror'; possible: zeros, reflect, replicate, circular"),
        ({"groups": 0}, "groups must be a whole number ≥ 1, got 0"),
        ({"groups": 4}, "input has 4 channels, the layer expects 16"),
    ],
)
def test_functions(options, message):
    with pytest.raises(ValueError, match=message):
        dcnet.decoupled_conv2d(X, W, **options)


def test_more_inputs():
    with pytest.raises(ValueError, match=r"bias must have the shape \(6,\), one for each kernel, got \(5,\)"):
        dcnet.decoupled_conv2d(X, W, torch.ones(5))
    with pytest.raises(TypeError, match="bias has dtype"):
        dcnet.decoupled_conv2d(X, W, torch.ones(6).long())
    with pytest.raises(ValueError, match="the kernel spans 9 in dimension 2, but the input with its padding has 6"):
        dcnet.decoupled_conv2d(X, W, dilation=4)
    with pytest.raises(ValueError, match="the kernel spans 7"):
        dcnet.patch_norm(X, 7)
    with pytest.raises(ValueError, match="stride must be a whole number"):
        dcnet.decoupled_conv2d(X, W, stride=1.5)
    with pytest.raises(ValueError, match="groups must be a whole number"):
        dcnet.patch_norm(X, 3, groups=0)
    with pytest.raises(ValueError, match="got a single number"):
        dcnet.DecoupledLinear(1, 1)(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"magnitude must be a name, got None\. Known: sphere"):
        dcnet.DecoupledConv2d(4, 6, 3, magnitude=None)
    with pytest.raises(ValueError, match="sync must be True or False"):
        dcnet.DecoupledConv2d(4, 6, 3, sync="yes")
    with pytest.raises(ValueError, match="or 'learned' in a layer, got None"):
        dcnet.DecoupledConv2d(4, 6, 3, radius=None)
    two = numpy.int64(2)
    assert dcnet.DecoupledConv2d(4, 6, 3, stride=two, radius=numpy.float32(2.0))(X).shape == (2, 6, 2, 2)


def test_inputs():
    layer = dcnet.DecoupledConv2d(4, 6, 3)
    with pytest.raises(ValueError, match=r"input has 5 channels, the layer expects 4 \(shape \(2, 5, 6, 6\)\)"):
        layer(torch.randn(2, 5, 6, 6))
    with pytest.raises(ValueError, match=r"input must have 3 \(unbatched\) or 4 dimensions, got the shape \(6, 6\)"):
        layer(torch.randn(6, 6))
    with pytest.raises(ValueError, match="input has 7 features, the layer expects 4"):
        dcnet.DecoupledLinear(4, 6)(torch.randn(2, 7))
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=f"input has dtype {dtype}; decoupled operators take float64"):
            layer(torch.zeros(2, 4, 6, 6, dtype=dtype))
        with pytest.raises(TypeError, match="input has dtype"):
            dcnet.patch_norm(torch.zeros(2, 4, 6, 6, dtype=dtype), 3)
    for module in (layer, dcnet.DecoupledLinear(6, 4)):
        with pytest.raises(TypeError, match=r"input has dtype torch\.float64, the weight torch\.float32; convert"):
            module(X.double())
        with pytest.raises(TypeError, match=r"input has dtype torch\.float64"), torch.autocast("cpu", torch.bfloat16):
            module(X.double())
        with torch.autocast("cpu", torch.bfloat16):
            assert module(X.half()).dtype == torch.bfloat16
    for takes_model in (dcnet.parameter_groups, dcnet.decouple_):
        with pytest.raises(TypeError, match="model must be the module itself, got generator"):
            takes_model(layer.parameters())
    with pytest.raises(TypeError, match="input must be a tensor, got list"):
        layer([[1.0]])
    with pytest.raises(TypeError, match="weight has dtype"):
        dcnet.decoupled_conv2d(X, W.long())
    with pytest.raises(ValueError, match=r"weight must be \(out_channels.*4 dimensions, got the shape \(6, 4, 3\)"):
        dcnet.decoupled_conv2d(X, W[..., 0])
    with pytest.raises(ValueError, match="groups=4 does not divide the 6 kernels"):
        dcnet.decoupled_conv2d(torch.randn(2, 16, 6, 6), W, groups=4)
    with pytest.raises(ValueError, match="groups=3 does not divide the 4 channels"):
        dcnet.patch_norm(X, 3, groups=3)
    with pytest.raises(ValueError, match=r"one to three spatial dimensions, got the shape \(2, 4\)"):
        dcnet.patch_norm(X[:, :, 0, 0], 3)
    with pytest.raises(ValueError, match="scale must be a finite number > 0"):
        dcnet.project_weights_(layer, scale=0.0)


def test_a_projection_needs_an_optimizer():
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got NoneType"):
        dcnet.WeightProjection(dcnet.DecoupledLinear(4, 3), None)
