/* Planes of WIDTH channels side by side, a vector for each pixel, and the dot products and norms of their patches.
 *
 * Rows of small planes are too short for loops along them: a large part of a row does not fill a vector. Here each lane
 * of a vector is a channel. So every vector is full, a stride is a step, and a sum over pixels is a sum of vectors.
 * Planes are transposed when they are read and when they are written. Where there are fewer channels than lanes, the
 * last channel is computed several times and written once. */

#ifdef __AVX512F__
enum { LANES = 2 * WIDTH }; /* computations pixel by pixel take two at once */
#else
enum { LANES = WIDTH };
#endif

/* Sizes, in the order of `lanes_of` in lanes.py */
struct layout {
    long images, channels, multiplier; /* kernels of each channel */
    long height, width, read_height, read_width, out_height, out_width; /* places in no patch are not read */
    long taps_y, taps_x, step_y, step_x, apart_y, apart_x; /* of a kernel, strides, dilations */
    long before_y, before_x; /* zeros before the map */
    long rows, columns; /* of the map with its zeros */
    long margin, pitch; /* zeros before a row of gradients, and places from one row to the next */
};

static long in_plane(const struct layout *l) { return l->height * l->width; }
static long out_plane(const struct layout *l) { return l->out_height * l->out_width; }
static long taps(const struct layout *l) { return l->taps_y * l->taps_x; }
/* numbers of a block of channels */
static long x_size(const struct layout *l) { return l->rows * l->columns * WIDTH; }
static long out_size(const struct layout *l) { return out_plane(l) * WIDTH; }
static long gradient_size(const struct layout *l) { return l->out_height * l->pitch * WIDTH; }

/* The first of a block's channels, and how many there are */
struct block {
    long first, lanes;
};

/* Which of `multiplier` planes of each channel are meant */
struct planes {
    long multiplier, number, size; /* numbers in a plane */
};

static long plane_of(struct block b, struct planes p, long lane) {
    long channel = b.first + (lane < b.lanes ? lane : b.lanes - 1);
    return (channel * p.multiplier + p.number) * p.size;
}

INLINE void transpose(Floats rows[WIDTH]) {
#ifdef __AVX__
    __m256 pairs[8], fours[8];
    UNROLLED for (int i = 0; i < 4; i++) {
        pairs[2 * i] = _mm256_unpacklo_ps((__m256)rows[2 * i], (__m256)rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_ps((__m256)rows[2 * i], (__m256)rows[2 * i + 1]);
    }
    UNROLLED for (int i = 0; i < 2; i++) {
        const __m256 *p = pairs + 4 * i;
        fours[4 * i] = _mm256_shuffle_ps(p[0], p[2], 0x44);
        fours[4 * i + 1] = _mm256_shuffle_ps(p[0], p[2], 0xee);
        fours[4 * i + 2] = _mm256_shuffle_ps(p[1], p[3], 0x44);
        fours[4 * i + 3] = _mm256_shuffle_ps(p[1], p[3], 0xee);
    }
    UNROLLED for (int i = 0; i < 4; i++) {
        rows[i] = (Floats)_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
        rows[i + 4] = (Floats)_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
    }
#else
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < i; j++) {
            float other = rows[i][j];
            rows[i][j] = rows[j][i], rows[j][i] = other;
        }
#endif
}

/* Read one plane of each channel of an image. The last block of pixels overlaps the one before. */
static void read_planes(const float *image, struct block b, struct planes p, float *to) {
    const float *from[WIDTH];
    for (long lane = 0; lane < WIDTH; lane++) from[lane] = image + plane_of(b, p, lane);
    for (long pixel = 0; p.size >= WIDTH && pixel < p.size; pixel += WIDTH) {
        long at = pixel + WIDTH <= p.size ? pixel : p.size - WIDTH;
        Floats rows[WIDTH];
        for (int lane = 0; lane < WIDTH; lane++) rows[lane] = load(from[lane] + at);
        transpose(rows);
        for (int i = 0; i < WIDTH; i++) store(to + (at + i) * WIDTH, rows[i]);
    }
    for (long i = 0; p.size < WIDTH && i < p.size * WIDTH; i++) to[i] = from[i % WIDTH][i / WIDTH];
}

