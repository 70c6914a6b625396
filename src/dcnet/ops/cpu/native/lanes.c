/* A depthwise layer on small maps: the same as depthwise.c, with a block of WIDTH channels as a chunk of work.
 *
 * Before this text come elementary.h, parallel.h, vectors.h, kernels.h, lanes.h, lanes_spread.h, and what source.py
 * writes: forward_row, backward_row, and how many VECTORS and SUMS they have. */

enum { KEPT = 1 << 17 }; /* numbers of a block that are kept between two steps, rather than computed again */

struct call {
    const struct layout *layout;
    float eps;
    long radius; /* which vector is relative to the mean norm, or −1 */
    const float *x, *kernels, *y, *e;
    const float *const *vectors;
    float *means, *out, *of_x, *of_kernels;
    float *const *sums;
};

struct memory {
    float *x, *dot, *norm, *inverse, *of_dot, *of_squares; /* of an image; images may be kept */
    float *map, *y, *e, *columns, *weights, *of_weights, *values;
    double *weight_sums, *sums; /* of each kernel */
    long *offsets; /* of each tap */
};

static struct planes in_planes(const struct layout *l) { return (struct planes){1, 0, in_plane(l)}; }
static struct planes out_planes(const struct layout *l, long k) {
    return (struct planes){l->multiplier, k, out_plane(l)};
}
static long kernel_of(const struct layout *l, struct block b, long lane, long k) {
    return plane_of(b, (struct planes){l->multiplier, k, 1}, lane);
}
static long larger_of(long a, long b) { return a > b ? a : b; }

/* Memory for a chunk of work, with zeros where nothing will be written; x is NULL if there is none left. It has room
 * for the given numbers of maps of x, of gradients, and of dot products and norms. */
static struct memory memory_of(const struct layout *l, long maps, long gradients, long results) {
    long room = (taps(l) + TOGETHER) * WIDTH, map = larger_of(in_plane(l), out_plane(l)) * WIDTH;
    long columns = larger_of(l->columns, l->pitch) * WIDTH, sums = l->multiplier * SUMS * LANES;
    long weights = gradients ? l->multiplier * room : 0;
    struct memory m = {0};
    float *weight_sums, *all_sums, *offsets;
    struct {
        float **at;
        long size;
    } parts[] = {
        {&m.x, maps * x_size(l)}, {&m.of_dot, gradients * gradient_size(l)},
        {&m.of_squares, gradients * gradient_size(l)}, {&m.dot, results * out_size(l)},
        {&m.norm, results * out_size(l)}, {&m.inverse, results * out_size(l)}, {&m.y, out_size(l)},
        {&m.e, out_size(l)}, {&m.map, map}, {&m.columns, columns}, {&m.weights, room}, {&m.of_weights, room},
        {&m.values, VECTORS * LANES}, {&weight_sums, 2 * weights}, {&all_sums, 2 * sums}, {&offsets, 2 * room},
    };
    const int count = sizeof parts / sizeof *parts;
    size_t total = 0;
    for (int i = 0; i < count; i++) total += parts[i].size;
    float *at = scratch(total);
    for (int i = 0; at && i < count; at += parts[i++].size) *parts[i].at = at;
    if (!at) return m;
    for (long i = 0; i < maps; i++)
        clear_around(m.x + i * x_size(l), l->rows, l->columns, l->before_y, l->read_height, l->before_x, l->read_width);
    for (long i = 0; i < 2 * gradients; i++)
        clear_around(m.of_dot + i * gradient_size(l), l->out_height, l->pitch, 0, l->out_height, l->margin,
                     l->out_width);
    m.weight_sums = memset(weight_sums, 0, 2 * weights * sizeof(float));
    m.sums = memset(all_sums, 0, 2 * sums * sizeof(float));
    m.offsets = memset(offsets, 0, 2 * room * sizeof(float));
    for (long t = 0; t < taps(l); t++)
        m.offsets[t] = (t / l->taps_x * l->apart_y * l->columns + t % l->taps_x * l->apart_x) * WIDTH;
    return m;
}

/* The memory of another image, if dot products and norms of all images are kept */
static struct memory results_of(const struct layout *l, struct memory m, long image) {
    m.dot += image * out_size(l), m.norm += image * out_size(l), m.inverse += image * out_size(l);
    return m;
}

/* The same, if their gradients are kept */
static struct memory gradients_of(const struct layout *l, struct memory m, long image) {
    m.x += image * x_size(l), m.of_dot += image * gradient_size(l), m.of_squares += image * gradient_size(l);
    return m.inverse += image * out_size(l), m;
}

static void take_weights(const struct call *c, const struct memory *m, struct block b, long k) {
    const struct layout *l = c->layout;
    for (long lane = 0; lane < WIDTH; lane++) {
        const float *kernel = c->kernels + kernel_of(l, b, lane, k) * taps(l);
        float inverse = one_over_norm(kernel, taps(l), c->eps);
        for (long t = 0; t < taps(l); t++) m->weights[t * WIDTH + lane] = kernel[t] * inverse;
    }
}

