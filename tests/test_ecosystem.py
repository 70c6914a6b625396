"""Layers in the hands of other tools: torch.fx, torch.jit.trace, counters of operations.

timm, torchvision and fvcore too, where they are installed.
"""

import copy
import io

import pytest
import torch
from helpers import needs
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dcnet
from dcnet.layers import Block, Chain

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own


def network(magnitude="tanh", angular="linear", **options):
    """Every kind of geometry; `magnitude=None` for the plain twin."""
    torch.manual_seed(1)

    def conv(*arguments, **geometry):
        if magnitude is None:
            return nn.Conv2d(*arguments, bias=False, **geometry)
        return dcnet.DecoupledConv2d(*arguments, **geometry, magnitude=magnitude, angular=angular, **options)

    linear = (
        nn.Linear(64, 3, bias=False)
        if magnitude is None
        else dcnet.DecoupledLinear(64, 3, magnitude=magnitude, angular=angular, **options)
    )
    return nn.Sequential(
        conv(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        conv(8, 6, 3, groups=2, padding="same", padding_mode="reflect"),
        conv(6, 4, 3, dilation=2),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        linear,
    )


def images(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


# -- torch.fx
# -------------------------------------------------------------------------------------------------------------


def test_layers_are_leaves_of_fx():
    model = network().eval()
    graph = torch.fx.symbolic_trace(model)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == [str(i) for i in range(8)]
    torch.testing.assert_close(graph(images(2, 3, 20, 20)), model(images(2, 3, 20, 20)))
    assert graph.get_submodule("0") is not None
    with pytest.raises(TypeError, match=r"cannot trace one by itself; trace nn\.Sequential"):
        torch.fx.symbolic_trace(dcnet.DecoupledConv2d(3, 4, 3))


def test_blocks_and_our_networks_go_through_fx():
    block = Block(dcnet.DecoupledConv2d(3, 8, 3), nn.BatchNorm2d(8), "prelu")
    for model in (Chain(block, Block(dcnet.DecoupledConv2d(8, 8, 3))), dcnet.create_model("resnet18", input_size=32)):
        x = images(2, 3, 32, 32).sigmoid()
        model(x)
        model.eval()
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


def test_quantization_by_fx_leaves_decoupled_layers_in_floating_point():
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.manual_seed(0)
    model = nn.Sequential(dcnet.DecoupledConv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    x = images(4, 3, 12, 12)
    prepared = prepare_fx(model, get_default_qconfig_mapping("fbgemm"), (x,))
    prepared(x)
    quantized = convert_fx(prepared)
    assert isinstance(quantized.get_submodule("0"), dcnet.DecoupledConv2d)
    with torch.no_grad():
        expected = model(x)
        assert float((quantized(x) - expected).norm()) < 0.05 * float(expected.norm())


def test_torchvision_extracts_features():
    needs("torchvision")
    from torchvision.models import resnet18
    from torchvision.models.feature_extraction import create_feature_extractor

    model = resnet18().eval()
    assert len(dcnet.decouple_(model).converted) == 20
    found = create_feature_extractor(model, {"layer2": "middle", "layer1.0.conv1": "early"})(images(1, 3, 64, 64))
    assert found["middle"].shape == (1, 128, 8, 8)
    assert found["early"].shape == (1, 64, 16, 16)


def test_torchvision_has_subclasses_that_compute_the_same():
    needs("torchvision")
    from torchvision.models.video import r3d_18

    report = dcnet.decouple_(r3d_18())
    assert "layer1.0.conv1.0" in report.converted  # a Conv3DSimple
    assert all("nn.Linear" in reason for reason in report.skipped.values())


# -- torch.jit.trace
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("magnitude", "angular"),
    [("tanh", "linear"), ("seg", "sigmoid:k=learned"), ("linear", "cosine"), ("sphere", "relu_cosine")],
)
def test_traced_by_jit(recwarn, magnitude, angular):
    model = network(magnitude, angular)
    model(images(4, 3, 20, 20))
    model.eval()
    traced = torch.jit.trace(model, images(2, 3, 20, 20))  # twice, with and without gradients
    assert not [w for w in recwarn if issubclass(w.category, torch.jit.TracerWarning)]
    file = io.BytesIO()
    torch.jit.save(traced, file)  # no function of ours is in it
    file.seek(0)
    loaded = torch.jit.load(file)
    for x in (images(2, 3, 20, 20, seed=1), images(3, 3, 27, 31, seed=2)):  # other sizes too
        torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # BatchNorm's
def test_a_trace_can_be_trained():
    traced_one, other = network(), network()
    x, z = images(2, 3, 20, 20), images(3, 3, 24, 24, seed=1)
    traced = torch.jit.trace(traced_one, x, check_trace=False)
    other(x)  # tracing is a forward pass
    for net in (traced, other):
        net(z).sin().sum().backward()
    torch.testing.assert_close(traced_one[0].running_norm, other[0].running_norm)
    assert traced_one[0].num_batches_tracked == other[0].num_batches_tracked == 2
    for (name, p), q in zip(traced_one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda text, name=name: f"{name}: {text}")


# -- counting
# -------------------------------------------------------------------------------------------------------------


def flops(model, x, training=False):
    with FlopCounterMode(display=False) as counter:
        y = model(x)
        if training:
            y.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("training", [False, True])
def test_pytorch_counts_the_convolutions(training):
    """Its counter leaves out what is not a product of matrices: BatchNorm in a plain network, epilogues in ours."""
    plain, x = flops(network(None), images(2, 3, 20, 20), training), images(2, 3, 20, 20)
    assert plain > 0
    for magnitude in ("ball", "seg", "log"):
        assert flops(network(magnitude), x, training) == plain
    # the points of a tanh on the CPU are a small product of matrices
    assert plain <= flops(network("tanh"), x, training) < 1.2 * plain


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, inside Triton's interpreter
def test_pytorch_counts_the_operators_of_compiled_graphs(monkeypatch):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = images(1, 4, 6, 6).to(device).requires_grad_()
    plain = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, bias=False),
        nn.Conv2d(8, 4, 3, stride=2, bias=False),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    expected = flops(plain.to(device), x, training=True), flops(plain.eval(), x)
    model = nn.Sequential(
        dcnet.DecoupledConv2d(4, 8, 3, padding=1, impl="fused"),
        dcnet.DecoupledConv2d(8, 4, 3, stride=2, magnitude="ball", impl="fused"),
        nn.Flatten(),
        dcnet.DecoupledLinear(16, 3, impl="fused"),
    ).to(device)
    model(x)  # a counter knows the operators there are when it is made
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as a graph does, call the registered operators
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert "dcnet.decoupled_forward" in str(counter.get_flop_counts())
    assert "dcnet.decoupled_backward" in str(counter.get_flop_counts())
    assert counter.get_total_flops() == expected[0]
    with torch.no_grad():
        assert flops(model.eval(), x) == expected[1]


def test_fvcore_counts_the_epilogue_too():
    fvcore = needs("fvcore.nn")
    x = images(2, 3, 20, 20)
    plain = fvcore.FlopCountAnalysis(network(None).eval(), x).total()
    operators = [(name, "cosine") for name in dcnet.magnitudes()] + [
        ("ball", name) for name in (*dcnet.angulars(), "sigmoid:k=learned")
    ]
    for magnitude, angular in operators:
        counter = fvcore.FlopCountAnalysis(network(magnitude, angular).eval(), x).unsupported_ops_warnings(False)
        assert counter.total() == plain
        counter.set_op_handle(**dcnet.fvcore_handles())
        outputs = 2 * (8 * 10 * 10 + 6 * 10 * 10 + 4 * 6 * 6 + 3)
        extra = counter.total() - plain
        assert not counter.unsupported_ops()
        if (magnitude, angular) != ("linear", "cosine"):  # which is a convolution with normalized kernels
            assert outputs < extra < 40 * outputs, (magnitude, angular)


# -- packages that merge kernels, or build networks of layers of their own
# ---------------------------------------------------


def test_timm_does_not_reparameterize_converted_blocks():
    timm = needs("timm")
    from timm.utils import reparameterize_model

    model = timm.create_model("repvgg_a0", num_classes=5).eval()
    report = dcnet.decouple_(model)
    assert any("would merge decoupled kernels wrongly" in note for note in report.notes)
    with pytest.raises(RuntimeError, match="merges kernels as if layers were linear in them"):
        reparameterize_model(model)


def test_timm_layers_with_arithmetic_of_their_own():
    layers = needs("timm.layers")
    kinds = ("StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame", "Conv2dSame")
    model = nn.Sequential(*[getattr(layers, kind)(4, 4, 3, stride=2) for kind in kinds]).double()
    x = images(2, 4, 70, 71).double()
    before = model(x)
    assert dcnet.decouple_(model, "linear", "cosine", weighting="linear").converted == list("01234")
    torch.testing.assert_close(model(x), before)


def test_peft_adapters_stay_beside_the_layer_and_are_not_merged():
    peft = needs("peft")
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0", "2"], r=2, init_lora_weights=False))
    x = images(2, 3, 8, 8)
    before = model(x)
    report = dcnet.decouple_(copy.deepcopy(model), "linear", "cosine", weighting="linear")
    assert [name.rpartition(".")[2] for name in report.converted] == ["base_layer", "base_layer"]
    assert all("a factor of an adapter" in reason for reason in report.skipped.values())
    same = copy.deepcopy(model)
    dcnet.decouple_(same, "linear", "cosine", weighting="linear")
    torch.testing.assert_close(same(x), before)
    dcnet.decouple_(model, "tanh")
    assert model(x).isfinite().all()
    with pytest.raises(RuntimeError, match="merges kernels as if layers were linear in them"):
        model.merge_adapter()


def test_tensorboard_draws_the_graph(tmp_path):
    needs("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_graph(network().eval(), images(2, 3, 20, 20))
    assert any(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore")  # both exporters', of themselves
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize(("magnitude", "angular"), [("tanh", "linear"), ("seg", "sigmoid:k=learned")])
def test_exported_to_onnx(tmp_path, dynamo, magnitude, angular):
    """The old exporter divides pooled sums whatever it is told; the layers do not pool there."""
    runtime = needs("onnxruntime")
    needs("onnxscript")
    model = network(magnitude, angular)
    model[5] = nn.AdaptiveAvgPool2d(1)  # the old exporter has no other behind a layer with groups
    model[7] = nn.Identity()
    x = images(2, 3, 20, 20)
    model(x)
    model.eval()
    torch.onnx.export(model, (x,), str(tmp_path / "model.onnx"), dynamo=dynamo, opset_version=18, verbose=False)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), rtol=1e-4, atol=1e-5)
