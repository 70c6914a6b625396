"""Recipes: named ones, files, flags, and what cannot be."""

import dataclasses
import json
import math

import pytest

from dcnet.training import RECIPES, Recipe, change, make_recipe, read_recipe
from dcnet.training.schedule import Schedule


@pytest.mark.parametrize("name", RECIPES)
def test_round_trip(name, tmp_path):
    recipe = make_recipe(name, seed=7)
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    assert read_recipe(tmp_path / "recipe.json") == recipe
    assert recipe.seed == 7
    assert all(getattr(recipe, key) == value for key, value in RECIPES[name].items())


def test_the_paper():
    """SPEC's table of recipes."""
    cifar = make_recipe("paper-cifar")
    assert (cifar.optimizer, cifar.lr, cifar.batch, cifar.steps, cifar.label_smoothing) == (
        "adam",
        1e-3,
        128,
        42_500,
        0.01,
    )
    factors = Schedule(cifar, 42_500).factor
    for step, factor in (
        (0, 1.0),
        (19_999, 1.0),
        (20_000, 0.1),
        (29_999, 0.1),
        (30_000, 0.01),
        (37_499, 0.01),
        (37_500, 0.001),
        (42_499, 0.001),
    ):
        assert math.isclose(factors(step), factor), step
    assert (cifar.weight_decay, cifar.projection, cifar.orthogonality, cifar.augment, cifar.pad) == (
        5e-4,
        100,
        1e-5,
        "crop+flip",
        4,
    )
    sgd = make_recipe("paper-cifar-sgd")
    assert (sgd.optimizer, sgd.lr, sgd.momentum) == ("sgd", 0.1, 0.9)
    imagenet = make_recipe("paper-imagenet")
    assert (imagenet.optimizer, imagenet.lr, imagenet.batch, imagenet.steps, imagenet.weight_decay) == (
        "sgd",
        0.1,
        40,
        700_000,
        1e-4,
    )
    assert [round(m * 700) for m in imagenet.milestones] == [200, 375, 550]
    adversarial = make_recipe("paper-adversarial")
    assert (adversarial.optimizer, adversarial.schedule, adversarial.weight_decay, adversarial.label_smoothing) == (
        "adam",
        "step",
        0.0,
        0.0,
    )
    assert adversarial.milestones == (0.5, 0.75, 0.9)
    assert (adversarial.projection, adversarial.orthogonality) == (0, 0.0)


