"""`decouple_(model, calibrate=batches)`: what a converted network keeps of the trained one, and bad batches."""

import copy

import pytest
import torch
from helpers import needs
from torch import nn

import dcnet
from dcnet.converting import calibrate
from dcnet.layers import Block, Chain
from dcnet.layers.decoupled import decoupled_layers

OPERATORS = [("tanh", "cosine"), ("ball", "cosine"), ("seg", "cosine"), ("seg", "square_cosine"), ("sphere", "linear")]


def images(*sizes, seed=0):
    return torch.rand(*sizes, generator=torch.Generator().manual_seed(seed))


def network(norm=True, bias=False):
    """Kernels of different lengths, averages that are not the start's, as in a trained network."""
    torch.manual_seed(0)

    def block(inputs, outputs, **geometry):
        conv = nn.Conv2d(inputs, outputs, 3, bias=bias, **geometry)
        return [conv, *([nn.BatchNorm2d(outputs)] if norm else []), nn.ReLU()]

    model = nn.Sequential(
        *block(3, 16, padding=1),
        *block(16, 32, stride=2, groups=2),
        *block(32, 32, padding=1, padding_mode="reflect"),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 5),
    )
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(torch.linspace(0.5, 2.0, len(module.weight)).view(-1, 1, 1, 1))
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.5, 0.5)
    return dcnet.recalibrate_(model, batches()).eval()


def batches(count=3):
    return list(images(count * 16, 3, 12, 12).split(16))


def outputs(model, name, x):
    """What a module gives, as (channels, values)."""
    kept = []
    handle = model.get_submodule(name).register_forward_hook(lambda module, inputs, y: kept.append(y))
    with torch.no_grad():
        model(x)
    handle.remove()
    return kept[0].transpose(0, 1).flatten(1)


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "bias"), [(True, False), (True, True), (False, True), (False, False)])
@pytest.mark.parametrize("weighting", [None, "linear"])
@pytest.mark.parametrize("magnitude", ["linear", "seg:beta=1", "linear:alpha=3"])
def test_straight_magnitudes_start_exactly(norm, bias, weighting, magnitude):
    plain, x = network(norm, bias), images(4, 3, 12, 12, seed=1)
    model = copy.deepcopy(plain)
    dcnet.decouple_(model, magnitude, weighting=weighting, calibrate=batches())
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    without = copy.deepcopy(plain)
    dcnet.decouple_(without, magnitude, weighting=weighting)
    if weighting is None or "alpha" in magnitude:
        assert (without(x) - plain(x)).abs().max() > 0.01


def test_a_plain_convolution_in_other_words_is_left_as_it_is():
    plain = network(norm=False, bias=True)
    model = copy.deepcopy(plain)
    dcnet.decouple_(model, "linear", weighting="linear", calibrate=batches())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("magnitude", "angular"), OPERATORS)
def test_means_and_deviations_are_those_of_the_trained_network(norm, magnitude, angular):
    plain = network(norm, bias=not norm)
    model = copy.deepcopy(plain)
    dcnet.decouple_(model, magnitude, angular, calibrate=batches())
    x = torch.cat(batches())
    for name in ("1", "4", "7") if norm else ("0", "2", "4"):  # a norm's output, where there is one
        expected, found = outputs(plain, name, x), outputs(model, name, x)
        # batches calibrate one by one, so deeper layers agree a little less
        torch.testing.assert_close(found.std(1), expected.std(1), rtol=0.05, atol=0.01)
        torch.testing.assert_close(found.mean(1), expected.mean(1), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("magnitude", "angular"), OPERATORS)
def test_the_function_is_closer_than_without(norm, magnitude, angular):
    plain, x = network(norm, bias=not norm).requires_grad_(False), images(32, 3, 12, 12, seed=1)

    def error(**options):
        model = copy.deepcopy(plain)
        dcnet.decouple_(model, magnitude, angular, **options)
        centered = plain(x) - plain(x).mean(0)
        return float(((model(x) - plain(x)).norm() / centered.norm()).detach())

    assert error(calibrate=batches()) < 0.5 * error()


def test_the_norm_absorbs_the_length_of_kernels_with_its_epsilon():
    """Outputs of unweighted layers are small beside the ε of BatchNorm, which would dampen them."""
    plain = network()
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 0.1
    model = copy.deepcopy(plain)
    dcnet.decouple_(model, "linear", calibrate=batches())
    x = images(4, 3, 12, 12, seed=1)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model[1].weight, plain[1].weight)


