"""Training on two gloo ranks, with DistributedDataParallel and with FSDP2, against one process on the whole batch."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from helpers import in_two_processes
from torch import nn

import dcnet

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch is built without gloo"
)

WAYS = ("ddp", "fsdp2", "fsdp2, each layer", "fsdp2, weighted first")


def network():
    """Seven kernels at first: two ranks cannot share them evenly."""
    torch.manual_seed(1)
    return nn.Sequential(
        dcnet.DecoupledConv2d(4, 7, 3, padding=1, angular="linear"),
        nn.Tanh(),
        dcnet.DecoupledConv2d(7, 4, 3, magnitude="seg", angular="sigmoid:k=learned"),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        dcnet.DecoupledLinear(4 * 16, 3, magnitude="ball"),
    ).double()


def whole_batch():
    return torch.randn(6, 4, 6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(model, bare, x, weight=True):
    """What two steps find: penalties, gradients, parameters, averages. `bare` is the model without a wrapper."""
    dcnet.sync_norms_(bare)
    for module in bare.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # whose statistics are each rank's own
    handle = dcnet.weight_gradients_(bare) if weight else None
    optimizer = torch.optim.SGD(dcnet.parameter_groups(bare), lr=0.1)
    dcnet.WeightProjection(bare, optimizer, every=2)
    found = {}
    for step in range(2):
        optimizer.zero_grad()
        y = model(x)
        loss = y.sin().mean()
        found[f"penalties {step}"] = torch.stack(
            [dcnet.orthogonal_penalty(bare), dcnet.orthonormal_penalty(bare)]
        ).detach()
        (loss + 0.1 * dcnet.orthogonal_penalty(bare) + 0.1 * dcnet.orthonormal_penalty(bare)).backward()
        found |= {f"gradient {step} {name}": whole(p.grad) for name, p in bare.named_parameters() if p.grad is not None}
        optimizer.step()
    found |= {f"after {name}": whole(value) for name, value in bare.state_dict().items()}
    if handle is not None:
        handle.remove()
        optimizer.zero_grad()
        model(x).sin().mean().backward()
        found |= {f"unweighted {name}": whole(p.grad) for name, p in bare.named_parameters() if p.grad is not None}
    return found


def prepared(way):
    net = network()
    if way == "ddp":
        model = nn.parallel.DistributedDataParallel(net)
        return model, net
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    if way == "fsdp2, weighted first":
        dcnet.weight_gradients_(net)
    if way == "fsdp2, each layer":
        for layer in net:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, net


def projected_after_evaluation():
    """The norms of kernels projected while FSDP2 had whole ones in place: after an evaluation."""
    model, _ = prepared("fsdp2")
    model.eval()
    with torch.no_grad():
        model(whole_batch())
    assert not hasattr(model[0].weight, "full_tensor")  # whole
    dcnet.project_weights_(model, scale=2.0)
    model.reshard()  # as the next training step does
    return torch.cat([whole(model[i].weight).flatten(1).norm(dim=1) for i in (0, 2, 5)])


def sharded_by_columns():
    """Projected, penalized and weighted kernels of which each rank has some input channels."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    torch.manual_seed(3)
    layer = dcnet.DecoupledConv2d(4, 5, 3, magnitude="sphere").double()
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda p: Shard(1))
    with dcnet.weight_gradients_(layer):
        layer(whole_batch()).sin().mean().backward()
    penalty, gradient = dcnet.orthogonal_penalty(layer).detach(), whole(layer.weight.grad)
    dcnet.project_weights_(layer)
    return penalty, gradient, whole(layer.weight)


