"""Attacks: closed forms on linear classifiers, the ε-ball, other packages' results, the check-up, bad input."""

import copy
import inspect
import math
import sys

import pytest
import torch
from torch import nn

import dcnet
from dcnet import robustness
from dcnet.data import load_data
from dcnet.robustness import bim, check_up, deepfool, evaluate, fgsm, parse_attack, pgd, square
from dcnet.robustness.evaluate import as_typed, run_attack

EPS = 0.05


def identity(model, images, labels, *_, **__):
    """The attack that does nothing: the tests must notice it."""
    return images


@pytest.fixture
def linear():
    """Two classes, logits 0 and ⟨w, x⟩ + b, and images well inside [0, 1]."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).double().eval()
    with torch.no_grad():
        model[1].weight[0].zero_()
        model[1].bias[0].zero_()
    images = 0.3 + 0.4 * torch.rand(40, 3, 2, 2, dtype=torch.float64)
    with torch.no_grad():
        labels = model(images).argmax(1)
    return model, images, labels, model[1].weight[1].detach().reshape(1, 3, 2, 2), model[1].bias[1].detach()


def value(linear, images):
    """⟨w, x⟩ + b, away from the label: what an attack raises."""
    model, _, labels, _, _ = linear
    with torch.no_grad():
        return model(images)[:, 1] * torch.where(labels == 1, -1.0, 1.0)


@pytest.mark.parametrize(("attack", "optimal"), [(identity, False), (fgsm, True), (bim, True), (pgd, True)])
def test_linf_optimum(linear, attack, optimal):
    """On a linear classifier the best change is ε·sign(w): the value rises by ε·‖w‖₁."""
    model, images, labels, w, _ = linear
    options = {} if attack in (identity, fgsm) else {"step": 0.01}
    if attack is pgd:  # which stops at the first success: ask for one that cannot be had
        keep = value(linear, images).abs() > EPS * w.abs().sum() * 1.001
        images, labels = images[keep], labels[keep]
        linear = (model, images, labels, *linear[3:])
        assert len(labels) > 3
    found = attack(model, images, labels, EPS, **options)
    best = value(linear, images) + EPS * w.abs().sum()
    assert torch.allclose(value(linear, found), best, atol=1e-9) == optimal


@pytest.mark.parametrize("attack", [identity, pgd])
def test_l2_optimum(linear, attack):
    """In ℓ2 it is ε·w/‖w‖: the value rises by ε·‖w‖."""
    model, images, labels, w, _ = linear
    keep = value(linear, images).abs() > EPS * w.norm() * 1.001
    images, labels = images[keep], labels[keep]
    found = attack(model, images, labels, EPS, norm="l2", iterations=40, step=EPS)
    best = value((model, images, labels, w, None), images) + EPS * w.norm()
    assert torch.allclose(value((model, images, labels, w, None), found), best, rtol=1e-4, atol=1e-5) == (attack is pgd)


@pytest.mark.parametrize(("norm", "dual"), [("l2", 2), ("linf", 1)])
def test_deepfool_finds_the_boundary(linear, norm, dual):
    model, images, labels, w, _ = linear
    found, sizes = deepfool(model, images, labels, norm=norm)
    distance = value(linear, images).abs() / w.flatten().norm(p=dual)
    assert torch.allclose(sizes, 1.02 * distance, rtol=1e-2, atol=2e-4)
    with torch.no_grad():
        assert (model(found).argmax(1) != labels).all()
    change = (found - images).flatten(1)
    assert torch.allclose(change.norm(dim=1) if norm == "l2" else change.abs().amax(1), sizes)


@pytest.mark.parametrize(("norm", "dual"), [("l2", 2), ("linf", 1)])
def test_deepfool_takes_the_nearest_of_several_boundaries(norm, dual):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).double().eval()
    images = 0.3 + 0.4 * torch.rand(40, 3, 2, 2, dtype=torch.float64)
    with torch.no_grad():
        logits = model(images)
    labels = logits.argmax(1)
    gaps = logits.gather(1, labels[:, None]) - logits
    slopes = (model[1].weight[None] - model[1].weight[labels][:, None]).norm(p=dual, dim=2)
    distances = torch.where(gaps > 0.0, gaps / slopes, float("inf")).amin(1)
    keep = distances < 0.1  # reached within [0, 1]
    assert keep.sum() > 10
    _, sizes = deepfool(model, images, labels, norm=norm)
    assert torch.allclose(sizes[keep], 1.02 * distances[keep], rtol=1e-2, atol=2e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A plain network on digits, and its test images."""
    recipe = dcnet.make_recipe("demo", magnitude=None, epochs=4, norm="none", lr=1e-3)
    run = dcnet.train(recipe, tmp_path_factory.mktemp("run") / "plain", device="cpu", quiet=True)
    test = load_data("digits").test
    assert run.accuracy > 90.0
    return run.model, test.images[:200] / 255.0, test.labels[:200]


