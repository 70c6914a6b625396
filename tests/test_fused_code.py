"""`fuse_` in the code of other people's modules: residual additions in a convolution's pass, and energies handed on."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import needs
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import dcnet
from dcnet.fusing import fuse_, unfuse_
from dcnet.fusing.fused_code import run_fused
from dcnet.fusing.rewritten import Rewritten
from dcnet.layers.decoupled import decoupled_layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, inside Triton's interpreter


class Bottleneck(nn.Module):
    """As timm writes it: settings, an Identity on the way, the shortcut computed last, an addition in place."""

    def __init__(self, downsample=False, width=8):
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(width, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(8, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.drop_block, self.act2 = nn.Identity(), nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)) if downsample else None
        )
        self.drop_path = None

    def forward(self, x):
        shortcut = x
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x = self.drop_block(x)
        if self.drop_path is not None:
            x = self.drop_path(x)
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        return self.act2(x)


def stage():
    torch.manual_seed(0)
    return nn.Sequential(Bottleneck(downsample=True), Bottleneck(), Bottleneck())


def pair(make, impl="auto"):
    """Return a fused model and one that is not, with the same parameters."""
    model = make().to(DEVICE)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.2)
            nn.init.normal_(module.bias, 0.0, 0.2)
    dcnet.decouple_(model, "tanh", fuse=False, impl=impl)
    fused = copy.deepcopy(model)
    fuse_(fused)
    return fused, model


def results(model, x, training):
    model.train(training)
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y.float().square().sum() + y.float().sum()).backward()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()], *[b.clone() for b in model.buffers()]]


def assert_same(model, reference, x=None, exact=True):
    x = torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(3)) if x is None else x
    x, exact = x.to(DEVICE), exact and DEVICE == "cpu"
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-3, "atol": 1e-4}
    for training in (True, False):
        for a, b in zip(results(model, x, training), results(reference, x, training), strict=True):
            torch.testing.assert_close(a, b, **tolerance)


def calls_of_addition(monkeypatch):
    """Return a list that gets, for every fused convolution of rewritten code, whether it adds, takes and leaves."""
    seen = []

    def watched(conv, x, energy, leave, residual=None, *rest):
        y, of_y = run_fused(conv, x, energy, leave, residual, *rest)
        seen.append((residual is not None, energy is not None, of_y is not None))
        return y, of_y

    monkeypatch.setattr("dcnet.fusing.fused_code.run_fused", watched)
    return seen


def test_additions_of_a_stage(monkeypatch):
    seen = calls_of_addition(monkeypatch)
    net, reference = pair(stage)
    assert_same(net, reference)
    assert [adds for adds, *_ in seen[:7]] == [False, False, True, False, True, False, True]
    report = fuse_(unfuse_(net))
    assert report.fused["1.conv2"] == ["1.bn2", "an addition", "1.act2"]
    assert "1.conv2: with 1.bn2, an addition, 1.act2" in str(report)
    rewritten = [name for name, module in net.named_modules() if isinstance(module, Rewritten)]
    assert rewritten == ["", "0", "0.downsample", "1", "2"]
    assert type(unfuse_(net)) is nn.Sequential
    assert type(net[0]) is Bottleneck
    assert list(net.state_dict()) == list(reference.state_dict())


def test_energies_go_through_a_stage(monkeypatch):
    """Every map that only convolutions of the stage read takes its energy along, the last one and the shortcut not."""
    seen = calls_of_addition(monkeypatch)
    net, reference = pair(stage, impl="fused")
    assert_same(net, reference, exact=False)
    takes, leaves = [e for _, e, _ in seen[:7]], [left for *_, left in seen[:7]]
    assert takes == [False, False, True, True, True, True, True]
    assert leaves == [True, False, True, True, True, True, False]


def test_a_convolution_in_groups_takes_no_energy(monkeypatch):
    seen = calls_of_addition(monkeypatch)

    def make():
        first, second = (nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False) for groups in (1, 2))
        third, fourth = (nn.Conv2d(8, kernels, 1, bias=False) for kernels in (8, 4))
        return nn.Sequential(
            *(m for conv in (first, second, third, fourth) for m in (conv, nn.BatchNorm2d(len(conv.weight))))
        )

    net, reference = pair(make, impl="fused")
    assert_same(net, reference, exact=False)
    assert [e for _, e, _ in seen[:4]] == [False, False, False, True]
    assert [left for *_, left in seen[:4]] == [False, False, True, False]


class Outer(nn.Module):
    """The convolutions are inside children, the addition is here: as torchvision's inverted residuals are."""

    def __init__(self, skips=True):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()),
            *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)),
        )
        self.skips = skips

    def forward(self, x):
        return x + self.inner(x) if self.skips else self.inner(x)


