"""Records of attacks: which figure stands for a run, whether to believe it, replacing and removing records."""

import json

import pytest
from typer.testing import CliRunner

import dcnet
from dcnet.cli import app
from dcnet.cli import attack as attack_command
from dcnet.robustness.records import check_ups_of, common_eps, conditions, headline, replaced

TESTS = ("randomness", "ε = 0", "zero gradients", "stronger attack", "black box", "growing ε")


def check_up(eps=8, pgd=20.0, stronger=20.0, failed=(), images=200):
    tests = [{"test": name, "passed": name not in failed, "words": f"words about {name}"} for name in TESTS]
    found = {
        "images": images,
        "eps": eps / 255,
        "clean": 90.0,
        "pgd": pgd,
        "pgd, stronger": stronger,
        "square": 60.0,
        "tests": tests,
    }
    return found | {
        "masked": bool(failed),
        "verdict": f"verdict at {eps}",
        "steps": [{"steps": 1, "accuracy": pgd}],
        "curve": [],
    }


def record(eps=8, images=1000, labels="true", source=None, cumulative=False, bf16=False, check=None, **attacks):
    entries = [
        {"attack": name, "attacked": images, "accuracy": accuracy, "seconds": 1.0} for name, accuracy in attacks.items()
    ]
    found = {
        "images": images,
        "eps": eps / 255,
        "labels": labels,
        "transfer": source is not None,
        "cumulative": cumulative,
        "clean": 90.0,
    }
    found |= {"attacks": entries, "from": source, "bf16": bf16}
    return found if check is None else {**found, "check-up": check}


def test_the_headline_is_of_one_set_up():
    records = [
        record(8, 1000, fgsm=40.0, pgd=20.0, check=check_up(8)),
        record(8, 10, pgd=0.0),  # of fewer images
        record(2, 1000, pgd=70.0, check=check_up(2, 70.0, 70.0)),  # the last one recorded, at another ε
        record(8, 1000, labels="predicted", pgd=1.0),
        record(8, 1000, source="runs/other", pgd=2.0),
        record(8, 1000, bf16=True, pgd=3.0),
    ]
    found = headline(records, 8.0)
    assert (found.accuracy, found.attack, found.eps, found.images) == (20.0, "pgd", 8.0, 1000)
    assert found.check_up["verdict"] == "verdict at 8"
    assert found.doubt is None
    assert headline(records, 2.0).accuracy == 70.0
    assert headline(records, 2.0).check_up["verdict"] == "verdict at 2"
    assert headline(records, 4.0) is None
    assert headline([records[5]], 8.0).accuracy == 3.0  # there is nothing else
    assert headline([record(8, 1000, cumulative=True, fgsm=40.0, pgd=20.0)], 8.0).attack == "fgsm + pgd"


def test_eps_written_in_two_ways_is_one():
    assert headline([record(8, pgd=20.0) | {"eps": 0.031373}], 8.0).accuracy == 20.0


def test_the_table_has_one_eps():
    eight, two = record(8, pgd=20.0), record(2, pgd=70.0)
    assert common_eps([[eight, two], [eight], [two], [eight]]) == 8.0  # of most runs
    assert common_eps([[record(8, images=10, pgd=20.0), two]]) == 2.0  # of most images
    assert common_eps([[eight, two]]) == 2.0  # the last
    assert common_eps([[], [record(8, source="runs/other", pgd=2.0)]]) is None


@pytest.mark.parametrize(
    ("found", "check", "why"),
    [
        (20.0, None, "no check-up was made at this ε"),
        (20.0, check_up(2), "no check-up was made at this ε"),
        (20.0, check_up(failed=("black box", "growing ε")), "the check-up fails (black box, growing ε)"),
        (40.0, check_up(), "stronger attacks leave 20.0% of the 200 images of the check-up"),  # a weak attack alone
        (40.0, check_up(stronger=20.0, images=5), None),  # five images cannot tell
        (20.0, check_up(pgd=30.0, failed=("stronger attack",)), None),  # the figure is as low as the stronger attack's
        (
            30.0,
            check_up(pgd=30.0, stronger=10.0, failed=("stronger attack",)),
            "stronger attacks leave 10.0% of the 200 images of the check-up",
        ),
        (22.0, check_up(), None),
    ],
)
def test_doubt(found, check, why):
    assert headline([record(8, pgd=found, check=check)], 8.0).doubt == why


def test_check_ups_at_one_eps():
    runs = {
        "a": [record(8, pgd=1.0, check=check_up(8)), record(2, pgd=1.0, check=check_up(2))],
        "b": [record(8, pgd=1.0, check=check_up(8))],
    }
    eps, found = check_ups_of(runs)
    assert eps == 8.0
    assert {name: one["eps"] for name, one in found.items()} == {"a": 8 / 255, "b": 8 / 255}
    assert check_ups_of({"a": [record(pgd=1.0)]}) == (None, {})


