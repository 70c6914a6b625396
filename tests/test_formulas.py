"""The formulas themselves: the paper's values, their slopes, and what may enter the catalogue."""

import math

import numpy as np
import pytest
import torch

import dcnet
from dcnet import at_least, learnable, m, positive
from dcnet.formulas import choose

# The paper's own words, in θ and numpy, written here once more on purpose.
PAPER_MAGNITUDES = {
    "sphere": lambda n, rho: np.ones_like(n),
    "ball": lambda n, rho: np.minimum(n, rho) / rho,
    "tanh": lambda n, rho: np.tanh(n / rho),
    "linear": lambda n, rho: n,
    "seg": lambda n, rho: np.where(n <= rho, n, 0.5 * n + 0.5 * rho),
    "log": lambda n, rho: np.log(1 + n),
    "mix": lambda n, rho: n + np.log(1 + n),
}


def paper_sigmoid(theta, k=0.3):
    e = np.exp(-np.pi / (2 * k))
    moving = np.exp(theta / k - np.pi / (2 * k))
    return (1 + e) / (1 - e) * (1 - moving) / (1 + moving)


PAPER_ANGULARS = {
    "cosine": np.cos,
    "linear": lambda theta: 1 - 2 * theta / np.pi,
    "sigmoid": paper_sigmoid,
    "square_cosine": lambda theta: np.sign(np.cos(theta)) * np.cos(theta) ** 2,
    "relu_cosine": lambda theta: np.maximum(0, np.cos(theta)),
    "power_cosine": lambda theta: np.sign(np.cos(theta)) * np.abs(np.cos(theta)) ** 2,
}


def test_the_catalogues_are_the_papers():
    """All of the paper's, first and in its order; others may follow."""
    assert list(dcnet.magnitudes())[: len(PAPER_MAGNITUDES)] == list(PAPER_MAGNITUDES)
    assert list(dcnet.angulars())[: len(PAPER_ANGULARS)] == list(PAPER_ANGULARS)
    papers = [dcnet.magnitudes()[name] for name in PAPER_MAGNITUDES]
    assert [formula.name for formula in papers if formula.bounded] == ["sphere", "ball", "tanh"]
    assert [formula.name for formula in papers if formula.has_radius] == ["ball", "tanh", "seg"]
    with pytest.raises(TypeError):
        dcnet.magnitudes()["new"] = None


@pytest.mark.parametrize("name", PAPER_MAGNITUDES)
def test_magnitude_values(name):
    n = torch.linspace(0.01, 6, 200, dtype=torch.float64)
    for rho in (0.3, 1.0, 2.5):
        value = torch.as_tensor(choose("magnitude", name)(n, torch.full_like(n, rho))[0]).double().expand_as(n)
        np.testing.assert_allclose(value.numpy(), PAPER_MAGNITUDES[name](n.numpy(), rho), rtol=1e-12)


