"""What the command line does with a run, as functions of the library: evaluate, predict, attack."""

import json

import pytest
import torch
from test_cli import call

import dcnet
from dcnet.data import FOLDER, NAMES, load_data
from dcnet.training import attack_run, classes_of, evaluate_run, predict_run
from dcnet.training.checkpoint import load_state


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    recipe = dcnet.make_recipe(steps=12, batch=64)
    return dcnet.train(recipe, tmp_path_factory.mktemp("library") / "run", device="cpu", quiet=True)


def test_evaluate_a_run(run, tmp_path):
    found = evaluate_run(run, device="cpu")
    assert found.accuracy == pytest.approx(run.accuracy)
    assert (found.data, found.classes, found.unfinished_after) == ("digits", tuple("0123456789"), None)
    assert found.counts.tolist() == torch.bincount(load_data("digits").test.labels).tolist()
    assert f"accuracy {found.accuracy:.2f}%" in call("evaluate", str(run.folder), "--device", "cpu").output
    result = (run.folder / "result.json").read_text()
    (run.folder / "result.json").unlink()
    try:
        assert evaluate_run(run, device="cpu").unfinished_after == load_state(run.checkpoint)["step"] == 12
    finally:
        (run.folder / "result.json").write_text(result)


def test_another_data_set_must_fit(run, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="image folders need Pillow")
    for part in ("train", "val"):
        for name in ("dark", "light"):
            (tmp_path / part / name).mkdir(parents=True)
            image.new("RGB", (20, 20)).save(tmp_path / part / name / "0.png")
    with pytest.raises(ValueError, match=r"trained for 10 classes .*; .* has 2 classes and images of 3×8×8"):
        evaluate_run(run, f"{FOLDER}{tmp_path}", device="cpu")


def test_predict_with_a_run(run, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="predict needs Pillow")
    test = load_data("digits").test
    for i in range(3):
        image.fromarray(test.images[i, 0].numpy()).save(tmp_path / f"{i}.png")
    (tmp_path / "no.png").write_text("not an image")
    files = [tmp_path / "0.png", tmp_path / "no.png", tmp_path / "1.png", tmp_path / "2.png"]
    first, broken, *others = predict_run(run, files, top=2, device="cpu")
    with torch.no_grad():
        chances = run.model(test.images[:3] / 255.0).softmax(1)
    assert [p.top[0][0] for p in (first, *others)] == [str(int(i)) for i in chances.argmax(1)]
    assert first.top[0][1] == pytest.approx(float(chances[0].max()), abs=1e-6)
    assert len(first.top) == 2
    assert (first.converted, first.error) == ("", None)
    assert (broken.image, broken.top) == (tmp_path / "no.png", ())
    assert "cannot be read as an image" in broken.error
    assert classes_of(run) == (tuple("0123456789"), None)


def test_attack_a_run(run):
    found = attack_run(run, "fgsm", 0.1, limit=20, check_images=5, check_queries=3, device="cpu")
    test = load_data("digits").test
    images, labels = test.images[:20] / 255.0, test.labels[:20]
    expected = dcnet.robustness.evaluate(run.model, images, labels, "fgsm", 0.1)
    assert found["attacks"][0]["accuracy"] == expected["attacks"][0]["accuracy"]
    assert found["check-up"]["images"] == 5
    run.add_attack(found)
    assert json.loads((run.folder / "attacks.json").read_text())[-1]["eps"] == 0.1


def test_help_knows_every_data_set():
    text = " ".join(call("train", "--help").output.replace("│", " ").split())
    assert f"Data set: {', '.join(NAMES)}, or {FOLDER}PATH." in text


def test_classes_of_a_run_that_does_not_say(run, monkeypatch):
    """Runs of older versions: the names come from the data, or are numbers."""
    monkeypatch.setattr(type(run), "classes", ())
    assert classes_of(run) == (tuple("0123456789"), None)
    monkeypatch.setattr(run, "recipe", dcnet.make_recipe(data=f"{FOLDER}nowhere", image_size=8))
    names, note = classes_of(run)
    assert names == tuple("0123456789")
    assert "the names of the classes are not known here: imagefolder:nowhere has 0 of 10" in note
