"""decouple_(where=…): patterns, presets, gates and adapters left alone, arithmetic kept, and the report as a table."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcnet
from dcnet.layers.own_arithmetic import DecoupledConv2dSame, DecoupledStdConv2d


class SqueezeExcite(nn.Module):
    """Known by its name: it pools in its forward."""

    def __init__(self, channels):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x):
        return x * self.expand(self.reduce(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class Excitation(nn.Module):
    """Known by its structure: pooling, 1×1 convolutions back to as many channels, a sigmoid."""

    def __init__(self, channels, out=None):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 2, 1), nn.ReLU(), nn.Conv2d(2, out or channels, 1), nn.Sigmoid()
        )

    def forward(self, x):
        return x * self.layers(self.pool(x))


def network():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()),
        nn.ModuleDict({"depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8), "pointwise": nn.Conv2d(8, 8, 1)}),
        nn.Conv2d(8, 8, 3, stride=2),
    )


NAMES = ["0.0", "1.depthwise", "1.pointwise", "2"]


@pytest.mark.parametrize(
    ("where", "converted"),
    [
        (None, NAMES),
        ("all", NAMES),
        ("spatial", ["0.0", "1.depthwise", "2"]),
        ("not-first", NAMES[1:]),
        ("not-depthwise", ["0.0", "1.pointwise", "2"]),
        ("1.*", ["1.depthwise", "1.pointwise"]),
        ("1", ["1.depthwise", "1.pointwise"]),  # a module around them
        ("[02]*", ["0.0", "2"]),
        ("!1", ["0.0", "2"]),
        (["1.p*", "2"], ["1.pointwise", "2"]),  # patterns add up
        (["spatial", "not-first", "!2"], ["1.depthwise"]),  # the rest takes away
        (["0", "1", lambda name, module: module.groups == 1, "not-first"], ["1.pointwise"]),
        (("all", lambda name, module: False), []),
    ],
)
def test_where(where, converted):
    report = dcnet.decouple_(network(), where=where)
    assert report.converted == converted
    assert list(report.skipped) == [name for name in NAMES if name not in converted]
    assert all(report.skipped.values())


def test_a_pattern_that_matches_nothing_is_an_error():
    model = network()
    for where, message in (
        ("spacial", r"'spacial' is no preset and matches no layer. Did you mean 'spatial'"),
        (["not-first", "!stem*"], r"'!stem\*' is no preset and matches no layer.*layers: '0.0', '1.depthwise'"),
        ("1.deepwise", r"Did you mean '1.depthwise'"),
    ):
        with pytest.raises(ValueError, match=message):
            dcnet.decouple_(model, where=where)
    for where in ([], ["all", 3], {"all": True}):
        with pytest.raises(TypeError, match="where must be a function"):
            dcnet.decouple_(model, where=where)
    assert not any(isinstance(module, dcnet.layers.Decoupled) for module in model.modules())


def test_gates_are_left_alone_unless_all_is_said():
    def build():
        return nn.Sequential(nn.Conv2d(3, 4, 3), SqueezeExcite(4), Excitation(4), Excitation(4, out=1))

    report = dcnet.decouple_(build())
    # the last one does not lead back to as many channels
    assert report.converted == ["0", "3.layers.0", "3.layers.2"]
    assert "a gate on pooled maps (SqueezeExcite)" in report.skipped["1.reduce"]
    assert "a gate on pooled maps (Excitation)" in report.skipped["2.layers.2"]
    assert len(dcnet.decouple_(build(), where="all").converted) == 7
    assert "gate" in dcnet.decouple_(build(), where="1.*").skipped["1.expand"]
    # a conversion with gates is done again from its record
    model = build()
    dcnet.decouple_(model, where=["all", "1.*"])
    again = dcnet.restore_conversion_(build(), dcnet.conversion_of(model))
    assert dcnet.conversion_of(again) == dcnet.conversion_of(model)


def test_a_model_without_such_layers_is_an_error():
    with pytest.raises(ValueError, match=r"ReLU has no layer of nn.Conv1d, nn.Conv2d, nn.Conv3d$"):
        dcnet.decouple_(nn.ReLU())
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"for its 2 linear layers: types=\(nn.Linear,\)"):
        dcnet.decouple_(model)
    assert len(dcnet.decouple_(model, types=(nn.Linear,)).converted) == 2


class Lora(nn.Module):
    """A layer with an adapter beside it, as peft makes it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Conv2d(base.in_channels, 2, 3, padding=1, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Conv2d(2, base.out_channels, 1, bias=False)})

    def merge(self, safe_merge=False, adapter_names=None):
        raise AssertionError("merged")

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_are_left_alone_and_not_merged():
    model = nn.Sequential(Lora(nn.Conv2d(3, 4, 3, padding=1)))
    x = torch.randn(1, 3, 6, 6)
    before = model(x)
    report = dcnet.decouple_(copy.deepcopy(model), "linear", "cosine", weighting="linear", where="all")
    assert report.converted == ["0.base_layer"]
    assert "a factor of an adapter (Lora)" in report.skipped["0.lora_A.default"]
    dcnet.decouple_(same := copy.deepcopy(model), "linear", "cosine", weighting="linear")
    torch.testing.assert_close(same(x), before)
    dcnet.decouple_(model)
    with pytest.raises(RuntimeError, match=r"0.merge\(\) merges kernels .* '0.base_layer' is decoupled"):
        model[0].merge(safe_merge=True)
    stages = nn.ModuleDict(
        {"base_layer": nn.Sequential(nn.Conv2d(3, 3, 1)), "level1": nn.Conv2d(3, 3, 1)}
    )  # no adapter
    assert dcnet.decouple_(stages).converted == ["base_layer.0", "level1"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the old weight_norm itself
def test_layers_under_the_old_weight_norm_keep_it():
    model = nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 4, 3)))
    x = torch.randn(2, 3, 6, 6)
    before = model(x)
    assert dcnet.decouple_(model, "linear", "cosine", weighting="linear").converted == ["0"]
    torch.testing.assert_close(model(x), before)
    model(x).sum().backward()
    assert model[0].weight_g.grad is not None


