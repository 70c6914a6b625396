"""tanh of a product by few points: as exact as tanh, and out of the way where it is not."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import Case, as_float64, assert_within_rule, operands, run

from dcnet.ops.cpu import tanh_interpolation
from dcnet.ops.cpu.tanh_interpolation import Points, tanh_of_product

RATIOS = [1.0, 1.000001, 1.001, 1.1, 2.0, 4.0, 19.0]


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    monkeypatch.setattr(tanh_interpolation, "FEWEST", 0)
    monkeypatch.setenv("DCNET_NATIVE", "0")  # compiled passes have a tanh that is fast enough


def numbers(ratio, kernels=64, groups=1, behind=True, dtype=torch.float32):
    """n over seven decades, patches without a norm among them, and q between 0.3 and 0.3·ratio."""
    torch.manual_seed(0)
    n = torch.cat([torch.zeros(3), torch.logspace(-4, 3, 3 * 8 * groups * 10 - 3)]).reshape(10 * 3, groups, 1, 8)
    q = 0.3 * torch.exp(torch.rand(groups, kernels, 1) * math.log(ratio))
    q[:, 0], q[:, 1] = 0.3, 0.3 * ratio
    if not behind:
        n, q = n.movedim(3, 1).flatten(0, 1), q.squeeze(-1)
    return n.to(dtype), q.to(dtype)


@pytest.mark.parametrize("few", [1, 100])
@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("ratio", RATIOS)
def test_as_exact_as_tanh(ratio, groups, behind, few, monkeypatch):
    monkeypatch.setattr(tanh_interpolation, "_FEW", few)  # a matrix product, or a pass for each point
    n, q = numbers(ratio, groups=groups, behind=behind)
    points = Points(q)
    assert points.chosen is not None
    out = torch.empty(torch.broadcast_shapes(n.shape, q.shape))
    for actual in (tanh_of_product(n, points, out=out), tanh_of_product(n, points)):
        exact = torch.tanh(n.double() * q.double())
        error = ((actual - exact).abs() / exact).nan_to_num(0.0)  # 0/0: no norm
        assert float(error.max()) < 6e-7  # 10 units in the last place, for the smallest results and the largest alike
        assert_within_rule({"tanh": actual}, {"tanh": torch.tanh(n * q)}, {"tanh": exact})
    assert tanh_of_product(n, points, out=out) is out


@pytest.mark.parametrize("ratio", RATIOS[2:])
def test_the_polynomial_by_itself(ratio):
    """Its error, without that of rounding, is what the number of points is chosen for."""
    n, q = numbers(ratio, dtype=torch.float64)
    _, shares = Points(q.float()).chosen
    u = q.flatten().log()
    middle, half = (u.max() + u.min()) / 2, (u.max() - u.min()) / 2
    count = shares.shape[-1] + 1  # the first share is what the others leave
    z = -torch.cos((torch.arange(count, dtype=torch.float64) + 0.5) * math.pi / count)
    others = [[k for k in range(count) if k != j] for j in range(count)]
    lagrange = torch.stack(
        [(((u - middle) / half)[:, None] - z[k]).div(z[j] - z[k]).prod(1) for j, k in enumerate(others)], 1
    )
    torch.testing.assert_close(
        shares[0].double(), lagrange[:, 1:], rtol=0, atol=1e-4 if ratio < 1.01 else 2e-6
    )  # log q rounds too
    n = n.flatten()[3:, None]
    exact = torch.tanh(n * q.flatten())
    polynomial = torch.tanh(n * torch.exp(middle + half * z)) @ lagrange.T
    assert float(((polynomial - exact).abs() / exact).max()) < tanh_interpolation._ERROR


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan"), 0.3 / 25.0])
def test_numbers_without_points(bad):
    n, q = numbers(2.0)
    q[0, 5] = bad
    assert Points(q).chosen is None
    assert torch.equal(tanh_of_product(n, Points(q)).isnan(), torch.tanh(n * q).isnan())
    torch.testing.assert_close(tanh_of_product(n, Points(q)), torch.tanh(n * q), rtol=0, atol=0, equal_nan=True)


def test_not_for_few_kernels_nor_for_other_digits():
    for points in (
        Points(numbers(19.0, kernels=32)[1]),
        Points(numbers(1.0, dtype=torch.float64)[1]),
        Points(numbers(1.0)[1].to("meta")),
    ):
        assert points.chosen is None
    assert Points(numbers(2.0, kernels=32)[1]).chosen is not None


def test_small_maps_choose_no_points(monkeypatch):
    monkeypatch.setattr(tanh_interpolation, "FEWEST", 2**16)
    n, q = numbers(2.0)
    points = Points(q)
    assert torch.equal(tanh_of_product(n[:1], points), torch.tanh(n[:1] * q))
    assert "chosen" not in vars(points)


def test_autocast_and_reduced_precision_leave_it_alone(monkeypatch):
    n, q = numbers(4.0)
    expected = tanh_of_product(n, Points(q))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(tanh_of_product(n, Points(q)), expected)
    before = torch.backends.mkldnn.matmul.fp32_precision
    monkeypatch.setattr(torch, "bmm", lambda *_, **__: pytest.fail("a matrix product that may round to bfloat16"))
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.testing.assert_close(tanh_of_product(n, Points(q)), expected, rtol=1e-6, atol=0)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


MAPS = Case(2, (4, 16, 10, 10), (64, 8, 3, 3), True, (("padding", 1), ("groups", 2)))
FEW_POSITIONS = Case(1, (128, 4, 9), (64, 4, 3), True, (("padding", 1),))
CASES = {"maps": MAPS, "channels last": replace(MAPS, channels_last=True), "few positions": FEW_POSITIONS}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("least", [1.0, 0.15, 0.05])  # with the smaller ones most of tanh is all but 1
@pytest.mark.parametrize("ratio", [1.0, 1.2, 3.0])
@pytest.mark.parametrize(("angular", "weighting"), [("cosine", None), ("linear", "separate"), ("cosine", "joint")])
def test_layers(angular, weighting, ratio, least, case, monkeypatch):
    monkeypatch.setattr("dcnet.ops.cpu.chunks.CHUNK", 8_000)
    used = []
    monkeypatch.setattr(
        "dcnet.ops.cpu.tanh_interpolation.torch.bmm",
        lambda *a, product=torch.bmm, **k: used.append(1) or product(*a, **k),
    )
    tensors = operands(case, "tanh", angular, torch.float32)
    tensors["radius"] = (least * torch.linspace(1.0, ratio, 64)).requires_grad_()
    exact = run(case, as_float64(tensors), "tanh", angular, weighting, "reference")
    reference = run(case, tensors, "tanh", angular, weighting, "reference")
    assert_within_rule(run(case, tensors, "tanh", angular, weighting, "eager"), reference, exact)
    assert bool(used) == (ratio > 1.1 and weighting != "joint")  # a product of three there


def test_another_default_device():
    n, q = numbers(4.0)
    with torch.device("meta"):
        assert tanh_of_product(n, Points(q)).device == n.device
