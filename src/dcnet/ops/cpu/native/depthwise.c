/* A depthwise layer: dot products, norms and what the operator makes of them, stack by stack of planes.
 *
 * A piece of work is a channel, all images one after the other: sums over images have the same order for any number of
 * threads, and the mean of the channel's norms, with which radii may be relative, is known in the middle of a piece.
 *
 * Before this text come elementary.h, parallel.h, vectors.h, planes.h, spread.h, and what source.py writes:
 * forward_row, backward_row, and how many VECTORS and SUMS they have. */

enum { KEPT = 1 << 16 }; /* places of a channel that are kept between two steps, rather than computed again */

struct call {
    const struct layout *layout;
    struct taps taps;
    float eps;
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
    for (long t = 0; t < l->taps; t++) m->weights[t] = c->kernels[kernel * l->kernel + c->taps.number[t]];
}

/* The numbers of a kernel. A radius is relative to the channel's mean norm; where that is 0, any will do. */
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

static double sum_of_norms(const struct call *c, const struct memory *m, long images) {
    const struct layout *l = c->layout;
    double total = 0.0;
    for (long row = 0; row < rows_of(l, images); row += l->band) {
        struct band b = band_at(l, m, row, images);
        norms_only(l, m, m->x, c->eps, b);
        Floats sums = {0};
        for (long i = 0; i < b.count; i += WIDTH)
            sums += chosen(load(b.mask + i) != all(0.0f), load(m->norm + i), all(0.0f));
        for (int lane = 0; lane < WIDTH; lane++) total += sums[lane];
    }
    return total;
}

static void forward_stack(const struct call *c, const struct memory *m, long channel, long stack) {
    const struct layout *l = c->layout;
    long images = images_in(l, stack);
    float values[VECTORS + 1];
    for (long kernel = channel * l->multiplier; kernel < (channel + 1) * l->multiplier; kernel++) {
        float *out = c->out + stack * l->stack * out_pitch(l) + kernel * out_plane(l);
        take_weights(c, m, kernel);
        take_vectors(c, channel, kernel, values);
        for (long row = 0; row < rows_of(l, images); row += l->band) {
            struct band b = band_at(l, m, row, images);
            dots_and_norms(l, m, m->x, c->eps, b);
            forward_row(b.count, m->dot, m->norm, m->inverse, values, m->y);
            copy_band(l, b, m->y, out, out_pitch(l), 1);
        }
    }
}

static int forward_piece(const void *arguments, long channel) {
    const struct call *c = arguments;
    const struct layout *l = c->layout;
    int relative = c->radius >= 0, keep = relative && stacks(l) * x_size(l) <= KEPT;
    struct memory m = memory_of(l, c->taps, keep ? stacks(l) : 1, 0, 0);
    if (!m.x) return 1;
    if (relative) {
        double total = 0.0;
        struct memory at = m;
        for (long stack = 0; stack < stacks(l); stack++, at.x += keep ? x_size(l) : 0) {
            take_x(c, &at, channel, stack);
            total += sum_of_norms(c, &at, images_in(l, stack));
        }
        c->means[channel] = (float)(total / results(l));
    }
    for (long stack = 0; stack < stacks(l); stack++, m.x += keep ? x_size(l) : 0) {
        if (!keep) take_x(c, &m, channel, stack);
        forward_stack(c, &m, channel, stack);
    }
    return 0;
}

