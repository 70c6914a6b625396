"""Maps in any memory order, where whatever is allocated holds NaN: nothing is read before it is written."""

import pytest
import torch
from helpers import as_float64, assert_within_rule
from torch import nn

import dcnet

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, inside the interpreter
    pytest.mark.filterwarnings("ignore:.*[Dd]eterministic:UserWarning"),  # cuBLAS says it cannot promise that
]


def _last(t):
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


# each returns a view that takes the values of a tensor
ORDERS = {
    "contiguous": torch.empty_like,
    "channels_last": lambda t: _last(torch.empty_like(t)),
    "some channels": lambda t: t.new_empty(len(t), 3 * t.shape[1], *t.shape[2:])[:, t.shape[1] : 2 * t.shape[1]],
    "some channels, channels_last": lambda t: _last(t.new_empty(len(t), 3 * t.shape[1], *t.shape[2:]))[:, 1::3],
    "every second column": lambda t: t.new_empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2],
    "every second image": lambda t: t.new_empty(2 * len(t), *t.shape[1:])[::2],
    "columns first": lambda t: t.new_empty(*t.shape[:-2], t.shape[-1], t.shape[-2]).mT,
    "images last": lambda t: t.new_empty(*t.shape[1:], len(t)).movedim(-1, 0),
    "not aligned": lambda t: t.new_empty(t.numel() + 1)[1:].view(t.shape),
}
REPEATED = {
    "one image": lambda t: t[:1].expand(t.shape),
    "one channel": lambda t: t[:, :1].expand(t.shape),
    "one column": lambda t: t[..., :1].expand(t.shape),
}
LAYERS = {
    "dense": lambda **options: dcnet.DecoupledConv2d(8, 6, 3, padding=1, **options),
    "1×1": lambda **options: dcnet.DecoupledConv2d(8, 6, 1, magnitude="seg", bias=True, **options),
    "groups": lambda **options: dcnet.DecoupledConv2d(8, 6, 3, stride=2, groups=2, weighting="joint", **options),
    "depthwise": lambda **options: dcnet.DecoupledConv2d(8, 8, 3, padding=1, groups=8, **options),
    "depthwise, reflected": lambda **options: dcnet.DecoupledConv2d(
        8, 16, 3, padding=1, groups=8, padding_mode="reflect", angular="sigmoid:k=learned", **options
    ),
    "block": lambda **options: dcnet.Block(
        dcnet.DecoupledConv2d(8, 6, 3, padding=1, **options), nn.BatchNorm2d(6), "relu"
    ),
    "depthwise block": lambda **options: dcnet.Block(
        dcnet.DecoupledConv2d(8, 8, 3, padding=1, groups=8, **options), nn.BatchNorm2d(8), "silu"
    ),
}


@pytest.fixture
def new_memory_is_nan():
    """Fill what PyTorch allocates with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def _ordered(values, order):
    return REPEATED[order](values) if order in REPEATED else ORDERS[order](values).copy_(values)


def _results(layer, x, e, residual):
    leaves = {"x": x.detach().requires_grad_(), **dict(layer.named_parameters())}
    if residual is not None:
        leaves["residual"] = residual.detach().requires_grad_()
    y = layer(leaves["x"]) if residual is None else layer(leaves["x"], leaves["residual"])
    return {"y": y.detach()} | dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), e), strict=True))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("order", [*ORDERS, *REPEATED])
def test_maps_in_any_memory_order(order, name, new_memory_is_nan):
    check(order, name, "eager", 9, "cpu")


@pytest.mark.parametrize("name", ["dense", "depthwise", "block"])
@pytest.mark.parametrize("order", ["some channels", "some channels, channels_last", "not aligned", "one image"])
def test_kernels(order, name, new_memory_is_nan):
    check(order, name, "fused", 2, "cuda" if torch.cuda.is_available() else "cpu")


def check(order, name, impl, images, device):
    torch.manual_seed(0)
    ours, reference, exact = (LAYERS[name](impl=one).to(device) for one in (impl, "reference", "reference"))
    reference.load_state_dict(ours.state_dict())
    exact.load_state_dict(ours.state_dict())
    exact.double()
    x = torch.randn(images, 8, 6, 5).to(device)
    with torch.no_grad():
        shape = exact.eval()(x.double()).shape
    exact.train()
    e, residual = torch.randn(shape).to(device), torch.randn(shape).to(device) if name == "block" else None
    maps = {"x": x, "e": e} | ({} if residual is None else {"residual": residual})
    maps = {map_name: _ordered(values, order) for map_name, values in maps.items()}
    dense = {map_name: values.contiguous() for map_name, values in maps.items()}

    def run(layer, given):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return _results(layer, given["x"], given["e"], given.get("residual"))

    assert_within_rule(run(ours, maps), run(reference, dense), run(exact, as_float64(dense)))
