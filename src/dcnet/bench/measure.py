"""Time and peak memory of one case."""

import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dcnet.bench.cases import Case, Shape
from dcnet.bench.straightforward import straightforward_
from dcnet.converting import decouple_
from dcnet.fusing import fuse_
from dcnet.layers import DecoupledConv2d
from dcnet.models import create_external, create_model

Measures = dict[str, tuple[float, float, float]]  # metric -> 20th, 50th and 80th percentile


def measure(cases: Sequence[Case], device: torch.device, repeats: int) -> list[Measures]:
    """Measure the cases. Return milliseconds, and seconds until the first call was done, for each.

    On a GPU, return peak memory and the shares of kernels and host too.

    Several cases take turns, so that a slow moment of the machine hits them all. On a GPU they come one by one, for the
    memory's sake.
    """
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.backends.cudnn.benchmark = True
    results: list[Measures] = []
    runs = []
    for case in cases:
        run = (_layer if case.what == "layer" else network_run)(case, device)
        start = time.perf_counter()
        run()
        _wait(device)
        results.append({"first call, seconds": (time.perf_counter() - start,) * 3})
        for _ in range(3):
            run()
        if device.type == "cuda":
            results[-1] |= _memory_and_host(run)
            if case.how == "reduce-overhead":  # a graph's memory stays allocated, and no call asks for more
                del results[-1]["peak MiB"]
        runs.append(run)
    # the host is no part of what inference costs
    timed = [
        _graph(run) if device.type == "cuda" and case.mode == "inference" else run
        for case, run in zip(cases, runs, strict=True)
    ]
    for result, times in zip(results, _times(timed, device, repeats), strict=True):
        result["milliseconds"] = times
    if device.type == "cuda":  # last: a profiler slows launches down
        for result, run in zip(results, runs, strict=True):
            result["kernels, milliseconds"] = (_kernels(run),) * 3
    return results


def network_run(case: Case, device: torch.device) -> Callable[[], Any]:
    """Return what runs a network once: a training step, or inference."""
    torch.manual_seed(0)
    size = 32
    if case.what == "model":
        name, _, pixels = case.name.partition("@")
        size = int(pixels)
        network = create_external(name, num_classes=1000, in_channels=3, input_size=size)
        if case.operator:
            report = decouple_(network, **_operator(case), fuse="unfused" not in case.provider)
            if report.fused is not None and report.fused.unseen:  # torch.fx cannot trace it
                fuse_(network, torch.rand(2, 3, size, size))
    else:
        network = create_model(case.name, **_operator(case))
    model = _provided(network, case, device)
    x = _ordered(torch.rand(case.batch, 3, size, size, device=device), case)
    labels = torch.randint(0, 10, (case.batch,), device=device)
    compiled = _compiled(model, case)
    if case.mode == "inference":
        model.eval()

        def infer() -> Tensor:
            with torch.inference_mode(), _autocast(case, device):
                return compiled(x)

        return infer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=device.type == "cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with _autocast(case, device):
            loss = cross_entropy(compiled(x), labels)
        loss.backward()
        optimizer.step()

    return step


def _layer(case: Case, device: torch.device) -> Callable[[], Any]:
    torch.manual_seed(0)
    shape = Shape.parse(case.name)
    layer: nn.Module
    geometry = {"stride": shape.stride, "padding": shape.kernel // 2, "bias": False}
    if case.operator:
        options: dict[str, Any] = {**geometry, **_operator(case)}
        layer = DecoupledConv2d(shape.inputs, shape.outputs, shape.kernel, **options)
    else:
        layer = nn.Conv2d(shape.inputs, shape.outputs, shape.kernel, **geometry)  # type: ignore[arg-type]
    layer = _provided(layer, case, device)
    dtype = getattr(torch, case.dtype)
    x = _ordered(
        torch.randn(case.batch, shape.inputs, shape.size, shape.size, device=device, dtype=dtype), case
    ).requires_grad_()
    compiled = _compiled(layer, case)
    with _autocast(case, device):
        e = torch.randn_like(compiled(x))

    def forward() -> Tensor:
        with _autocast(case, device):
            return compiled(x)

    def both() -> None:
        torch.autograd.grad(forward(), [x, *layer.parameters()], e)

    return both if case.mode == "forward + backward" else torch.no_grad()(forward)


def _compiled(model: nn.Module, case: Case) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, mode=None if case.how == "compiled" else case.how) if case.how else model


def _operator(case: Case) -> dict[str, Any]:
    if not case.operator:
        return {"magnitude": None}
    magnitude, angular = case.operator.split(" + ")
    return {"magnitude": magnitude, "angular": angular}


def _provided(model: nn.Module, case: Case, device: torch.device) -> nn.Module:
    if case.provider.startswith("straightforward"):
        straightforward_(model)
    model.to(device)
    if case.layout == "channels_last":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _ordered(x: Tensor, case: Case) -> Tensor:
    return x.to(memory_format=torch.channels_last) if case.layout == "channels_last" else x


def _autocast(case: Case, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if case.dtype == "bfloat16" else nullcontext()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _memory_and_host(run: Callable[[], Any]) -> Measures:
    """Return peak memory, and the time the host takes to launch the kernels of a call when nothing waits."""
    hosts = []
    for _ in range(5):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        run()
        hosts.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    memory = torch.cuda.max_memory_allocated() / 2**20
    return {"peak MiB": (memory,) * 3, "host, milliseconds": (min(hosts),) * 3}


def _kernels(run: Callable[[], Any]) -> float:
    """Return the milliseconds that all kernels of a call take together."""
    # Unless told so, PyTorch's profiler stays attached to the driver, and the launches of all later cases take longer
    # (pytorch#144455)
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    # It detaches, once a thread of its own has asked for that, within a call of CUDA: without one the process would
    # never end
    for _ in range(20):
        time.sleep(0.01)
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in profile.key_averages()) / 1e3)


def _graph(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return the same launches as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def _times(runs: Sequence[Callable[[], Any]], device: torch.device, repeats: int) -> list[tuple[float, float, float]]:
    """Return the milliseconds of one call of each.

    On a GPU calls follow one another without waiting, as in training.
    """
    timed: list[list[Callable[[], float]]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, mine in zip(runs, timed, strict=True):
            mine.append(_timed(run, device))
    _wait(device)
    quantiles = []
    for mine in timed:
        low, middle, high = torch.tensor([result() for result in mine]).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
        quantiles.append((low, middle, high))
    return quantiles


def _timed(run: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """Run it; return a function that says how many milliseconds it took, to be asked once the device is through."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        return lambda: start.elapsed_time(end)
    began = time.perf_counter()
    run()
    took = 1e3 * (time.perf_counter() - began)
    return lambda: took
