/* Elementary functions of one float, without branches, so that a compiler turns loops over them into vector code.
 *
 * Within 2 units in the last place of float32 (tests/test_native.py measures it). Odd functions are exactly odd,
 * and NaN, infinities, zeros and subnormal numbers give what PyTorch's functions give. */

#include <math.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

INLINE float from_bits(int32_t bits) { union { int32_t i; float f; } u = {.i = bits}; return u.f; }
INLINE int32_t bits_of(float x) { union { float f; int32_t i; } u = {.f = x}; return u.i; }
INLINE double from_bits64(int64_t bits) { union { int64_t i; double f; } u = {.i = bits}; return u.f; }
INLINE int64_t bits_of64(double x) { union { double f; int64_t i; } u = {.f = x}; return u.i; }

/* a comparison with NaN is false: with this order of the operands, NaN gives NaN */
INLINE float at_least(float x, float least) { return x < least ? least : x; }
INLINE float at_most(float x, float most) { return x > most ? most : x; }
INLINE float smaller(float a, float b) { return a < b || a != a ? a : b; }
INLINE float larger(float a, float b) { return a > b || a != a ? a : b; }
INLINE float sign_of(float x) { return (float)(x > 0.0f) - (float)(x < 0.0f); }

/* e^x = 2^k · e^r with |r| ≤ ln 2 / 2. The powers of two come as two factors, since 2^k alone may be subnormal. */
INLINE float exponential(float x) {
    const float shift = 12582912.0f; /* 1.5·2^23: adding it rounds to a whole number */
    float inside = at_most(at_least(x, -104.0f), 89.0f);
    float shifted = fmaf(inside, 1.44269504f, shift);
    float k = shifted - shift;
    float r = fmaf(k, -1.42860677e-6f, fmaf(k, -0.693145752f, inside));
    float p = fmaf(fmaf(fmaf(fmaf(fmaf(1.37805939e-3f, r, 8.37312452e-3f), r, 4.16695364e-2f), r, 1.66664720e-1f),
                        r, 4.99999851e-1f), r, 1.0f);
    int32_t whole = bits_of(shifted) - bits_of(shift), half = whole >> 1;
    return fmaf(p, r, 1.0f) * from_bits((half + 127) << 23) * from_bits((whole - half + 127) << 23);
}

/* tanh a = (2^k·(1 + t) − (1 − t)) / (2^k·(1 + t) + (1 − t)) with t = tanh u for a = k·ln 2 / 2 + u, −0.09 ≤ u ≤ 0.26.
 * The denominator is the numerator + 2·(1 − t): errors of the one then cancel those of the other, and for k = 0 it is
 * exactly 2, so that tanh a is t. The range of u is asymmetric so that k = 0 covers as much as it has to. */
INLINE float hyperbolic_tangent(float x) {
    const float shift = 12582912.0f; /* 1.5·2^23: adding it rounds to a whole number */
    float a = at_most(fabsf(x), 10.0f);
    float shifted = fmaf(a - 0.0866f, 2.88539008f, shift), k = shifted - shift;
    float u = fmaf(k, -7.14303385e-7f, fmaf(k, -0.346572876f, a)), s = u * u;
    float p = fmaf(fmaf(-5.12319948e-2f, s, 1.33227481e-1f), s, -3.33332163e-1f);
    float t = fmaf(p * s, u, u), power = from_bits((int32_t)((uint32_t)bits_of(shifted) << 23) + 0x3f800000);
    float top = fmaf(t, power + 1.0f, power - 1.0f);
    return copysignf(top / (top + fmaf(-2.0f, t, 2.0f)), x);
}

/* asin a = π/2 − 2·asin √((1 − a)/2) above a half; outside [−1, 1] NaN. */
INLINE float arc_sine(float x) {
    float a = fabsf(x);
    float z = a > 0.5f ? 0.5f * (1.0f - a) : a * a;
    float s = a > 0.5f ? sqrtf(z) : a;
    float p = fmaf(fmaf(fmaf(fmaf(4.2163199048e-2f, z, 2.4181311049e-2f), z, 4.5470025998e-2f), z, 7.4953002686e-2f),
                   z, 1.6666752422e-1f);
    float y = fmaf(p * z, s, s);
    return copysignf(a > 0.5f ? fmaf(-2.0f, y, 1.57079637f) - 4.37113883e-8f : y, x);
}