def test_an_addition_outside(monkeypatch):
    seen = calls_of_addition(monkeypatch)
    net, reference = pair(Outer)
    assert_same(net, reference)
    assert [adds for adds, *_ in seen[:2]] == [False, True]
    x = torch.randn(2, 8, 5, 5, device=DEVICE)
    torch.testing.assert_close(net(x=x), reference(x=x))  # by its name


def test_what_changes_later():
    """A setting, a child, one more module, and hooks on what is not called anymore all count at once."""
    net, reference = pair(Outer)
    for model in (net, reference):
        model.skips = False
    assert_same(net, reference)

    net, reference = pair(stage)
    for model in (net, reference):
        model[1].drop_path = nn.LeakyReLU(0.5)
        model.append(nn.Sigmoid())
    assert_same(net, reference)
    assert type(net[1]).__name__ == "FusedBottleneck"

    for name in ("", "1", "1.drop_block", "1.act2", "1.conv2", "1.bn2", "0.downsample", "0.downsample.1"):
        net, reference = pair(stage)
        seen: list[list[torch.Tensor]] = [[], []]
        for model, all_seen in zip((net, reference), seen, strict=True):
            model.get_submodule(name).register_forward_hook(lambda _, i, o, s=all_seen: s.append(o.detach().clone()))
        assert_same(net, reference)
        assert len(seen[0]) == len(seen[1]) == 2
        for a, b in zip(*seen, strict=True):
            torch.testing.assert_close(a, b, **({"rtol": 0.0, "atol": 0.0} if DEVICE == "cpu" else {}))


class Odd(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.conv, self.bn, self.kind = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), kind

    def forward(self, x):
        y = self.bn(self.conv(x))
        if self.kind == "training" and self.training:
            return y + 2.0 * x
        return y + x


class Asks(Odd):
    def forward(self, x):
        y = self.bn(self.conv(x))
        return y + x if isinstance(x, torch.Tensor) else y


class Calls(Odd):
    def forward(self, x):
        return self.helped(x, self.bn(self.conv(x)))

    def helped(self, x, y):
        return y + x if isinstance(x, torch.Tensor) else y


class Defaults(Odd):
    def forward(self, x, other=None):
        y = self.bn(self.conv(x))
        return y + (x if other is None else other)


class OtherWayRound(Odd):
    def forward(self, x):
        total = 1.0 * x
        total += self.bn(self.conv(x))
        return total + x


@pytest.mark.parametrize("make", [lambda: Odd("training"), *[lambda k=k: k("") for k in (Asks, Calls, Defaults)]])
def test_code_that_depends_on_more_is_not_rewritten(make):
    net, reference = pair(make)
    assert not isinstance(net, Rewritten)
    assert_same(net, reference)


class IntoAnother(Odd):
    def __init__(self):
        super().__init__("")
        self.same = nn.Identity()

    def forward(self, x):
        y = x * 1.0
        total = self.same(y)
        total += self.bn(self.conv(x))
        return torch.cat([total, y], 1)


def test_an_addition_into_something_else():
    """`total += conv` changes total, which others may read."""
    for make in (lambda: OtherWayRound(""), IntoAnother):
        net, reference = pair(make)
        assert not isinstance(net, Rewritten)
        assert_same(net, reference)


