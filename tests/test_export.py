"""Models for inference and export: the same numbers, few operations, checked files or none."""

import copy
import inspect
import json
from pathlib import Path

import pytest
import torch
from helpers import OPERATORS, needs
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import dcnet
from dcnet.cli import app
from dcnet.deploy import check, onnx_format, prepare
from dcnet.deploy.inference import Inference
from dcnet.formulas.catalogue import CATALOGUES
from dcnet.fusing.wrappers import unwrap
from dcnet.layers import Block, Chain, Decoupled
from dcnet.layers.own_arithmetic import DecoupledConv2dSame
from dcnet.layers.recording import operations

GEOMETRIES = [
    (lambda **o: dcnet.DecoupledConv2d(4, 6, 3, padding=1, bias=True, groups=2, **o), (2, 4, 7, 7)),
    (
        lambda **o: dcnet.DecoupledConv1d(4, 6, 3, padding="same", dilation=2, padding_mode="reflect", eps=0.0, **o),
        (2, 4, 9),
    ),
    (lambda **o: dcnet.DecoupledConv3d(4, 4, 2, stride=2, groups=4, **o), (2, 4, 4, 5, 6)),
    (lambda **o: dcnet.DecoupledConv2d(4, 6, 1, stride=2, padding=1, padding_mode="circular", **o), (2, 4, 7, 7)),
    (lambda **o: dcnet.DecoupledConv2d(4, 6, (2, 3), padding="same", padding_mode="replicate", **o), (4, 6, 5)),
    (lambda **o: dcnet.DecoupledConv2d(1, 6, 1, padding=1, eps=0.0, **o), (2, 1, 5, 5)),
    (lambda **o: dcnet.DecoupledLinear(5, 6, bias=True, **o), (2, 3, 5)),
]


def settled(layer, x):
    """The layer in evaluation, with radii and averages that differ."""
    with torch.no_grad():
        if layer.raw_radius is not None:
            layer.raw_radius.uniform_(0.5, 1.5)
        layer.train()(x)
    return layer.eval()


