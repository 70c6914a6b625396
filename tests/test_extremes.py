"""Zero, parallel, opposite, huge and tiny patches; identities that hold exactly, and those without eps."""

import pytest
import torch
import torch.nn.functional as F
from helpers import ANGULARS, assert_close, learned_by

import dcnet

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECS = [(magnitude, angular) for magnitude in dcnet.magnitudes() for angular in [*dcnet.angulars(), "sigmoid:k=0.01"]]
BOUNDED = {name for name, formula in dcnet.magnitudes().items() if formula.bounded}

FIXED_ANGULARS = [angular for angular in ANGULARS if not learned_by(angular)]


def patches(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """Inputs as large as the kernel, one patch each."""
    if kind == "zero":
        return torch.zeros_like(weight)
    if kind == "parallel":
        return weight.clone()
    if kind == "opposite":
        return -weight
    return {"huge": 1e4, "tiny": 1e-6}[kind] * weight.sign()


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["zero", "parallel", "opposite", "huge", "tiny"])
@pytest.mark.parametrize(("magnitude", "angular"), SPECS)
def test_finite_wherever_the_plain_convolution_is(magnitude, angular, kind, dtype, impl):
    base = torch.randn(5, 4, 3, 3)
    for scale in (1.0, 30.0) if kind in ("parallel", "opposite") else (1.0,):  # large kernels: cos θ rounds to ±1
        w = (scale * base).to(dtype).requires_grad_()
        x = patches(kind, (scale * base).to(dtype)).requires_grad_()
        plain = F.conv2d(x, w)
        plain_grads = torch.autograd.grad(plain.sum(), (x, w))
        radius = torch.full((5,), 1.5, requires_grad=True) if dcnet.magnitudes()[magnitude].has_radius else None
        y = dcnet.decoupled_conv2d(
            x, w, magnitude=magnitude, angular=angular, radius=radius, mean_norm="batch", impl=impl
        )
        grads = torch.autograd.grad(y.sum(), [x, w, *([radius] if radius is not None else [])])
        assert y.dtype == dtype
        if magnitude in BOUNDED:
            assert bool(y.isfinite().all())
            assert float(y.detach().abs().max()) <= 1.0
        assert not bool((plain.isfinite() & ~y.isfinite()).any())
        if all(bool(g.isfinite().all()) for g in (plain, *plain_grads)):
            assert all(bool(g.isfinite().all()) for g in grads)
        if kind == "zero":
            assert bool((y == 0).all())


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize(("magnitude", "angular"), SPECS)
def test_zero_patches_and_kernels_without_eps(magnitude, angular, impl):
    x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 2, 2)
    x[:, :, :3] = 0.0
    w[1] = 0.0
    x.requires_grad_()
    w.requires_grad_()
    y = dcnet.decoupled_conv2d(x, w, magnitude=magnitude, angular=angular, eps=0.0, impl=impl)
    assert bool((y[:, :, :2] == 0).all())
    assert bool((y[:, 1] == 0).all())
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(y.sum(), (x, w)))


def test_large_kernels_reach_cosine_one():
    w = 1e3 * torch.randn(6, 8, 3, 3)
    for sign in (1.0, -1.0):
        y = dcnet.decoupled_conv2d(sign * w, w, magnitude="sphere", angular="cosine")
        assert bool((y.flatten(1).diagonal().abs() >= 1 - 5e-7).all())
        assert float(y.abs().max()) <= 1.0


@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("magnitude", sorted(BOUNDED))
@pytest.mark.parametrize("angular", FIXED_ANGULARS)
def test_bounded_by_alpha(magnitude, angular, alpha):
    x = torch.cat([10.0**k * torch.randn(4, 3, 6, 6) for k in range(-3, 5)])
    y = dcnet.decoupled_conv2d(x, torch.randn(5, 3, 3, 3), magnitude=f"{magnitude}:alpha={alpha}", angular=angular)
    assert float(y.abs().max()) <= alpha


def both(first: dict, second: dict, tolerance: float = 1e-12, dtype=torch.float64) -> None:
    """Two operators are one: outputs and gradients."""
    x, w = (
        torch.randn(2, 3, 7, 7, dtype=dtype, requires_grad=True),
        torch.randn(4, 3, 3, 3, dtype=dtype, requires_grad=True),
    )
    results = []
    for options in (first, second):
        y = dcnet.decoupled_conv2d(x, w, padding=1, impl="eager", **options)
        results.append(
            dict(zip(("output", "x", "w"), (y.detach(), *torch.autograd.grad(y.sin().sum(), (x, w))), strict=True))
        )
    assert_close(*results, tolerance)