/* The vectors' numbers for the kernels. A radius is relative to the channel's mean norm; if that is 0, any will do. */
static void take_vectors(const struct call *c, const struct memory *m, struct block b, long k) {
    for (long lane = 0; lane < LANES; lane++) {
        long kernel = kernel_of(c->layout, b, lane % WIDTH, k);
        for (long j = 0; j < VECTORS; j++) m->values[j * LANES + lane] = c->vectors[j][kernel];
        if (c->radius < 0) continue;
        float *radius = m->values + c->radius * LANES + lane;
        *radius *= c->means[kernel / c->layout->multiplier];
        if (c->eps == 0.0f && !(*radius > 0.0f)) *radius = 1.0f;
    }
}

/* Read the map of an image, and compute its norms. */
static void take_x(const struct call *c, const struct memory *m, struct block b, long image, double *total) {
    const struct layout *l = c->layout;
    read_planes(c->x + image * l->channels * in_plane(l), b, in_planes(l), m->map);
    surround(l, m->map, m->x);
    norms(l, m->x, c->eps, m->columns, m->norm, m->inverse, total);
}

static struct block block_at(const struct layout *l, long chunk) {
    long left = l->channels - chunk * WIDTH;
    return (struct block){chunk * WIDTH, left < WIDTH ? left : WIDTH};
}

static int forward_chunk(const void *arguments, long chunk) {
    const struct call *c = arguments;
    const struct layout *l = c->layout;
    struct block b = block_at(l, chunk);
    double total[WIDTH] = {0};
    int relative = c->radius >= 0;
    int keep = relative && l->multiplier == 1 && 3 * l->images * out_size(l) <= KEPT;
    struct memory first = memory_of(l, 1, 0, keep ? l->images : 1);
    if (!first.x) return 1;
    if (keep) take_weights(c, &first, b, 0);
    for (long image = 0; relative && image < l->images; image++) {
        struct memory m = keep ? results_of(l, first, image) : first;
        take_x(c, &m, b, image, total);
        if (keep) dots(l, m.x, m.weights, m.dot);
    }
    for (long lane = 0; relative && lane < b.lanes; lane++)
        c->means[b.first + lane] = (float)(total[lane] / ((double)l->images * out_plane(l)));
    for (long image = 0; image < l->images; image++) {
        struct memory m = keep ? results_of(l, first, image) : first;
        if (!keep) take_x(c, &m, b, image, total);
        for (long k = 0; k < l->multiplier; k++) {
            if (l->multiplier > 1 || image == 0) take_vectors(c, &m, b, k);
            if (!keep && (l->multiplier > 1 || image == 0)) take_weights(c, &m, b, k);
            if (!keep) dots(l, m.x, m.weights, m.dot);
            forward_row(out_size(l), m.dot, m.norm, m.inverse, m.values, m.y);
            write_planes(m.y, b, out_planes(l, k), c->out + image * l->channels * l->multiplier * out_plane(l));
        }
    }
    return 0;
}

/* Gradients in the dot products, in the squares of the norms, in kernels and vectors, for one kernel of each channel */
static void backward_image(const struct call *c, const struct memory *m, struct block b, long image, long k) {
    const struct layout *l = c->layout;
    long image_at = image * l->channels * l->multiplier * out_plane(l), room = (taps(l) + TOGETHER) * WIDTH;
    dots(l, m->x, m->weights, m->dot);
    read_planes(c->e + image_at, b, out_planes(l, k), m->e);
    if (c->y) read_planes(c->y + image_at, b, out_planes(l, k), m->y);
    memset(m->of_weights, 0, room * sizeof(float));
    for (long row = 0; row < l->out_height; row++) {
        long at = row * l->out_width * WIDTH, to = (row * l->pitch + l->margin) * WIDTH;
        backward_row(l->out_width * WIDTH, m->dot + at, m->norm + at, m->inverse + at, m->values, m->y + at, m->e + at,
                     m->of_dot + to, m->of_squares + to, m->sums + k * SUMS * LANES);
        if (c->of_kernels)
            add_kernel_gradient(l, m->x + row * l->step_y * l->columns * WIDTH, m->of_dot + to, m->offsets,
                                m->of_weights);
    }
    double *sums = m->weight_sums + k * room;
    for (long i = 0; i < taps(l) * WIDTH; i++) sums[i] += m->of_weights[i];
}