class Summed(Odd):
    """With the addition of eager quantization: a module with a child of its own, which is replaced to observe."""

    def __init__(self):
        super().__init__("")
        self.skip, self.relu = torch.ao.nn.quantized.FloatFunctional(), nn.ReLU()

    def forward(self, x):
        return self.relu(self.skip.add(self.bn(self.conv(x)), x))


def test_what_is_inside_a_child_is_not_passed_over():
    net, reference = pair(Summed)
    assert_same(net, reference)
    for model in (net, reference):
        model.skip.activation_post_process = nn.LeakyReLU(-2.0)
    assert_same(net, reference)


class Named(Odd):
    """A setting with the name of a function."""

    add = True

    def __init__(self):
        super().__init__("")
        self.add = True

    def forward(self, x):
        return self.bn(self.conv(x)) + x if self.add else self.bn(self.conv(x))


class OfClass(Odd):
    scaled = False

    def forward(self, x):
        return self.bn(self.conv(x)) + x if not self.scaled else x


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Odd(""), Odd("")])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def set_add(model):
    model.add = False


def set_attribute(model):
    model.scaled = True


def append(model):
    model.blocks.append(nn.Sigmoid())


def pop(model):
    model.blocks.pop(0)


def change_order(model):
    first = model[0]
    del model[0]
    model.append(nn.Sequential(nn.Tanh(), first))


def patch(model):
    model[1].forward = lambda x: 3.0 * x


def patch_a_part(model):
    model[1].bn.forward = torch.sigmoid


def reorder(model):
    first = model._modules.pop("0")
    model.add_module("0", first)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        *((Named, set_add), (lambda: OfClass(""), set_attribute), (Listed, append), (Listed, pop)),
        *((lambda: nn.Sequential(Odd(""), Odd("")), c) for c in (change_order, patch, patch_a_part, reorder)),
    ],
)
def test_more_changes_later(make, change):
    net, reference = pair(make)
    for model in (net, reference):
        change(model)
    assert_same(net, reference)


def test_a_class_that_is_changed_later(monkeypatch):
    class Own(Odd): ...

    Own.forward = lambda self, x: self.bn(self.conv(x)) + x
    net, reference = pair(lambda: nn.Sequential(Own(""), Own("")))
    assert isinstance(net, Rewritten)
    monkeypatch.setattr(Own, "forward", lambda self, x: self.bn(self.conv(x)) - x)
    assert_same(net, reference)


class Doubled(Odd):
    def forward(self, x):
        y = self.bn(self.conv(x))
        return y + y


class ChangedBetween(Odd):
    """In evaluation the dropout returns x itself, which the ReLU changes before the sum."""

    def __init__(self):
        super().__init__("")
        self.drop, self.act = nn.Dropout(0.0), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.bn(self.conv(self.drop(x)))
        return y + self.act(1.0 * x)


class OfPairs(Odd):
    def forward(self, pair):
        x, other = pair
        return self.bn(self.conv(x)) + other


def test_other_sums():
    for make in (lambda: Doubled(""), ChangedBetween):
        net, reference = pair(make)
        assert net.fused_code.joined == {}
        assert_same(net, reference)
    net, reference = pair(lambda: OfPairs(""))
    assert isinstance(net, Rewritten)
    x = torch.randn(2, 8, 5, 5, device=DEVICE)
    for other in (x, 2.0):
        torch.testing.assert_close(net.eval()((x, other)), reference.eval()((x, other)))


def test_a_layer_with_a_forward_of_its_own():
    class Flipped(dcnet.DecoupledConv2d):
        def forward(self, x):
            return super().forward(x.flip(3))

    reference = Odd("")
    reference.conv = Flipped(8, 8, 3, padding=1)
    net = copy.deepcopy(reference.to(DEVICE))
    fuse_(net)
    assert_same(net, reference)


FUNCTIONS = {
    "F.relu({})": "relu",
    "torch.relu({})": "relu",
    "({}).relu()": "relu",
    "({}).relu_()": "relu_",
    "nn.functional.relu({}, inplace=True)": "relu",
    "F.relu6({})": "relu6",
    "F.silu({})": "silu",
    "F.hardswish({})": "hardswish",
    "F.gelu({})": "gelu",
    "F.gelu({}, approximate='tanh')": "gelu",
    "F.leaky_relu({}, 0.2)": "leaky_relu",
    "F.leaky_relu({}, negative_slope=0.3, inplace=True)": "leaky_relu",
}
FORWARD = """
def forward(self, x):
    y = {}
    y = {}
    y = {}
    return self.fc(torch.flatten(y, 1))
"""


