"""Let fused convolutions do more of the recorded code around them: run post-ops, add residuals, hand on energies."""

import operator as python
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dcnet.fusing.following import activation_of
from dcnet.fusing.fusion import Fusion
from dcnet.fusing.own_code import Source, record
from dcnet.layers.decoupled import Decoupled, own_forward
from dcnet.ops import activate
from dcnet.ops.geometry import convolution_dtype

_SUMS = {("call_function", python.add), ("call_function", torch.add), ("call_method", "add")}
# Activations that code calls as functions or methods, as modules of the same name do; GELU and LeakyReLU have options
_RELU = (("call_function", F.relu), ("call_function", torch.relu), ("call_method", "relu"), ("call_method", "relu_"))
_FUNCTIONS: dict[tuple[str, Any], str] = dict.fromkeys(_RELU, "relu") | {
    ("call_function", F.relu6): "relu6",
    ("call_function", F.silu): "silu",
    ("call_function", F.hardswish): "hardswish",
    ("call_function", F.gelu): "gelu",
    ("call_function", F.leaky_relu): "prelu",
}
_WITHOUT_OPTIONS = ("relu", "relu6", "silu", "hardswish")


class Code(NamedTuple):
    """Rewritten code, as a function of the module and its input, and what it depends on.

    skipped: modules that are not called anymore, besides those of a convolution's own fusion. joined: what a
    convolution does beyond its fusion, by the convolution's name.
    """

    function: Callable[[nn.Module, Any], Any]
    sources: list[Source]
    convs: list[Decoupled]
    skipped: list[nn.Module]
    joined: dict[str, "Joined"]


class Joined(NamedTuple):
    """Operations behind a convolution and the modules of its fusion that the convolution's pass does too.

    behind: their calls, if any. activation: its name, with a number as slope. written: what the code calls for it: the
    name of a module, or of a function, such as "relu()".
    """

    behind: list[fx.Node]
    residual: fx.Node | None = None
    in_place: bool = False
    activation: str | None = None
    slope: float | None = None
    written: str = ""


def rewritten_code(module: nn.Module) -> Code | None:
    """Return a module's code in which fused convolutions run their post-ops.

    They do the work of the modules and functions behind them, add residuals, and hand energies on. Return None if there
    are no such convolutions, or if the code cannot be recorded.
    """
    recording = record(module)
    if recording is None:
        return None
    graph, modules = recording.graph, _children(module, recording.sources)
    runs: dict[fx.Node, Decoupled] = {}
    skipped = [source.module for source in recording.sources[1:]]
    found: dict[str, Joined] = {}
    for node in list(graph.nodes):
        layer = _called(modules, node)
        if not isinstance(layer, Decoupled) or not layer.fusion or own_forward(layer):
            continue
        chain = _chain(modules, node, layer.fusion)
        if chain is None:
            continue
        joined = _joined(modules, chain, layer.fusion, recording.in_place)
        if joined.residual is not None and any(_writes(module, one) for one in _between(chain, joined)):
            joined = Joined([])
        if joined.behind:
            found[str(node.target)] = joined
        elif layer.fusion.is_empty:
            continue
        calls = [one for one in (*chain, *joined.behind) if one.op == "call_module"]
        known = [place.module for place in (layer.fusion.norm, layer.fusion.activation) if place is not None]
        skipped += [m for m in (modules[str(one.target)] for one in calls) if m is not layer and m not in known]
        runs[_run_fused(graph, chain, joined)] = layer
    left = any((node.op, node.target) == ("call_function", python.add) for node in graph.nodes)
    if recording.in_place and left:  # the remaining sums were `+=`, and others may read their targets
        return None
    if not runs:
        return None
    _hand_on_energies(graph, runs)
    graph.lint()
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, f"<{type(module).__name__}, rewritten by dcnet.fuse_>", "exec"), names)
    return Code(names["forward"], recording.sources, list(runs.values()), list(dict.fromkeys(skipped)), found)


