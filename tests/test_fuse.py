"""`fuse_`: BatchNorm and activation in a convolution's pass, in other people's models; same results, keys and hooks."""

import copy
import functools
import io
import pickle
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import dcnet
from dcnet.fusing import fuse_, unfuse_
from dcnet.fusing.following import Following
from dcnet.models.external import External
from dcnet.models.parts import Normalize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Residual(nn.Module):
    """A block as torchvision writes it: one ReLU in place, called twice, and an addition."""

    def __init__(self, activation=None):
        super().__init__()
        torch.manual_seed(1)
        self.conv1, self.bn1 = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.relu = activation or nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


def converted(model, fuse=True, example=True, magnitude="tanh"):
    torch.manual_seed(0)
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.weight, 1.0, 0.2)
            nn.init.normal_(module.bias, 0.0, 0.2)
    dcnet.decouple_(model, magnitude)
    unfuse_(model)
    if fuse:
        fuse_(model, torch.randn(2, 6, 8, 8) if example else None)
    return model


def results(model, training=True):
    model.train(training)
    x = torch.randn(2, 6, 8, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()], *[b.clone() for b in model.buffers()]]


def assert_same(model, reference):
    for training in (True, False):
        for a, b in zip(results(model, training), results(reference, training), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        model.zero_grad()
        reference.zero_grad()


ACTIVATIONS = [
    nn.ReLU(),
    nn.ReLU6(),
    nn.SiLU(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.Hardswish(),
    nn.LeakyReLU(0.2),
    nn.PReLU(8),
]


@pytest.mark.parametrize("example", [True, False], ids=["run", "traced"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_sequential(activation, example):
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.Identity(), copy.deepcopy(activation), nn.Flatten())
    net, reference = converted(model, example=example), converted(model, fuse=False)
    assert isinstance(net[1], Following)
    assert isinstance(net[3], Following)
    assert list(net.state_dict()) == list(reference.state_dict())
    assert_same(net, reference)
    assert "fused into 0" in repr(net[1])


@pytest.mark.parametrize("example", [True, False], ids=["run", "traced"])
def test_a_shared_activation(example):
    net, reference = converted(Residual(), example=example), converted(Residual(), fuse=False)
    assert net.conv1.fusion.activation is not None
    assert net.conv2.fusion.activation is None  # an addition comes first
    assert_same(net, reference)
    # SiLU applied twice is another function: only BatchNorm is fused
    net = converted(Residual(nn.SiLU()), example=example)
    assert net.conv1.fusion.activation is None
    assert_same(net, converted(Residual(nn.SiLU()), fuse=False))


def test_what_lies_between_is_read():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.act = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()

        def forward(self, x):
            y = self.conv(x)
            return self.act(self.bn(y)) + y

    for example in (torch.randn(2, 6, 8, 8), None):
        net = Reads()
        dcnet.decouple_(net)
        unfuse_(net)
        report = fuse_(net, example)
        assert report.fused == {}
        assert "its result is read by" in report.left["conv"]


@pytest.mark.parametrize("example", [True, False], ids=["run", "traced"])
@pytest.mark.parametrize("activation", [*ACTIVATIONS[:6], nn.ReLU(inplace=True)], ids=repr)
def test_an_activation_alone(activation, example):
    first, second = copy.deepcopy(activation), copy.deepcopy(activation)
    model = nn.Sequential(nn.Conv2d(6, 8, 3), first, nn.Dropout(0.0), nn.Conv2d(8, 4, 3, bias=False), second)
    net, reference = converted(model, example=example), converted(model, fuse=False)
    assert [isinstance(module, Following) for module in net] == [False, True, False, False, True]
    assert_same(net, reference)
    if isinstance(activation, nn.SiLU):
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        x = torch.randn(2, 6, 8, 8)
        torch.testing.assert_close(compiled(x), net(x))


def test_an_activation_alone_that_gets_something_else():
    """Nothing says so when the model is looked at; later it would be wrong."""
    noise = []

    class Changes(nn.Module):
        def __init__(self, again=False):
            super().__init__()
            self.conv, self.act, self.again = nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), again

        def forward(self, x):
            y = self.conv(x)
            y = self.act(y - noise[0] if noise else y)
            return self.act(y) if self.again else y

    for example in (torch.randn(2, 6, 8, 8), None):
        net = Changes().eval()
        dcnet.decouple_(net, example_input=torch.randn(2, 6, 8, 8))
        unfuse_(net)
        assert fuse_(net, example).fused == {"conv": ["act"]}
        net(torch.randn(2, 6, 8, 8))
        noise.append(1.0)
        with pytest.raises(RuntimeError, match="conv has applied the activation behind it, but its result was changed"):
            net(torch.randn(2, 6, 8, 8))
        noise.clear()
        twice = Changes(again=True).eval()
        dcnet.decouple_(twice)
        unfuse_(twice)
        assert fuse_(twice, example).left == {"conv": "not with ReLU, which is called 2 times"}


class ReadInTraining(nn.Module):
    """What lies between convolution and BatchNorm is a result too, in one of the modes."""

    def __init__(self, where):
        super().__init__()
        self.conv, self.bn, self.act, self.where = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), where

    def forward(self, x):
        y = self.conv(x)
        z = self.bn(y)
        a = self.act(z)
        between = {"conv": y, "bn": z}[self.where]
        return (a.mean((2, 3)) + between.mean((2, 3))) if self.training else a.mean((2, 3))


@pytest.mark.parametrize("example", [torch.randn(2, 6, 8, 8), None], ids=["run", "traced"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("where", ["conv", "bn"])
def test_results_that_are_read_in_training_only(example, training, where):
    """Whatever the mode in which the model is looked at."""
    net = ReadInTraining(where).train(training)
    reference = copy.deepcopy(net)
    report = dcnet.decouple_(net, example_input=example).fused
    dcnet.decouple_(reference, fuse=False)
    reason = "what follows is not the same in training"
    if where == "conv":
        assert report.left == {"conv": reason}
    else:
        assert list(report.fused) == ["conv"]
        assert "act" not in report.fused["conv"]
    assert net.training is training
    assert_same(net, reference)


def test_looking_at_a_model_changes_nothing():
    net = nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.Dropout(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6))
    dcnet.decouple_(net, fuse=False)
    before = copy.deepcopy(net.state_dict())
    generator = torch.get_rng_state()
    assert len(fuse_(net.eval(), torch.randn(2, 6, 8, 8, generator=torch.Generator())).fused) == 2
    assert torch.equal(torch.get_rng_state(), generator)
    assert not net.training
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_example_that_training_does_not_take():
    net = nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6))
    report = dcnet.decouple_(net, example_input=torch.randn(1, 6, 3, 3))  # one value a channel
    assert "in training the model cannot be run on this example_input (ValueError: Expected more than 1" in str(report)
    assert report.fused.fused == {}
    assert fuse_(net, torch.randn(2, 6, 3, 3)).fused == {"0": ["1"]}