def accuracy(model, images, labels):
    with torch.no_grad():
        return 100.0 * int((model(images).argmax(1) == labels).sum()) / len(labels)


# Every attack that is registered, AutoAttack only in `make slow`: it takes minutes, and is another package's.
EVERY = [name if name != "auto" else pytest.param(name, marks=pytest.mark.slow) for name in robustness.ATTACKS]
QUICK = {"iterations": 5, "queries": 50}
ENOUGH = {"iterations": 30, "queries": 100}


def parameters_of(name):
    return inspect.signature(robustness.ATTACKS[name]).parameters


def attacked(name, model, images, labels, eps, **options):
    """The images that a registered attack makes, in few steps."""
    if name == "auto":
        pytest.importorskip("pyautoattack", reason="AutoAttack is not installed")
    known = {key: value for key, value in (QUICK | options).items() if key in parameters_of(name)}
    attack = robustness.Attack(name, known)
    return run_attack(model, images, labels, attack, eps, torch.Generator().manual_seed(0))[0]


def assert_fools(name, model, images, labels):
    left = accuracy(model, attacked(name, model, images, labels, 0.3, **ENOUGH), labels)
    assert left < accuracy(model, images, labels) - 20.0, f"{name} leaves {left:.1f}%"


@pytest.mark.parametrize("name", EVERY)
def test_every_attack_fools_the_network(trained, name):
    assert_fools(name, trained[0], trained[1][:30], trained[2][:30])


def test_an_attack_that_does_nothing_is_noticed(trained, monkeypatch):
    monkeypatch.setitem(robustness.ATTACKS, "identity", identity)
    with pytest.raises(AssertionError, match="identity leaves 9"):
        assert_fools("identity", trained[0], trained[1][:30], trained[2][:30])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("eps", [0.0, 8 / 255, 0.3, 1.0])
def test_the_ball(trained, name, norm, eps):
    """Within [0, 1], and within ε of attacks that have one, to one ulp of float32."""
    model, images, labels = (trained[0], trained[1][:30], trained[2][:30])
    if norm == "l2" and "norm" not in parameters_of(name):
        pytest.skip(f"{name} knows only ℓ∞")
    found = attacked(name, model, images, labels, eps, norm=norm)
    assert found.min() >= 0.0
    assert found.max() <= 1.0
    assert not found.requires_grad
    if "eps" in parameters_of(name):
        change = (found.double() - images.double()).flatten(1)
        size = change.abs().amax(1) if norm == "linf" else change.norm(dim=1)
        assert size.max() <= eps + 1.2e-7


def test_attacks_are_ordered(trained):
    """Stronger attacks leave less, targeted ones reach their target less often, and nothing helps at ε = 0."""
    model, images, labels = (trained[0], trained[1][:80], trained[2][:80])
    clean = accuracy(model, images, labels)
    left = {
        "fgsm": accuracy(model, fgsm(model, images, labels, EPS), labels),
        "bim": accuracy(model, bim(model, images, labels, EPS, EPS / 4), labels),
        "pgd": accuracy(model, pgd(model, images, labels, EPS, restarts=2), labels),
    }
    assert clean > left["fgsm"] >= left["bim"] - 1.0 >= left["pgd"] - 2.0
    assert accuracy(model, pgd(model, images, labels, 0.0), labels) == clean
    target = (labels + 1) % 10
    found = pgd(model, images, labels, 0.2, target=target)
    hit = 100.0 * float((model(found).argmax(1) == target).float().mean())
    assert hit > 60.0
    assert accuracy(model, fgsm(model, images, labels, 0.2, target=target), target) > accuracy(model, images, target)
    margin = accuracy(model, pgd(model, images, labels, EPS, loss="margin"), labels)
    assert abs(margin - left["pgd"]) < 8.0
    assert accuracy(model, square(model, images, labels, EPS, queries=150), labels) < clean


