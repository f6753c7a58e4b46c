/* What attention.cpp is told, and the running result of a task.
 *
 * Owns: Call and the rows of its arrays, State, and where a key lies. Does not own: arithmetic over
 * keys (attention_lanes.h, attention_few.h).
 */
#pragma once
#include "vectors.h"

#define LANES 64       /* query rows times heads of one task */
#define BLOCK 64       /* keys scored at a time */
#define SPLIT 256      /* keys of a canonical split; a multiple of BLOCK */
#define MOST_DIM 256   /* largest head size */
#define FEW 8          /* most lanes of a slice that goes by dimension */
#define STAGED_KEYS 512 /* keys of a task that stages its own: two superblocks */
#define NOTHING -1e30f /* stands for -inf where arithmetic must stay finite */

/* A memory that holds KV: the device's pool, host superblocks, a staging buffer that holds one layer
 * of some of these, or a thread's own. The first key of a piece lies at base + layer * layer_stride + head * head_stride + the piece's offset, the next ones
 * dim floats apart, each one's value value_offset on. All in floats. */
struct Region {
    const float *base;
    long layer_stride, value_offset, head_stride;
};

/* What a call computes; the fields that are the same for all tasks. */
typedef struct {
    const float *q;
    float *out, *lse, *partials;
    struct State *states;
    float *staging;
    int64_t *copied;
    const int64_t *sequences, *pieces, *tasks;
    const Region *regions;
    long q_row, q_head, window, num_tasks, together;
    int kv_heads, group, dim, layer;
    float scale;
} Call;

/* Rows of `sequences`: first row of the step, rows, context, first piece, pieces.
 * Rows of `pieces`: position, offset, length, region, source; in order of position, without gaps.
 * A piece of region OWN is a superblock that lies at `source` in region HOST; whoever attends it
 * copies it first to `offset` in its thread's staging buffer. `staging` has one per thread, [K|V]
 * [STAGED_KEYS][dim], or is null without such pieces; `copied` counts bytes.
 * Rows of `tasks`: sequence, KV head, first lane, lanes, first key, end key, partial (-1: none),
 * state (-1: none), and which ends are open: the task goes on from its state, or is to be gone on
 * with. An open end lies between two splits.
 * Lane l of a sequence is query row l / group, head l % group of the KV head. */
enum { SEQ_ROW, SEQ_ROWS, SEQ_CONTEXT, SEQ_PIECE, SEQ_PIECES, SEQ_FIELDS };
enum { PIECE_POSITION, PIECE_OFFSET, PIECE_LENGTH, PIECE_REGION, PIECE_SOURCE, PIECE_FIELDS };
enum { DEVICE, HOST, STAGED, OWN, REGIONS };
enum { TASK_SEQ, TASK_HEAD, TASK_LANE, TASK_LANES, TASK_START, TASK_END, TASK_PARTIAL, TASK_STATE,
        TASK_OPEN, TASK_FIELDS };
enum { GOES_ON = 1, TO_BE_GONE_ON = 2 };

/* Running result of a task: O[dim][LANES] unnormalised, with maximum and sum per lane. */
struct State {
    float o[MOST_DIM * LANES];
    float m[LANES], l[LANES];
};

/* A thread's staging buffer. */
struct Staging {
    float *keys;
    int64_t held[2][2] = {{-1, -1}, {-1, -1}}; /* source and KV head of each superblock in it */
    int64_t copied = 0;
};

static void clear(State *s, int dim, int lanes) {
    memset(s->o, 0, sizeof(float) * dim * LANES);
    for (int i = 0; i < lanes; i++) s->m[i] = NOTHING, s->l[i] = 0;
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

static inline const float *query(const Call *c, const int64_t *task, const int64_t *seq,
        long lane) {
    const long l = task[TASK_LANE] + lane;
    return c->q + (seq[SEQ_ROW] + l / c->group) * c->q_row +
           (task[TASK_HEAD] * c->group + l % c->group) * c->q_head;
}