def test_in_double_precision_too():
    """There the averages of a BatchNorm are no copies of what its scale is computed from."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)).double()
    with torch.no_grad():
        plain[0].weight.mul_(0.02)  # so that the ε of BatchNorm matters
    x = images(8, 3, 12, 12).double()
    dcnet.recalibrate_(plain, [x]).eval()
    model = copy.deepcopy(plain)
    dcnet.decouple_(model, "linear", calibrate=[x])
    torch.testing.assert_close(model(x), plain(x), rtol=1e-6, atol=1e-6)


def test_fine_tuning_begins_there():
    """In training mode too: averages of batches are those BatchNorm has now."""
    plain = network()
    model = copy.deepcopy(plain)
    dcnet.decouple_(model, "tanh", calibrate=batches())
    x = torch.cat(batches())
    evaluated = model.eval()(x)
    trained = model.train()(x)
    assert float(((trained - evaluated).norm() / evaluated.norm()).detach()) < 0.05


def test_radii_bend_no_more_than_they_may():
    model = network()
    torch.manual_seed(1)
    sizes = torch.rand(3, 16, 1, 1, 1) ** 4  # norms that differ by much
    dcnet.decouple_(model, "tanh", calibrate=list(torch.stack(batches()) * sizes))
    layer = next(iter(decoupled_layers(model).values()))
    wide = float(layer.effective_radius[0].detach())
    norms = dcnet.patch_norm((torch.stack(batches()) * sizes).flatten(0, 1), 3, padding=1)

    def lost(rho):
        n = norms / norms.mean()
        h = torch.tanh(n / rho)
        return float(1 - (h * n).sum() ** 2 / ((h * h).sum() * (n * n).sum()))

    assert wide > 1.0
    assert lost(wide) <= 1.1 * calibrate.LOST < lost(wide / 1.3)
    narrow = network()
    dcnet.decouple_(narrow, "tanh", calibrate=[torch.full((8, 3, 12, 12), 0.5) + 0.01 * images(8, 3, 12, 12)])
    assert float(decoupled_layers(narrow)["0"].effective_radius[0].detach()) == pytest.approx(1.0)
    literal = network()
    dcnet.decouple_(literal, "tanh", radius=2.5, calibrate=batches())
    assert float(decoupled_layers(literal)["0"].effective_radius[0].detach()) == 2.5


def test_running_norms_are_those_of_the_converted_network():
    model = network()
    dcnet.decouple_(model, "ball", calibrate=batches())
    kept = model[3].running_norm.clone()
    assert model[3].momentum == 0.1
    dcnet.recalibrate_(model, batches())
    torch.testing.assert_close(model[3].running_norm, kept, rtol=0.02, atol=0.0)


# -- what follows a layer ----------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """The convolution's output goes to BatchNorm and past it, as in pre-activation networks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = self.conv(x)
        return self.head(y + self.norm(y).relu())


