/* A depthwise layer: dot products, norms and the operator's results, one stack of planes after the other.
 *
 * A chunk of work is a channel, all images one after the other: sums over images have the same order for any number of
 * threads, and the mean of the channel's norms, with which radii may be relative, is known in the middle of a chunk.
 *
 * Before this text come elementary.h, parallel.h, vectors.h, kernels.h, planes.h, rows.h, spread.h, and what source.py
 * writes: forward_row, backward_row, and how many VECTORS and SUMS they have. */

enum { KEPT = 1 << 16 }; /* places of a channel that are kept between two steps, rather than computed again */

struct call {
    const struct layout *layout;
    struct taps taps;
    float eps;
    long number; /* of the call */
    long radius; /* which vector is relative to the mean norm, or −1 */
    const float *x, *kernels, *y, *e;
    const float *const *vectors;
    float *means, *out, *of_x, *of_kernels;
    float *const *sums;
};

static long in_plane(const struct layout *l) { return l->height * l->width; }
static long out_plane(const struct layout *l) { return l->out_height * l->out_width; }
static long in_pitch(const struct layout *l) { return l->channels * in_plane(l); }
static long out_pitch(const struct layout *l) { return l->channels * l->multiplier * out_plane(l); }
static double results(const struct layout *l) { return (double)l->images * out_plane(l); }

static void take_weights(const struct call *c, const struct memory *m, long kernel) {
    const struct layout *l = c->layout;
    const float *w = c->kernels + kernel * l->kernel;
    float inverse = one_over_norm(w, l->kernel, c->eps);
    for (long t = 0; t < l->taps; t++) m->weights[t] = w[c->taps.number[t]] * inverse;
}

/* The vectors' numbers for a kernel. A radius is relative to the channel's mean norm; if that is 0, any will do. */
static void take_vectors(const struct call *c, long channel, long kernel, float *values) {
    for (int j = 0; j < VECTORS; j++) values[j] = c->vectors[j][kernel];
    if (c->radius < 0) return;
    float *radius = values + c->radius;
    *radius *= c->means[channel];
    if (c->eps == 0.0f && !(*radius > 0.0f)) *radius = 1.0f;
}

static void take_x(const struct call *c, const struct memory *m, long channel, long stack) {
    const struct layout *l = c->layout;
    const float *from = c->x + stack * l->stack * in_pitch(l) + channel * in_plane(l);
    copy_stack(l, from, in_pitch(l), images_in(l, stack), m->x);
}

/* The same memory, pointing to where the results of a band are kept */
static struct memory with_kept(const struct layout *l, struct memory m, long stack, struct band b) {
    m.dot = m.results + 3 * stack * result_size(l) + b.start;
    m.norm = m.dot + result_size(l), m.inverse = m.norm + result_size(l);
    return m;
}

/* The sum of a stack's norms. With `keep`, dot products and norms are stored; otherwise only norms are computed. */
static double sum_of_norms(const struct call *c, const struct memory *m, long stack, int keep) {
    const struct layout *l = c->layout;
    long images = images_in(l, stack);
    double total = 0.0;
    for (long row = 0; row < rows_of(l, images); row += l->band) {
        struct band b = band_at(l, m, row, images);
        struct memory at = keep ? with_kept(l, *m, stack, b) : *m;
        if (keep)
            dots_and_norms(l, &at, at.x, c->eps, b);
        else
            norms_only(l, &at, at.x, c->eps, b);
        Floats sums = {0};
        for (long i = 0; i < b.count; i += WIDTH)
            sums += chosen(load(b.mask + i) != all(0.0f), load(at.norm + i), all(0.0f));
        for (int lane = 0; lane < WIDTH; lane++) total += sums[lane];
    }
    return total;
}

static void forward_stack(const struct call *c, const struct memory *m, long channel, long stack, int kept) {
    const struct layout *l = c->layout;
    long images = images_in(l, stack);
    float values[VECTORS + 1];
    for (long kernel = channel * l->multiplier; kernel < (channel + 1) * l->multiplier; kernel++) {
        float *out = c->out + stack * l->stack * out_pitch(l) + kernel * out_plane(l);
        if (!kept) take_weights(c, m, kernel);
        take_vectors(c, channel, kernel, values);
        for (long row = 0; row < rows_of(l, images); row += l->band) {
            struct band b = band_at(l, m, row, images);
            struct memory at = kept ? with_kept(l, *m, stack, b) : *m;
            if (!kept) dots_and_norms(l, m, m->x, c->eps, b);
            forward_row(b.count, at.dot, at.norm, at.inverse, values, m->y);
            copy_band(l, b, m->y, out, out_pitch(l), 1);
        }
    }
}