@pytest.mark.parametrize(("magnitude", "angular", "weighting"), OPERATORS)
def test_inference_computes_what_the_layer_does(magnitude, angular, weighting):
    first = OPERATORS.index((magnitude, angular, weighting))  # every geometry in turn, three for each operator
    for make, shape in (GEOMETRIES[(first + i) % len(GEOMETRIES)] for i in (0, 1, 3)):
        layer, x = make(magnitude=magnitude, angular=angular, weighting=weighting).double(), torch.randn(shape).double()
        settled(layer, x)
        if layer.operator.is_inner_product:
            with pytest.raises(ValueError, match="couple_ makes it one"):
                Inference(layer)
            continue
        norm = nn.BatchNorm2d(len(layer.weight)).double()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        with torch.no_grad():
            torch.testing.assert_close(Inference(layer)(x), layer(x), rtol=1e-9, atol=1e-9)
            if layer(x).dim() == 4:
                norm.weight.normal_()
                expected = norm.eval()(layer(x))
                torch.testing.assert_close(Inference(layer).fold_(norm)(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("radius", ["learned", 1.5])
@pytest.mark.parametrize("weighting", [None, "linear"])
@pytest.mark.parametrize("angular", ["cosine", "square_cosine"])
@pytest.mark.parametrize(
    "magnitude", ["ball:alpha=2", "seg:alpha=2,beta=0.5", "seg:alpha=0.5,beta=2", "linear:alpha=3"]
)
def test_epilogues_by_inverse_norms(magnitude, angular, weighting, radius):
    """h(n)/n as a function of 1/n, cut off from above or from below; dims, unbatched input, and patches of zeros."""
    radius = {} if magnitude.startswith("linear") else {"radius": radius}
    options = {"magnitude": magnitude, "angular": angular, "weighting": weighting, **radius}
    for make, shape in (
        (lambda: dcnet.DecoupledConv2d(4, 6, 3, padding=1, bias=True, **options), (4, 7, 7)),
        (lambda: dcnet.DecoupledConv1d(4, 6, 1, **options), (2, 4, 9)),
        (lambda: dcnet.DecoupledLinear(4, 6, **options), (5, 4)),
    ):
        x = 2.0 * torch.randn(shape).double()
        x[..., :3] = 0.0
        layer = settled(make().double(), x)
        if layer.operator.is_inner_product:
            return
        lean = Inference(layer)
        assert lean.inverse
        with torch.no_grad():
            torch.testing.assert_close(lean(x), layer(x), rtol=1e-9, atol=1e-9)
            half = Inference(layer.float()).half()(x.half())
        torch.testing.assert_close(half.float(), layer(x.float()).detach(), rtol=2e-2, atol=2e-2)
    # what has another form: no eps, groups, and weightings that bend
    for other in ({"eps": 0.0}, {"groups": 2}, {"weighting": "joint"}, {"weighting": "separate"}):
        if not (magnitude.startswith("linear") and angular == "cosine"):
            assert not Inference(dcnet.DecoupledConv2d(4, 6, 3, **options | other).eval()).inverse


@pytest.mark.parametrize("magnitude", ["sphere", "ball", "tanh", "log", "mix", "seg"])
def test_few_operations(magnitude):
    layer = settled(dcnet.DecoupledConv2d(4, 6, 3, magnitude=magnitude), torch.randn(2, 4, 7, 7))
    # besides: the convolution, squares, their sums over channels and windows, the root, and a shift by BatchNorm
    assert operations(Inference(layer).epilogue) <= {"ball": 2, "seg": 3}.get(magnitude, 6)
    same = dcnet.DecoupledConv2d(4, 6, 3, magnitude="tanh", radius=2.0).eval()
    assert not list(Inference(same).epilogue.buffers())  # one radius for all kernels is a number
    shared = dcnet.DecoupledConv2d(4, 6, 3, magnitude="seg", angular="square_cosine", radius=2.0).eval()
    assert operations(Inference(shared).epilogue) <= 6


def test_half_precision_keeps_norms_exact():
    layer = settled(dcnet.DecoupledConv2d(64, 6, 3), torch.randn(2, 64, 7, 7))
    x = 40 * torch.randn(2, 64, 9, 9)  # squares summed in float16 would be infinite
    half = Inference(layer).half()
    assert half.weight.dtype == torch.float16
    assert half.window.dtype == torch.float32
    found = half(x.half())
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), layer(x).detach(), rtol=1e-2, atol=1e-2)


def test_formulas_of_ones_own_are_recorded(catalogue):
    m = dcnet.m

    @dcnet.magnitude
    def soft(n, rho, alpha: dcnet.positive = 1.0):
        """α·n/(n + ρ)"""
        s = 1.0 / (n + rho)
        return alpha * n * s, alpha * rho * s * s, -alpha * n * s * s

    @dcnet.angular
    def cubic(c):
        """cos³θ"""
        return c * c * c, 3.0 * c * c

    assert m is not None
    layer = settled(
        dcnet.DecoupledConv2d(3, 4, 3, magnitude="soft:alpha=2", angular="cubic"), x := torch.randn(2, 3, 6, 6)
    )
    with torch.no_grad():
        torch.testing.assert_close(Inference(layer)(x), layer(x))