def _as_timm(kind):
    """timm's layers as they are, in a suite without timm."""
    kind.__module__ = "timm.layers.std_conv"
    return kind


def _pad_same(x, conv):
    pads = []
    for size, kernel, step, apart in zip(
        x.shape[:1:-1], conv.kernel_size[::-1], conv.stride[::-1], conv.dilation[::-1], strict=True
    ):
        missing = max((-(-size // step) - 1) * step + (kernel - 1) * apart + 1 - size, 0)
        pads += [missing // 2, missing - missing // 2]
    return F.pad(x, pads)


@_as_timm
class Conv2dSame(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(_pad_same(x, self), self.weight, self.bias, self.stride, (0, 0), self.dilation, self.groups)


@_as_timm
class StdConv2d(nn.Conv2d):
    eps = 1e-6

    def forward(self, x):
        rows = self.weight.flatten(1)
        weight = (rows - rows.mean(1, keepdim=True)) / (rows.var(1, correction=0, keepdim=True) + self.eps).sqrt()
        return F.conv2d(
            x, weight.view_as(self.weight), self.bias, self.stride, self.padding, self.dilation, self.groups
        )


@_as_timm
class ScaledStdConv2dSame(nn.Conv2d):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.eps, self.same_pad, self.scale, self.gain_init = 1e-5, True, 0.3, 1.0
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, x):
        rows = self.weight.flatten(1)
        weight = (rows - rows.mean(1, keepdim=True)) / (rows.var(1, correction=0, keepdim=True) + self.eps).sqrt()
        weight = weight.view_as(self.weight) * self.gain * self.scale
        return F.conv2d(_pad_same(x, self), weight, self.bias, self.stride, 0, self.dilation, self.groups)


def own_arithmetic():
    torch.manual_seed(0)
    return nn.Sequential(
        Conv2dSame(3, 4, (3, 2), stride=(2, 3)),
        StdConv2d(4, 4, 3, padding=1, groups=2),
        ScaledStdConv2dSame(4, 5, 3, stride=2, dilation=2),
    ).double()


def test_padding_and_weight_standardization_are_kept():
    model, x = own_arithmetic(), torch.randn(2, 3, 15, 17, requires_grad=True, dtype=torch.float64)
    twin = own_arithmetic()
    report = dcnet.decouple_(twin, "linear", "cosine", weighting="linear")
    assert report.converted == ["0", "1", "2"]
    assert [type(layer) for layer in twin] == [DecoupledConv2dSame, DecoupledStdConv2d, DecoupledStdConv2d]
    assert twin.state_dict().keys() == model.state_dict().keys()
    results = []
    for net in (model, twin):
        y = net(x)
        results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *net.parameters()])])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    # standardized before they are normalized: an offset of a kernel changes nothing
    dcnet.decouple_(other := own_arithmetic(), "tanh", where="1")
    other.eval()
    before = other(x)
    with torch.no_grad():
        other[1].weight += 0.7
    torch.testing.assert_close(other(x), before, rtol=1e-3, atol=1e-4)
    assert other[1].eps == 1e-4
    assert dcnet.project_weights_(other) == []
    copied = copy.deepcopy(twin)
    copied[2].reset_parameters()
    assert torch.equal(copied[2].gain, torch.ones(5, 1, 1, 1, dtype=torch.float64))
    traced = torch.fx.symbolic_trace(twin)
    torch.testing.assert_close(traced(x), twin(x))


