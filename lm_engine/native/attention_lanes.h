/* Attention of up to LANES lanes over one split, vectors across lanes (see attention.cpp).
 *
 * Owns: split_by_lanes and the merge of its results. Does not own: tasks (attention.cpp).
 */
#pragma once
#include "attention.h"

/* c[i][lanes] (+)= sum over k of a[i * a_row + k * a_col] * b[k][lanes], for ROWS rows of c. */
template <int ROWS>
static inline __attribute__((always_inline)) void tile(int depth, const float *a, long a_row,
                                                       long a_col, const float *b, float *c,
                                                       int add) {
    vec acc[ROWS][TILE_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++)
            acc[i][v] = add ? *(const vec *)(c + i * LANES + v * WIDTH) : vec{};
    for (int k = 0; k < depth; k++) {
        vec lanes[TILE_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++) lanes[v] = *(const vec *)(b + k * LANES + v * WIDTH);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            const vec x = splat(a[i * a_row + k * a_col]);
#pragma GCC unroll 8
            for (int v = 0; v < TILE_VECTORS; v++) acc[i][v] += x * lanes[v];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++) *(vec *)(c + i * LANES + v * WIDTH) = acc[i][v];
}

static void product(int rows, int depth, const float *a, long a_row, long a_col, const float *b,
                    float *c, int lanes, int add) {
    const int step = TILE_VECTORS * WIDTH;
    for (int lane = 0; lane < lanes; lane += step) {
        int i = 0;
        for (; i + TILE_ROWS <= rows; i += TILE_ROWS)
            tile<TILE_ROWS>(depth, a + i * a_row, a_row, a_col, b + lane, c + i * LANES + lane,
                    add);
        for (; i < rows; i++)
            tile<1>(depth, a + i * a_row, a_row, a_col, b + lane, c + i * LANES + lane, add);
    }
}

/* total <- merge of total (earlier positions) and part (later ones). */
static void merge(State *total, const State *part, int dim, int lanes) {
    for (int i = 0; i < lanes; i += WIDTH) {
        const vec a = *(vec *)(total->m + i), b = *(const vec *)(part->m + i);
        const vec m = (a > b) ? a : b;
        const vec wa = exp2_of(a - m), wb = exp2_of(b - m);
        *(vec *)(total->m + i) = m;
        *(vec *)(total->l + i) = *(vec *)(total->l + i) * wa + *(const vec *)(part->l + i) * wb;
        for (int d = 0; d < dim; d++) {
            vec *o = (vec *)(total->o + d * LANES + i);
            *o = *o * wa + *(const vec *)(part->o + d * LANES + i) * wb;
        }
    }
}

/* Online softmax over one block of scores S[n][LANES], which become weights; returns nothing new
 * but the state's m, l and a rescaled o. Lane i sees block keys [low[i], high[i]). */
static void softmax_block(float *scores, int n, State *s, int dim, int lanes, int masked,
                          const int32_t *low, const int32_t *high) {
    for (int i = 0; i < lanes; i += WIDTH) {
        float *column = scores + i;
        vec top = *(vec *)(s->m + i);
        const vec before = top;
        if (masked) {
            const ivec lo = *(const ivec *)(low + i), hi = *(const ivec *)(high + i);
            for (int k = 0; k < n; k++) {
                vec *x = (vec *)(column + k * LANES);
                const ivec key = k - ivec{};
                *x = ((key >= lo) & (key < hi)) ? *x : splat(NOTHING);
                top = (*x > top) ? *x : top;
            }
        } else {
            for (int k = 0; k < n; k++) {
                const vec x = *(vec *)(column + k * LANES);
                top = (x > top) ? x : top;
            }
        }
        vec sum = {0};
        for (int k = 0; k < n; k++) {
            vec *x = (vec *)(column + k * LANES);
            vec w = exp2_of(*x - top);
            if (masked) {
                const ivec key = k - ivec{};
                const ivec lo = *(const ivec *)(low + i), hi = *(const ivec *)(high + i);
                w = ((key >= lo) & (key < hi)) ? w : vec{};
            }
            *x = w;
            sum += w;
        }
        const ivec moved = top > before;
        int any = 0;
        for (int j = 0; j < WIDTH; j++) any |= moved[j];
        if (any) {
            const vec rescale = exp2_of(before - top);
            *(vec *)(s->m + i) = top;
            *(vec *)(s->l + i) = *(vec *)(s->l + i) * rescale + sum;
            for (int d = 0; d < dim; d++) *(vec *)(s->o + d * LANES + i) *= rescale;
        } else {
            *(vec *)(s->l + i) += sum;
        }
    }
}

/* One task by lanes: adds the keys [start, end) of one split to a fresh `part`. */
static void split_by_lanes(const Call *c, const int64_t *task, const int64_t **piece, long start,
                           long end, const float *qt, const int32_t *low, const int32_t *high,
                           long sees_all_from, long sees_all_to, int lanes, State *part) {
    const long head = task[TASK_HEAD];
    const int dim = c->dim;
    float scores[BLOCK * LANES] __attribute__((aligned(64)));
    for (long block = start - start % BLOCK; block < end; block += BLOCK) {
        const long first = block < start ? start : block;
        const long last = block + BLOCK < end ? block + BLOCK : end;
        const int64_t *here = *piece = piece_at(*piece, first);
        for (long p = first; p < last;) {
            here = piece_at(here, p);
            const long stop = piece_end(here, last);
            const float *k = key_at(c, here, head, p);
            product(stop - p, dim, k, dim, 1, qt, scores + (p - first) * LANES, lanes, 0);
            p = stop;
        }
        const int masked = first < sees_all_from || last > sees_all_to;
        int32_t lo[LANES], hi[LANES];
        if (masked)
            for (int i = 0; i < lanes; i++) lo[i] = low[i] - first, hi[i] = high[i] - first;
        softmax_block(scores, last - first, part, dim, lanes, masked, lo, hi);
        here = *piece;
        for (long p = first; p < last;) {
            here = piece_at(here, p);
            const long stop = piece_end(here, last);
            const float *v = value_at(c, here, head, p);
            product(dim, stop - p, v, 1, dim, scores + (p - first) * LANES, part->o, lanes, 1);
            p = stop;
        }
    }
}
