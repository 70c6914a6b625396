/* Vectors of BYTES bytes, for loops that a compiler does not vectorize well by itself. */

#ifdef __AVX__
#include <immintrin.h>
#endif

#ifndef BYTES
#ifdef __AVX512F__
#define BYTES 64
#else
#define BYTES 32
#endif
#endif

typedef float Floats __attribute__((vector_size(BYTES)));
typedef float LooseFloats __attribute__((vector_size(BYTES), aligned(4)));
typedef int32_t Mask __attribute__((vector_size(BYTES)));
enum { WIDTH = BYTES / 4, TILE = 4 * WIDTH };
#define UNROLLED _Pragma("GCC unroll 16")

INLINE Floats load(const float *from) { return (Floats)*(const LooseFloats *)from; }
INLINE void store(float *to, Floats values) { *(LooseFloats *)to = (LooseFloats)values; }
INLINE Floats chosen(Mask where, Floats a, Floats b) { return (Floats)(((Mask)a & where) | ((Mask)b & ~where)); }
INLINE Floats all(float value) { return (Floats){0} + value; }
static long rounded(long count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }

/* memcpy for short rows; the last vector overlaps the one before */
INLINE void copy_row(float *to, const float *from, long count) {
    if (count >= WIDTH) {
        for (long i = 0; i + WIDTH <= count; i += WIDTH) store(to + i, load(from + i));
        store(to + count - WIDTH, load(from + count - WIDTH));
    } else {
        for (long i = 0; i < count; i++) to[i] = from[i];
    }
}

/* An approximate 1/√s, refined to within two units in the last place, where a CPU has one */
#ifdef __AVX__
INLINE Floats inverse_root(Floats s) {
#if BYTES == 64
    Floats r = (Floats)_mm512_rsqrt14_ps((__m512)s);
#elif defined(__AVX512VL__)
    Floats r = (Floats)_mm256_rsqrt14_ps((__m256)s);
#else
    Floats r = (Floats)_mm256_rsqrt_ps((__m256)s); /* 12 bits, where the others have 14 */
    r = r * (all(1.5f) - all(0.5f) * s * r * r);
#endif
    return r * (all(1.5f) - all(0.5f) * s * r * r);
}
#endif

/* √s and 1/√s; both are 0 for s = 0. A square root and a division take as long as twenty products, so unless `exact` an
 * approximation is used. It is wrong for 0 and for subnormal numbers, and gives NaN for an infinite s. */
INLINE void root_and_inverse(Floats s, const int exact, Floats *root, Floats *inverse) {
#ifdef __AVX__
    if (!exact) {
        *inverse = inverse_root(s);
        *root = s * *inverse;
        return;
    }
#endif
    for (int j = 0; j < WIDTH; j++) {
        float n = sqrtf(s[j]);
        (*root)[j] = n;
        (*inverse)[j] = n == 0.0f ? 0.0f : 1.0f / n;
    }
}

INLINE int has_nan(Floats values) {
    int found = 0;
    for (int j = 0; j < WIDTH; j++) found |= values[j] != values[j];
    return found;
}
