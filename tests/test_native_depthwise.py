"""Depthwise layers as compiled passes, against the reference; that they were used, and where they must not be."""

import pytest
import torch
from helpers import OPERATORS, assert_close, assert_within_rule, learned_by
from test_cpu_depthwise import GEOMETRIES, pair, results
from torch.utils.flop_counter import FlopCounterMode

import dcnet
from dcnet.layers import Block
from dcnet.ops.cpu import native_depthwise
from dcnet.ops.cpu.native import compiler, lanes
from dcnet.ops.cpu.passes import Kind, rows_in_c
from dcnet.ops.geometry import make_geometry
from dcnet.ops.operator import make_operator

MORE = {
    "uneven": {"stride": (2, 3), "padding": (2, 1), "dilation": (2, 1)},
    "taps that meet no map": {"padding": 20, "dilation": 20},
    "gaps": {"stride": 4},
    "far apart": {"padding": 6, "dilation": 6},
}


@pytest.fixture(params=["rows", "lanes"])
def path(request, monkeypatch):
    """Maps of any size by loops along rows, or with channels side by side wherever that can be done."""
    name, value = ("_WIDEST", 0) if request.param == "rows" else ("_FEWEST", 1)
    monkeypatch.setattr(lanes, name, value)
    return request.param


@pytest.fixture
def used(path, compiled_also_if_small, monkeypatch):
    """Compiled passes also for small maps; the list has an item for each layer that used them."""
    calls, real = [], native_depthwise._apply_depthwise
    monkeypatch.setattr(native_depthwise, "_apply_depthwise", lambda *given: calls.append(given) or real(*given))
    return calls


def three(**options):
    """Return the compiled layer, the reference, and the reference in float64."""
    ours, reference = pair(dtype=torch.float32, **options)
    exact = pair(**options)[1]
    exact.load_state_dict(ours.state_dict())
    return ours, reference, exact


def compare(options, x, **more):
    ours, reference, exact = three(**options)
    assert_within_rule(results(ours, x, **more), results(reference, x, **more), results(exact, x.double(), **more))


@pytest.mark.parametrize("size", [(9, 11), (23, 37)], ids=["small", "larger"])
@pytest.mark.parametrize("geometry", {**GEOMETRIES, **MORE}.values(), ids=[*GEOMETRIES, *MORE])
def test_geometries(used, geometry, size):
    compare(geometry, torch.randn(5, 6, *size))
    assert len(used) == 1


# each magnitude, each angular function and each weighting at least once; the others are slow: half a second each
SOME = [operator for i, operator in enumerate(OPERATORS) if i % 7 == 3]


def test_every_operator_can_be_written_as_c():
    for names in OPERATORS:
        operator = make_operator(*names)
        there = (False, operator.weighting == "joint", operator.magnitude.formula.has_radius, True)
        there += (True,) * len(operator.learned)
        kind = Kind(operator, True, 4, there, (True, True, *there), True, True, True, False)
        for norm_of_each, vector_of_each in ((True, False), (False, True), (True, True)):
            assert "backward_row" in rows_in_c(kind, norm_of_each, vector_of_each)
        assert "LANES" in rows_in_c(kind, True, False, single=True, lanes=True)


PATHS = {names: ("rows", "lanes")[i % 2] for i, names in enumerate(OPERATORS)}  # half of them each


@pytest.mark.parametrize(
    ("magnitude", "angular", "weighting", "path"),
    [pytest.param(*names, PATHS[names], marks=[] if names in SOME else pytest.mark.slow) for names in OPERATORS],
    indirect=["path"],
)
def test_every_operator_is_compiled(used, magnitude, angular, weighting):
    def layer(impl, dtype):
        options = {"magnitude": magnitude, "angular": angular, "weighting": weighting, "bias": True, "dtype": dtype}
        return dcnet.DecoupledConv2d(6, 6, 3, padding=1, groups=6, impl=impl, **options)

    layers = [layer("eager", None), layer("reference", None), layer("reference", torch.float64)]
    if layers[0].operator.is_inner_product:
        pytest.skip("the plain convolution")
    for other in layers[1:]:
        other.load_state_dict(layers[0].state_dict())
    x = torch.randn(3, 6, 7, 7)
    assert_within_rule(*(results(one, x.to(one.weight.dtype)) for one in layers))
    assert len(used) == 1
    assert not learned_by(angular) or len(used[0]) > 10  # the learned parameter came along


@pytest.mark.parametrize("radius", ["learned", 0.7])
@pytest.mark.parametrize("training", [True, False])
def test_relu_and_radii(used, training, radius):
    blocks = [Block(layer, None, "relu").train(training) for layer in three(padding=1, radius=radius)]
    x = torch.randn(3, 6, 8, 8)
    assert_within_rule(
        *(results(block, x.to(dtype)) for block, dtype in zip(blocks, (None, None, torch.float64), strict=True))
    )
    if training and radius == "learned":
        assert_close(dict(blocks[0].named_buffers()), dict(blocks[1].named_buffers()), 1e-5)
    assert len(used) == 1


@pytest.mark.parametrize("wanted", [["x"], ["weight"], ["raw_radius"], ["bias"], ["x", "raw_radius"]], ids=str)
def test_only_some_gradients(used, wanted):
    ours, reference, exact = three(padding=1)
    x = torch.randn(3, 6, 8, 8)
    for layer in (ours, reference, exact):
        layer.requires_grad_(False)
        for name in set(wanted) - {"x"}:
            layer.get_parameter(name).requires_grad_(True)
    assert_within_rule(*(results(layer, x.to(layer.weight.dtype), wanted=wanted) for layer in (ours, reference, exact)))


