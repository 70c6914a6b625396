/* Kernels divided by their norms, and the gradient back through that. */

/* 1/√(Σw² + eps), and 0 where that would be 1/0 */
static float one_over_norm(const float *kernel, long count, float eps) {
    float squares = 0.0f;
    for (long t = 0; t < count; t++) squares += kernel[t] * kernel[t];
    float norm = sqrtf(squares + eps);
    return norm == 0.0f ? 0.0f : 1.0f / norm;
}

/* Turn the gradient in w/‖w‖ into that in w, in place: the slope is 1/‖w‖, minus the part along w. */
static void through_norm(const float *kernel, long count, float eps, float *gradient) {
    float inverse = one_over_norm(kernel, count, eps), along = 0.0f;
    for (long t = 0; t < count; t++) along += gradient[t] * (kernel[t] * inverse);
    for (long t = 0; t < count; t++) gradient[t] = (gradient[t] - kernel[t] * inverse * along) * inverse;
}
