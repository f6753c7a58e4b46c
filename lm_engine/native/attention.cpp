/* Attention of a step's rows over paged float32 keys and values, with log-sum-exp.
 *
 * Owns: the arithmetic of one call (all sequences and heads of a step, one layer), its spread over
 * threads, and the writing of new keys and values. Does not own: which rows see which keys, or how
 * the work is cut: attention/native_plan.py prepares both once per step as plain arrays.
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
 * keys of a split lie, in how many pieces, and in which call they come, changes no bit. So keys that
 * are at hand one part at a time are attended in one call per part: a task's running result waits in
 * its state between calls, and the arithmetic is that of one call, in the same order.
 *
 * Few lanes (a decode row of grouped heads) would leave vectors empty; they go through split_by_dim,
 * whose vectors run along the head's dimension instead.
 */
#include <omp.h>

#include "attention_few.h"
#include "attention_lanes.h"

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

/* Brings the cold superblocks of a task's keys into its thread's staging buffer, unless they are
 * there already: of tasks in a row that share them, the first one copies. */
static void stage(const Call *c, const int64_t *task, const int64_t *piece, Staging *own) {
    const Region *from = c->regions + HOST;
    const long half = STAGED_KEYS * (long)c->dim;
    piece = piece_at(piece, task[TASK_START]);
    for (; piece[PIECE_POSITION] < task[TASK_END]; piece += PIECE_FIELDS) {
        if (piece[PIECE_REGION] == OWN) {
            const long place = piece[PIECE_OFFSET] / (piece[PIECE_LENGTH] * c->dim);
            const int64_t key[2] = {piece[PIECE_SOURCE], task[TASK_HEAD]};
            if (memcmp(own->held[place], key, sizeof key) != 0) {
                const float *k = from->base + c->layer * from->layer_stride
                        + task[TASK_HEAD] * from->head_stride + piece[PIECE_SOURCE];
                float *to = own->keys + piece[PIECE_OFFSET];
                const long bytes = sizeof(float) * piece[PIECE_LENGTH] * c->dim;
                memcpy(to, k, bytes);
                memcpy(to + half, k + from->value_offset, bytes);
                memcpy(own->held[place], key, sizeof key);
                own->copied += 2 * bytes;
            }
        }
        if (piece[PIECE_POSITION] + piece[PIECE_LENGTH] >= task[TASK_END]) break;
    }
}

static void run_task(const Call *shared, const int64_t *task, Staging *own) {
    Region regions[REGIONS];
    Call call = *shared;
    const Call *c = &call;
    memcpy(regions, shared->regions, sizeof regions);
    regions[OWN] = Region{own->keys, 0, STAGED_KEYS * (long)c->dim, 0};
    call.regions = regions;
    const int64_t *seq = c->sequences + task[TASK_SEQ] * SEQ_FIELDS;
    const int64_t *piece = c->pieces + seq[SEQ_PIECE] * PIECE_FIELDS;
    const int dim = c->dim, lanes = task[TASK_LANES];
    /* Of the whole slice, so that the tail of a chunk gets the bits that it would get elsewhere. */
    const int by_dim = seq[SEQ_ROWS] * c->group <= FEW && dim % WIDTH == 0;
    const int padded = (lanes
            + TILE_VECTORS * WIDTH - 1) / (TILE_VECTORS * WIDTH) * (TILE_VECTORS * WIDTH);
    if (c->staging) stage(c, task, piece, own);
    State fresh, part;
    State *total = task[TASK_STATE] < 0 ? &fresh : c->states + task[TASK_STATE];
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
    int first = !(task[TASK_OPEN] & GOES_ON);
    if (first) clear(total, dim, padded);
    for (long start = task[TASK_START]; start < task[TASK_END];) {
        long end = (start / SPLIT + 1) * SPLIT;
        if (end > task[TASK_END]) end = task[TASK_END];
        State *into = first ? total : &part;
        if (!first) clear(&part, dim, padded);
        if (by_dim) {
            split_few[lanes](c, task, &piece, start, end, q, low, high, into);
            if (!first) merge_by_dim(total, &part, dim, lanes);
        } else {
            split_by_lanes(c, task, &piece, start, end, q, low, high, low[lanes - 1], high[0],
                    padded, into);
            if (!first) merge(total, &part, dim, padded);
        }
        first = 0;
        start = end;
    }
    if (!(task[TASK_OPEN] & TO_BE_GONE_ON)) finish(c, task, seq, total, by_dim);
}

/* What native_plan.py must know of these, in this order: a mismatch would overrun arrays. */
extern "C" void longlens_attention_limits(long *limits) {
    limits[0] = LANES, limits[1] = SPLIT, limits[2] = MOST_DIM, limits[3] = FEW;
    limits[4] = sizeof(State), limits[5] = STAGED_KEYS;
}

extern "C" void longlens_attend(const Call *call, int threads) {
    int64_t copied = 0;
#pragma omp parallel num_threads(threads) reduction(+ : copied) if (threads > 1)
    {
        Staging own = {call->staging + omp_get_thread_num() * STAGED_KEYS * 2 * (long)call->dim};
#pragma omp for schedule(dynamic, call->together)
        for (long t = 0; t < call->num_tasks; t++)
            run_task(call, call->tasks + t * TASK_FIELDS, &own);
        copied += own.copied;
    }
    *call->copied += copied;
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
