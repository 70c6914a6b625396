"""Write a recorded computation as C: loops over rows of results, whose intermediate results never go to memory.

Formulas, including those of users, are Python. They are recorded with torch.fx. Each operation becomes one line of C,
and the compiler vectorizes the loop around these lines. An operation that has no line here raises `NotInC`.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx

aten = torch.ops.aten


_NAMES = re.compile(r"\b(?:t\d+|vector_\d+|d|e|y|n|one_over_n)\b")  # in a line of C


class NotInC(Exception):
    """An operation that cannot be written as C."""


def _clamp(x: str, min: str | None = None, max: str | None = None) -> str:
    x = x if min is None else f"at_least({x}, {min})"
    return x if max is None else f"at_most({x}, {max})"


def _power(base: str, exponent: str) -> str:
    """Return C for a power; squares and cubes as products, as in PyTorch."""
    return {"2.0f": f"{base} * {base}", "3.0f": f"{base} * {base} * {base}"}.get(exponent, f"power({base}, {exponent})")


def _operator(sign: str) -> Callable[..., str]:
    return lambda a, b: f"{a} {sign} {b}"


def _function(name: str) -> Callable[..., str]:
    return lambda *arguments: f"{name}({', '.join(arguments)})"


def _same(x: str, *_: Any, **__: Any) -> str:
    return x


# The C for each operation. What follows a sum is linear in the summands, so that the loops can add up the final results
# instead: `sum` and `squeeze` return their argument.
_EXPRESSIONS: dict[Any, Callable[..., str]] = {
    operator.mul: _operator("*"),
    operator.add: _operator("+"),
    operator.sub: _operator("-"),
    operator.truediv: _operator("/"),
    operator.neg: lambda x: f"-{x}",
    operator.pos: _same,
    operator.pow: _power,
    "clamp": _clamp,
    "to": lambda x, *_: f"(float){x}",
    "sum": _same,
    "squeeze": _same,
    torch.minimum: _function("smaller"),
    torch.maximum: _function("larger"),
    torch.where: lambda condition, a, b: f"{condition} ? {a} : {b}",
    torch.abs: _function("fabsf"),
    torch.sign: _function("sign_of"),
    torch.exp: _function("exponential"),
    torch.log: _function("logarithm"),
    torch.log1p: _function("logarithm_of_1_plus"),
    torch.sqrt: _function("sqrtf"),
    torch.rsqrt: lambda x: f"1.0f / sqrtf({x})",
    torch.tanh: _function("hyperbolic_tangent"),
    torch.asin: _function("arc_sine"),
    aten.threshold_backward: lambda e, y, threshold: f"{y} <= {threshold} ? 0.0f : {e}",
    aten.hardtanh_backward: lambda e, x, least, most: f"{x} <= {least} || {x} >= {most} ? 0.0f : {e}",
}
_COMPARISONS = {operator.gt: ">", operator.lt: "<", operator.ge: ">=", operator.le: "<=", operator.eq: "=="}
_COMPARISONS |= {operator.ne: "!=", operator.and_: "&", operator.or_: "|"}


def row_functions(
    forward: Callable[..., Sequence[Any]],
    backward: Callable[..., Sequence[Any]],
    vectors: Mapping[str, bool],
    relu: bool,
    norm_of_each: bool,
    vector_of_each: bool,
    single: bool = False,
    lanes: bool = False,
) -> str:
    """Return the C functions forward_row and backward_row for rows of results, and how many VECTORS and SUMS they have.

    Args:
        forward: called by keyword with d, n, one_over_n and the vectors; returns y first.
        backward: also with y and e; returns the gradients of d, n and the vectors, None for those not wanted.
        vectors: which vectors are given, by name.
        relu: whether the output is that of a ReLU, which backward gets.
        norm_of_each: whether each result of a row has a norm of its own; otherwise one norm is for the row.
        vector_of_each: whether each result of a row has its own number of a vector; otherwise one is for the row.
        single: whether each norm belongs to one kernel. Its gradient is then written instead of added up, as the
            gradient in half the squared norm. Rows are whole vectors of WIDTH results.
        lanes: whether a row consists of SIMD vectors of WIDTH results, and each lane has its own numbers of `vectors`.
            These, and the sums, come LANES at a time, a multiple of WIDTH.
    """
    given = [name for name, there in vectors.items() if there]
    ahead, (y,) = _statements(lambda **arguments: forward(**arguments)[:1], given, vectors, [])
    later = ["y", "e"] if relu else ["e"]
    behind, gradients = _statements(lambda **arguments: backward(**({"y": None} | arguments)), given, vectors, later)
    of_d, of_n, *of_vectors = gradients

    def loaded(names: Sequence[str], at: str = "i") -> list[str]:
        return [f"const float {name} = {name}s[{at}];" for name in names]

    before, inside = [], []
    for number, name in enumerate(given):
        if lanes:
            before.append(f"const float *restrict {name}s = vectors + {number} * LANES;")
            inside += loaded([name], "lane")
        elif vector_of_each:
            before.append(f"const float *restrict {name}s = vectors[{number}];")
            inside += loaded([name])
        else:
            before.append(f"const float {name} = vectors[{number}];")
    of_lane = list(inside) if lanes else []
    (inside if norm_of_each else before).extend(loaded(["n", "one_over_n"], "i" if norm_of_each else "0"))
    fixed = {*([] if vector_of_each else given), *([] if norm_of_each else ["n", "one_over_n"])}
    ahead_once, ahead = _divided(ahead, fixed)
    behind_once, behind = _divided(behind, fixed)
    if lanes:
        ahead_once, ahead = _by_lane(of_lane, ahead_once, ahead)
        behind_once, behind = _by_lane(of_lane, behind_once, behind)

    kept, add, after, totals = list(before), [], [], []

    def total(name: str, value: str, place: str) -> None:
        totals.append(name)
        add.append(f"{name}{'[lane]' if lanes else ''} += {value};")
        after.append(f"{place} += {name}{'[lane]' if lanes else ''};")

    if of_d is not None:
        add.append(f"of_ds[i] = {of_d};")
    if of_n is not None:
        if norm_of_each:
            add.append(f"of_ns[i] = {of_n} * one_over_n;" if single else f"of_ns[i] += {of_n};")
        else:
            total("of_n", of_n, "*of_ns")
    for number, value in enumerate(value for value in of_vectors if value is not None):
        if vector_of_each:
            kept.append(f"float *restrict sums_{number} = sums[{number}];")
            add.append(f"sums_{number}[i] += {value};")
        else:
            total(f"sum_{number}", value, f"sums[{number} * LANES + lane]" if lanes else f"sums[{number}]")
    ds, ns = "const float *restrict ds", "const float *restrict ns, const float *restrict one_over_ns"
    values = "const float *const *vectors" if vector_of_each else "const float *vectors"
    grads = "const float *restrict ys, const float *restrict es, float *restrict of_ds, float *restrict of_ns"
    totals_of = "float *const *sums" if vector_of_each else "double *restrict sums"
    # with `single`, rows are whole vectors of the length in vectors.h
    simd = "#pragma omp simd simdlen(WIDTH)" if single else "#pragma omp simd"
    loop = _loop_of_lanes if lanes else partial(_loop, simd=simd)
    # if it were inlined into a long function, choices between values would become jumps, and loops not be vectorized
    static = "static __attribute__((noinline))" if single else "static"
    return "\n".join(
        [
            f"enum {{ VECTORS = {len(given)}, SUMS = {len(of_vectors) - of_vectors.count(None)} }};",
            f"{static} void forward_row(long count, {ds}, {ns}, {values}, float *restrict ys) {{",
            *loop([*before, *ahead_once], [], [*loaded(["d"]), *inside, *ahead, f"ys[i] = {y};"], []),
            "}",
            f"{static} void backward_row(long count, {ds}, {ns}, {values}, {grads}, {totals_of}) {{",
            *loop([*kept, *behind_once], totals, [*loaded(["d", *later]), *inside, *behind, *add], after),
            "}",
            "",
        ]
    )


def _divided(lines: Sequence[str], fixed: set[str]) -> tuple[list[str], list[str]]:
    """Divide lines into those that depend on fixed names only, and so are the same for the whole row, and the rest.

    If a choice by such a value were left in the loop, gcc would write a loop for each case and vectorize none of them.
    """
    once, each = [], []
    for line in lines:
        name, text = line.removeprefix("const ").split(" ", 1)[1].split(" = ", 1)
        if set(_NAMES.findall(text)) <= fixed:
            once.append(line)
            fixed = fixed | {name}
        else:
            each.append(line)
    return once, each


def _loop(
    before: Sequence[str], totals: Sequence[str], inside: Sequence[str], after: Sequence[str], simd: str
) -> list[str]:
    """Return a loop over a row; one with totals runs over chunks of it, since a long sum in float loses digits."""
    simd = f"{simd} reduction(+ : {', '.join(totals)})" if totals else simd
    if not totals:
        return [*_indented(before), simd, *_indented(["for (long i = 0; i < count; i++) {", *_indented(inside), "}"])]
    chunk = [
        "long end = start + 256 < count ? start + 256 : count;",
        *(f"float {name} = 0.0f;" for name in totals),
        simd,
        "for (long i = start; i < end; i++) {",
        *_indented(inside),
        "}",
        *after,
    ]
    return _indented([*before, "for (long start = 0; start < count; start += 256) {", *_indented(chunk), "}"])


def _by_lane(of_lane: Sequence[str], once: Sequence[str], each: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return lines that store what is fixed for each lane in arrays, and the loop's lines, which read the arrays."""
    if not once:
        return [], list(each)
    names = [line.split(" ")[1:3] for line in once]  # const KIND NAME = …
    arrays = [f"{kind} {name}s[LANES];" for kind, name in names]
    filled = [*of_lane, *once, *(f"{name}s[lane] = {name};" for _, name in names)]
    return [*arrays, _LANES, *_indented(filled), "}"], [*(f"const {k} {n} = {n}s[lane];" for k, n in names), *each]


