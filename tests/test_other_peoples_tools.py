"""What docs/other-tools.md says of tools that merge kernels, make optimizers, quantize and export is true.

That includes what does not work.
"""

import copy

import pytest
import torch
from helpers import needs
from torch import nn

import dcnet

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of other people's packages, about themselves
]


def images():
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def with_norm(**options):
    """A convolution and a BatchNorm that has seen a batch, in evaluation mode."""
    model = nn.Sequential(dcnet.DecoupledConv2d(3, 6, 3, **options), nn.BatchNorm2d(6))
    model(images())
    return model.eval()


def off(found, expected):
    return float(((found - expected).norm() / expected.norm()).detach())


# -- tools that merge kernels ------------------------------------------------------------------------------------------


def test_batchnorm_folded_into_kernels():
    """Wrong without a word, as the page says, unless the layer is linear in its kernels."""
    for options, linear in (({"magnitude": "tanh"}, False), ({"magnitude": "linear", "weighting": "linear"}, True)):
        model = with_norm(**options)
        folded = nn.utils.fusion.fuse_conv_bn_eval(model[0], model[1])
        assert (off(folded(images()), model(images())) < 1e-6) == linear


def test_modules_fused_for_quantization_are_refused():
    from torch.ao.quantization import fuse_modules

    with pytest.raises(AssertionError, match="did not find fuser method"):
        fuse_modules(with_norm(), [["0", "1"]])


def test_fusion_by_fx_leaves_decoupled_layers_alone():
    from torch.fx.experimental.optimization import fuse

    model = with_norm()
    assert torch.equal(fuse(model)(images()), model(images()))


def test_peft_beside_a_layer_and_merged():
    peft = needs("peft")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = dcnet.DecoupledConv2d(3, 6, 3), dcnet.DecoupledLinear(216, 5)

        def forward(self, x):
            return self.fc(self.conv(x).flatten(1))

    plain = Model().eval()
    x, before = images(), plain(images()).detach()
    config = peft.LoraConfig(target_modules=["fc"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(plain, config).eval()
    lora = model.base_model.model.fc
    features = model.base_model.model.conv(x).flatten(1)
    beside = lora.lora_B["default"](lora.lora_A["default"](features)) * lora.scaling["default"]
    torch.testing.assert_close(model(x), before + beside)
    right = model(x).detach()
    model.merge_adapter()
    assert off(model(x), right) > 0.01  # the page: do not merge
    model.unmerge_adapter()
    torch.testing.assert_close(model(x), right)


# -- optimizers --------------------------------------------------------------------------------------------------------


def decays(optimizer, model):
    """The weight decay of every parameter by name."""
    of = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    return {name: of[p] for name, p in model.named_parameters()}


def small():
    return nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3, angular="sigmoid:k=learned"), nn.Flatten(), nn.Linear(144, 5))


def test_what_trainer_decays(tmp_path):
    transformers = needs("transformers")
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], weight_decay=0.1)
    model = small()
    found = decays(transformers.Trainer(model, arguments).create_optimizer(), model)
    assert found["0.raw_radius"] == found["0.raw_k"] == found["0.weight"] == 0.1  # the page's first row
    optimizer = torch.optim.AdamW(dcnet.parameter_groups(model, weight_decay=0.1))
    trainer = transformers.Trainer(model, arguments, optimizers=(optimizer, None))
    assert trainer.create_optimizer() is optimizer
    found = decays(trainer.optimizer, model)
    assert found["0.raw_radius"] == found["0.raw_k"] == found["0.weight"] == 0.0
    assert found["2.weight"] == 0.1


def test_what_timm_decays():
    needs("timm")
    from timm.optim import create_optimizer_v2

    model = small()
    found = decays(create_optimizer_v2(model, opt="adamw", weight_decay=0.1), model)
    assert found["0.weight"] == 0.1  # the page's second row
    assert found["0.raw_radius"] == found["0.raw_k"] == 0.0
    groups = dcnet.parameter_groups(model, weight_decay=0.1)
    assert decays(create_optimizer_v2(groups, opt="adamw"), model)["0.weight"] == 0.0


def test_lightning_trains_everything(tmp_path):
    lightning = needs("lightning")

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = small()

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(dcnet.parameter_groups(self, weight_decay=0.01), lr=1e-2)

    model, data = Classifier(), torch.utils.data.TensorDataset(images(), torch.arange(4))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", default_root_dir=str(tmp_path), **quiet)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())
    assert model.net[0].num_batches_tracked == 3


def test_accelerate_trains_everything():
    accelerate = needs("accelerate")
    model = small()
    optimizer = torch.optim.AdamW(dcnet.parameter_groups(model, weight_decay=0.01), lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(nn.functional.cross_entropy(model(images()), torch.arange(4)))
    optimizer.step()
    assert all(not torch.equal(before[name], p) for name, p in accelerator.unwrap_model(model).named_parameters())


# -- quantization and export -------------------------------------------------------------------------------------------


def test_torchao_with_and_without_the_layers():
    quantization = needs("torchao.quantization")
    config, x = quantization.Int8WeightOnlyConfig(), torch.randn(4, 64)
    model = nn.Sequential(dcnet.DecoupledLinear(64, 32), nn.Linear(32, 8)).eval()
    expected, other = model(x).detach(), copy.deepcopy(model)
    quantization.quantize_(model, config, filter_fn=lambda module, name: type(module) is nn.Linear)
    assert 0.0 < off(model(x), expected) < 0.02
    quantization.quantize_(other, config)  # every nn.Linear, as it does by itself
    with pytest.raises(NotImplementedError):
        other(x)


@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx_in_training_mode_says_why(tmp_path, dynamo):
    needs("onnxscript")
    model = with_norm().train()
    options = {"training": torch.onnx.TrainingMode.TRAINING, "opset_version": 18, "verbose": False}
    # the new one tries another way after our error, and then stops at the operator that moves the average
    says = r"dcnet\.track_norm" if dynamo else r"ONNX has no operator that moves E\{‖x‖\}.*call model\.eval\(\) first"
    with pytest.raises(Exception, match=says):
        torch.onnx.export(model, (images(),), str(tmp_path / "x.onnx"), dynamo=dynamo, **options)
    assert not (tmp_path / "x.onnx").exists()


def test_ptflops_counts_the_plain_network():
    ptflops = needs("ptflops")

    def counted(model):
        macs, _ = ptflops.get_model_complexity_info(
            model, (3, 16, 16), backend="aten", as_strings=False, print_per_layer_stat=False
        )
        return macs

    plain = counted(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False)))
    assert plain > 0
    assert plain <= counted(nn.Sequential(dcnet.DecoupledConv2d(3, 16, 3, padding=1, magnitude="seg"))) < 1.5 * plain
