/* Planes of a depthwise layer in memory, and the dot products and norms of their patches.
 *
 * A plane is one channel of one image. It is copied with zeros around it. With a stride it is split into "phases", one
 * for each remainder of row and column by the stride, so that the places that a tap of the kernel reads lie next to
 * each other. Then tap t of the result at place o reads x[o + offset[t]] for any stride and dilation. Small planes of
 * several images are stacked, one below the other, and share the zeros in between. Loops run over a row of results, or
 * over several short rows at once (a "band"). A mask tells results from the places between rows. */

/* Sizes, in the order of `layout_of` in depthwise.py */
struct layout {
    long images, channels, multiplier; /* kernels of each channel */
    long height, width, read_height, read_width, out_height, out_width; /* places in no patch are not read */
    long step_y, step_x, before_y, before_x;
    long pitch, plane; /* of one phase: places in a row, and in all rows of a stack */
    long stack, spacing; /* images in a stack, and rows of a phase from one to the next */
    long band, in_band; /* rows of results, and of x, that a loop takes at once */
    long kernel, taps; /* numbers in a kernel, and those of them that reach the map */
    long margin; /* the largest place of a tap in its phase */
};

/* For each tap: its number in the kernel, its phase, its place in the phase */
struct taps {
    const long *number, *phase, *place;
};

struct memory {
    float *x, *of_dot, *of_squares, *inverses; /* of a stack */
    float *results; /* dot products, norms, inverses of all stacks, where they are kept */
    float *dot, *norm, *inverse, *y, *e, *mask, *last_mask; /* of a band */
    float *weights, *of_weights; /* of each tap; of_weights has a vector for each tap and kernel */
    long *offsets;
    double *sums; /* of each kernel and vector */
};

static long band_size(const struct layout *l) {
    return rounded((l->band > l->in_band ? l->band : l->in_band) * l->pitch) + TILE;
}
static size_t x_size(const struct layout *l) { return rounded(l->step_y * l->step_x * l->plane) + TILE; }
static size_t gradient_size(const struct layout *l) { return rounded(l->margin) + rounded(l->plane) + TILE; }
static size_t result_size(const struct layout *l) { return rounded(l->plane) + TILE; }
enum { TOGETHER = 9 }; /* taps whose gradients are summed at once: all of a 3×3 kernel */
static long tap_room(const struct layout *l) { return rounded(l->taps + TOGETHER); }
static long stacks(const struct layout *l) { return (l->images + l->stack - 1) / l->stack; }

static void fill_mask(const struct layout *l, float *mask, long rows) {
    for (long row = 0, y = 0; row < rows; row++, y = y + 1 == l->spacing ? 0 : y + 1)
        for (long i = 0; y < l->out_height && i < l->out_width; i++) mask[row * l->pitch + i] = 1.0f;
}

/* Sizes of the memory: copies of x, of the gradients of its results, and of results; sums for each kernel */
struct sizes {
    long copies, gradients, results, sums;
};

/* Memory for a chunk of work, zero where nothing is written; all NULL if there is none left. The chunks of a `call`
 * write to the same places, so that everything except sums is only cleared for a thread's first chunk. */
static struct memory memory_of(const struct layout *l, struct taps taps, struct sizes s, long call) {
    static __thread long cleared;
    size_t band = band_size(l), tap = tap_room(l), of_weights = s.gradients ? tap * l->multiplier * WIDTH : 0;
    size_t sums = rounded(2 * s.sums * l->multiplier), gradients = s.gradients * gradient_size(l);
    size_t all = s.copies * x_size(l) + 3 * gradients + 7 * band + 3 * tap + of_weights + sums;
    struct memory m = {0};
    float *at = scratch(all + 3 * s.results * result_size(l)), *start = at;
    if (!at) return m;
    m.sums = (double *)at, at += sums;
    m.of_weights = at, at += of_weights;
    size_t always = at - start;
    m.x = at, at += s.copies * x_size(l);
    float **maps[] = {&m.of_dot, &m.of_squares, &m.inverses};
    for (int i = 0; i < 3; i++, at += gradients) *maps[i] = at + rounded(l->margin);
    m.offsets = (long *)at, at += 2 * tap;
    m.weights = at, at += tap;
    float **bands[] = {&m.e, &m.mask, &m.last_mask, &m.dot, &m.norm, &m.inverse, &m.y};
    for (int i = 0; i < 7; i++, at += band) *bands[i] = at;
    m.results = at;
    /* the four last bands are written before they are read */
    memset(start, 0, (cleared == call ? always : all - 4 * band) * sizeof(float));
    if (cleared == call) return m;
    cleared = call;
    for (long t = 0; t < l->taps; t++) m.offsets[t] = taps.phase[t] * l->plane + taps.place[t];
    fill_mask(l, m.mask, l->band);
    long rest = l->stack > 1 ? l->images % l->stack : l->out_height % l->band;
    if (rest) fill_mask(l, m.last_mask, l->stack > 1 ? (rest - 1) * l->spacing + l->out_height : rest);
    return m;
}

