"""Random geometries, every operator of the catalogue, and the error rule all implementations are held to."""

import ast
import copy
import importlib
import math
import os
import socket
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import dcnet
from dcnet.data import load_data

ANGULARS = [*dcnet.angulars(), "sigmoid:k=learned", "power_cosine:p=1.5", "power_cosine:p=learned"]
LEARNED_LEAST = {"k": 0.2, "p": 1.2}  # of what is drawn for the parameters an angular function can learn
OPERATORS = [
    (magnitude, angular, weighting)
    for magnitude in dcnet.magnitudes()
    for angular in ANGULARS
    for weighting in (None, "linear", "joint", "separate")
    if not (magnitude == "sphere" and weighting in ("joint", "separate"))
]
FUNCTIONS = {0: dcnet.decoupled_linear, 1: dcnet.decoupled_conv1d, 2: dcnet.decoupled_conv2d, 3: dcnet.decoupled_conv3d}
PLAIN = {0: F.linear, 1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def needs(package):
    """Return the module of that name; skip the test, with its name, where it is not installed.

    Where everything should be installed (`make ecosystem`), a missing module is an error.
    """
    try:
        if os.environ.get("DCNET_ECOSYSTEM"):
            return importlib.import_module(package)
        return pytest.importorskip(package, reason=f"{package} is not installed; `make ecosystem` installs it")
    except RuntimeError as error:  # torchvision built for another torch, with CUDA or without
        return pytest.fail(f"{package} is installed, but not in a build that fits torch {torch.__version__}: {error}")


def packages(code):
    """The packages that code imports."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


def learned_by(angular):
    """The names of the parameters that a spec such as "sigmoid:k=learned" learns."""
    return [item.removesuffix("=learned") for item in angular.partition(":")[2].split(",") if item.endswith("=learned")]


@dataclass(frozen=True)
class Case:
    """The shapes and arguments of one convolution (or, over no dimensions, linear map)."""

    dims: int
    x: tuple[int, ...]
    weight: tuple[int, ...]
    bias: bool
    geometry: tuple[tuple[str, Any], ...]
    channels_last: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.geometry)

    @property
    def groups(self) -> int:
        return self.arguments.get("groups", 1)


@st.composite
def cases(draw, dims=(0, 1, 2, 3), smallest_patch=1) -> Case:
    """Draw geometries that the plain layers accept, small enough to be quick."""
    d = draw(st.sampled_from(dims))
    batch = draw(st.integers(1, 3))
    bias = draw(st.booleans())
    if d == 0:
        features = draw(st.integers(smallest_patch, 9))
        lead = draw(st.sampled_from([(batch,), (batch, 2), ()]))
        return Case(0, (*lead, features), (draw(st.integers(1, 6)), features), bias, ())
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    per_group = draw(st.integers(1, 3))
    kernel = [draw(st.integers(1, 3)) for _ in range(d)]
    if per_group * math.prod(kernel) < smallest_patch:
        per_group = -(-smallest_patch // math.prod(kernel))
    dilation = [draw(st.integers(1, 2)) for _ in range(d)]
    padding_mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    padding: Any = draw(st.sampled_from(["same", "valid", "number", "numbers"]))
    stride = [1 if padding == "same" else draw(st.integers(1, 3)) for _ in range(d)]
    if padding == "number":
        padding = draw(st.integers(0, 2))
    elif padding == "numbers":
        padding = tuple(draw(st.integers(0, 2)) for _ in range(d))
    # large enough for the window, and for mirrored padding, which must be smaller than the map
    size = [dilation[i] * (kernel[i] - 1) + 2 + draw(st.integers(0, 3)) for i in range(d)]
    size = [max(s, 3) for s in size]
    lead = () if draw(st.integers(0, 5)) == 0 else (batch,)
    geometry = {
        "stride": tuple(stride),
        "padding": padding,
        "dilation": tuple(dilation),
        "groups": groups,
        "padding_mode": padding_mode,
    }
    return Case(
        d,
        (*lead, per_group * groups, *size),
        (groups * draw(st.integers(1, 3)), per_group, *kernel),
        bias,
        tuple(geometry.items()),
        channels_last=d in (2, 3) and bool(lead) and draw(st.booleans()),
    )


def operands(
    case: Case, magnitude: str, angular: str, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Tensor]:
    """Return the tensors of a case by name, drawn from the seed and rounded to the dtype.

    The learned ones stay in float32 at least.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(*case.x)
    if case.channels_last:
        x = x.to(memory_format=torch.channels_last if case.dims == 2 else torch.channels_last_3d)
    kernels = case.weight[0]
    exact = torch.promote_types(dtype, torch.float32)
    tensors = {"x": x.to(dtype), "weight": normal(*case.weight).to(dtype)}
    if case.bias:
        tensors["bias"] = normal(kernels).to(dtype)
    if dcnet.magnitudes()[magnitude.partition(":")[0]].has_radius:
        tensors["radius"] = (0.5 + torch.rand(kernels, generator=generator, dtype=torch.float64)).to(exact)
    for name in learned_by(angular):
        drawn = LEARNED_LEAST[name] + torch.rand(kernels, generator=generator, dtype=torch.float64)
        tensors[name] = drawn.to(exact)
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}