@pytest.mark.parametrize("name", PAPER_ANGULARS)
def test_angular_values(name):
    theta = torch.linspace(0.001, math.pi - 0.001, 400, dtype=torch.float64)
    value = choose("angular", name)(theta.cos())[0]
    np.testing.assert_allclose(value.numpy(), PAPER_ANGULARS[name](theta.numpy()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [0.01, 0.05, 0.3, 0.7, 2.0, 9.0])
def test_exact_at_both_ends(dtype, k):
    for spec in [*PAPER_ANGULARS, f"sigmoid:k={k}", "power_cosine:p=1", "power_cosine:p=3.5"]:
        value = choose("angular", spec)(torch.tensor([-1.0, 0.0, 1.0], dtype=dtype))[0]
        assert value.tolist() == ([0.0, 0.0, 1.0] if spec == "relu_cosine" else [-1.0, 0.0, 1.0]), spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slopes_are_capped(dtype):
    c = torch.tensor([-1.0, 1.0], dtype=dtype)
    assert choose("angular", "linear")(c)[1].tolist() == pytest.approx([2e3 / math.pi] * 2)
    leaf = c.clone().requires_grad_()
    choose("angular", "linear")(leaf)[0].sum().backward()
    assert leaf.grad.tolist() == pytest.approx([2e3 / math.pi] * 2)


def test_power_cosine_slope_at_zero():
    for p in (1.0, 1.2, 2.0, 3.0):
        _, slope, in_p = choose("angular", f"power_cosine:p={p}")(torch.zeros(1))
        assert float(slope) == pytest.approx(1.0 if p == 1.0 else 0.0, abs=1e-5)
        assert float(in_p) == 0.0


def test_power_cosine_learns_its_exponent():
    layer = dcnet.DecoupledConv2d(3, 4, 3, magnitude="linear", angular="power_cosine:p=learned").double()
    assert layer.learned_parameters["p"].tolist() == [2.0] * 4
    x = torch.randn(8, 3, 6, 6, dtype=torch.float64)
    fixed = dcnet.DecoupledConv2d(3, 4, 3, magnitude="linear", angular="power_cosine:p=3").double()
    fixed.load_state_dict(layer.state_dict(), strict=False)
    before = float((layer(x) - fixed(x)).detach().square().mean())
    optimizer = torch.optim.Adam([layer.raw_p], lr=0.1)
    for _ in range(120):
        optimizer.zero_grad()
        (layer(x) - fixed(x).detach()).square().mean().backward()
        optimizer.step()
    assert layer.learned_parameters["p"].tolist() == pytest.approx([3.0] * 4, abs=0.05)
    assert float((layer(x) - fixed(x)).detach().square().mean()) < 1e-3 * before
    with torch.no_grad():
        layer.raw_p.fill_(-0.0)
        assert layer.learned_parameters["p"].tolist() == [1.0] * 4  # never below it
    # no patch is seen, no slope is infinite
    layer(torch.zeros(1, 3, 6, 6, dtype=torch.float64)).sum().backward()
    assert torch.equal(layer.raw_p.grad.isfinite(), torch.ones(4, dtype=torch.bool))


def test_what_learnable_takes():
    assert str(learnable(start=2.0, floor=1.0, least=1.0)) == "a number ≥ 1"
    assert str(learnable(start=2.0, floor=1.0)) == "a number > 0"
    for options, message in [
        ({"start": 2.0, "floor": -1.0}, r"learnable\(floor=-1.0\): the floor must not be negative"),
        ({"start": 1.0, "floor": 1.0}, "the start must lie above the floor"),
        ({"start": 2.0, "floor": 0.5, "least": 1.0}, "the floor must not lie below the least"),
    ]:
        with pytest.raises(ValueError, match=message):
            learnable(**options)


def test_sharpened_cosine_similarity(catalogue):
    """sign(⟨w, x⟩)·(|⟨w, x⟩|/((‖w‖ + q)(‖x‖ + q)))^p has the angular function's p, and as q a magnitude's radius."""

    @dcnet.magnitude(bounded=True)
    def shrunk(n, rho, p: at_least(1.0) = 1.0):
        """(‖x‖/(‖x‖ + ρ))^p"""
        s = 1.0 / (n + rho)
        q = m.power(m.maximum(n * s, 1e-30), p)
        return q, p * q * rho * s / m.maximum(n, 1e-30), -p * q * s

    x, w = torch.randn(5, 12, dtype=torch.float64), torch.randn(7, 12, dtype=torch.float64)
    options = {"weighting": "separate", "radius": 0.3, "eps": 0.0}
    found = dcnet.decoupled_linear(x, w, magnitude="shrunk:p=2.5", angular="power_cosine:p=2.5", **options)
    dot = x @ w.T
    expected = dot.sign() * (dot.abs() / ((w.norm(dim=1) + 0.3) * (x.norm(dim=1, keepdim=True) + 0.3))) ** 2.5
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


def test_square_cosine_is_power_two():
    c = torch.linspace(-1, 1, 101, dtype=torch.float64)
    for a, b in zip(choose("angular", "square_cosine")(c), choose("angular", "power_cosine:p=2")(c)[:2], strict=True):
        torch.testing.assert_close(a, b)


def test_formulas_take_plain_numbers():
    assert choose("magnitude", "tanh")(1.0, 2.0)[0] == math.tanh(0.5)
    assert choose("angular", "sigmoid")(0.4)[0] == pytest.approx(paper_sigmoid(math.acos(0.4)))


def test_every_name_of_m_exists():
    assert all(callable(getattr(m, name)) for name in m.NAMES)


# -- a user's own ------------------------------------------------------------------------------------------------------


def test_a_users_own_formulas(catalogue):
    @dcnet.magnitude
    def rational(n, rho, alpha: positive = 1.0):
        """α·‖x‖/(‖x‖ + ρ)"""
        s = 1.0 / (n + rho)
        return alpha * n * s, alpha * rho * s * s, -alpha * n * s * s

    @dcnet.angular
    def blend(c, a: learnable(start=0.5, floor=0.01) = 0.3):
        """a·cos θ + (1 − a)·sign(cos θ)·cos²θ"""
        square = c * m.abs(c)
        return a * c + (1.0 - a) * square, a + (1.0 - a) * 2.0 * m.abs(c), c - square

    layer = dcnet.DecoupledConv2d(3, 4, 3, magnitude="rational:alpha=2", angular="blend:a=learned").double()
    assert set(layer.state_dict()) == {"weight", "raw_radius", "raw_a", "running_norm", "num_batches_tracked"}
    assert layer.learned_parameters["a"].tolist() == pytest.approx([0.5] * 4)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    reference = dcnet.DecoupledConv2d(
        3, 4, 3, magnitude="rational:alpha=2", angular="blend:a=learned", impl="reference"
    ).double()
    reference.load_state_dict(layer.state_dict())
    results = [torch.autograd.grad(net(x).sin().sum(), [x, *net.parameters()]) for net in (layer, reference)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert not dcnet.magnitudes()["rational"].bounded
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x))


