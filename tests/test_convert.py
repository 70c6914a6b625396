"""decouple_: a model someone already has."""

import copy
import json

import pytest
import torch
from helpers import needs
from torch import nn

import dcnet


class Standardized(nn.Conv2d):
    """A convolution with arithmetic of its own."""

    def forward(self, x):
        return super().forward(x) * 2.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="circular")
        self.blocks = nn.ModuleList(
            [nn.Conv2d(8, 8, 3, padding="same", dilation=2, groups=2, bias=False), nn.Conv2d(8, 8, 1)]
        )
        self.again = self.blocks[1]
        self.special = Standardized(8, 8, 3, padding=1)
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
    assert "Standardized, with a forward of its own" in report.skipped["special"]
    assert "run the model once" in report.skipped["late"]
    assert "nn.Linear, which is not among types" in report.skipped["head"]
    assert model.again is model.blocks[1]
    torch.testing.assert_close(model(x), before)
    assert "4 layers converted, 3 left" in str(report)
    assert dcnet.decouple_(model).skipped["stem"] == "decoupled already"


def test_new_parameters_of_frozen_layers_are_frozen():
    """Otherwise a network that its owner has frozen would train."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)).requires_grad_(False)
    model[1].bias.requires_grad_(True)
    model[2].requires_grad_(True)
    report = dcnet.decouple_(model, "tanh", "sigmoid:k=learned")
    trained = ["1.bias", "1.raw_radius", "1.raw_k", "2.weight", "2.bias", "2.raw_radius", "2.raw_k"]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained
    assert "the new parameters of layers that are frozen are frozen too: 0" in report.notes
    report = dcnet.decouple_(nn.Sequential(nn.Conv2d(3, 4, 3)).requires_grad_(False), "linear")
    assert not report.notes


def test_complex_layers_are_left():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, dtype=torch.complex64))
    report = dcnet.decouple_(model)
    assert report.converted == ["0"]
    assert "torch.complex64; decoupled operators take real" in report.skipped["1"]
    assert model[1](torch.ones(1, 4, 3, 3, dtype=torch.complex64)).is_complex()


def test_weights_hooks_and_optimizers_survive():
    model = Model()
    weights = {name: (p, p.detach().clone()) for name, p in model.named_parameters() if not name.startswith("late")}
    calls = []
    model.stem.register_forward_hook(lambda *_: calls.append(1))
    model.stem.weight.requires_grad_(False)
    model.eval()
    dcnet.decouple_(
        model, "tanh", "sigmoid:k=learned", where=lambda name, module: name.startswith("stem"), eps=0.0, momentum=None
    )
    assert type(model.stem) is dcnet.DecoupledConv2d
    assert type(model.blocks[0]) is nn.Conv2d
    assert (model.stem.eps, model.stem.momentum, model.stem.training) == (0.0, None, False)
    for name, (parameter, value) in weights.items():
        assert model.get_parameter(name) is parameter
        assert torch.equal(parameter, value)
    assert not model.stem.weight.requires_grad
    model(torch.randn(2, 3, 12, 12))
    assert calls == [1]
    fresh = dcnet.DecoupledConv2d(
        3, 8, 3, stride=2, padding=1, padding_mode="circular", bias=True, angular="sigmoid:k=learned"
    )
    fresh.load_state_dict(model.stem.state_dict(), strict=True)


def test_linear_and_subclasses_when_asked():
    model = Model()
    with pytest.warns(UserWarning, match="special: the forward of Standardized is dropped"):
        report = dcnet.decouple_(model, "log", types=(nn.Linear, Standardized))
    assert report.notes == [
        "special: the forward of Standardized is dropped",
        "transposed convolutions have no decoupled twin and stay as they are: up",
        "none of the 2 does the work of the modules behind it; report.fused says why",
    ]
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
    with pytest.raises(TypeError, match=r"where must be a function .* or a list of these, got 3"):
        dcnet.decouple_(model, where=3)
    state = torch.get_rng_state()
    dcnet.decouple_(nn.Conv2d(3, 4, 3))
    torch.set_rng_state(state)
    assert type(model.stem) is nn.Conv2d


class Named(nn.Conv2d):
    """A convolution with arguments of its own, and the arithmetic of the plain one, as torchvision's Conv3DSimple."""

    def __init__(self, channels):
        super().__init__(channels, channels, 3, padding=1)


