"""`dcnet finetune`: from a trained network to a run that can be resumed, evaluated and attacked.

The network is ours, another library's, or the user's own.
"""

import dataclasses
import json
import sys

import pytest
import torch
from helpers import needs
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import dcnet
from dcnet.cli import app
from dcnet.layers.decoupled import decoupled_layers
from dcnet.models import create_external
from dcnet.models.external import External
from dcnet.training import save_weights, train

OWN = """
from torch import nn

calls = []

def network(num_classes, in_channels=1):
    calls.append((num_classes, in_channels))
    return nn.Sequential(nn.Conv2d(in_channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
                         nn.Flatten(), nn.Linear(32, num_classes))

def without_convolutions():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def too_few_classes():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 7))

def no_network(num_classes):
    return 7

def needs_a_width(width, num_classes):
    return nn.Linear(width, num_classes)

def by_position(num_classes, /):
    return nn.Linear(64, num_classes)

def fails():
    return helper({})

def helper(settings):
    return settings["backbone"]

def fails_elsewhere():
    import helpers_of_mine
    return helpers_of_mine.half()

class Misspelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)

    def forward(self, x):
        return self.convolution(x)

class FailsInTraining(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(*network(num_classes))

    def forward(self, x):
        if self.training:
            raise LookupError("two classes at least")
        return super().forward(x)
"""
BROKEN = {"a_name": "x = nope", "a_bracket": "x = (", "an_import": "import no_such_package"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A plain network, trained on the digits for a little while."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    recipe = dcnet.make_recipe("demo", magnitude=None, epochs=2, batch=64)
    return train(recipe, folder, quiet=True)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The module `networks_of_mine`, in the import path."""
    (tmp_path / "networks_of_mine.py").write_text(OWN)
    (tmp_path / "helpers_of_mine.py").write_text("def half():\n    return 1 / 0\n")
    for name, text in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "networks_of_mine", raising=False)
    monkeypatch.setattr("dcnet.models.external._trusted", set())
    yield tmp_path
    for name in ("networks_of_mine", "helpers_of_mine"):
        sys.modules.pop(name, None)


def accuracy(model):
    from dcnet.data import load_data

    data = load_data("digits")
    with torch.no_grad():
        right = model(data.test.images.float() / 255).argmax(1) == data.test.labels
    return 100.0 * float(right.float().mean())


# -- networks of ours --------------------------------------------------------------------------------------------------


def test_a_run_is_converted_and_keeps_its_accuracy(trained, tmp_path):
    recipe = dcnet.finetune_recipe(str(trained.folder), magnitude="seg", steps=1, lr=1e-9)
    assert (recipe.data, recipe.model, recipe.norm, recipe.pretrained) == (
        *("digits", "cnn9_narrow", "batch"),
        str(trained.folder),
    )
    run = train(recipe, tmp_path / "run", quiet=True)
    assert run.accuracy > trained.accuracy - 3.0
    twin = dcnet.create_model("cnn9_narrow", in_channels=1, input_size=8, magnitude="seg", norm="batch")
    assert list(run.model.state_dict()) == list(twin.state_dict())
    assert set(run.conversion) == set(decoupled_layers(twin))
    uncalibrated = train(
        dcnet.make_recipe(**{**vars(recipe), "calibrate": 0, "recalibrate": 0}), tmp_path / "without", quiet=True
    )
    assert uncalibrated.accuracy < run.accuracy - 20.0


def test_without_a_norm_kernels_carry_the_scale_and_the_run_remembers(tmp_path):
    plain = train(dcnet.make_recipe(magnitude=None, steps=4), tmp_path / "plain", quiet=True)  # cnn9_narrow has no norm
    run = train(
        dcnet.finetune_recipe(str(plain.folder), magnitude="tanh", steps=2, batch=64), tmp_path / "run", quiet=True
    )
    assert {layer.weighting for layer in decoupled_layers(run.model).values()} == {"linear"}
    assert accuracy(run.model) == pytest.approx(run.accuracy)


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(trained, tmp_path):
    recipe = dcnet.finetune_recipe(str(trained.folder), magnitude="tanh", steps=6, calibrate=2, schedule="constant")
    whole = train(recipe, tmp_path / "whole", quiet=True)
    shorter = dcnet.make_recipe(**{**vars(recipe), "steps": 3})
    train(shorter, tmp_path / "parts", quiet=True)
    parts = train(recipe, tmp_path / "parts", quiet=True, extend=True)
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(parts.model.state_dict()[name], tensor)


def test_a_decoupled_run_goes_on_with_its_own_operator(trained, tmp_path):
    first = train(dcnet.finetune_recipe(str(trained.folder), magnitude="ball", steps=2), tmp_path / "first", quiet=True)
    recipe = dcnet.finetune_recipe(str(first.folder), steps=2)
    assert (recipe.magnitude, recipe.calibrate) == ("ball", 0)
    second = train(recipe, tmp_path / "second", quiet=True)
    assert set(second.conversion) == set(first.conversion)
    with pytest.raises(ValueError, match="is decoupled already: magnitude='ball' there, 'tanh' here"):
        train(dcnet.finetune_recipe(str(first.folder), magnitude="tanh", steps=2), tmp_path / "third", quiet=True)
    scratch = train(dcnet.make_recipe("demo", steps=2), tmp_path / "scratch", quiet=True)
    for calibrate in (0, 2):
        with pytest.raises(ValueError, match="is decoupled already: magnitude='tanh' there, 'ball' here"):
            dcnet.finetune_recipe(str(scratch.folder), magnitude="ball", calibrate=calibrate, steps=2)
    with pytest.raises(ValueError, match=r"is decoupled already \(tanh\); possible: a plain network's weights"):
        train(
            dcnet.finetune_recipe(str(scratch.folder), magnitude="tanh", calibrate=2, steps=2),
            tmp_path / "4",
            quiet=True,
        )
    assert not (tmp_path / "4").exists()


def test_the_plain_network_is_trained_on_as_a_control(trained, tmp_path):
    recipe = dcnet.finetune_recipe(str(trained.folder), magnitude=None, steps=1, lr=1e-9)
    assert recipe.calibrate == 0
    run = train(recipe, tmp_path / "run", quiet=True)
    assert run.conversion is None
    assert run.accuracy == pytest.approx(trained.accuracy, abs=2.0)


# -- the command -------------------------------------------------------------------------------------------------------


def command(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def test_the_command_and_those_that_read_its_run(trained, tmp_path):
    run = tmp_path / "run"
    options = ("--magnitude", "seg", "--steps", "2", "--calibrate", "2", "--run", run)
    done = command("finetune", trained.folder, *options)
    assert done.exit_code == 0, done.output
    assert "seg + cosine" in done.output
    again = command("finetune", trained.folder, *options)
    assert again.exit_code == 0
    assert "finished" in again.output
    assert command("evaluate", run).exit_code == 0
    attacked = command("attack", run, "--attacks", "fgsm", "--limit", "10", "--no-check")
    assert attacked.exit_code == 0, attacked.output
    report = command("report", run, "--out", tmp_path / "report.html")
    assert report.exit_code == 0, report.output
    resumed = command("train", "--resume", run, "--steps", "3")
    assert resumed.exit_code == 1  # one cycle depends on the length
    assert "the learning rates depend on the length" in resumed.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere/run"], "nowhere/run is not a run folder"),
        (["cnn8"], "unknown model 'cnn8'"),
        (["cnn9", "--weights", "missing.safetensors"], "there is no file missing.safetensors"),
        (["cnn9", "--weights", "weights.pth"], "pickles, which can execute code, are never loaded"),
        (["cnn9", "--weights", "elsewhere"], "elsewhere is not a run folder, and not a file"),
        (["cnn9", "--weights", "library"], "is a network of ours"),
        (["no_such_package:net"], "cannot be imported: No module named 'no_such_package'"),
        (["torch.nn:Nothing"], "has no attribute 'Nothing'"),
        (["torch.nn:ReLU", "--norm", "batch"], "norm='batch' is for dcnet's own networks"),
        (["cnn9", "--magnitude", "none", "--calibrate", "3"], "calibrate=3 is for decoupled layers"),
        (["cnn9"], "cnn9 has no trained weights to start from: give --weights (in Python, weights=); possible: a "),
        (["timm:resnet18", "--data", "digits"], "a run folder, or library for those that it downloads"),
        (["torchvision:resnet18", "--recipe", "demo"], "torchvision:resnet18 has no trained weights to start from"),
    ],
)
def test_what_cannot_be_is_said_and_leaves_no_folder(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dcnet.models.external._trusted", set())
    done = command("finetune", *words, "--steps", "1", "--run", "run")
    assert done.exit_code == 1, done.output
    assert message in done.output
    assert not (tmp_path / "run").exists()


def test_weights_may_be_those_of_the_recipe():
    recipe = dcnet.make_recipe("demo", pretrained="runs/plain")
    assert dcnet.finetune_recipe("cnn9_narrow", base=recipe).pretrained == "runs/plain"
    assert dcnet.finetune_recipe("cnn9_narrow", "runs/other", base=recipe).pretrained == "runs/other"
    with pytest.raises(ValueError, match="cnn9_narrow has no trained weights to start from"):
        dcnet.finetune_recipe("cnn9_narrow")
    assert dcnet.finetune_recipe("my_package:network").pretrained is None  # which may load them itself


# -- files of weights --------------------------------------------------------------------------------------------------


def test_files_of_weights_that_do_not_fit(trained, tmp_path):
    def start(path, **fields):
        recipe = dcnet.finetune_recipe("cnn9_narrow", str(path), norm="batch", steps=1, magnitude="tanh", **fields)
        return train(recipe, tmp_path / "run", quiet=True)

    good = {name: tensor.contiguous() for name, tensor in trained.model.state_dict().items()}
    (tmp_path / "cut.safetensors").write_bytes(b"\x00" * 30)
    with pytest.raises(ValueError, match=r"cut.safetensors cannot be read"):
        start(tmp_path / "cut.safetensors")
    save_file({"conv1.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"does not fit the recipe.s network: it lacks stages.0.conv.weight"):
        start(tmp_path / "other.safetensors")
    save_file(good | {"stages.1.conv.weight": torch.zeros(8, 8, 3, 3)}, tmp_path / "shape.safetensors")
    with pytest.raises(
        ValueError, match=r"size mismatch for stages.1.conv.weight, shape \(8, 8, 3, 3\) there, \(32, 32, 3, 3\) here"
    ):
        start(tmp_path / "shape.safetensors")
    with pytest.raises(ValueError, match="is the checkpoint of a run; give its folder"):
        start(trained.checkpoint)
    assert not (tmp_path / "run").exists()
    classifier = {"head.weight": torch.zeros(7, 256), "head.bias": torch.zeros(7)}
    save_file(good | classifier, tmp_path / "seven.safetensors")
    with pytest.warns(UserWarning, match="the classifier head starts anew: .* has 7 classes, the data 10"):
        start(tmp_path / "seven.safetensors")


# -- networks of one's own, and of libraries ---------------------------------------------------------------------------


def test_a_network_of_ones_own_is_imported_only_when_it_is_named(own, monkeypatch):
    run = own / "run"
    name = "networks_of_mine:network"
    done = command("finetune", name, "--data", "digits", "--magnitude", "tanh", "--steps", "2", "--run", run)
    assert done.exit_code == 0, done.output
    assert sys.modules["networks_of_mine"].calls[-1] == (10, 1)
    model = dcnet.load(run)
    assert [type(layer).__name__ for layer in decoupled_layers(model).values()] == ["DecoupledConv2d"]
    monkeypatch.setattr("dcnet.models.external._trusted", set())
    del sys.modules["networks_of_mine"]
    with pytest.raises(ValueError, match="code of your own, which is imported and called only when you say so"):
        dcnet.load(run)
    refused = command("evaluate", run)
    assert refused.exit_code == 1
    assert "DCNET_TRUST_MODELS=networks_of_mine:network" in refused.output
    assert "networks_of_mine" not in sys.modules
    monkeypatch.setenv("DCNET_TRUST_MODELS", name)
    assert command("evaluate", run).exit_code == 0
    monkeypatch.delenv("DCNET_TRUST_MODELS")
    dcnet.trust_model(name)
    assert accuracy(dcnet.load(run)) == pytest.approx(dcnet.Run(run).accuracy)
    with pytest.raises(ValueError, match="is not the name of a network of one's own"):
        dcnet.trust_model("network")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("without_convolutions", "it has no convolution, and of other libraries' networks and your own, recipes "),
        ("too_few_classes", "gives (2, 7) for 2 images; logits of shape (2, 10) are needed"),
        ("no_network", "makes a int; an nn.Module is needed"),
        ("calls", "is a list; a function or class"),
    ],
)
def test_networks_of_ones_own_that_do_not_fit(own, name, message):
    done = command("finetune", f"networks_of_mine:{name}", "--data", "digits", "--steps", "1", "--run", own / "run")
    assert done.exit_code == 1
    assert message in done.output
    assert not (own / "run").exists()


@pytest.mark.filterwarnings("ignore")  # of other people's packages
@pytest.mark.parametrize(
    ("name", "message", "where"),
    [
        (
            "networks_of_mine:needs_a_width",
            "cannot be called: missing a required argument: 'width'; offered by name are num_classes=10, "
            "in_channels=1, input_size=8. Give other arguments a default value",
            None,
        ),
        ("networks_of_mine:by_position", "missing a required argument: 'num_classes'; offered by name", None),
        (
            "networks_of_mine:fails",
            "cannot be made: KeyError: 'backbone'",
            ("networks_of_mine.py", 'return settings["backbone"]', "helper"),
        ),
        (
            "networks_of_mine:fails_elsewhere",
            "cannot be made: ZeroDivisionError: division by zero",
            ("helpers_of_mine.py", "return 1 / 0", "half"),
        ),
        (
            "networks_of_mine:Misspelled",
            "fails on images of shape (1, 8, 8): AttributeError: 'Misspelled' object has no attribute 'convolution'",
            ("networks_of_mine.py", "return self.convolution(x)", "forward"),
        ),
        (
            "networks_of_mine:FailsInTraining",
            "LookupError: two classes at least",
            ("networks_of_mine.py", 'raise LookupError("two classes at least")', "forward"),
        ),
        ("a_name:x", "cannot be imported: NameError: name 'nope' is not defined", ("a_name.py", "x = nope", None)),
        ("a_bracket:x", "cannot be imported: SyntaxError: '(' was never closed (a_bracket.py, line 1)", None),
        ("an_import:x", "No module named 'no_such_package'", ("an_import.py", "import no_such_package", None)),
    ],
)
@pytest.mark.parametrize("verb", ["finetune", "train"])
def test_errors_in_the_code_of_ones_own_network(own, monkeypatch, verb, name, message, where):
    """One line, with the place of the user's innermost frame, and no traceback."""
    model = [name] if verb == "finetune" else ["--model", name]
    done = command(verb, *model, "--data", "digits", "--steps", "1", "--run", own / "run", "--device", "cpu")
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)  # said, and not raised any further
    (error,) = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert message in error
    if where is not None:
        file, line, function = where
        number = [text.strip() for text in (own / file).read_text().splitlines()].index(line) + 1
        inside = "" if function is None else f", in {function}"
        assert f"({own / file}, line {number}{inside})" in error


