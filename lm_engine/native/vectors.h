/* Vectors of floats, as wide as the CPU has them.
 *
 * Owns: `vec`, the shape of a register tile, and 2^x. Written with the compiler's vector types, so
 * that one source serves AVX-512, AVX2 and ARM.
 */
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define WIDTH 16 /* floats of a vector */
#define TILE_VECTORS 4
#define TILE_ROWS 6 /* rows of a tile: rows * vectors accumulators stay in registers */
#elif defined(__AVX__)
#define WIDTH 8
#define TILE_VECTORS 2
#define TILE_ROWS 6
#else
#define WIDTH 4
#define TILE_VECTORS 4
#define TILE_ROWS 4
#endif

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

static inline vec splat(float x) { return x - vec{}; }

/* 2^x for x <= 0, to 2e-7 and exact at 0, so that a merge with nothing changes no bit; under 2^-126
 * it stays there. NaN passes. The polynomial is the minimax one on [-1/2, 1/2] that begins with 1. */
static inline vec exp2_of(vec x) {
    x = (x < splat(-126.f)) ? splat(-126.f) : x;
    const vec magic = splat(12582912.f); /* 1.5 * 2^23: adding it rounds to an integer */
    const vec shifted = x + magic;
    const vec f = x - (shifted - magic);
    vec p = splat(0.0013264727123590424f);
    p = p * f + splat(0.00967151264482484f);
    p = p * f + splat(0.05550733743497043f);
    p = p * f + splat(0.24022242085262235f);
    p = p * f + splat(0.6931469775989931f);
    p = p * f + splat(1.f);
    return (vec)((ivec)p + ((ivec)shifted << 23));
}

static inline float sum_of(vec x) {
    float sum = 0;
#if WIDTH == 16
    typedef float half __attribute__((vector_size(32)));
    typedef float quarter __attribute__((vector_size(16)));
    const half h = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                   __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    const quarter q = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4,
            5, 6, 7);
    sum = (q[0] + q[2]) + (q[1] + q[3]);
#else
    for (int j = 0; j < WIDTH; j++) sum += x[j];
#endif
    return sum;
}
