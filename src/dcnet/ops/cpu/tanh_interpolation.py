"""Compute tanh(n·q) for the norm n of every patch and a number q of every kernel, without a tanh for every pair.

For each n, tanh(n·q) is a smooth function of log q: its poles are π/2 away from the real axis. So over the range of q
that the kernels of a layer have, a polynomial through few points gives it to the last digit of float32,

    tanh(n·q_k) = Σ_j C_kj·tanh(n·p_j),        p_j: Chebyshev points,   C_kj: the j-th Lagrange polynomial at q_k,

and a small matrix product replaces most of the tanh. With s = log(max q/min q) the error falls as B^−points,
B = π/s + sqrt((π/s)² + 1): 5 points are enough where radii differ by a tenth, 13 for a ratio of 4, 21 for 20.

Since Σ_j C_kj = 1, the first tanh can be taken out of the sum,

    tanh(n·q_k) = tanh(n·p_0) + Σ_j C_kj·(tanh(n·p_j) − tanh(n·p_0)).

The differences are small where tanh is near 1, so its last digits are kept, which the slope 1 − tanh² needs.
"""

import math
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]

_ERROR = 2.0**-25  # of the polynomial, relative; rounding adds its own
_CONSTANT = 4.0  # the error is below 4·B^−points for ratios up to 20; tests/test_tanh_interpolation.py measures it
_GREATEST_RATIO = 20.0
FEWEST = 2**17 + 1  # results; for fewer, choosing points takes as long as tanh
_FEW = 4  # points; with more, a matrix product is faster than one pass for each


class Points:
    """The points for the numbers q (groups, kernels[, 1]) of a layer, chosen when they are first needed."""

    def __init__(self, q: Tensor) -> None:
        self.q = q

    @cached_property
    def chosen(self) -> tuple[Tensor, Tensor] | None:
        """The points p (groups, points[, 1]) and the matrix C (groups, kernels, points − 1).

        None where tanh itself is as fast, or where no points can be chosen.
        """
        q = self.q
        # another device or a subclass may have no data to read; another dtype has another precision
        if q.device.type != "cpu" or q.dtype != torch.float32 or type(q) is not Tensor:
            return None
        u = q.detach().reshape(q.shape[:2]).double().log().numpy()
        if not np.isfinite(u).all():
            return None
        least, greatest = u.min(1, keepdims=True), u.max(1, keepdims=True)
        middle, half = (greatest + least) / 2.0, (greatest - least) / 2.0
        spread = 2.0 * float(half.max())
        if spread > math.log(_GREATEST_RATIO):
            return None
        count = 1 if spread == 0.0 else math.ceil(math.log(_CONSTANT / _ERROR) / math.asinh(math.pi / spread))
        if 2 * count > q.shape[1]:
            return None
        z, weights = _chebyshev(count)
        # Lagrange's polynomials in barycentric form; a kernel exactly at a point takes its value from that point alone
        apart = ((u - middle) / np.maximum(half, 1e-30))[..., None] - z
        shares = weights / np.where(apart == 0.0, 1e-300, apart)
        shares /= shares.sum(-1, keepdims=True)
        at = torch.from_numpy(np.exp(middle + half * z)).to(q.dtype)
        return at.unsqueeze(-1) if q.dim() == 3 else at, torch.from_numpy(shares[..., 1:]).to(q.dtype)

    @cached_property
    def one_by_one(self) -> list[Tensor]:
        """The columns of C, one for each point but the first, each in the shape of q."""
        assert self.chosen is not None
        return [share.reshape(self.q.shape) for share in self.chosen[1].unbind(-1)]


@lru_cache
def _chebyshev(count: int) -> tuple[Numbers, Numbers]:
    """Return the Chebyshev points between −1 and 1, in ascending order, and their barycentric weights."""
    angles = (np.arange(count) + 0.5) * (math.pi / count)
    return -np.cos(angles), np.sin(angles) * (-1.0) ** np.arange(count)


def tanh_of_product(n: Tensor, points: Points, out: Tensor | None = None) -> Tensor:
    """Return tanh(n·q) for n (rows, groups, 1[, positions]) and the q of `points`; autograd cannot follow it."""
    q = points.q
    chosen = points.chosen if n.numel() * q.shape[1] >= FEWEST else None
    if chosen is None:
        return torch.tanh(n * q, out=out)
    at, shares = chosen
    values = torch.tanh(n * at)
    first = values[:, :, :1]
    beyond = values[:, :, 1:] - first
    if out is None:
        out = torch.empty(torch.broadcast_shapes(n.shape, q.shape), dtype=n.dtype, device=n.device)
    if not points.one_by_one:
        return out.copy_(first)
    if shares.shape[-1] < _FEW or not _exact_products():
        torch.mul(beyond[:, :, :1], points.one_by_one[0], out=out)
        for j, share in enumerate(points.one_by_one[1:], 1):
            out.addcmul_(beyond.narrow(2, j, 1), share)
    else:
        with torch.autocast("cpu", enabled=False):
            if n.dim() == 4:  # positions come after the kernels
                torch.bmm(shares.expand(len(n), -1, -1, -1).flatten(0, 1), beyond.flatten(0, 1), out=out.flatten(0, 1))
            else:
                torch.bmm(beyond.transpose(0, 1), shares.transpose(1, 2), out=out.transpose(0, 1))
    return out.add_(first)  # last, after the small terms: this order rounds least


def _exact_products() -> bool:
    """Tell whether matrix products have full float32 precision, which is PyTorch's default."""
    return torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined]
