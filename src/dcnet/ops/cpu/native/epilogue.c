/* h·g on the output of a convolution, with its gradients: one pass over memory each.
 *
 * Before this text come elementary.h, parallel.h and what source.py writes: forward_row, backward_row, how many VECTORS
 * and SUMS they have, and BY_CHANNEL: whether the kernels of a position lie next to each other, rather than the
 * positions of a kernel. With FEW_POSITIONS, each pair of a kernel and a position counts as a kernel, with a norm and
 * a number of each vector. A chunk of work is some rows (BY_CHANNEL), or a block of positions of one row and group.
 * Each chunk writes its own sums, so that they are added up in the same order for any number of threads. */

struct call {
    long rows, groups, kernels, positions, block; /* rows, or positions, of a chunk */
    const float *d, *n, *y, *e;
    const float *const *vectors;
    float *out, *of_d, *of_n, *sums;
};

static long least(long a, long b) { return a < b ? a : b; }
static float inverse_of(float n) { return n == 0.0f ? 0.0f : 1.0f / n; }

#if BY_CHANNEL || FEW_POSITIONS

/* Repeat each number of a vector once for each position. */
static const float *spread_out(const float *vector, long kernels, long few, float *to) {
    for (long k = 0; k < kernels; k++)
        for (long i = 0; i < few; i++) to[k * few + i] = vector[k];
    return to;
}

/* Repeat the first `few` numbers up to `width`, in copies that double in length. */
static void repeat(float *numbers, long few, long width) {
    for (long done = few; done < width; done *= 2)
        memcpy(numbers + done, numbers, least(done, width - done) * sizeof(float));
}

/* Add each block of numbers to the first. */
static void add_blocks(float *restrict numbers, long block, long width) {
    for (long start = block; start < width; start += block) {
        const float *restrict more = numbers + start;
        for (long i = 0; i < least(block, width - start); i++) numbers[i] += more[i];
    }
}

static int chunk(const struct call *c, long number, int backward) {
    long few = c->positions, width = c->kernels * few, all = c->groups * width, kernels = c->groups * c->kernels;
    float *norms = scratch(3 * width + (FEW_POSITIONS ? (VECTORS + SUMS) * all : 0)), *own = NULL;
    if (!norms) return 1;
    float *inverses = norms + width, *of_norms = inverses + width, *free_place = of_norms + width;
    const float *vectors[VECTORS + 1];
    float *sums[SUMS + 1];
    for (int j = 0; j < VECTORS; j++, free_place += FEW_POSITIONS ? all : 0)
        vectors[j] = FEW_POSITIONS ? spread_out(c->vectors[j], kernels, few, free_place) : c->vectors[j];
    for (int j = 0; backward && j < SUMS; j++) {
        own = c->sums + number * SUMS * kernels;
        sums[j] = FEW_POSITIONS ? free_place + j * all : own + j * kernels;
        memset(sums[j], 0, all * sizeof(float));
    }
    for (long row = number * c->block; row < least((number + 1) * c->block, c->rows); row++)
        for (long group = 0; group < c->groups; group++) {
            long at = group * width, here = row * all + at;
            const float *n = c->n + (row * c->groups + group) * few, *of_group[VECTORS + 1];
            float *sums_of_group[SUMS + 1], *of_n = backward ? c->of_n + (row * c->groups + group) * few : NULL;
            for (int j = 0; j < VECTORS; j++) of_group[j] = vectors[j] + at;
            for (long i = 0; i < few; i++) norms[i] = n[i], inverses[i] = inverse_of(n[i]);
            if (FEW_POSITIONS) repeat(norms, few, width), repeat(inverses, few, width);
            if (!backward) {
                forward_row(width, c->d + here, norms, inverses, of_group, c->out + here);
                continue;
            }
            memset(of_norms, 0, width * sizeof(float));
            for (int j = 0; j < SUMS; j++) sums_of_group[j] = sums[j] + at;
            backward_row(width, c->d + here, norms, inverses, of_group, c->y ? c->y + here : NULL, c->e + here,
                         c->of_d + here, of_norms, sums_of_group);
            if (FEW_POSITIONS) { /* over the kernels, several at once, as single ones are shorter than a vector */
                add_blocks(of_norms, 16 * few, width);
                add_blocks(of_norms, few, least(16 * few, width));
            }
            for (long i = 0; i < few; i++) of_n[i] = of_norms[i];
        }
    for (int j = 0; FEW_POSITIONS && backward && j < SUMS; j++)
        for (long k = 0; k < kernels; k++) {
            float total = 0.0f;
            for (long i = 0; i < few; i++) total += sums[j][k * few + i];
            own[j * kernels + k] = total;
        }
    return 0;
}

