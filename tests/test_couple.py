"""couple_: decoupled layers that are plain ones become plain again, with their BatchNorms."""

import copy

import pytest
import torch
from helpers import needs
from torch import nn

import dcnet
from dcnet.layers import Block, Chain

PLAIN = [
    ("linear", "cosine"),
    ("linear:alpha=2.5", "cosine"),
    ("seg:alpha=0.5,beta=0.5", "cosine"),
    ("mix:alpha=2,beta=0", "cosine"),
    ("linear", "power_cosine:p=1"),
]
LAYERS = [
    (
        lambda **o: dcnet.DecoupledConv2d(4, 6, 3, padding="same", groups=2, padding_mode="reflect", bias=True, **o),
        (2, 4, 7, 7),
    ),
    (lambda **o: dcnet.DecoupledConv1d(3, 4, 3, stride=2, dilation=2, **o), (2, 3, 9)),
    (lambda **o: dcnet.DecoupledConv3d(2, 3, 2, **o), (2, 2, 3, 4, 4)),
    (lambda **o: dcnet.DecoupledLinear(5, 3, bias=True, **o), (2, 3, 5)),
]


@pytest.mark.parametrize("weighting", [None, "linear", "joint", "separate"])
@pytest.mark.parametrize(("magnitude", "angular"), PLAIN)
def test_the_same_function(magnitude, angular, weighting):
    for make, shape in LAYERS:
        layer = make(magnitude=magnitude, angular=angular, weighting=weighting).double()
        x = torch.randn(shape, dtype=torch.float64)
        before, weight = layer(x).detach(), layer.weight
        plain = dict(vars(copy.deepcopy(layer)))
        report = dcnet.couple_(layer)
        if (
            magnitude.startswith("seg") and weighting == "separate"
        ):  # α·h₁(‖w‖)·h₁(‖x‖), in which h₁ has α = 1 and β = ½
            assert report.left == {"": "seg:alpha=0.5 + cosine is no plain layer"}
            assert vars(layer).keys() == plain.keys()
            continue
        assert report.coupled == [""]
        assert type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
        assert layer.weight is weight
        assert layer.state_dict().keys() <= {"weight", "bias"}
        fresh = type(layer)(5, 3) if isinstance(layer, nn.Linear) else type(layer)(4, 6, 3)
        assert vars(layer).keys() == vars(fresh).keys()
        torch.testing.assert_close(layer(x), before, rtol=1e-6, atol=1e-6)


def test_others_stay_and_are_listed():
    model = nn.Sequential(*[dcnet.DecoupledConv2d(3, 3, 1, magnitude=name) for name in dcnet.magnitudes()])
    model.append(dcnet.DecoupledConv2d(3, 3, 1, magnitude="linear", angular="square_cosine"))
    model.append(dcnet.DecoupledConv2d(3, 3, 1, magnitude="seg", angular="sigmoid:k=learned"))
    report = dcnet.couple_(model)
    assert report.coupled == [str(list(dcnet.magnitudes()).index("linear"))]
    assert len(report.left) == 8
    assert report.left["0"] == "sphere + cosine is no plain layer"
    assert "1 layer made plain, 0 with BatchNorm, 8 left" in str(report)
    assert "left   8: seg + sigmoid:k=learned is no plain layer" in str(report)
    with pytest.raises(TypeError, match="couple_ takes a model, got str"):
        dcnet.couple_("model")


def network(**operator):
    torch.manual_seed(0)
    return nn.Sequential(
        dcnet.DecoupledConv2d(3, 8, 3, **operator),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Chain(Block(dcnet.DecoupledConv2d(8, 4, 3, bias=True, **operator), nn.BatchNorm2d(4), "prelu")),
        nn.Flatten(),
        Block(dcnet.DecoupledLinear(64, 5, **operator), nn.BatchNorm1d(5), None),
        dcnet.DecoupledLinear(5, 5, **operator),
        nn.BatchNorm1d(5),
    )