/* sums[t] += of_dot·x over a band, lane by lane: four taps at once, so that of_dot is read a quarter as often */
static void add_kernel_gradient(const struct layout *l, const struct memory *m, struct band b, float *sums) {
    const float *of_dot = m->of_dot + b.start, *x = m->x + b.start;
    for (long t = 0; t < l->taps; t += 4, sums += 4 * WIDTH) {
        Floats sum[4];
        const float *from[4];
        for (long j = 0; j < 4; j++) {
            from[j] = x + m->offsets[t + j < l->taps ? t + j : t]; /* there is room for whole fours */
            sum[j] = load(sums + j * WIDTH);
        }
        for (long i = 0; i < b.count; i += WIDTH) {
            Floats e = load(of_dot + i);
            UNROLLED for (int j = 0; j < 4; j++) sum[j] += e * load(from[j] + i);
        }
        for (long j = 0; j < 4; j++) store(sums + j * WIDTH, sum[j]);
    }
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
        float *of_squares = m->of_squares + b.start, *inverses = m->inverses + b.start;
        dots_and_norms(l, m, m->x, c->eps, b);
        copy_band(l, b, m->e, (float *)c->e + plane, out_pitch(l), 0);
        memset(m->e + (b.rows - 1) * l->pitch + l->out_width, 0, WIDTH * sizeof(float)); /* of another band, or stack */
        if (c->y) copy_band(l, b, m->y, (float *)c->y + plane, out_pitch(l), 0);
        memset(m->of_norm, 0, b.count * sizeof(float));
        backward_row(b.count, m->dot, m->norm, m->inverse, values, m->y, m->e, m->of_dot + b.start, m->of_norm,
                     m->sums + k * SUMS);
        for (long i = 0; i < b.count; i += WIDTH) { /* ‖x‖ = √(Σx² + eps): its slope in x is x/‖x‖ */
            store(of_squares + i, load(m->of_norm + i) * load(m->inverse + i));
            store(inverses + i, load(m->inverse + i));
        }
        if (c->of_kernels) add_kernel_gradient(l, m, b, m->of_weights + k * rounded(l->taps) * WIDTH);
    }
}

/* Write the sums of a channel; return the gradient in each of its norms that comes by their mean. */
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
            const float *lanes = m->of_weights + (k * rounded(l->taps) + t) * WIDTH;
            float sum = 0.0f;
            for (int lane = 0; lane < WIDTH; lane++) sum += lanes[lane];
            c->of_kernels[kernel * l->kernel + c->taps.number[t]] = sum;
        }
    }
    return (float)(of_mean / results(l));
}

/* Put the gradient that comes by the mean in the place of that in the squares of the norms. */
static void mean_gradient(const struct call *c, const struct memory *m, long images, float of_norm) {
    const struct layout *l = c->layout;
    for (long row = 0; row < rows_of(l, images); row += l->band) {
        struct band b = band_at(l, m, row, images);
        norms_only(l, m, m->x, c->eps, b);
        for (long i = 0; i < b.count; i += WIDTH) store(m->of_squares + b.start + i, of_norm * load(m->inverse + i));
    }
}

static int backward_piece(const void *arguments, long channel) {
    const struct call *c = arguments;
    const struct layout *l = c->layout;
    int by_mean = c->of_x && c->radius >= 0;
    int keep = by_mean && l->multiplier == 1 && stacks(l) * (x_size(l) + 3 * gradient_size(l)) <= 4 * KEPT;
    struct memory m = memory_of(l, c->taps, keep ? stacks(l) : 1, keep ? stacks(l) : 1, SUMS), first = m;
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

/* What Python calls. y, of_x and of_kernels may be NULL; means are written by forward if a radius is relative. */
int forward(const struct layout *layout, const long *taps, float eps, long radius, const float *x, const float *kernels,
            const float *const *vectors, float *means, float *out, Parallel parallel, long threads) {
    struct taps t = {taps, taps + layout->taps, taps + 2 * layout->taps};
    struct call c = {.layout = layout, .taps = t, .eps = eps, .radius = radius, .x = x, .kernels = kernels,
                     .vectors = vectors, .means = means, .out = out};
    return in_parallel(forward_piece, &c, layout->channels, parallel, threads);
}

int backward(const struct layout *layout, const long *taps, float eps, long radius, const float *x,
             const float *kernels, const float *const *vectors, float *means, const float *y, const float *e,
             float *of_x, float *of_kernels, float *const *sums, Parallel parallel, long threads) {
    struct taps t = {taps, taps + layout->taps, taps + 2 * layout->taps};
    struct call c = {.layout = layout, .taps = t, .eps = eps, .radius = radius, .x = x, .kernels = kernels,
                     .vectors = vectors, .means = means, .y = y, .e = e, .of_x = of_x, .of_kernels = of_kernels,
                     .sums = sums};
    return in_parallel(backward_piece, &c, layout->channels, parallel, threads);
}
