"""The networks: structure, twins, sizes, blocks against layers one after the other."""

import copy
import re

import pytest
import torch
from torch import nn

import dcnet
from dcnet.layers import Block

CONVOLUTIONS = {
    "cnn9": [64] * 3 + [128] * 3 + [256] * 3,
    "cnn9_narrow": [32] * 3 + [64] * 3 + [128] * 3,
    "resnet32": [96] * 11 + [192] * 10 + [384] * 10,
    "resnet18": [64] * 5 + [128] * 4 + [256] * 4 + [512] * 4,
    "resnet18_modified": [128] * 4 + [256] * 5 + [512] * 7 + [1024],
    "cnn6_2d": [32] * 2 + [64] * 2 + [128] * 2,
}


def conv(inputs: int, outputs: int, kernel: int = 3) -> int:
    """Parameters of a convolution followed by BatchNorm."""
    return inputs * outputs * kernel**2 + 2 * outputs


def stage(inputs: int, width: int, units: int) -> int:
    """Parameters of a stage of residual units; a 1×1 shortcut where the width changes."""
    return (
        conv(inputs, width) + (2 * units - 1) * conv(width, width) + (conv(inputs, width, 1) if inputs != width else 0)
    )


# of the plain twins for 10 classes and 32×32 images with 3 channels, counted from the paper's table
PARAMETERS = {
    "cnn9": sum([conv(3, 64), 2 * conv(64, 64), conv(64, 128), 2 * conv(128, 128), conv(128, 256), 2 * conv(256, 256)])
    + (256 * 16 * 512 + 2 * 512)
    + (512 * 10 + 10),
    "cnn9_narrow": 9 * (3 * 32 + 2 * 32**2 + 32 * 64 + 2 * 64**2 + 64 * 128 + 2 * 128**2)
    + 128 * 16 * 256
    + 256 * 10
    + 10,
    "resnet32": conv(3, 96) + stage(96, 96, 5) + stage(96, 192, 5) + stage(192, 384, 5) + 384 * 10 + 10,
    "resnet18": conv(3, 64, 7)
    + stage(64, 64, 2)
    + stage(64, 128, 2)
    + stage(128, 256, 2)
    + stage(256, 512, 2)
    + 512 * 10
    + 10,
    "resnet18_modified": conv(3, 128, 7)
    + (conv(128, 128) + stage(128, 128, 1))
    + (conv(128, 256) + stage(256, 256, 2))
    + (conv(256, 512) + stage(512, 512, 3))
    + conv(512, 1024)
    + (1024 * 10 + 10)
    + (
        128 + 128 + 256 + 512 + 1024 + 1 * 128 + 2 * 256 + 3 * 512
    ),  # slopes: of root and convolutions between stages, and in each unit
    "cnn6_2d": sum([conv(3, 32), conv(32, 32), conv(32, 64), conv(64, 64), conv(64, 128), conv(128, 128)])
    + (128 * 16 * 256 + 2 * 256)
    + 256 * 2
    + (2 * 10 + 10),
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
    assert sum(p.numel() for p in plain.parameters()) == PARAMETERS[name]
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


@pytest.mark.parametrize("magnitude", ["tanh", None])
def test_initialization(magnitude):
    """He's, by fan-in, everywhere; in `resnet18_modified` Gaussian inside units and Xavier's elsewhere."""

    def deviations(name, **options):
        torch.manual_seed(0)
        net = dcnet.create_model(name, magnitude=magnitude, **options)
        return {n: (p.std() * (p[0].numel() ** 0.5)).item() for n, p in net.named_parameters() if p.dim() > 1}, net

    for name, head in (("resnet32", "linear"), ("cnn9", "normalized")):
        for key, deviation in deviations(name, head=head)[0].items():
            assert deviation == pytest.approx(2**0.5, rel=0.12), key
    _, modified = deviations("resnet18_modified")
    assert modified.units[1].first.conv.weight.std().item() == pytest.approx(0.01, rel=0.05)
    weight = modified.units[0].conv.weight
    assert weight.abs().max().item() == pytest.approx((6 / (9 * (128 + 128))) ** 0.5, rel=0.01)


def test_options():
    net = dcnet.create_model(
        "cnn9_narrow",
        norm="batch",
        activation="prelu",
        head="normalized",
        penultimate_activation=True,
        weighting="linear",
        radius=2.0,
    )
    assert isinstance(net.head, dcnet.DecoupledLinear)
    assert net.penultimate.slope.tolist() == [0.0] * 256
    assert net.stages[0].conv.weighting == "linear"
    assert net(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    torch.testing.assert_close(net.normalize(torch.full((1, 3, 1, 1), 0.5)), torch.zeros(1, 3, 1, 1))
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.2, 0.2]
    assert dcnet.create_model("cnn9", mean=mean, std=std).normalize.mean.flatten().tolist() == pytest.approx(mean)
    for options, message in [
        ({"name": "resnet23"}, "Did you mean 'resnet32'"),
        ({"norm": "layer"}, "unknown norm 'layer'"),
        ({"activation": "swish"}, "unknown activation 'swish'"),
        ({"head": "cosine"}, "unknown head 'cosine'"),
        (
            {"name": "resnet18", "penultimate_activation": True},
            "resnet18 has no penultimate layer .* possible for cnn9, cnn9_narrow",
        ),
        (
            {"name": "cnn6_2d", "penultimate_norm": True},
            "penultimate_norm=True: cnn6_2d has no penultimate layer of which",
        ),
        ({"root_activation": True}, "cnn9 has no root convolution; possible for resnet32"),
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


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        (lambda: dcnet.DecoupledLinear(5, 7), (2, 7, 5)),
        (lambda: dcnet.DecoupledConv1d(3, 7, 3, padding=1), (3, 7)),
        (lambda: dcnet.DecoupledConv2d(3, 7, 3, padding=1), (3, 7, 7)),
    ],
    ids=["tokens", "a signal alone", "an image alone"],
)
def test_norms_that_take_another_dimension_for_the_channels(conv, size):
    """As many tokens, or places, as there are channels: the norm runs, and normalizes those."""
    conv, x = conv(), torch.randn(size)
    norm = nn.BatchNorm1d(7)
    nn.init.normal_(norm.weight)
    expected = torch.relu(copy.deepcopy(norm)(copy.deepcopy(conv)(x)))
    torch.testing.assert_close(Block(conv, norm, "relu")(x), expected)