def test_formulas_of_ones_own_are_in_the_weights_and_not_executed_unasked(tmp_path, catalogue):
    source = tmp_path / "mine.py"
    source.write_text(
        "import dcnet\n\n\n@dcnet.magnitude\ndef softened(n, rho, alpha: dcnet.positive = 1.0):\n"
        '    """α·n/(n + ρ)"""\n    s = 1.0 / (n + rho)\n'
        "    return alpha * n * s, alpha * rho * s * s, -alpha * n * s * s\n"
    )
    exec(compile(source.read_text(), str(source), "exec"), {"__name__": "mine"})

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()

    x = torch.randn(2, 3, 8, 8)
    model = build()
    dcnet.decouple_(model, "softened:alpha=2", where="2")
    expected, file = model(x), tmp_path / "model.safetensors"
    dcnet.export(model, file)
    assert torch.equal(dcnet.load_weights_(build(), file)(x), expected)
    with pytest.raises(ValueError, match=r"build that model, then dcnet.load_weights_\(model, path\)"):
        dcnet.load(file)
    CATALOGUES["magnitude"].pop("softened")
    source.unlink()
    plain = build()
    message = (
        r"model.safetensors was exported with the magnitude function 'softened', which is not known here. "
        r"Give the file that defines it: --formulas FILE, or import it in Python. .*trust_formulas=True"
    )
    with pytest.raises(ValueError, match=message):
        dcnet.load_weights_(plain, file)
    assert "softened" not in dcnet.magnitudes()
    assert type(plain[2]) is nn.Conv2d
    again = dcnet.load_weights_(plain, file, trust_formulas=True)
    assert torch.equal(again(x), expected)
    # its source can still be read: by Triton, and to be written into the next file
    assert "s = 1.0 / (n + rho)" in inspect.getsource(dcnet.magnitudes()["softened"].function)
    dcnet.export(again, tmp_path / "again.safetensors")
    with safe_open(file, "pt") as one, safe_open(tmp_path / "again.safetensors", "pt") as other:
        metadata = one.metadata()
        assert metadata["formulas"] == other.metadata()["formulas"]
    # a copy that was changed is not executed
    tensors = load_file(file)
    CATALOGUES["magnitude"].pop("softened")
    save_file(tensors, file, metadata | {"formulas": metadata["formulas"] + "raise SystemExit\n"})
    with pytest.raises(ValueError, match="was changed after training had written it"):
        dcnet.load_weights_(build(), file, trust_formulas=True)


class Custom(nn.Module):
    """BatchNorms behind layers in every way there is in other people's code."""

    def __init__(self, **operator):
        super().__init__()
        conv = lambda *a, **g: dcnet.DecoupledConv2d(*a, **g, **operator)  # noqa: E731
        self.conv1, self.bn1 = conv(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.block = Chain(
            Block(conv(8, 6, 3, groups=2, padding="same", padding_mode="reflect"), nn.BatchNorm2d(6), "prelu")
        )
        self.conv2, self.bn2 = conv(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.twice, self.bn3 = conv(6, 6, 1), nn.BatchNorm2d(6)
        self.last, self.bn4 = conv(6, 4, 3, dilation=2, bias=True), nn.BatchNorm2d(4)
        self.head = dcnet.DecoupledLinear(4, 3, **operator)

    def forward(self, x):
        x = self.block(self.bn1(self.conv1(x)).relu())
        y = self.conv2(x)
        x = self.bn2(y) + y  # the convolution's output is used twice
        x = self.bn3(self.twice(self.bn3(self.twice(x))))  # one pair, twice
        x = self.bn4(self.last(x)).relu()
        return self.head(x.mean((2, 3)))


def network(magnitude="tanh", angular="cosine", **options):
    torch.manual_seed(0)
    model, x = Custom(magnitude=magnitude, angular=angular, **options), torch.randn(2, 3, 20, 20)
    with torch.no_grad():
        for _ in range(2):
            model(x)
        for layer in model.modules():
            if isinstance(layer, Decoupled) and layer.raw_radius is not None:
                layer.raw_radius.uniform_(0.8, 1.2)
    return model.eval(), x


def test_a_copy_is_prepared_and_the_model_stays():
    model, x = network()
    state, expected = copy.deepcopy(model.state_dict()), model(x).detach()
    ready = prepare(model.train(), x)
    model.eval()
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
    torch.testing.assert_close(ready(x), expected)
    assert not ready.training
    assert not any(isinstance(module, Decoupled) for module in ready.modules())
    folded = [name for name in ("bn1", "bn2", "bn3", "bn4") if isinstance(getattr(ready, name), nn.Identity)]
    assert folded == ["bn1", "bn4"]
    assert isinstance(ready.block[0].norm, nn.Identity)
    assert isinstance(prepare(dcnet.DecoupledConv2d(3, 4, 3)), Inference)
    assert type(prepare(network("linear")[0]).conv1) is nn.Conv2d
    model.conv1.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="layer 'conv1' has forward hooks"):
        prepare(model)


def test_a_feature_that_the_model_gives_away_is_not_folded():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = dcnet.DecoupledConv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.conv(x)
            return {"before": y, "after": self.bn(y)}

    model, x = Features().eval(), torch.randn(2, 3, 4, 4)
    ready = prepare(model, x)
    assert isinstance(ready.bn, nn.BatchNorm2d)
    torch.testing.assert_close(ready(x), model(x))


def test_a_forward_of_its_own_is_exported(tmp_path):
    class Doubled(dcnet.DecoupledConv2d):
        def forward(self, x):
            return super().forward(x) * 2.0

    model, x = nn.Sequential(Doubled(3, 4, 3), nn.BatchNorm2d(4)).eval(), torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(prepare(model, x)(x), model(x))
    dcnet.export(model, tmp_path / "model.pt2", example_input=x)  # compares


@pytest.mark.parametrize("outputs", [5, 6])
def test_norms_of_tokens_are_not_folded(tmp_path, outputs):
    """Behind a linear layer over tokens BatchNorm1d normalizes tokens, of which there may be as many as features."""
    norm = nn.BatchNorm1d(5)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    model, x = nn.Sequential(dcnet.DecoupledLinear(12, outputs), norm).eval(), torch.randn(4, 5, 12)
    ready = prepare(model, x)
    assert isinstance(ready[1], nn.BatchNorm1d)
    torch.testing.assert_close(ready(x), model(x))


def test_kernels_that_other_code_reads_are_named(tmp_path):
    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = dcnet.DecoupledConv2d(3, 8, 3)

        def forward(self, x):
            return nn.functional.conv_transpose2d(self.enc(x), self.enc.weight)

    with pytest.raises(ValueError, match=r"other code reads the kernels of layer 'enc'.*take a parameter of its own"):
        dcnet.export(Autoencoder().eval(), tmp_path / "model.pt2", example_input=torch.randn(2, 3, 8, 8))
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_kernels_that_a_hook_computes(tmp_path):
    """They are a result of autograd, which cannot be copied, until the model has run without gradients."""
    model, x = (
        nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 4, 3)), dcnet.DecoupledConv2d(4, 4, 3)),
        torch.rand(2, 3, 8, 8),
    )
    model(x).sum().backward()
    dcnet.export(model, tmp_path / "model.pt2", example_input=x)
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(x), model.eval()(x))
    assert model.training is False
    model.train()(x).sum().backward()


