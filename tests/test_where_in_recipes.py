"""A recipe's `where`: which layers are decoupled, from scratch and in fine-tuning, and in what is loaded."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dcnet
from dcnet.cli import app
from dcnet.layers.decoupled import decoupled_layers
from dcnet.models.external import External
from dcnet.training import save_weights, train

QUICK = {"steps": 2, "batch": 64}


def names_of(model):
    return list(decoupled_layers(model))


def whole():
    return names_of(dcnet.create_model("cnn9_narrow", in_channels=1, input_size=8, norm="batch"))


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3)
        self.layer1 = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.layer2 = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


@pytest.fixture
def external(monkeypatch):
    """A network of another library, which has its names behind "net."."""

    def make(name, num_classes, in_channels, input_size, pretrained=False):
        return External(Net(num_classes), 1, nn.Identity())

    monkeypatch.setattr("dcnet.training.run.create_external", make)
    return "timm:a_net"


def test_from_scratch_and_in_what_is_loaded(tmp_path):
    recipe = dcnet.make_recipe("demo", magnitude="tanh", where=["not-first", "!penultimate"], **QUICK)
    run = train(recipe, tmp_path / "run", quiet=True, device="cpu")
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["where"] == list(recipe.where)
    assert names_of(run.model) == whole()[1:-1]
    assert names_of(dcnet.load(tmp_path / "run")) == whole()[1:-1]
    save_weights(run, tmp_path / "weights.safetensors")
    model, x = dcnet.load(tmp_path / "weights.safetensors"), torch.rand(2, 1, 8, 8)
    assert names_of(model) == whole()[1:-1]
    assert torch.equal(model(x), run.model(x))


def test_the_start_is_that_of_the_whole_network(tmp_path):
    """Kernels are the same, whether the network is made decoupled or converted."""
    options = {"magnitude": "tanh", "steps": 1, "lr": 1e-30, "batch": 64}
    runs = [
        train(dcnet.make_recipe("demo", where=where, **options), tmp_path / name, quiet=True, device="cpu")
        for name, where in (("whole", ()), ("all", "all"))
    ]
    one, other = (run.model.state_dict() for run in runs)
    assert list(one) == list(other)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name])


def test_names_of_other_libraries_are_their_own(external, tmp_path):
    recipe = dcnet.make_recipe("demo", model=external, norm="default", magnitude="tanh", where="layer[1-4]*", **QUICK)
    run = train(recipe, tmp_path / "run", quiet=True, device="cpu")
    assert names_of(run.model) == ["net.layer1.0", "net.layer2"]
    for where, converted in (
        (["!stem*", "spatial"], ["net.layer1.0"]),
        (["not-first"], ["net.layer1.0", "net.layer2"]),
        ((), ["net.stem", "net.layer1.0", "net.layer2"]),
    ):
        other = dcnet.training.change(recipe, where=where)
        run = train(other, tmp_path / "run", quiet=True, device="cpu", overwrite=True)
        assert names_of(run.model) == converted
    with pytest.raises(ValueError, match=r"where: 'layerr1\*' is no preset and matches no layer.*layers: 'stem', "):
        train(dcnet.training.change(recipe, where="layerr1*"), tmp_path / "none", device="cpu")
    with pytest.raises(
        ValueError, match=r"where=\['stem', 'not-first'\] leaves nothing to decouple of the 3 layers of "
    ):
        train(dcnet.training.change(recipe, where=["stem", "not-first"]), tmp_path / "none", device="cpu")
    assert not (tmp_path / "none").exists()


def test_finetune_by_the_command_line(tmp_path):
    def call(*arguments):
        wide = {"COLUMNS": "400"}  # for a long path in the table of runs
        return CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu"], env=wide)

    plain = tmp_path / "plain"
    assert call("train", "--recipe", "demo", "--magnitude", "none", "--steps", 3, "--run", plain).exit_code == 0
    last = whole()[-1]
    given = ("--magnitude", "seg", "--steps", 1, "--where", "not-first", "--where", f"!{last}")
    done = call("finetune", plain, *given, "--run", tmp_path / "tuned")
    assert done.exit_code == 0, done.output
    assert "where: not-first" in done.output
    run = dcnet.Run(tmp_path / "tuned")
    assert run.recipe.where == ("not-first", f"!{last}")
    assert names_of(run.model) == whole()[1:-1]
    # a converted run keeps what it has, and has it only in its own places
    again = call("finetune", tmp_path / "tuned", "--steps", 1, "--run", tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert names_of(dcnet.Run(tmp_path / "again").model) == whole()[1:-1]
    other = call("finetune", tmp_path / "tuned", "--steps", 1, "--where", "spatial", "--run", tmp_path / "other")
    assert other.exit_code == 1
    assert "is decoupled already: where=('not-first'" in other.output
    wrong = call("train", "--recipe", "demo", "--where", "spacial", "--run", tmp_path / "wrong")
    assert wrong.exit_code == 1
    assert "'spacial' is no preset and matches no layer. Did you mean 'spatial'" in wrong.output
    assert call("train", "--where", "none", "--steps", 1, "--run", tmp_path / "none").exit_code == 0
    assert dcnet.Run(tmp_path / "none").recipe.where == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"where": "spatial", "magnitude": None}, r"where=\('spatial',\) is for decoupled layers, but magnitude=None"),
        ({"where": [3]}, r"where=\(3,\) must be patterns of names, or presets"),
        ({"where": ["a", ""]}, r"where=\('a', ''\) must be patterns"),
        ({"where": "!"}, r"where=\('!',\) must be patterns"),
        ({"where": 3}, r"where=3 must be tuple"),
    ],
)
def test_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        dcnet.make_recipe("demo", **fields)
