/* Products of rows with weights, float32: y = x W^T, and what stands around it in a layer.
 *
 * Owns: the packed order of a weight, products on packed and on plain weights, the gated MLP's
 * first half, and their spread over threads. Does not own: which weight goes where
 * (models/native_layers.py).
 *
 * Packed order: panels of PANEL outputs, each [inputs][PANEL], the last one padded with zeros. A
 * tile multiplies up to TILE_ROWS rows with one panel: one number of x at a time, broadcast,
 * against vectors of outputs. The panel is read from end to end, so one row runs at the speed of
 * memory and many rows at that of the arithmetic units, from the same copy of the weights.
 *
 * An output is one chain of multiply-adds in order of the inputs, whatever the number of rows and
 * of threads: a row's bits do not depend on its company.
 */
#include "vectors.h"

#define PANEL (TILE_VECTORS * WIDTH)
#define BLOCK_ROWS 96 /* rows of x that stay in the core's cache while panels pass */
#define FEW_ROWS 8    /* rows whose embeddings one thread looks up sooner than it wakes others */

extern "C" long longlens_panel() { return PANEL; }

enum Store { SET, ADD };

/* rows x VECTORS of y from column `w` on; y and bias point at the same column. */
template <int ROWS, int VECTORS>
static inline __attribute__((always_inline)) void tile(long depth, const float *x, long x_row,
                                                       const float *w, float *y, long y_row,
                                                       const float *bias, Store store) {
    vec acc[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) acc[i][v] = bias ? *(const vec *)(bias + v * WIDTH)
                : vec{};
    for (long k = 0; k < depth; k++) {
        vec column[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) column[v] = *(const vec *)(w + k * PANEL + v * WIDTH);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            const vec one = splat(x[i * x_row + k]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) acc[i][v] += one * column[v];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            vec *at = (vec *)(y + i * y_row + v * WIDTH);
            *at = store == ADD ? *at + acc[i][v] : acc[i][v];
        }
}

template <int VECTORS>
static void some_rows(int rows, long depth, const float *x, long x_row, const float *w, float *y,
                      long y_row, const float *bias, Store store) {
    switch (rows) {
#define CASE(n) \
    case n: return tile<n, VECTORS>(depth, x, x_row, w, y, y_row, bias, store);
        CASE(1) CASE(2) CASE(3) CASE(4)
#if TILE_ROWS > 4
        CASE(5) CASE(6)
#endif
    }
}

/* `width` outputs (a whole panel, or vectors of it, or the ragged end of y) of `rows` rows. */
static void panel(int rows, long depth, const float *x, long x_row, const float *w, float *y,
                  long y_row, const float *bias, int width, Store store) {
    float edge[TILE_ROWS * PANEL], edge_bias[PANEL] = {};
    for (int i = 0; i < rows; i += TILE_ROWS) {
        const int n = rows - i < TILE_ROWS ? rows - i : TILE_ROWS;
        const float *from = x + i * x_row;
        float *to = y + i * y_row;
        if (width == PANEL) {
            some_rows<TILE_VECTORS>(n, depth, from, x_row, w, to, y_row, bias, store);
        } else if (width == PANEL / 2) {
            some_rows<TILE_VECTORS / 2>(n, depth, from, x_row, w, to, y_row, bias, store);
        } else {
            if (bias) memcpy(edge_bias, bias, sizeof(float) * width);
            some_rows<TILE_VECTORS>(n, depth, from, x_row, w, edge, PANEL, bias ? edge_bias : 0,
                    SET);
            for (int r = 0; r < n; r++)
                for (int j = 0; j < width; j++)
                    to[r * y_row + j] = (store == ADD ? to[r * y_row + j] : 0) + edge[r * PANEL
                            + j];
        }
    }
}

/* w [out][in] -> packed, which has room for whole panels. */
extern "C" void longlens_pack(const float *w, long in, long out, float *packed) {
    for (long p = 0; p * PANEL < out; p++)
        for (long k = 0; k < in; k++)
            for (long j = 0; j < PANEL; j++)
                packed[(p * in + k) * PANEL + j] = p * PANEL + j < out ? w[(p * PANEL + j) * in
                        + k] : 0;
}

/* y [rows][out] = (add ? y : 0) + x [rows][in] W^T + bias (null: none). Rows of x and y lie x_row
 * and y_row floats apart. */