def test_exported_program(tmp_path):
    model, x = network()
    report = dcnet.export(model, tmp_path / "sub" / "model.pt2", example_input=x)
    assert (report.to, report.dynamic, report.dtype) == ("torch-export", ("batch", "size"), "float32")
    assert [one.shapes for one in report.checked] == [
        ((2, 3, 20, 20),),
        ((1, 3, 20, 20),),
        ((3, 3, 20, 20),),
        ((2, 3, 40, 40),),
    ]
    assert all(one.error < 1e-5 for one in report.checked)
    program = torch.export.load(tmp_path / "sub" / "model.pt2").module()
    other = torch.randn(5, 3, 26, 22)
    torch.testing.assert_close(program(other), model(other).detach(), rtol=1e-4, atol=1e-5)
    assert "for any batch, any size" in str(report)
    assert "checked with PyTorch on 2×3×20×20: off by" in str(report)


def test_the_smallest_image_of_a_program(tmp_path):
    """With five strides of two, 32 pixels become one, and a program traced with more refuses that."""
    layers = [nn.Conv2d(3, 4, 3, stride=2, padding=1), *[nn.Conv2d(4, 4, 3, stride=2, padding=1) for _ in range(4)]]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)).eval()
    dcnet.decouple_(model)
    report = dcnet.export(model, tmp_path / "model.pt2", example_input=torch.randn(2, 3, 64, 64))
    assert report.smallest == 33
    assert "for any batch, any size from 33 pixels a side on" in str(report)
    report.smallest = 1  # a map of one pixel is the least there is
    assert "for any batch, any size\n" in str(report)
    program = torch.export.load(tmp_path / "model.pt2").module()
    x = torch.randn(2, 3, 33, 33)
    torch.testing.assert_close(program(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError, match="Guard failed"):
        program(x[..., :32, :32])


def test_a_model_in_half_precision_is_written_in_single(tmp_path):
    model = nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3), nn.BatchNorm2d(4)).eval().bfloat16()
    report = dcnet.export(
        model, tmp_path / "model.pt2", example_input=torch.randn(2, 3, 6, 6).bfloat16(), dynamic=False
    )
    assert report.dtype == "float32"
    x = torch.randn(2, 3, 6, 6)
    found = torch.export.load(tmp_path / "model.pt2").module()(x)
    torch.testing.assert_close(found, copy.deepcopy(model).float()(x).detach(), rtol=1e-4, atol=1e-5)
    assert model[0].weight.dtype == torch.bfloat16


