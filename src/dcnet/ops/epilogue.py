"""h·g on the output of a convolution, with hand-derived gradients.

Given the dot product d = ⟨w/‖w‖, x⟩ and the norm map n = ‖x‖, with per-kernel vectors s (factor), t (gain), ρ and b,

    y = s · h(t·n, ρ) · g(c) + b,        c = clamp(d/n, −1, 1).

For an incoming gradient e the gradients follow from the formulas' own slopes (h' in ‖x‖, h_ρ in ρ, g' in c):

    d:  e·s·h·g'/n  (0 where the clamp holds)         n:  Σ over kernels of  e·s·g·h'·t − (gradient of d)·c
    s:  Σ e·h·g        t:  Σ e·s·g·h'·n        ρ:  Σ e·s·g·h_ρ        b:  Σ e        a parameter k of g:  Σ e·s·h·g_k

The dot product and the norm map are inputs of the autograd function, and nothing else is kept: everything is
recomputed in backward. Keeping an intermediate result would make second derivatives silently wrong.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dcnet.ops.norms import inverse, plain_autograd
from dcnet.ops.operator import Operator
from dcnet.ops.programs import Program

# On a CPU the output is worked through in pieces of this many elements a thread: small enough for intermediate results
# to stay in the cache and for a low peak memory, large enough that Python's share of the time is small.
# Measured on two cores (benchmarks/NOTES.md): 32768 and 262144 are both slower.
_PIECE = 131072


def epilogue(
    dot: Tensor,
    norms: Tensor,
    operator: Operator,
    *,
    factor: Tensor | None,
    gain: Tensor | None,
    radius: Tensor | None,
    bias: Tensor | None,
    learned: Mapping[str, Tensor],
) -> Tensor:
    """y = s·h(t·n, ρ)·g(d/n) + b in the shape, dtype and memory format of the dot product.

    `dot` is (N, out_channels, …), `norms` (N, groups, …), the vectors (out_channels,).
    """
    vectors = (factor, gain, radius, bias, *(learned[name] for name in operator.learned))
    batch, channels, *positions = dot.shape
    groups = norms.shape[1]
    kernels, count = channels // groups, math.prod(positions)
    if plain_autograd():  # no pieces; and no reshaping, which torch.compile cannot see through when sizes are unknown
        n = norms if groups == 1 else norms.repeat_interleave(kernels, 1)
        values = [None if v is None else v.to(n.dtype).reshape(channels, *[1] * len(positions)) for v in vectors]
        return _value(operator, *operator.formulas(), dot, n, inverse(n), *values).to(dot.dtype)
    by_channel = _channels_last(dot)
    if by_channel:  # rows of channels: (N·positions, groups, kernels)
        d = dot.movedim(1, -1).reshape(batch * count, groups, kernels)
        n = norms.movedim(1, -1).reshape(batch * count, groups, 1)
    else:  # (N, groups, kernels, positions)
        d = dot.reshape(batch, groups, kernels, count)
        n = norms.reshape(batch, groups, 1, count)

    def per_kernel(v: Tensor | None) -> Tensor | None:
        return None if v is None else v.to(n.dtype).reshape((groups, kernels) if by_channel else (groups, kernels, 1))

    y = _Epilogue.apply(operator, d, n, *map(per_kernel, vectors))
    if by_channel:
        return y.reshape(batch, *positions, channels).movedim(-1, 1)
    return y.reshape(dot.shape)


def _channels_last(x: Tensor) -> bool:
    """Whether the channels of x lie next to each other in memory, and no other layout would do as well."""
    return x.dim() == 2 or (x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous())


class _Epilogue(torch.autograd.Function):
    """Acts on d (rows, groups, kernels[, positions]), n (rows, groups, 1[, positions]), vectors (groups, kernels[, 1])."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, d: Tensor, n: Tensor, *vectors: Tensor | None) -> Tensor:
        ctx.operator = operator
        ctx.save_for_backward(d, n, *vectors)
        y, one_over_n = torch.empty_like(d), inverse(n)
        h, g = operator.programs(slopes=False)
        for piece in _pieces(d):
            y[piece] = _value(operator, h, g, d[piece], n[piece], one_over_n[piece], *vectors)
        return y

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        d, n, *vectors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        one_over_n = inverse(n)
        # With create_graph=True backward itself is differentiated, so it must be one chain of operations, none in place;
        # a batch of incoming gradients (is_grads_batched) cannot be written into a buffer either.
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(e):
            of_d, *rest = _gradients(ctx.operator, wanted, e, d, n, one_over_n, *vectors)
            return None, None if of_d is None else of_d.to(d.dtype), *rest
        grad_d = torch.empty_like(d) if wanted[0] else None
        grad_n = torch.empty_like(n) if wanted[1] else None
        sums: list[Any] = [None] * len(vectors)
        for piece in _pieces(d):
            of_d, of_n, *of_vectors = _gradients(ctx.operator, wanted, e[piece], d[piece], n[piece], one_over_n[piece], *vectors)
            if grad_d is not None:
                grad_d[piece] = of_d
            if grad_n is not None:
                grad_n[piece] = of_n
            sums = [new if old is None else old.add_(new) for old, new in zip(sums, of_vectors, strict=True)]
        return None, grad_d, grad_n, *sums


