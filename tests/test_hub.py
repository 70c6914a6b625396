"""Trained networks by name, files of weights that describe themselves, the Hugging Face hub, and model cards."""

import importlib.util
import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from helpers import needs
from safetensors import safe_open

import dcnet
from dcnet.training import Run, add_to_hub, load, save_weights, train
from dcnet.training.card import model_card
from dcnet.training.hub import hub_folders


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    return train(dcnet.make_recipe("demo", magnitude="seg", angular="square_cosine", steps=30), folder, quiet=True)


def images(count=16):
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


# -- what comes with dcnet ---------------------------------------------------------------------------------------------


def test_the_networks_that_come_with_dcnet_are_as_good_as_they_say():
    from dcnet.data import load_data

    entries = {name: entry for name, entry in dcnet.trained_models().items() if entry["data"] == "digits"}
    assert entries
    data = load_data("digits")
    for name, entry in entries.items():
        model = load(f"hub:{name}")
        assert not model.training
        with torch.no_grad():
            right = model(data.test.images.float() / 255).argmax(1) == data.test.labels
        assert 100.0 * float(right.float().mean()) == pytest.approx(entry["accuracy"], abs=0.6)  # bfloat16
        assert sum(p.numel() for p in model.parameters()) == entry["parameters"]


@pytest.mark.parametrize("name", [None, 3, ["run"]])
def test_names_of_trained_networks_are_text_or_paths(name):
    with pytest.raises(TypeError, match=rf"by hub:NAME, got {re.escape(repr(name))}; possible: a run folder, a"):
        load(name)


def test_every_file_that_comes_with_dcnet_can_be_loaded():
    for name, entry in dcnet.trained_models().items():
        assert load(f"hub:{name}") is not None
        assert entry["file"].stat().st_size == entry["bytes"]


def test_the_command_line_lists_them():
    from typer.testing import CliRunner

    from dcnet.cli import app

    shown = CliRunner().invoke(app, ["models"], env={"COLUMNS": "200"})  # a narrow terminal breaks names
    assert shown.exit_code == 0
    for name in dcnet.trained_models():
        assert f"hub:{name}" in shown.output


def call(*arguments):
    from typer.testing import CliRunner

    from dcnet.cli import app

    return CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu"], env={"COLUMNS": "200"})


