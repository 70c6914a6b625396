"""What is found inside a network: compared with numbers worked out another way."""

import json

import pytest
import torch
from torch import nn

import dcnet
from dcnet.data import load_data
from dcnet.inspection import adversarial_examples, filters_of, inspect_run, layer_statistics
from dcnet.inspection.examples import decoded, encoded
from dcnet.inspection.layers import BINS, FARTHEST
from dcnet.layers import Block
from dcnet.layers.own_arithmetic import DecoupledStdConv2d


def model_of(*layers):
    return nn.Sequential(*layers).eval()


def test_layers_that_prepare_input_and_kernels_are_seen_as_they_compute():
    """SAME padding and standardized kernels, as in converted networks of timm."""
    torch.manual_seed(0)
    layer, x = DecoupledStdConv2d(3, 4, 5, stride=2), torch.rand(2, 3, 4, 4)
    layer.same_pad = True
    (found,) = layer_statistics(model_of(layer).requires_grad_(False), x)
    plain = dcnet.DecoupledConv2d(3, 4, 5, stride=2)
    rows = layer.weight.flatten(1)
    rows = (rows - rows.mean(1, keepdim=True)) / (rows.var(1, correction=0, keepdim=True) + 1e-6).sqrt()
    plain.load_state_dict({"weight": rows.view_as(layer.weight)})
    (expected,) = layer_statistics(model_of(plain), nn.functional.pad(x, (1, 2, 1, 2)))
    for name in ("mean_norm", "theta_mean", "theta_deviation"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)


@pytest.mark.parametrize("kind", ["conv", "grouped", "linear", "plain"])
def test_angles_and_norms_are_those_of_unfolded_patches(kind):
    torch.manual_seed(0)
    x = torch.rand(3, 4, 7, 7) if kind != "linear" else torch.rand(50, 9)
    if kind == "linear":
        layer = dcnet.DecoupledLinear(9, 5, magnitude="tanh")
    elif kind == "plain":
        layer = nn.Conv2d(4, 6, 3, padding=1, bias=False)
    else:
        layer = dcnet.DecoupledConv2d(4, 6, 3, stride=2, padding=1, groups=2 if kind == "grouped" else 1)
    model = model_of(Block(layer, activation=None) if kind == "plain" else layer).requires_grad_(False)
    (found,) = layer_statistics(model, x)
    if kind == "linear":
        patches, kernels = [x], [layer.weight]
    else:
        groups = layer.groups
        unfolded = (
            nn.functional.unfold(x, 3, padding=1, stride=layer.stride).transpose(1, 2).reshape(-1, groups, 36 // groups)
        )
        patches, kernels = list(unfolded.unbind(1)), list(layer.weight.flatten(1).chunk(groups))
    norms = torch.stack([(patch.square().sum(1) + 1e-4).sqrt() for patch in patches])
    sizes = [(w.square().sum(1) + 1e-4).sqrt() for w in kernels]
    theta = torch.cat(
        [
            (p @ w.T / (n[:, None] * s)).clamp(-1, 1).acos().flatten()
            for p, w, n, s in zip(patches, kernels, norms, sizes, strict=True)
        ]
    )
    assert found["mean_norm"] == pytest.approx(float(norms.mean()), rel=1e-4)
    assert found["theta_mean"] == pytest.approx(float(theta.mean()), rel=1e-4)
    expected = torch.histc(theta, BINS, 0, torch.pi)
    assert (torch.tensor(found["theta"]) - expected).abs().sum() <= 0.01 * len(
        theta
    )  # some lie on the border of two bins
    assert sum(found["theta"]) == len(theta)
    assert sum(found["norm"]) == norms.numel()
    if kind in ("conv", "grouped"):
        assert found["radius"][2] == pytest.approx(
            (1 + 1e-4) / float(norms.mean()), rel=1e-3
        )  # ρ = 1 + 1e-4, E still 1


def test_far_norms_are_in_the_last_bin():
    x = torch.cat([torch.full((9, 4), 0.01), torch.ones(1, 4)])
    (found,) = layer_statistics(model_of(dcnet.DecoupledLinear(4, 2)), x)
    assert found["norm"][-1] == 1
    assert float(x.norm(dim=1).max()) > FARTHEST * found["mean_norm"]


def test_the_network_is_left_as_it_was():
    model = dcnet.create_model("cnn9_narrow", in_channels=1, input_size=8).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [layer["name"] for layer in layer_statistics(model, torch.rand(4, 1, 8, 8))]
    assert len(names) == 10
    assert names[0] == filters_of(model)["name"] == "stages.0.conv"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_nothing_to_inspect():
    with pytest.raises(ValueError, match="neither decoupled layers nor blocks"):
        layer_statistics(nn.Sequential(nn.Linear(3, 2)), torch.rand(1, 3))
    with pytest.raises(ValueError, match="no two-dimensional convolution"):
        filters_of(model_of(dcnet.DecoupledLinear(4, 2)))


def test_examples():
    torch.manual_seed(0)
    images, labels = torch.rand(40, 3, 4, 4), torch.arange(40) % 5
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 5)).eval()
    right = int((model(images).argmax(1) == labels).sum())
    found = adversarial_examples(model, images, labels, 0.5, count=3)
    assert len(found) == min(3, right) > 0
    for example in found:
        image, changed = (decoded(example[key], 3, 4) for key in ("image", "adversarial"))
        assert example["before"]["class"] == example["label"] != example["after"]["class"]  # ε is large
        assert 0 < float((changed - image).abs().max()) <= 0.5 + 1e-3
    assert torch.allclose(decoded(encoded(images[0]), 3, 4), images[0], atol=1e-3)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    recipe = dcnet.make_recipe("demo", steps=3, model="cnn6_2d", magnitude="tanh", angular="sigmoid:k=learned")
    return dcnet.train(recipe, tmp_path_factory.mktemp("runs") / "one", quiet=True)


