/* Attention of a step's rows over paged float32 keys and values, with log-sum-exp.
 *
 * Owns: the arithmetic of one call (all sequences and heads of a step, one layer), its spread over
 * threads, and the writing of new keys and values. Does not own: which rows see which keys, or how
 * the work is cut: attention/native.py prepares both once per step as plain arrays.
 *
 * The idea: a LANE is one query row of one head, and vectors run across lanes. Scores are kept
 * transposed, S[key][lane], and so is the result, O[dim][lane]. Then both products take one number
 * of K or V at a time, broadcast, against vectors of lanes, so that keys and values are read as they
 * lie in the cache (no packing, no gathering of blocks), and the softmax over keys needs no sum
 * across a vector. A lane never meets another one, so that a row's bits do not depend on which rows
 * share its tile.
 *
 * Keys are taken by canonical splits at fixed absolute positions; each split is an attention of its
 * own, and splits are merged in order of position by their log-sum-exp (in base 2 here). Where the
 * keys of a split lie, in how many pieces, and in which call they come, changes no bit.
 *
 * Few lanes (a decode row of grouped heads) would leave vectors empty; they go through split_by_dim,
 * whose vectors run along the head's dimension instead.
 */
#include "vectors.h"

#define LANES 64       /* query rows times heads of one task */
#define BLOCK 64       /* keys scored at a time */
#define SPLIT 256      /* keys of a canonical split; a multiple of BLOCK */
#define MOST_DIM 256   /* largest head size */
#define FEW 8          /* most lanes of a slice that goes by dimension */
#define NOTHING -1e30f /* stands for -inf where arithmetic must stay finite */

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

/* A memory that holds KV: the device's pool, or host superblocks. The first key of a
 * piece lies at base + layer * layer_stride + head * head_stride + the piece's offset, the next ones
 * dim floats apart, each one's value value_offset on. All in floats. */
struct Region {
    const float *base;
    long layer_stride, value_offset, head_stride;
};

/* What a call computes; the fields that are the same for all tasks. */
typedef struct {
    const float *q;
    float *out, *lse, *partials;
    const int64_t *sequences, *pieces, *tasks;
    const Region *regions;
    long q_row, q_head, window, num_tasks;
    int kv_heads, group, dim, layer;
    float scale;
} Call;

/* Rows of `sequences`: first row of the step, rows, context, first piece, pieces.
 * Rows of `pieces`: position, offset, length, region; in order of position, without gaps.
 * Rows of `tasks`: sequence, KV head, first lane, lanes, first key, end key, partial (-1: none).
 * Lane l of a sequence is query row l / group, head l % group of the KV head. */
enum { SEQ_ROW, SEQ_ROWS, SEQ_CONTEXT, SEQ_PIECE, SEQ_PIECES, SEQ_FIELDS };
enum { PIECE_POSITION, PIECE_OFFSET, PIECE_LENGTH, PIECE_REGION, PIECE_FIELDS };
enum { TASK_SEQ, TASK_HEAD, TASK_LANE, TASK_LANES, TASK_START, TASK_END, TASK_PARTIAL,
        TASK_FIELDS };

/* Running result of a task: O[dim][LANES] unnormalised, with maximum and sum per lane. */
typedef struct {
    float o[MOST_DIM * LANES];
    float m[LANES], l[LANES];
} State;