def mixed_precision():
    """BatchNorm's averages in a block whose convolution computes in bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(3)
    block = dcnet.layers.Block(dcnet.DecoupledConv2d(4, 6, 3), nn.BatchNorm2d(6))
    fully_shard(
        block.conv, mesh=init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    block(whole_batch().float())
    return block.norm.running_mean.clone()


def refused():
    """What FSDP1 and conversion of a wrapped model get."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    flat = FullyShardedDataParallel(network(), use_orig_params=True, device_id=torch.device("cpu"))
    calls = {
        "penalty": lambda: dcnet.orthogonal_penalty(flat),
        "projection": lambda: dcnet.project_weights_(flat),
        "weighting": lambda: dcnet.weight_gradients_(flat),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


def worker(rank, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = whole_batch()[rank * 3 : rank * 3 + 3]
    found = {way: train(*prepared(way), x, weight="first" not in way) for way in WAYS}
    local, _ = prepared("fsdp2")
    local(x)
    before = {name: whole(b) for name, b in local.named_buffers()}
    dcnet.average_statistics_(local)
    found["averages"] = (before, {name: whole(b) for name, b in local.named_buffers()})
    found["projected"], found["columns"], found["mixed"] = (
        projected_after_evaluation(),
        sharded_by_columns(),
        mixed_precision(),
    )
    found["refused"] = refused()
    results[rank] = found
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks():
    results = in_two_processes(worker)
    return [results[0], results[1]]


@pytest.mark.parametrize("way", WAYS)
def test_steps_equal_those_of_one_process(ranks, way):
    net = network()
    expected = train(net, net, whole_batch())
    norms = [float(p.norm()) for name, p in expected.items() if "after" in name and "0.weight" in name]
    assert norms == pytest.approx([7**0.5])
    for rank in ranks:
        for name, value in rank[way].items():
            torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}")
        assert len([name for name in rank[way] if name.startswith("gradient")]) == len(
            [name for name in expected if name.startswith("gradient")]
        )


def test_weighting_matters_here():
    """The comparison above can fail: gradients without weights are others."""
    net, plain = network(), network()
    weighted, unweighted = train(net, net, whole_batch()), train(plain, plain, whole_batch(), weight=False)
    name = "gradient 0 0.weight"
    assert float((weighted[name] - unweighted[name]).norm()) > 0.1 * float(unweighted[name].norm())


def test_projection_after_an_evaluation(ranks):
    for rank in ranks:
        torch.testing.assert_close(rank["projected"], torch.full((14,), 2.0, dtype=torch.float64))


def test_kernels_shared_by_columns(ranks):
    torch.manual_seed(3)
    layer = dcnet.DecoupledConv2d(4, 5, 3, magnitude="sphere").double()
    with dcnet.weight_gradients_(layer):
        layer(whole_batch()).sin().mean().backward()
    penalty = dcnet.orthogonal_penalty(layer).detach()
    dcnet.project_weights_(layer)
    for rank in ranks:
        for value, expected in zip(rank["columns"], (penalty, layer.weight.grad, layer.weight.detach()), strict=True):
            torch.testing.assert_close(value, expected)


def test_averages_of_sharded_models(ranks):
    (before0, after0), (before1, after1) = (rank["averages"] for rank in ranks)
    for name in before0:
        if "num_batches" not in name:
            assert not torch.equal(before0[name], before1[name])
            torch.testing.assert_close(after0[name], (before0[name] + before1[name]) / 2)
            assert torch.equal(after0[name], after1[name])


def test_running_averages_move_under_mixed_precision(ranks):
    assert float(ranks[0]["mixed"].abs().max()) > 0.0


def test_fsdp1_is_refused_by_name(ranks):
    for rank in ranks:
        assert set(rank["refused"]) == {"penalty", "projection", "weighting"}
        assert all("FullyShardedDataParallel" in text for text in rank["refused"].values())


def test_weighted_gradients_of_a_compiled_model(tmp_path):
    """FSDP2 itself breaks the graph, so a full one cannot be had."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def model():
        torch.manual_seed(3)
        return nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3, magnitude="sphere"), nn.ReLU())

    x, expected = torch.randn(2, 3, 6, 6), model()
    dcnet.weight_gradients_(expected)
    expected(x).sum().backward()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        net = fully_shard(model(), mesh=init_device_mesh("cpu", (1,)))
        dcnet.weight_gradients_(net)
        torch.compile(net, backend="aot_eager")(x).sum().backward()
        torch.testing.assert_close(whole(net[0].weight.grad), expected[0].weight.grad)
    finally:
        dist.destroy_process_group()


def test_copies_and_files_have_standard_gradients(tmp_path):
    layer = dcnet.DecoupledConv2d(3, 4, 3)
    x = torch.randn(2, 3, 5, 5)
    layer(x).sum().backward()
    standard = layer.weight.grad.clone()
    handle = dcnet.weight_gradients_(layer)
    torch.save(layer, tmp_path / "layer.pt")
    for other in (copy.deepcopy(layer), torch.load(tmp_path / "layer.pt", weights_only=False)):
        other.zero_grad()
        other(x).sum().backward()
        torch.testing.assert_close(other.weight.grad, standard)
    # new kernels in the same layer are weighted like the old ones
    layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)
    layer.zero_grad()
    layer(x).sum().backward()
    norms = (layer.weight.detach().square().sum((1, 2, 3), keepdim=True) + layer.eps).sqrt()
    torch.testing.assert_close(layer.weight.grad, standard * norms)
    handle.remove()
    layer.zero_grad()
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, standard)