def test_a_size_that_the_model_fixes_is_fixed_in_the_file(tmp_path):
    model = nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 64, 2)).eval()
    report = dcnet.export(model, tmp_path / "model.pt2", example_input=torch.randn(1, 3, 8, 8))
    assert report.dynamic == ("batch",)
    assert [one.shapes[0][0] for one in report.checked] == [1, 3]
    assert "for any batch, this size" in str(report)
    fixed = dcnet.export(model, tmp_path / "fixed.pt2", example_input=(torch.randn(1, 3, 8, 8),), dynamic=False)
    assert fixed.dynamic == ()


def test_maps_of_one_pixel_fix_the_size_of_a_program(tmp_path):
    """PyTorch keeps to maps of one pixel where the example has them; ONNX does not."""
    model = nn.Sequential(
        *(dcnet.DecoupledConv2d(n, 4, 3, stride=4, padding=1) for n in (3, 4)), nn.AdaptiveAvgPool2d(1)
    ).eval()
    small = dcnet.export(model, tmp_path / "small.pt2", example_input=torch.rand(2, 3, 8, 8))
    assert small.dynamic == ("batch",)
    assert "is for images of at most 16 pixels a side, as maps in the model have one pixel then" in str(small)
    large = dcnet.export(model, tmp_path / "large.pt2", example_input=torch.rand(2, 3, 32, 32))
    assert large.dynamic == ("batch", "size")
    assert not large.notes


class Star(nn.Module):
    """A model that takes any number of inputs, and another that has some of its own."""

    def __init__(self):
        super().__init__()
        self.conv = dcnet.DecoupledConv2d(3, 4, 3)

    def forward(self, *values):
        return sum(self.conv(value) for value in values)


class Starred(Star):
    def forward(self, first, *others, scale=2.0, **more):
        return scale * self.conv(first) + super().forward(*others)


@pytest.mark.parametrize(("kind", "count"), [(Star, 1), (Star, 2), (Starred, 1), (Starred, 3)])
def test_any_number_of_arguments(tmp_path, kind, count):
    model, x = kind().eval(), tuple(torch.randn(count, 2, 3, 8, 8))
    report = dcnet.export(model, tmp_path / "fixed.pt2", example_input=x, dynamic=False)
    assert report.dynamic == ()
    report = dcnet.export(model, tmp_path / "free.pt2", example_input=x)
    assert report.dynamic == ("batch", "size")
    other = tuple(torch.randn(count, 5, 3, 11, 9))
    found = torch.export.load(tmp_path / "free.pt2").module()(*other)
    torch.testing.assert_close(found, model(*other).detach(), rtol=1e-4, atol=1e-5)


@pytest.fixture
def alone(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "wrap",
    [torch.compile, nn.DataParallel, nn.parallel.DistributedDataParallel, lambda m: torch.compile(nn.DataParallel(m))],
)
def test_what_is_inside_a_wrapper_is_exported(tmp_path, wrap, alone):
    model, x = plain(), torch.randn(2, 3, 8, 8)
    dcnet.decouple_(model, "tanh")
    model(x)
    wrapped = wrap(model.eval())
    report = dcnet.export(wrapped, tmp_path / "model.pt2", example_input=x)
    assert report.dynamic == ("batch", "size")
    dcnet.export(wrapped, tmp_path / "model.safetensors")
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict())
    converted = plain()
    dcnet.decouple_(converted, "tanh")
    for again in (plain(), wrap(converted)):
        assert dcnet.load_weights_(again, tmp_path / "model.safetensors") is again
        torch.testing.assert_close(unwrap(again).eval()(x), model(x), rtol=0, atol=0)
    other = wrap(plain())
    if isinstance(other, nn.parallel.DistributedDataParallel):  # which would not know of the radii
        with pytest.raises(ValueError, match="load_weights_ cannot add parameters to a model wrapped already"):
            dcnet.load_weights_(other, tmp_path / "model.safetensors")
    else:
        dcnet.load_weights_(other, tmp_path / "model.safetensors")
        torch.testing.assert_close(unwrap(other).eval()(x), model(x), rtol=0, atol=0)
    torch.testing.assert_close(prepare(wrapped, x)(x), model(x).detach())