def run(
    case: Case,
    tensors: dict[str, Tensor],
    magnitude: str,
    angular: str,
    weighting: str | None,
    impl: str,
    mean_norm: Any = "batch",
    **options: Any,
):
    """Return output and gradients by name; the incoming gradient is the same for every implementation."""
    y = FUNCTIONS[case.dims](
        tensors["x"],
        tensors["weight"],
        tensors.get("bias"),
        **case.arguments,
        magnitude=magnitude,
        angular=angular,
        weighting=weighting,
        radius=tensors.get("radius"),
        mean_norm=mean_norm,
        parameters={name: tensors[name] for name in learned_by(angular)} or None,
        impl=impl,
        **options,
    )
    return {"output": y.detach(), **gradients(y, tensors)}


def gradients(y: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    incoming = torch.cos(torch.arange(y.numel(), dtype=torch.float64)).reshape(y.shape).to(y)
    return dict(zip(tensors, torch.autograd.grad(y, list(tensors.values()), incoming), strict=True))


def as_float64(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same, possibly rounded, numbers in float64."""
    return {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compare each tensor's error to its own size, or to the whole set's where it is (nearly) zero."""
    assert actual.keys() == expected.keys()
    whole = max(float(e.norm()) for e in expected.values())
    for name, e in expected.items():
        error = float((actual[name] - e).norm())
        assert error <= tolerance * max(float(e.norm()), 1e-3 * whole), (
            f"{name}: error {error:.2e} of {float(e.norm()):.2e}"
        )


def rms(t: Tensor) -> float:
    return float(t.double().square().mean().sqrt()) if t.numel() else 0.0


def assert_within_rule(actual: dict[str, Tensor], reference: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Check the RMS error against float64.

    It is at most twice the reference's in the same dtype, plus 4 ulp (16 for small tensors) of the result.
    """
    for name, e in exact.items():
        a, r = actual[name], reference[name]
        assert a.dtype == r.dtype
        ulps = 16 if e.numel() < 256 else 4
        allowed = 2 * rms(r.double() - e) + ulps * torch.finfo(a.dtype).eps * rms(e)
        error = rms(a.double() - e)
        assert error <= allowed, (
            f"{name}: RMS error {error:.3e}, allowed {allowed:.3e} (reference {rms(r.double() - e):.3e}, size "
            f"{rms(e):.3e})"
        )


def in_two_processes(worker):
    """Return what `worker(rank, port, results)` leaves in its results, run as two processes that meet at the port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(worker, (port, results), nprocs=2)
        return copy.deepcopy(dict(results))


def attack_briefly(run: dcnet.training.Run) -> None:
    """Add what `dcnet attack` adds to a run of digits, in a second."""
    test = load_data("digits").test
    model = run.model
    with torch.no_grad():
        right = (model(test.images / 255.0).argmax(1) == test.labels).nonzero().squeeze(1)[:10]
    assert len(right) > 5
    images, labels = test.images[right] / 255.0, test.labels[right]
    result = dcnet.robustness.evaluate(
        model, images, labels, "fgsm,deepfool:iterations=10,deepfool:norm=linf:iterations=10", eps=0.1
    )
    result["check-up"] = dcnet.robustness.check_up(model, images[:5], labels[:5], 0.1, iterations=2, queries=3)
    run.add_attack({**result, "from": None, "bf16": False})