@pytest.mark.parametrize("kind", [Conv2dSame, ScaledStdConv2dSame])
def test_calibration_sees_patches_with_the_padding_of_their_layer(kind):
    """Patches at the border have other norms, and the radius is chosen by norms."""

    def radius(conv, x):
        dcnet.decouple_(model := nn.Sequential(conv), "tanh", calibrate=[x])
        return float(model[0].effective_radius[0].detach())

    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 12).mul(1.5).exp()  # norms that differ by much
    expected = radius(nn.Conv2d(3, 4, 5, padding=2), x)
    assert radius(kind(3, 4, 5), x) == expected > radius(nn.Conv2d(3, 4, 5), x)
    assert radius(kind(3, 4, 5, stride=2), torch.rand(2, 3, 4, 4)) == 1.0  # a map smaller than the kernel


def test_the_report_is_a_table():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2, bias=False),
        Excitation(8),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Flatten(),
        nn.Linear(32, 2),
    )
    x = torch.rand(1, 3, 8, 8)
    report = dcnet.decouple_(copy.deepcopy(model), example_input=x)
    rows = {row.layer: row for row in report.rows}
    assert list(rows) == ["0", "1.layers.0", "1.layers.2", "2", "4"]
    assert rows["0"].kind == "Conv2d 3×3/2"
    assert rows["2"].kind == "Conv2d 3×3 depthwise"
    assert rows["0"].parameters == (216, 224)
    assert rows["0"].multiply_adds.before == 27 * 8 * 16
    # squares, sums over windows, and dot/norm, norm·r, tanh, product
    assert rows["0"].multiply_adds.after == 27 * 8 * 16 + 3 * 64 + 9 * 16 + 4 * 8 * 16
    assert rows["2"].multiply_adds.before == 9 * 8 * 4
    assert rows["4"].multiply_adds == (64, 64)
    assert rows["1.layers.0"].left
    text = str(report)
    lines = text.splitlines()
    assert lines[0] == "2 layers converted, 3 left unchanged"
    assert lines[2].split() == ["layer", "kind", "what", "became", "of", "it", "parameters", "multiply-adds"]
    assert "0            Conv2d 3×3/2          tanh + cosine       216 → 224  3,456 → 4,304" in text
    assert "left (1)" in text
    assert sum(line.startswith("(1) a gate on pooled maps (Excitation)") for line in lines) == 1
    without = str(dcnet.decouple_(copy.deepcopy(model)))
    assert "multiply-adds" not in without
    plain = {row.layer: row for row in dcnet.decouple_(copy.deepcopy(model), "linear", example_input=(x,)).rows}
    assert plain["0"].multiply_adds == (27 * 8 * 16, 27 * 8 * 16)  # a convolution with normalized kernels
    modes = [module.training for module in model.modules()]
    with pytest.raises(
        ValueError, match=r"example_input: Sequential cannot be called with it .* Nothing has been changed"
    ):
        dcnet.decouple_(model, example_input=torch.rand(1, 4, 8, 8))
    assert type(model[0]) is nn.Conv2d
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())


def decoupled_network():
    """The network with all but its first layer decoupled, a Linear in front of it, and a classifier."""
    model = nn.Sequential(nn.Linear(4, 4), network(), dcnet.DecoupledLinear(8, 2))
    dcnet.decouple_(model, where="not-first")
    return model


DECOUPLED = ["1.1.depthwise", "1.1.pointwise", "1.2", "2"]


def projected(model, where):
    return dcnet.project_weights_(model, where=where)


def counted(model, where):
    """The layers a WeightProjection projects, seen by their kernels."""
    before = {name: layer.weight.detach().clone() for name, layer in dcnet.layers.decoupled_layers(model).items()}
    dcnet.WeightProjection(model, torch.optim.SGD(model.parameters(), lr=0.1), scale=3.0, where=where).project()
    return [name for name, weight in before.items() if not torch.equal(model.get_submodule(name).weight, weight)]


def weighted(model, where):
    with dcnet.weight_gradients_(model, where):
        return [
            name for name, layer in dcnet.layers.decoupled_layers(model).items() if layer.weighted_gradient is not None
        ]


