/* 3×3 kernels without stride or dilation, on wide maps: three rows of results at once.
 *
 * The number of vectors read limits the speed of these loops. A row of x belongs to the patches of three rows of
 * results, and is read once for all of them. */

enum { ROWS = 3, SIDE = 3 };

static int takes_rows(const struct layout *l, const struct memory *m) {
    int usual = l->taps == SIDE * SIDE && l->step_y * l->step_x == 1 && m->offsets[0] == 0;
    usual = usual && m->offsets[1] == 1 && m->offsets[SIDE] == l->pitch;
    return usual && l->stack == 1 && l->out_width >= WIDTH && l->width >= WIDTH;
}

/* the last vector of a row overlaps the one before */
static long in_row(long at, long width) { return at + WIDTH <= width ? at : width - WIDTH; }

/* Σ w·x, √(Σ x² + eps) and its inverse for a vector in each of three rows; return the sum of the norms. */
INLINE Floats patch_rows(const int dots, const struct memory *m, const float *x, long pitch, float eps, long at) {
    Floats dot[ROWS] = {{0}}, across[ROWS + SIDE - 1] = {{0}}, sum = {0};
    UNROLLED for (int row = 0; row < ROWS + SIDE - 1; row++)
        UNROLLED for (int u = 0; u < SIDE; u++) {
            Floats v = load(x + row * pitch + at + u);
            across[row] += v * v;
            UNROLLED for (int r = 0; r < ROWS; r++)
                if (dots && row >= r && row - r < SIDE) dot[r] += m->weights[(row - r) * SIDE + u] * v;
        }
    UNROLLED for (int r = 0; r < ROWS; r++) {
        Floats norm, inverse;
        root_and_inverse(across[r] + across[r + 1] + across[r + 2] + eps, 0, &norm, &inverse);
        if (dots) store(m->dot + r * pitch + at, dot[r]);
        store(m->norm + r * pitch + at, norm);
        store(m->inverse + r * pitch + at, inverse);
        sum += norm;
    }
    return sum;
}

/* The same for a band; return 0 if `patch_blocks` has to do it, for left-over rows or numbers that are not finite. */
INLINE int patch_band(const int dots, const struct layout *l, const struct memory *m, const float *x, float eps,
                      struct band b) {
    if (b.rows % ROWS || eps < 1e-30f || !takes_rows(l, m)) return 0;
    Floats sum = {0};
    for (long row = 0; row < b.rows; row += ROWS) {
        struct memory here = *m;
        here.dot += row * l->pitch, here.norm += row * l->pitch, here.inverse += row * l->pitch;
        for (long at = 0; at < l->out_width; at += WIDTH)
            sum += patch_rows(dots, &here, x + b.start + row * l->pitch, l->pitch, eps, in_row(at, l->out_width));
    }
    for (long row = 1; row <= b.rows; row++) { /* behind each row there are no results */
        long end = row < b.rows ? row * l->pitch : b.count;
        for (long i = (row - 1) * l->pitch + l->out_width; i < end; i++)
            m->dot[i] = 0.0f, m->norm[i] = 1.0f, m->inverse[i] = 0.0f;
    }
    return !has_nan(sum);
}

/* m->y = x·Σ of_squares + Σ w·of_dot for a vector in each of three rows of x */
INLINE void spread_rows(const struct memory *m, long pitch, long start, float *to) {
    Floats dot[ROWS] = {{0}}, across[ROWS + SIDE - 1] = {{0}};
    UNROLLED for (int row = 0; row < ROWS + SIDE - 1; row++)
        UNROLLED for (int u = 0; u < SIDE; u++) {
            long from = start + (row - SIDE + 1) * pitch - u;
            Floats e = load(m->of_dot + from);
            across[row] += load(m->of_squares + from);
            UNROLLED for (int r = 0; r < ROWS; r++)
                if (row >= r && row - r < SIDE) dot[r] += m->weights[(r + SIDE - 1 - row) * SIDE + u] * e;
        }
    UNROLLED for (int r = 0; r < ROWS; r++) {
        Floats x = load(m->x + start + r * pitch), squares = across[r] + across[r + 1] + across[r + 2];
        store(to + r * pitch, dot[r] + x * squares);
    }
}

/* Σ w·x of each patch of a band into m->dot, √(Σ x² + eps) into m->norm, and its inverse into m->inverse */
static void dots_and_norms(const struct layout *l, const struct memory *m, const float *x, float eps, struct band b) {
    if (patch_band(1, l, m, x, eps, b)) return;
    if (eps < 1e-30f || has_nan(patch_blocks(1, m, x, l->taps, eps, 0, b))) patch_blocks(1, m, x, l->taps, eps, 1, b);
}

static void norms_only(const struct layout *l, const struct memory *m, const float *x, float eps, struct band b) {
    if (patch_band(0, l, m, x, eps, b)) return;
    if (eps < 1e-30f || has_nan(patch_blocks(0, m, x, l->taps, eps, 0, b))) patch_blocks(0, m, x, l->taps, eps, 1, b);
}