class Shared(nn.Module):
    """Two convolutions with one BatchNorm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.norm = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(self.a(x)) * self.norm(self.b(x))


@pytest.mark.parametrize("kind", [Residual, Shared])
def test_a_norm_that_does_not_belong_to_a_layer_alone_is_left_alone(kind):
    plain = kind().eval()
    model = copy.deepcopy(plain)
    dcnet.decouple_(model, "linear", calibrate=batches())
    assert {layer.weighting for layer in decoupled_layers(model).values()} == {"linear"}
    assert torch.equal(model.norm.running_var, plain.norm.running_var)
    x = images(2, 3, 12, 12, seed=3)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)


def test_blocks_of_ours_too():
    torch.manual_seed(0)
    plain = Chain(Block(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), Block(nn.Conv2d(8, 8, 3, bias=False), None, "relu"))
    dcnet.recalibrate_(plain, batches()).eval()
    model = copy.deepcopy(plain)
    dcnet.decouple_(model, "linear", calibrate=batches())
    x = images(2, 3, 12, 12, seed=3)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    assert [layer.weighting for layer in decoupled_layers(model).values()] == [None, "linear"]


@pytest.mark.parametrize("dims", [1, 3])
def test_other_dimensions_and_linear_layers(dims):
    torch.manual_seed(0)
    conv, norm = (nn.Conv1d, nn.BatchNorm1d) if dims == 1 else (nn.Conv3d, nn.BatchNorm3d)
    plain = nn.Sequential(conv(2, 4, 3), norm(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4**dims, 3)).eval()
    x = images(8, 2, *[6] * dims)
    model = copy.deepcopy(plain)
    report = dcnet.decouple_(model, "linear", types=(conv, nn.Linear), calibrate=[x])
    assert report.converted == ["0", "4"]
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)


def test_a_layer_that_does_not_run_and_one_that_cannot_be_scaled_are_noted():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.used(x)

    report = dcnet.decouple_(Net(), "tanh", weighting="joint", calibrate=batches())
    assert any(note.startswith("unused: never ran") for note in report.notes)
    assert any("no BatchNorm follows used" in note for note in report.notes)


def test_kernels_that_are_shared_keep_their_length():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3))
    model[2].weight = model[0].weight
    before = model[0].weight.detach().clone()
    report = dcnet.decouple_(model, "tanh", calibrate=batches())
    assert torch.equal(model[0].weight, before)
    assert any("kernels that are shared" in note for note in report.notes)
    assert [layer.weighting for layer in decoupled_layers(model).values()] == [None, None]


class Tied(nn.Module):
    """The kernels of the second convolution belong to a layer that is not converted, too."""

    def __init__(self):
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3)
        self.other.weight = self.conv.weight

    def forward(self, x):
        return self.other(self.conv(x).relu())


def test_kernels_of_layers_that_are_not_converted_keep_their_length():
    model = Tied()
    before = model.conv.weight.detach().clone()
    report = dcnet.decouple_(model, "tanh", calibrate=batches())
    assert torch.equal(model.conv.weight, before)
    assert any("no BatchNorm follows conv, and the length" in note for note in report.notes)
    assert "transposed convolutions have no decoupled twin and stay as they are: other" in report.notes


class Read(Tied):
    """The same, as a function."""

    def __init__(self):
        super().__init__()
        del self.other

    def forward(self, x):
        return nn.functional.conv_transpose2d(self.conv(x).relu(), self.conv.weight)


def test_kernels_that_other_code_reads_keep_their_length():
    model = Read()
    before = model.conv.weight.detach().clone()
    report = dcnet.decouple_(model, "tanh", calibrate=batches())
    assert torch.equal(model.conv.weight, before)
    assert any("no BatchNorm follows conv, and the length" in note for note in report.notes)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("magnitude", ["linear", "tanh"])
def test_an_output_that_is_given_away_keeps_its_scale(magnitude, keeps):
    """The BatchNorm behind it does not see all of it."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.kept = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), None

        def forward(self, x):
            y = self.conv(x)
            if keeps:
                self.kept = y
                return self.norm(y)
            return self.norm(y), y

    plain = Two().eval()
    with torch.no_grad():
        plain.conv.weight.mul_(4.0)
    model = copy.deepcopy(plain)
    dcnet.decouple_(model, magnitude, calibrate=batches())
    with torch.no_grad():
        found = [
            one.kept if one(batches()[0]) is not None and keeps else one(batches()[0])[1] for one in (model, plain)
        ]
    ratio = found[0].std((0, 2, 3)) / found[1].std((0, 2, 3))
    torch.testing.assert_close(ratio, torch.ones(8), rtol=0.05, atol=0.0)


def test_a_hook_on_a_layer_keeps_its_length():
    """What it does with the output need not be in proportion."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    model[0].register_forward_hook(lambda layer, inputs, y: y.clamp(-0.1, 0.1))
    before = [model[i].weight.detach().clone() for i in (0, 2)]
    report = dcnet.decouple_(model, "tanh", calibrate=batches())
    assert [torch.equal(model[i].weight, one) for i, one in zip((0, 2), before, strict=True)] == [True, False]
    assert any("no BatchNorm follows 0, and the length" in note for note in report.notes)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("computed", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_kernels_that_a_hook_computes_keep_their_length(computed):
    model = nn.Sequential(computed(nn.Conv2d(3, 4, 3)))
    before = copy.deepcopy(dict(model.named_parameters()))
    report = dcnet.decouple_(model, "tanh", calibrate=batches())
    assert all(torch.equal(model.get_parameter(name), one) for name, one in before.items())
    assert any("computed from others" in note for note in report.notes)


@pytest.mark.parametrize("norm", [True, False])
def test_norms_of_tokens_take_no_scale(norm):
    """BatchNorm1d normalizes tokens, not features, in outputs of shape (images, tokens, features)."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(12, 12), nn.BatchNorm1d(12) if norm else nn.Identity()

        def forward(self, x):
            return self.norm(self.linear(input=x[:, 0]))

    plain = Tokens().eval()
    with torch.no_grad():
        plain.linear.weight.mul_(torch.linspace(0.5, 3.0, 12).unsqueeze(1))
    model = copy.deepcopy(plain)
    dcnet.decouple_(model, "linear", types=(nn.Linear,), calibrate=batches())
    torch.testing.assert_close(model(batches()[0]), plain(batches()[0]), rtol=1e-3, atol=1e-4)