@pytest.mark.parametrize("weighting", [None, "linear", "joint"])
@pytest.mark.parametrize("angular", ["cosine", "square_cosine", "linear"])
def test_seg_is_linear_and_ball(angular, weighting):
    common = {"angular": angular, "weighting": weighting}
    both({"magnitude": "seg:alpha=2,beta=2", "radius": 3.0, **common}, {"magnitude": "linear:alpha=2", **common})
    both({"magnitude": "seg:alpha=0.4,beta=0", "radius": 2.5, **common}, {"magnitude": "ball", "radius": 2.5, **common})


def test_power_two_is_square_cosine():
    both({"angular": "power_cosine:p=2"}, {"angular": "square_cosine"})


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("magnitude", ["ball", "tanh", "seg", "log", "mix"])
def test_weightings_written_out(magnitude, impl):
    """The table of weighted operators, with α = 2 and a learned radius: ‖w‖·h(n), h(n·‖w‖), α·h₁(‖w‖)·h₁(n)."""
    x, w = torch.randn(2, 4, 6, 6, dtype=torch.float64), torch.randn(6, 2, 3, 3, dtype=torch.float64)
    n = dcnet.patch_norm(x, 3, groups=2).repeat_interleave(3, 1)
    w_norm = (w.square().flatten(1).sum(1) + 1e-4).sqrt().reshape(-1, 1, 1)
    cosine = F.conv2d(x, w, groups=2) / (n * w_norm)
    rho = torch.rand(6, dtype=torch.float64) + 0.5
    mean = torch.tensor([0.7, 1.6], dtype=torch.float64)
    used = rho * mean.repeat_interleave(3)
    has_radius = dcnet.magnitudes()[magnitude].has_radius

    def h(norm, radius, alpha):
        radius = radius.reshape(-1, 1, 1)
        return {
            "ball": alpha * torch.minimum(norm, radius) / radius,
            "tanh": alpha * torch.tanh(norm / radius),
            "seg": torch.where(norm <= radius, alpha * norm, 0.5 * norm + (alpha - 0.5) * radius),
            "log": alpha * torch.log(1 + norm),
            "mix": alpha * norm + torch.log(1 + norm),
        }[magnitude]

    expected = {
        None: h(n, used, 2.0) * cosine,
        "linear": w_norm * h(n, used, 2.0) * cosine,
        "joint": h(n * w_norm, used, 2.0) * cosine,
        "separate": 2.0 * h(w_norm, rho, 1.0) * h(n, used, 1.0) * cosine,
    }
    for weighting, y in expected.items():
        radius = {"radius": rho, "mean_norm": mean} if has_radius else {}
        actual = dcnet.decoupled_conv2d(
            x, w, groups=2, magnitude=f"{magnitude}:alpha=2", weighting=weighting, impl=impl, **radius
        )
        torch.testing.assert_close(actual, y, rtol=1e-10, atol=1e-12)


def test_b_cos():
    """`linear` magnitude with `power_cosine` is |cos θ|^(p−1) · ŵᵀx, the B-cos transform."""
    x, w = torch.randn(2, 3, 7, 7, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    dot = F.conv2d(x, w / w.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1))
    norm = F.conv2d(x.square().sum(1, keepdim=True), torch.ones(1, 1, 3, 3, dtype=torch.float64)).sqrt()
    for p in (1.0, 1.5, 2.0, 3.0):
        y = dcnet.decoupled_conv2d(x, w, magnitude="linear", angular=f"power_cosine:p={p}", eps=0.0)
        torch.testing.assert_close(y, (dot / norm).abs() ** (p - 1) * dot)


@pytest.mark.parametrize("angular", FIXED_ANGULARS)
def test_identities_without_eps(angular):
    x, w = torch.randn(2, 3, 7, 7, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)

    def f(x, w, magnitude):
        return dcnet.decoupled_conv2d(x, w, magnitude=magnitude, angular=angular, eps=0.0)

    torch.testing.assert_close(f(7.0 * x, w, "linear"), 7.0 * f(x, w, "linear"))  # homogeneous
    torch.testing.assert_close(f(7.0 * x, w, "sphere"), f(x, w, "sphere"))  # blind to scale
    for magnitude in dcnet.magnitudes():
        layer = dcnet.DecoupledConv2d(3, 4, 3, magnitude=magnitude, angular=angular, eps=0.0).double()
        before = layer(x)
        dcnet.project_weights_(layer, scale=2.0)
        torch.testing.assert_close(layer(x), before)  # projection changes no output


def test_batch_and_spatial_sizes_of_nothing():
    layer = dcnet.DecoupledConv2d(3, 4, 3, padding=1)
    y = layer(torch.randn(0, 3, 5, 5))
    assert y.shape == (0, 4, 5, 5)
    assert layer.num_batches_tracked == 0
    assert layer.running_norm.tolist() == [1.0]  # an empty batch has no mean