@pytest.mark.parametrize("example", [torch.randn(2, 6, 8, 8), None], ids=["run", "traced"])
def test_a_compiled_model(example):
    net = nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU()).eval()
    reference = copy.deepcopy(net)
    torch.compiler.reset()
    compiled = torch.compile(net, backend="eager")
    x = torch.randn(2, 6, 8, 8)
    compiled(x)
    assert dcnet.decouple_(compiled, example_input=example).fused.fused == {
        "_orig_mod.0": ["_orig_mod.1", "_orig_mod.2"]
    }
    dcnet.decouple_(reference, fuse=False)
    for model in (compiled, net):
        torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-6)


def test_a_model_for_several_devices():
    net = nn.DataParallel(nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU()))
    assert dcnet.decouple_(net).fused.fused == {"module.0": ["module.1", "module.2"]}


def test_nothing_is_converted_if_the_look_fails(monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dcnet.converting.convert.fuse_", fail)
    net = nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(KeyboardInterrupt):
        dcnet.decouple_(net, optimizer=optimizer)
    assert type(net[0]) is nn.Conv2d
    assert len(optimizer.param_groups) == 1


def test_several_threads_use_one_model():
    """One is between convolution and BatchNorm while another goes through both: neither hands on for the other."""

    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.act = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.SiLU()

        def forward(self, x):
            y = self.conv(x)
            between.pop()()
            return self.act(self.bn(y))

    def nothing():
        pass

    net, between = Waits().eval(), [nothing] * 3
    dcnet.decouple_(net, fuse=False)
    x = torch.randn(2, 6, 8, 8)
    expected = net(x)
    assert fuse_(net, x).fused == {"conv": ["bn", "act"]}
    found = []

    def elsewhere():
        thread = threading.Thread(target=lambda: found.append(net(x).detach()))
        thread.start()
        thread.join()

    between[:] = [nothing, elsewhere]
    torch.testing.assert_close(net(x), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-6)


def test_other_followers_are_left():
    first = nn.Conv2d(6, 8, 3), nn.LeakyReLU(), nn.Conv2d(8, 8, 3), nn.Tanh()
    net = nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Tanh())
    dcnet.decouple_(net)
    unfuse_(net)
    report = fuse_(net)
    assert report.left == {
        "0": "followed by LeakyReLU, which is fused behind a BatchNorm only",
        "2": "followed by Tanh; possible: BatchNorm1d, 2d, 3d or an activation",
    }
    assert report.fused == {"4": ["5 (not with Tanh)"]}
    assert str(report).splitlines()[0] == "1 fused, 2 left"


