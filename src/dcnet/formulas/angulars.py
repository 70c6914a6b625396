"""The six angular functions g of c = cos θ: value, slope in c, slope in each learnable parameter."""

from dcnet.formulas import m
from dcnet.formulas.catalogue import learnable
from dcnet.formulas.registration import angular


@angular
def cosine(c):
    """cos θ"""
    return c, 1.0


@angular
def linear(c):
    """1 − 2θ/π"""
    # = (2/π)·asin c, which needs no acos and is odd in c to the last bit
    return 0.6366197723675814 * m.asin(c), 0.6366197723675814 * m.asin_slope(c)


@angular
def sigmoid(c, k: learnable(start=0.75, floor=0.05) = 0.3):
    """(1+e^(−π/2k))/(1−e^(−π/2k)) · (1−e^(θ/k−π/2k))/(1+e^(θ/k−π/2k))"""
    # = tanh(asin c / 2k) / tanh(π/4k), which cannot overflow
    s = m.asin(c)
    t = m.tanh(s / (2.0 * k))
    top = m.tanh(0.7853981633974483 / k)
    # t/top may round to 1 ± an ulp at c = ±1, where the value is c itself
    value = m.where(m.abs(c) < 1.0, t / top, c)
    bend = (1.0 - t * t) / (2.0 * k * top)
    return (
        value,
        bend * m.asin_slope(c),
        value * (0.7853981633974483 * (1.0 - top * top) / (k * k * top)) - bend * s / k,
    )


@angular
def square_cosine(c):
    """sign(cos θ)·cos²θ"""
    a = m.abs(c)
    return a * c, 2.0 * a


@angular
def relu_cosine(c):
    """max(0, cos θ)"""
    on = m.step(c)  # 0 at c = 0, as torch.relu has it
    return c * on, on


@angular
def power_cosine(c, p: learnable(start=2.0, floor=1.0, least=1.0) = 2.0):
    """sign(cos θ)·|cos θ|^p"""
    # the floor keeps 0^(p−1), its derivative and log 0 finite for every p ≥ 1, p = 1 included
    s = m.maximum(m.abs(c), 1e-30)
    a = m.power(s, p - 1.0)
    value = c * a
    return value, p * a, value * m.log(s)
