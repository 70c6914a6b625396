/* ‖x‖ of every patch, and what a gradient in it adds to that in x. A piece of work is one group of channels of an image.
 *
 * Before this text come elementary.h and parallel.h. */

/* Windows along one dimension, in the order of `Windows` in box_sum.py: window o holds the places
 * o·step − before + j·apart for 0 ≤ j < size */
struct windows {
    long size, step, apart, before, inputs, outputs;
};

struct call {
    struct windows y, x;
    long images, groups, channels; /* of a group */
    float eps;
    const float *in, *norms, *of_norms;
    float *out;
};

static long least(long a, long b) { return a < b ? a : b; }

/* The windows whose j-th place lies inside the map: from *first to before the number returned; *place is the first's. */
static long inside(const struct windows *w, long j, long *first, long *place) {
    long offset = j * w->apart - w->before;
    *first = offset >= 0 ? 0 : (-offset + w->step - 1) / w->step;
    *place = *first * w->step + offset;
    return offset >= w->inputs ? *first : least(w->outputs, (w->inputs - 1 - offset) / w->step + 1);
}

static void add(float *restrict to, const float *restrict from, long count) {
    for (long i = 0; i < count; i++) to[i] += from[i];
}

/* Sums over windows along a row, or transposed: to[o] += from[place of o], or to[place of o] += from[o] */
static void add_row(const struct windows *w, const float *restrict from, float *restrict to, int transposed) {
    for (long j = 0; j < w->size; j++) {
        long first, place, end = inside(w, j, &first, &place);
        if (w->step == 1) {
            if (first < end) add(to + (transposed ? place : first), from + (transposed ? first : place), end - first);
        } else if (transposed) {
            for (long o = first; o < end; o++) to[place + (o - first) * w->step] += from[o];
        } else {
            for (long o = first; o < end; o++) to[o] += from[place + (o - first) * w->step];
        }
    }
}

static int forward_piece(const void *arguments, long number) {
    const struct call *c = arguments;
    long plane = c->y.inputs * c->x.inputs, width = c->x.inputs;
    const float *x = c->in + number * c->channels * plane;
    float *out = c->out + number * c->y.outputs * c->x.outputs;
    float *restrict squares = scratch(plane + width), *restrict sums = squares + plane;
    if (!squares) return 1;
    memset(squares, 0, plane * sizeof(float));
    for (long channel = 0; channel < c->channels; channel++, x += plane)
        for (long i = 0; i < plane; i++) squares[i] += x[i] * x[i];
    for (long o = 0; o < c->y.outputs; o++, out += c->x.outputs) {
        memset(sums, 0, width * sizeof(float));
        for (long j = 0; j < c->y.size; j++) {
            long y = o * c->y.step - c->y.before + j * c->y.apart;
            if (y >= 0 && y < c->y.inputs) add(sums, squares + y * width, width);
        }
        memset(out, 0, c->x.outputs * sizeof(float));
        add_row(&c->x, sums, out, 0);
        for (long i = 0; i < c->x.outputs; i++) out[i] = sqrtf(out[i] + c->eps);
    }
    return 0;
}

/* out += x·Σ of_norm/norm over the windows that hold a place */
static int backward_piece(const void *arguments, long number) {
    const struct call *c = arguments;
    long plane = c->y.inputs * c->x.inputs, width = c->x.inputs, outputs = c->x.outputs;
    const float *norm = c->norms + number * c->y.outputs * outputs;
    const float *of_norm = c->of_norms + number * c->y.outputs * outputs;
    float *restrict spread = scratch(plane + width + outputs), *restrict row = spread + plane, *restrict t = row + width;
    if (!spread) return 1;
    memset(spread, 0, plane * sizeof(float));
    for (long o = 0; o < c->y.outputs; o++, norm += outputs, of_norm += outputs) {
        for (long i = 0; i < outputs; i++) t[i] = norm[i] == 0.0f ? 0.0f : of_norm[i] / norm[i];
        memset(row, 0, width * sizeof(float));
        add_row(&c->x, t, row, 1);
        for (long j = 0; j < c->y.size; j++) {
            long y = o * c->y.step - c->y.before + j * c->y.apart;
            if (y >= 0 && y < c->y.inputs) add(spread + y * width, row, width);
        }
    }
    const float *x = c->in + number * c->channels * plane;
    float *restrict out = c->out + number * c->channels * plane;
    for (long channel = 0; channel < c->channels; channel++, x += plane, out += plane)
        for (long i = 0; i < plane; i++) out[i] += x[i] * spread[i];
    return 0;
}

/* What Python calls; sizes: images, groups, channels of a group, then the windows of both dimensions. */
int forward(const long *sizes, float eps, const float *x, float *norms, Parallel parallel, long threads) {
    struct call c = {.images = sizes[0], .groups = sizes[1], .channels = sizes[2], .eps = eps, .in = x, .out = norms};
    memcpy(&c.y, sizes + 3, 2 * sizeof(struct windows));
    return in_parallel(forward_piece, &c, c.images * c.groups, parallel, threads);
}

int backward(const long *sizes, const float *x, const float *norms, const float *of_norms, float *of_x,
             Parallel parallel, long threads) {
    struct call c = {.images = sizes[0], .groups = sizes[1], .channels = sizes[2], .in = x, .norms = norms,
                     .of_norms = of_norms, .out = of_x};
    memcpy(&c.y, sizes + 3, 2 * sizeof(struct windows));
    return in_parallel(backward_piece, &c, c.images * c.groups, parallel, threads);
}