def test_a_model_that_cannot_be_traced():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)

        def forward(self, x):
            return self.bn(self.conv(x if x.sum() > 0 else -x))

    net = Looks()
    report = dcnet.decouple_(net)
    assert f"note: none does the work of a BatchNorm behind it: {report.fused.left['conv']}" in str(report)
    unfuse_(net)
    assert "give an example_input" in fuse_(net).left["conv"]
    assert fuse_(net, torch.randn(2, 6, 8, 8)).fused == {"conv": ["bn"]}


@pytest.mark.parametrize("channels", [1, 3])
def test_networks_that_recipes_name(channels):
    """What `--model timm:…` wraps a network in does not hide it from torch.fx."""
    net = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    model = External(net, 3, Normalize())
    reference = copy.deepcopy(model)
    assert dcnet.decouple_(model).fused.fused == {"net.0": ["net.1", "net.2"]}
    dcnet.decouple_(reference, fuse=False)
    x = torch.rand(2, channels, 8, 8)
    torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(x), model(x.expand(-1, 3, -1, -1)))


def test_hooks_see_what_they_would():
    net, reference = converted(Residual()).eval(), converted(Residual(), fuse=False).eval()
    x = torch.randn(2, 6, 8, 8)
    for name in ("conv1", "bn1", "relu"):
        seen = []
        handles = [
            getattr(model, name).register_forward_hook(lambda _, i, o, s=seen: s.append((i[0].clone(), o.clone())))
            for model in (net, reference)
        ]
        torch.testing.assert_close(net(x), reference(x), rtol=1e-5, atol=1e-6)
        for handle in handles:
            handle.remove()
        half = len(seen) // 2
        for (i, o), (j, p) in zip(seen[:half], seen[half:], strict=True):
            torch.testing.assert_close(i, j, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(o, p, rtol=1e-5, atol=1e-6)
    handle = register_module_forward_hook(lambda *_: None)
    torch.testing.assert_close(net(x), reference(x), rtol=1e-5, atol=1e-6)
    handle.remove()


def test_hooks_of_containers_see_tensors_only():
    net = nn.Sequential(nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)), nn.ReLU())
    seen = []
    net[0].register_forward_hook(lambda _, inputs, output: seen.append(type(output)))
    dcnet.decouple_(net)
    assert seen == []
    unfuse_(net)
    assert "0 has hooks" in fuse_(net).left["0.0"]
    x = torch.randn(2, 6, 8, 8)
    assert fuse_(net, x).fused == {"0.0": ["0.1", "1"]}
    assert set(seen) == {torch.Tensor}
    outputs = []
    net[0].register_forward_hook(lambda _, inputs, output: outputs.append(output))
    net.eval()(x)
    unfuse_(net)(x)
    torch.testing.assert_close(outputs[0], outputs[1])  # before the ReLU
    assert outputs[0].min() < 0.0


def test_surgery_afterwards():
    """A replaced norm computes for itself; a wrapped convolution is not fused; a changed result is an error."""
    x = torch.randn(2, 6, 8, 8)
    net, reference = converted(Residual()).eval(), converted(Residual(), fuse=False).eval()
    for model in (net, reference):
        model.bn1 = nn.InstanceNorm2d(8)
    torch.testing.assert_close(net(x), reference(x), rtol=1e-5, atol=1e-6)

    class Twice(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2.0 * self.inner(x)

    net, reference = converted(Residual()).eval(), converted(Residual(), fuse=False).eval()
    for model in (net, reference):
        model.conv1 = Twice(model.conv1)
    torch.testing.assert_close(net(x), reference(x), rtol=1e-5, atol=1e-6)

    class Asks(nn.Sequential):  # code that cannot be recorded
        def forward(self, x):
            return self[1](self[0](x)) if isinstance(x, torch.Tensor) else x

    net = converted(Asks(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6))).eval()
    with pytest.raises(RuntimeError, match=r"0 has applied the BatchNorm behind it.*dcnet.unfuse_"):
        net[1](net[0](x) + 1.0)