def test_epochs_take_the_place_of_steps():
    assert make_recipe("paper-cifar", epochs=2).steps is None
    assert make_recipe("paper-cifar", epochs=2).epochs == 2.0
    assert make_recipe("paper-cifar", lr=0.5).steps == 42_500
    assert make_recipe("paper-cifar", epochs=2, steps=5).steps == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": -1.0}, r"lr=-1.0 must be > 0"),
        ({"lr": "fast"}, r"lr='fast' is no number"),
        ({"batch": 0}, r"batch=0 must be ≥ 1"),
        ({"batch": 1.5}, r"batch=1.5 must be int"),
        ({"compile": 1}, r"compile=1 must be bool"),
        ({"batch": True}, r"batch=True must be int"),
        ({"steps": 0}, r"steps=0 must be ≥ 1"),
        ({"optimizer": "sdg"}, r"unknown optimizer 'sdg'. Did you mean 'sgd'"),
        ({"precision": "bf61"}, r"unknown precision 'bf61'. Did you mean 'bf16'"),
        ({"precision": "bfloat16"}, r"unknown precision 'bfloat16'. Did you mean 'bf16'"),
        ({"precision": "float16"}, r"unknown precision 'float16'. Did you mean 'fp16'"),
        ({"precision": "float_32"}, r"unknown precision 'float_32'. Did you mean 'float32'"),
        ({"schedule": "step", "milestones": (0.5, 0.2)}, r"milestones=\(0.5, 0.2\) must be rising fractions"),
        ({"schedule": "step", "milestones": (5.0,)}, r"must be rising fractions between 0 and 1"),
        ({"label_smoothing": 1.0}, r"label_smoothing=1.0 must be ≥ 0 and < 1"),
        ({"ema": 1.0}, r"ema=1.0 must be > 0 and < 1"),
        ({"clip": 0.0}, r"clip=0.0 must be > 0"),
        ({"magnitude": None, "weighting": "linear"}, r"weighting='linear' is for decoupled layers"),
        (
            {"weighting": "linear", "projection": 10},
            r"projection=10 is for unweighted kernels; with weighting='linear' it must be 0",
        ),
        ({"weighting": "joint", "weighted_gradients": True}, r"weighted_gradients=True is for unweighted kernels"),
        ({"milestones": (0.5,)}, r"milestones=\(0.5,\) are for schedule='step', not 'constant'"),
        ({"schedule": "step"}, r"schedule='step' needs milestones"),
        ({"milestones": ("a",)}, r"milestones=\('a',\) must be numbers"),
        ({"plain_kernels": "projected"}, r"plain_kernels='projected' needs projection > 0"),
        ({"loss": "floor"}, r"unknown loss 'floor'. Did you mean 'floored'"),
        ({"nesterov": True}, r"nesterov=True is for optimizer='sgd'"),
        ({"magnitude": None, "radius": "2"}, r"radius='2' is for decoupled layers"),
        ({"seed": 2**32}, r"seed=4294967296 must be ≥ 0 and <"),
        ({"image_size": 4}, r"image_size=4 must be ≥ 8"),
        ({"adversarial": "fgms"}, r"unknown adversarial 'fgms'. Did you mean 'fgsm'"),
        ({"adversarial_eps": 8.0}, r"adversarial_eps=8.0 must be ≥ 0 and ≤ 1"),
        ({"data": "imagefolder:"}, r"data='imagefolder:' has no path; possible: imagefolder:PATH, imagefolder:\. for"),
        ({"learning_rate": 1.0}, r"unknown recipe field 'learning_rate'"),
    ],
)
def test_errors(values, message):
    with pytest.raises(ValueError, match=message):
        change(Recipe(), **values)


def test_unknown_files(tmp_path):
    with pytest.raises(ValueError, match=r"unknown recipe 'paper-cifr'. Did you mean 'paper-cifar'"):
        make_recipe("paper-cifr")
    path = tmp_path / "recipe.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"recipe.json is not a recipe"):
        read_recipe(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"it holds list, expected an object"):
        read_recipe(path)
    path.write_text(json.dumps({"lr": 0.1, "rate": 3}))
    with pytest.raises(ValueError, match=r"unknown recipe field 'rate'"):
        read_recipe(path)


def test_every_field_is_explained():
    assert all(field.metadata["help"].endswith(".") for field in dataclasses.fields(Recipe))


def test_onecycle():
    factors = [Schedule(Recipe(schedule="onecycle", warmup=0.25), 100).factor(step) for step in range(100)]
    assert max(factors) <= 1.0
    assert factors.index(max(factors)) in (24, 25)
    assert factors[0] == 1 / 25
    assert 0.0 < factors[-1] < 0.02
    assert factors[:24] == sorted(factors[:24])
    assert factors[25:] == sorted(factors[25:], reverse=True)
    for warmup, steps in ((0.0, 1), (0.0, 7), (0.99, 1), (0.99, 2)):
        assert 0.0 < Schedule(Recipe(schedule="onecycle", warmup=warmup), steps).factor(0) <= 1.0


def test_plateau():
    """On the training error, which must fall by a hundredth to count as lower."""
    schedule = Schedule(Recipe(schedule="plateau", patience=2), 100)
    factors = []
    for error in (30.0, 20.0, 19.9, 25.0, 10.0, 10.0, 9.95, 9.93, 10.0):
        schedule.epoch_ended(error)
        factors.append(round(math.log10(schedule.factor(0))))
    assert factors == [0, 0, 0, -1, -1, -1, -2, -2, -3]
    other = Schedule(Recipe(schedule="plateau", patience=2), 100)
    other.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert vars(other) == vars(schedule)


def test_another_schedule_drops_the_recipes_milestones():
    assert make_recipe("paper-cifar", schedule="onecycle").milestones == ()
    assert make_recipe("paper-cifar", lr=0.1).milestones == make_recipe("paper-cifar").milestones != ()
    with pytest.raises(ValueError, match="milestones"):
        make_recipe("paper-cifar", schedule="onecycle", milestones=(0.5,))
