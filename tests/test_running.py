"""One run of a model on an example: which module made a tensor, who read it, and nothing left behind."""

import gc
import weakref

import pytest
import torch
from torch import nn

from dcnet.fusing.running import Flow, evaluating, run_once


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu, self.wrapped = (
            *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Conv2d(4, 4, 1)),
        )

    def forward(self, x):
        y = self.conv(x)
        assert y.shape[1] == 4  # asking for a shape reads nothing
        z = self.relu(self.norm(y))
        return self.wrapped(z) + z, y


def test_who_made_and_who_read():
    net = Net()
    flow, returned = run_once(net, torch.randn(2, 3, 6, 6), net.modules())
    calls = {call.module: call for call in flow.calls}
    assert [call.module for call in flow.calls] == [
        *(net.conv, net.norm, net.relu, net.wrapped[0], net.wrapped, net),
    ]
    y, z = calls[net.conv].output, calls[net.norm].output
    assert y.readers == [net.norm]
    assert calls[net.norm].input is y
    assert calls[net.relu].output is z  # in place: the same tensor
    assert z.readers == [net.relu, net.wrapped[0], net]
    assert calls[net.wrapped].output is calls[net.wrapped[0]].output  # handed through
    assert calls[net.wrapped].output.readers == [net]
    assert calls[net.conv].single
    assert calls[net].output is None  # a tuple
    assert returned == {y}  # the sum was made by no module that returns a tensor
    assert net.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_only_what_is_watched_counts():
    net = Net()
    flow, _ = run_once(net, (torch.randn(2, 3, 6, 6),), [net.conv, net.norm])
    assert [call.module for call in flow.calls] == [net.conv, net.norm]
    assert flow.calls[1].output.readers == [None] * 3  # of no watched module
    flow, _ = run_once(net, {"x": torch.randn(2, 3, 6, 6)}, [net.conv])
    assert flow.calls[0].output.readers == [None]


def test_pauses_and_errors_leave_nothing_behind():
    net, flow = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), None
    flow = Flow(net)
    kept = []

    def look(module, inputs, output):
        with flow.paused():
            output.sum()
        kept.append(weakref.ref(output))

    handle = net[0].register_forward_hook(look)
    with flow, torch.no_grad():
        net(torch.randn(1, 3, 5, 5))
    handle.remove()
    assert flow.calls[0].output.readers == [net[1]]
    gc.collect()
    assert kept[0]() is None  # tensors are not kept alive
    with pytest.raises(RuntimeError), evaluating(net), Flow(net):
        net(torch.randn(1, 2, 5, 5))
    assert net.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert torch.relu(torch.ones(1)) == 1  # no mode is left either