static long chunks(const struct call *c) { return (c->rows + c->block - 1) / c->block; }

#else

static int chunk(const struct call *c, long number, int backward) {
    long blocks = (c->positions + c->block - 1) / c->block, start = number % blocks * c->block;
    long plane = number / blocks, count = least(c->block, c->positions - start); /* plane: of a row and a group */
    long group = plane % c->groups;
    const float *n = c->n + plane * c->positions + start;
    float *inverses = scratch(c->block), *of_n = backward ? c->of_n + plane * c->positions + start : NULL;
    if (!inverses) return 1;
    for (long i = 0; i < count; i++) inverses[i] = inverse_of(n[i]);
    if (backward) memset(of_n, 0, count * sizeof(float));
    for (long k = 0; k < c->kernels; k++) {
        long here = (plane * c->kernels + k) * c->positions + start;
        float values[VECTORS + 1];
        double sums[SUMS + 1] = {0};
        for (int j = 0; j < VECTORS; j++) values[j] = c->vectors[j][group * c->kernels + k];
        if (!backward) {
            forward_row(count, c->d + here, n, inverses, values, c->out + here);
            continue;
        }
        backward_row(count, c->d + here, n, inverses, values, c->y ? c->y + here : NULL, c->e + here, c->of_d + here,
                     of_n, sums);
        float *left = c->sums + number / blocks / c->groups * blocks * SUMS * c->groups * c->kernels;
        for (int j = 0; j < SUMS; j++)
            left[((number % blocks * SUMS + j) * c->groups + group) * c->kernels + k] = (float)sums[j];
    }
    return 0;
}

static long chunks(const struct call *c) {
    return c->rows * c->groups * ((c->positions + c->block - 1) / c->block);
}

#endif

static int forward_chunk(const void *arguments, long number) { return chunk(arguments, number, 0); }
static int backward_chunk(const void *arguments, long number) { return chunk(arguments, number, 1); }

static struct call call_of(const long *sizes, const float *d, const float *n, const float *const *vectors) {
    return (struct call){.rows = sizes[0], .groups = sizes[1], .kernels = sizes[2], .positions = sizes[3],
                         .block = sizes[4], .d = d, .n = n, .vectors = vectors};
}

/* What Python calls; sizes: rows, groups, kernels, positions, block. */
int forward(const long *sizes, const float *d, const float *n, const float *const *vectors, float *out,
            Parallel parallel, long threads) {
    struct call c = call_of(sizes, d, n, vectors);
    c.out = out;
    return in_parallel(forward_chunk, &c, chunks(&c), parallel, threads);
}

/* totals: SUMS rows to be written, with a number for each kernel. */
int backward(const long *sizes, const float *d, const float *n, const float *const *vectors, const float *y,
             const float *e, float *of_d, float *of_n, float *totals, Parallel parallel, long threads) {
    struct call c = call_of(sizes, d, n, vectors);
    long each = SUMS * c.groups * c.kernels, parts = chunks(&c) / (BY_CHANNEL || FEW_POSITIONS ? 1 : c.groups);
    c.y = y, c.e = e, c.of_d = of_d, c.of_n = of_n;
    c.sums = malloc((each * parts + 1) * sizeof(float));
    int failed = !c.sums || in_parallel(backward_chunk, &c, chunks(&c), parallel, threads);
    double *sums = failed ? NULL : (double *)scratch(2 * each + 1);
    if (sums) {
        memset(sums, 0, each * sizeof(double));
        for (long part = 0; part < parts; part++)
            for (long i = 0; i < each; i++) sums[i] += c.sums[part * each + i];
        for (long i = 0; i < each; i++) totals[i] = (float)sums[i];
    }
    free(c.sums);
    return !sums;
}
