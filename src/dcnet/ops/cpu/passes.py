"""h·g on the output of a convolution, with hand-derived gradients.

Given the dot product d = ⟨w/‖w‖, x⟩ and the norm map n = ‖x‖, with per-kernel vectors s (factor), t (gain), ρ and b,

    y = s · h(t·n, ρ) · g(c) + b,        c = clamp(d/n, −1, 1),

and with `relu` max(y, 0), whose gradient is that of y where it is positive.
For an incoming gradient e the gradients follow from the formulas' own slopes (h' in ‖x‖, h_ρ in ρ, g' in c):

    d:  e·s·h·g'/n  (0 where the clamp holds)         n:  Σ over kernels of  e·s·g·h'·t − (gradient of d)·c
    s:  Σ e·h·g        t:  Σ e·s·g·h'·n        ρ:  Σ e·s·g·h_ρ        b:  Σ e        a parameter k of g:  Σ e·s·h·g_k

The dot product and the norm map are inputs of the autograd function and saved for backward. On a CPU, the results of
slow functions are saved too. Everything else is computed again in backward. Where backward itself is differentiated,
those results are computed again as well: autograd would take a saved result for a constant.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcnet.ops.cpu.chunks import chunks
from dcnet.ops.cpu.native.compiler import can_run
from dcnet.ops.cpu.native.epilogue import Epilogue, compiled_epilogue, layout_of
from dcnet.ops.cpu.native.source import NotInC, row_functions
from dcnet.ops.cpu.record import Pair, record
from dcnet.ops.cpu.tanh_interpolation import FEWEST
from dcnet.ops.norms import inverse, never_zero
from dcnet.ops.operator import Operator
from dcnet.util.compat import is_grads_batched, operations_watched, unprepared_apply


def epilogue(
    dot: Tensor,
    norm_map: Tensor,
    operator: Operator,
    vectors: tuple[Tensor | None, ...],
    eps: float,
    groups: int,
    relu: bool,
) -> Tensor:
    """Return y in the shape, dtype and memory format of the dot product; see `Composite.epilogue`."""
    batch, channels, *positions = dot.shape
    by_channel = channels_last(dot)
    d, n = (arranged(maps, groups, by_channel) for maps in (dot, norm_map))
    of_kernels = (per_kernel(v, n.dtype, groups, by_channel) for v in vectors)
    y = _apply_epilogue(operator, relu, eps, torch.is_grad_enabled(), d, n, *of_kernels)
    if by_channel:
        return y.reshape(batch, *positions, channels).movedim(-1, 1)
    return y.reshape(dot.shape)


def arranged(maps: Tensor, groups: int, by_channel: bool) -> Tensor:
    """Return maps as (N, groups, kernels, positions), or by channel as (N·positions, groups, kernels)."""
    batch, channels, *positions = maps.shape
    kernels, count = channels // groups, math.prod(positions)
    if by_channel:
        return maps.movedim(1, -1).reshape(batch * count, groups, kernels)
    return maps.reshape(batch, groups, kernels, count)


def per_kernel(v: Tensor | None, dtype: torch.dtype, groups: int, by_channel: bool) -> Tensor | None:
    """Return a vector (out_channels,) in the shape that goes with `arranged`."""
    return None if v is None else v.to(dtype).reshape((groups, -1) if by_channel else (groups, -1, 1))


def channels_last(x: Tensor) -> bool:
    """Tell whether the channels of x lie next to each other in memory, and x is not contiguous as well."""
    return x.dim() == 2 or (x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous())


class Kind(NamedTuple):
    """What decides which programs a call needs; the key of their cache."""

    operator: Operator
    relu: bool
    dims: int  # of d: 4 with positions behind the kernels, else 3
    there: tuple[bool, ...]  # which vectors are given
    wanted: tuple[bool, ...]  # which gradients are needed, of (d, n, *vectors)
    direct: bool  # whether d has the dtype of the arithmetic
    single: bool  # whether groups have one kernel each, so that n is as large as d
    never_zero: bool  # whether eps keeps norms above 0
    few: bool  # whether there are too few results to interpolate tanh


class _Epilogue(torch.autograd.Function):
    """The epilogue for autograd.

    d is (rows, groups, kernels[, positions]), n is (rows, groups, 1[, positions]), vectors are (groups, kernels[, 1]).
    """

    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        relu: bool,
        eps: float,
        differentiable: bool,
        d: Tensor,
        n: Tensor,
        *vectors: Tensor | None,
    ) -> Tensor:
        given = [v for v in vectors if v is not None]
        wanted = ctx.needs_input_grad[4:]  # set under no_grad too, hence `differentiable`
        kind = Kind(
            operator,
            relu,
            d.dim(),
            tuple(v is not None for v in vectors),
            wanted,
            d.dtype == n.dtype,
            d.shape[2] == 1,
            never_zero(eps, n.dtype),
            d.numel() < FEWEST,
        )
        on_cpu = d.device.type == "cpu" and type(d) is Tensor  # a subclass may hold no data
        ctx.compiled = _compiled_for(kind, d, n, given) if on_cpu else None
        if ctx.compiled is not None:
            y = torch.empty_like(d)
            ctx.compiled.forward(d, n, given, y)
            ctx.kind, ctx.eps = kind, eps
            ctx.save_for_backward(d, n, y if relu else None, *vectors)
            return y
        keep = on_cpu and differentiable and any(wanted)
        clamped = not on_cpu  # whether |d/n| may be ≥ 1 somewhere; another device would have to be waited for
        programs = programs_of(kind, clamped, keep)
        program, count = programs.forward(*given), programs.kept
        y, *kept = (torch.empty_like(d, dtype=dtype) for dtype in (d.dtype, *[n.dtype] * count))
        one_over_n = inverse(n, eps)
        for parts in chunks(y, *kept, d, n, one_over_n):
            (extremes,) = program(*parts)
            if not clamped and not -1.0 < extremes[0].item() <= extremes[1].item() < 1.0:
                clamped, program = True, programs_of(kind, True, keep).forward(*given)
                program(*parts)
        ctx.kind, ctx.eps, ctx.clamped = kind, eps, clamped
        ctx.save_for_backward(d, n, y if relu else None, *vectors, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        kind = ctx.kind
        d, n, y, *rest = ctx.saved_tensors
        vectors, kept = rest[: len(kind.there)], rest[len(kind.there) :]
        # With create_graph=True backward itself is differentiated, so it must be one chain of operations, none in
        # place; a batch of incoming gradients (is_grads_batched) cannot be written into a buffer either.
        if torch.is_grad_enabled() or is_grads_batched(e):
            of_d, *others = gradients(kind, True, d, n, inverse(n, ctx.eps), *vectors, y, e.to(n.dtype))
            return None, None, None, None, None if of_d is None else of_d.to(d.dtype), *others
        if ctx.compiled is not None:
            of_d, of_n = torch.empty_like(d), torch.empty_like(n)
            given = [v for v in vectors if v is not None]
            found = iter(ctx.compiled.backward(d, n, given, y, e.contiguous(), of_d, of_n))
            of_all = (of_d, of_n, *(None if v is None else next(found) for v in vectors))
            return None, None, None, None, *(of if want else None for of, want in zip(of_all, kind.wanted, strict=True))
        one_over_n = inverse(n, ctx.eps)
        program = programs_of(kind, ctx.clamped, bool(kept)).backward(*(v for v in vectors if v is not None))
        grad_d = [torch.empty_like(d)] if kind.wanted[0] else []
        later = [full for full in (y, e) if full is not None]
        sums: list[Any] = [
            torch.zeros_like(v) if want and not d.numel() else None
            for v, want in zip(vectors, kind.wanted[2:], strict=True)
        ]
        of_rows = []
        for parts in chunks(*grad_d, *kept, d, n, one_over_n, *later):
            of_n, *of_vectors = program(*parts[: -len(later)], *(part.to(n.dtype) for part in parts[-len(later) :]))
            of_rows.append(of_n)
            sums = [new if old is None else old.add_(new) for old, new in zip(sums, of_vectors, strict=True)]
        grad_n = (torch.cat(of_rows) if of_rows else torch.zeros_like(n)) if kind.wanted[1] else None
        return None, None, None, None, grad_d[0] if grad_d else None, grad_n, *sums


_apply_epilogue = unprepared_apply(_Epilogue)


def _compiled_for(kind: Kind, d: Tensor, n: Tensor, given: list[Tensor]) -> Epilogue | None:
    """Return the compiled passes, or None if PyTorch's operations have to compute."""
    plain = all(t.dtype == torch.float32 and t.is_contiguous() for t in (d, n, *given))
    if not plain or not can_run(d.numel()) or operations_watched():
        return None
    return compiled_passes(kind.operator, kind.relu, layout_of(d.shape), kind.there)