def register(kind, source):
    """Registers the function the source defines, as in a user's own file."""
    namespace = {
        "m": m,
        "dcnet": dcnet,
        "math": math,
        "positive": positive,
        "at_least": at_least,
        "learnable": learnable,
        "torch": torch,
        "OFFSET": 1.0,
    }
    exec(source, namespace)
    return getattr(dcnet, kind)(namespace["f"])


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("magnitude", "def f(n): return n * n, n", r"slope in n is .* but its value changes at the rate"),
        ("magnitude", "def f(n, rho): return n / rho, 1.0 / rho, 0.0", "slope in rho"),
        # right for small norms only, or for large ones; one of those is what a network has
        ("magnitude", "def f(n): return m.minimum(n, 12.0), 1.0", r"slope in n is 1 at n=\d\d"),
        ("magnitude", "def f(n): return m.maximum(n, 0.04), 1.0", r"slope in n is 1 at n=0\.0"),
        ("angular", "def f(c, k: learnable(start=1.0, floor=0.1) = 1.0): return c * k, k, 2.0 * c", "slope in k"),
        ("angular", "def f(c): return c", "must return its value, then its slopes in cos θ"),
        ("magnitude", "def f(n, rho): return n / rho, 1.0 / rho", "3 results"),
        ("magnitude", "def f(n): return math.tanh(n), 1.0", "global name 'math'"),
        ("magnitude", "def f(n): return n + OFFSET, 1.0", "global name 'OFFSET'"),
        ("magnitude", "def f(n): return n.sqrt(), 0.5 / n.sqrt()", r"attribute \.sqrt"),
        ("magnitude", "def f(n): return m.sin(n), 1.0", r"m\.sin.* m has: abs"),
        ("magnitude", "def f(n): return n ** 2, 2.0 * n", r"m\.power"),
        ("magnitude", "def f(n): return (n, 1.0) if n > 0 else (0.0, 0.0)", r"branches.*m\.where"),
        ("magnitude", "def f(n, a): return a * n, a", "number as its default"),
        ("magnitude", "def f(n, a=1.0, rho=1.0): return a * n, a", "rho must be the second argument"),
        ("magnitude", "def f(n, a: positive = -1.0): return a * n, a", "default a=-1 is not a number > 0"),
        ("magnitude", "def f(n, a: 'torch.Tensor' = 1.0): return a * n, a", "is annotated"),
        ("magnitude", "def f(): return 1.0, 0.0", "first argument must be n"),
        ("magnitude", "def f(n): return m.log(n - n), 0.0 * n", "is not finite at n="),
        ("magnitude", "f = dcnet.magnitude(bounded=True)\ndef g(n):\n  return n, 1.0\nf(g)", "registered as bounded"),
        ("angular", "def f(c): return m.where(c > 0.0, 1.0, 0.0), 0.0", r"m\.step"),
        ("angular", "def f(c): return 1.0, 0.0", "does not depend on cos θ"),
        ("magnitude", "def f(n):\n  n *= 2.0\n  return n, 2.0", r"uses \*="),
        (
            "magnitude",
            "def f(n, radius: learnable(start=1.0, floor=0.1) = 1.0): return n * radius, radius, n",
            "cannot be called radius",
        ),
    ],
)
def test_what_may_not_enter(catalogue, kind, source, message):
    before = dict(getattr(dcnet, f"{kind}s")())
    with pytest.raises((ValueError, TypeError), match=message):
        register(kind, source)
    assert dict(getattr(dcnet, f"{kind}s")()) == before