def _children(module: nn.Module, sources: list[Source]) -> dict[str, nn.Module]:
    """Return the children of the modules whose code was recorded, by their names in the first of these.

    Every call first checks that these are unchanged. Other modules may be called, but not skipped.
    """
    names = {inner: f"{name}." * bool(name) for name, inner in module.named_modules()}
    found = ((names[source.module] + name, child) for source in sources for name, child in source.children.items())
    return {name: child for name, child in found if child is not None}


def _only_reader(node: fx.Node) -> fx.Node | None:
    """Return the only call that reads a result, if it reads it once; else None."""
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and [*readers[0].args].count(node) == 1 else None


def _called(modules: dict[str, nn.Module], node: fx.Node | None) -> nn.Module | None:
    return modules.get(str(node.target)) if node is not None and node.op == "call_module" else None


def _through_identities(modules: dict[str, nn.Module], node: fx.Node) -> list[fx.Node]:
    """Return the calls of nn.Identity that follow a result."""
    passed: list[fx.Node] = []
    while (reader := _only_reader(node)) is not None and type(_called(modules, reader)) is nn.Identity:
        passed.append(node := reader)
    return passed


def _chain(modules: dict[str, nn.Module], conv: fx.Node, fusion: Fusion) -> list[fx.Node] | None:
    """Return the call of a convolution, then those of its fusion's modules; None if one of them is not called next."""
    chain = [conv]
    for place in (fusion.norm, fusion.activation):
        if place is None:
            continue
        chain += _through_identities(modules, chain[-1])
        reader = _only_reader(chain[-1])
        if reader is None or _called(modules, reader) is not place.module:
            return None
        chain.append(reader)
    return chain + _through_identities(modules, chain[-1])


def _joined(modules: dict[str, nn.Module], chain: list[fx.Node], fusion: Fusion, in_place: bool) -> Joined:
    """Return what follows a chain in the code, as the only reader: an addition, an activation, or both."""
    conv, last = chain[0], chain[-1]
    if fusion.activates:
        return Joined([])
    reader = _only_reader(last)
    name, slope = _function(reader)
    if reader is not None and name is not None and fusion.can_apply(name):
        behind = [reader, *_through_identities(modules, reader)]
        return Joined(behind, activation=name, slope=slope, written=_written(reader))
    total = reader
    if fusion.norm is None or total is None or len(total.args) != 2 or total.kwargs:
        return Joined([])
    if not all(isinstance(a, fx.Node) for a in total.args):
        return Joined([])
    kind = total.op, total.target
    in_place = kind == ("call_method", "add_") or (in_place and kind == ("call_function", python.add))
    if (kind not in _SUMS and not in_place) or (in_place and total.args[0] is not last):
        return Joined([])
    residual = next(a for a in total.args if a is not last)
    assert isinstance(residual, fx.Node)
    x = conv.all_input_nodes[0]
    # the convolution would run after the residual is computed, and code between may change its input
    if not residual < conv and len(x.users) > 1:
        return Joined([])
    behind = [total, *_through_identities(modules, total)]
    reader = _only_reader(behind[-1])
    name, slope = _function(reader)
    called = activation_of(_called(modules, reader))
    if called is not None and called[0] in _WITHOUT_OPTIONS:
        name = called[0]
    if reader is None or name is None:
        return Joined(behind, residual, in_place)
    behind += [reader, *_through_identities(modules, reader)]
    return Joined(behind, residual, in_place, name, slope, _written(reader))


def _function(node: fx.Node | None) -> tuple[str | None, float | None]:
    """Return the activation that a call of a function or method applies, and its slope; None if it is not one."""
    name = None if node is None else _FUNCTIONS.get((node.op, node.target))
    if node is None or name is None or len(node.args) != 1:
        return None, None
    options = {key: value for key, value in node.kwargs.items() if key not in ("input", "inplace")}
    if name == "gelu":
        by_name = {"none": "gelu", "tanh": "gelu_tanh"}
        return by_name.get(str(options.pop("approximate", "none"))), None
    if name == "prelu":
        slope = options.pop("negative_slope", 0.01)
        return ("prelu", float(slope)) if isinstance(slope, int | float) and not options else (None, None)
    return (None, None) if options else (name, None)


