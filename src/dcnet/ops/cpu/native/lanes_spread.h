/* The gradient in x from those in the dot products and norms of its patches, for channels side by side. */

enum { MOST_TAPS = 16, MOST_STEPS = 4 }; /* of a kernel in one dimension, and of its stride, as lanes.py has them */

/* The taps of one dimension that reach a place of x, and which result each of them belongs to */
struct reach {
    long count, tap[MOST_TAPS], result[MOST_TAPS];
};

/* `place` counts from the zeros before the map; results outside [least, most) do not exist. */
static struct reach reach_of(long place, long taps, long apart, long step, long least, long most) {
    struct reach r;
    r.count = 0;
    for (long tap = 0; tap < taps; tap++) {
        long from = place - tap * apart, result = step == 1 ? from : from / step; /* division is slow */
        if (result * step != from || result < least || result >= most) continue;
        r.tap[r.count] = tap, r.result[r.count++] = result;
    }
    return r;
}

/* What a row of results gives to pixels of x: Σ w·of_dot */
INLINE void spread_taps(const int blocks, const int usual, const struct reach *along, const float *of_dot,
                        const float *weights, Floats *dot) {
    const long count = usual ? 3 : along->count;
    EACH_TAP(usual, count, j, {
        Floats weight = load(weights + (usual ? j : along->tap[j]) * WIDTH);
        const float *from = of_dot + (usual ? along->result[0] - j : along->result[j]) * WIDTH;
        UNROLLED for (int b = 0; b < blocks; b++) dot[b] += weight * load(from + b * WIDTH);
    })
}

/* to = x·Σ of_squares + Σ w·of_dot for some pixels of a row, a stride apart; with `add`, to += that. Without of_dot,
 * only the first term. With `usual`, the taps are those of a 3×3 kernel without stride or dilation, and all of them
 * reach the row. */
INLINE void spread_block(const int blocks, const int usual, const struct layout *l, const struct reach *up,
                         const struct reach *along, const float *weights, const float *of_dot, const float *columns,
                         long at, const float *x, float *to, const int add) {
    Floats dot[7] = {{0}}, squares[7] = {{0}};
    const long ups = of_dot ? (usual ? 3 : up->count) : 0, alongs = usual ? 3 : along->count;
    const long step = (usual ? 1 : l->step_x) * WIDTH;
    EACH_TAP(usual, ups, i, {
        const float *row = of_dot + ((usual ? up->result[0] - i : up->result[i]) * l->pitch + l->margin + at) * WIDTH;
        spread_taps(blocks, usual, along, row, weights + (usual ? 3 * i : up->tap[i] * l->taps_x) * WIDTH, dot);
    })
    EACH_TAP(usual, alongs, j, {
        const float *from = columns + (l->margin + at + (usual ? along->result[0] - j : along->result[j])) * WIDTH;
        UNROLLED for (int b = 0; b < blocks; b++) squares[b] += load(from + b * WIDTH);
    })
    UNROLLED for (int b = 0; b < blocks; b++) {
        Floats sum = dot[b] + load(x + (at + b) * step) * squares[b];
        store(to + (at + b) * step, add ? load(to + (at + b) * step) + sum : sum);
    }
}

INLINE void sum_block(const int blocks, const struct layout *l, const struct reach *up, const float *of_squares,
                      float *to) {
    Floats sum[7] = {{0}};
    for (long i = 0; i < up->count; i++)
        UNROLLED for (int b = 0; b < blocks; b++)
            sum[b] += load(of_squares + (up->result[i] * l->pitch + b) * WIDTH);
    UNROLLED for (int b = 0; b < blocks; b++) store(to + b * WIDTH, sum[b]);
}

/* Write, or add, the gradient in the map x; of_dot may be NULL. */
static void spread(const struct layout *l, const float *x, const float *weights, const float *of_dot,
                   const float *of_squares, float *columns, float *of_x, int add) {
    const int usual = taps(l) == 9 && l->taps_x == 3 && l->step_x * l->step_y * l->apart_x * l->apart_y == 1;
    struct reach along[MOST_STEPS];
    for (long first = 0; first < l->step_x; first++)
        along[first] = reach_of(first + l->before_x, l->taps_x, l->apart_x, l->step_x, -l->margin, l->out_width);
    for (long row = 0; row < l->height; row++) {
        long y = row + l->before_y;
        struct reach up = reach_of(y, l->taps_y, l->apart_y, l->step_y, 0, l->out_height);
        IN_BLOCKS(l->pitch, sum_block(blocks, l, &up, of_squares + at * WIDTH, columns + at * WIDTH))
        for (long first = 0; first < l->step_x && first < l->width; first++) {
            long place = first + l->before_x, count = (l->width - first + l->step_x - 1) / l->step_x;
            const float *from = x + (y * l->columns + place) * WIDTH;
            float *to = of_x + (row * l->width + first) * WIDTH;
            const struct reach *a = along + first;
            if (usual && up.count == 3 && a->count == 3 && of_dot && !add)
                IN_BLOCKS(count, spread_block(blocks, 1, l, &up, a, weights, of_dot, columns, at, from, to, 0))
            else
                IN_BLOCKS(count, spread_block(blocks, 0, l, &up, a, weights, of_dot, columns, at, from, to, add))
        }
    }
}