class Padded(nn.Conv2d):
    """A convolution that pads on its own, as timm's Conv2dSame does."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(nn.functional.pad(x, (0, 1, 0, 1)), weight, bias)


def test_subclasses_that_compute_the_same():
    model = nn.Sequential(Named(3), Padded(3, 4, 3), nn.modules.linear.NonDynamicallyQuantizableLinear(4, 4))
    report = dcnet.decouple_(model, "linear", "cosine", weighting="linear", types=(nn.Conv2d, nn.Linear))
    assert report.converted == ["0", "2"]
    assert "Padded, with a _conv_forward of its own" in report.skipped["1"]
    assert type(model[0]) is dcnet.DecoupledConv2d
    model = nn.Sequential(Named(3), nn.Linear(3, 3))
    assert "Named, of nn.Conv2d, which is not among types" in dcnet.decouple_(model, types=(nn.Linear,)).skipped["0"]


@pytest.mark.parametrize(
    "parametrized", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_parametrized_layers_are_left(parametrized):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), parametrized(nn.Conv2d(4, 4, 3)), nn.Conv2d(4, 2, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    before = model(x)
    # not even its own class helps: nothing is changed then
    with pytest.raises(
        ValueError, match=r"cannot convert '1': its weight is computed by a parametrization .* Nothing has been changed"
    ):
        dcnet.decouple_(model, types=(nn.Conv2d, type(model[1])))
    assert [type(layer).__name__ for layer in model] == ["Conv2d", "ParametrizedConv2d", "Conv2d"]
    torch.testing.assert_close(model(x), before)
    report = dcnet.decouple_(model, "linear", "cosine", weighting="linear")
    assert report.converted == ["0", "2"]
    assert "remove_parametrizations(layer, 'weight')" in report.skipped["1"]
    torch.testing.assert_close(model(x), before)
    # the advice of the report works
    nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    assert dcnet.decouple_(model, "linear", "cosine", weighting="linear").converted == ["1"]
    parametrized(model[1])
    torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-3)


def test_all_or_nothing(monkeypatch):
    model = Model()
    x = torch.randn(2, 3, 12, 12)
    before, keys = model(x), model.state_dict().keys()
    start, calls = dcnet.layers.Decoupled._init_decoupling, []

    def failing(self, options):
        start(self, options)
        calls.append(self)
        if len(calls) == 3:
            raise MemoryError("no memory for the third")

    monkeypatch.setattr(dcnet.layers.Decoupled, "_init_decoupling", failing)
    with pytest.raises(MemoryError):
        dcnet.decouple_(model)
    assert not any(isinstance(module, dcnet.layers.Decoupled) for module in model.modules())
    assert model.state_dict().keys() == keys
    assert vars(model.stem).keys() == vars(nn.Conv2d(3, 8, 3)).keys()
    torch.testing.assert_close(model(x), before)


def transformer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2)


def test_transformers_call_their_layers_in_evaluation():
    model, x = transformer(), torch.randn(3, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 3 + [True] * 2])
    report = dcnet.decouple_(model, "tanh", types=(nn.Linear,))
    assert report.converted == [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    assert (
        "MultiheadAttention multiplies by its weight without calling it"
        in report.skipped["layers.0.self_attn.out_proj"]
    )
    assert any("2 nn.TransformerEncoderLayer no longer take PyTorch's fast path" in note for note in report.notes)
    model.train()
    model(x)  # averages of E{‖x‖}
    model.eval()
    expected = model(x)  # a gradient is wanted: no fast path
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
        masked = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(masked, model(x, src_key_padding_mask=padding).detach())
    plain = transformer().eval()
    assert float((plain(x) - expected).detach().norm()) > 0.1 * float(
        expected.detach().norm()
    )  # conversion changes something


class Fusable(nn.Module):
    """A block as timm's `reparameterize_model` finds them."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def fuse(self):
        return nn.utils.fusion.fuse_conv_bn_eval(self.conv, self.bn)

    def forward(self, x):
        return self.bn(self.conv(x))