def test_batch_norms_are_folded_in_evaluation():
    model, x = network(magnitude="linear"), torch.randn(4, 3, 8, 8)
    for _ in range(3):
        model(x)
    training = copy.deepcopy(model)
    before = model.eval()(x).detach()
    report = dcnet.couple_(model)
    assert report.folded == {"0": "1", "3.0.conv": "3.0.norm", "5.conv": "5.norm"}
    assert report.notes == [
        "7 was not folded into 6: behind a linear layer it may be another dimension that it normalizes"
    ]
    assert isinstance(model[1], nn.Identity)
    assert model[3][0].norm is None
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    assert "plain  3.0.conv, with 3.0.norm" in str(report)
    # in training mode, or told not to, the norms stay
    assert dcnet.couple_(training).folded == {}
    assert isinstance(training[1], nn.BatchNorm2d)
    torch.testing.assert_close(training.eval()(x), before, rtol=1e-4, atol=1e-5)
    kept = network(magnitude="linear").eval()
    assert dcnet.couple_(kept, fold=False).folded == {}


def test_norms_that_are_not_safe_to_fold_stay():
    shared = nn.BatchNorm2d(3)
    conv = [dcnet.DecoupledConv2d(3, 3, 1, magnitude="linear") for _ in range(4)]
    hooks = nn.BatchNorm2d(3)
    hooks.register_forward_hook(lambda *_: None)
    model = nn.Sequential(
        conv[0], shared, conv[1], shared, conv[2], hooks, conv[3], nn.BatchNorm2d(3, track_running_stats=False)
    ).eval()
    x = torch.randn(2, 3, 4, 4)
    before = model(x)
    report = dcnet.couple_(model)
    assert report.folded == {}
    assert [note.partition(": ")[2] for note in report.notes] == [
        "one of them has hooks, which would see something else",
        "it keeps no running averages",
        "1 is called 2 times",
    ]
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


class Residual(nn.Module):
    """BatchNorms that code calls: behind a convolution, through an Identity, and behind an addition."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.conv2, self.drop, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Identity(), nn.BatchNorm2d(8)
        self.bn3 = nn.BatchNorm2d(8)

    def forward(self, x):
        y = self.act1(self.bn1(self.conv1(x)))
        return self.bn3(self.bn2(self.drop(self.conv2(y))) + x)


class Branching(Residual):
    """Code that torch.fx cannot record."""

    def forward(self, x):
        return super().forward(x if x.sum() < 0.0 else -x)


def trained(model, x):
    """Return the model with averages that are not the start's, converted, in evaluation; and what it gives for x."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    model(x)
    dcnet.decouple_(model.eval(), "linear", weighting="linear")
    return model, model(x).detach()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize(("kind", "example"), [(Residual, False), (Residual, True), (Branching, True)])
def test_norms_are_folded_wherever_code_calls_them(kind, example, fused):
    x = torch.randn(2, 8, 6, 6)
    model, before = trained(nn.Sequential(kind(), kind()), x)
    if not fused:
        dcnet.unfuse_(model)
    report = dcnet.couple_(model, example_input=x if example else None)
    assert report.folded == {f"{i}.conv{j}": f"{i}.bn{j}" for i in (0, 1) for j in (1, 2)}
    notes = [note for note in report.notes if "not folded" in note]
    behind = "other code" if example else "add"
    assert notes[0] == f"0.bn3 was not folded: it follows {behind}, no layer that was made plain"
    assert len(notes) == 2
    assert type(model[0].bn1) is nn.Identity
    assert not [key for key in model.state_dict() if "bn" in key and "bn3" not in key]
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


def test_code_that_cannot_be_recorded_is_known_from_fusions_or_named():
    x = torch.randn(2, 8, 6, 6)
    model, before = trained(Branching(), x)
    report = dcnet.couple_(copy.deepcopy(model))
    assert report.folded == {}
    assert report.notes == [
        "bn1, bn2, bn3: not folded, since it is not known what they follow; torch.fx cannot trace this model "
        "(TraceError); give an example_input"
    ]
    dcnet.fuse_(model, x)
    with pytest.raises(ValueError, match="input has 3 channels"):
        dcnet.couple_(model, example_input=torch.randn(2, 3, 6, 6))
    assert model.conv1.fusion is not None  # nothing was changed
    report = dcnet.couple_(model)
    assert report.folded == {"conv1": "bn1", "conv2": "bn2"}
    assert report.notes[1].startswith("bn3: not folded, since it is not known what")
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


