"""Networks of timm, torchvision and segmentation_models_pytorch.

Identity conversion changes no output and no gradient; training steps are finite. All take minutes: `make slow`. What is
not installed is skipped, and says so.
"""

import copy

import pytest
import torch
from torch import nn

import dcnet
from dcnet.util.compat import BatchNorm

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TIMM = [
    *(
        "resnet18",
        "resnet14t",
        "resnext26ts",
        "seresnext26ts",
        "skresnet18",
        "resnest14d",
        "res2net50_14w_8s",
        "dpn48b",
    ),
    *(
        "efficientnet_b0",
        "tf_efficientnet_b0",
        "efficientnetv2_rw_t",
        "mobilenetv2_050",
        "mobilenetv3_small_050",
        "mixnet_s",
    ),
    *(
        "tinynet_e",
        "lcnet_035",
        "ghostnet_050",
        "mnasnet_small",
        "hardcorenas_a",
        "rexnet_100",
        "regnety_002",
        "regnetx_002",
    ),
    *(
        "convnext_atto",
        "convnextv2_atto",
        "repvgg_a0",
        "mobileone_s0",
        "nf_resnet26",
        "resnetv2_50",
        "dla46_c",
        "hgnetv2_b0",
    ),
    *("ese_vovnet19b_slim_dw", "cs3darknet_s", "selecsls42", "edgenext_xx_small", "poolformer_s12", "fastvit_t8"),
]
TORCHVISION = [
    *(
        "resnet18",
        "mobilenet_v3_small",
        "squeezenet1_1",
        "shufflenet_v2_x0_5",
        "regnet_y_400mf",
        "efficientnet_b0",
        "mnasnet0_5",
    ),
    *("convnext_tiny", "densenet121", "mobilenet_v2"),
]
SMP = ["Unet", "UnetPlusPlus", "FPN", "PSPNet", "DeepLabV3Plus", "Linknet"]
NAMES = (
    [f"timm:{name}" for name in TIMM]
    + [f"torchvision:{name}" for name in TORCHVISION]
    + [f"smp:{name}" for name in SMP]
)


def build(name):
    """The network, with weights drawn from a seed, and images for it."""
    source, _, kind = name.partition(":")
    torch.manual_seed(0)
    size = 64
    if source == "timm":
        model = pytest.importorskip("timm").create_model(kind, num_classes=7)
    elif source == "torchvision":
        model = getattr(pytest.importorskip("torchvision").models, kind)(num_classes=7)
    else:
        smp = pytest.importorskip("segmentation_models_pytorch")
        model = getattr(smp, kind)("resnet18", encoder_weights=None, classes=3)
    return model, torch.randn(2, 3, size, size)


def outcome(model, x):
    """Output and gradients; the same seed for what is random in training."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = model(x)
    names, parameters = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad], strict=True)
    found = torch.autograd.grad(y.sin().sum(), [x, *parameters], allow_unused=True)
    return {"output": y.detach(), "input": found[0]} | dict(zip(names, found[1:], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_identity_conversion_changes_nothing(name):
    model, x = build(name)
    twin = copy.deepcopy(model)
    keys = list(model.state_dict())
    report = dcnet.decouple_(twin, "linear", "cosine", weighting="linear", where="all")
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    assert len(report.converted) == sum(isinstance(module, kinds) for module in model.modules())
    assert list(twin.state_dict()) == keys
    for mode in (True, False):
        expected, found = (outcome(net.train(mode), x) for net in (model, twin))
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            if value is not None:
                torch.testing.assert_close(
                    found[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
                )
    # and back: the same once more, with BatchNorm folded where that is safe
    before = twin.eval()(x).detach()
    coupled = dcnet.couple_(twin)
    assert set(coupled.left.values()) <= {"it pads its input by the size of that, which nn.Conv2d does not"}
    assert not coupled.left or name.startswith("timm:tf_")
    torch.testing.assert_close(twin(x).detach(), before, rtol=1e-3, atol=1e-4)
    norms = [key for key, module in twin.named_modules() if isinstance(module, BatchNorm)]
    assert len(norms) + len(coupled.folded) == sum(isinstance(module, BatchNorm) for module in model.modules())
    if name in ("timm:resnet18", "timm:mobilenetv3_small_050", "timm:regnety_002"):
        assert not norms
    # one that stays has a note, or stands behind a layer that was left
    noted = " ".join(coupled.notes)
    assert len([key for key in norms if key not in noted]) <= len(coupled.left)


@pytest.mark.parametrize(
    "name",
    ["timm:resnet14t", "timm:tf_efficientnet_b0", "timm:nf_resnet26", "torchvision:mobilenet_v3_small", "smp:Unet"],
)
def test_a_training_step_is_finite_with_every_magnitude(name):
    for magnitude in dcnet.magnitudes():
        model, x = build(name)
        dcnet.decouple_(model, magnitude)
        optimizer = torch.optim.SGD(dcnet.parameter_groups(model, weight_decay=1e-4), lr=0.01, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            assert bool(torch.isfinite(loss)), magnitude
            for key, parameter in model.named_parameters():
                assert parameter.grad is None or bool(torch.isfinite(parameter.grad).all()), (magnitude, key)
            optimizer.step()


@pytest.mark.parametrize(
    "name",
    [
        "timm:regnety_002",
        "timm:mobilenetv3_small_050",
        "timm:resnest14d",
        "timm:hgnet_tiny",
        "torchvision:efficientnet_b0",
    ],
)
def test_gates_are_known(name):
    """What reads 1×1 maps and is no head is left alone."""
    model, x = build(name)
    report = dcnet.decouple_(copy.deepcopy(model))
    pooled = []
    names = {module: name for name, module in model.named_modules()}
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda m, inputs, _: pooled.append(names[m]) if inputs[0].shape[-1] == 1 else None
            )
    model.eval()(torch.cat([x, x], 2).repeat(1, 1, 2, 4))
    gates = {key for key, reason in report.skipped.items() if "a gate on pooled maps" in reason}
    assert gates
    assert {key for key in pooled if "head" not in key and "classifier" not in key} - gates == set()
    assert gates - set(pooled) == set()


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("timm:resnet18", ("tanh", "cosine")),
        ("timm:resnet18", ("seg", "square_cosine")),
        ("timm:tf_efficientnet_b0", ("tanh", "cosine")),
        ("timm:regnety_002", ("tanh", "cosine")),
        ("smp:Unet", ("tanh", "cosine")),
    ],
)
def test_converted_networks_go_to_onnx(name, operator, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, x = build(name)
    report = dcnet.decouple_(model, *operator, example_input=x)
    with torch.no_grad():
        model.train()(x)
    exported = dcnet.export(model.eval(), tmp_path / "model.onnx", example_input=x)
    assert exported.checked
    if name == "timm:resnet18":
        assert exported.dynamic == ("batch", "size")
        plain = dcnet.export(build(name)[0].eval(), tmp_path / "plain.onnx", example_input=x)
        own = plain.nodes - len(report.converted)  # activations, additions, the classifier: a convolution is one node
        assert exported.nodes - own <= {"tanh": 9, "seg": 11}[operator[0]] * len(report.converted)