def penalized(penalty):
    def names(model, where):
        layers = dcnet.layers.decoupled_layers(model)
        for layer in layers.values():  # so that a depthwise layer, of one kernel a group, has a penalty too
            layer.weight.data.mul_(2.0).add_(0.1)
        weights = [layer.weight for layer in layers.values()]
        found = torch.autograd.grad(penalty(model, where), weights, allow_unused=True)
        return [name for name, gradient in zip(layers, found, strict=True) if gradient is not None]

    return names


TOOLS = {
    "project_weights_": projected,
    "WeightProjection": counted,
    "weight_gradients_": weighted,
    "orthogonal_penalty": penalized(dcnet.orthogonal_penalty),
    "orthonormal_penalty": penalized(dcnet.orthonormal_penalty),
    "decoupled_layers": lambda model, where: list(dcnet.layers.decoupled_layers(model, where)),
}


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
@pytest.mark.parametrize(
    ("where", "names"),
    [
        (None, DECOUPLED),
        ("all", DECOUPLED),
        ("not-first", DECOUPLED),  # the first layer of the network is plain
        ("spatial", ["1.1.depthwise", "1.2"]),
        ("not-depthwise", ["1.1.pointwise", "1.2", "2"]),
        ("*wise", ["1.1.depthwise", "1.1.pointwise"]),
        ("1", ["1.1.depthwise", "1.1.pointwise", "1.2"]),
        ("!1.1", ["1.2", "2"]),
        ("!1.0", DECOUPLED),  # which is plain: nothing to take away
        (["1", "spatial", "!1.2"], ["1.1.depthwise"]),
        (("1.2", "2"), ["1.2", "2"]),
        (lambda name, layer: layer.weight.dim() == 2, ["2"]),
        (["not-depthwise", lambda name, layer: name != "2"], ["1.1.pointwise", "1.2"]),
    ],
)
def test_where_of_decoupled_layers(tool, where, names):
    """The words of decouple_ in every function that takes decoupled layers."""
    assert tool(decoupled_network(), where) == names


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_where_of_decoupled_layers_is_checked(tool):
    model = decoupled_network()
    for where, message in (
        ("spacial", r"'spacial' is no preset and matches no layer. Did you mean 'spatial'"),
        (["not-first", "!stem*"], r"'!stem\*' is no preset and matches no layer.*'0', '1.0.0'"),
        ("1.0", r"'1.0' is no preset and matches no layer.*layers: '1.1.depthwise', .*'2'$"),  # which is plain
    ):
        with pytest.raises(ValueError, match=message):
            tool(model, where)
    for where in ([], ["all", 3], {"all": True}):
        with pytest.raises(TypeError, match="where must be a function"):
            tool(model, where)
    with pytest.raises(ValueError, match="'conv9' is no preset and matches no layer"):
        tool(network(), "conv9")


@pytest.mark.parametrize("where", ["not-first", "1.*", "!0", "spatial"])
def test_where_of_a_plain_twin(where):
    """It has the same names, and nothing to do."""
    assert dcnet.project_weights_(network(), where=where) == []
    assert dcnet.orthogonal_penalty(network(), where).item() == 0.0


def test_the_first_layer_is_the_first_of_the_network():
    """Not of the decoupled ones; and only layers of their kinds count, as for `types` of decouple_."""
    model = nn.Sequential(nn.Linear(4, 4), network())
    dcnet.decouple_(model)
    assert dcnet.project_weights_(model, where="not-first") == DECOUPLED[:3]
    model = nn.Sequential(network(), nn.Linear(4, 4), nn.Linear(4, 4))
    dcnet.decouple_(model, types=(nn.Linear,))
    assert dcnet.project_weights_(model, where="not-first") == ["2"]


def test_where_may_leave_out_weighted_layers_and_not_ask_for_them():
    model = nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3), dcnet.DecoupledConv2d(4, 4, 3, weighting="linear"))
    with pytest.raises(ValueError, match=r"layer '1' has weighting='linear'. Leave it out with where='!1'"):
        dcnet.project_weights_(model)
    assert dcnet.project_weights_(model, where="!1") == ["0"]
    assert torch.equal(dcnet.orthogonal_penalty(model, "!1"), dcnet.orthogonal_penalty(model))
    with pytest.raises(ValueError, match=r"'1' is no preset and matches no layer.*layers: '0'"):
        dcnet.orthogonal_penalty(model, "1")  # it would be 0 without a word


def test_a_penalty_of_selected_layers_compiles():
    model = decoupled_network()
    compiled = torch.compile(lambda: dcnet.orthogonal_penalty(model, ["1", "!1.2"]), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(), dcnet.orthogonal_penalty(model, "1.1"))
