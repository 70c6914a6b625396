/* The gradient in x from those in the dot products and norms of its patches. */

/* m->y = x·Σ of_squares, and with `dots` + Σ w·of_dot, over the taps of one phase */
INLINE void spread_block(const int blocks, const int dots, const struct layout *l, struct taps taps,
                         const struct memory *m, long phase, long start, long at) {
    Floats dot[4] = {{0}}, squares[4] = {{0}};
    for (long t = 0; t < l->taps; t++) {
        if (taps.phase[t] != phase) continue;
        long from = start + at - taps.place[t];
        float weight = m->weights[t];
        UNROLLED for (int j = 0; j < blocks; j++) {
            if (dots) dot[j] += weight * load(m->of_dot + from + j * WIDTH);
            squares[j] += load(m->of_squares + from + j * WIDTH);
        }
    }
    UNROLLED for (int j = 0; j < blocks; j++) {
        Floats x = load(m->x + phase * l->plane + start + at + j * WIDTH);
        store(m->y + at + j * WIDTH, dot[j] + x * squares[j]);
    }
}

INLINE void spread_blocks(const int dots, const struct layout *l, struct taps taps, const struct memory *m, long phase,
                          long start, long count) {
    long i = 0;
    for (; i + TILE <= count; i += TILE) spread_block(4, dots, l, taps, m, phase, start, i);
    for (; i < count; i += WIDTH) spread_block(1, dots, l, taps, m, phase, start, i);
}

static void write_row(float *to, long step, const float *from, long count, int add) {
    if (add)
        for (long j = 0; j < count; j++) to[j * step] += from[j];
    else if (step == 1)
        copy_row(to, from, count);
    else
        for (long j = 0; j < count; j++) to[j * step] = from[j];
}

static long least(long a, long b) { return a < b ? a : b; }

/* Write, or add, the gradient in a stack of planes of x. */
static void write_gradient(const struct layout *l, struct taps taps, const struct memory *m, int dots, int add,
                           long images, float *of_x, long image_pitch) {
    for (long phase = 0; phase < l->step_y * l->step_x; phase++) {
        long py = phase / l->step_x, px = phase % l->step_x;
        /* the first row and column of x in this phase, how many there are, and where they lie */
        long first_y = (py + l->step_y - l->before_y % l->step_y) % l->step_y;
        long first_x = (px + l->step_x - l->before_x % l->step_x) % l->step_x;
        long height = (l->height - first_y + l->step_y - 1) / l->step_y;
        long width = (l->width - first_x + l->step_x - 1) / l->step_x;
        if (height <= 0 || width <= 0) continue;
        long start = (first_y + l->before_y) / l->step_y * l->pitch + (first_x + l->before_x) / l->step_x;
        long all_rows = (images - 1) * l->spacing + height;
        for (long row = 0; row < all_rows; row += l->in_band) {
            long rows = least(l->in_band, all_rows - row), count = rounded((rows - 1) * l->pitch + width);
            if (dots && rows % ROWS == 0 && takes_rows(l, m))
                for (long at = 0; at < rows * l->pitch; at += ROWS * l->pitch)
                    for (long i = 0; i < width; i += WIDTH)
                        spread_rows(m, l->pitch, start + row * l->pitch + at + in_row(i, width),
                                    m->y + at + in_row(i, width));
            else if (dots)
                spread_blocks(1, l, taps, m, phase, start + row * l->pitch, count);
            else
                spread_blocks(0, l, taps, m, phase, start + row * l->pitch, count);
            long image = row / l->spacing, y = row % l->spacing - 1;
            for (long i = 0; i < rows; i++) {
                if (++y == l->spacing) y = 0, image++;
                if (y >= height) continue;
                float *to = of_x + image * image_pitch + (first_y + y * l->step_y) * l->width + first_x;
                write_row(to, l->step_x, m->y + i * l->pitch, width, add);
            }
        }
    }
}
