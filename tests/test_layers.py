"""The layers as modules: keys, copies, dtypes, formats, laziness, statistics."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dcnet

CONVS = [
    (nn.Conv1d, dcnet.DecoupledConv1d, dcnet.LazyDecoupledConv1d, 1),
    (nn.Conv2d, dcnet.DecoupledConv2d, dcnet.LazyDecoupledConv2d, 2),
    (nn.Conv3d, dcnet.DecoupledConv3d, dcnet.LazyDecoupledConv3d, 3),
]
EXTRAS = {"raw_radius", "running_norm", "num_batches_tracked"}


@pytest.mark.parametrize(("plain", "decoupled", "lazy", "dims"), CONVS)
def test_subclass_with_the_same_keys(plain, decoupled, lazy, dims):
    for options in (
        {"magnitude": "sphere"},
        {"magnitude": "linear", "angular": "sigmoid"},
        {"magnitude": "ball", "radius": 2.5},
    ):
        layer = decoupled(4, 6, 3, **options)
        assert isinstance(layer, plain)
        assert layer.bias is None
        assert list(layer.state_dict()) == list(plain(4, 6, 3, bias=False).state_dict())
        assert layer.running_norm is None
    assert set(decoupled(4, 6, 3, bias=True).state_dict()) == {"weight", "bias"} | EXTRAS
    assert set(decoupled(4, 6, 3, angular="sigmoid:k=learned").state_dict()) == {"weight", "raw_k"} | EXTRAS


def test_linear_keys():
    assert isinstance(dcnet.DecoupledLinear(4, 3), nn.Linear)
    assert list(dcnet.DecoupledLinear(4, 3, magnitude="linear").state_dict()) == ["weight"]
    assert set(dcnet.DecoupledLinear(4, 3, bias=True).state_dict()) == {"weight", "bias"} | EXTRAS


def test_weight_normalized_softmax():
    fc = dcnet.DecoupledLinear(8, 3, magnitude="linear", angular="cosine", eps=0.0)
    x = torch.randn(5, 8)
    torch.testing.assert_close(fc(x), x @ (fc.weight / fc.weight.norm(dim=1, keepdim=True)).T)


def test_radius_and_k():
    layer = dcnet.DecoupledConv2d(4, 6, 3, angular="sigmoid:k=learned")
    assert layer.effective_radius.tolist() == pytest.approx([1.0001] * 6)
    assert layer.learned_parameters["k"].tolist() == pytest.approx([0.75] * 6)
    assert layer.raw_k.tolist() == pytest.approx([0.7] * 6)
    assert dcnet.DecoupledConv2d(4, 6, 3, radius=2.5).effective_radius.tolist() == [2.5] * 6
    assert dcnet.DecoupledConv2d(4, 6, 3, magnitude="log").effective_radius is None
    layer.raw_radius.data.fill_(-2.0)
    layer.raw_k.data.fill_(-0.5)
    assert layer.effective_radius.tolist() == pytest.approx([4.0001] * 6)
    assert layer.learned_parameters["k"].tolist() == pytest.approx([0.55] * 6)
    layer.reset_parameters()
    assert layer.raw_radius.tolist() == [1.0] * 6


def test_layer_is_the_functional_form():
    layer = dcnet.DecoupledConv2d(
        4, 6, 3, padding=2, stride=2, groups=2, bias=True, magnitude="seg:beta=0.1", angular="sigmoid:k=learned"
    ).double()
    x = torch.randn(3, 4, 7, 7, dtype=torch.float64, requires_grad=True)
    common = {
        "stride": 2,
        "padding": 2,
        "groups": 2,
        "magnitude": "seg:beta=0.1",
        "angular": "sigmoid",
        "radius": layer.effective_radius,
    }
    common["parameters"] = layer.learned_parameters
    results = []
    for y in (layer(x), dcnet.decoupled_conv2d(x, layer.weight, layer.bias, **common, mean_norm="batch")):
        results.append((y, *torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()], retain_graph=True)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    layer.eval()
    torch.testing.assert_close(
        layer(x), dcnet.decoupled_conv2d(x, layer.weight, layer.bias, **common, mean_norm=layer.running_norm)
    )
    norms = dcnet.patch_norm(x, 3, stride=2, padding=2, groups=2)
    assert norms.shape == (3, 2, 5, 5)
    torch.testing.assert_close(layer.running_norm, norms.mean((0, 2, 3)))


# -- state -------------------------------------------------------------------------------------------------------------


def test_round_trips():
    layer = dcnet.DecoupledConv2d(
        4, 6, 3, bias=True, magnitude="seg:beta=0.2", angular="sigmoid:k=learned", momentum=None
    )
    x = torch.randn(2, 4, 6, 6)
    layer(x)
    layer.eval()
    expected = layer(x)
    fresh = dcnet.DecoupledConv2d(4, 6, 3, bias=True, magnitude="seg:beta=0.2", angular="sigmoid:k=learned").eval()
    fresh.load_state_dict(layer.state_dict(), strict=True)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    torch.load(file, weights_only=True)
    for other in (fresh, loaded, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), expected)
    assert loaded.momentum is None


def test_a_plain_state_dict_loads_strictly():
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
    twin = nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3, angular="sigmoid:k=learned"), nn.BatchNorm2d(4))
    twin.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(twin[0].weight, plain[0].weight)
    assert twin[0].raw_radius.tolist() == [1.0] * 4
    assert twin[0].running_norm.tolist() == [1.0]


@pytest.mark.parametrize("missing", [*sorted(EXTRAS), "raw_k"])
def test_some_of_the_extras_are_an_error(missing):
    layer = dcnet.DecoupledConv2d(3, 4, 3, angular="sigmoid:k=learned")
    state = layer.state_dict()
    del state[missing]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{missing}"'):
        layer.load_state_dict(state, strict=True)


def test_statistics_stay_float32_in_half_precision():
    for convert in (lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.float16)):
        layer = dcnet.DecoupledConv2d(3, 4, 3)
        layer.running_norm.fill_(1.0001)
        convert(layer)
        assert layer.weight.dtype in (torch.float16, torch.bfloat16)
        assert layer.running_norm.dtype == layer.num_batches_tracked.dtype == torch.float32
        assert layer.running_norm.item() == pytest.approx(1.0001, abs=1e-7)
        x = torch.randn(2, 3, 6, 6).to(layer.weight.dtype)
        assert layer(x).dtype == layer.weight.dtype
        assert layer.running_norm.dtype == torch.float32
    assert dcnet.DecoupledConv2d(3, 4, 3).double().running_norm.dtype == torch.float64
    assert dcnet.DecoupledConv2d(3, 4, 3).double().half().running_norm.dtype == torch.float32
    assert dcnet.DecoupledConv2d(3, 4, 3, dtype=torch.bfloat16).running_norm.dtype == torch.float32


@pytest.mark.parametrize(("plain", "decoupled", "lazy", "dims"), CONVS)
def test_lazy(plain, decoupled, lazy, dims):
    layer = lazy(6, 3, groups=2, bias=True, magnitude="ball", angular="sigmoid:k=learned")
    assert "magnitude='ball'" in repr(layer)
    y = layer(torch.randn(2, 4, *[5] * dims))
    assert type(layer) is decoupled
    assert y.shape[1] == 6
    assert layer.weight.shape == (6, 2, *[3] * dims)
    assert layer.raw_radius.shape == layer.raw_k.shape == (6,)
    assert layer.running_norm.shape == (2,)
    copied = decoupled(4, 6, 3, groups=2, bias=True, magnitude="ball", angular="sigmoid:k=learned")
    copied.load_state_dict(layer.state_dict(), strict=True)
    unborn = lazy(6, 3, groups=2, bias=True, magnitude="ball", angular="sigmoid:k=learned")
    unborn.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(unborn.weight, layer.weight)
    with pytest.raises(ValueError, match="divisible by groups"):
        lazy(5, 3, groups=2)


@pytest.mark.parametrize(("plain", "decoupled", "lazy", "dims"), CONVS)
def test_shapes_dtypes_and_formats_are_the_plain_layers(plain, decoupled, lazy, dims):
    reference = plain(4, 6, 3, padding="same", padding_mode="replicate" if dims == 3 else "reflect")
    layer = decoupled(4, 6, 3, padding="same", padding_mode="replicate" if dims == 3 else "reflect", bias=True)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(2, 4, *[5] * dims).to(dtype)
        a, b = reference.to(dtype)(x), layer.to(dtype)(x)
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert layer(x[0]).shape == reference(x[0]).shape  # unbatched
    if dims > 1:
        memory_format = torch.channels_last if dims == 2 else torch.channels_last_3d
        x = x.to(memory_format=memory_format)
        layer.to(memory_format=memory_format)
        assert layer.weight.is_contiguous(memory_format=memory_format)
        assert layer(x).stride() == reference.to(memory_format=memory_format)(x).stride()


def test_repr():
    text = repr(
        dcnet.DecoupledConv2d(64, 128, 3, padding=1, magnitude="seg:alpha=1,beta=0.25", weighting="linear", eps=0.0)
    )
    expected = "magnitude='seg:beta=0.25', angular='cosine', weighting='linear', radius='learned', eps=0.0)"
    assert text.startswith("DecoupledConv2d(64, 128, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1)")
    assert text.endswith(expected)
    assert "radius" not in repr(dcnet.DecoupledLinear(3, 4, magnitude="log"))


def test_meta_device_and_reset():
    with torch.device("meta"):
        layer = dcnet.DecoupledConv2d(3, 4, 3)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.running_norm.tolist() == [1.0]
    assert layer.raw_radius.tolist() == [1.0] * 4
    assert layer(torch.randn(2, 3, 5, 5)).isfinite().all()
    with torch.device("meta"):
        layer = dcnet.DecoupledConv2d(3, 4, 3, angular="sigmoid:k=learned")
    layer.load_state_dict(nn.Conv2d(3, 4, 3, bias=False).state_dict(), assign=True)
    assert layer(torch.randn(2, 3, 5, 5)).isfinite().all()
    assert layer.raw_k.tolist() == pytest.approx([0.7] * 4)


# -- statistics
# ----------------------------------------------------------------------------------------------------------


def test_running_norm():
    layer = dcnet.DecoupledConv2d(4, 6, 3, groups=2, momentum=0.1)
    batches = [torch.randn(2, 4, 6, 6) * scale for scale in (1.0, 2.0, 5.0)]
    means = [dcnet.patch_norm(x, 3, groups=2).mean((0, 2, 3)) for x in batches]
    assert layer.running_norm.tolist() == [1.0, 1.0]
    layer(batches[0])
    assert torch.equal(layer.running_norm, means[0])  # the first batch is taken as it is
    layer(batches[1])
    torch.testing.assert_close(layer.running_norm, 0.9 * means[0] + 0.1 * means[1])
    layer.eval()
    before = layer.running_norm.clone()
    layer(batches[2])
    assert torch.equal(layer.running_norm, before)
    assert layer.num_batches_tracked == 2
    cumulative = dcnet.DecoupledConv2d(4, 6, 3, groups=2, momentum=None)
    for x in batches:
        cumulative(x)
    torch.testing.assert_close(cumulative.running_norm, torch.stack(means).mean(0))


def test_every_group_has_its_own_mean():
    layer = dcnet.DecoupledConv2d(4, 4, 1, groups=2)
    x = torch.randn(8, 4, 5, 5)
    x[:, 2:] *= 100.0
    layer(x)
    assert layer.running_norm[1] > 50 * layer.running_norm[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_once(reentrant):
    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        layer = dcnet.DecoupledConv2d(3, 4, 3, angular="linear")
        x = torch.randn(2, 3, 6, 6, requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=reentrant) if wrapped else layer(x)
        y.sin().sum().backward()
        results.append(
            (layer.num_batches_tracked, layer.running_norm, x.grad, layer.weight.grad, layer.raw_radius.grad)
        )
        assert layer.num_batches_tracked == 1
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_a_compiled_layer_counts_once(reentrant):
    layer = dcnet.DecoupledConv2d(3, 4, 3)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    checkpoint(compiled, x, use_reentrant=reentrant).sum().backward()
    assert layer.num_batches_tracked == 1
    assert torch.equal(layer.running_norm, dcnet.patch_norm(x, 3).mean((0, 2, 3)).detach())


def test_compiling_a_checkpointed_layer():
    layer = dcnet.DecoupledConv2d(3, 4, 3)
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    torch.compile(lambda t: checkpoint(layer, t, use_reentrant=False).sum(), fullgraph=True, backend="aot_eager")(
        x
    ).backward()
    assert layer.num_batches_tracked == 1


def test_evaluation_and_training_before_one_backward():
    layer = dcnet.DecoupledConv2d(3, 4, 3)
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    (layer.eval()(x).sum() + layer.train()(x).sum()).backward()
    assert x.grad.isfinite().all()


def test_batched_gradients():
    """As torch.autograd.functional.jacobian(vectorize=True) asks for them."""
    layer = dcnet.DecoupledLinear(3, 4, angular="linear").double().eval()
    x = torch.randn(3, dtype=torch.float64)
    jacobians = [torch.autograd.functional.jacobian(layer, x, vectorize=vectorize) for vectorize in (False, True)]
    torch.testing.assert_close(*jacobians)


def test_dead_groups_without_eps():
    x = torch.randn(4, 4, 8, 8)
    x[:, 1] = 0.0
    x.requires_grad_()
    for magnitude in ("tanh", "ball", "seg"):
        layer = dcnet.DecoupledConv2d(4, 4, 3, groups=4, eps=0.0, magnitude=magnitude)
        y = layer(x)
        assert (y[:, 1] == 0).all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [x, *layer.parameters()]))


def test_recalibrate():
    net = nn.Sequential(
        dcnet.DecoupledConv2d(3, 4, 3),
        nn.Dropout(0.5),
        nn.BatchNorm2d(4),
        dcnet.DecoupledConv2d(4, 4, 3, magnitude="sphere"),
    )
    net(torch.randn(2, 3, 8, 8))
    net[1].eval()
    batches = [torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8) * 3]
    modes = [module.training for module in net.modules()]
    dcnet.recalibrate_(net, [(x, torch.zeros(4)) for x in batches])
    means = [dcnet.patch_norm(x, 3).mean() for x in batches]
    torch.testing.assert_close(net[0].running_norm, torch.stack(means).mean(0, keepdim=True))
    with torch.no_grad():
        features = [
            dcnet.decoupled_conv2d(x, net[0].weight, radius=net[0].effective_radius, mean_norm="batch") for x in batches
        ]
    torch.testing.assert_close(net[2].running_mean, torch.stack([f.mean((0, 2, 3)) for f in features]).mean(0))
    assert [module.training for module in net.modules()] == modes
    assert net[0].momentum == net[2].momentum == 0.1
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="no batches"):
        dcnet.recalibrate_(net, [])
    with pytest.raises(ValueError, match="input has 5 channels"):
        dcnet.recalibrate_(net, [batches[0], torch.randn(1, 5, 8, 8)])
    with pytest.raises(TypeError, match="a batch must be a tensor"):
        dcnet.recalibrate_(net, [{"x": batches[0]}])
    with pytest.raises(TypeError, match=r"an iterable of batches, got one tensor; possible: \[images\]"):
        dcnet.recalibrate_(net, batches[0])
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert [module.training for module in net.modules()] == modes


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = dcnet.DecoupledConv2d(3, 4, 3)

    def forward(self, x, mask, scale=1.0, *, gain):
        return self.conv(x * mask) * scale * gain


def test_recalibrate_says_that_a_model_gets_one_input():
    net, x = TwoInputs(), torch.randn(2, 3, 8, 8)
    before = net.conv.running_norm.clone()
    message = "first part of a batch, and nothing else, but TwoInputs.forward needs 'mask', 'gain' too; possible: a mod"
    with pytest.raises(TypeError, match=message):
        dcnet.recalibrate_(net, [(x, torch.ones(1))])
    assert torch.equal(net.conv.running_norm, before)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, mask=None):
            return self.net(x, torch.ones(1) if mask is None else mask, gain=2.0)

    dcnet.recalibrate_(Whole(), [(x, torch.ones(1))])
    torch.testing.assert_close(net.conv.running_norm, dcnet.patch_norm(x, 3).mean().reshape(1))
    net.register_forward_pre_hook(lambda _, inputs, given: ((*inputs, 1.0), {"gain": 1.0}), with_kwargs=True)
    dcnet.recalibrate_(net, [2.0 * x])  # others give the rest
    torch.testing.assert_close(net.conv.running_norm, dcnet.patch_norm(2.0 * x, 3).mean().reshape(1))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, inside Triton's interpreter
@pytest.mark.parametrize(
    ("how", "momentum", "value"),
    [
        ("compiled", 0.1, math.nan),
        *((how, *rest) for how in ("eager", "fused") for rest in ((0.1, math.nan), (None, math.inf))),
    ],
)
def test_a_pixel_that_is_not_finite_does_not_stay(how, momentum, value):
    """The batch it is in does not enter the averages, the first or a later one; groups without it go on."""
    if how == "fused":
        pytest.importorskip("triton")
    device = "cuda" if how == "fused" and torch.cuda.is_available() else "cpu"
    good = [torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(i)).to(device) for i in range(3)]
    bad = good[0].clone()
    bad[1, 0, 2, 2] = value
    for groups in (1, 2) if how != "compiled" else (2,):
        layers = []
        for batches in ([bad, good[1], bad, good[2]], [good[1], good[2]]):
            layer = dcnet.DecoupledConv2d(
                4, 6, 3, groups=groups, momentum=momentum, impl="fused" if how == "fused" else "auto", device=device
            )
            call = torch.compile(layer, backend="aot_eager") if how == "compiled" else layer
            for x in batches:
                call(x)
            layers.append(layer)
        assert layers[0].num_batches_tracked.item() == 2.0
        torch.testing.assert_close(layers[0].running_norm[0], layers[1].running_norm[0])
        assert layers[0].running_norm.isfinite().all()
        if groups == 2:
            assert layers[0].running_norm[1] != layers[1].running_norm[1]


def test_the_name_of_the_input():
    """As nn.Conv2d and nn.Linear have it."""
    for layer, x in (
        (dcnet.DecoupledConv2d(3, 4, 3), torch.randn(1, 3, 5, 5)),
        (dcnet.DecoupledLinear(3, 4), torch.randn(2, 3)),
    ):
        assert torch.equal(layer.eval()(input=x), layer(x))


def test_a_bias_for_a_layer_without_one():
    """The error says what to do; with strict=False it is PyTorch's affair."""
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    with pytest.raises(
        RuntimeError, match=r'"0.bias \(a decoupled layer has no bias by default: make it with bias=True'
    ):
        nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3), nn.ReLU()).load_state_dict(plain.state_dict())
    found = nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3), nn.ReLU()).load_state_dict(plain.state_dict(), strict=False)
    assert found.unexpected_keys == ["0.bias"]
    nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3, bias=True), nn.ReLU()).load_state_dict(plain.state_dict())


def test_back_to_plain_names():
    """What is left loads strictly into the plain twin, with the same kernels."""
    model = dcnet.create_model("cnn9_narrow", input_size=8, norm="batch", angular="sigmoid:k=learned")
    plain = dcnet.create_model("cnn9_narrow", input_size=8, norm="batch", magnitude=None)
    plain.load_state_dict(dcnet.plain_state_dict(model), strict=True)
    torch.testing.assert_close(plain.stages[0].conv.weight, model.stages[0].conv.weight)
    layer = dcnet.DecoupledConv2d(3, 4, 3)
    assert list(dcnet.plain_state_dict(layer)) == ["weight"]


def test_plain_state_of_a_layer_that_is_registered_twice():
    def make():
        conv = nn.Conv2d(3, 3, 3)
        return nn.Sequential(conv, nn.ReLU(), nn.Sequential(conv))

    model = make()
    dcnet.decouple_(model, "tanh", "sigmoid:k=learned")
    assert list(dcnet.plain_state_dict(model)) == ["0.weight", "0.bias", "2.0.weight", "2.0.bias"]
    make().load_state_dict(dcnet.plain_state_dict(model), strict=True)
