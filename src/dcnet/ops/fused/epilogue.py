"""The epilogue as a `torch.library` operator: s·h·g + b, and with BatchNorm act(BatchNorm(s·h·g + b) + residual).

With BatchNorm, forward reads the dot product twice (statistics; normalised output) and writes once; the decoupled map itself
is never stored. Backward reads dot product and incoming gradient twice and writes the dot product's gradient.
"""

from typing import Any

import torch
from torch import Tensor

from dcnet.ops.fused.launch import either, like
from dcnet.ops.fused.plan import VECTORS, Plan, operator_named, plan
from dcnet.ops.fused.register import register_differentiable

NONE, AVERAGES, BATCH = 0, 1, 2  # what follows: no BatchNorm, one with its running averages, one with this batch's statistics


def _plan(
    dot: Tensor, norms: Tensor, vectors: tuple[Tensor | None, ...], mean: Tensor | None, radius_kind: int, names: tuple[str, str, str]
) -> Plan:
    there = tuple([v is not None for v in vectors])
    # strides too: with 1×1 maps or one channel, several orders have the same strides
    return plan(dot.shape, dot.stride(), dot.dtype, dot.device, norms.shape[1], operator_named(*names), there, radius_kind, mean is not None)


def _floats(dot: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=dot.device)


def _epilogue(
    dot: Tensor,
    norms: Tensor,
    factor: Tensor | None,
    gain: Tensor | None,
    radius: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    learned: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None,
    slope: Tensor | None,
    radius_kind: int,
    follows: int,
    eps: float,
    activation: int,
    magnitude: str,
    angular: str,
    weighting: str,
    effects: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The output, and what BatchNorm normalised with, (5, channels); `effects` is the momentum with which its averages move."""
    how = _plan(dot, norms, (factor, gain, radius, bias), mean, radius_kind, (magnitude, angular, weighting))
    vectors = [either(v, dot) for v in (factor, gain, radius, mean, bias, learned)]
    out = torch.empty_like(dot)
    norm = _floats(dot, 5 if follows else 0, dot.shape[1])
    if not dot.numel():
        return out, norm
    if follows:
        sums = dot
        averages = running_mean is not None and running_var is not None
        if follows == BATCH:
            sums = _floats(dot, how.programs, 2, dot.shape[1])
            how.launcher("statistics", averages)((dot, norms, dot, dot, *vectors, norm, either(running_mean, dot), dot, sums))
        count = float(how.count)
        launcher = how.launcher("batch_norm", follows == BATCH, gamma is not None, beta is not None, averages, effects is not None)
        pointers = (sums, *[either(t, dot) for t in (gamma, beta, running_mean, running_var)], norm)
        launcher(pointers, count, count / max(1.0, count - 1.0), effects or 0.0, eps)
    launcher = how.launcher("output", follows != NONE, residual is not None, activation)
    launcher((dot, norms, out, either(residual, dot), *vectors, norm, dot, either(slope, dot), dot))
    return out, norm


def _epilogue_fake(dot, norms, factor, gain, radius, bias, mean, learned, gamma, beta, rm, rv, residual, slope, radius_kind, follows, *_):
    return torch.empty_like(dot), norms.new_empty((5 if follows else 0, dot.shape[1]))


def _backward(
    e: Tensor,
    out: Tensor | None,
    norm: Tensor,
    dot: Tensor,
    norms: Tensor,
    factor: Tensor | None,
    gain: Tensor | None,
    radius: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    learned: Tensor | None,
    slope: Tensor | None,
    residual: bool,
    radius_kind: int,
    follows: int,
    activation: int,
    magnitude: str,
    angular: str,
    weighting: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of dot product and norms; of the per-kernel vectors that are there, stacked; of E{‖x‖}; of β, γ and slope; of the
    residual (empty if it is e)."""
    how = _plan(dot, norms, (factor, gain, radius, bias), mean, radius_kind, (magnitude, angular, weighting))
    vectors = [either(v, dot) for v in (factor, gain, radius, mean, bias, learned)]
    channels = dot.shape[1]
    e = like(e, dot)
    of_vectors, of_mean = _floats(dot, how.rows, channels), _floats(dot, 0 if mean is None else how.groups)
    of_norm = _floats(dot, how.reduced(activation) if follows else 0, channels)
    behind_activation = residual and activation != 0
    behind = torch.empty_like(dot) if behind_activation else dot.new_empty(0)
    if not dot.numel():
        return torch.empty_like(dot), torch.empty_like(norms), of_vectors.zero_(), of_mean.zero_(), of_norm.zero_(), behind

    coefficients = norm
    if follows:
        sums = _floats(dot, how.programs, of_norm.shape[0], channels)
        maps = (dot, norms, e, either(out, dot), dot, norms, behind)
        how.launcher("reduce", behind_activation, activation)((*maps, *vectors, norm, norm, either(slope, dot), sums))
        coefficients = _floats(dot, 2, channels)
        how.launcher("batch_norm_gradient", activation)((sums, norm, of_norm, coefficients), float(how.count))
        if behind_activation:
            e, activation = behind, 0
    grad_d, sums = torch.empty_like(dot), _floats(dot, how.programs, how.rows, channels)
    grad_n = _floats(dot, how.kernel_blocks, *norms.shape)
    maps = (dot, norms, e, dot, grad_d, grad_n, dot)
    launcher = how.launcher("gradients", follows != NONE, activation, follows == BATCH)
    launcher((*maps, *vectors, norm, coefficients, either(slope, dot), sums))
    if how.rows:
        how.launcher("vector_gradients")((sums, either(radius, dot), either(mean, dot), of_vectors, of_mean))
    return grad_d, grad_n[0] if how.kernel_blocks == 1 else grad_n.sum(0), of_vectors, of_mean, of_norm, behind


def _backward_fake(e, out, norm, dot, norms, factor, gain, radius, bias, mean, learned, slope, residual, radius_kind, follows, activation, *_):
    rows = sum(v is not None for v in (factor, gain, radius, bias)) + (0 if learned is None else learned.shape[0])
    behind = torch.empty_like(dot) if residual and activation != 0 else dot.new_empty(0)
    of_mean = norms.new_empty(0 if mean is None else norms.shape[1])
    of_norm = norms.new_empty((Plan.reduced(activation) if follows else 0, dot.shape[1]))
    return torch.empty_like(dot), torch.empty_like(norms), norms.new_empty((rows, dot.shape[1])), of_mean, of_norm, behind


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    (dot, norms, factor, gain, radius, bias, mean, learned, _, _, _, _, residual, slope, radius_kind, follows, _, activation, *names) = inputs
    out, norm = output
    ctx.mark_non_differentiable(norm)
    ctx.set_materialize_grads(False)
    ctx.options = (residual is not None, radius_kind, follows, activation, *names)
    needs_out = residual is not None and activation != 0  # else the sign before the activation is computed again
    ctx.save_for_backward(out if needs_out else None, norm, dot, norms, factor, gain, radius, bias, mean, learned, slope)


def _gradient(ctx: Any, backward: Any, e: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if e is None:
        return (None,) * 21
    grad_d, grad_n, of_vectors, of_mean, of_norm, behind = backward(e, *ctx.saved_tensors, *ctx.options)
    residual, _, _, activation, *_ = ctx.options
    wanted = ctx.needs_input_grad
    rows = iter(of_vectors)
    vectors = [next(rows) if saved is not None else None for saved in ctx.saved_tensors[4 : 4 + len(VECTORS)]]
    vectors = [v if want else None for v, want in zip(vectors, wanted[2:6], strict=True)]
    learned = of_vectors[len(of_vectors) - ctx.saved_tensors[9].shape[0] :] if wanted[7] else None
    of_residual = (behind if activation != 0 else e) if residual else None
    slope = of_norm[2] if wanted[13] else None
    gamma, beta = of_norm[1] if wanted[8] else None, of_norm[0] if wanted[9] else None
    return grad_d, grad_n, *vectors, of_mean if wanted[6] else None, learned, gamma, beta, None, None, of_residual, slope, *[None] * 7


epilogue = register_differentiable("epilogue", _epilogue, _epilogue_fake, _context, _gradient, _backward, _backward_fake)
