"""The running average of E{‖x‖}, and what else a layer as compiled passes must not change."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dcnet
from dcnet.ops.cpu import native_layer
from dcnet.ops.cpu.native import compiler


@pytest.fixture(autouse=True)
def used(compiled_also_if_small, monkeypatch):
    """Compiled passes also for small maps; the list says for each layer whether they were used."""
    found, real = [], native_layer.decouple

    def decouple(*given):
        y = real(*given)
        found.append(y is not None)
        return y

    monkeypatch.setattr(native_layer, "decouple", decouple)
    return found


def two(**options):
    """Return a layer, and one that is the same but leaves all to the reference."""
    layers = [dcnet.DecoupledConv2d(4, 6, 3, groups=2, impl=impl, **options) for impl in ("eager", "reference")]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers


@pytest.mark.parametrize("momentum", [0.1, 0.9, 1.0, None])
def test_running_average(used, momentum):
    ours, reference = two(momentum=momentum)
    for number in range(4):
        x = torch.randn(3, 4, 6, 6) * (number + 1)
        for layer in (ours, reference):
            layer(x)
        torch.testing.assert_close(ours.running_norm, reference.running_norm)
        assert ours.num_batches_tracked == reference.num_batches_tracked == number + 1
    for layer in (ours, reference):
        layer.eval()
    torch.testing.assert_close(ours(x), reference(x))
    assert used == [True] * 5


def test_a_mean_that_is_not_finite_leaves_the_average_of_its_group_alone(used):
    ours, reference = two()
    x = torch.randn(3, 4, 6, 6)
    ours(x), reference(x)
    x[0, 0, 2, 2] = float("nan")  # of the first group
    before = ours.running_norm.clone()
    ours(x), reference(x)
    assert ours.running_norm[0] == before[0]
    torch.testing.assert_close(ours.running_norm[1], reference.running_norm[1])
    assert ours.num_batches_tracked == reference.num_batches_tracked == 1
    assert used == [True, True]


def test_a_recomputation_does_not_move_the_average(used):
    layer, _ = two()
    x = torch.randn(3, 4, 6, 6, requires_grad=True)
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert used == [True, True]
    assert layer.num_batches_tracked == 1
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.num_batches_tracked == 2


def test_autograd_sees_that_the_average_has_moved(used):
    layer, _ = two()
    scale = torch.ones(2, requires_grad=True)
    product = scale * layer.running_norm  # whose gradient needs the average as it is now
    layer(torch.randn(3, 4, 6, 6))
    assert used == [True]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_gradient_in_a_literal_radius_and_in_a_given_mean(used):
    x, w = torch.randn(3, 4, 6, 6), torch.randn(6, 4, 3, 3)
    found = []
    for impl in ("eager", "reference"):
        radius, mean = torch.full((6,), 2.0, requires_grad=True), torch.tensor([1.5], requires_grad=True)
        of_radius = dcnet.decoupled_conv2d(x, w, radius=radius, impl=impl)
        of_both = dcnet.decoupled_conv2d(x, w, radius=radius, mean_norm=mean, impl=impl)
        of_batch = dcnet.decoupled_conv2d(x, w, radius=radius, mean_norm="batch", impl=impl)
        gradients = torch.autograd.grad((of_radius + of_both + of_batch).square().sum(), [radius, mean])
        found.append([of_radius, of_both, of_batch, *gradients])
    torch.testing.assert_close(*found)
    assert used == [True, False, True]  # not where a gradient in E{‖x‖} is wanted


def test_the_first_layer_of_a_network_and_a_frozen_one(used):
    net = nn.Sequential(*two()[:1], dcnet.DecoupledConv2d(6, 5, 3).requires_grad_(False))
    net(torch.randn(3, 4, 8, 8)).sum().backward()
    assert net[0].weight.grad is not None
    assert net[1].weight.grad is None
    assert used == [True, True]


def test_left_to_pytorch(used, monkeypatch):
    layer, _ = two()
    x = torch.randn(3, 4, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    layer.double()(x.double())
    layer.float().eps = 0.0
    layer(x)
    assert used == [False] * 3
    layer.eps = 1e-4
    y = layer(x)
    monkeypatch.setenv(compiler.SWITCH, "0")
    torch.testing.assert_close(layer(x), y)
    assert used[3:] == [True, False]