def test_errors_of_the_command_itself_are_still_raised(own, monkeypatch):
    monkeypatch.setattr("dcnet.cli.train.train_recipe", lambda *_, **__: {}["a defect of ours"])
    with pytest.raises(KeyError, match="a defect of ours"):
        CliRunner().invoke(app, ["finetune", "networks_of_mine:network"], catch_exceptions=False)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_networks_of_libraries(library, tmp_path):
    if library == "timm":
        timm = needs("timm")
        net, name = timm.create_model("resnet10t", num_classes=10), "timm:resnet10t"
        converted = 14
    else:
        squeezenet1_1 = needs("torchvision.models").squeezenet1_1
        net, name = squeezenet1_1(num_classes=10), "torchvision:squeezenet1_1"
        converted = 26
    torch.manual_seed(0)
    save_file(net.state_dict(), tmp_path / "weights.safetensors")
    folder = images_in(tmp_path / "images")
    recipe = dcnet.finetune_recipe(
        *(name, str(tmp_path / "weights.safetensors")),
        data=f"imagefolder:{folder}",
        image_size=32,
        magnitude="linear",
        steps=1,
        lr=1e-12,
        batch=4,
        calibrate=2,
        recalibrate=0,
    )
    with pytest.warns(UserWarning, match="has 10 classes, the data 2"):
        run = train(recipe, tmp_path / "run", quiet=True, device="cpu")
    assert len(run.conversion) == converted
    model = run.model
    assert isinstance(model, nn.Module)
    with pytest.raises(ValueError, match=f"{library} has no network 'resnet_of_mine'"):
        train(
            dcnet.make_recipe(**{**vars(recipe), "model": f"{library}:resnet_of_mine"}), tmp_path / "other", quiet=True
        )