def test_second_derivatives_and_batches_of_gradients(used):
    ours, reference, _ = three(padding=1, out_channels=12)
    x = torch.randn(3, 6, 8, 8)
    assert_close(results(ours, x, create_graph=True), results(reference, x, create_graph=True), 1e-3)
    x.requires_grad_()
    y = ours(x)
    leaves, gradients = [x, *ours.parameters()], torch.randn(4, *y.shape)
    batched = torch.autograd.grad(y, leaves, gradients, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(y, leaves, gradient, retain_graph=True) for gradient in gradients]
    for together, separate in zip(batched, zip(*singly, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(separate), rtol=1e-4, atol=1e-3)
    assert len(used) == 2


def test_zero_norms_without_eps(used):
    ours, reference, _ = three(padding=1, eps=0.0, magnitude="tanh", angular="cosine")
    x = torch.randn(2, 6, 8, 8)
    x[0, :, :5] = 0.0
    x[:, 3] = 0.0
    for create_graph in (False, True):
        assert_close(results(ours, x, create_graph), results(reference, x, create_graph), 1e-3)
    assert len(used) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_goes_where_the_reference_has_it(used, bad):
    """Also at a place next to which there are other rows, images and channels in memory, and that no patch holds."""
    ours, reference, _ = three(magnitude="tanh", angular="cosine", bias=False, radius=1.0, stride=2)
    x = torch.randn(2, 6, 8, 8)
    x[1, 2, 3, 4] = bad
    x[0, 1, 7, 7] = bad
    found = results(ours, x)
    for name, value in results(reference, x).items():
        assert torch.equal(found[name].isnan(), value.isnan()), name
        assert value.isnan().any()


@pytest.mark.parametrize("size", [(14, 70), (4, 17)], ids=["wide", "low"])
def test_three_rows_at_once(used, size):
    """Rows that are left over behind the threes, a row that is not whole vectors, and numbers that are not finite."""
    x = torch.randn(3, 6, *size)
    compare({"padding": 1, "magnitude": "tanh", "angular": "cosine", "bias": False}, x)
    ours, reference, _ = three(magnitude="tanh", angular="cosine", bias=False, radius=1.0, padding=1)
    for bad in (float("nan"), float("inf")):
        x[1, 2, 1, 16] = bad
        found = results(ours, x)
        for name, value in results(reference, x).items():
            assert torch.equal(found[name].isnan(), value.isnan()), (name, bad)


@pytest.mark.parametrize("path", ["lanes"], indirect=True)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 20, 14, 14), {"padding": 1}),
        ((2, 20, 14, 14), {"padding": 1, "stride": 2, "out_channels": 40}),
        ((3, 9, 2, 2), {"padding": 1}),
        ((2, 9, 1, 1), {"padding": 2}),
        ((2, 9, 12, 30), {"stride": 4, "padding": 1}),
    ],
    ids=["more channels than lanes", "two kernels", "less than a vector", "one pixel", "stride 4"],
)
def test_channels_side_by_side(used, shape, options):
    """Also for enough images that results are computed again instead of kept."""
    operator = {"magnitude": "tanh", "angular": "cosine"}
    for images in (shape[0], 40 * shape[0]):
        compare(
            {"channels": shape[1], "out_channels": shape[1], **operator, **options}, torch.randn(images, *shape[1:])
        )
    assert len(used) == 2
    assert all(given[0]._layout_of is lanes.lanes_of for given in used)


def test_which_layers_have_channels_side_by_side():
    usual = make_geometry(3, 1, 1, 1, 64, "zeros", 2)
    assert lanes.for_lanes(usual, (4, 64, 56, 56))
    assert not lanes.for_lanes(usual, (4, 64, 112, 112))
    assert not lanes.for_lanes(usual, (4, 7, 56, 56))
    for kernel, stride, padding, dilation in ((3, 1, 12, 12), (17, 1, 8, 1), (3, 5, 1, 1), (3, 1, 9, 1)):
        geometry = make_geometry(kernel, stride, padding, dilation, 64, "zeros", 2)
        assert not lanes.for_lanes(geometry, (4, 64, 28, 28))


def test_the_same_on_any_number_of_threads(used):
    layer = three(padding=1, channels=18, out_channels=18)[0]
    x = torch.randn(4, 18, 20, 20)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(results(layer, x))
    for other in found[1:]:
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())
    assert len(used) == 3


def test_one_dimension_and_odd_strides(used):
    layers = [dcnet.DecoupledConv1d(6, 6, 5, padding=2, groups=6, impl=impl) for impl in ("eager", "reference")]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(3, 6, 50)
    assert_close(*(results(layer, x) for layer in layers), 1e-5)
    y = layers[0](x)
    y.sum().backward()  # an expanded gradient
    assert len(used) == 2


def test_where_they_are_not_used(used):
    layer, x = three(padding=1)[0], torch.randn(2, 6, 8, 8)
    layer(x.to(memory_format=torch.channels_last))
    layer(x[:0])
    layer.double()(x.double())
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() > 0  # it sees a convolution
    torch.func.vmap(lambda image: layer.eval()(image.unsqueeze(0)))(x)
    assert not used
    with torch.inference_mode():
        layer(x)
    layer(x)
    assert len(used) == 2


def test_small_maps_wait_for_no_compiler(used, monkeypatch):
    monkeypatch.setattr(compiler, "FEWEST", 4096)
    layer = three(padding=1)[0]
    layer(torch.randn(2, 6, 8, 8))
    assert not used
    layer(torch.randn(11, 6, 8, 8))
    assert used