def test_layers_that_pad_by_size(tmp_path):
    for magnitude in ("ball", "linear"):
        layer = DecoupledConv2dSame(3, 4, 3, stride=2, magnitude=magnitude, weighting="linear")
        model, x = nn.Sequential(layer, nn.BatchNorm2d(4)).eval(), torch.randn(2, 3, 9, 9)
        report = dcnet.export(model, tmp_path / f"{magnitude}.pt2", example_input=x)
        assert report.dynamic == ("batch",)
        assert "pad by the size that their input has" in report.notes[0]
        found = torch.export.load(tmp_path / f"{magnitude}.pt2").module()(x)
        torch.testing.assert_close(found, model(x).detach(), rtol=1e-4, atol=1e-5)


def test_bad_input_writes_nothing(tmp_path, monkeypatch):
    model, x = network()
    path, file = tmp_path / "model.pt2", Path(__file__)
    for options, error, message in (
        (
            {"path": tmp_path / "model.bin"},
            ValueError,
            r"what to write is not said; give to=, or a path that ends in \.onnx, \.pt2",
        ),
        ({"to": "onx"}, ValueError, "to='onx' is unknown. Did you mean 'onnx'"),
        ({"path": tmp_path, "to": "onnx"}, ValueError, "is a folder"),
        ({"path": file / "model.pt2"}, ValueError, "cannot be written: .* is a file"),
        ({"opset": 9}, ValueError, "opset=9 is not possible; possible: 18 to 23"),
        ({"example_input": None}, ValueError, "needs example_input"),
        ({"example_input": {"x": x}}, TypeError, "must be a tensor or a tuple"),
        ({"example_input": "x"}, TypeError, "got str"),
        ({"example_input": x * float("nan")}, ValueError, "not finite"),
        ({"example_input": x[:0]}, ValueError, "has no values"),
        ({"example_input": x[:, :2]}, ValueError, "Custom cannot be called with it"),
        ({"to": "safetensors", "half": True}, ValueError, "call model.half"),
    ):
        with pytest.raises(error, match=message):
            dcnet.export(model, **{"path": path, "example_input": x, **options})
    with pytest.raises(TypeError, match="export takes a model, got str"):
        dcnet.export("model", path)
    with monkeypatch.context() as patch:
        patch.setattr(onnx_format, "find_spec", lambda name: None if name == "onnxscript" else object())
        with pytest.raises(ImportError, match=r"needs onnxscript: pip install 'dcnet\[onnx\]'"):
            dcnet.export(model, tmp_path / "model.onnx", example_input=x)
    # a file that is wrong does not appear
    monkeypatch.setattr(
        "dcnet.deploy.export_model.run_program", lambda data: lambda arguments: [1.01 * model(*arguments).detach()]
    )
    with pytest.raises(check.Mismatch, match=r"off by 1.00e-02 of the output's size"):
        dcnet.export(model, path, example_input=x, dynamic=False)
    assert list(tmp_path.iterdir()) == []


def plain(width=8):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4, 3))


