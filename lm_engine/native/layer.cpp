/* What a decoder layer does between its products, in one pass each, float32.
 *
 * Owns: RMS norm and rotary positions. Does not own: when they are used (models/native_layers.py).
 */
#include "vectors.h"

#define LONE_WORK 16384 /* numbers below which waking other threads costs more than it saves */

/* y = x / sqrt(mean(x^2) + eps) * weight, by rows of `size` numbers. */
extern "C" void longlens_rms_norm(const float *x, long rows, long size, const float *weight,
                                  float eps, float *y, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * size > LONE_WORK)
    for (long r = 0; r < rows; r++) {
        const float *from = x + r * size;
        float *to = y + r * size;
        vec squares = {};
        long j = 0;
        for (; j + WIDTH <= size; j += WIDTH) {
            const vec v = *(const vec *)(from + j);
            squares += v * v;
        }
        float sum = sum_of(squares);
        for (; j < size; j++) sum += from[j] * from[j];
        const float scale = 1.f / sqrtf(sum / size + eps);
        for (j = 0; j + WIDTH <= size; j += WIDTH)
            *(vec *)(to + j) = *(const vec *)(from + j) * scale * *(const vec *)(weight + j);
        for (; j < size; j++) to[j] = from[j] * scale * weight[j];
    }
}

/* Rotates pair (x[i], x[i + rotated / 2]) of each head in place; what lies beyond `rotated` stays.
 * x: rows of `heads` heads of `dim` numbers, x_row apart. cos, sin [rows][rotated]: as rope.py's
 * `rotation` gives them, the first half of sin negated. */
extern "C" void longlens_rotate(float *x, long x_row, long rows, long heads, long dim, long rotated,
                                const float *cos, const float *sin, int threads) {
    const long half = rotated / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * heads * dim > LONE_WORK)
    for (long r = 0; r < rows; r++) {
        const float *c = cos + r * rotated, *s = sin + r * rotated;
        for (long h = 0; h < heads; h++) {
            float *a = x + r * x_row + h * dim, *b = a + half;
            for (long i = 0; i < half; i++) {
                const float low = a[i], high = b[i];
                a[i] = low * c[i] + high * s[i];
                b[i] = high * c[half + i] + low * s[half + i];
            }
        }
    }
}