@lru_cache(maxsize=256)
def compiled_passes(operator: Operator, relu: bool, layout: str, there: tuple[bool, ...]) -> Epilogue | None:
    """Return the compiled passes, or None if they cannot be written in C. there: which vectors are given."""
    # All gradients: an extra sum is cheap; recompiling takes 0.5 s
    kind = Kind(operator, relu, 4, there, (True, True, *there), True, False, True, False)
    try:
        return compiled_epilogue(rows_in_c(kind, layout != "kernels", layout != "positions"), layout)
    except NotInC:
        return None


@lru_cache(maxsize=1024)
def programs_of(kind: Kind, clamped: bool, keep: bool) -> Pair:
    """Return the recorded programs of `Operator.value` and `gradients`.

    Without a clamp, the forward program also returns the smallest and the largest d/n.
    """
    d = torch.ones((2, 3, 1 if kind.single else 5, 7)[: kind.dims], dtype=torch.float64)
    per_kernel = d[0, ..., :1] if kind.dims == 4 else d[0]
    inputs = {"d": d, "n": d[:, :, :1], "one_over_n": d[:, :, :1]}
    vectors = {
        f"vector_{number}": per_kernel if present else None for number, present in enumerate(kind.there)
    }  # in the order of `Operator.value`'s

    forward, backward = computations(kind, clamped)
    later = {"y": d if kind.relu else None, "e": d}
    inverses = ("n", "one_over_n") if kind.never_zero else None
    options = (keep, kind.direct, vectors, inverses, kind.few)
    return record(forward, backward, inputs, later, d.shape, *options)


