/* What a layer computes besides its convolution and h·g: normalized kernels, norms of patches, radii, and their
 * gradients.
 *
 * Before this text come elementary.h, parallel.h, norms.c and RADIUS_FLOOR. One call does all small operations of a
 * step: on small maps, each by itself would take longer to start than to compute. */

struct layer {
    struct maps maps;
    long kernels, taps; /* of all groups, and the numbers of each */
    long block; /* kernels of a chunk of work */
    float eps;
    const float *x, *weight, *norms, *of_norms, *w_norms, *of_w_norms;
    float *out, *unit, *lengths, *of_x, *of_unit, *of_each;
    double *sums;
};

/* sizes: images, groups, channels of a group, the windows of both dimensions, kernels, numbers of a kernel, block */
static struct layer layer_of(const long *sizes) {
    struct layer l = {.kernels = sizes[15], .taps = sizes[16], .block = sizes[17]};
    l.maps.images = sizes[0], l.maps.groups = sizes[1], l.maps.channels = sizes[2];
    memcpy(&l.maps.y, sizes + 3, 2 * sizeof(struct windows));
    return l;
}

static long planes(const struct layer *l) { return l->maps.images * l->maps.groups; }
static long blocks(const struct layer *l) { return (l->kernels + l->block - 1) / l->block; }

static void normalize(const struct layer *l, long number) {
    for (long k = number * l->block; k < least((number + 1) * l->block, l->kernels); k++) {
        const float *restrict w = l->weight + k * l->taps;
        float *restrict unit = l->unit + k * l->taps;
        float norm = l->w_norms ? l->w_norms[k] : (l->lengths[k] = sqrtf((float)sum_of_squares(w, l->taps) + l->eps));
        float inverse = 1.0f / norm;
        for (long i = 0; i < l->taps; i++) unit[i] = w[i] * inverse;
    }
}

/* Turn the gradient in w/‖w‖ into the one in w, in place, adding the part of ‖w‖. The slope of ‖w‖ is w/‖w‖; that of
 * w/‖w‖ is 1/‖w‖, minus the part along w. One factor at a time: the cube of a small norm's inverse may overflow. */
static void kernel_gradients(const struct layer *l, long number) {
    for (long k = number * l->block; k < least((number + 1) * l->block, l->kernels); k++) {
        const float *restrict w = l->weight + k * l->taps;
        float *restrict of_w = l->of_unit + k * l->taps;
        float inverse = 1.0f / l->w_norms[k];
        double product = 0.0;
        for (long start = 0; start < l->taps; start += 512) {
            long end = least(start + 512, l->taps);
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (long i = start; i < end; i++) sum += of_w[i] * w[i];
            product += sum;
        }
        float along =
            (l->of_w_norms ? l->of_w_norms[k] * inverse : 0.0f) - (float)product * inverse * inverse * inverse;
        for (long i = 0; i < l->taps; i++) of_w[i] = of_w[i] * inverse + w[i] * along;
    }
}

static int kernel_chunk(const void *arguments, long number) {
    normalize(arguments, number);
    return 0;
}

static int before_chunk(const void *arguments, long number) {
    const struct layer *l = arguments;
    long plane = number - blocks(l);
    if (plane < 0) return kernel_chunk(l, number);
    return norms_of(&l->maps, plane, l->x, l->eps, l->out, l->sums + plane);
}

static int after_chunk(const void *arguments, long number) {
    const struct layer *l = arguments;
    long plane = number - (l->of_unit ? blocks(l) : 0);
    if (plane < 0) {
        kernel_gradients(l, number);
        return 0;
    }
    return add_gradient(&l->maps, plane, l->x, l->norms, l->of_norms, l->of_each[plane % l->maps.groups], l->of_x);
}

/* Move a running average toward the means of a batch, as `track_norm` in mean_norm.py does. Means that are not finite
 * are left out. momentum < 0 stands for a cumulative average. */
static void track(const float *means, long groups, float *running, float *batches, float momentum) {
    float seen = *batches + 1.0f, share = seen == 1.0f || momentum < 0.0f ? 1.0f / seen : momentum;
    int finite = 1;
    for (long g = 0; g < groups; g++) {
        if (!isfinite(means[g])) {
            finite = 0;
            continue;
        }
        float way = means[g] - running[g]; /* as torch.lerp has it, exact at both ends */
        running[g] = share < 0.5f ? running[g] + share * way : means[g] - way * (1.0f - share);
    }
    *batches += (float)finite;
}