static int forward_chunk(const void *arguments, long channel) {
    const struct call *c = arguments;
    const struct layout *l = c->layout;
    int relative = c->radius >= 0;
    int keep = relative && l->multiplier == 1 && 3 * stacks(l) * result_size(l) <= 4 * KEPT;
    struct sizes sizes = {1, 0, keep ? stacks(l) : 0, 0};
    struct memory m = memory_of(l, c->taps, sizes, c->number);
    if (!m.x) return 1;
    if (relative) {
        double total = 0.0;
        if (keep) take_weights(c, &m, channel);
        for (long stack = 0; stack < stacks(l); stack++) {
            take_x(c, &m, channel, stack);
            total += sum_of_norms(c, &m, stack, keep);
        }
        c->means[channel] = (float)(total / results(l));
    }
    for (long stack = 0; stack < stacks(l); stack++) {
        if (!keep) take_x(c, &m, channel, stack);
        forward_stack(c, &m, channel, stack, keep);
    }
    return 0;
}

INLINE void tap_block(const int count, const struct band b, const float *of_dot, const float *x, const long *offsets,
                      float *sums) {
    Floats sum[TOGETHER];
    UNROLLED for (int t = 0; t < count; t++) sum[t] = load(sums + t * WIDTH);
    for (long i = 0; i < b.count; i += WIDTH) {
        Floats e = load(of_dot + i);
        UNROLLED for (int t = 0; t < count; t++) sum[t] += e * load(x + offsets[t] + i);
    }
    UNROLLED for (int t = 0; t < count; t++) store(sums + t * WIDTH, sum[t]);
}

/* sums[t] += of_dot·x over a band, lane by lane; several taps at once, so that of_dot is read less often. There is room
 * for whole groups of taps. */
static void add_kernel_gradient(const struct layout *l, const struct memory *m, struct band b, float *sums) {
    const float *of_dot = m->of_dot + b.start, *x = m->x + b.start;
    long t = 0;
    for (; l->taps - t > 4; t += TOGETHER) tap_block(TOGETHER, b, of_dot, x, m->offsets + t, sums + t * WIDTH);
    if (t < l->taps) tap_block(4, b, of_dot, x, m->offsets + t, sums + t * WIDTH);
}

/* Gradients in the dot products, in the squares of the norms, in kernels and vectors, for one kernel of a stack */
static void backward_stack(const struct call *c, const struct memory *m, long channel, long stack, long k) {
    const struct layout *l = c->layout;
    long images = images_in(l, stack), kernel = channel * l->multiplier + k;
    long plane = stack * l->stack * out_pitch(l) + kernel * out_plane(l);
    float values[VECTORS + 1];
    take_weights(c, m, kernel);
    take_vectors(c, channel, kernel, values);
    for (long row = 0; row < rows_of(l, images); row += l->band) {
        struct band b = band_at(l, m, row, images);
        struct memory at = *m;
        at.inverse = m->inverses + b.start;
        dots_and_norms(l, &at, m->x, c->eps, b);
        copy_band(l, b, m->e, (float *)c->e + plane, out_pitch(l), 0);
        memset(m->e + (b.rows - 1) * l->pitch + l->out_width, 0, WIDTH * sizeof(float)); /* of another band, or stack */
        if (c->y) copy_band(l, b, m->y, (float *)c->y + plane, out_pitch(l), 0);
        /* ‖x‖ = √(Σx² + eps): its slope in x is x/‖x‖ */
        backward_row(b.count, m->dot, m->norm, at.inverse, values, m->y, m->e, m->of_dot + b.start,
                     m->of_squares + b.start, m->sums + k * SUMS);
        if (c->of_kernels) add_kernel_gradient(l, m, b, m->of_weights + k * tap_room(l) * WIDTH);
    }
}

/* Write the sums of a channel; return the gradient that each of its norms gets through their mean. */
static float write_sums(const struct call *c, const struct memory *m, long channel) {
    const struct layout *l = c->layout;
    double of_mean = 0.0;
    for (long k = 0; k < l->multiplier; k++) {
        long kernel = channel * l->multiplier + k;
        for (int j = 0; j < SUMS; j++) {
            double sum = m->sums[k * SUMS + j];
            if (j == c->radius) { /* radius = ρ·mean */
                float rho = c->vectors[j][kernel], mean = c->means[channel];
                if (c->eps == 0.0f && !(rho * mean > 0.0f)) sum = 0.0;
                of_mean += sum * rho;
                sum *= mean;
            }
            c->sums[j][kernel] = (float)sum;
        }
        for (long t = 0; c->of_kernels && t < l->taps; t++) {
            const float *lanes = m->of_weights + (k * tap_room(l) + t) * WIDTH;
            float sum = 0.0f;
            for (int lane = 0; lane < WIDTH; lane++) sum += lanes[lane];
            c->of_kernels[kernel * l->kernel + c->taps.number[t]] = sum;
        }
        if (c->of_kernels)
            through_norm(c->kernels + kernel * l->kernel, l->kernel, c->eps, c->of_kernels + kernel * l->kernel);
    }
    return (float)(of_mean / results(l));
}