def computations(kind: Kind, clamped: bool) -> tuple[Any, Any]:
    """Return two functions to record: for the value (and the extremes of d/n without a clamp), and for gradients."""

    def forward(d: Any, n: Any, one_over_n: Any, **vectors: Any) -> tuple[Any, ...]:
        c = _cosine(d, one_over_n, clamped)
        extremes = None if clamped else torch.aminmax(c)
        y = kind.operator.value(c, n, *vectors.values())
        return y.clamp(min=0.0) if kind.relu else y, extremes

    def backward(d: Any, n: Any, one_over_n: Any, y: Any, e: Any, **vectors: Any) -> tuple[Any, ...]:
        return gradients(kind, clamped, d, n, one_over_n, *vectors.values(), y, e)

    return forward, backward


def rows_in_c(kind: Kind, norm_of_each: bool, vector_of_each: bool, **options: bool) -> str:
    """Return the value and the gradients as C; see `row_functions`, which raises `NotInC` if that is impossible."""
    forward, backward = computations(kind, True)
    vectors = {f"vector_{number}": there for number, there in enumerate(kind.there)}
    return row_functions(forward, backward, vectors, kind.relu, norm_of_each, vector_of_each, **options)


def _cosine(d: Any, one_over_n: Any, clamped: bool = True) -> Any:
    c = d * one_over_n
    return c.clamp(-1.0, 1.0) if clamped else c


def gradients(kind: Kind, clamped: bool, d: Any, n: Any, one_over_n: Any, *rest: Any) -> tuple[Any, ...]:
    """Return the gradients of (d, n, factor, gain, radius, bias, *learned), None for those not wanted.

    The top of this file has the formulas. clamped: whether cos θ may be clamped somewhere; no gradient passes there.
    The last two arguments are the output if it is that of a ReLU, else None, and the incoming gradient.
    """
    factor, gain, radius, _, *learned, y, e = rest
    operator = kind.operator
    if y is not None:
        e = torch.ops.aten.threshold_backward(e, y, 0.0)
    want_d, want_n, want_factor, want_gain, want_radius, want_bias, *want_learned = kind.wanted
    c = _cosine(d, one_over_n, clamped)
    (h, h_n, *h_rest), (g, g_c, *g_rest) = operator.parts(c, n, gain, radius, *learned)

    es = e if factor is None else e * factor
    grad_h = es * g
    grad_g = _times(es, h)
    grad_c = _times(grad_g, g_c)
    if clamped:  # hardtanh's gradient is the clamp's: 0 where |d/n| ≥ 1
        grad_c = torch.ops.aten.hardtanh_backward(grad_c, d * one_over_n, -1.0, 1.0)
    grad_d = grad_c * one_over_n

    grad_n = None
    if want_n:
        grad_n = -((grad_c * c).sum((2,), keepdim=True) * one_over_n)
        if not _is(h_n, 0.0):
            grad_n = grad_n + _times(grad_h, h_n if gain is None else h_n * gain).sum((2,), keepdim=True)
    if radius is not None:
        h_rho, *h_rest = h_rest
    h_slopes = dict(zip(operator.magnitude.formula.learnable, h_rest, strict=True))
    g_slopes = dict(zip(operator.angular.formula.learnable, g_rest, strict=True))
    grad_learned = [grad_h * h_slopes[name] for name in operator.magnitude.learned] + [
        grad_g * g_slopes[name] for name in operator.angular.learned
    ]

    def to_kernels(full: Any) -> Any:
        """Return the sum over rows and positions, in the shape of the vectors."""
        return full.sum((0, 3) if kind.dims == 4 else (0,), keepdim=True).squeeze(0)

    return (
        grad_d if want_d else None,
        grad_n,
        to_kernels(_times(e * g, h)) if want_factor else None,
        to_kernels(grad_h * h_n * n) if want_gain else None,
        to_kernels(grad_h * h_rho) if want_radius else None,
        to_kernels(e) if want_bias else None,
        *(to_kernels(full) if want else None for full, want in zip(grad_learned, want_learned, strict=True)),
    )


def _is(slope: Any, number: float) -> bool:
    return isinstance(slope, int | float) and slope == number


def _times(full: Any, slope: Any) -> Any:
    """Return full·slope, without a pass over memory if the slope is the number 1."""
    return full if _is(slope, 1.0) else full * slope
