"""Weight projection, weighted gradients, penalties, parameter groups."""

import copy

import pytest
import torch
from torch import nn

import dcnet
from dcnet.ops import kernel_norm


def network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        dcnet.DecoupledConv2d(4, 6, 3, groups=2, bias=True, angular="sigmoid:k=learned"),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        dcnet.DecoupledLinear(6, 3, magnitude="linear"),
    )


def with_weighted():
    return nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3), dcnet.DecoupledConv2d(4, 4, 3, weighting="linear"))


def norms(layer):
    return layer.weight.detach().double().flatten(1).norm(dim=1)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_projection(scale):
    net = network()
    net[1].weight.data[2] = 0.0
    net[1].weight.data[3] *= 1e-25  # its squares vanish in float32
    direction = net[1].weight.detach().clone()
    plain = net[0].weight.detach().clone()
    assert dcnet.project_weights_(net, scale) == ["1", "4"]
    expected = torch.full((6,), scale, dtype=torch.float64)
    expected[2] = 0.0  # a zero kernel is left alone
    torch.testing.assert_close(norms(net[1]), expected, rtol=1e-7, atol=0.0)
    torch.testing.assert_close(norms(net[4]), torch.full((3,), scale, dtype=torch.float64), rtol=1e-7, atol=0.0)
    assert torch.equal(net[0].weight, plain)
    cosine = torch.cosine_similarity(net[1].weight.double().flatten(1), 1e20 * direction.double().flatten(1))
    assert cosine[[0, 1, 3, 4, 5]].tolist() == pytest.approx([1.0] * 5)


def test_projection_in_float64_is_exact():
    layer = dcnet.DecoupledConv2d(4, 8, 3, dtype=torch.float64)
    dcnet.project_weights_(layer)
    torch.testing.assert_close(
        layer.weight.square().flatten(1).sum(1), torch.ones(8, dtype=torch.float64), rtol=1e-15, atol=0.0
    )


@pytest.mark.parametrize("tool", [dcnet.project_weights_, dcnet.weight_gradients_])
def test_weighted_operators_are_refused(tool):
    net = with_weighted()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=r"layer '1' has weighting='linear'.*where="):
        tool(net)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    net(torch.randn(1, 3, 6, 6)).sum().backward()
    assert not net[0].weight._backward_hooks
    tool(net, where=lambda name, layer: name != "1")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="layer '1'"):
        dcnet.WeightProjection(net, optimizer)


@pytest.mark.parametrize("tool", [dcnet.project_weights_, dcnet.weight_gradients_])
def test_kernels_that_other_layers_share_are_refused(tool):
    """A plain layer's output depends on their norm."""
    net = nn.ModuleDict({"embedding": nn.Embedding(11, 8), "head": dcnet.DecoupledLinear(8, 11)})
    net["head"].weight = net["embedding"].weight
    before = net["head"].weight.detach().clone()
    with pytest.raises(ValueError, match=r"layer 'head', which are also those of 'embedding' \(Embedding\).*'!head'"):
        tool(net)
    assert torch.equal(net["head"].weight, before)
    twins = nn.Sequential(dcnet.DecoupledLinear(8, 8), dcnet.DecoupledLinear(8, 8))
    twins[1].weight = twins[0].weight
    tool(twins)