/* Write the sums of a block; return the gradient that each of its norms gets through their mean. */
static Floats write_sums(const struct call *c, const struct memory *m, struct block b) {
    const struct layout *l = c->layout;
    Floats of_norm = {0};
    for (long lane = 0; lane < b.lanes; lane++) {
        double of_mean = 0.0;
        for (long k = 0; k < l->multiplier; k++) {
            long kernel = kernel_of(l, b, lane, k);
            for (long j = 0; j < SUMS; j++) {
                double sum = 0.0;
                for (long i = lane; i < LANES; i += WIDTH) sum += m->sums[(k * SUMS + j) * LANES + i];
                if (j == c->radius) { /* radius = ρ·mean */
                    float rho = c->vectors[j][kernel], mean = c->means[b.first + lane];
                    if (c->eps == 0.0f && !(rho * mean > 0.0f)) sum = 0.0;
                    of_mean += sum * rho;
                    sum *= mean;
                }
                c->sums[j][kernel] = (float)sum;
            }
            const double *of_weights = m->weight_sums + k * (taps(l) + TOGETHER) * WIDTH + lane;
            for (long t = 0; c->of_kernels && t < taps(l); t++)
                c->of_kernels[kernel * taps(l) + t] = (float)of_weights[t * WIDTH];
            if (c->of_kernels)
                through_norm(c->kernels + kernel * taps(l), taps(l), c->eps, c->of_kernels + kernel * taps(l));
        }
        of_norm[lane] = (float)(of_mean / ((double)l->images * out_plane(l)));
    }
    return of_norm;
}

/* of_squares = or += of_norm·inverse */
static void mean_gradient(const struct layout *l, const struct memory *m, Floats of_norm, int add) {
    for (long row = 0; row < l->out_height; row++) {
        const float *from = m->inverse + row * l->out_width * WIDTH;
        float *to = m->of_squares + (row * l->pitch + l->margin) * WIDTH;
        for (long i = 0; i < l->out_width * WIDTH; i += WIDTH) {
            Floats value = of_norm * load(from + i);
            store(to + i, add ? load(to + i) + value : value);
        }
    }
}

static int backward_chunk(const void *arguments, long chunk) {
    const struct call *c = arguments;
    const struct layout *l = c->layout;
    struct block b = block_at(l, chunk);
    double total[WIDTH] = {0}; /* of norms; not used */
    int by_mean = c->of_x && c->radius >= 0;
    int keep = by_mean && l->multiplier == 1 &&
               l->images * (x_size(l) + out_size(l) + 2 * gradient_size(l)) <= 2 * KEPT;
    long images = keep ? l->images : 1;
    struct memory first = memory_of(l, images, images, images);
    if (!first.x) return 1;
    for (long image = 0; image < l->images; image++) {
        struct memory m = keep ? gradients_of(l, first, image) : first;
        take_x(c, &m, b, image, total);
        for (long k = 0; k < l->multiplier; k++) {
            if (l->multiplier > 1 || image == 0) take_vectors(c, &m, b, k), take_weights(c, &m, b, k);
            backward_image(c, &m, b, image, k);
            if (c->of_x && !keep) spread(l, m.x, m.weights, m.of_dot, m.of_squares, m.columns, m.map, k > 0);
        }
        if (c->of_x && !keep) write_planes(m.map, b, in_planes(l), c->of_x + image * l->channels * in_plane(l));
    }
    Floats of_norm = write_sums(c, &first, b);
    for (long image = 0; by_mean && image < l->images; image++) { /* the gradient in the mean is known now */
        struct memory m = keep ? gradients_of(l, first, image) : first;
        float *of_x = c->of_x + image * l->channels * in_plane(l);
        if (!keep) take_x(c, &m, b, image, total);
        mean_gradient(l, &m, of_norm, keep);
        if (!keep) read_planes(of_x, b, in_planes(l), m.map);
        spread(l, m.x, m.weights, keep ? m.of_dot : NULL, m.of_squares, m.columns, m.map, !keep);
        write_planes(m.map, b, in_planes(l), of_x);
    }
    return 0;
}

static long chunks(const struct layout *l) { return (l->channels + WIDTH - 1) / WIDTH; }

/* What Python calls. y, of_x and of_kernels may be NULL; means are written by forward if a radius is relative. */
int forward(const struct layout *layout, const long *taps, float eps, long radius, const float *x, const float *kernels,
            const float *const *vectors, float *means, float *out, Parallel parallel, long threads) {
    struct call c = {.layout = layout, .eps = eps, .radius = radius, .x = x, .kernels = kernels, .vectors = vectors,
                     .means = means, .out = out};
    return in_parallel(forward_chunk, &c, chunks(layout), parallel, threads);
}

int backward(const struct layout *layout, const long *taps, float eps, long radius, const float *x,
             const float *kernels, const float *const *vectors, float *means, const float *y, const float *e,
             float *of_x, float *of_kernels, float *const *sums, Parallel parallel, long threads) {
    struct call c = {.layout = layout, .eps = eps, .radius = radius, .x = x, .kernels = kernels, .vectors = vectors,
                     .means = means, .y = y, .e = e, .of_x = of_x, .of_kernels = of_kernels, .sums = sums};
    return in_parallel(backward_chunk, &c, chunks(layout), parallel, threads);
}