def test_what_others_put_around_the_parts_of_a_block():
    class Doubled(dcnet.DecoupledConv2d):
        def forward(self, x):
            return super().forward(x) * 2.0

    x, seen = torch.randn(2, 3, 6, 6), []
    block = Block(Doubled(3, 4, 3), nn.BatchNorm2d(4), "relu").eval()
    torch.testing.assert_close(block(x), torch.relu(block.norm(block.conv(x))))
    block = Block(dcnet.DecoupledConv2d(3, 4, 3), nn.BatchNorm2d(4), "relu").eval()
    fused = block(x)
    handle = block.norm.register_forward_hook(lambda norm, inputs, y: seen.append(y) or y + 1.0)
    torch.testing.assert_close(block(x), torch.relu(seen[0] + 1.0))
    handle.remove()
    assert torch.equal(block(x), fused)
    plain = block.conv.forward
    block.conv.forward = lambda x: plain(x) * 3.0
    torch.testing.assert_close(block(x), torch.relu(block.norm(plain(x) * 3.0)))


def test_two_features_are_the_operators_own():
    """Bounded by α for SphereConv, whatever the input: nothing normalizes them, and nothing follows."""
    net = dcnet.create_model("cnn6_2d", in_channels=1, input_size=28, magnitude="sphere").train()
    features = net.features(torch.rand(16, 1, 28, 28))
    assert features.shape == (16, 2)
    assert features.abs().max() <= 1.0
    assert net.penultimate.norm is None
    assert net.penultimate.activation is None


def test_activations_of_roots():
    assert [dcnet.create_model(name).root.activation for name in ("resnet32", "resnet18", "resnet18_modified")] == [
        None,
        "relu",
        "prelu",
    ]
    assert dcnet.create_model("resnet32", root_activation=True).root.activation == "relu"
    assert dcnet.create_model("resnet18", root_activation=False).root.activation is None


def test_penultimate_norm():
    assert dcnet.create_model("cnn9").penultimate.norm is not None
    assert dcnet.create_model("cnn9", penultimate_norm=False).penultimate.norm is None


def test_a_normalized_classifier_is_neither_projected_nor_orthogonal():
    net = dcnet.create_model("cnn9_narrow", head="normalized", input_size=8)
    before = net.head.weight.detach().clone()
    assert "head" not in dcnet.project_weights_(net)
    torch.testing.assert_close(net.head.weight, before)
    dcnet.orthogonal_penalty(net).backward()
    assert net.head.weight.grad is None
    assert net.penultimate.conv.weight.grad is not None


def test_unknown_arguments_are_named():
    for options, message in (
        (
            {"magnitud": "tanh"},
            "create_model() has no argument 'magnitud'. Did you mean 'magnitude'? Possible: name, num_classes",
        ),
        ({"radus": 2.0, "magnitude": None}, "has no argument 'radus'. Did you mean 'radius'?"),
        ({"device": "cpu"}, "has no argument 'device'."),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            dcnet.create_model("cnn9_narrow", **options)