def test_closures_are_refused():
    offset = 1.0

    def f(n):
        return n + offset, 1.0

    with pytest.raises(ValueError, match="offset from the function around it"):
        dcnet.magnitude(f)
    with pytest.raises(TypeError, match="plain function"):
        dcnet.angular(math.cos)


def test_a_name_is_taken_once(catalogue):
    register("magnitude", "def f(n): return 2.0 * n, 2.0")
    register("magnitude", "def f(n): return 2.0 * n, 2.0")  # the same again, as a notebook cell run twice
    with pytest.raises(ValueError, match="registered already"):
        register("magnitude", "def f(n): return 3.0 * n, 3.0")


def test_a_replaced_linear_takes_no_shortcut(catalogue):
    @dcnet.magnitude(replace=True)
    def linear(n, alpha: positive = 1.0):
        """α·‖x‖²"""
        return alpha * n * n, 2.0 * alpha * n

    x, w = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    results = [dcnet.decoupled_conv2d(x, w, magnitude="linear", impl=impl) for impl in ("reference", "eager")]
    torch.testing.assert_close(*results)


def test_separate_with_a_learned_alpha_is_refused(catalogue):
    register(
        "magnitude",
        "def f(n, alpha: learnable(start=2.0, floor=0.1) = 1.0): return alpha * m.log1p(n), alpha / (1.0 + n), "
        "m.log1p(n)",
    )
    with pytest.raises(ValueError, match="cannot learn alpha"):
        dcnet.DecoupledConv2d(3, 4, 3, magnitude="f:alpha=learned", weighting="separate")


def test_kinks_are_allowed(catalogue):
    register("magnitude", "def f(n, rho):\n  i = m.step(rho - n)\n  return m.minimum(n, rho), i, 1.0 - i")


# -- names and parameters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("magnitude", "tahn", "Did you mean 'tanh'.* Known: sphere, ball, tanh, linear, seg, log, mix"),
        ("angular", "cosin", "Did you mean 'cosine'"),
        ("magnitude", "cosine", "unknown magnitude 'cosine'. It is one of the angular functions"),
        ("angular", "tanh", "unknown angular 'tanh'. It is one of the magnitude functions"),
        ("magnitude", "tanh:radius=2", "argument of its own, radius="),
        ("angular", "sigmoid:k=learned,k=0.5", "gives k twice"),
        ("magnitude", "seg:gamma=1", "no parameter 'gamma'.*alpha, beta"),
        ("magnitude", "seg:bta=1", "Did you mean 'beta'"),
        ("magnitude", "tanh:alpha=0", "alpha must be a number > 0, got 0"),
        ("magnitude", "tanh:alpha=-1", "alpha must be a number > 0, got -1"),
        ("magnitude", "tanh:alpha=nan", "alpha must be a number > 0, got nan"),
        ("magnitude", "seg:beta=inf", "beta must be any finite number, got inf"),
        ("angular", "sigmoid:k=0", "k must be a number > 0, got 0"),
        ("angular", "sigmoid:k=-0.3", "k must be a number > 0"),
        ("angular", "power_cosine:p=0.5", "p must be a number ≥ 1, got 0.5"),
        ("angular", "sigmoid:k=big", "k='big' is not a number or 'learned'"),
        ("magnitude", "tanh:alpha=learned", "alpha cannot be learned; learnable parameters: none"),
        ("magnitude", "tanh:alpha", "expected parameter=value, got 'alpha'"),
    ],
)
def test_bad_specs(kind, spec, message):
    with pytest.raises(ValueError, match=message):
        choose(kind, spec)


def test_specs_round_trip():
    for kind, spec in [
        ("magnitude", "tanh"),
        ("magnitude", "seg:beta=0.25"),
        ("angular", "sigmoid:k=learned"),
        ("angular", "power_cosine:p=3"),
        ("angular", "power_cosine:p=learned"),
        ("magnitude", "tanh:alpha=0.12345678901"),
    ]:
        assert str(choose(kind, spec)) == spec
        assert choose(kind, choose(kind, spec)) == choose(kind, spec)
    assert str(choose("magnitude", " seg : alpha = 1 , beta = 0.5 ")) == "seg"
    with pytest.raises(ValueError, match="is one of the magnitude functions, not of"):
        choose("angular", dcnet.magnitudes()["tanh"])
    with pytest.raises(TypeError, match="must be a name"):
        choose("angular", 3)