def test_copies_and_pickles():
    net = converted(Residual())
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other.conv1.fusion.conv.parent is other
        assert_same(other, converted(Residual(), fuse=False))
    assert not any(isinstance(module, Following) for module in unfuse_(net).modules())
    assert_same(net, converted(Residual(), fuse=False))


def test_fx_and_compile_after_fusion():
    net, reference = converted(Residual()).eval(), converted(Residual(), fuse=False).eval()
    x = torch.randn(2, 6, 8, 8)
    torch.testing.assert_close(torch.fx.symbolic_trace(net)(x), reference(x), rtol=1e-5, atol=1e-6)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), reference(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(compiled(x), net(x), rtol=1e-5, atol=1e-6)
    program = torch.export.export(net, (x,))
    torch.testing.assert_close(program.module()(x), reference(x), rtol=1e-5, atol=1e-6)


def test_our_own_blocks_are_left_alone():
    net = dcnet.create_model("resnet32", num_classes=10)
    report = fuse_(net)
    assert report.fused == {}
    assert set(report.left.values()) == {"part of a Block already"}


def test_the_norm_is_computed_once(monkeypatch):
    """The modules behind a fused convolution do not compute again."""
    net = converted(nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.SiLU())).eval()
    monkeypatch.setattr(nn.BatchNorm2d, "forward", lambda *_: pytest.fail("BatchNorm computed"))
    monkeypatch.setattr(nn.SiLU, "forward", lambda *_: pytest.fail("SiLU computed"))
    net(torch.randn(2, 6, 8, 8))


class Caching(nn.Module):
    """Keeps what it has computed for a device, as timm's LeViT does, and the sizes and the last of its inputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.bias = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Parameter(torch.ones(3, 1, 1))
        self.cache, self.sizes = {"cpu": self.bias}, []

    def forward(self, x):
        key = str(x.device)
        self.cache[key] = self.bias * 2.0
        self.sizes.append(x.shape)
        self.last = x
        return self.bn(self.conv(x)) + self.cache[key]


def test_recording_leaves_nothing_in_a_model():
    """torch.fx runs the model's code on stand-ins for tensors, which cannot be copied later."""
    model = Caching().eval()
    cache, sizes, attributes = model.cache, model.sizes, set(vars(model))
    assert dcnet.decouple_(model).fused.fused == {"conv": ["bn"]}
    assert model.cache is cache
    assert list(cache) == ["cpu"]
    assert cache["cpu"] is model.bias
    assert model.sizes is sizes == []
    assert set(vars(model)) == attributes
    copy.deepcopy(model)


class Plain(nn.Module):
    """Code that torch.fx cannot record; between: what is done before the activation."""

    def __init__(self, between=None, start=None, reentrant=True):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.act, self.head = nn.SiLU(), nn.Conv2d(3, 2, 1)
        self.between, self.start, self.reentrant = between, start, reentrant

    def rest(self, x):
        return self.head(self.act(self.bn(x) if self.start == "bn" else x))

    def forward(self, x):
        y = self.conv(x) if x.detach().sum().item() < 1e9 else x
        if self.start:
            y = y if self.start == "bn" else self.bn(y)
            return checkpoint(self.rest, y, use_reentrant=self.reentrant)
        y = self.bn(y)
        return self.head(self.act(y if self.between is None else self.between(y)))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("start", ["bn", "act"])
def test_checkpoints_that_begin_behind_a_convolution(start, reentrant):
    """What is repeated in backward begins with the convolution's fused result, for two inputs in turn."""
    fused, x = Plain(start=start, reentrant=reentrant), torch.randn(4, 3, 6, 6, requires_grad=True)
    plain = copy.deepcopy(fused)
    dcnet.decouple_(plain, fuse=False)
    dcnet.decouple_(fused, example_input=x.detach())
    assert fused.conv.fusion is not None
    for net in (fused, plain):
        (net(x).square().sum() + net(2 * x).square().sum()).backward()
    for (name, one), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


