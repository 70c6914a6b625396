"""The fused kernels in use: checkpointing, export, several ranks, half precision, CUDA graphs; their memory."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from helpers import in_two_processes
from torch import nn
from torch.utils.checkpoint import checkpoint

import dcnet
from dcnet.layers import Block, Chain

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, inside the interpreter


@pytest.fixture(autouse=True)
def exact_convolutions():
    with torch.backends.cudnn.flags(enabled=False):
        yield


def network(impl="fused", **options):
    torch.manual_seed(1)
    net = Chain(
        Block(
            dcnet.DecoupledConv2d(4, 8, 3, padding=1, angular="linear", impl=impl, **options), nn.BatchNorm2d(8), "relu"
        ),
        Block(
            dcnet.DecoupledConv2d(8, 4, 3, magnitude="seg", angular="sigmoid:k=learned", impl=impl, **options),
            nn.BatchNorm2d(4),
            "prelu",
        ),
        nn.Flatten(),
        dcnet.DecoupledLinear(4 * 4, 3, magnitude="ball", weighting="separate", impl=impl, **options),
    )
    return net.to(DEVICE)


def batch():
    return torch.randn(6, 4, 4, 4, generator=torch.Generator().manual_seed(2)).to(DEVICE)


def step(net, x):
    """Output and gradients of one training step, and the running averages after it."""
    net.zero_grad()
    x = x.clone().requires_grad_()
    y = net(x)
    y.sin().mean().backward()
    return (
        {"output": y.detach(), "x": x.grad}
        | {name: p.grad for name, p in net.named_parameters()}
        | dict(net.named_buffers())
    )


def assert_same(actual, expected, **tolerances):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name],
            value,
            msg=lambda text, name=name: f"{name}: {text}",
            **(tolerances or {"rtol": 1e-3, "atol": 1e-5}),
        )


def test_a_training_step():
    assert_same(step(network(), batch()), step(network("eager"), batch()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_once(reentrant):
    layers = [dcnet.DecoupledConv2d(4, 6, 3, groups=groups, impl="fused").to(DEVICE) for groups in (1, 2)]
    for layer in layers:
        expected = step(copy.deepcopy(layer), batch())
        x = batch().requires_grad_()
        checkpoint(layer, x, use_reentrant=reentrant).sin().mean().backward()
        assert layer.num_batches_tracked == 1
        torch.testing.assert_close(x.grad, expected["x"])
        torch.testing.assert_close(layer.running_norm, expected["running_norm"])


def test_without_gradients_the_same():
    """Inference writes over the dot product; with gradients both are kept."""
    net = network()
    step(net, batch())
    net.eval()
    with torch.inference_mode():
        y = net(batch())
    torch.testing.assert_close(y, net(batch()), rtol=0, atol=0)
    net.train()
    other = copy.deepcopy(net)
    with torch.no_grad():
        torch.testing.assert_close(net(batch()), other(batch()))
    assert_same(dict(net.named_buffers()), dict(other.named_buffers()))


@pytest.mark.parametrize("strict", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_export(strict):
    net = network()
    step(net, batch())
    net.eval()
    program = torch.export.export(net, (batch(),), strict=strict)
    assert any("dcnet" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(batch()), net(batch()))


def test_half_precision_layers():
    net = network().bfloat16() if GPU else network().half()
    reference = network("eager").to(next(net.parameters()).dtype)
    dtype = next(net.parameters()).dtype
    actual, expected = step(net, batch().to(dtype)), step(reference, batch().to(dtype))
    assert all(actual[name].dtype == value.dtype for name, value in expected.items())
    torch.testing.assert_close(actual["output"], expected["output"], rtol=0.05, atol=0.05)


def test_tensors_elsewhere():
    layer = dcnet.DecoupledConv2d(4, 6, 3, impl="fused").to(DEVICE)
    layer.raw_radius = nn.Parameter(torch.ones(6, device="meta"))
    with pytest.raises(ValueError, match=f"the input is on {DEVICE}.*, but its radius is on meta"):
        layer(batch())


def test_vectors_with_gaps():
    """Kernels read vectors as if they had none."""
    x, weight, bias, radius = (
        batch(),
        torch.randn(6, 4, 3, 3, device=DEVICE),
        torch.randn(12, device=DEVICE),
        torch.rand(12, device=DEVICE) + 0.5,
    )
    y = [
        dcnet.decoupled_conv2d(
            x, weight, bias[::2], padding=1, radius=radius[::2], mean_norm=torch.ones(1, device=DEVICE), impl=impl
        )
        for impl in ("fused", "reference")
    ]
    torch.testing.assert_close(*y, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU")
def test_cuda_graph_of_a_training_step():
    net, other, static = network(), network(), batch()
    for _ in range(3):
        step(net, static)
        step(other, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    net.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        y = net(static)
        y.sin().mean().backward()
    static.copy_(batch().flip(0))
    graph.replay()
    expected = step(other, batch().flip(0))
    torch.testing.assert_close(y, expected["output"])
    assert_same(dict(net.named_buffers()), dict(other.named_buffers()))


# -- several ranks -----------------------------------------------------------------------------------------------------


def worker(rank, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = batch()[:2] if rank == 0 else batch()[2:]
    layer = decoupled(sync=True)
    results[rank] = step(nn.parallel.DistributedDataParallel(layer), x)
    lopsided = decoupled(sync=True)
    results[f"{rank} lopsided"] = step(lopsided, batch() if rank == 0 else batch()[:0])
    dist.barrier()
    dist.destroy_process_group()


def decoupled(**options):
    torch.manual_seed(1)
    return dcnet.DecoupledConv2d(4, 6, 3, groups=2, angular="linear", impl="fused", **options)


@pytest.mark.skipif(GPU or not dist.is_gloo_available(), reason="gloo adds up on the CPU, in the interpreter")
def test_two_ranks_are_one_batch():
    ranks = in_two_processes(worker)
    expected = step(decoupled(), batch())
    torch.testing.assert_close(torch.cat([ranks[0]["output"], ranks[1]["output"]]), expected["output"])
    for rank in (0, 1):
        torch.testing.assert_close(ranks[rank]["module.running_norm"], expected["running_norm"])
    torch.testing.assert_close(ranks["0 lopsided"]["output"], expected["output"])
    torch.testing.assert_close(ranks["1 lopsided"]["running_norm"], expected["running_norm"])


# -- memory ------------------------------------------------------------------------------------------------------------


class Guards:
    """Buffers lie between margins nobody may write to, filled with NaN.

    What is read before it is written shows in the results.
    """

    MARGIN = 64

    def __init__(self):
        self.kept = []

    def around(self, shape, stride, dtype, device):
        size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
        whole = torch.full((size + 2 * self.MARGIN,), float("nan"), dtype=dtype, device=device)
        self.kept.append((whole, size))
        return whole.as_strided(shape, stride, self.MARGIN)

    def empty(self, shape, *, dtype, device):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        stride = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            stride[i] = stride[i + 1] * max(1, shape[i + 1])
        return self.around(shape, stride, dtype, device)

    def empty_like(self, tensor, dtype=None):
        return self.around(tuple(tensor.shape), tensor.stride(), dtype or tensor.dtype, tensor.device)

    def check(self):
        assert self.kept
        for whole, size in self.kept:
            assert whole[: self.MARGIN].isnan().all()
            assert whole[self.MARGIN + size :].isnan().all()


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"momentum": None}], ids=["", "cumulative"]
)
def test_nobody_writes_outside(monkeypatch, options):
    from dcnet.ops.fused import host, layout, op, plan

    monkeypatch.setenv("DCNET_NATIVE", "0")  # C++ allocates in its own way
    monkeypatch.setattr(host.HOST, "module", None)
    expected = step(network(**options), batch())
    guards = Guards()

    class Torch:
        empty, empty_like = staticmethod(guards.empty), staticmethod(guards.empty_like)

        def __getattr__(self, name):
            return getattr(torch, name)

    for module in (layout, op, plan):
        monkeypatch.setattr(module, "torch", Torch())
    net = network(**options)
    x = guards.empty(batch().shape, dtype=torch.float32, device=DEVICE).copy_(batch())
    for parameter in net.parameters():
        parameter.data = guards.empty_like(parameter.data).copy_(parameter.data)
    actual = step(net, x)
    guards.check()
    assert len(guards.kept) > 30
    assert_same(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_batch_norm_that_nobody_counts(compiled):
    """Averages move without `num_batches_tracked` too."""
    blocks = []
    for impl in ("eager", "fused"):
        torch.manual_seed(0)
        block = Block(dcnet.DecoupledConv2d(4, 6, 3, magnitude="sphere", impl=impl), nn.BatchNorm2d(6), None).to(DEVICE)
        block.norm.num_batches_tracked = None
        blocks.append(block)
    expected, actual = blocks
    expected(batch())
    (torch.compile(actual, fullgraph=True) if compiled else actual)(batch())
    assert_same(dict(actual.named_buffers()), dict(expected.named_buffers()))
    assert (actual.norm.running_var != 1.0).all()