def test_random_starts_are_reproducible(trained):
    model, images, labels = trained
    runs = [
        pgd(model, images[:20], labels[:20], EPS, iterations=2, generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.slow
def test_agreement_with_foolbox(trained):
    foolbox = pytest.importorskip("foolbox", reason="the comparison needs foolbox")
    model, images, labels = (trained[0], trained[1][:100], trained[2][:100])
    theirs = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    left = accuracy(model, fgsm(model, images, labels, EPS), labels)
    _, _, success = foolbox.attacks.FGSM()(theirs, images, labels, epsilons=EPS)
    assert left == pytest.approx(100.0 * float((~success).float().mean()), abs=1.0)
    left = accuracy(model, bim(model, images, labels, EPS, EPS / 10, 20), labels)
    attack = foolbox.attacks.LinfBasicIterativeAttack(abs_stepsize=EPS / 10, steps=20, random_start=False)
    _, _, success = attack(theirs, images, labels, epsilons=EPS)
    assert left == pytest.approx(100.0 * float((~success).float().mean()), abs=1.0)
    for norm, name in (("l2", "L2DeepFoolAttack"), ("linf", "LinfDeepFoolAttack")):
        _, sizes = deepfool(model, images, labels, norm=norm)
        found, _, _ = getattr(foolbox.attacks, name)(steps=50)(theirs, images, labels, epsilons=None)
        change = (found - images).flatten(1)
        other = change.norm(dim=1) if norm == "l2" else change.abs().amax(1)
        assert float(sizes.median()) == pytest.approx(float(other.median()), rel=0.05)


def test_autoattack_does_not_suspect_a_new_network(monkeypatch):
    """It warns of a dynamic defense where a forward pass calls functions named grad or backward."""
    checks = pytest.importorskip("pyautoattack.checks", reason="AutoAttack is not installed")
    model = dcnet.create_model("cnn9_narrow", in_channels=1, input_size=8, magnitude="seg")
    found = type("Log", (), {"messages": [], "warning": lambda self, text: self.messages.append(text)})()

    def evaluate(self, images, labels, batch_size):
        checks.check_dynamic(self.model, images[:batch_size], logger=found)
        return images, labels

    monkeypatch.setattr("pyautoattack.AutoAttack.run_standard_evaluation", evaluate)
    monkeypatch.setattr(checks, "funcs", dict.fromkeys(checks.funcs, 0))
    images = torch.rand(3, 1, 8, 8)
    robustness.auto(model.eval(), images, torch.zeros(3, dtype=torch.long), EPS)
    assert not found.messages


@pytest.mark.slow
def test_autoattack_finds_little_more(trained):
    pytest.importorskip("pyautoattack", reason="AutoAttack is not installed")
    model, images, labels = (trained[0], trained[1][:60], trained[2][:60])
    ours = accuracy(model, pgd(model, images, labels, EPS, iterations=50, restarts=3), labels)
    theirs = accuracy(model, robustness.auto(model, images, labels, EPS), labels)
    assert theirs <= ours + 0.5
    assert ours - theirs < 5.0


def test_attacks_in_inference_mode(trained):
    """As outside of it, also on images and labels that were made inside."""
    model, images, labels = trained[0], trained[1][:20], trained[2][:20]

    def everything(images, labels):
        generator = torch.Generator().manual_seed(0)
        for name, attack in robustness.ATTACKS.items():
            if name != "auto":
                options = {"generator": generator} if name in ("pgd", "square") else {}
                found = attack(model, images, labels, **options)
                yield from found if isinstance(found, tuple) else (found,)
        yield pgd(model, images, labels, EPS, target=(labels + 1) % 10, norm="l2", loss="margin", generator=generator)

    def record(images, labels):
        found = check_up(model, images, labels, EPS, iterations=2, queries=5)
        return found, [one["accuracy"] for one in evaluate(model, images, labels, "fgsm,bim", EPS)["attacks"]]

    expected = [tensor.clone() for tensor in everything(images, labels)]
    for mode in (True, False):
        with torch.inference_mode():
            inside = images.clone(), labels.clone()
        with torch.inference_mode(mode):
            assert all(torch.equal(a, b) for a, b in zip(everything(images, labels), expected, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(everything(*inside), expected, strict=True))
            assert record(*inside) == record(images, labels)
    with torch.inference_mode():
        copied = copy.deepcopy(model)
        for attack in (fgsm, deepfool):
            with pytest.raises(ValueError, match=r"was made inside torch.inference_mode, .* attack copy.deepcopy"):
                attack(copied, images, labels)
    fgsm(copy.deepcopy(copied), images, labels)  # as the message says


def test_autoattack_in_inference_mode(monkeypatch):
    pytest.importorskip("pyautoattack", reason="AutoAttack is not installed")

    def evaluate(self, images, labels, batch_size):
        images = images.requires_grad_()
        (slope,) = torch.autograd.grad(nn.functional.cross_entropy(self.model(images), labels), images)
        return images + 0.0 * slope, labels

    monkeypatch.setattr("pyautoattack.AutoAttack.run_standard_evaluation", evaluate)
    model = dcnet.create_model("cnn9_narrow", in_channels=1, input_size=8).eval()
    with torch.inference_mode():
        images, labels = torch.rand(3, 1, 8, 8), torch.zeros(3, dtype=torch.long)
        assert torch.equal(robustness.auto(model, images, labels, EPS), images)


def test_a_missing_package_is_said_before_any_attack(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    asked = []
    model = nn.Flatten()
    model.register_forward_pre_hook(lambda module, images: asked.append(images))
    images, labels = torch.rand(3, 1, 2, 2), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ImportError, match=r"AutoAttack is not installed: pip install 'dcnet\[attacks\]'"):
        evaluate(model.eval(), images, labels, "fgsm,pgd,auto")
    assert not asked


class Saturated(nn.Module):
    """Logits so large that the cross-entropy has no slope."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return 1e4 * self.model(x)


class Blocked(nn.Module):
    """Rounds its input: the gradient is zero nearly everywhere."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model((x * 64).round() / 64)


class Noisy(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x) + 0.01 * torch.randn(len(x), 10)


def test_check_up(trained):
    model, images, labels = (trained[0], trained[1][:30], trained[2][:30])
    options = {"eps": EPS, "iterations": 5, "queries": 100}
    plain = check_up(model, images, labels, **options)
    assert not plain["masked"], plain["verdict"]
    assert plain["eps 0"] == plain["clean"]
    assert plain["zero gradient"] == 0.0
    assert plain["curve"][-1]["accuracy"] == 0.0
    assert f"the {plain['pgd']:.1f}% under PGD can be believed" in plain["verdict"]
    one_step = plain["steps"][0]["accuracy"]
    assert (f"leaves {one_step:.1f}%, which says nothing" in plain["verdict"]) == (one_step > plain["pgd"] + 10.0)
    for masked, failing in (
        (Saturated(model), "zero gradients"),
        (Noisy(model), "randomness"),
        (Blocked(model), "zero gradients"),
    ):
        found = check_up(masked.eval(), images, labels, **options)
        failed = {test["test"] for test in found["tests"] if not test["passed"]}
        assert found["masked"]
        assert failing in failed
        assert found["verdict"].startswith("do not believe")
    assert {"black box", "growing ε"} & failed  # of the blocked one


class Shifted(nn.Module):
    """The images less a number."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x - self.by


def test_evaluate(trained):
    model, images, labels = trained
    seen = []
    result = evaluate(
        model,
        images,
        labels,
        "fgsm,bim:iterations=5,deepfool:norm=linf",
        EPS,
        batch=64,
        progress=lambda *a: seen.append(a),
    )
    assert result["clean"] == accuracy(model, images, labels)
    first, second, third = result["attacks"]
    assert (
        first["accuracy"] == accuracy(model, fgsm(model, images, labels, EPS), labels)
        or first["accuracy"] <= result["clean"]
    )
    assert second["attacked"] == round(first["accuracy"] * len(labels) / 100)
    assert second["accuracy"] <= first["accuracy"]
    assert result["worst"] == second["accuracy"]
    assert third["sizes"] == sorted(third["sizes"])
    assert seen[-1][1:] == (third["attacked"], third["attacked"])
    apart = evaluate(model, images, labels, ["fgsm", "bim:iterations=5"], EPS, cumulative=False)
    assert apart["attacks"][1]["attacked"] == round(result["clean"] * len(labels) / 100)
    assert "worst" not in apart
    other = dcnet.create_model("cnn9_narrow", magnitude=None, in_channels=1, input_size=8).eval()
    transfer = evaluate(model, images, labels, "fgsm", EPS, source=other)
    assert transfer["transfer"]
    assert transfer["attacks"][0]["accuracy"] > first["accuracy"]  # an untrained network knows little
    assert third["attacked"] == round(
        result["clean"] * len(labels) / 100
    )  # all that are right, survivors of BIM or not


def test_predicted_labels_flatter():
    """Of two classes, an attack on a wrong prediction ends at the true one."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0] * 4, [-1.0] * 4]))
    images, labels = torch.full((10, 1, 2, 2), 0.5), torch.tensor([0] * 4 + [1] * 6)  # all are taken for 0
    model = nn.Sequential(Shifted(0.5 - 0.01), model).eval()
    for predicted, accuracy_left, attacked in ((False, 0.0, 4), (True, 60.0, 10)):
        result = evaluate(model, images, labels, "fgsm", 0.1, cumulative=False, predicted=predicted)
        assert result["clean"] == 40.0
        assert result["labels"] == ("predicted" if predicted else "true")
        assert result["attacks"][0]["attacked"] == attacked
        assert result["attacks"][0]["accuracy"] == accuracy_left


def test_parsing():
    assert parse_attack("pgd:steps=50:restarts=5").parameters == {"iterations": 50, "restarts": 5}
    assert parse_attack("bim:step=2/255").parameters["step"] == pytest.approx(2 / 255)
    assert parse_attack("pgd:random_start=false:norm=l2").parameters == {"random_start": False, "norm": "l2"}
    for typed in ("fgsm", "pgd:steps=50:restarts=5", "deepfool:steps=5:norm=linf", "bim:step=0.1:steps=2"):
        assert as_typed(str(parse_attack(typed))) == typed
        assert as_typed(typed) == typed
    for text, message in [
        ("pdg", r"unknown attack 'pdg'. Did you mean 'pgd'\? Known: fgsm, bim"),
        ("pgd:stps=5", r"'stps=5' is no parameter of pgd. Possible: step=…, steps=…"),
        ("pgd:steps=five", r"steps=five must be a whole number"),
        ("pgd:random_start=maybe", r"must be true or false"),
        ("fgsm:eps=1", r"'eps=1' is no parameter of fgsm. Possible: none"),
        ("bim:step=1/0", r"step=1/0 must be a number"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_attack(text)


def test_bad_input(trained):
    model, images, labels = (trained[0], trained[1][:5], trained[2][:5])
    for attack in (robustness.ATTACKS[name] for name in robustness.ATTACKS if "eps" in parameters_of(name)):
        for eps in (-0.1, math.nan, math.inf, "8/255", True):
            with pytest.raises(ValueError, match=r"eps must be a finite number ≥ 0"):
                attack(model, images, labels, eps)
    for changed, message in [
        (
            (model, images * 255.0, labels),
            r"images must lie in \[0, 1\], got values from 0 to 255; normalization belongs into the model",
        ),
        ((model, images - 1.0, labels), r"got values from -1 to"),
        ((model, images * math.nan, labels), r"images must lie in \[0, 1\]"),
        (
            (model, (images * 255).byte(), labels),
            r"images must be floating-point .* of torch.uint8; divide bytes by 255",
        ),
        ((model, images, labels[:4]), r"one for each of the 5 images"),
        ((model, images, labels.float()), r"labels must be whole numbers"),
        ((model, images, labels + 10), r"labels go from .* but the model knows the classes 0 to 9"),
        ((nn.Sequential(model, nn.Softmax(1)).eval(), images, labels), r"the model gives probabilities"),
        ((nn.Flatten(0), images, labels), r"the model must give logits \(N, classes\)|training mode"),
        ((model, images[:0], labels[:0]), r"no images"),
    ]:
        with pytest.raises(ValueError, match=message):
            fgsm(*changed)
    training = dcnet.create_model("cnn9_narrow", in_channels=1, input_size=8)
    with pytest.raises(ValueError, match=r"the model is in training mode .*; call model.eval\(\) first"):
        fgsm(training, images, labels)
    training.eval().stages[0].conv.train()  # a single statistics layer is enough
    with pytest.raises(ValueError, match=r"in training mode \('stages.0.conv'\)"):
        evaluate(training, images, labels)
    for call, message in [
        (lambda: pgd(model, images, labels, norm="l1"), r"unknown norm 'l1'; possible: linf, l2"),
        (lambda: pgd(model, images, labels, loss="mse"), r"unknown loss 'mse'"),
        (lambda: pgd(model, images, labels, iterations=0), r"iterations must be a whole number ≥ 1, got 0"),
        (lambda: pgd(model, images, labels, restarts=0), r"restarts must be"),
        (lambda: bim(model, images, labels, step=-1.0), r"step must be a number ≥ 0"),
        (lambda: deepfool(model, images, labels, norm="l0"), r"unknown norm 'l0'"),
        (lambda: fgsm(model, images, labels, target=labels), r"target must differ"),
        (lambda: square(model, images, labels, queries=0), r"queries must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_the_model_is_left_alone(trained):
    model, images, labels = trained
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.zero_grad()  # other tests' attacks are not all so careful
    for name in robustness.ATTACKS:
        if name != "auto":  # which is another package's
            attacked(name, model, images[:20], labels[:20], EPS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class NotFinite(nn.Module):
    """A model that answers something else for images with a pixel above a threshold."""

    def __init__(self, model, above, value):
        super().__init__()
        self.model, self.above, self.value = model, above, value

    def forward(self, x):
        odd = x.flatten(1).amax(1, keepdim=True) > self.above
        return torch.where(odd, self.value, self.model(x))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_model_without_finite_logits_is_refused(linear, value):
    model, images, labels, *_ = linear
    for attack in ("none", *robustness.ATTACKS):
        if attack == "auto":
            pytest.importorskip("pyautoattack")
        # on all images, on a single one beyond the first sixteen
        spiked = images.clone()
        spiked[30, 0, 0, 0] = 0.95
        message = rf"the model \(NotFinite\) gives logits that are not finite for .*{value}"
        for above, given in ((0.0, images), (0.9, spiked)):
            broken = NotFinite(model, above, value).eval()
            with pytest.raises(ValueError, match=message):
                evaluate(broken, given, labels, attack if attack != "none" else ())
        if attack != "none":
            with pytest.raises(ValueError, match=message):
                robustness.ATTACKS[attack](NotFinite(model, 0.0, value).eval(), images, labels)


@pytest.mark.parametrize("attack", ["fgsm", "bim", "pgd", "deepfool", "square", "deepfool:norm=linf"])
def test_a_model_that_breaks_under_attack_is_refused(linear, attack):
    """Finite on every image, NaN where an attack goes: argmax of NaN is class 0, which may be the label."""
    model, images, labels, *_ = linear
    model = nn.Sequential(NotFinite(model, float(images.max()) + 1e-6, math.nan)).eval()
    images = images.clone()
    images[:, 0] = images.max()  # any way up leads out
    with torch.no_grad():
        labels = model(images).argmax(1)
        assert model(images).isfinite().all()
    with pytest.raises(ValueError, match=r"the model \(Sequential\) gives logits that are not finite for"):
        evaluate(model, images, labels, attack, 0.4)


def test_gradients_that_are_not_finite(linear):
    model, images, labels, *_ = linear

    class Rooted(nn.Module):
        def forward(self, x):
            return model(x) + 0.0 * (x - x.detach()).abs().sqrt().sum((1, 2, 3))[:, None]

    for attack in (fgsm, bim, pgd, deepfool):
        with pytest.raises(
            ValueError, match=r"\(Rooted\) gives gradients in the images that are not finite for 40 of 40 images"
        ):
            attack(Rooted().eval(), images, labels)


class Scaled(nn.Module):
    def __init__(self, model, by):
        super().__init__()
        self.model, self.by = model, by

    def forward(self, x):
        return self.by * self.model(x)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_deepfool_does_not_depend_on_the_scale_of_logits(trained, norm):
    model, images, labels = trained[0], trained[1][:20], trained[2][:20]
    _, expected = deepfool(model, images, labels, norm=norm)
    assert expected.isfinite().all()
    for scale in (1e-6, 1e-3, 1e4, 1e6):
        _, sizes = deepfool(Scaled(model, scale).eval(), images, labels, norm=norm)
        torch.testing.assert_close(sizes, expected, rtol=0.02, atol=2e-4)


class Constant(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.logits = nn.Parameter(torch.arange(float(classes)))

    def forward(self, x):
        return self.logits.expand(len(x), -1)


def test_models_that_know_one_answer():
    images, labels = torch.rand(4, 1, 3, 3), torch.full((4,), 2)
    with pytest.raises(ValueError, match=r"the model \(Constant\) gives the same logits for all 4 images"):
        deepfool(Constant(3).eval(), images, labels)
    for attack in robustness.ATTACKS.values():
        with pytest.raises(ValueError, match=r"the model \(Constant\) knows 1 class; .* attacks need two"):
            attack(Constant(1).eval(), images, torch.zeros(4, dtype=torch.int64))
    _, sizes = deepfool(Constant(3).eval(), images[:1], labels[:1])  # one image does not tell
    assert sizes.tolist() == [math.inf]