extern "C" void longlens_linear(const float *x, long x_row, long rows, long in, const float *packed,
                                long out, const float *bias, float *y, long y_row, int add,
                                int threads) {
    const long panels = (out + PANEL - 1) / PANEL;
    const long blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const Store store = add ? ADD : SET;
    if (blocks == 1 && out % (PANEL / 2) == 0) {
        /* Every thread takes an equal stretch of half panels, so that few panels leave nobody idle. */
        const long halves = out / (PANEL / 2);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (long t = 0; t < threads; t++)
            for (long h = t * halves / threads, end = (t + 1) * halves / threads; h < end;) {
                const long width = h % 2 == 0 && h + 2 <= end ? PANEL : PANEL / 2;
                const long p = h / 2, first = h * (PANEL / 2);
                h += width / (PANEL / 2);
                panel(rows, in, x, x_row, packed + p * in * PANEL + first % PANEL, y + first, y_row,
                      bias ? bias + first : 0, width, store);
            }
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (long t = 0; t < panels * blocks; t++) {
        const long p = t % panels, first = t / panels * BLOCK_ROWS;
        const long n = rows - first < BLOCK_ROWS ? rows - first : BLOCK_ROWS;
        const long width = out - p * PANEL < PANEL ? out - p * PANEL : PANEL;
        panel(n, in, x + first * x_row, x_row, packed + p * in * PANEL, y + first * y_row
                + p * PANEL,
              y_row, bias ? bias + p * PANEL : 0, width, store);
    }
}

static inline vec sigmoid_weighted(vec x) { /* x / (1 + e^-x) */
    const vec down = exp2_of(((x < vec{}) ? x : -x) * 1.4426950408889634f); /* e^-|x| */
    return x * ((x < vec{}) ? down : splat(1.f)) / (splat(1.f) + down);
}

/* `width` outputs of `rows` rows of the gated product, from panels of gate and up. */
static void gated_panel(int rows, long in, const float *x, long x_row, const float *gates, float *y,
                        long inner, const float *bias, long width) {
    const float *ups = gates + in * PANEL;
    float gate[TILE_ROWS * PANEL], up[TILE_ROWS * PANEL];
    for (int i = 0; i < rows; i += TILE_ROWS) {
        const int n = rows - i < TILE_ROWS ? rows - i : TILE_ROWS;
        const float *from = x + i * x_row;
        some_rows<TILE_VECTORS>(n, in, from, x_row, gates, gate, PANEL, bias, SET);
        some_rows<TILE_VECTORS>(n, in, from, x_row, ups, up, PANEL, bias ? bias + PANEL : 0, SET);
        for (int j = 0; j < n * PANEL; j += WIDTH)
            *(vec *)(gate + j) = sigmoid_weighted(*(vec *)(gate + j)) * *(vec *)(up + j);
        for (int r = 0; r < n; r++)
            memcpy(y + (i + r) * inner, gate + r * PANEL, sizeof(float) * width);
    }
}

/* y [rows][inner] = silu(x G^T + g) * (x U^T + u); `packed` holds the panels of G and U in turn, as
 * `bias` does g and u. */
extern "C" void longlens_gated(const float *x, long x_row, long rows, long in, const float *packed,
                               long inner, const float *bias, float *y, int threads) {
    const long panels = (inner + PANEL - 1) / PANEL;
    const long blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const long stretch = blocks == 1 ? (panels + threads - 1) / threads : 1;
#pragma omp parallel for schedule(dynamic, stretch) num_threads(threads) if (threads > 1)
    for (long t = 0; t < panels * blocks; t++) {
        const long p = t % panels, first = t / panels * BLOCK_ROWS;
        const long n = rows - first < BLOCK_ROWS ? rows - first : BLOCK_ROWS;
        const long width = inner - p * PANEL < PANEL ? inner - p * PANEL : PANEL;
        gated_panel(n, in, x + first * x_row, x_row, packed + 2 * p * in * PANEL,
                    y + first * inner + p * PANEL, inner, bias ? bias + 2 * p * PANEL : 0, width);
    }
}

/* y [rows][in] = rows `ids` of a packed weight: an embedding table that the output head shares. */
extern "C" void longlens_embed(const int64_t *ids, long rows, long in, const float *packed,
        float *y,
                               int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > FEW_ROWS)
    for (long r = 0; r < rows; r++) {
        const float *from = packed + ids[r] / PANEL * in * PANEL + ids[r] % PANEL;
        for (long k = 0; k < in; k++) y[r * in + k] = from[k * PANEL];
    }
}