class Fusing(nn.Module):
    """A model in which fusing means something else, and one submodule is called so."""

    def __init__(self):
        super().__init__()
        self.block, self.reparameterize = Fusable(), nn.Conv2d(3, 3, 1)

    def fuse(self, x, y):
        return x + y

    def forward(self, x):
        return self.fuse(self.reparameterize(x), self.block(x))


def test_methods_that_merge_kernels_are_refused():
    model = Fusing()
    report = dcnet.decouple_(model)
    with pytest.raises(RuntimeError, match=r"block.fuse\(\) merges kernels .* 'block.conv' is decoupled"):
        model.block.fuse()
    assert any("block.fuse() would merge decoupled kernels wrongly" in note for note in report.notes)
    assert model(torch.randn(1, 3, 4, 4)).shape == (1, 3, 4, 4)
    with pytest.raises(RuntimeError, match="merges kernels"):
        copy.deepcopy(model).block.fuse()
    same = Fusing().eval()
    dcnet.decouple_(same, "linear", "cosine", weighting="linear")  # a convolution still
    x = torch.randn(1, 3, 4, 4)
    torch.testing.assert_close(same.block.fuse()(x), same.block(x))
    left = Fusing()
    dcnet.decouple_(left, where=lambda name, module: "block" not in name)
    left.eval().block.fuse()


def test_an_optimizer_made_before():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(5 * 16, 2))
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2:].parameters()}],
        lr=0.1,
        momentum=0.9,
        weight_decay=0.01,
    )
    report = dcnet.decouple_(model, "tanh", "sigmoid:k=learned", optimizer=optimizer)
    assert report.added == ["0.raw_radius", "0.raw_k", "2.raw_radius", "2.raw_k"]
    assert any("still decays the kernels of 2 unweighted layers (0, …)" in note for note in report.notes)
    assert [(group["lr"], group["momentum"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.3, 0.9, 0.01),
        (0.1, 0.9, 0.01),
        (0.3, 0.9, 0.0),
        (0.1, 0.9, 0.0),
    ]
    before = {name: model.get_parameter(name).detach().clone() for name in report.added}
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    for name, value in before.items():
        assert not torch.equal(model.get_parameter(name), value), name


def test_an_optimizer_that_knows_names():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3))
    optimizer = torch.optim.AdamW(model.named_parameters(), weight_decay=0.01)
    dcnet.decouple_(model, optimizer=optimizer)
    assert optimizer.param_groups[1]["param_names"] == ["0.raw_radius", "1.raw_radius"]
    assert [id(p) for p in optimizer.param_groups[1]["params"]] == [id(layer.raw_radius) for layer in model]


def test_nothing_to_fuse_is_noted():
    note = "none of the 2 does the work of the modules behind it; report.fused says why"
    assert note in dcnet.decouple_(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 3))).notes


def test_transposed_convolutions_are_noted():
    names = [f"up{i}" for i in range(5)]
    model = nn.ModuleDict({name: nn.ConvTranspose2d(3, 3, 2) for name in names} | {"conv": nn.Conv2d(3, 3, 3)})
    (note,) = [note for note in dcnet.decouple_(model).notes if "transposed" in note]
    assert note.startswith("transposed convolutions have no decoupled twin and stay as they are: up0, ")