static long images_in(const struct layout *l, long stack) {
    long left = l->images - stack * l->stack;
    return left < l->stack ? left : l->stack;
}

/* Copy a stack of planes of x; `image_pitch` floats lie between one image and the next. */
static void copy_stack(const struct layout *l, const float *x, long image_pitch, long images, float *to) {
    for (long image = 0; image < images; image++, x += image_pitch) {
        long phase_y = l->before_y % l->step_y, y = image * l->spacing + l->before_y / l->step_y;
        for (long row = 0; row < l->read_height; row++) {
            const float *from = x + row * l->width;
            float *line = to + phase_y * l->step_x * l->plane + y * l->pitch;
            if (++phase_y == l->step_y) phase_y = 0, y++; /* of the next row */
            if (l->step_x == 1) {
                copy_row(line + l->before_x, from, l->read_width);
                continue;
            }
            for (long first = 0; first < l->step_x && first < l->read_width; first++) {
                long at = first + l->before_x, count = (l->read_width - first + l->step_x - 1) / l->step_x;
                float *phase = line + (at % l->step_x) * l->plane + at / l->step_x;
                if (l->step_x == 2)
                    for (long i = 0; i < count; i++) phase[i] = from[first + 2 * i];
                else
                    for (long i = 0; i < count; i++) phase[i] = from[first + l->step_x * i];
            }
        }
    }
}

struct band {
    long first, rows, images; /* rows of results in a stack of this many images */
    long start, count; /* place of the first result, places rounded up to whole vectors */
    const float *mask;
};

static long rows_of(const struct layout *l, long images) { return (images - 1) * l->spacing + l->out_height; }

static struct band band_at(const struct layout *l, const struct memory *m, long row, long images) {
    long left = rows_of(l, images) - row, rows = left < l->band ? left : l->band;
    const float *mask = (l->stack > 1 ? images == l->stack : rows == l->band) ? m->mask : m->last_mask;
    return (struct band){row, rows, images, row * l->pitch, rounded((rows - 1) * l->pitch + l->out_width), mask};
}

/* Copy a band's rows of results to their places in a map, or from there; `map` is the stack's first plane. */
static void copy_band(const struct layout *l, struct band b, float *rows, float *map, long image_pitch, int to_map) {
    long image = b.first / l->spacing, y = b.first % l->spacing - 1;
    for (long row = 0; row < b.rows; row++) {
        if (++y == l->spacing) y = 0, image++;
        if (y >= l->out_height) continue;
        float *place = map + image * image_pitch + y * l->out_width, *here = rows + row * l->pitch;
        if (to_map)
            copy_row(place, here, l->out_width);
        else
            copy_row(here, place, l->out_width);
    }
}

/* Sums over the taps of `blocks` vectors of results: Σ w·x into m->dot, √(Σ x² + eps) into m->norm, and its inverse
 * into m->inverse. Places that are not results get 0, 1 and 0, so that nothing computed from them is infinite. Return
 * the sum of m->norm. */
INLINE Floats patch_block(const int blocks, const int dots, const struct memory *m, const float *x, long taps,
                          float eps, const int exact, const float *mask, long at) {
    Floats dot[4] = {{0}}, squares[4] = {{0}}, sum = {0};
    for (long t = 0; t < taps; t++) {
        const float *from = x + m->offsets[t] + at, weight = m->weights[t];
        UNROLLED for (int j = 0; j < blocks; j++) {
            Floats v = load(from + j * WIDTH);
            if (dots) dot[j] += weight * v;
            squares[j] += v * v;
        }
    }
    UNROLLED for (int j = 0; j < blocks; j++) {
        long here = at + j * WIDTH;
        Mask valid = load(mask + here) != all(0.0f);
        Floats norm, inverse;
        root_and_inverse(squares[j] + eps, exact, &norm, &inverse);
        norm = chosen(valid, norm, all(1.0f));
        sum += norm;
        if (dots) store(m->dot + here, chosen(valid, dot[j], all(0.0f)));
        store(m->norm + here, norm);
        store(m->inverse + here, chosen(valid, inverse, all(0.0f)));
    }
    return sum;
}

INLINE Floats patch_blocks(const int dots, const struct memory *m, const float *x, long taps, float eps,
                           const int exact, struct band b) {
    long i = 0;
    Floats sum = {0};
    for (; i + TILE <= b.count; i += TILE) sum += patch_block(4, dots, m, x + b.start, taps, eps, exact, b.mask, i);
    for (; i < b.count; i += WIDTH) sum += patch_block(1, dots, m, x + b.start, taps, eps, exact, b.mask, i);
    return sum;
}