def test_commands_take_them_by_name(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image", reason="predict needs Pillow")
    from dcnet.data import load_data

    monkeypatch.chdir(tmp_path)
    name = "hub:cnn9-narrow-seg-digits"
    shown = call("evaluate", name)
    assert shown.exit_code == 0, shown.output
    assert f"accuracy {dcnet.trained_models()[name[4:]]['accuracy']:.2f}%" in shown.output
    test = load_data("digits").test
    image.fromarray(test.images[0, 0].numpy()).save(tmp_path / "0.png")
    shown = call("predict", name, "0.png", "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)[0]["prediction"] == str(int(load(name)(test.images[:1] / 255.0).argmax()))
    report = dcnet.training.export_run(name, to="torch-export", dynamic=False)
    assert report.path == Path("cnn9-narrow-seg-digits.pt2")  # here, not in the package
    assert (tmp_path / report.path).is_file()
    with pytest.raises(ValueError, match="holds weights as safetensors already"):
        dcnet.training.export_run(name, to="safetensors")
    tuned = call("finetune", name, "--steps", 1, "--lr", 1e-9, "--run", "tuned")
    assert tuned.exit_code == 0, tuned.output
    tuned = Run("tuned")
    assert (tuned.recipe.pretrained, tuned.recipe.magnitude, tuned.recipe.norm) == (name, "seg", "batch")
    assert tuned.accuracy > 95.0
    start = ("--recipe", "demo", "--magnitude", "seg", "--angular", "square_cosine", "--pretrained", name)
    done = call("train", *start, "--steps", 1, "--lr", 1e-9, "--run", "started")
    assert done.exit_code == 0, done.output
    assert Run("started").accuracy > 95.0


def test_files_of_weights_in_commands(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_weights(run, tmp_path / "run.safetensors")
    shown = call("evaluate", "run.safetensors")
    assert shown.exit_code == 0, shown.output
    assert f"accuracy {run.accuracy:.2f}%" in shown.output
    recipe = dcnet.finetune_recipe("run.safetensors", steps=1, lr=1e-9)
    assert (recipe.magnitude, recipe.calibrate, recipe.batch) == ("seg", 0, run.recipe.batch)
    assert train(recipe, tmp_path / "tuned", quiet=True).accuracy > run.accuracy - 3.0


def test_a_file_is_no_run_folder(tmp_path):
    file = tmp_path / "run.safetensors"
    file.write_bytes(b"")
    for name, what in (("hub:cnn9-narrow-seg-digits", "the name of a trained network"), (file, "a file of weights")):
        with pytest.raises(FileNotFoundError, match=f"is not a run folder, but {what}; .*predict, attack, export"):
            dcnet.Run(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--resume", "NAME"], "dcnet.load('NAME') in Python"),
        (["train", "--model", "NAME"], "NAME is a trained network, not one to build; possible: dcnet finetune NAME"),
        (["train", "--pretrained", "hub:cnn9-narrow-seg-digit"], "Did you mean 'cnn9-narrow-seg-digits'?"),
        (["evaluate", "hub:nothing"], "no trained network 'nothing'"),
        (["evaluate", "none.safetensors"], "there is no file none.safetensors"),
        (["finetune", "cnn9_narrow", "--weights", "NAME"], "has its network with it; possible: dcnet finetune NAME"),
        (["finetune", "NAME", "--weights", "run.safetensors"], "NAME is trained already, and has weights of its own"),
        (["finetune", "NAME", "--calibrate", "2"], "is decoupled already (seg); possible: a plain"),
        (["finetune", "NAME", "--where", "spatial"], "is decoupled already: where=() there, ('spatial',) here"),
    ],
)
def test_where_a_run_folder_is_needed_the_error_says_so(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.safetensors").write_bytes(b"")
    name = "hub:cnn9-narrow-seg-digits"
    shown = call(*(name if word == "NAME" else word for word in arguments))
    assert shown.exit_code == 1, shown.output
    assert message.replace("NAME", name) in " ".join(shown.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["run.safetensors"]


def test_an_unknown_name_says_what_there_is():
    name = next(iter(dcnet.trained_models()))
    with pytest.raises(ValueError, match=f"no trained network '{name}x'. Did you mean '{name}'"):
        load(f"hub:{name}x")


# -- a folder of one's own ---------------------------------------------------------------------------------------------


def test_a_run_goes_into_a_folder_and_comes_out(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DCNET_HUB", str(tmp_path))
    path = add_to_hub(run, "small-seg", tmp_path)
    entry = dcnet.trained_models()["small-seg"]
    assert (entry["data"], entry["operator"], entry["accuracy"]) == (
        *("digits", "seg + square_cosine"),
        round(run.accuracy, 2),
    )
    model = load("hub:small-seg")
    with torch.no_grad():  # the file has weights of 16 bits
        expected, actual = run.model(images()), model(images())
    assert (actual - expected).square().mean().sqrt() < 0.03 * expected.std()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with safe_open(path, "pt") as file:
        kinds = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert kinds["stages.0.conv.weight"] == torch.bfloat16
    assert kinds["stages.0.conv.running_norm"] == kinds["stages.0.norm.running_var"] == torch.float32
    assert add_to_hub(run, "small-seg", tmp_path) == path  # again: replaced, not repeated
    assert len(json.loads((tmp_path / "index.json").read_text())) == 1
    assert hub_folders()[0] == tmp_path


def add_model():
    spec = importlib.util.spec_from_file_location("add_model", Path(__file__).parent.parent / "tools" / "add_model.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_the_page_lists_what_comes_with_dcnet():
    tool = add_model()
    assert tool.table(tool.HUB) in tool.PAGE.read_text()


@pytest.mark.slow
def test_the_tool_adds_runs_and_files_of_weights(run, tmp_path, monkeypatch, capsys):
    """A file as `dcnet table --keep-weights` writes it, without attacks on record; then with some made now."""
    monkeypatch.setenv("DCNET_HUB", str(tmp_path / "hub"))
    tool = add_model()

    def add(*arguments):
        tool.main([*map(str, arguments), "--folder", str(tmp_path / "hub")])
        return capsys.readouterr().out

    assert "note: there is no attack on record" in add(run.folder, "of-a-run")
    save_weights(run, tmp_path / "kept.safetensors")
    assert "note: there is no attack on record" in add(tmp_path / "kept.safetensors", "of-a-file")
    entries = dcnet.trained_models()
    assert entries["of-a-file"]["robustness"] is None
    same = ("data", "model", "operator", "accuracy", "parameters", "epochs", "robustness", "bytes")
    assert all(entries["of-a-file"][field] == entries["of-a-run"][field] for field in same)
    assert torch.equal(load("hub:of-a-file")(images()), load("hub:of-a-run")(images()))
    assert "check-up" not in add(tmp_path / "kept.safetensors", "attacked", "--attack", 20)
    found = dcnet.trained_models()["attacked"]["robustness"]
    assert found["images"] == 20
    assert set(found["attacks"]) == {"fgsm", "pgd"}
    assert found["verdict"]
    card = model_card(json.loads(safe_open(tmp_path / "hub" / "attacked.safetensors", "pt").metadata()["about"]))
    assert f"Check-up: {found['verdict']}" in card
    # a record of a run, without its weights
    (tmp_path / "record").mkdir()
    for name in ("recipe.json", "result.json"):
        (tmp_path / "record" / name).write_bytes((run.folder / name).read_bytes())
    for source, words in (
        (tmp_path / "record", "has no weights, as there is no checkpoint.safetensors.*--keep-weights"),
        (tmp_path / "nothing.safetensors", "there is no file"),
        (tmp_path, "is not a run folder"),
    ):
        with pytest.raises(SystemExit, match=words):
            add(source, "wrong")
    assert "wrong" not in dcnet.trained_models()


def test_a_damaged_folder_is_said_to_be_one(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DCNET_HUB", str(tmp_path))
    path = add_to_hub(run, "small", tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with pytest.raises(ValueError, match="its sha256 is another one"):
        load("hub:small")
    path.unlink()
    with pytest.raises(FileNotFoundError, match="but there is no file"):
        load("hub:small")
    entry = json.loads((tmp_path / "index.json").read_text())[0]
    for damaged, words in (
        ("[", "is damaged"),
        ("{}", "is not an index of trained networks"),
        ('[{"name": "x"}]', "is not an index of trained networks"),
        (json.dumps([entry | {"name": "../x"}]), "not that of a file beside it"),
    ):
        (tmp_path / "index.json").write_text(damaged)
        with pytest.raises(ValueError, match=words):
            load("hub:small")
    with pytest.raises(ValueError, match="name='A b'; possible: small letters"):
        add_to_hub(run, "A b", tmp_path / "other")
    assert not (tmp_path / "other").exists()


# -- files that describe themselves ------------------------------------------------------------------------------------


def test_a_converted_network_goes_through_a_file(run, tmp_path):
    plain = train(dcnet.make_recipe(magnitude=None, steps=2), tmp_path / "plain", quiet=True)  # without a norm
    tuned = train(dcnet.finetune_recipe(str(plain.folder), magnitude="ball", steps=1), tmp_path / "tuned", quiet=True)
    save_weights(tuned, tmp_path / "tuned.safetensors")
    assert torch.equal(load(tmp_path / "tuned.safetensors")(images()), tuned.model(images()))
    recipe = dcnet.finetune_recipe(str(tmp_path / "tuned.safetensors"), steps=1, lr=1e-9, recalibrate=0)
    assert (recipe.magnitude, recipe.calibrate) == ("ball", 0)
    again = train(recipe, tmp_path / "again", quiet=True)
    assert set(again.conversion) == set(tuned.conversion)
    torch.testing.assert_close(again.model(images()), tuned.model(images()), rtol=1e-3, atol=1e-3)


def test_formulas_of_ones_own_travel_with_the_file_and_are_not_executed(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text(
        "import dcnet\n\n\n@dcnet.magnitude(replace=True)\ndef traveling(n, alpha: dcnet.positive = 1.0):\n"
        '    """α·‖x‖"""\n    return alpha * n, alpha\n'
    )
    code = compile(source.read_text(), str(source), "exec")
    exec(code, {"__name__": "mine"})
    from dcnet.formulas.catalogue import CATALOGUES

    try:
        own = train(dcnet.make_recipe("demo", magnitude="traveling", steps=1), tmp_path / "run", quiet=True)
        save_weights(own, tmp_path / "own.safetensors")
        expected = own.model(images())
    finally:
        del CATALOGUES["magnitude"]["traveling"]
    with pytest.raises(ValueError, match="'traveling', which is not known here"):
        load(tmp_path / "own.safetensors")
    assert "traveling" not in dcnet.magnitudes()
    try:
        assert torch.equal(load(tmp_path / "own.safetensors", trust_formulas=True)(images()), expected)
    finally:
        CATALOGUES["magnitude"].pop("traveling", None)


def test_files_that_are_not_ours(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="does not hold weights of ours"):
        load(tmp_path / "foreign.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "odd.safetensors", {"format": "dcnet weights 1", "about": "[]"})
    with pytest.raises(ValueError, match="is damaged: what it says of its network cannot be read"):
        load(tmp_path / "odd.safetensors")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load(tmp_path / "missing.safetensors")


# -- model cards, and the Hugging Face hub -----------------------------------------------------------------------------


def test_a_card_says_what_is_known(run):
    about = {"recipe": vars(run.recipe), "shape": run.shape, "result": run.result, "robustness": None}
    card = model_card(about, "me/net")
    for words in (
        "`seg` magnitude, `square_cosine` angle",
        "digits: 10 classes, 1×8×8",
        f"{run.accuracy:.2f}%",
        "me/net",
    ):
        assert words in card
    assert "Not attacked" in card
    found = {"images": 100, "eps": 8 / 255, "clean": 97.0, "attacks": {"pgd": 12.5}, "verdict": "no sign of masking"}
    card = model_card(about | {"robustness": found, "conversion": {"a": {}}})
    for words in ("| pgd | 12.50% |", "ε = 8/255, 100 images", "Check-up: no sign of masking", "| 1 layer of"):
        assert words in card
    assert "may say little" in model_card(about | {"robustness": found | {"verdict": None}})


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "dcnet.training.huggingface", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'dcnet\[hub\]'"):
        _ = dcnet.HubModel
    with pytest.raises(AttributeError, match="has no attribute 'HubModels'"):
        _ = dcnet.HubModels


def test_through_the_hugging_face_format(run, tmp_path, capsys):
    needs("huggingface_hub")
    run.write_attacks([])
    model = dcnet.HubModel.from_run(run.folder)
    model.save_pretrained(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path / "saved")) == ["README.md", "config.json", "model.safetensors"]
    assert "Not attacked" in (tmp_path / "saved" / "README.md").read_text()
    again = dcnet.HubModel.from_pretrained(str(tmp_path / "saved"))
    assert torch.equal(again(images()), run.model(images()))
    assert again.about["recipe"]["magnitude"] == "seg"
    assert torch.equal(pickle.loads(pickle.dumps(again))(images()), run.model(images()))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    config["shape"]["num_classes"] = 7
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"does not fit the recipe in config\.json"):
        dcnet.HubModel.from_pretrained(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match="pickles are never loaded"):
        dcnet.HubModel._load_as_pickle(None, "model.bin", "cpu", True)


def test_what_is_pushed_is_what_is_saved(run, monkeypatch):
    """Nothing is sent: the client is another one here."""
    hub = needs("huggingface_hub")
    sent = {}

    class Client:
        def __init__(self, *arguments, **options):
            pass

        def create_repo(self, repo_id, **options):
            return type("Repo", (), {"repo_id": repo_id})()

        def upload_folder(self, folder_path, **options):
            sent.update({name: os.path.getsize(os.path.join(folder_path, name)) for name in os.listdir(folder_path)})

    monkeypatch.setattr(hub.hub_mixin, "HfApi", Client)
    dcnet.HubModel.from_run(run.folder).push_to_hub("me/net")
    assert set(sent) == {"README.md", "config.json", "model.safetensors"}
    assert Run(run.folder).result is not None