def test_what_an_optimizer_does_not_know():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3))
    stranger = torch.optim.Adam(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="no parameter of any of the 2 layers to convert"):
        dcnet.decouple_(model, optimizer=stranger)
    scheduled = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    with pytest.raises(ValueError, match="schedule already"):
        dcnet.decouple_(model, optimizer=scheduled)
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got list"):
        dcnet.decouple_(model, optimizer=list(model.parameters()))
    assert type(model[0]) is nn.Conv2d
    some = torch.optim.SGD(model[1].parameters(), lr=0.1)
    report = dcnet.decouple_(model, optimizer=some)
    assert len(some.param_groups[1]["params"]) == 1
    assert any(note.startswith("the optimizer has no parameter of 0,") for note in report.notes)
    report = dcnet.decouple_(nn.Conv2d(3, 4, 3))
    assert report.added == ["raw_radius"]
    assert "an optimizer made before does not know 1 new parameter (raw_radius): pass it as optimizer=" in str(report)
    assert dcnet.decouple_(nn.Conv2d(3, 4, 3), "sphere").notes == []


def test_wrapped_models_are_refused(tmp_path):
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Conv2d(3, 4, 3))
        with pytest.raises(ValueError, match=r"wrapped already \(DistributedDataParallel\); convert it first"):
            dcnet.decouple_(wrapped)
        sharded = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        from torch.distributed.fsdp import fully_shard

        fully_shard(sharded[0], mesh=mesh)
        with pytest.raises(ValueError, match=r"wrapped already \(FSDPConv2d\)"):
            dcnet.decouple_(sharded)
    finally:
        dist.destroy_process_group()


def test_a_conversion_written_down_and_done_again():
    model = Model()
    model(torch.randn(2, 3, 12, 12))
    dcnet.decouple_(
        model, "seg:beta=0.25", "sigmoid:k=learned", where=lambda name, module: name.startswith("blocks"), eps=0.0
    )
    dcnet.decouple_(model, "ball", radius=2.5, momentum=None, where=lambda name, module: name == "stem")
    record = json.loads(json.dumps(dcnet.conversion_of(model)))
    assert list(record) == ["stem", "blocks.0", "blocks.1"]
    other = Model()
    other(torch.randn(2, 3, 12, 12))
    assert dcnet.restore_conversion_(other, record) is other
    assert dcnet.conversion_of(other) == dcnet.conversion_of(model)
    other.load_state_dict(model.state_dict(), strict=True)
    x = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(other.eval()(x), model.eval()(x))
    for broken, message in (
        ({**record, "tail": record["stem"]}, "'tail' as recorded: there is none"),
        (record, "'stem' as recorded: that is a Dec"),
    ):
        with pytest.raises(ValueError, match=message):
            dcnet.restore_conversion_(Model() if "tail" in broken else other, broken)


def test_a_model_of_transformers_comes_back_converted(tmp_path):
    transformers = needs("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    model = transformers.ResNetForImageClassification(config)
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="has no conversion in its configuration"):
        dcnet.from_pretrained(type(model), tmp_path / "plain")
    dcnet.decouple_(model, "tanh", "sigmoid:k=learned")
    x = torch.rand(2, 3, 32, 32)
    model.train()
    model(x)
    with torch.no_grad():
        model.resnet.embedder.embedder.convolution.raw_k.fill_(0.4)
    model.eval().save_pretrained(tmp_path / "converted")
    again = dcnet.from_pretrained(type(model), tmp_path / "converted")
    assert type(again) is type(model)
    assert dcnet.conversion_of(again) == dcnet.conversion_of(model)
    assert not again.training
    torch.testing.assert_close(again(x).logits, model(x).logits)
    with pytest.raises(TypeError, match="must be the class of a model"):
        dcnet.from_pretrained("resnet", tmp_path / "converted")


@pytest.mark.parametrize(
    "example", [torch.ones(2, 3, 6, 6), [torch.ones(2, 3, 6, 6)], {"image": torch.ones(2, 3, 6, 6)}]
)
def test_examples_are_a_tensor_or_arguments_or_named_ones(example):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, image):
            return self.norm(self.conv(image)) if image.sum() > 0 else image  # torch.fx cannot follow that

    model = Net()
    report = dcnet.decouple_(model, "linear", example_input=example, fuse=False)
    assert report.rows[0].multiply_adds.before == 2 * 4 * 4 * 4 * 27
    assert dcnet.fuse_(model, example).fused == {"conv": ["norm"]}
    assert dcnet.couple_(model.eval(), example_input=example).folded == {"conv": "norm"}