/* log x = k·ln 2 + log m with m from √½ to √2. */
INLINE float logarithm(float x) {
    float scaled = x < 1.17549435e-38f ? x * 8388608.0f : x; /* subnormal numbers */
    int32_t bits = bits_of(scaled) - 0x3f3504f3;
    float k = (float)(bits >> 23) - (x < 1.17549435e-38f ? 23.0f : 0.0f);
    float r = from_bits((bits & 0x7fffff) + 0x3f3504f3) - 1.0f, z = r * r;
    float p = fmaf(fmaf(fmaf(fmaf(7.0376836292e-2f, r, -1.1514610310e-1f), r, 1.1676998740e-1f),
                        r, -1.2420140846e-1f), r, 1.4249322787e-1f);
    p = fmaf(fmaf(fmaf(fmaf(p, r, -1.6668057665e-1f), r, 2.0000714765e-1f), r, -2.4999993993e-1f),
             r, 3.3333331174e-1f);
    float y = fmaf(k, -2.12194440e-4f, p * r * z);
    y = fmaf(-0.5f, z, y) + r;
    y = fmaf(k, 0.693359375f, y);
    y = x == INFINITY ? INFINITY : y;
    y = x == 0.0f ? -INFINITY : y;
    return x < 0.0f || x != x ? NAN : y;
}

/* log(1 + x), corrected for the rounding of 1 + x. */
INLINE float logarithm_of_1_plus(float x) {
    float u = 1.0f + x;
    float y = logarithm(u) + (u == INFINITY || u == 0.0f ? 0.0f : (x - (u - 1.0f)) / u);
    return fabsf(x) < 1e-4f ? fmaf(-0.5f * x, x, x) : y;
}

/* |a|^p for finite a ≠ 0 by way of float64: in float32, p·log a would lose the digits before its point. */
INLINE float power_of_absolute(float a, float p) {
    double x = (double)fabsf(a);
    int64_t bits = bits_of64(x) - 0x3fe6a09e667f3bcdLL;
    int64_t exponent = bits >> 52;
    double m = from_bits64(bits - (exponent << 52) + 0x3fe6a09e667f3bcdLL);
    double t = (m - 1.0) / (m + 1.0), z = t * t; /* log m = 2·atanh t */
    double series = ((((z / 11.0 + 1.0 / 9.0) * z + 1.0 / 7.0) * z + 1.0 / 5.0) * z + 1.0 / 3.0) * z;
    /* a whole number of this size converted by adding 1.5·2^52, which vectorizes everywhere */
    double k = from_bits64(exponent + 0x4338000000000000LL) - 6755399441055744.0;
    double power = (double)p * (k + 2.8853900817779268 * (t + t * series)); /* log2 of the result */
    power = power > 200.0 ? 200.0 : (power < -200.0 ? -200.0 : power);
    double shifted = power + 6755399441055744.0;
    double r = (power - (shifted - 6755399441055744.0)) * 0.6931471805599453;
    double e = 1.0 + r * (1.0 + r * (1.0 / 2 + r * (1.0 / 6 + r * (1.0 / 24 + r * (1.0 / 120 +
               r * (1.0 / 720 + r / 5040))))));
    return (float)(e * from_bits64((bits_of64(shifted) + 1023) << 52));
}

INLINE float power(float a, float p) {
    float y = power_of_absolute(a, p), whole = rintf(p);
    y = a == 0.0f ? (p > 0.0f ? 0.0f : INFINITY) : y;
    y = fabsf(a) == INFINITY ? (p > 0.0f ? INFINITY : 0.0f) : y;
    /* a whole power of a negative number; odd ones are negative */
    y = a < 0.0f ? (whole != p ? NAN : (2.0f * rintf(0.5f * whole) == whole ? y : -y)) : y;
    y = a != a || p != p ? NAN : y;
    return p == 0.0f || a == 1.0f ? 1.0f : y;
}