class Functional(nn.Module):
    """Activations as functions, behind BatchNorm, behind an addition, and alone."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv3, self.fc = nn.Conv2d(8, 4, 3), nn.Linear(4 * 9, 5)


def functional(function):
    """Return a network whose code calls this function."""
    calls = [function.format(y) for y in ("self.bn1(self.conv1(x))", "self.bn2(self.conv2(y)) + x", "self.conv3(y)")]
    names = {"F": F, "torch": torch, "nn": nn}
    exec(FORWARD.format(*calls), names)
    return type("Net", (Functional,), {"forward": names["forward"]})()


@pytest.mark.parametrize(("function", "name"), FUNCTIONS.items())
def test_activations_that_code_calls(function, name, monkeypatch):
    seen = calls_of_addition(monkeypatch)
    net, reference = pair(lambda: functional(function))
    alone = name != "leaky_relu"  # whose slope has no place in the pass without BatchNorm
    convs = [net.conv1, net.conv2, net.conv3][: 2 + alone]
    assert net.fused_code.convs == convs
    for i, joined in enumerate(net.fused_code.joined.values()):
        assert joined.written == f"{name}()"
        assert (joined.residual is not None) == (i == 1)
    assert_same(net, reference, exact=False)
    assert [adds for adds, *_ in seen[: len(convs)]] == [False, True, False][: len(convs)]
    net = unfuse_(net)
    assert net.conv3.fusion is None
    report = fuse_(net, torch.randn(2, 8, 5, 5, device=DEVICE))
    assert report.fused["conv1"] == ["bn1", f"{name}()"]
    assert report.fused["conv2"] == ["bn2", "an addition", f"{name}()"]
    if alone:
        assert report.fused["conv3"] == [f"{name}()"]
        assert "conv3" not in report.left
    else:
        assert report.left == {"conv3": "its result is read by the code of Net"}
    assert_same(net, reference, exact=False)


class Small(nn.Module):
    """As in the first lesson about PyTorch."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 4, 1), nn.Linear(16, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x))
        x = x.view(x.size(0), -1)
        return F.log_softmax(self.fc(x), dim=1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), nn.Sequential])
def test_activations_that_code_calls_in_copies(copied, monkeypatch):
    seen = calls_of_addition(monkeypatch)
    net, reference = pair(Small)
    twin = copied(net)
    assert_same(twin, reference)
    assert len(seen) == 4
    inner = twin[0] if isinstance(twin, nn.Sequential) else twin
    assert inner.conv1.fusion.conv.parent is inner
    x = torch.randn(2, 8, 5, 5, device=DEVICE)
    assert torch.equal(inner.conv1(x), reference.conv1(x))  # by itself it is not activated
    assert copy.deepcopy(inner.conv1).fusion is None
    del seen[:]
    for one in (inner, reference):
        one.conv1.register_forward_hook(lambda conv, inputs, y: y * 2.0)
    assert_same(twin, reference)
    assert seen == []
    assert isinstance(unfuse_(inner), Small)
    assert type(inner) is Small


@pytest.mark.parametrize("odd", ["another reader", "an option", "a size", "another function"])
def test_functions_that_do_not_join(odd):
    class Net(Functional):
        def forward(self, x):
            y = self.conv3(x)
            if self.odd == "another reader":
                z = F.relu(y) + y
            elif self.odd == "an option":
                z = F.leaky_relu(y, negative_slope=self.bn1.eps)
            elif self.odd == "a size":
                z = F.gelu(y) if y.size(0) > 1 else F.relu(y)
            else:
                z = torch.tanh(y)
            return torch.flatten(z, 1)

    def make():
        net = Net()
        net.odd = odd
        return net

    net, reference = pair(make)
    assert net.conv3.fusion is None
    assert "conv3" in fuse_(unfuse_(net)).left
    assert_same(net, reference)


