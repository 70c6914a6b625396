"""The twin of `dcnet.formulas.m` for Triton kernels: the same names, in float32.

It does not use libdevice, so that the kernels also run in Triton's interpreter. The polynomials keep the relative error
at a few ulp near 0 too, where forms such as (e^2x − 1)/(e^2x + 1) lose most digits.
"""

import triton
import triton.language as tl


@triton.jit
def abs(x):
    return tl.abs(x)


@triton.jit
def step(x):
    return tl.where(x > 0.0, 1.0, 0.0)


@triton.jit
def sign(x):
    return tl.where(x > 0.0, 1.0, 0.0) - tl.where(x < 0.0, 1.0, 0.0)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b)


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def erf(x):
    return tl.erf(x)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def log1p(x):
    # log(1 + x) suffers from the rounding of 1 + x; the ratio corrects that (Kahan)
    u = 1.0 + x
    d = u - 1.0
    return tl.where(d == 0.0, x, tl.log(u) * (x / tl.where(d == 0.0, 1.0, d)))


@triton.jit
def sqrt(x):
    return tl.sqrt(x)


@triton.jit
def rsqrt(x):
    return 1.0 / tl.sqrt(x)


@triton.jit
def tanh(x):
    # an odd polynomial below 0.625, 1 - 2/(e^2|x| + 1) above (coefficients: Cephes)
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    a = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0)
    return tl.where(a < 0.625, x + x * z * p, tl.where(x < 0.0, -far, far))


@triton.jit
def asin(c):
    # asin a = π/2 - 2·asin(sqrt((1 - a)/2)) above 1/2 (coefficients: Cephes)
    a = tl.abs(c)
    far = a > 0.5
    z = tl.where(far, 0.5 * (1.0 - a), a * a)
    s = tl.where(far, tl.sqrt(z), a)
    p = 4.2163199048e-2 * z + 2.4181311049e-2
    p = p * z + 4.5470025998e-2
    p = p * z + 7.4953002686e-2
    p = p * z + 1.6666752422e-1
    r = s + s * z * p
    r = tl.where(far, 1.5707963267948966 - 2.0 * r, r)
    return tl.where(c < 0.0, -r, r)


@triton.jit
def asin_slope(c):
    return 1.0 / tl.sqrt(tl.maximum((1.0 - c) * (1.0 + c), 1e-6))


@triton.jit
def power(a, p):
    return tl.exp(p * tl.log(a))
