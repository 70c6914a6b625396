/* Planes of a depthwise layer in memory, and the dot products and norms of their patches.
 *
 * A plane is one channel of one image. It is copied with zeros around it, and with a stride so that the places that a
 * tap of the kernel meets lie next to each other ("phases": a copy for each remainder of row and column by the stride).
 * Then tap t of the result at place o reads x[o + offset[t]], whatever stride and dilation are. Small planes of several
 * images are stacked, one below the other, with the zeros in between shared. Loops run over a row of results, or over
 * several short rows at once (a "band"). That includes places between the rows that are no results; a mask says so. */

/* Sizes, in the order of `Layout` in depthwise.py */
struct layout {
    long images, channels, multiplier; /* kernels of each channel */
    long height, width, read_height, read_width, out_height, out_width; /* what no patch holds is not read */
    long step_y, step_x, before_y, before_x;
    long pitch, plane; /* of one phase: places in a row, and in all rows of a stack */
    long stack, spacing; /* images in a stack, and rows of a phase from one to the next */
    long band, in_band; /* rows of results, and of x, that a loop takes at once */
    long kernel, taps; /* numbers in a kernel, and those that meet the map at all */
    long margin; /* the largest place of a tap in its phase */
};

/* Of each tap: its number in the kernel, its phase, its place in the phase */
struct taps {
    const long *number, *phase, *place;
};

struct memory {
    float *x, *of_dot, *of_squares, *inverses; /* of a stack */
    float *dot, *norm, *inverse, *y, *e, *of_norm, *mask, *last_mask; /* of a band */
    float *weights, *of_weights; /* of each tap; of_weights has a vector for each tap and kernel */
    long *offsets;
    double *sums; /* of each kernel and vector */
};

static long band_size(const struct layout *l) {
    return rounded((l->band > l->in_band ? l->band : l->in_band) * l->pitch) + TILE;
}
static size_t x_size(const struct layout *l) { return rounded(l->step_y * l->step_x * l->plane) + TILE; }
static size_t gradient_size(const struct layout *l) { return rounded(l->margin) + rounded(l->plane) + TILE; }
static long stacks(const struct layout *l) { return (l->images + l->stack - 1) / l->stack; }

static void fill_mask(const struct layout *l, float *mask, long rows) {
    for (long row = 0, y = 0; row < rows; row++, y = y + 1 == l->spacing ? 0 : y + 1)
        for (long i = 0; y < l->out_height && i < l->out_width; i++) mask[row * l->pitch + i] = 1.0f;
}

/* Memory for a piece of work, zero where nothing is written; all NULL where there is none left. There are `copies` of
 * x, and of the gradients of its results, `sums` sums for each kernel. */
static struct memory memory_of(const struct layout *l, struct taps taps, long copies, long gradients, long sums) {
    size_t band = band_size(l), tap = rounded(l->taps), of_weights = gradients ? tap * l->multiplier * WIDTH : 0;
    size_t all = copies * x_size(l) + 3 * gradients * gradient_size(l) + 8 * band + 3 * tap + of_weights +
                 2 * rounded(sums * l->multiplier);
    struct memory m = {0};
    float *at = scratch(all);
    if (!at) return m;
    memset(at, 0, (all - 5 * band) * sizeof(float)); /* the five last bands are written before they are read */
    m.x = at, at += copies * x_size(l);
    float **maps[] = {&m.of_dot, &m.of_squares, &m.inverses};
    for (int i = 0; i < 3; i++, at += gradients * gradient_size(l)) *maps[i] = at + rounded(l->margin);
    m.offsets = (long *)at, at += 2 * tap;
    m.sums = (double *)at, at += 2 * rounded(sums * l->multiplier);
    m.of_weights = at, at += of_weights;
    m.weights = at, at += tap;
    float **bands[] = {&m.e, &m.mask, &m.last_mask, &m.dot, &m.norm, &m.inverse, &m.y, &m.of_norm};
    for (int i = 0; i < 8; i++, at += band) *bands[i] = at;
    for (long t = 0; t < l->taps; t++) m.offsets[t] = taps.phase[t] * l->plane + taps.place[t];
    fill_mask(l, m.mask, l->band);
    long rest = l->stack > 1 ? l->images % l->stack : l->out_height % l->band;
    if (!rest) return m;
    fill_mask(l, m.last_mask, l->stack > 1 ? (rest - 1) * l->spacing + l->out_height : rest);
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

/* Copy the rows of results of a band to where they lie in a map, or from there; `map` is the stack's first plane. */
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

/* Sums over the taps of `blocks` vectors of results: Σ w·x into m->dot, √(Σ x² + eps) into m->norm, 1/that. Where no
 * result is, 0, 1 and 0, so that nothing computed from them is infinite. */
INLINE void patch_block(const int blocks, const int dots, const struct memory *m, const float *x, long taps, float eps,
                        const float *mask, long at) {
    Floats dot[4] = {{0}}, squares[4] = {{0}};
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
        root_and_inverse(squares[j] + eps, eps < 1e-30f, &norm, &inverse);
        if (dots) store(m->dot + here, chosen(valid, dot[j], all(0.0f)));
        store(m->norm + here, chosen(valid, norm, all(1.0f)));
        store(m->inverse + here, chosen(valid, inverse, all(0.0f)));
    }
}

INLINE void patch_blocks(const int dots, const struct memory *m, const float *x, long taps, float eps, struct band b) {
    long i = 0;
    for (; i + TILE <= b.count; i += TILE) patch_block(4, dots, m, x + b.start, taps, eps, b.mask, i);
    for (; i < b.count; i += WIDTH) patch_block(1, dots, m, x + b.start, taps, eps, b.mask, i);
}

static void dots_and_norms(const struct layout *l, const struct memory *m, const float *x, float eps, struct band b) {
    patch_blocks(1, m, x, l->taps, eps, b);
}

static void norms_only(const struct layout *l, const struct memory *m, const float *x, float eps, struct band b) {
    patch_blocks(0, m, x, l->taps, eps, b);
}
