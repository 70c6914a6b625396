"""No implementation computes a gradient that `torch.autograd.grad` was not asked for.

An attack asks for that of an image only.
"""

import importlib.util

import pytest
import torch

import dcnet


def gradients_computed(y, asked):
    """Return the gradients that are asked for, and the shapes of all that autograd's nodes return on the way."""
    shapes, seen, waiting = set(), set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        node.register_hook(lambda inputs, outputs: shapes.update(tuple(g.shape) for g in inputs if g is not None))
        waiting += [behind for behind, _ in node.next_functions]
    return torch.autograd.grad(y.square().sum(), asked), shapes


CASES = [(impl, groups) for impl in ("eager", "fused") for groups in (1, 2, 8)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, inside Triton's interpreter
@pytest.mark.parametrize(("impl", "groups"), CASES)
def test_only_what_is_asked_for(impl, groups, passes):
    if impl == "fused" and (not passes or importlib.util.find_spec("triton") is None):
        pytest.skip("once is enough, with Triton")
    device = "cuda" if impl == "fused" and torch.cuda.is_available() else "cpu"
    layer = dcnet.DecoupledConv2d(8, 16, 3, groups=groups, magnitude="tanh", impl=impl).eval().to(device)
    x, kernel = torch.rand(2, 8, 6, 5, device=device, requires_grad=True), tuple(layer.weight.shape)
    both, of_both = gradients_computed(layer(x), [x, layer.weight])
    assert {tuple(x.shape), kernel} <= of_both
    (of_x,), shapes = gradients_computed(layer(x), [x])
    assert kernel not in shapes
    (of_weight,), shapes = gradients_computed(layer(x), [layer.weight])
    assert tuple(x.shape) not in shapes
    assert torch.equal(of_x, both[0])
    assert torch.equal(of_weight, both[1])
    computed = torch.rand_like(x, requires_grad=True)
    (behind,), shapes = gradients_computed(layer(computed.exp()), [computed])
    assert kernel not in shapes
    assert behind.isfinite().all()
    layer(x).square().sum().backward()
    assert torch.equal(x.grad, both[0])
    assert torch.equal(layer.weight.grad, both[1])


def test_an_attack_does_not_ask_for_kernels(passes):
    model = dcnet.create_model("cnn9_narrow", num_classes=10, magnitude="seg").eval()
    x = torch.rand(1, 3, 32, 32, requires_grad=True)
    (found,), shapes = gradients_computed(model(x), [x])
    kernels = {tuple(parameter.shape) for name, parameter in model.named_parameters() if "conv.weight" in name}
    assert not kernels & shapes
    assert found.isfinite().all()
    assert all(parameter.grad is None for parameter in model.parameters())
