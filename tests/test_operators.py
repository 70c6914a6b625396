"""The eager path against the reference, over every operator and fuzzed geometries."""

from unittest import mock

import pytest
import torch
from helpers import OPERATORS, Case, as_float64, assert_close, assert_within_rule, cases, operands, run
from hypothesis import given, settings
from hypothesis import strategies as st

MEAN_NORMS = st.sampled_from(["batch", None, "tensor"])


def mean_norm_for(choice, case, dtype):
    return torch.linspace(0.5, 2.0, case.groups, dtype=dtype) if choice == "tensor" else choice


@pytest.mark.parametrize(("magnitude", "angular", "weighting"), OPERATORS)
@settings(max_examples=5)
@given(case=cases(), choice=MEAN_NORMS, seed=st.integers(0, 1000), eps=st.sampled_from([1e-4, 1e-4, 0.0, 0.1]))
def test_eager_equals_reference_in_float64(magnitude, angular, weighting, case, choice, seed, eps):
    tensors = operands(case, magnitude, angular, seed=seed)
    mean_norm = mean_norm_for(choice, case, torch.float64)
    if eps == 0.0 and case.arguments.get("padding_mode") == "zeros":
        eps = 1e-4  # patches of zeros have a test of their own
    expected = run(case, tensors, magnitude, angular, weighting, "reference", mean_norm, eps=eps)
    assert_close(run(case, tensors, magnitude, angular, weighting, "eager", mean_norm, eps=eps), expected, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("magnitude", "angular", "weighting"), OPERATORS)
@settings(max_examples=2)
@given(case=cases(smallest_patch=4), seed=st.integers(0, 1000))
def test_eager_is_within_the_error_rule(magnitude, angular, weighting, dtype, case, seed):
    tensors = operands(case, magnitude, angular, dtype, seed)
    exact = run(case, as_float64(tensors), magnitude, angular, weighting, "reference")
    reference = run(case, tensors, magnitude, angular, weighting, "reference")
    assert_within_rule(run(case, tensors, magnitude, angular, weighting, "eager"), reference, exact)


# Several chunks, but few enough positions for the rule: the weight gradient of F.conv2d itself is off by 10 ulp over 4
# × 32².
LARGE = Case(2, (4, 16, 10, 10), (64, 8, 3, 3), True, (("padding", 1), ("groups", 2)))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("magnitude", "angular", "weighting"),
    [("tanh", "cosine", None), ("seg", "sigmoid:k=learned", "joint"), ("ball", "linear", "separate")],
)
def test_pieces(magnitude, angular, weighting, dtype, channels_last, monkeypatch):
    monkeypatch.setattr("dcnet.ops.cpu.chunks.CHUNK", 8_000)
    case = Case(LARGE.dims, LARGE.x, LARGE.weight, LARGE.bias, LARGE.geometry, channels_last)
    tensors = operands(case, magnitude, angular, dtype)
    exact = run(case, as_float64(tensors), magnitude, angular, weighting, "reference")
    actual = run(case, tensors, magnitude, angular, weighting, "eager")
    if dtype == torch.float64:
        assert_close(actual, exact, 1e-10)
    else:
        assert_within_rule(actual, run(case, tensors, magnitude, angular, weighting, "reference"), exact)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("magnitude", "angular", "weighting"),
    [
        ("tanh", "cosine", None),
        ("ball", "linear", None),
        ("mix", "square_cosine", "linear"),
        ("linear", "cosine", None),
    ],
)
def test_autocast(magnitude, angular, weighting, autocast):
    tensors = operands(LARGE, magnitude, angular, torch.float32)
    rounded = {
        name: t.detach().to(autocast).double().requires_grad_()
        if name in ("x", "weight")
        else t.detach().double().requires_grad_()
        for name, t in tensors.items()
    }
    exact = run(LARGE, rounded, magnitude, angular, weighting, "reference")
    with torch.autocast("cpu", dtype=autocast):
        reference = run(LARGE, tensors, magnitude, angular, weighting, "reference")
        actual = run(LARGE, tensors, magnitude, angular, weighting, "eager")
        plain = torch.nn.functional.conv2d(tensors["x"], tensors["weight"], tensors["bias"], padding=1, groups=2)
    assert actual["output"].dtype == plain.dtype == autocast
    # gradients of float32 tensors hold float32, but the convolution's share of them went through the low precision
    low = {name: t.to(autocast) for name, t in actual.items()}
    assert_within_rule(low, {name: t.to(autocast) for name, t in reference.items()}, exact)


def test_norms_are_not_rounded_under_autocast():
    import dcnet

    x = torch.randn(2, 8, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        norm = dcnet.patch_norm(x, 3, padding=1)
    assert norm.dtype == torch.float32
    assert torch.equal(norm, dcnet.patch_norm(x, 3, padding=1))


@pytest.mark.parametrize("slices", [False, True])
@settings(max_examples=40)
@given(case=cases(), seed=st.integers(0, 1000))
def test_ordinary_operations_equal_reference_in_float64(slices, case, seed):
    """What torch.compile, function transforms and exporters see: norms by pooling, or by sums of slices."""
    tensors = operands(case, "tanh", "cosine", seed=seed)
    expected = run(case, tensors, "tanh", "cosine", None, "reference", "batch")
    with (
        mock.patch("dcnet.ops.dispatch.only_ordinary_operations", return_value=True),
        mock.patch("dcnet.ops.norms.recorded_by_jit", return_value=slices),
    ):
        actual = run(case, tensors, "tanh", "cosine", None, "eager", "batch")
    assert_close(actual, expected, 1e-10)


def test_ordinary_operations_square_half_precision_in_float32():
    import dcnet

    x = (100.0 * torch.randn(2, 8, 6, 6)).bfloat16()
    with mock.patch("dcnet.ops.dispatch.only_ordinary_operations", return_value=True):
        norm = dcnet.patch_norm(x, 3, padding=1)
        assert torch.equal(norm, dcnet.patch_norm(x.float(), 3, padding=1))
    assert norm.dtype == torch.float32