static void write_planes(const float *from, struct block b, struct planes p, float *image) {
    for (long pixel = 0; p.size >= WIDTH && pixel < p.size; pixel += WIDTH) {
        long at = pixel + WIDTH <= p.size ? pixel : p.size - WIDTH;
        Floats rows[WIDTH];
        for (int i = 0; i < WIDTH; i++) rows[i] = load(from + (at + i) * WIDTH);
        transpose(rows);
        for (int lane = 0; lane < b.lanes; lane++) store(image + plane_of(b, p, lane) + at, rows[lane]);
    }
    for (long i = 0; p.size < WIDTH && i < p.size * WIDTH; i++)
        if (i % WIDTH < b.lanes) image[plane_of(b, p, i % WIDTH) + i / WIDTH] = from[i];
}

/* Write zeros around `height` rows of `width` pixels in a map of `rows` rows of `columns`. */
static void clear_around(float *map, long rows, long columns, long y, long height, long x, long width) {
    for (long row = 0; row < rows; row++, map += columns * WIDTH) {
        long inside = row >= y && row < y + height ? width : 0, left = inside ? x : columns;
        memset(map, 0, left * WIDTH * sizeof(float));
        if (inside) memset(map + (x + width) * WIDTH, 0, (columns - x - width) * WIDTH * sizeof(float));
    }
}

/* Copy the map into the middle of its zeros. */
static void surround(const struct layout *l, const float *map, float *x) {
    for (long row = 0; row < l->read_height; row++) {
        const float *from = map + row * l->width * WIDTH;
        float *to = x + ((row + l->before_y) * l->columns + l->before_x) * WIDTH;
        for (long i = 0; i < l->read_width; i++) store(to + i * WIDTH, load(from + i * WIDTH));
    }
}

/* A loop over pixels: sevens first, since most maps are 7, 14, 28 or 56 wide; CALL is done with `blocks` and `at`. */
#define IN_BLOCKS(count, CALL) \
    for (long at = 0, left = count; left > 0;) { \
        if (left >= 7) { const int blocks = 7; CALL; at += 7, left -= 7; } \
        else if (left >= 4) { const int blocks = 4; CALL; at += 4, left -= 4; } \
        else { const int blocks = 1; CALL; at += 1, left -= 1; } \
    }

/* What loops over the taps of a kernel depend on: its taps, its stride and its dilation along a row; and whether all of
 * these are constants, so that the loops can be unrolled */
struct kernel {
    long taps_y, taps_x, step, apart;
    int known;
};

/* CALL with a `kernel`, made of constants for common layers, so that no addresses are computed for each tap. */
#define WITH_KERNEL(l, CALL) \
    if (l->step_x > 2 || l->apart_x != 1) WITH(l->taps_y, l->taps_x, l->step_x, l->apart_x, 0, CALL) \
    else if (l->taps_y == 3 && l->taps_x == 3 && l->step_x == 1) WITH(3, 3, 1, 1, 1, CALL) \
    else if (l->taps_y == 3 && l->taps_x == 3) WITH(3, 3, 2, 1, 1, CALL) \
    else if (l->step_x == 1) WITH(l->taps_y, l->taps_x, 1, 1, 0, CALL) \
    else WITH(l->taps_y, l->taps_x, 2, 1, 0, CALL)
#define WITH(v, u, s, a, known, CALL) { const struct kernel kernel = {v, u, s, a, known}; CALL; }

/* BODY for each row, or each column, of a kernel's taps; unrolled only if it is known, to limit its length. */
#define EACH_TAP(known, taps, t, BODY) \
    if (known) { UNROLLED for (long t = 0; t < taps; t++) BODY } \
    else { for (long t = 0; t < taps; t++) BODY }

INLINE void dot_taps(const int blocks, const struct kernel kernel, const float *x, const float *weights, Floats *sum) {
    EACH_TAP(kernel.known, kernel.taps_x, u, {
        Floats weight = load(weights + u * WIDTH);
        UNROLLED for (int j = 0; j < blocks; j++)
            sum[j] += weight * load(x + (u * kernel.apart + j * kernel.step) * WIDTH);
    })
}

INLINE void dot_block(const int blocks, const struct kernel kernel, const struct layout *l, const float *x,
                      const float *weights, float *to) {
    const long row = l->apart_y * l->columns * WIDTH;
    Floats sum[7] = {{0}};
    EACH_TAP(kernel.known, kernel.taps_y, v,
             dot_taps(blocks, kernel, x + v * row, weights + v * kernel.taps_x * WIDTH, sum);)
    UNROLLED for (int j = 0; j < blocks; j++) store(to + j * WIDTH, sum[j]);
}

INLINE void dot_row(const struct kernel kernel, const struct layout *l, const float *x, const float *weights,
                    float *dot) {
    IN_BLOCKS(l->out_width,
              dot_block(blocks, kernel, l, x + at * kernel.step * WIDTH, weights, dot + at * WIDTH))
}

