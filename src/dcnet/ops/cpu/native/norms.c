/* ‖x‖ of every patch, and the part of the gradient in x that comes from ‖x‖, for one group of channels of an image.
 *
 * Before this text come elementary.h and parallel.h. */

/* Windows along one dimension, in the order of `Windows` in box_sum.py: window o holds the places
 * o·step − before + j·apart for 0 ≤ j < size */
struct windows {
    long size, step, apart, before, inputs, outputs;
};

struct maps {
    struct windows y, x;
    long images, groups, channels; /* of a group */
};

static long least(long a, long b) { return a < b ? a : b; }

/* The windows whose j-th place lies inside the map: from *first up to, not including, the number returned. *place is
 * the j-th place of *first. */
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

/* Σv² of numbers that lie next to each other; a long sum in float would lose digits. */
static double sum_of_squares(const float *v, long count) {
    double total = 0.0;
    for (long start = 0; start < count; start += 512) {
        long end = least(start + 512, count);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (long i = start; i < end; i++) sum += v[i] * v[i];
        total += sum;
    }
    return total;
}

/* Write the norms of a group of an image, and their sum. */
static int norms_of(const struct maps *m, long number, const float *x, float eps, float *norms, double *total) {
    long plane = m->y.inputs * m->x.inputs, width = m->x.inputs;
    x += number * m->channels * plane;
    float *out = norms + number * m->y.outputs * m->x.outputs;
    *total = 0.0;
    if (plane == 1 && m->y.outputs * m->x.outputs == 1) { /* as in linear maps */
        *total = *out = sqrtf((float)sum_of_squares(x, m->channels) + eps);
        return 0;
    }
    float *restrict squares = scratch(plane + width), *restrict sums = squares + plane;
    if (!squares) return 1;
    memset(squares, 0, plane * sizeof(float));
    for (long channel = 0; channel < m->channels; channel++, x += plane)
        for (long i = 0; i < plane; i++) squares[i] += x[i] * x[i];
    for (long o = 0; o < m->y.outputs; o++, out += m->x.outputs) {
        memset(sums, 0, width * sizeof(float));
        for (long j = 0; j < m->y.size; j++) {
            long y = o * m->y.step - m->y.before + j * m->y.apart;
            if (y >= 0 && y < m->y.inputs) add(sums, squares + y * width, width);
        }
        memset(out, 0, m->x.outputs * sizeof(float));
        add_row(&m->x, sums, out, 0);
        float sum = 0.0f;
        for (long i = 0; i < m->x.outputs; i++) out[i] = sqrtf(out[i] + eps);
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < m->x.outputs; i++) sum += out[i];
        *total += sum;
    }
    return 0;
}

/* of_x += x·Σ (of_norm + of_each)/norm over the windows that contain a place. */
static int add_gradient(const struct maps *m, long number, const float *x, const float *norms, const float *of_norms,
                        float of_each, float *of_x) {
    long plane = m->y.inputs * m->x.inputs, width = m->x.inputs, outputs = m->x.outputs;
    const float *norm = norms + number * m->y.outputs * outputs;
    const float *of_norm = of_norms + number * m->y.outputs * outputs;
    float *restrict spread = scratch(plane + width + outputs), *restrict row = spread + plane;
    float *restrict t = row + width;
    if (!spread) return 1;
    memset(spread, 0, plane * sizeof(float));
    for (long o = 0; o < m->y.outputs; o++, norm += outputs, of_norm += outputs) {
        for (long i = 0; i < outputs; i++) t[i] = (of_norm[i] + of_each) / norm[i];
        memset(row, 0, width * sizeof(float));
        add_row(&m->x, t, row, 1);
        for (long j = 0; j < m->y.size; j++) {
            long y = o * m->y.step - m->y.before + j * m->y.apart;
            if (y >= 0 && y < m->y.inputs) add(spread + y * width, row, width);
        }
    }
    const float *restrict in = x + number * m->channels * plane;
    float *restrict out = of_x + number * m->channels * plane;
    if (plane == 1) {
        for (long i = 0; i < m->channels; i++) out[i] += in[i] * spread[0];
        return 0;
    }
    for (long channel = 0; channel < m->channels; channel++, in += plane, out += plane)
        for (long i = 0; i < plane; i++) out[i] += in[i] * spread[i];
    return 0;
}
