/* Vectors of eight floats, for loops that a compiler does not vectorize well by itself. */

#ifdef __AVX__
#include <immintrin.h>
#endif

typedef float Floats __attribute__((vector_size(32)));
typedef float LooseFloats __attribute__((vector_size(32), aligned(4)));
typedef int32_t Mask __attribute__((vector_size(32)));
enum { WIDTH = 8, TILE = 4 * WIDTH };
#define UNROLLED _Pragma("GCC unroll 4")

INLINE Floats load(const float *from) { return (Floats)*(const LooseFloats *)from; }
INLINE void store(float *to, Floats values) { *(LooseFloats *)to = (LooseFloats)values; }
INLINE Floats chosen(Mask where, Floats a, Floats b) { return (Floats)(((Mask)a & where) | ((Mask)b & ~where)); }
INLINE Floats all(float value) { return (Floats){value, value, value, value, value, value, value, value}; }
static long rounded(long count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }

/* memcpy for short rows, with the last vector over a part of the one before */
INLINE void copy_row(float *to, const float *from, long count) {
    if (count >= WIDTH) {
        for (long i = 0; i + WIDTH <= count; i += WIDTH) store(to + i, load(from + i));
        store(to + count - WIDTH, load(from + count - WIDTH));
    } else {
        for (long i = 0; i < count; i++) to[i] = from[i];
    }
}

/* √s and 1/√s; of 0, 0 and 0. Square root and division take as long as twenty products, so that where a CPU has an
 * approximate 1/√s, that is refined, twice, to the last digit. */
INLINE void root_and_inverse(Floats s, int exact, Floats *root, Floats *inverse) {
#ifdef __AVX__
    if (!exact) {
        Floats r = (Floats)_mm256_rsqrt_ps((__m256)s), n;
        r = r * (all(1.5f) - all(0.5f) * s * r * r);
        n = s * r;
        n = n + all(0.5f) * r * (s - n * n);
        r = r + r * (all(1.0f) - n * r);
        Mask finite = s != all(INFINITY);
        *root = chosen(finite, n, s);
        *inverse = chosen(finite, r, all(0.0f));
        return;
    }
#endif
    for (int j = 0; j < WIDTH; j++) {
        float n = sqrtf(s[j]);
        (*root)[j] = n;
        (*inverse)[j] = n == 0.0f ? 0.0f : 1.0f / n;
    }
}