def test_layers_that_are_called_by_keyword():
    class Named(Bottleneck):
        def forward(self, x):
            y = self.act1(self.bn1(self.conv1(input=x)))
            y = self.bn2(input=self.conv2(input=y))
            return self.act2(y + x)

    net, reference = pair(Named)
    assert net.conv1.fusion is not None
    assert_same(net, reference)
    example = copy.deepcopy(reference)
    assert fuse_(example, torch.randn(2, 8, 5, 5, device=DEVICE)).fused["conv1"] == ["bn1", "act1"]
    assert_same(example, reference)


def test_parts_by_themselves():
    """Slices, single modules and segments of a checkpoint compute what they would without fusion."""

    def flat():
        return nn.Sequential(
            *(m for _ in range(2) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()))
        )

    x = torch.randn(2, 8, 5, 5, device=DEVICE)
    for make in (flat, lambda: nn.Sequential(*stage()[1:])):
        net, reference = (model.eval() for model in pair(make))
        for part in (slice(1), slice(2), slice(1, None)):
            torch.testing.assert_close(net[part](x), reference[part](x))
        torch.testing.assert_close(net[1](net[0](x) + 1.0), reference[1](reference[0](x) + 1.0))
    net, reference = (model.train() for model in pair(flat))
    gradients = []
    for model in (net, reference):
        one = x.clone().requires_grad_()
        checkpoint_sequential(model, 4, one, use_reentrant=True).square().sum().backward()
        gradients.append(one.grad)
    torch.testing.assert_close(*gradients)


def test_the_example_stays_as_it_is():
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    x = torch.randn(2, 8, 5, 5)
    before = x.clone()
    dcnet.decouple_(net, example_input=x)
    torch.testing.assert_close(x, before, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("impl", ["auto", "fused"])
def test_one_value_for_each_channel(impl):
    """BatchNorm has no variance to divide by in training, fused or not."""
    net, reference = pair(lambda: Odd(""), impl)
    for model in (net, reference):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model.train()(torch.randn(1, 8, 1, 1, device=DEVICE))
        assert torch.equal(model.bn.running_mean, torch.zeros(8, device=DEVICE))


def test_a_part_is_fused_before_the_whole():
    net = nn.Sequential(Odd(""), Odd(""))
    dcnet.decouple_(net[0])
    assert list(dcnet.decouple_(net).fused.fused) == ["1.conv"]


def test_a_class_with_rules_for_copies_and_subclasses():
    registered = []

    class Locked(Odd):
        def __init_subclass__(cls, *, name):
            registered.append(name)

        def __init__(self):
            super().__init__("")
            self.lock = (i for i in range(2))  # cannot be copied

        def __getstate__(self):
            return {key: value for key, value in vars(self).items() if key != "lock"}

    net = Locked().to(DEVICE)
    dcnet.decouple_(net)
    assert isinstance(net, Rewritten)
    assert registered == []
    assert isinstance(copy.deepcopy(net), Rewritten)


def test_a_linear_layer_and_batchnorm_over_another_dimension():
    """BatchNorm1d takes the second of three dimensions for the channels, the layer the last."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)).to(DEVICE)
    dcnet.decouple_(reference, types=(nn.Linear,), fuse=False)
    net = copy.deepcopy(reference)
    assert fuse_(net).fused == {"0": ["1"]}
    assert_same(net, reference, torch.randn(4, 8, 16))


def test_a_fused_norm_with_a_parametrization():
    net, reference = pair(lambda: Odd(""))
    for model in (net, reference):
        nn.utils.parametrize.register_parametrization(model.bn, "weight", nn.Softplus())
    assert_same(net, reference)
    unfuse_(net)
    assert nn.utils.parametrize.is_parametrized(net.bn)
    assert_same(net, reference)


@pytest.mark.parametrize("radius", ["learned", 1.5])
def test_parametrized_kernels_are_computed_once(radius):
    """spectral_norm moves by a step whenever they are; a residual's shape is no reason to."""
    computed = []

    class Watched(nn.Module):
        def forward(self, weight):
            computed.append(weight)
            return weight

    model = stage().to(DEVICE)
    dcnet.decouple_(model, "tanh", radius=radius)
    for layer in (convs := decoupled_layers(model)).values():
        nn.utils.parametrize.register_parametrization(layer, "weight", Watched())
    computed.clear()
    model(torch.randn(2, 8, 5, 5, device=DEVICE))
    assert len(computed) == len(convs) == 7


def test_parametrized_kernels_before_a_leaky_relu_are_computed_once():
    """Nor is the dtype of the slope, also where the norm has neither averages nor parameters to take it from."""
    computed = []

    class Watched(nn.Module):
        def forward(self, weight):
            computed.append(weight)
            return weight

    def make(affine, tracks):
        return nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, 1e-5, 0.1, affine, tracks), nn.LeakyReLU(0.2))

    for affine, tracks in ((True, True), (True, False), (False, False)):
        reference = make(affine, tracks).to(DEVICE)
        dcnet.decouple_(reference, "tanh", fuse=False)
        net = copy.deepcopy(reference)
        assert fuse_(net).fused == {"0": ["1", "2"]}
        for model in (net, reference):
            for module in [model[0], *[model[1]] * affine]:
                nn.utils.parametrize.register_parametrization(module, "weight", Watched())
        assert_same(net, reference)
        computed.clear()
        net(torch.randn(2, 8, 5, 5, device=DEVICE))
        assert len(computed) == 1 + affine


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool, self.conv, self.bn = nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU()

    def forward(self, x):
        y = self.bn(self.conv(self.pool(x)))
        return self.relu(y + x)


