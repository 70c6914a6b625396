"""Callbacks: when they are called, that they are closed, and the examples of the documentation."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dcnet
from dcnet.training import state

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parent.parent / "docs" / "callbacks.md").read_text(), re.DOTALL
)


def recipe(**options):
    return dcnet.make_recipe(**{"epochs": 2.0, "batch": 512, "magnitude": None, **options})  # two steps an epoch


class Told(dcnet.Callback):
    def __init__(self, fails=None):
        self.calls, self.fails = [], fails

    def note(self, name, *what):
        self.calls.append((name, *what))
        if name == self.fails:
            raise ArithmeticError("of a callback")

    def begin(self, run, steps, done, per_epoch):
        self.note("begin", run.folder.name, steps, done, per_epoch)

    def step(self, step, seconds, numbers):
        loss, accuracy = numbers()
        assert loss > 0
        assert 0 <= accuracy <= 100
        self.note("step", step)

    def epoch(self, entry):
        self.note("epoch", entry["epoch"], entry["step"])

    def end(self, run):
        self.note("end", run.accuracy)

    def close(self):
        self.note("close")


def test_order(tmp_path):
    told = Told()
    run = dcnet.train(recipe(), tmp_path / "run", device="cpu", quiet=True, callbacks=[told, dcnet.Callback()])
    steps = [("step", 1), ("step", 2), ("epoch", 1.0, 2), ("step", 3), ("step", 4), ("epoch", 2.0, 4)]
    assert told.calls == [("begin", "run", 4, 0, 2), *steps, ("end", run.accuracy), ("close",)]
    again = Told()
    dcnet.train(recipe(), tmp_path / "run", device="cpu", quiet=True, callbacks=[again])  # finished already
    assert again.calls == []


def test_all_are_closed_whatever_happens(tmp_path, monkeypatch):
    first, second = Told(), Told(fails="epoch")
    with pytest.raises(ArithmeticError, match="of a callback"):
        dcnet.train(recipe(), tmp_path / "run", device="cpu", quiet=True, callbacks=[first, second])
    assert first.calls[-1] == second.calls[-1] == ("close",)
    # one that cannot begin; and the others after it have not
    first, second, third = Told(), Told(fails="begin"), Told()
    with pytest.raises(ArithmeticError):
        dcnet.train(recipe(), tmp_path / "other", device="cpu", quiet=True, callbacks=[first, second, third])
    assert [len(told.calls) for told in (first, second, third)] == [2, 2, 0]
    # one that cannot be closed
    first, second, third = Told(), Told(fails="close"), Told()
    with pytest.raises(ArithmeticError):
        dcnet.train(recipe(steps=1), tmp_path / "closed", device="cpu", quiet=True, callbacks=[first, second, third])
    assert first.calls[-1] == third.calls[-1] == ("close",)
    # Ctrl-C
    monkeypatch.setattr(state.TrainingState, "train_step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    told = Told()
    with pytest.raises(KeyboardInterrupt):
        dcnet.train(recipe(), tmp_path / "third", device="cpu", quiet=True, callbacks=[told])
    assert told.calls[-1] == ("close",)


def test_what_is_no_callback(tmp_path):
    with pytest.raises(
        TypeError, match=r"callbacks must be instances of dcnet.Callback, got .*Told'>; make one of it: Told\(…\)"
    ):
        dcnet.train(recipe(), tmp_path / "run", callbacks=[Told])
    with pytest.raises(TypeError, match=r"got <built-in function print>"):
        dcnet.train(recipe(), tmp_path / "run", callbacks=[print])
    assert not (tmp_path / "run").exists()


def test_the_examples_of_the_documentation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logged, kept = [], {}

    class Log:
        summary: dict = {}

        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            logged.append("finished")

    def init(**options):
        kept.update(options)
        return Log()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    # train less than the documentation says
    original = dcnet.make_recipe
    monkeypatch.setattr(
        dcnet,
        "make_recipe",
        lambda name, **options: original(name, **options, batch=721, magnitude=None, augment="none"),
    )
    first, second = BLOCKS
    found: dict = {}
    exec(first, found)
    assert found["best"].epoch_of_best == 1.0
    exec(second.replace('"demo", epochs=1', '"demo", epochs=1, seed=1'), found)
    step, values = logged[0]
    assert step == 2
    assert values["test_accuracy"] == found["run"].accuracy == Log.summary["accuracy"]
    assert logged[-1] == "finished"
    assert kept["config"]["seed"] == 1
    assert kept["name"] == found["run"].folder.name