def test_dead_and_zero_channels_stay_finite():
    plain = network()
    with torch.no_grad():
        plain[0].weight[3].zero_()
        plain[3].weight[5].zero_()
    model = copy.deepcopy(plain)
    dcnet.decouple_(model, "tanh", calibrate=batches())
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    torch.testing.assert_close(outputs(model, "1", batches()[0])[3], outputs(plain, "1", batches()[0])[3])


def test_a_calibrated_conversion_is_recorded_and_restored():
    model = network(norm=False)
    dcnet.decouple_(model, "tanh", calibrate=batches())
    again = dcnet.restore_conversion_(network(norm=False), dcnet.conversion_of(model))
    again.load_state_dict(model.state_dict())
    x = images(2, 3, 12, 12)
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_modes_and_hooks_are_as_they_were():
    model = network().train()
    model[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    dcnet.decouple_(model, "tanh", calibrate=((x, torch.zeros(16)) for x in batches()))
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# -- bad input ---------------------------------------------------------------------------------------------------------


def unchanged(model, before, state):
    assert [type(module) for module in model.modules()] == before
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == state
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Once(nn.Module):
    """Fails the second time that batches come."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 4:
            raise RuntimeError("no more")
        return x


@pytest.mark.parametrize(
    ("calibrate", "error", "words"),
    [
        ([], ValueError, "no batches"),
        (iter(()), ValueError, "no batches"),
        (
            [images(2, 3, 12, 12), torch.full((2, 3, 12, 12), float("nan"))],
            ValueError,
            "batch 2 has values that are not finite",
        ),
        ([torch.zeros(0, 3, 12, 12)], ValueError, "batch 1 is empty"),
        (images(2, 3, 12, 12), TypeError, r"one tensor; possible: \[images\]"),
        (7, TypeError, "got 7"),
        ([{"x": 1}], TypeError, "got dict"),
        ([()], TypeError, "got tuple"),
        ([images(2, 5, 12, 12)], RuntimeError, "channels"),
        ([images(2, 3, 12, 12) * 1e30], ValueError, "layer '0' gives values that are not finite"),
        (batches(), RuntimeError, "no more"),
    ],
    ids=[
        *("empty", "exhausted", "nan", "no images", "tensor", "number", "dict", "tuple", "channels", "huge"),
        "fails later",
    ],
)
def test_bad_batches_change_nothing(calibrate, error, words):
    model = network(norm=False)
    if words == "no more":
        model.append(Once())
    before = [type(module) for module in model.modules()]
    state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=words):
        dcnet.decouple_(model, "tanh", calibrate=calibrate)
    unchanged(model, before, state)


def test_a_model_with_two_inputs_is_told_what_to_do():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x, mask):
            return self.conv(x * mask)

    model = Masked()
    with pytest.raises(
        TypeError, match=r"nothing else, but Masked.forward needs 'mask' too; possible: a module around"
    ):
        dcnet.decouple_(model, "tanh", calibrate=[(images(2, 3, 8, 8), images(2, 3, 8, 8))])
    assert type(model.conv) is nn.Conv2d


def test_nothing_to_convert():
    with pytest.raises(ValueError, match=r"nothing to convert: Sequential has no layer of nn\.Conv1d"):
        dcnet.decouple_(nn.Sequential(nn.Linear(3, 4)), calibrate=[torch.rand(2, 3)])
    with pytest.raises(ValueError, match=r"nothing to convert in this Sequential: 0: "):
        dcnet.decouple_(nn.Sequential(nn.Conv2d(3, 4, 1)), where=lambda *_: False, calibrate=[torch.rand(2, 3, 4, 4)])


@pytest.mark.filterwarnings("ignore")  # of other people's packages
@pytest.mark.parametrize(
    "name",
    [
        "resnet10t",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "resnetv2_50",
                "densenet121",
                "mobilenetv3_small_100",
                "convnext_atto",
                "vgg11_bn",
                "regnety_002",
            )
        ),
    ],
)
def test_networks_of_timm_start_exactly_too(name):
    """What follows a convolution is found in pre-activation, concatenated, gated and unnormalized layers alike."""
    timm = needs("timm")
    torch.manual_seed(0)
    plain = timm.create_model(name, num_classes=10)
    inputs = list(images(8, 3, 64, 64).split(4))
    dcnet.recalibrate_(plain, inputs).eval()
    model = copy.deepcopy(plain)
    report = dcnet.decouple_(model, "linear", calibrate=inputs)
    assert len(report.converted) > 8
    with torch.no_grad():
        expected, found = plain(inputs[0]), model(inputs[0])
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())