class Odd(nn.Module):
    """One convolution and a BatchNorm, with something around them that folding would break."""

    def __init__(self, what):
        super().__init__()
        self.what, self.conv, self.bn = what, nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.wrapped = nn.ModuleList([self.conv]) if what == "two places" else None
        if what == "tied":
            self.other = nn.Conv2d(4, 4, 3, padding=1, bias=False)
            self.other.weight = self.conv.weight
        if what == "merges":
            self.fuse = self._fuse

    def _fuse(self):
        return nn.utils.fusion.fuse_conv_bn_eval(self.conv, self.bn)

    def forward(self, x):
        y = self.conv(x)
        if self.what == "read twice":
            return self.bn(y) + y
        if self.what == "called twice":
            return self.bn(self.conv(self.bn(y)))
        if self.what == "weight":
            return nn.functional.conv_transpose2d(self.bn(y), self.conv.weight)
        return self.other(self.bn(y)) if self.what == "tied" else self.bn(y)


@pytest.mark.parametrize("example", [True, False], ids=["run", "traced"])
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("two places", "one of them is used in several places"),
        ("tied", "the parameters of conv are those of another module too"),
        ("merges", "model.fuse() merges them, and would not find it"),
        ("read twice", "its result is read by "),
        ("called twice", "called 2 times"),
        ("weight", "other code reads the parameters of one of them"),
        ("hook", "one of them has hooks, which would see something else"),
        ("training", "it is in training mode; model.eval() first"),
        ("", ""),
    ],
)
def test_what_code_around_norms_makes_unsafe(what, reason, example):
    x = torch.randn(2, 4, 6, 6)
    model, before = trained(Odd(what), x)
    if what == "hook":
        model.bn.register_forward_hook(lambda *_: None)
    if what == "training":
        model.bn.train()
    report = dcnet.couple_(model, example_input=x if example else None)
    assert report.folded == ({} if what else {"conv": "bn"})
    notes = [note for note in report.notes if "not folded" in note]
    assert len(notes) == bool(what)
    assert not what or notes[0].startswith(f"bn was not folded into conv: {reason}")
    torch.testing.assert_close(model.eval()(x), before, rtol=1e-4, atol=1e-5)


def test_a_norm_behind_a_block_is_not_folded_into_what_the_block_has_done():
    x = torch.randn(2, 4, 6, 6)
    model, before = trained(nn.Sequential(Block(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), nn.BatchNorm2d(4)), x)
    for example in (x, None):
        coupled = copy.deepcopy(model)
        assert dcnet.couple_(coupled, example_input=example).folded == {"0.conv": "0.norm"}
        torch.testing.assert_close(coupled(x), before, rtol=1e-4, atol=1e-5)


def test_of_a_norm_of_timm_the_activation_is_left():
    act = needs("timm.layers").BatchNormAct2d(4, act_layer=nn.SiLU)
    x = torch.randn(2, 4, 6, 6)
    model, before = trained(nn.Sequential(nn.Conv2d(4, 4, 3), act), x)
    assert dcnet.couple_(model).folded == {"0": "1"}
    assert [name for name, _ in model[1].named_children()] == ["drop", "act"]
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


def test_what_conversion_had_put_around_a_layer_goes():
    class Fusable(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def fuse(self):
            return nn.utils.fusion.fuse_conv_bn_eval(self.conv, self.bn)

    model = Fusable().eval()
    dcnet.decouple_(model, "linear")
    dcnet.weight_gradients_(model)
    with pytest.raises(RuntimeError, match="merges kernels"):
        model.fuse()
    dcnet.couple_(model)
    model.fuse()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.bn(model.conv(torch.randn(2, 3, 4, 4))).sum().backward()
    optimizer.step()
    assert dcnet.decouple_(model, "tanh").converted == ["conv"]
    left = nn.Sequential(nn.utils.parametrizations.weight_norm(dcnet.DecoupledConv2d(3, 3, 1, magnitude="linear")))
    assert "computed from other parameters" in dcnet.couple_(left).left["0"]
    lazy = nn.Sequential(dcnet.LazyDecoupledConv2d(3, 1, magnitude="linear"))
    assert "run the model once" in dcnet.couple_(lazy).left["0"]


def _collected(net, x):
    found = []
    for module in net.seq:
        x = module(x)
        found.append(x)
    return torch.cat([one.flatten(1) for one in found], 1)


CODE_AROUND = {
    "an addition between": lambda net, x: net.seq[2](net.seq[1](net.seq[0](x) + x)),
    "every result is read": _collected,
    "the layer is used twice": lambda net, x: net.seq(x) + net.seq[0](2 * x),
    "another order": lambda net, x: net.seq[0](net.seq[1](x)),
}


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("code", CODE_AROUND)
def test_neighbors_in_a_sequential_that_other_code_calls_one_by_one(code, example):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.seq = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())

        def forward(self, x):
            return CODE_AROUND[code](self, x)

    net, x = Net().eval(), torch.randn(2, 3, 6, 6)
    net.seq[1].running_mean.normal_()
    net.seq[1].running_var.uniform_(0.5, 2.0)
    dcnet.decouple_(net, "linear", "cosine")
    before = net(x)
    report = dcnet.couple_(net, example_input=x if example else None)
    assert report.coupled == ["seq.0"]
    assert report.folded == {}
    assert any("seq.1 was not folded" in note for note in report.notes)
    torch.testing.assert_close(net(x), before, rtol=1e-4, atol=1e-5)


