"""Formulas of a user's own, with all that registration admits and a translation could trip over."""

import dcnet
from dcnet import at_least, learnable, m, positive


def register_own():
    """Register a user's formulas, with all that registration admits and JavaScript could trip over."""

    @dcnet.magnitude
    def rational(n, rho, alpha: positive = 1.0, new: learnable(start=0.5, floor=0.1, least=0.05) = 0.25):
        """α·‖x‖/(‖x‖ + ρ) + new·‖x‖ </script><!-- <b>"""
        var = this = 1.0 / (n + rho)
        return alpha * n * var + new * n, alpha * rho * var * this + new, -alpha * n * var * var, n

    @dcnet.magnitude(
        bounded=False,
    )
    def stretched(n, alpha: learnable(start=0.5, floor=0.1) = 2.0, m: positive = 1.5):
        """α·m·‖x‖"""
        return alpha * m * n, alpha * m, m * n

    @dcnet.angular
    def rooted(c, new: learnable(start=0.5, floor=0.1) = 1.0, p: at_least(1.0) = 1.0):
        """√2·new·cos θ·√(p + |cos θ|)
        and a second line"""
        root = m.sqrt
        a, behind = m.abs(c), ~((c >= 0.0) | (c == 0.5))
        factor: float = 2.0**0.5 * new
        value = factor * m.where(b=a, a=-a, condition=behind) * (s := root(p + a))
        slope = factor * (s + 0.5 * a / s)
        return value, +slope, value / new