/* Σ w·x of each patch */
static void dots(const struct layout *l, const float *x, const float *weights, float *dot) {
    for (long row = 0; row < l->out_height; row++, dot += l->out_width * WIDTH) {
        const float *from = x + row * l->step_y * l->columns * WIDTH;
        WITH_KERNEL(l, dot_row(kernel, l, from, weights, dot))
    }
}

INLINE void column_block(const int blocks, const struct kernel kernel, const struct layout *l, const float *x,
                         float *to) {
    Floats sum[7] = {{0}};
    EACH_TAP(kernel.known, kernel.taps_y, v, {
        UNROLLED for (int j = 0; j < blocks; j++) {
            Floats value = load(x + (v * l->apart_y * l->columns + j) * WIDTH);
            sum[j] += value * value;
        }
    })
    UNROLLED for (int j = 0; j < blocks; j++) store(to + j * WIDTH, sum[j]);
}

/* Norms from sums down the columns, `exact` or not; return their sum. */
INLINE Floats roots(const struct kernel kernel, long count, const float *columns, float eps, const int exact,
                    float *norm, float *inverse) {
    Floats sum = {0};
    for (long i = 0; i < count; i++, norm += WIDTH, inverse += WIDTH) {
        Floats squares = all(eps), root, one_over;
        EACH_TAP(kernel.known, kernel.taps_x, u,
                 squares += load(columns + (i * kernel.step + u * kernel.apart) * WIDTH);)
        root_and_inverse(squares, exact, &root, &one_over);
        store(norm, root);
        store(inverse, one_over);
        sum += root;
    }
    return sum;
}

INLINE Floats norm_row(const struct kernel kernel, const struct layout *l, const float *x, float eps, float *columns,
                       float *norm, float *inverse) {
    IN_BLOCKS(l->columns, column_block(blocks, kernel, l, x + at * WIDTH, columns + at * WIDTH))
    if (eps >= 1e-30f) {
        Floats sum = roots(kernel, l->out_width, columns, eps, 0, norm, inverse);
        if (!has_nan(sum)) return sum;
    }
    return roots(kernel, l->out_width, columns, eps, 1, norm, inverse);
}

/* √(Σ x² + eps) of each patch, and its inverse; the norms are added to `total`. */
static void norms(const struct layout *l, const float *x, float eps, float *columns, float *norm, float *inverse,
                  double *total) {
    for (long row = 0; row < l->out_height; row++) {
        const float *from = x + row * l->step_y * l->columns * WIDTH;
        long at = row * l->out_width * WIDTH;
        Floats sum;
        WITH_KERNEL(l, sum = norm_row(kernel, l, from, eps, columns, norm + at, inverse + at))
        for (int lane = 0; lane < WIDTH; lane++) total[lane] += sum[lane];
    }
}

enum { TOGETHER = 9 }; /* taps whose sums are in registers at once: all of a 3×3 kernel */

INLINE void tap_block(const int count, const struct kernel kernel, const struct layout *l, const float *x,
                      const float *of_dot, const long *offsets, float *sums) {
    const long row = l->apart_y * l->columns * WIDTH, pixel = kernel.apart * WIDTH;
    Floats sum[TOGETHER];
    UNROLLED for (int t = 0; t < count; t++) sum[t] = load(sums + t * WIDTH);
    for (long i = 0; i < l->out_width; i++, of_dot += WIDTH, x += kernel.step * WIDTH) {
        Floats e = load(of_dot);
        UNROLLED for (int t = 0; t < count; t++)
            sum[t] += e * load(x + (kernel.known ? t / 3 * row + t % 3 * pixel : offsets[t])); /* saves 9 registers */
    }
    UNROLLED for (int t = 0; t < count; t++) store(sums + t * WIDTH, sum[t]);
}

INLINE void tap_blocks(const struct kernel kernel, const struct layout *l, const float *x, const float *of_dot,
                       const long *offsets, float *sums) {
    long t = 0;
    for (; kernel.taps_y * kernel.taps_x - t > 4; t += TOGETHER)
        tap_block(TOGETHER, kernel, l, x, of_dot, offsets + t, sums + t * WIDTH);
    if (t < kernel.taps_y * kernel.taps_x) tap_block(4, kernel, l, x, of_dot, offsets + t, sums + t * WIDTH);
}

/* sums[tap] += Σ of_dot·x over a row of results; there is room for whole groups of taps */
static void add_kernel_gradient(const struct layout *l, const float *x, const float *of_dot, const long *offsets,
                                float *sums) {
    WITH_KERNEL(l, tap_blocks(kernel, l, x, of_dot, offsets, sums))
}