def test_kernels_that_others_need_stay():
    one, other = (nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(2))
    other.weight = one.weight
    model, x = nn.Sequential(one, other).eval(), torch.randn(2, 3, 6, 6)
    dcnet.decouple_(model, "linear", "cosine", where=lambda name, _: name == "0")
    before = model(x)
    report = dcnet.couple_(model)
    assert report.left == {"0": "its kernels are also those of 1, which needs them as they are"}
    assert torch.equal(model(x), before)
    dcnet.decouple_(model, "linear", "cosine", where=lambda name, _: name == "1")  # now both become plain alike
    before = model(x)
    assert dcnet.couple_(model).coupled == ["0", "1"]
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


class Autoencoder(nn.Module):
    """The way back takes the kernels of the way there."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.enc = dcnet.DecoupledConv2d(3, 8, 3, padding=1, magnitude="linear")
        with torch.no_grad():
            dcnet.project_weights_(self.enc, scale)

    def forward(self, x):
        return nn.functional.conv_transpose2d(self.enc(x).relu(), self.enc.weight, padding=1)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("example", [True, False])
def test_kernels_that_other_code_reads_stay(example, fold):
    model, x = Autoencoder(2.0).eval(), torch.randn(2, 3, 6, 6)
    before = model(x)
    why = {"enc": "other code reads its kernels, which needs them as they are"}
    assert dcnet.couple_(model, fold, x if example else None).left == why
    assert torch.equal(model(x), before)


def test_a_forward_of_its_own_stays():
    class Doubled(dcnet.DecoupledConv2d):
        def forward(self, x):
            return super().forward(x).mul_(2.0)

    model, x = (
        nn.Sequential(Doubled(3, 4, 3, magnitude="linear"), nn.BatchNorm2d(4), nn.ReLU()).eval(),
        torch.randn(2, 3, 6, 6),
    )
    before = model(x)
    why = {"0": "its class, Doubled, has a forward of its own"}
    assert dcnet.fuse_(model).left == why
    assert torch.equal(model(x), before)
    assert dcnet.couple_(model).left == why
    assert torch.equal(model(x), before)


def test_a_forward_that_was_put_on_a_layer_stays():
    """As accelerate does it."""
    model, x = (
        nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3, magnitude="linear"), nn.ReLU()).eval(),
        torch.randn(2, 3, 6, 6),
    )
    plain = model[0].forward
    model[0].forward = lambda x: plain(x) * 2.0
    before, why = model(x), {"0": "somebody has put another forward on it"}
    assert dcnet.fuse_(model).left == why
    assert dcnet.couple_(model).left == why
    assert torch.equal(model(x), before)


def test_what_others_put_on_a_layer_stays():
    layer = dcnet.DecoupledConv2d(3, 4, 3, magnitude="seg:beta=1", angular="cosine")
    layer.stage, layer.scale = "stem", nn.Parameter(torch.ones(1))
    layer.register_buffer("seen", torch.zeros(1))
    assert dcnet.couple_(nn.Sequential(layer)).coupled == ["0"]
    assert type(layer) is nn.Conv2d
    assert layer.stage == "stem"
    assert set(layer.state_dict()) == {"weight", "scale", "seen"}
    assert set(vars(layer)) == {"stage", *vars(nn.Conv2d(3, 4, 3))}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_bias_that_is_computed_stays():
    layer = dcnet.DecoupledConv2d(3, 4, 3, bias=True, magnitude="linear")
    nn.utils.weight_norm(layer, "bias", dim=None)
    model, x = nn.Sequential(layer), torch.randn(2, 3, 6, 6)
    before = model(x)
    assert dcnet.couple_(model).left == {"0": "its bias is computed from other parameters; take that off first"}
    assert torch.equal(model(x), before)
