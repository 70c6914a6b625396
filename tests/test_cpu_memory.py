"""What layers keep for backward on a CPU, and the most memory that a step takes, as a ratio to plain layers."""

import math
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import dcnet

ROOT = Path(__file__).parent.parent


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import geometries_cpu
    import in_turns

    yield in_turns, geometries_cpu
    for module in (in_turns, geometries_cpu):
        del sys.modules[module.__name__]


def kept_for_backward(layer: nn.Module, x: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the shapes of what a forward pass saves beyond its input, its parameters and three numbers a kernel."""
    there = {tensor.data_ptr() for tensor in (x, *layer.parameters())}
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in there:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = layer(x)
    y.sum().backward()
    few = 3 * max(y.shape[1], x.shape[1])
    return sorted(tuple(tensor.shape) for tensor in kept.values() if tensor.numel() > few)


@pytest.mark.parametrize("angular", ["cosine", "linear"])
@pytest.mark.parametrize("size", [10, 20])
def test_no_copy_of_the_kernels_is_kept(angular, size, passes):
    """Nor a map of tanh, except by PyTorch's operations where maps are small: dot product and norm are enough."""
    layer = dcnet.DecoupledConv2d(32, 64, 3, padding=1, angular=angular)
    x = torch.randn(8, 32, size, size, requires_grad=True)
    norms, dots = 8 * size**2, 64 * 8 * size**2
    sizes = sorted(math.prod(shape) for shape in kept_for_backward(layer, x))
    assert sizes == ([norms, dots, dots] if size == 10 and not passes else [norms, dots])


@pytest.mark.parametrize(
    ("kernel", "options", "maps"),
    [(3, {}, 1), (5, {}, 0), (3, {"dilation": 2}, 0), (5, {"stride": 2, "padding": 2}, 1)],
)
def test_depthwise_layers_keep_at_most_their_norms(kernel, options, maps, passes):
    """Compiled, not even those."""
    layer = dcnet.DecoupledConv2d(64, 64, kernel, groups=64, **{"padding": "same", **options})
    x = torch.randn(2, 64, 10, 10, requires_grad=True)
    assert kept_for_backward(layer, x) == [tuple(layer(x).shape)] * (0 if passes else maps)


def test_a_whole_network_keeps_no_kernels():
    """Of the size of ResNet-18's: 44 MB of kernels, and no copy of them."""
    widths = (64, 128, 256, 512)
    layers = [dcnet.DecoupledConv2d(a, b, 3, padding=1) for a, b in zip((3, *widths), widths, strict=False)]
    net, x = nn.Sequential(*layers, dcnet.DecoupledConv2d(512, 512, 3, padding=1)), torch.randn(1, 3, 4, 4)
    kernels = {math.prod(layer.weight.shape) for layer in net}
    assert not kernels & {math.prod(shape) for shape in kept_for_backward(net, x.requires_grad_())}


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_peak_memory_of_geometries(scripts, every):
    """A ratio of bytes, the same on every machine and however busy it is."""
    in_turns, geometries = scripts
    torch.manual_seed(0)
    for geometry in geometries.GEOMETRIES[::every]:
        shape, sizes = (4, geometry.inputs, geometry.size, geometry.size), (geometry.inputs, geometry.outputs)
        plain = nn.Conv2d(*sizes, geometry.kernel, **geometry.options, bias=False)
        ours = dcnet.DecoupledConv2d(*sizes, geometry.kernel, **geometry.options)
        held, peak = in_turns.held_and_peak(ours, shape)
        plain_held, plain_peak = in_turns.held_and_peak(plain, shape)
        kernels = plain.weight.numel() * plain.weight.element_size() / 2**20  # as large as the maps where maps are 7×7
        assert peak <= 1.6 * plain_peak + 0.5 * kernels, str(geometry)
        assert held <= 2.3 * plain_held + 0.1 * kernels, str(geometry)


def test_the_dot_product_is_freed_before_the_convolution(scripts):
    """In backward: a layer in C is one autograd function, which could keep it to the end."""
    shape = (4, 64, 32, 32)
    plain, ours = nn.Conv2d(64, 64, 3, padding=1, bias=False), dcnet.DecoupledConv2d(64, 64, 3, padding=1)
    (_, plain_peak), (_, peak) = (scripts[0].held_and_peak(layer, shape) for layer in (plain, ours))
    assert peak <= 1.4 * plain_peak
    y = ours(torch.randn(shape, requires_grad=True))
    first, second = (torch.autograd.grad(y, ours.weight, torch.ones_like(y), retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0])


@pytest.mark.slow
def test_time_of_some_geometries(scripts):
    """Loosely, since machines differ; what was measured is in benchmarks/results/geometries_cpu.csv."""
    in_turns, geometries = scripts
    by_name = {str(geometry): geometry for geometry in geometries.GEOMETRIES}
    for name, most in (
        ("128→128 3×3 at 28², dilation 2", 2.0),
        ("128→128 3×3 at 56², groups 32", 3.5),
        ("192→192 7×7 at 28², groups 192", 4.0),
        ("480→480 3×3 at 14², groups 480", 15.0),
    ):
        geometry = by_name[name]
        shape, sizes = (4, geometry.inputs, geometry.size, geometry.size), (geometry.inputs, geometry.outputs)
        layers = {
            "plain": nn.Conv2d(*sizes, geometry.kernel, **geometry.options, bias=False),
            "ours": dcnet.DecoupledConv2d(*sizes, geometry.kernel, **geometry.options),
        }
        times = in_turns.seconds_in_turns(in_turns.steps_of(layers, shape), 5, time.process_time)
        assert in_turns.ratios(times, "plain")["ours"] <= most, name