def _written(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else f"{getattr(node.target, '__name__', node.target)}()"


def _between(chain: list[fx.Node], joined: Joined) -> Iterator[fx.Node]:
    """Yield the calls between a convolution and an addition, except those whose work the convolution does."""
    node = chain[0]
    while node is not joined.behind[0]:
        if node not in chain:
            yield node
        node = node.next


def _writes(module: nn.Module, node: fx.Node) -> bool:
    """Tell whether a call may change one of its inputs in place."""
    if node.op == "call_module":
        return any(getattr(inner, "inplace", False) for inner in module.get_submodule(str(node.target)).modules())
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return bool(node.kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__"))


def _run_fused(graph: fx.Graph, chain: list[fx.Node], joined: Joined) -> fx.Node:
    """Replace a convolution and everything that it does by one call; return it."""
    conv, replaced = chain[0], [*chain, *joined.behind]
    needs_later_residual = joined.residual is not None and not joined.residual < conv
    with graph.inserting_before(replaced[-1] if needs_later_residual else conv):
        layer = graph.get_attr(str(conv.target))
        more = (joined.residual, joined.in_place, joined.activation, joined.slope) if joined.behind else ()
        run = graph.call_function(run_fused, (layer, conv.all_input_nodes[0], None, False, *more))
        result = graph.call_function(python.getitem, (run, 0))
    replaced[-1].replace_all_uses_with(result)
    for node in reversed(replaced):
        graph.erase_node(node)
    return run


def _hand_on_energies(graph: fx.Graph, runs: dict[fx.Node, Decoupled]) -> None:
    """Hand on the energy of results that only fused convolutions read.

    An energy has a gradient of its own, which the map's gradient does not include, so nobody else may see that map.
    """
    for run in runs:
        (result,) = run.users
        # a convolution with groups would need an energy for each group
        takers = [r for r in result.users if r in runs and r.args[1] is result and getattr(runs[r], "groups", 1) == 1]
        if not takers or any(reader not in runs for reader in result.users):
            continue
        with graph.inserting_after(result):
            energy = graph.call_function(python.getitem, (run, 1))
        run.update_arg(3, True)
        for taker in takers:
            taker.update_arg(2, energy)


def run_fused(
    conv: Decoupled,
    x: Tensor,
    energy: Tensor | None,
    leave_energy: bool,
    residual: Tensor | None = None,
    in_place: bool = False,
    activation: str | None = None,
    slope: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return act(fused convolution of x + residual), and its energy.

    in_place: the code adds the residual in place, which keeps the dtype of the convolution's result.
    """
    fusion = conv.fusion
    assert fusion is not None
    fits = residual is None or _fits(conv, x, residual)
    if fits and fusion.takes(conv, x):
        post_ops = fusion.post_ops(activation, slope)
        if residual is not None:
            assert post_ops is not None
            post_ops = post_ops._replace(residual=residual)
        return conv.decouple(x, post_ops, energy, leave_energy)
    y = conv.decouple(x, fusion.post_ops(), energy)[0] if fusion.takes(conv, x) else fusion.one_by_one(conv, x)
    if residual is not None:
        y = y.add_(residual) if in_place else y + residual
    return activate(y, activation, None if slope is None else fusion.as_tensor(slope)), None


def _fits(conv: Decoupled, x: Tensor, residual: Any) -> bool:
    """Tell whether a residual has the shape and dtype of the convolution's result, so that the sum has them too."""
    if not isinstance(residual, Tensor) or residual.dtype != convolution_dtype(x):
        return False
    kernels = conv._kernels_and_groups()[0]  # not from the weight, which a parametrization would compute again
    return residual.shape == (x.shape[0], kernels, *conv._geometry().output_sizes(x.shape[2:]))