/* Replace the gradient in the squares of the norms by the one that comes through the mean. */
static void mean_gradient(const struct call *c, const struct memory *m, long images, float of_norm) {
    const struct layout *l = c->layout;
    for (long row = 0; row < rows_of(l, images); row += l->band) {
        struct band b = band_at(l, m, row, images);
        norms_only(l, m, m->x, c->eps, b);
        for (long i = 0; i < b.count; i += WIDTH) store(m->of_squares + b.start + i, of_norm * load(m->inverse + i));
    }
}

static int backward_chunk(const void *arguments, long channel) {
    const struct call *c = arguments;
    const struct layout *l = c->layout;
    int by_mean = c->of_x && c->radius >= 0;
    int keep = by_mean && l->multiplier == 1 && stacks(l) * (x_size(l) + 3 * gradient_size(l)) <= 4 * KEPT;
    struct sizes sizes = {keep ? stacks(l) : 1, keep ? stacks(l) : 1, 0, SUMS};
    struct memory m = memory_of(l, c->taps, sizes, c->number), first = m;
    if (!m.x) return 1;
    for (int step = 0; step < 1 + by_mean; step++) { /* the second once the gradient in the mean is known */
        float of_norm = step ? write_sums(c, &first, channel) : 0.0f;
        m = first;
        for (long stack = 0; stack < stacks(l); stack++) {
            long images = images_in(l, stack);
            float *of_x = c->of_x ? c->of_x + stack * l->stack * in_pitch(l) + channel * in_plane(l) : NULL;
            if (!(keep && step)) take_x(c, &m, channel, stack);
            if (images < l->stack) memset(m.e, 0, band_size(l) * sizeof(float)); /* of the stack before */
            for (long k = 0; !step && k < l->multiplier; k++) {
                backward_stack(c, &m, channel, stack, k);
                if (of_x && !keep) write_gradient(l, c->taps, &m, 1, k > 0, images, of_x, in_pitch(l));
            }
            if (step && keep) {
                for (long i = 0; i < rounded(l->plane); i += WIDTH)
                    store(m.of_squares + i, load(m.of_squares + i) + of_norm * load(m.inverses + i));
                write_gradient(l, c->taps, &m, 1, 0, images, of_x, in_pitch(l));
            } else if (step) {
                mean_gradient(c, &m, images, of_norm);
                write_gradient(l, c->taps, &m, 0, 1, images, of_x, in_pitch(l));
            }
            if (keep) m.x += x_size(l), m.of_dot += gradient_size(l);
            if (keep) m.of_squares += gradient_size(l), m.inverses += gradient_size(l);
        }
    }
    if (!by_mean) write_sums(c, &first, channel);
    return 0;
}

static long next_number(void) {
    static atomic_long calls;
    return 1 + atomic_fetch_add(&calls, 1);
}

/* What Python calls. y, of_x and of_kernels may be NULL; means are written by forward if a radius is relative. */
int forward(const struct layout *layout, const long *taps, float eps, long radius, const float *x, const float *kernels,
            const float *const *vectors, float *means, float *out, Parallel parallel, long threads) {
    struct taps t = {taps, taps + layout->taps, taps + 2 * layout->taps};
    struct call c = {.layout = layout, .taps = t, .eps = eps, .number = next_number(), .radius = radius, .x = x,
                     .kernels = kernels, .vectors = vectors, .means = means, .out = out};
    return in_parallel(forward_chunk, &c, layout->channels, parallel, threads);
}

int backward(const struct layout *layout, const long *taps, float eps, long radius, const float *x,
             const float *kernels, const float *const *vectors, float *means, const float *y, const float *e,
             float *of_x, float *of_kernels, float *const *sums, Parallel parallel, long threads) {
    struct taps t = {taps, taps + layout->taps, taps + 2 * layout->taps};
    struct call c = {.layout = layout, .taps = t, .eps = eps, .number = next_number(), .radius = radius, .x = x,
                     .kernels = kernels, .vectors = vectors, .means = means, .y = y, .e = e, .of_x = of_x,
                     .of_kernels = of_kernels, .sums = sums};
    return in_parallel(backward_chunk, &c, layout->channels, parallel, threads);
}
