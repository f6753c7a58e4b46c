/* Attention of up to FEW lanes over one split, vectors along the head's dimension: a decode row of
 * grouped heads would leave vectors of lanes empty.
 *
 * Owns: split_few and the merge of its results. Does not own: tasks (attention.cpp).
 */
#pragma once
#include "attention.h"

/* scores[i][k] of KEYS keys from k on, for N lanes. */
template <int N, int KEYS>
static inline __attribute__((always_inline)) void score_keys(int dim, const float *k,
        const float *q,
                                                             float (*scores)[SPLIT], long at) {
    vec acc[KEYS][N] = {};
    for (int d = 0; d < dim; d += WIDTH)
#pragma GCC unroll 8
        for (int j = 0; j < KEYS; j++) {
            const vec key = *(const vec *)(k + j * dim + d);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) acc[j][i] += key * *(const vec *)(q + i * dim + d);
        }
#pragma GCC unroll 8
    for (int j = 0; j < KEYS; j++)
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) scores[i][at + j] = sum_of(acc[j][i]);
}

/* o[i][d ... d + VECTORS) += sum over n keys of scores[i][key] * v[key], for N lanes. */
template <int N, int VECTORS>
static inline __attribute__((always_inline)) void add_values(int dim, long n, const float *v,
                                                             const float (*scores)[SPLIT], long at,
                                                             float *o) {
    vec acc[N][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) acc[i][j] = *(const vec *)(o + i * dim + j * WIDTH);
    for (long k = 0; k < n; k++) {
        vec value[VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) value[j] = *(const vec *)(v + k * dim + j * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            const vec weight = splat(scores[i][at + k]);
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) acc[i][j] += weight * value[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) *(vec *)(o + i * dim + j * WIDTH) = acc[i][j];
}

/* One task by dimension: the same for N <= FEW lanes; the state holds O[lane][dim] here. */
template <int N>
static void split_by_dim(const Call *c, const int64_t *task, const int64_t **piece, long start,
                         long end, const float *q, const int32_t *low, const int32_t *high,
                         State *part) {
    const long head = task[TASK_HEAD];
    const int dim = c->dim;
    float scores[FEW][SPLIT] __attribute__((aligned(64)));
    const int64_t *here = *piece = piece_at(*piece, start);
    for (long p = start; p < end;) {
        here = piece_at(here, p);
        const long stop = piece_end(here, end);
        const float *k = key_at(c, here, head, p);
        constexpr int KEYS = N > 4 ? 2 : 4;
        for (; p + KEYS <= stop; p += KEYS, k += KEYS * dim)
            score_keys<N, KEYS>(dim, k, q, scores, p - start);
        for (; p < stop; p++, k += dim) score_keys<N, 1>(dim, k, q, scores, p - start);
    }
    const int n = end - start, padded = (n + WIDTH - 1) / WIDTH * WIDTH;
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < padded; k++)
            if (k >= n || start + k < low[i] || start + k >= high[i]) scores[i][k] = NOTHING;
        float top = NOTHING;
        for (int k = 0; k < n; k++) top = scores[i][k] > top ? scores[i][k] : top;
        vec sum = {};
        for (int k = 0; k < padded; k += WIDTH) {
            vec *x = (vec *)(scores[i] + k);
            const vec w = exp2_of(*x - top);
            *x = (*x == splat(NOTHING)) ? vec{} : w;
            sum += *x;
        }
        part->m[i] = top;
        part->l[i] = sum_of(sum);
    }
    here = *piece;
    for (long p = start; p < end;) {
        here = piece_at(here, p);
        const long stop = piece_end(here, end);
        const float *v = value_at(c, here, head, p);
        constexpr int VECTORS = N > 4 ? 2 : 4;
        int d = 0;
        for (; d + VECTORS * WIDTH <= dim; d += VECTORS * WIDTH)
            add_values<N, VECTORS>(dim, stop - p, v + d, scores, p - start, part->o + d);
        for (; d < dim; d += WIDTH)
            add_values<N, 1>(dim, stop - p, v + d, scores, p - start, part->o + d);
        p = stop;
    }
}

typedef void SplitByDim(const Call *, const int64_t *, const int64_t **, long, long, const float *,
                        const int32_t *, const int32_t *, State *);
static SplitByDim *const split_few[FEW + 1] = {
    0, split_by_dim<1>, split_by_dim<2>, split_by_dim<3>, split_by_dim<4>,
    split_by_dim<5>, split_by_dim<6>, split_by_dim<7>, split_by_dim<8>};

static void merge_by_dim(State *total, const State *part, int dim, int lanes) {
    for (int i = 0; i < lanes; i++) {
        const float m = total->m[i] > part->m[i] ? total->m[i] : part->m[i];
        const float wa = exp2f(total->m[i] - m), wb = exp2f(part->m[i] - m);
        total->m[i] = m;
        total->l[i] = total->l[i] * wa + part->l[i] * wb;
        for (int d = 0; d < dim; d++)
            total->o[i * dim + d] = total->o[i * dim + d] * wa + part->o[i * dim + d] * wb;
    }
}