def test_replaced():
    other = [
        record(2, pgd=70.0),
        record(8, 10, pgd=0.0),
        record(8, labels="predicted", pgd=1.0),
        record(8, source="runs/other", pgd=2.0),
    ]
    old = record(8, fgsm=40.0, pgd=30.0, check=check_up(8))
    new = record(8, pgd=20.0)
    assert conditions(old) == conditions(new)
    *kept, rest, last = replaced([*other, old], new)
    assert kept == other
    assert [entry["attack"] for entry in rest["attacks"]] == ["fgsm"]
    assert last == {**new, "check-up": old["check-up"]}
    assert replaced([old], record(8, fgsm=1.0, pgd=2.0, check=check_up(8, 1.0))) == [
        record(8, fgsm=1.0, pgd=2.0, check=check_up(8, 1.0))
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return dcnet.train(dcnet.make_recipe(magnitude=None, steps=5), folder, device="cpu", quiet=True)


def attack(run, *flags):
    result = CliRunner().invoke(app, ["attack", str(run.folder), "--device", "cpu", *flags])
    return result.exit_code, " ".join(result.output.split())


QUICK = ("--attacks", "fgsm", "--limit", "20", "--no-check")


def test_replace_and_forget(run):
    for flags in ((), ("--eps", "4/255"), ()):
        code, said = attack(run, *QUICK, *flags)
        assert code == 0, said
    assert "An earlier record has the same set-up; both are kept" in said
    assert len(run.attacks) == 3
    code, said = attack(run, *QUICK, "--replace")
    assert code == 0
    assert [round(255 * one["eps"]) for one in run.attacks] == [4, 8]
    code, said = attack(run, "--records")
    assert "1: ε·255 = 4, 20 images, true labels: fgsm" in said
    assert len(run.attacks) == 2
    code, said = attack(run, "--forget", "3")
    assert (code, "--forget 3: no such record; possible: 1 to 2" in said) == (1, True)
    assert len(run.attacks) == 2
    code, said = attack(run, "--forget", "1")
    assert "1 record removed" in said
    assert [round(255 * one["eps"]) for one in run.attacks] == [8]
    code, said = attack(run, "--forget", "all")
    assert "has no records of attacks" in said
    assert run.attacks == []


def test_what_cannot_be_kept_is_said_before_computing(run, tmp_path, monkeypatch):
    """A damaged file, and a folder that takes no files."""

    def computed(*_, **__):
        raise AssertionError("computed")

    monkeypatch.setattr(attack_command, "attack_run", computed)
    file = run.folder / "attacks.json"
    for text, message in (
        ("[{", "attacks.json is damaged"),
        ('{"a": 1}', "attacks.json is not what `dcnet attack` writes"),
    ):
        file.write_text(text)
        code, said = attack(run, *QUICK)
        assert (code, message in said) == (1, True), said
        assert file.read_text() == text
    file.unlink()

    def refused(**_):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr("dcnet.training.run.TemporaryFile", refused)
    code, said = attack(run, *QUICK)
    assert (code, f"nothing can be written into {run.folder}: Read-only file system" in said) == (1, True), said


def test_a_full_disk_loses_no_figures(run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dcnet.training.run.write_json", full)
    code, said = attack(run, *QUICK)
    assert code == 1
    assert "accuracy left" in said
    assert "No space left on device" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--eps", "8"],
            "eps=8 is more than 1, the whole range of a pixel (images go from 0 to 1); did you mean 8/255?",
        ),
        (["--eps", "1000"], "eps=1000 is more than 1, the whole range of a pixel (images go from 0 to 1)"),
        (["--attacks", "pgd:steps=0"], "attack 'pgd:steps=0': steps=0 must be a whole number ≥ 1"),
        (["--attacks", "pgd:steps=x"], "attack 'pgd:steps=x': steps=x must be a whole number"),
        (["--attacks", "pgd:stps=1"], "steps=…"),
        (
            ["--attacks", "pgd:norm=l2", "--eps", "2"],
            "the check-up is for ℓ∞, where ε is at most 1; do without it: --no-check",
        ),
    ],
)
def test_parameters_that_cannot_be(run, flags, message):
    code, said = attack(run, *flags)
    assert (code, message in said) == (1, True), said


def test_an_l2_ball_may_be_larger_than_a_pixel(run):
    code, said = attack(run, "--attacks", "pgd:norm=l2:steps=1", "--eps", "2", "--limit", "5", "--no-check")
    assert code == 0, said
    (run.folder / "attacks.json").unlink()


def test_fractions_in_recipes(tmp_path):
    recipe = dcnet.make_recipe(adversarial="fgsm", adversarial_eps="8/255", lr="1/1000")
    assert (recipe.adversarial_eps, recipe.lr) == (8 / 255, 1 / 1000)
    (tmp_path / "recipe.json").write_text(
        json.dumps({"adversarial_eps": "4/255", "schedule": "step", "milestones": ["1/2", 0.75]})
    )
    recipe = dcnet.training.read_recipe(tmp_path / "recipe.json")
    assert (recipe.adversarial_eps, recipe.milestones) == (4 / 255, (0.5, 0.75))
    with pytest.raises(ValueError, match=r"recipe: adversarial_eps='8/0' is no number; possible: 0.03, 8/255"):
        dcnet.make_recipe(adversarial_eps="8/0")
    with pytest.raises(ValueError, match=r"adversarial_eps=8.0 must be ≥ 0 and ≤ 1; did you mean 8/255\?"):
        dcnet.make_recipe(adversarial_eps=8)
    assert dict(dcnet.DecoupledLinear(2, 2, magnitude="seg:beta=1/4").operator.magnitude.values)["beta"] == 0.25


def test_fractions_in_flags(tmp_path):
    flags = [
        "--steps",
        "1",
        "--batch",
        "8",
        "--device",
        "cpu",
        "--adversarial-eps",
        "2/255",
        "--lr",
        "1/500",
        "--radius",
        "5/2",
    ]
    result = CliRunner().invoke(app, ["train", *flags, "--run", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    recipe = dcnet.Run(tmp_path / "run").recipe
    assert (recipe.adversarial_eps, recipe.lr) == (2 / 255, 0.002)
    assert float(dcnet.load(tmp_path / "run").stages[0].conv.effective_radius[0]) == 2.5
    result = CliRunner().invoke(app, ["train", "--lr", "fast"])
    assert result.exit_code == 2
    assert "'fast' is not a number" in result.output