@pytest.mark.parametrize("between", [torch.clone, lambda y: y * 0.5, lambda y: nn.functional.avg_pool2d(y, 2)])
def test_an_activation_that_gets_something_else_later(between):
    net, x = Plain(), torch.randn(2, 3, 6, 6)
    dcnet.decouple_(net, example_input=x)
    net(x)
    net.between = between
    with pytest.raises(RuntimeError, match="conv has applied the activation behind it, but its result was changed"):
        net(x)
    unfuse_(net)(x)


def _unpickled(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copied", [copy.deepcopy, _unpickled])
def test_parts_of_copies(copied):
    """They compute what parts of the original do, and a convolution takes no other modules along."""
    net, x = (
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.SiLU(), nn.Conv2d(6, 4, 3)).eval(),
        torch.randn(2, 3, 8, 8),
    )
    net[1].running_mean.normal_()
    dcnet.decouple_(net)
    plain = unfuse_(copy.deepcopy(net))
    twin = copied(net)
    assert torch.equal(twin[:2](x), plain[:2](x))  # before all of it has run
    assert torch.equal(twin[0](x), plain[0](x))
    assert twin[0].fusion is twin[1].fusions[0] is not None
    assert torch.equal(twin(x), plain(x))
    assert torch.equal(copied(net[:2])(x), plain[:2](x))
    other = Plain()
    dcnet.decouple_(other, example_input=x)
    for conv in (net[0], other.conv):
        alone = copied(conv)
        assert alone.fusion is None
        assert b"BatchNorm" not in pickle.dumps(conv)
    assert torch.equal(copied(other.conv)(x), unfuse_(copied(other)).conv(x))


@pytest.mark.parametrize("options", [{"track_running_stats": False}, {"affine": False}, {}])
@pytest.mark.parametrize("slope", [0, 1, 0.1])
def test_slopes_behind_any_batch_norm(options, slope):
    if options == {"affine": False}:
        options = {"affine": False, "track_running_stats": False}
    net, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **options), nn.LeakyReLU(slope)),
        torch.randn(2, 3, 6, 6),
    )
    plain = copy.deepcopy(net)
    dcnet.decouple_(net)
    dcnet.decouple_(plain, fuse=False)
    assert net[0].fusion is not None
    torch.testing.assert_close(net(x), plain(x))