@pytest.mark.parametrize("impl", ["auto", "fused"])
def test_a_residual_of_another_shape_or_dtype(impl):
    net, reference = pair(Pooled, impl)
    assert isinstance(net, Rewritten)
    assert_same(net, reference, torch.randn(32, 8, 2, 2), exact=impl == "auto")

    net, reference = pair(lambda: Odd(""), impl)
    assert isinstance(net, Rewritten)
    x = torch.randn(2, 8, 5, 5, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):  # the convolution's result is bfloat16, the sum float32
        assert net(x).dtype == reference(x).dtype == torch.float32
        torch.testing.assert_close(net(x), reference(x), rtol=5e-2, atol=5e-2)


def test_copies_pickles_and_compile():
    net, reference = pair(stage)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert_same(other, copy.deepcopy(reference))
        assert other.fused_code.sources[0].module is other
        assert other.fused_code.convs[0] is other[0].conv1
    net.eval()
    x = torch.randn(2, 8, 5, 5, device=DEVICE)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), reference.eval()(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.export.export(net, (x,)).module()(x), reference(x), rtol=1e-5, atol=1e-6)
    traced = torch.fx.symbolic_trace(net)
    assert sum(node.op == "call_module" for node in traced.graph.nodes) == 23  # one by one
    torch.testing.assert_close(traced(x), reference(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("library", "name", "additions"),
    [
        *(("timm", "resnet18", 8), ("timm", "resnet50", 16), ("timm", "mobilenetv3_large_100", 10)),
        *(("timm", "regnety_002", 13), ("torchvision", "mobilenet_v2", 10), ("torchvision", "regnet_y_400mf", 16)),
    ],
)
def test_other_peoples_networks(library, name, additions):
    """As many additions are fused as there are residual units, and the network computes what it did."""
    create = needs("torchvision").models.get_model if library == "torchvision" else needs("timm").create_model
    torch.manual_seed(0)
    reference = create(name, num_classes=10).eval().to(DEVICE)
    dcnet.decouple_(reference, "tanh", fuse=False)
    net, x = copy.deepcopy(reference), torch.randn(2, 3, 64, 64, device=DEVICE)
    report = fuse_(net, x)
    assert sum("an addition" in fused for fused in report.fused.values()) == additions
    with torch.no_grad():
        torch.testing.assert_close(net(x), reference(x), **({"rtol": 0.0, "atol": 0.0} if DEVICE == "cpu" else {}))