def test_weight_projection_counts_steps():
    net = network()
    optimizer = torch.optim.SGD(
        net.parameters(), lr=0.5
    )  # the gradient is orthogonal to the kernel: small steps hardly change ‖w‖
    projection = dcnet.WeightProjection(net, optimizer, scale=1.5, every=3)
    x = torch.randn(2, 3, 5, 5)

    def step():
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
        return bool(torch.allclose(norms(net[1]), torch.tensor(1.5).double(), rtol=1e-6))

    assert [step() for _ in range(6)] == [False, False, True, False, False, True]
    step()
    saved = projection.state_dict()
    assert saved == {"steps": 7, "every": 3, "scale": 1.5}
    projection.remove()
    assert [step() for _ in range(3)] == [False] * 3
    resumed = dcnet.WeightProjection(net, optimizer, every=3)
    resumed.load_state_dict(saved)
    assert [step() for _ in range(2)] == [False, True]
    with pytest.raises(ValueError, match="not the state of a WeightProjection"):
        resumed.load_state_dict({"step": 3})
    for bad in ({"every": 0}, {"every": 1.5}, {"scale": 0.0}, {"scale": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            dcnet.WeightProjection(net, optimizer, **bad)


def test_weighted_gradients_are_the_norm_times_the_standard_ones():
    net = network().double()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)

    def gradients():
        net.zero_grad()
        net(x).sin().sum().backward()
        return {name: p.grad.clone() for name, p in net.named_parameters()}

    standard = gradients()
    handle = dcnet.weight_gradients_(net)
    weighted = gradients()
    for name, grad in standard.items():
        layer = net[int(name.partition(".")[0])]
        if name in ("1.weight", "4.weight"):
            norm = kernel_norm(layer.weight.detach(), layer.eps).reshape(-1, *[1] * (grad.dim() - 1))
            assert torch.equal(weighted[name], grad * norm)
        else:
            assert torch.equal(weighted[name], grad)
    handle.remove()
    handle.remove()
    for name, grad in gradients().items():
        assert torch.equal(grad, standard[name])
    with dcnet.weight_gradients_(net):
        assert torch.equal(gradients()["1.weight"], weighted["1.weight"])
    assert torch.equal(gradients()["1.weight"], standard["1.weight"])


def test_weighted_gradients_of_a_shared_kernel_once():
    layer = dcnet.DecoupledConv2d(3, 3, 1).double()
    net = nn.Sequential(layer, layer)
    twin = dcnet.DecoupledConv2d(3, 3, 1).double()
    twin.weight = layer.weight
    net.append(twin)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    net(x).sin().sum().backward()
    standard = layer.weight.grad.clone()
    layer.weight.grad = None
    dcnet.weight_gradients_(net)
    net(x).sin().sum().backward()
    torch.testing.assert_close(
        layer.weight.grad, standard * kernel_norm(layer.weight.detach()).reshape(-1, 1, 1, 1), rtol=1e-12, atol=1e-12
    )


def test_parametrized_kernels():
    layer = nn.utils.parametrizations.weight_norm(dcnet.DecoupledConv2d(3, 4, 3))
    for tool in (dcnet.project_weights_, dcnet.weight_gradients_):
        with pytest.raises(ValueError, match=r"computed from other parameters \(parametrizations.weight.original0"):
            tool(layer)
    (exempt,) = dcnet.parameter_groups(layer)
    assert exempt["weight_decay"] == 0.0
    assert len(exempt["params"]) == 3


@pytest.mark.parametrize("penalty", [dcnet.orthogonal_penalty, dcnet.orthonormal_penalty])
def test_penalties_compute_parametrized_kernels_once(penalty):
    """spectral_norm moves by a step whenever they are."""
    computed = []

    class Watched(nn.Module):
        def forward(self, weight):
            computed.append(weight)
            return weight

    layer = dcnet.DecoupledConv2d(3, 4, 3)
    wanted = penalty(layer)
    nn.utils.parametrize.register_parametrization(layer, "weight", Watched())
    computed.clear()
    assert torch.equal(penalty(layer), wanted)
    assert len(computed) == 1


def test_weighting_twice_is_refused():
    layer = dcnet.DecoupledConv2d(3, 4, 3)
    handle = dcnet.weight_gradients_(layer)
    with pytest.raises(ValueError, match="weighted already"):
        dcnet.weight_gradients_(layer)
    handle.remove()
    dcnet.weight_gradients_(layer)


def test_penalties():
    net = network().double()
    orthogonal = orthonormal = 0.0
    for layer, groups in ((net[1], 2), (net[4], 1)):
        for kernels in layer.weight.flatten(1).chunk(groups):
            w = kernels.T  # columns are kernels
            product = w.T @ w
            orthonormal += (product - torch.eye(len(product), dtype=torch.float64)).norm() ** 2
            orthogonal += (product - product.diag().diag()).norm() ** 2
    torch.testing.assert_close(dcnet.orthogonal_penalty(net), orthogonal)
    torch.testing.assert_close(dcnet.orthonormal_penalty(net), orthonormal)
    wanted = [net[1].weight, net[4].weight]
    for mine, theirs in ((dcnet.orthogonal_penalty(net), orthogonal), (dcnet.orthonormal_penalty(net), orthonormal)):
        for a, b in zip(
            torch.autograd.grad(mine, wanted), torch.autograd.grad(theirs, wanted, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(a, b)
    weighted = with_weighted()
    assert torch.equal(dcnet.orthonormal_penalty(weighted), dcnet.orthonormal_penalty(weighted[:1]))
    assert dcnet.orthogonal_penalty(nn.Conv2d(3, 3, 1)).item() == 0.0
    net.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dcnet.orthogonal_penalty(net).dtype == torch.float32
        torch.testing.assert_close(
            dcnet.orthogonal_penalty(net).double(), orthogonal.detach(), rtol=1e-5, atol=0.0, check_dtype=False
        )


@pytest.mark.parametrize("together", [1, 600, 2**22])
def test_layers_alike_are_penalized_together(together, monkeypatch):
    """Each by itself, or some of them in one product: the same penalty, and the same gradients."""
    monkeypatch.setattr("dcnet.layers.penalties._TOGETHER", together)
    alike = [dcnet.DecoupledConv2d(4, 6, 3, groups=2) for _ in range(5)]
    net = nn.Sequential(*alike, dcnet.DecoupledConv2d(6, 4, 3), dcnet.DecoupledLinear(4, 6).double())
    penalty = dcnet.orthogonal_penalty(net)
    expected = sum(dcnet.orthogonal_penalty(layer) for layer in net)
    torch.testing.assert_close(penalty, expected, check_dtype=False, rtol=1e-6, atol=0.0)
    weights = [layer.weight for layer in net]
    in_order = dcnet.orthogonal_penalty(copy.deepcopy(net).to(memory_format=torch.channels_last))
    torch.testing.assert_close(in_order, penalty, check_dtype=False, rtol=1e-6, atol=0.0)
    gradients = (torch.autograd.grad(one, weights) for one in (penalty, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_orthogonal_kernels_have_no_penalty():
    layer = dcnet.DecoupledLinear(8, 4)
    nn.init.orthogonal_(layer.weight)
    assert dcnet.orthonormal_penalty(layer).item() == pytest.approx(0.0, abs=1e-10)
    layer.weight.data *= 3.0
    assert dcnet.orthogonal_penalty(layer).item() == pytest.approx(0.0, abs=1e-8)
    assert dcnet.orthonormal_penalty(layer).item() == pytest.approx(4 * 64.0, rel=1e-5)


def test_parameter_groups():
    net = nn.Sequential(network(), with_weighted())
    decay, exempt = dcnet.parameter_groups(net, weight_decay=0.1)
    names = {p: name for name, p in net.named_parameters()}
    assert (decay["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    assert {names[p] for p in exempt["params"]} == {
        "0.1.weight",
        "0.1.raw_radius",
        "0.1.raw_k",
        "0.4.weight",
        "1.0.weight",
        "1.0.raw_radius",
        "1.1.raw_radius",
    }
    assert {names[p] for p in decay["params"]} == {
        "0.0.weight",
        "0.0.bias",
        "0.1.bias",
        "0.2.weight",
        "0.2.bias",
        "1.1.weight",
    }
    torch.optim.SGD([decay, exempt], lr=0.1)
    assert len(dcnet.parameter_groups(nn.Linear(2, 2))) == 1
    with pytest.raises(ValueError, match="weight_decay must be a finite number ≥ 0, got -1"):
        dcnet.parameter_groups(net, weight_decay=-1)


def test_weighted_gradients_of_kernels_that_thaw_later():
    layer, x = dcnet.DecoupledConv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    layer(x).square().sum().backward()
    usual = layer.weight.grad.clone()
    layer.weight.grad = None
    layer.weight.requires_grad_(False)
    with dcnet.weight_gradients_(layer):
        layer.weight.requires_grad_(True)
        layer(x).square().sum().backward()
    norms = layer.weight.detach().flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    torch.testing.assert_close(layer.weight.grad, usual * norms, rtol=1e-3, atol=1e-5)


def test_lbfgs_cannot_take_more_groups():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.raises(ValueError, match="LBFGS, which takes one group of parameters"):
        dcnet.decouple_(model, optimizer=torch.optim.LBFGS(model.parameters()))
    assert type(model[0]) is nn.Conv2d