def test_inspect_run(run):
    found = inspect_run(run)
    assert found["step"] == 3
    assert len(found["filters"]["values"]) == 32
    assert len(found["features"]["points"]) == len(load_data("digits").test.labels)
    file = run.folder / "inspection.json"
    assert json.loads(file.read_text()) == found
    file.write_text(json.dumps({**found, "images": -1}))
    assert inspect_run(run)["images"] == -1  # read, not made again
    for other in ({**found, "step": 2}, {**found, "checkpoint": "another"}, []):
        file.write_text(json.dumps(other))
        assert inspect_run(run) == found
    file.write_text('{"cut')
    assert inspect_run(run) == found


def test_what_was_learned_is_in_the_metrics(run):
    learned = run.metrics[-1]["learned"]
    assert set(learned) == {"radius", "k"}
    assert len(learned["radius"]) == 8
    layer = run.model.requires_grad_(False).stages[0].conv
    assert learned["radius"]["stages.0.conv"] == pytest.approx(
        layer.effective_radius.quantile(torch.linspace(0, 1, 5)).tolist(), rel=1e-4
    )
    assert learned["k"]["stages.0.conv"][0] == pytest.approx(float(layer.learned_parameters["k"].min()), rel=1e-4)


def test_missing(run, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "recipe.json").write_text((run.folder / "recipe.json").read_text())
    with pytest.raises(FileNotFoundError, match=r"no checkpoint\.safetensors"):
        inspect_run(dcnet.training.Run(folder))
    found = inspect_run(run)
    (folder / "inspection.json").write_text((run.folder / "inspection.json").read_text())
    assert inspect_run(dcnet.training.Run(folder)) == found
    (folder / "inspection.json").write_text(json.dumps({**found, "version": 0}))
    with pytest.raises(ValueError, match=r"inspection\.json is of another version"):
        inspect_run(dcnet.training.Run(folder))
