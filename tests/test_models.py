"""The networks: structure, twins, sizes, blocks against layers one after the other."""

import pytest
import torch
from torch import nn

import dcnet
from dcnet.layers import Block

CONVOLUTIONS = {
    "cnn9": [64] * 3 + [128] * 3 + [256] * 3,
    "cnn9_narrow": [32] * 3 + [64] * 3 + [128] * 3,
    "resnet32": [96] * 11 + [192] * 10 + [384] * 10,
}


def test_all_are_here():
    assert dcnet.list_models() == list(CONVOLUTIONS)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_structure(name):
    net = dcnet.create_model(name)
    assert [m.out_channels for m in net.modules() if isinstance(m, dcnet.DecoupledConv2d)] == CONVOLUTIONS[name]
    plain = dcnet.create_model(name, magnitude=None)
    assert not [m for m in plain.modules() if isinstance(m, dcnet.DecoupledConv2d | dcnet.DecoupledLinear)]
    extras = sum(p.numel() for n, p in net.named_parameters() if "raw_" in n)
    assert sum(p.numel() for p in net.parameters()) - extras == sum(p.numel() for p in plain.parameters())
    net.load_state_dict(plain.state_dict(), strict=True)  # a pretrained start
    assert bool([m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]) == (name != "cnn9_narrow")


@pytest.mark.parametrize("magnitude", ["tanh", "sphere", None])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("size", [8, 11])
def test_forward(name, magnitude, size):
    net = dcnet.create_model(name, num_classes=7, in_channels=1, input_size=size, magnitude=magnitude)
    y = net(torch.rand(2, 1, size, size))
    assert y.shape == (2, 7)
    y.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_options():
    net = dcnet.create_model(
        "cnn9_narrow", norm="batch", activation="prelu", head="normalized", penultimate_activation=True, weighting="linear", radius=2.0
    )
    assert isinstance(net.head, dcnet.DecoupledLinear)
    assert net.penultimate.slope.tolist() == [0.0]
    assert net.stages[0].conv.weighting == "linear"
    assert net(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    torch.testing.assert_close(net.normalize(torch.full((1, 3, 1, 1), 0.5)), torch.zeros(1, 3, 1, 1))
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.2, 0.2]
    assert dcnet.create_model("cnn9", mean=mean, std=std).normalize.mean.flatten().tolist() == pytest.approx(mean)
    for options, message in [
        ({"name": "resnet23"}, "Did you mean 'resnet32'"),
        ({"norm": "layer"}, "unknown norm 'layer'"),
        ({"activation": "gelu"}, "unknown activation 'gelu'"),
        ({"head": "cosine"}, "unknown head 'cosine'"),
        ({"input_size": 7}, "input_size=7 is too small for 3 poolings; possible: 8 and up"),
        ({"magnitude": None, "radius": 2.0}, "magnitude=None builds a plain network"),
    ]:
        with pytest.raises(ValueError, match=message):
            dcnet.create_model(**{"name": "cnn9", **options})


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("training", [True, False])
def test_block_is_its_layers(training, momentum):
    conv, norm = dcnet.DecoupledConv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum)
    block = Block(conv, norm, "relu")
    twin_conv, twin_norm = dcnet.DecoupledConv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum)
    twin_conv.load_state_dict(conv.state_dict())
    x, residual = torch.randn(2, 3, 6, 6), torch.randn(2, 4, 4, 4)
    for module in (block, twin_conv, twin_norm):
        module.train(training)
    for _ in range(2):
        torch.testing.assert_close(block(x, residual), torch.relu(twin_norm(twin_conv(x)) + residual))
    for a, b in zip([*conv.buffers(), *norm.buffers()], [*twin_conv.buffers(), *twin_norm.buffers()], strict=True):
        torch.testing.assert_close(a, b)