/* numbers: ‖w‖ and the radius of every kernel, and E{‖x‖} of every group, all to be written.
 * rho: of every kernel, or its raw parameter if it is `learned`; NULL if there is none. relative: whether it is
 * multiplied by E{‖x‖}: `means`, or that of this batch if `means` is NULL. The running average is updated unless it is
 * NULL. */
int before(const long *sizes, float eps, const float *x, const float *weight, float *unit, float *norms, float *numbers,
           const float *rho, long learned, long relative, const float *means, float *running, float *batches,
           float momentum, Parallel parallel, long threads) {
    struct layer l = layer_of(sizes);
    long groups = l.maps.groups, each = l.kernels / groups;
    float *radii = numbers + l.kernels, *mean = radii + l.kernels;
    l.eps = eps, l.x = x, l.weight = weight, l.unit = unit, l.out = norms, l.lengths = numbers;
    l.sums = malloc((planes(&l) + 1) * sizeof(double));
    int failed = !l.sums || in_parallel(before_chunk, &l, blocks(&l) + planes(&l), parallel, threads);
    for (long g = 0; g < groups && !failed && rho; g++) {
        double total = 0.0, count = (double)(l.maps.images * l.maps.y.outputs * l.maps.x.outputs);
        for (long image = 0; image < l.maps.images; image++) total += l.sums[image * groups + g];
        mean[g] = !relative ? 1.0f : means ? means[g] : (float)(total / count);
        for (long k = g * each; k < (g + 1) * each; k++)
            radii[k] = (learned ? rho[k] * rho[k] + RADIUS_FLOOR : rho[k]) * mean[g];
    }
    if (running && !failed) track(mean, groups, running, batches, momentum);
    free(l.sums);
    return failed;
}

/* Write the normalized kernels again. */
int kernels(const long *sizes, const float *weight, const float *w_norms, float *unit, Parallel parallel,
            long threads) {
    struct layer l = layer_of(sizes);
    l.weight = weight, l.w_norms = w_norms, l.unit = unit;
    return in_parallel(kernel_chunk, &l, blocks(&l), parallel, threads);
}

/* Add the part of the norms to the gradient in x. Turn the gradient in w/‖w‖ into that in w, and the gradient in the
 * radius into that in rho, both in place. Each may be NULL if it is not wanted.
 * of_batch: whether E{‖x‖} was that of the batch, and so has a gradient. */
int after(const long *sizes, const float *x, const float *norms, const float *of_norms, float *of_x,
          const float *weight, const float *numbers, float *of_unit, const float *of_w_norms, const float *rho,
          long learned, long of_batch, float *of_radius, Parallel parallel, long threads) {
    struct layer l = layer_of(sizes);
    long groups = l.maps.groups, each = l.kernels / groups;
    const float *mean = numbers + 2 * l.kernels;
    l.x = x, l.norms = norms, l.of_norms = of_norms, l.of_x = of_x, l.weight = weight, l.w_norms = numbers;
    l.of_unit = of_unit, l.of_w_norms = of_w_norms;
    l.of_each = calloc(groups, sizeof(float));
    if (!l.of_each) return 1;
    for (long g = 0; g < groups && of_radius; g++) {
        double of_mean = 0.0, count = (double)(l.maps.images * l.maps.y.outputs * l.maps.x.outputs);
        for (long k = g * each; k < (g + 1) * each; k++) {
            of_mean += (double)of_radius[k] * (learned ? rho[k] * rho[k] + RADIUS_FLOOR : rho[k]);
            of_radius[k] *= mean[g] * (learned ? 2.0f * rho[k] : 1.0f);
        }
        if (of_batch) l.of_each[g] = (float)(of_mean / count);
    }
    long chunks = (of_unit ? blocks(&l) : 0) + (of_x ? planes(&l) : 0);
    int failed = in_parallel(after_chunk, &l, chunks, parallel, threads);
    free(l.of_each);
    return failed;
}