static void clear(State *s, int dim, int lanes) {
    memset(s->o, 0, sizeof(float) * dim * LANES);
    for (int i = 0; i < lanes; i++) s->m[i] = NOTHING, s->l[i] = 0;
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

/* The piece that holds position `p`, from the hint on. */
static const int64_t *piece_at(const int64_t *piece, long p) {
    while (p >= piece[PIECE_POSITION] + piece[PIECE_LENGTH]) piece += PIECE_FIELDS;
    return piece;
}

static long piece_end(const int64_t *piece, long most) {
    const long end = piece[PIECE_POSITION] + piece[PIECE_LENGTH];
    return end < most ? end : most;
}

static const float *key_at(const Call *c, const int64_t *piece, long head, long p) {
    const Region *r = c->regions + piece[PIECE_REGION];
    return r->base + c->layer * r->layer_stride + head * r->head_stride +
           piece[PIECE_OFFSET] + (p - piece[PIECE_POSITION]) * c->dim;
}

static const float *value_at(const Call *c, const int64_t *piece, long head, long p) {
    return key_at(c, piece, head, p) + c->regions[piece[PIECE_REGION]].value_offset;
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

static inline const float *query(const Call *c, const int64_t *task, const int64_t *seq,
        long lane) {
    const long l = task[TASK_LANE] + lane;
    return c->q + (seq[SEQ_ROW] + l / c->group) * c->q_row +
           (task[TASK_HEAD] * c->group + l % c->group) * c->q_head;
}

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

/* A lane's result: normalised rows to `out` and `lse`, or raw ones to the task's partial. */
static void finish(const Call *c, const int64_t *task, const int64_t *seq, const State *s,
                   int by_dim) {
    const int dim = c->dim, lanes = task[TASK_LANES];
    const long heads = (long)c->kv_heads * c->group;
    for (int i = 0; i < lanes; i++) {
        float *row, weight = 1.f;
        if (task[TASK_PARTIAL] >= 0) {
            row = c->partials + (task[TASK_PARTIAL] + i) * (dim + 2);
            row[dim] = s->m[i];
            row[dim + 1] = s->l[i];
        } else {
            const long l = task[TASK_LANE] + i;
            const long at = (seq[SEQ_ROW] + l / c->group) * heads + task[TASK_HEAD] * c->group
                    + l % c->group;
            row = c->out + at * dim;
            c->lse[at] = s->l[i] == 0 ? -INFINITY : (s->m[i]
                    + log2f(s->l[i])) * 0.6931471805599453f;
            weight = s->l[i] == 0 ? 0.f : 1.f / s->l[i];
        }
        if (by_dim)
            for (int d = 0; d < dim; d++) row[d] = s->o[i * dim + d] * weight;
        else
            for (int d = 0; d < dim; d++) row[d] = s->o[d * LANES + i] * weight;
    }
}

static void run_task(const Call *c, const int64_t *task) {
    const int64_t *seq = c->sequences + task[TASK_SEQ] * SEQ_FIELDS;
    const int64_t *piece = c->pieces + seq[SEQ_PIECE] * PIECE_FIELDS;
    const int dim = c->dim, lanes = task[TASK_LANES];
    /* Of the whole slice, so that the tail of a chunk gets the bits that it would get elsewhere. */
    const int by_dim = seq[SEQ_ROWS] * c->group <= FEW && dim % WIDTH == 0;
    const int padded = (lanes
            + TILE_VECTORS * WIDTH - 1) / (TILE_VECTORS * WIDTH) * (TILE_VECTORS * WIDTH);
    State total, part;
    float q[MOST_DIM * LANES] __attribute__((aligned(64)));
    int32_t low[LANES] = {0}, high[LANES] = {0};
    const float scale = c->scale * 1.4426950408889634f;
    if (!by_dim) memset(q, 0, sizeof(float) * dim * LANES);
    for (int i = 0; i < lanes; i++) {
        const float *row = query(c, task, seq, i);
        const long position =
            seq[SEQ_CONTEXT] - seq[SEQ_ROWS] + (task[TASK_LANE] + i) / c->group;
        high[i] = position + 1;
        low[i] = c->window && position + 1 > c->window ? position + 1 - c->window : 0;
        for (int d = 0; d < dim; d++) q[by_dim ? i * dim + d : d * LANES + i] = row[d] * scale;
    }
    clear(&total, dim, padded);
    int first = 1;
    for (long start = task[TASK_START]; start < task[TASK_END];) {
        long end = (start / SPLIT + 1) * SPLIT;
        if (end > task[TASK_END]) end = task[TASK_END];
        State *into = first ? &total : &part;
        if (!first) clear(&part, dim, padded);
        if (by_dim) {
            split_few[lanes](c, task, &piece, start, end, q, low, high, into);
            if (!first) merge_by_dim(&total, &part, dim, lanes);
        } else {
            split_by_lanes(c, task, &piece, start, end, q, low, high, low[lanes - 1], high[0],
                    padded, into);
            if (!first) merge(&total, &part, dim, padded);
        }
        first = 0;
        start = end;
    }
    finish(c, task, seq, &total, by_dim);
}

/* What native.py must know of these, in this order: a mismatch would overrun the arrays above. */
extern "C" void longlens_attention_limits(long *limits) {
    limits[0] = LANES, limits[1] = SPLIT, limits[2] = MOST_DIM, limits[3] = FEW;
}

extern "C" void longlens_attend(const Call *call, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (long t = 0; t < call->num_tasks; t++) run_task(call, call->tasks + t * TASK_FIELDS);
}

/* Merges partials in order. Rows of `merges`: sequence, KV head, first lane, lanes, first partial,
 * parts; part j of lane i is partial first + j * lanes + i. */
extern "C" void longlens_merge(const Call *c, const int64_t *merges, long num_merges, int threads) {
    const int dim = c->dim;
    const long heads = (long)c->kv_heads * c->group;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (long t = 0; t < num_merges; t++) {
        const int64_t *m = merges + t * 6;
        const int64_t *seq = c->sequences + m[0] * SEQ_FIELDS;
        for (int i = 0; i < m[3]; i++) {
            const float *rows = c->partials + (m[4] + i) * (dim + 2);
            const long stride = m[3] * (dim + 2);
            const long l = m[2] + i;
            const long at = (seq[SEQ_ROW] + l / c->group) * heads + m[1] * c->group + l % c->group;
            float top = NOTHING, sum = 0;
            for (long j = 0; j < m[5]; j++)
                if (!(rows[j * stride + dim] <= top)) top = rows[j * stride + dim];
            float *out = c->out + at * dim;
            for (int d = 0; d < dim; d++) out[d] = 0;
            for (long j = 0; j < m[5]; j++) {
                const float *row = rows + j * stride;
                const float w = exp2f(row[dim] - top);
                sum += row[dim + 1] * w;
                for (int d = 0; d < dim; d++) out[d] += row[d] * w;
            }
            const float weight = sum == 0 ? 0.f : 1.f / sum;
            for (int d = 0; d < dim; d++) out[d] *= weight;
            c->lse[at] = sum == 0 ? -INFINITY : (top + log2f(sum)) * 0.6931471805599453f;
        }
    }
}

/* Puts rows of keys and values [rows][heads][dim] (k_row, v_row floats apart) into their slots. */
extern "C" void longlens_store(const float *k, long k_row, const float *v, long v_row, long rows,
                               long heads, long dim, const int64_t *slots, float *keys,
                               float *values, long head_stride, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 64)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            const long at = h * head_stride + slots[r] * dim;
            memcpy(keys + at, k + r * k_row + h * dim, sizeof(float) * dim);
            memcpy(values + at, v + r * v_row + h * dim, sizeof(float) * dim);
        }
}
