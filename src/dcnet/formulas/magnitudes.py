"""The seven magnitude functions h of the paper: value, slope in ‖x‖, slope in ρ where there is one."""

from dcnet.formulas import m
from dcnet.formulas.catalogue import positive
from dcnet.formulas.registration import magnitude


@magnitude(bounded=True)
def sphere(n, alpha: positive = 1.0):
    """α"""
    return alpha, 0.0


@magnitude(bounded=True)
def ball(n, rho, alpha: positive = 1.0):
    """α·min(‖x‖, ρ)/ρ"""
    r = 1.0 / rho  # once per kernel, not once per element
    q = n * r
    d = alpha * m.step(1.0 - q) * r
    return alpha * m.minimum(q, 1.0), d, -d * q


@magnitude(bounded=True)
def tanh(n, rho, alpha: positive = 1.0):
    """α·tanh(‖x‖/ρ)"""
    r = 1.0 / rho  # once per kernel, not once per element
    q = n * r
    t = m.tanh(q)
    d = alpha * (1.0 - t * t) * r
    return alpha * t, d, -d * q


@magnitude
def linear(n, alpha: positive = 1.0):
    """α·‖x‖"""
    return alpha * n, alpha


@magnitude
def seg(n, rho, alpha: positive = 1.0, beta=0.5):
    """α·‖x‖ up to ρ, β·‖x‖ + (α − β)·ρ beyond"""
    # both branches at once: β‖x‖ + (α − β)·min(‖x‖, ρ)
    inside = m.step(rho - n)
    return (
        beta * n + (alpha - beta) * m.minimum(n, rho),
        beta + (alpha - beta) * inside,
        (alpha - beta) * (1.0 - inside),
    )


@magnitude
def log(n, alpha: positive = 1.0):
    """α·log(1 + ‖x‖)"""
    return alpha * m.log1p(n), alpha / (1.0 + n)


@magnitude
def mix(n, alpha: positive = 1.0, beta=1.0):
    """α·‖x‖ + β·log(1 + ‖x‖)"""
    return alpha * n + beta * m.log1p(n), alpha + beta / (1.0 + n)