def _pieces(d: Tensor) -> Iterator[slice]:
    """Slices of the first dimension; all of it at once where there is no CPU cache to fit."""
    per_piece = _PIECE * torch.get_num_threads() if d.device.type == "cpu" else d.numel()
    rows = max(1, per_piece * d.shape[0] // max(1, d.numel()))
    for start in range(0, d.shape[0], rows):
        yield slice(start, start + rows)


def _value(
    operator: Operator,
    magnitude: Program,
    angular: Program,
    d: Tensor,
    n: Tensor,
    one_over_n: Tensor,
    factor: Tensor | None,
    gain: Tensor | None,
    radius: Tensor | None,
    bias: Tensor | None,
    *learned: Any,
) -> Tensor:
    """y in the compute dtype."""
    of_h, of_g = _split(operator, learned)
    c = (d * one_over_n).clamp(-1.0, 1.0)
    y = angular(c, None, *of_g)[0] * magnitude(n if gain is None else n * gain, radius, *of_h)[0]
    if factor is not None:
        y = y * factor
    return y if bias is None else y + bias


def _gradients(
    operator: Operator,
    wanted: tuple[bool, ...],
    e: Tensor,
    d: Tensor,
    n: Tensor,
    one_over_n: Tensor,
    factor: Tensor | None,
    gain: Tensor | None,
    radius: Tensor | None,
    bias: Tensor | None,
    *learned: Any,
) -> tuple[Any, ...]:
    """The gradients in (d, n, factor, gain, radius, bias, *learned), None where not wanted; see the top of the file."""
    want_d, want_n, want_factor, want_gain, want_radius, want_bias, *want_learned = wanted
    magnitude, angular = operator.programs(slopes=True)
    of_h, of_g = _split(operator, learned)
    ratio = d * one_over_n
    c = ratio.clamp(-1.0, 1.0)
    h, h_n, *h_rest = magnitude(n if gain is None else n * gain, radius, *of_h)
    g, g_c, *g_rest = angular(c, None, *of_g)

    es = e.to(n.dtype) if factor is None else e * factor
    grad_h = es * g
    grad_g = _times(es, h)
    # hardtanh's gradient is the clamp's: 0 where |d/n| ≥ 1
    grad_d = torch.ops.aten.hardtanh_backward(_times(grad_g, g_c), ratio, -1.0, 1.0) * one_over_n

    grad_n = None
    if want_n:
        grad_n = (grad_d * c).sum(2, keepdim=True).neg()
        if not _is(h_n, 0.0):
            grad_n = grad_n + _times(grad_h, h_n if gain is None else h_n * gain).sum(2, keepdim=True)
    if radius is not None:
        h_rho, *h_rest = h_rest
    h_slopes = dict(zip(operator.magnitude.formula.learnable, h_rest, strict=True))
    g_slopes = dict(zip(operator.angular.formula.learnable, g_rest, strict=True))
    grad_learned = [grad_h * h_slopes[name] for name in operator.magnitude.learned] + [grad_g * g_slopes[name] for name in operator.angular.learned]
    return (
        grad_d if want_d else None,
        grad_n,
        _to_kernels(_times(e * g, h)) if want_factor else None,
        _to_kernels(grad_h * h_n * n) if want_gain else None,
        _to_kernels(grad_h * h_rho) if want_radius else None,
        _to_kernels(e.to(n.dtype)) if want_bias else None,
        *(_to_kernels(full) if want else None for full, want in zip(grad_learned, want_learned, strict=True)),
    )


def _split(operator: Operator, learned: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The learned parameters of the magnitude, and those of the angular function."""
    count = len(operator.magnitude.learned)
    return learned[:count], learned[count:]


def _is(slope: Any, number: float) -> bool:
    return isinstance(slope, int | float) and slope == number


def _times(full: Tensor, slope: Any) -> Tensor:
    """full·slope, without a pass over memory where the slope is the number 1."""
    return full if _is(slope, 1.0) else full * slope


def _to_kernels(full: Tensor) -> Tensor:
    """Sums over rows and positions into the shape of the vectors."""
    return full.sum((0, 3)).unsqueeze(-1) if full.dim() == 4 else full.sum(0)