def test_checkpoints_of_a_convolution_that_is_not_fused_this_time():
    """An input without a batch: BatchNorm1d takes another dimension for the channels, and does its work itself."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.bn(self.conv(x if x.detach().sum().item() < 1e9 else -x)).square()

    fused, x = Net(), torch.randn(3, 4, requires_grad=True)
    plain = copy.deepcopy(fused)
    dcnet.decouple_(plain, fuse=False)
    dcnet.decouple_(fused, example_input=torch.randn(2, 3, 4))
    assert fused.conv.fusion is not None
    for net in (fused, plain):
        checkpoint(net, x, use_reentrant=False).sum().backward()
    for (name, one), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


@pytest.mark.parametrize("decoupled", [False, True])
def test_checkpoints_after_the_convolution_was_replaced(decoupled):
    """The BatchNorm behind it does its own work again, also when it is repeated in backward."""
    fused, x = Plain(start="bn"), torch.randn(4, 3, 6, 6, requires_grad=True)
    plain = copy.deepcopy(fused)
    dcnet.decouple_(plain, fuse=False)
    dcnet.decouple_(fused, example_input=x.detach())
    other = nn.Conv2d(3, 3, 3, padding=1)
    if decoupled:
        other = dcnet.DecoupledConv2d(3, 3, 3, padding=1)
    for net in (fused, plain):
        net.conv = copy.deepcopy(other)
        net(x).square().sum().backward()
    for (name, one), another in zip(fused.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, another.grad, msg=name)


class Keeps(nn.Module):
    """What lies between is kept in the model, where anybody may read it."""

    def __init__(self, where, within):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
        self.where, self.within, self.kept = where, within, {}

    def keep(self, name, y):
        if name == self.where:
            self.kept[name] = (y,) if self.within else y
        return y

    def forward(self, x):
        return self.act(self.keep("bn", self.bn(self.keep("conv", self.conv(x)))))


@pytest.mark.parametrize("example", [torch.randn(2, 6, 8, 8), None], ids=["run", "traced"])
@pytest.mark.parametrize("within", [False, True], ids=["itself", "in a tuple"])
@pytest.mark.parametrize("where", ["conv", "bn"])
def test_results_that_the_model_keeps(where, within, example):
    net, x = Keeps(where, within), torch.randn(2, 6, 8, 8)
    reference = copy.deepcopy(net)
    dcnet.decouple_(reference, fuse=False)
    report = dcnet.decouple_(net, example_input=example).fused
    if where == "conv":
        assert report.left == {"conv": "the model keeps its result"}
    else:
        assert report.fused == {"conv": ["bn"]}
    for model in (net, reference):
        model(x)
    kept, expected = (model.kept[where][0] if within else model.kept[where] for model in (net, reference))
    torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-6)


LOOKS = {
    "numpy": lambda y: y.detach().numpy(),
    "list": lambda y: y.tolist(),
    "array": lambda y: np.asarray(y.detach()),
    "text": str,
    "number": lambda y: y.mean().item(),
    "one number": lambda y: float(y[0, 0, 0, 0]),
    "comparison": lambda y: torch.equal(y, y),
    "file": lambda y: torch.save(y, io.BytesIO()),
    "address": lambda y: y.data_ptr(),
    "shape": lambda y: (
        y.shape,
        y.size(),
        y.dtype,
        y.dim(),
        y.numel(),
        y.device,
        len(y),
        y.stride(),
        y.is_contiguous(),
    ),
}


@pytest.mark.parametrize("what", LOOKS)
def test_code_that_looks_at_a_result(what):
    """Whatever comes of it; its shape is no part of it."""

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)

        def forward(self, x):
            y = self.conv(x)
            LOOKS[what](y)
            return self.bn(y)

    report = dcnet.decouple_(Looks(), example_input=torch.randn(2, 6, 8, 8)).fused
    if what == "shape":
        assert report.fused == {"conv": ["bn"]}
    else:
        assert report.left == {"conv": "its result is read by the code of Looks"}


@pytest.mark.parametrize("asks", ["requires_grad", "grad_fn"])
def test_gradients_of_results_that_code_asks_for(asks):
    """A look at a model is without gradients: code that wants one of a result only asks whether there is one."""
    seen = []

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)

        def forward(self, x):
            y = self.conv(x)
            if y.requires_grad if asks == "requires_grad" else y.grad_fn is not None:
                y.register_hook(seen.append)
            return self.bn(y).square()

    net, x = Asks(), torch.randn(2, 6, 8, 8)
    reference = copy.deepcopy(net)
    dcnet.decouple_(reference, fuse=False)
    assert dcnet.decouple_(net, example_input=x).fused.left == {"conv": "its result is read by the code of Asks"}
    for model in (net, reference):
        model(x).sum().backward()
    torch.testing.assert_close(*seen)


def test_an_activation_that_is_called_again_later():
    """Only what the convolution has just returned is handed through, and once."""
    again = []

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act = nn.Conv2d(6, 6, 3), nn.SiLU()

        def forward(self, x):
            y = self.act(self.conv(x))
            return self.act(y) if again else y

    net, x = Again(), torch.randn(2, 6, 8, 8)
    reference = copy.deepcopy(net)
    dcnet.decouple_(reference, fuse=False)
    assert dcnet.decouple_(net, example_input=x).fused.fused == {"conv": ["act"]}
    again.append(True)
    torch.testing.assert_close(net(x), reference(x), rtol=1e-5, atol=1e-6)


def test_a_norm_that_is_not_called_any_more():
    """The convolution has done its work all the same, which is said once."""
    net, x = Plain(), torch.randn(2, 3, 6, 6)
    dcnet.decouple_(net, example_input=x)
    plain = unfuse_(copy.deepcopy(net))
    net(x)
    net.conv(x)  # nobody can know yet that the norm will not follow
    with pytest.warns(RuntimeWarning, match=r"conv does the work of bn too, which was not called.*dcnet\.unfuse_"):
        net.conv(x)
    net.conv(x)  # a second warning would be an error here
    torch.testing.assert_close(net(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_checkpoints_of_a_convolution_without_its_norm(momentum, reentrant):
    """Its averages move once a step, as they would if the norm did its own work behind the checkpoint."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum)

        def forward(self, x):
            y = (
                self.conv(x)
                if getattr(self.conv, "fusion", None) is None
                else checkpoint(self.conv, x, use_reentrant=reentrant)
            )
            return self.bn(y).square() if x.detach().sum().item() < 1e9 else y

    net, x = Net(), torch.randn(4, 3, 6, 6, requires_grad=True)
    reference = copy.deepcopy(net)
    dcnet.decouple_(reference, fuse=False)
    dcnet.decouple_(net, example_input=x.detach(), fuse=False)
    report = fuse_(net, x.detach())
    assert report.fused == {"conv": ["bn"]}
    for model in (net, reference):
        for i in range(3):
            model(x * (i + 1.0)).sum().backward()
    for (name, one), other in zip(net.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    for (name, one), other in zip(net.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


class Features(nn.Module):
    """Code that torch.fx cannot record for good, and that gives an intermediate result away when it is told to."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
        self.features, self.take, self.mode, self.calls, self.log = False, [1], "end", 0, []

    def forward(self, x):
        self.calls += 1
        self.log.append("called")
        y = self.conv(x)
        z = self.act(self.bn(y))
        all_of_them = (y, z) if self.mode == "end" else (y, y)
        return (z, y) if self.features else tuple(all_of_them[i] for i in self.take)


def _another_forward(self, x):
    y = self.conv(x)
    return self.act(self.bn(y)), y


def _wrapped(model):
    plain = model.forward

    @functools.wraps(plain)
    def forward(*arguments):
        return plain(*arguments)

    return forward


@pytest.mark.parametrize("inside", [False, True], ids=["itself", "inside"])
@pytest.mark.parametrize("example", [torch.randn(2, 6, 8, 8), None], ids=["run", "traced"])
@pytest.mark.parametrize(
    ("change", "stays"),
    [
        (lambda m: setattr(m, "features", True), False),
        (lambda m: setattr(m, "take", (0, 1)), False),
        (lambda m: m.take.insert(0, 0), False),
        (lambda m: setattr(m, "mode", "start"), False),
        (lambda m: setattr(m, "forward", types.MethodType(_another_forward, m)), False),
        (lambda m: setattr(type(m), "forward", _another_forward), False),
        (lambda m: setattr(m, "forward", _wrapped(m)), True),
        (lambda m: m.train(), True),
        (lambda m: setattr(m, "name", "another"), True),
    ],
    ids=["flag", "tuple", "list", "name", "forward", "class", "wrapped", "mode", "unknown"],
)
def test_settings_that_change_later(change, stays, example, inside, monkeypatch):
    """Where they choose which results code gives away; what code counts and keeps has no part in that."""
    monkeypatch.setattr(Features, "forward", Features.forward)  # restored at the end
    net = nn.Sequential(nn.Identity(), Features()).eval() if inside else Features().eval()
    reference, x = copy.deepcopy(net), torch.randn(2, 6, 8, 8)
    dcnet.decouple_(reference, fuse=False)
    dcnet.decouple_(net, example_input=example)
    inner = net[1] if inside else net
    assert inner.conv.fusion is not None
    for when in ("before", "after"):
        torch.testing.assert_close(net(x), reference(x), rtol=1e-5, atol=1e-6)
        assert inner.conv.fusion.fuses(inner.conv) is (stays or when == "before")
        for model in (net, reference):
            change(model[1] if inside else model)
    torch.testing.assert_close(net(x), reference(x), rtol=1e-5, atol=1e-6)


def test_arguments_that_the_example_does_not_give():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)

        def forward(self, x, features=False):
            y = self.conv(x)
            return (self.bn(y), y) if features else self.bn(y)

    class Scaled(Optional):
        def forward(self, x, scale=1.0):
            return self.bn(self.conv(x)) * scale

    class Listed(Optional):
        """The code is that of the module around the list."""

        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([self.conv, self.bn])
            del self.conv, self.bn

        def forward(self, x, features=False):
            y = self.parts[0](x)
            return (self.parts[1](y), y) if features else self.parts[1](y)

    x = torch.randn(2, 6, 8, 8)
    why = "the code around may be called with other arguments than in the example: features"
    assert dcnet.decouple_(Listed(), example_input=x).fused.left == {"parts.0": why}
    assert dcnet.decouple_(Optional(), example_input=x).fused.left == {"conv": why}
    assert dcnet.decouple_(Scaled(), example_input=x).fused.fused == {"conv": ["bn"]}  # which torch.fx sees is the same
