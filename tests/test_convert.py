"""decouple_: a model someone already has."""

import copy

import pytest
import torch
from torch import nn

import dcnet


class Standardised(nn.Conv2d):
    """A convolution with arithmetic of its own."""

    def forward(self, x):
        return super().forward(x) * 2.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="circular")
        self.blocks = nn.ModuleList([nn.Conv2d(8, 8, 3, padding="same", dilation=2, groups=2, bias=False), nn.Conv2d(8, 8, 1)])
        self.again = self.blocks[1]
        self.special = Standardised(8, 8, 3, padding=1)
        self.volume = nn.Conv3d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.late = nn.LazyConv2d(4, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).relu()
        x = self.special(self.again(x))
        x = self.up(self.volume(x.unsqueeze(2)).squeeze(2))
        return self.head(x.mean((2, 3)))


def test_the_linear_weighted_operator_changes_nothing():
    model = Model()
    x = torch.randn(2, 3, 12, 12)
    before = model(x)
    report = dcnet.decouple_(model, "linear", "cosine", weighting="linear")
    assert report.converted == ["stem", "blocks.0", "blocks.1", "volume"]  # a shared module once
    assert list(report.skipped) == ["special", "late", "head"]
    assert "Standardised" in report.skipped["special"]
    assert "run the model once" in report.skipped["late"]
    assert "nn.Linear, which is not among types" in report.skipped["head"]
    assert model.again is model.blocks[1]
    torch.testing.assert_close(model(x), before)
    assert "4 layers converted, 3 left" in str(report)
    assert dcnet.decouple_(model).skipped["stem"] == "decoupled already"


def test_weights_hooks_and_optimizers_survive():
    model = Model()
    weights = {name: (p, p.detach().clone()) for name, p in model.named_parameters() if not name.startswith("late")}
    calls = []
    model.stem.register_forward_hook(lambda *_: calls.append(1))
    model.stem.weight.requires_grad_(False)
    model.eval()
    dcnet.decouple_(model, "tanh", "sigmoid:k=learned", where=lambda name, module: name.startswith("stem"), eps=0.0, momentum=None)
    assert type(model.stem) is dcnet.DecoupledConv2d
    assert type(model.blocks[0]) is nn.Conv2d
    assert (model.stem.eps, model.stem.momentum, model.stem.training) == (0.0, None, False)
    for name, (parameter, value) in weights.items():
        assert model.get_parameter(name) is parameter
        assert torch.equal(parameter, value)
    assert not model.stem.weight.requires_grad
    model(torch.randn(2, 3, 12, 12))
    assert calls == [1]
    fresh = dcnet.DecoupledConv2d(3, 8, 3, stride=2, padding=1, padding_mode="circular", bias=True, angular="sigmoid:k=learned")
    fresh.load_state_dict(model.stem.state_dict(), strict=True)


def test_linear_and_subclasses_when_asked():
    model = Model()
    report = dcnet.decouple_(model, "log", types=(nn.Linear, Standardised))
    assert report.converted == ["special", "head"]
    assert type(model.special) is dcnet.DecoupledConv2d
    assert type(model.head) is dcnet.DecoupledLinear
    assert model(torch.randn(2, 3, 12, 12)).shape == (2, 5)


def test_a_single_layer_and_its_dtype():
    layer = nn.Conv1d(3, 4, 3, dtype=torch.bfloat16)
    assert dcnet.decouple_(layer).converted == [""]
    assert isinstance(layer, dcnet.DecoupledConv1d)
    assert layer.raw_radius.dtype == torch.bfloat16
    assert layer.running_norm.dtype == torch.float32
    assert layer(torch.randn(2, 3, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16
    copy.deepcopy(layer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"magnitude": "tahn"}, "Did you mean 'tanh'"),
        ({"magnitude": "sphere", "radius": 2.0}, "has no radius"),
        ({"weighting": "square"}, "unknown weighting"),
        ({"types": (nn.ReLU,)}, "cannot convert"),
    ],
)
def test_bad_options_leave_the_model_alone(options, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        dcnet.decouple_(model, **options)
    assert type(model.stem) is nn.Conv2d
    for option in ("kernel", "bias", "device", "radus"):
        with pytest.raises(TypeError, match=f"no option '{option}'.*Possible: weighting, radius, eps"):
            dcnet.decouple_(model, **{option: 3})
    with pytest.raises(TypeError, match="where must be a function"):
        dcnet.decouple_(model, where="stem")
    state = torch.get_rng_state()
    dcnet.decouple_(nn.Conv2d(3, 4, 3))
    torch.set_rng_state(state)
    assert type(model.stem) is nn.Conv2d