def test_weights_come_back_into_a_plain_model(tmp_path):
    model, x = plain(), torch.randn(2, 3, 8, 8)
    dcnet.decouple_(model, "tanh", "sigmoid:k=learned", where="3")
    dcnet.decouple_(model, "seg:beta=0.25", where="0", weighting="linear")
    model(x)
    report = dcnet.export(model.eval(), tmp_path / "model.safetensors")
    assert report.bytes == (tmp_path / "model.safetensors").stat().st_size
    again = dcnet.load_weights_(plain(), tmp_path / "model.safetensors").eval()
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    assert dcnet.conversion_of(again) == dcnet.conversion_of(model)
    dcnet.load_weights_(again, tmp_path / "model.safetensors")  # converted already
    for other, message in (
        (plain(6), r"does not fit Sequential: 0.weight is \(8, 3, 3, 3\) there, \(6, 3, 3, 3\) here"),
        (nn.Sequential(nn.Conv2d(3, 8, 3)), r"'3' as recorded: there is none of that name"),
        (plain().append(nn.Linear(2, 2)), "it lacks 4.weight, 4.bias"),
    ):
        with pytest.raises(ValueError, match=message):
            dcnet.load_weights_(other, tmp_path / "model.safetensors")
        assert not any(isinstance(module, Decoupled) for module in other.modules())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.safetensors").write_bytes(b"not one")
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(1)}, tmp_path / "foreign.safetensors")
    save_file({"weight": torch.ones(1)}, tmp_path / "bad.safetensors", {"format": "dcnet converted 1", "about": "[]"})
    for name, message in (
        ("cut", "cannot be read"),
        ("text", "cannot be read"),
        ("foreign", "its format is None, expected 'dcnet converted 1'"),
        ("bad", "is damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            dcnet.load_weights_(plain(), tmp_path / f"{name}.safetensors")
    with pytest.raises(FileNotFoundError):
        dcnet.load_weights_(plain(), tmp_path / "nowhere.safetensors")


# -- ONNX, where it is installed ---------------------------------------------------------------------------------------


@pytest.fixture
def onnx():
    needs("onnxscript")
    needs("onnxruntime")
    return needs("onnx")


@pytest.mark.parametrize("half", [False, True])
def test_onnx(onnx, tmp_path, half):
    model, x = network("tanh", "cosine")
    report = dcnet.export(model, tmp_path / "model.onnx", example_input=x, half=half)
    assert (report.opset, report.dynamic) == (18, ("batch", "size"))
    assert [one.shapes[0] for one in report.checked] == [(2, 3, 20, 20), (1, 3, 20, 20), (3, 3, 20, 20), (2, 3, 40, 40)]
    made = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(made)
    assert made.opset_import[0].version == 18
    assert [given.name for given in made.graph.input] == ["input"]
    # six layers, one of them called twice; the network itself has three additions, three activations and two BatchNorms
    # that stay
    assert report.nodes == len(made.graph.node)
    if not half:
        assert report.nodes <= 12 * 7
    assert json.loads({p.key: p.value for p in made.metadata_props}["dcnet"])["layers"]["conv1"] == "tanh + cosine"
    assert str(tmp_path.parent).encode() not in (tmp_path / "model.onnx").read_bytes()
    assert b"test_export.py" not in (tmp_path / "model.onnx").read_bytes()  # nothing of the source it came from
    assert list(tmp_path.iterdir()) == [tmp_path / "model.onnx"]


@pytest.mark.parametrize(
    ("magnitude", "angular", "nodes"),
    [("tanh", "cosine", 9), ("ball", "cosine", 7), ("seg", "cosine", 8), ("seg", "square_cosine", 11)],
)
def test_onnx_nodes_of_one_layer(onnx, tmp_path, magnitude, angular, nodes):
    """With the shift of a BatchNorm; and the norms of a map that two layers take are computed once."""
    torch.manual_seed(0)
    one = nn.Sequential(dcnet.DecoupledConv2d(4, 6, 3, magnitude=magnitude, angular=angular), nn.BatchNorm2d(6))
    x = torch.randn(2, 4, 9, 9)
    settled(one[0], x)
    with torch.no_grad():
        one.train()(x)
    report = dcnet.export(one.eval(), tmp_path / "one.onnx", example_input=x)
    assert report.nodes == nodes
    kinds = [node.op_type for node in onnx.load(tmp_path / "one.onnx").graph.node]
    assert kinds.count("ReduceSumSquare") == 1

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = one, copy.deepcopy(one)

        def forward(self, x):
            return self.a(x) + self.b(2.0 * x).exp() + self.b(x)

    report = dcnet.export(Two().eval(), tmp_path / "two.onnx", example_input=x)
    kinds = [node.op_type for node in onnx.load(tmp_path / "two.onnx").graph.node]
    assert kinds.count("ReduceSumSquare") == 2
    assert max(one.error for one in report.checked) < 1e-6


def test_onnx_squares_that_others_take_too_stay(onnx, tmp_path):
    class Squares(nn.Module):
        def forward(self, x):
            squares = x * x
            return squares.sum(1), squares, (x * (x + 1.0)).sum(1)

    x = torch.randn(2, 3, 4)
    dcnet.export(Squares(), tmp_path / "model.onnx", example_input=x)
    kinds = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert (kinds.count("ReduceSum"), kinds.count("ReduceSumSquare")) == (2, 0)


def test_onnx_of_a_run_from_the_command_line(onnx, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = dcnet.make_recipe(steps=2, batch=64, magnitude="ball", model="cnn9_narrow")
    dcnet.train(recipe, tmp_path / "run", device="cpu", quiet=True)
    result = CliRunner().invoke(app, ["export", "run"])
    assert result.exit_code == 0, result.output
    assert "run/model.onnx: onnx," in result.output
    assert "checked with onnxruntime on 4×1×8×8" in result.output
    assert "noise" not in result.output
    assert (tmp_path / "run" / "model.onnx").is_file()


def test_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dcnet.train(dcnet.make_recipe(steps=2, batch=64, model="cnn9_narrow"), tmp_path / "run", device="cpu", quiet=True)

    def call(*arguments):
        return CliRunner().invoke(app, ["export", *arguments], env={"COLUMNS": "200"})

    assert call("run", "--to", "safetensors").exit_code == 0
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(dcnet.load("run/model.safetensors")(x), dcnet.load("run")(x))
    result = call("run/model.safetensors", "--to", "torch-export", "--fixed", "--out", "my file.pt2")
    assert result.exit_code == 0, result.output
    assert "for this batch and size only" in result.output
    assert "load it with: torch.export.load('my file.pt2')" in result.output
    for arguments, message in (
        (["run", "--to", "onx"], "Did you mean 'onnx'"),
        (["nowhere"], "is not a run folder"),
        (
            ["run/model.safetensors", "--to", "safetensors", "--out", "other.safetensors"],
            "holds weights as safetensors already",
        ),
        (["run", "--to", "safetensors", "--half"], "half precision is not for safetensors"),
    ):
        result = call(*arguments)
        assert result.exit_code == 1
        assert message in result.output
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    assert "cannot be read" in call("broken.safetensors").output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.safetensors", "my file.pt2", "run"]


@pytest.mark.slow
def test_many_operators_to_onnx(onnx, tmp_path):
    """A third of them side by side in one graph, with every magnitude, angle, weighting and geometry among them."""
    chosen = OPERATORS[::3]
    for i, everything in enumerate(zip(*OPERATORS, strict=True)):
        assert {operator[i] for operator in chosen} == set(everything)

    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList()
            for i, (magnitude, angular, weighting) in enumerate(chosen):
                groups, bias = (1, 2, 4)[i % 3], bool(i % 2)
                geometry = {"stride": 1 + i % 2, "dilation": 1 + i % 3 // 2, "groups": groups, "bias": bias}
                mode = ("zeros", "reflect", "replicate", "circular")[i % 4]
                operator = {"magnitude": magnitude, "angular": angular, "weighting": weighting}
                self.layers.append(
                    dcnet.DecoupledConv2d(4, 4, 1 + i % 3, padding=1, padding_mode=mode, **geometry, **operator)
                )

        def forward(self, x):
            return tuple(layer(x) for layer in self.layers)

    model, x = All(), torch.randn(2, 4, 9, 9)
    for layer in model.layers:
        settled(layer, x)
    report = dcnet.export(model, tmp_path / "all.onnx", example_input=x)
    assert all(one.error < 1e-5 for one in report.checked)


@pytest.mark.slow
def test_compiled_ahead_of_time(tmp_path):
    model = nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    report = dcnet.export(model, tmp_path / "model.pt2", to="aoti", example_input=x)
    assert report.checked[0].error < 1e-5
    found = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))(x)
    torch.testing.assert_close(found, model(x).detach(), rtol=1e-4, atol=1e-5)