_LANES = "for (long lane = 0; lane < LANES; lane++) {"


def _loop_of_lanes(
    before: Sequence[str], totals: Sequence[str], inside: Sequence[str], after: Sequence[str]
) -> list[str]:
    """Return a loop over a row of vectors, several at once as long as there are enough; each lane has its totals."""
    loops = ["long start = 0;"]
    for lanes in ("LANES", "WIDTH"):
        every = f"for (long lane = 0; lane < {lanes}; lane++) {{"
        body = [f"#pragma omp simd simdlen({lanes})", every, *_indented(["const long i = start + lane;", *inside]), "}"]
        loops += [f"for (; start + {lanes} <= count; start += {lanes})", *_indented(body)]
    sums = [f"float {name}[LANES] = {{0}};" for name in totals]
    return _indented([*before, *sums, *loops, *([_LANES, *_indented(after), "}"] if after else [])])


def _indented(lines: Sequence[str]) -> list[str]:
    return ["    " + line for line in lines]


def _statements(
    function: Callable[..., Sequence[Any]], given: Sequence[str], vectors: Mapping[str, bool], later: Sequence[str]
) -> tuple[list[str], list[str | None]]:
    """Record a function; return its lines of C, and the names of its results."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    names = ["d", "n", "one_over_n", *given, *later]
    arguments: dict[str, Any] = {name: fx.Proxy(graph.placeholder(name), tracer) for name in names}
    results = function(**(dict.fromkeys(vectors) | arguments))
    values: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = str(node.target)
        elif node.target is not getattr:  # reads a dtype: all are float
            kind, text = _expression(node, values)
            values[node] = f"t{len(values)}"
            lines.append(f"const {kind} {values[node]} = {text};")
    return lines, [_value(result.node if isinstance(result, fx.Proxy) else result, values) for result in results]


def _expression(node: fx.Node, values: Mapping[fx.Node, str]) -> tuple[str, str]:
    """Return the type of a node's result, and what computes it."""
    arguments = [_value(argument, values) for argument in node.args if argument not in _unvalued(node, values)]
    named = {name: _value(value, values) for name, value in node.kwargs.items() if name != "keepdim"}
    if node.target in _COMPARISONS:
        return "int", f" {_COMPARISONS[node.target]} ".join(str(argument) for argument in arguments)
    write = _EXPRESSIONS.get(node.target)
    if write is None:
        raise NotInC(getattr(node.target, "__name__", str(node.target)))
    return "float", write(*arguments, **named)


def _unvalued(node: fx.Node, values: Mapping[fx.Node, str]) -> list[Any]:
    """Return the arguments that are not numbers: dimensions to sum over, dtypes."""
    return [a for a in node.args if isinstance(a, tuple | list) or (isinstance(a, fx.Node) and a not in values)]


def _value(value: Any, values: Mapping[fx.Node, str]) -> str | None:
    if value is None:
        return None
    if isinstance(value, fx.Node):
        return values[value]
    if not isinstance(value, int | float):
        raise NotInC(repr(value))
    number = float(np.float32(value))
    if math.isinf(number) or math.isnan(number):
        return "NAN" if math.isnan(number) else ("INFINITY" if number > 0 else "-INFINITY")
    text = repr(float(f"{number:.9g}")) + "f"
    return f"({text})" if number < 0 else text