@pytest.mark.filterwarnings("ignore")  # of other people's packages
def test_weights_by_the_library(monkeypatch):
    """Nothing is downloaded: what the library would have downloaded is given here."""
    models = needs("torchvision.models")
    _api, squeezenet1_1 = models._api, models.squeezenet1_1

    known, asked = squeezenet1_1().state_dict(), []
    monkeypatch.setattr(_api, "load_state_dict_from_url", lambda url, **options: asked.append(options) or known)
    model = create_external("torchvision:squeezenet1_1", 7, 1, 64, pretrained=True)
    assert torch.equal(model.net.features[0].weight, known["features.0.weight"])
    assert model.net.classifier[1].weight.shape[0] == 7
    assert asked[0]["weights_only"]
    assert model.eval()(torch.rand(2, 1, 64, 64)).shape == (2, 7)

    def fails(url, **options):
        raise OSError("no connection")

    monkeypatch.setattr(_api, "load_state_dict_from_url", fails)
    with pytest.raises(ValueError, match=r"cannot be made: OSError: no connection; give its weights as a file"):
        create_external("torchvision:squeezenet1_1", 7, 1, 64, pretrained=True)


def images_in(folder):
    """Two classes of noise."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for part in ("train", "val"):
        for label in ("a", "b"):
            (folder / part / label).mkdir(parents=True)
            for number in range(6):
                pixels = torch.randint(0, 256, (40, 40, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / part / label / f"{number}.png")
    return folder


def test_recipes_of_before_are_still_read(trained):
    values = json.loads((trained.folder / "recipe.json").read_text())
    del values["calibrate"]
    assert dcnet.training.recorded(values).calibrate == 0


# -- files of decoupled networks ---------------------------------------------------------------------------------------


def other_network(num_classes, in_channels):
    """A network that is not ours, as a library has it."""
    torch.manual_seed(0)
    layers = nn.Conv2d(in_channels, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    return External(nn.Sequential(*layers, nn.Linear(8 * 36, num_classes)), in_channels, nn.Identity())


class Untraceable(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, num_classes)

    def forward(self, x):
        return self.head(self.bn(self.conv(x if x.sum().item() < 1e9 else -x)).mean((2, 3)))


def test_a_network_that_cannot_be_traced_is_fused(tmp_path):
    name = f"{__name__}:Untraceable"
    dcnet.trust_model(name)
    recipe = dcnet.make_recipe(model=name, data="digits", magnitude="tanh", steps=1, batch=8, evaluate_every=0)
    assert train(recipe, tmp_path / "run", quiet=True).model.conv.fusion is not None


@pytest.fixture(scope="module")
def decoupled(tmp_path_factory):
    """A run of it, decoupled, and its weights in files of every kind."""
    name = f"{__name__}:other_network"
    dcnet.trust_model(name)
    folder = tmp_path_factory.mktemp("decoupled")
    recipe = dcnet.make_recipe(model=name, data="digits", magnitude="tanh", steps=20, batch=32)
    run = train(recipe, folder / "run", quiet=True)
    dcnet.export(run.model, folder / "wrapped.safetensors")
    dcnet.export(run.model.net, folder / "bare.safetensors")
    dcnet.export(dcnet.load(folder / "run"), folder / "loaded.safetensors")
    save_weights(run, folder / "weights.safetensors")
    save_file({k: v.contiguous() for k, v in run.model.state_dict().items()}, folder / "unnamed.safetensors")
    return run


@pytest.mark.parametrize(
    "file", ["run", "wrapped.safetensors", "bare.safetensors", "loaded.safetensors", "weights.safetensors"]
)
def test_a_decoupled_network_goes_on_from_a_file(decoupled, tmp_path, file):
    fields = {"data": "digits", "magnitude": "tanh", "steps": 1, "lr": 1e-9, "recalibrate": 0}
    weights = decoupled.folder.parent / file
    recipe = dcnet.finetune_recipe(decoupled.recipe.model, str(weights), **fields)
    run = train(recipe, tmp_path / "run", quiet=True)
    assert run.accuracy == pytest.approx(decoupled.accuracy, abs=0.3)
    assert set(run.conversion) == {"net.0"}
    with pytest.raises(ValueError, match=r"is decoupled already: magnitude='tanh' there, 'seg' here"):
        dcnet.finetune_recipe(decoupled.recipe.model, str(weights), **{**fields, "magnitude": "seg"})
    other = dataclasses.replace(recipe, magnitude="seg")
    with pytest.raises(ValueError, match=r"is decoupled already: magnitude='tanh' there, 'seg' here"):
        train(other, tmp_path / "other", quiet=True)


def test_a_decoupled_network_that_does_not_say_so(decoupled, tmp_path):
    weights = decoupled.folder.parent / "unnamed.safetensors"
    recipe = dcnet.finetune_recipe(decoupled.recipe.model, str(weights), data="digits", magnitude="tanh", steps=1)
    with pytest.raises(
        ValueError, match=r"has the weights of a decoupled network, such as net.0.raw_radius, and does not"
    ):
        train(recipe, tmp_path / "run", quiet=True)
