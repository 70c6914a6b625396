"""Two gloo processes against one process on the whole batch."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from helpers import in_two_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dcnet

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch is built without gloo"
)


def network(**options):
    torch.manual_seed(1)
    return nn.Sequential(
        dcnet.DecoupledConv2d(4, 6, 3, padding=1, groups=2, angular="linear", **options),
        nn.Tanh(),
        dcnet.DecoupledConv2d(6, 4, 3, magnitude="seg", angular="sigmoid:k=learned", **options),
        nn.Flatten(),
        dcnet.DecoupledLinear(4 * 16, 3, magnitude="ball", **options),
    ).double()


def whole_batch():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(6, 4, 6, 6, generator=generator, dtype=torch.float64)


def step(net, x):
    """Outputs after one training step's forward, gradients of a mean loss, and the running averages."""
    net.zero_grad()
    y = net(x)
    y.sin().mean().backward()
    return y.detach()


def gradients_of(net):
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def worker(rank, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = whole_batch()[rank * 3 : rank * 3 + 3]

    synced = DistributedDataParallel(dcnet.sync_norms_(network()))
    y = step(synced, x)
    averages = {name: b.clone() for name, b in synced.module.named_buffers()}
    # unequal shares: rank 0 has two samples, rank 1 has four
    uneven = network(sync=True)
    x_uneven = whole_batch()[:2] if rank == 0 else whole_batch()[2:]
    y_uneven = uneven(x_uneven).detach()
    # rank 1 has nothing at all
    lopsided = network(sync=True)
    y_lopsided = lopsided(whole_batch() if rank == 0 else whole_batch()[:0])
    y_lopsided.sum().backward()

    local = nn.Sequential(network(), nn.BatchNorm1d(3)).double()
    local(x)
    before = {name: b.clone() for name, b in local.named_buffers()}
    with pytest.raises(ValueError, match="broadcast_buffers=False"):
        dcnet.average_statistics_(DistributedDataParallel(network()))
    assert dcnet.average_statistics_(synced) is synced  # nothing to do, and nothing to complain about
    dcnet.average_statistics_(local)
    after = {name: b.clone() for name, b in local.named_buffers()}
    results[rank] = (y, gradients_of(synced.module), averages, y_uneven, y_lopsided.detach(), before, after)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks():
    results = in_two_processes(worker)
    return [results[0], results[1]]


def test_sync_equals_one_process_on_the_whole_batch(ranks):
    net = network()
    y = step(net, whole_batch())
    torch.testing.assert_close(torch.cat([ranks[0][0], ranks[1][0]]), y)
    for rank in ranks:
        for name, grad in gradients_of(net).items():
            torch.testing.assert_close(rank[1][name], grad, msg=name)
        for name, buffer in net.named_buffers():
            torch.testing.assert_close(rank[2][name], buffer, msg=name)


def test_sync_weighs_unequal_shares(ranks):
    torch.testing.assert_close(torch.cat([ranks[0][3], ranks[1][3]]), network()(whole_batch()))


def test_sync_with_an_empty_share(ranks):
    torch.testing.assert_close(ranks[0][4], network()(whole_batch()))
    assert ranks[1][4].shape == (0, 3)


def test_average_statistics(ranks):
    (*_, before0, after0), (*_, before1, after1) = ranks
    names = [name for name in before0 if "num_batches" not in name]
    assert any("running_mean" in name for name in names)
    assert any("running_norm" in name for name in names)
    for name in names:
        assert not torch.equal(before0[name], before1[name])
        assert torch.equal(after0[name], after1[name])
        torch.testing.assert_close(after0[name], (before0[name] + before1[name]) / 2)


def test_one_process_needs_no_group():
    net = network(sync=True)
    torch.testing.assert_close(net(whole_batch()), network()(whole_batch()))
    before = copy.deepcopy(net.state_dict())
    assert dcnet.average_statistics_(net) is net
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
