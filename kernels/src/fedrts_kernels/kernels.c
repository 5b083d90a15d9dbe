/* The kernels, compiled once for every instruction set (ENTRY names the result).

   Sums have one fixed order, and one thread computes a program: equal inputs give equal bits, however many programs run beside it.
   NaN passes through all operations, so that a diverged model is noticed. */
#include "kernels.h"

#include <math.h>
#include <string.h>

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__)
#define VL 8
#else
#define VL 4
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#ifndef ENTRY
#define ENTRY fedrts_run_portable
#endif
#define PARTS (LANES / VL) /* vectors that 16 samples take */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 18")

typedef float vec __attribute__((vector_size(4 * VL)));
typedef float near_vec __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t bits __attribute__((vector_size(4 * VL)));
typedef double sum_t __attribute__((may_alias)); /* sums in the arena, which is of floats */
typedef uint32_t ubits __attribute__((vector_size(4 * VL)));

INLINE vec load(const float *p) { return *(const near_vec *)p; }
INLINE void store(float *p, vec v) { *(near_vec *)p = v; }
INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec where(bits mask, vec v) { return (vec)(mask & (bits)v); }

#if defined(__AVX512F__)
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); } /* b where either is NaN */
INLINE vec passed(vec gate, vec v) {
    return (vec)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)gate, _mm512_setzero_ps(), _CMP_NLE_UQ), (__m512)v);
}
#elif defined(__AVX2__)
INLINE vec larger(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec passed(vec gate, vec v) {
    return (vec)_mm256_and_ps(_mm256_cmp_ps((__m256)gate, _mm256_setzero_ps(), _CMP_NLE_UQ), (__m256)v);
}
#elif defined(__SSE2__)
INLINE vec larger(vec a, vec b) { return (vec)_mm_max_ps((__m128)a, (__m128)b); }
INLINE vec passed(vec gate, vec v) { return (vec)_mm_and_ps(_mm_cmpnle_ps((__m128)gate, _mm_setzero_ps()), (__m128)v); }
#else
INLINE vec larger(vec a, vec b) {
    bits first = a > b;
    return (vec)(((bits)a & first) | ((bits)b & ~first));
}
INLINE vec passed(vec gate, vec v) { return (vec)((bits)v & ~(gate <= 0.0f)); }
#endif
INLINE vec positive(vec v) { return larger((vec){0}, v); }

/* The sum of 16 neighbours, by halves. */
INLINE float sum16(const float *p) {
    typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
    four s = (*(const four *)p + *(const four *)(p + 8)) + (*(const four *)(p + 4) + *(const four *)(p + 12));
    return (s[0] + s[2]) + (s[1] + s[3]);
}

/* ---- geometry ---- */

INLINE int64_t row_of(const tensor *t) { return t->channels * (t->width + 2 * t->border) * LANES; }
INLINE int64_t block_of(const tensor *t) { return (t->height + 2 * t->border) * row_of(t); }
INLINE float *cell(float *arena, const tensor *t, int64_t b, int64_t y, int64_t c) {
    return arena + t->at + b * block_of(t) + (y + t->border) * row_of(t) + (c * (t->width + 2 * t->border) + t->border) * LANES;
}
#define EACH_ROW(t) \
    for (int64_t b = 0; b < (t)->blocks; b++) \
        for (int64_t y = 0; y < (t)->height; y++) \
            for (int64_t c = 0; c < (t)->channels; c++)
#define EACH(i, width) for (int64_t i = 0; i < (width)*LANES; i += VL)

typedef struct {
    bits part[PARTS];
    int64_t tail; /* samples in the last block of 16 */
} lanes;

static lanes lanes_of(const context *with) {
    lanes found;
    int32_t flags[LANES];
    found.tail = with->samples - (with->samples - 1) / LANES * LANES;
    for (int i = 0; i < LANES; i++) flags[i] = i < found.tail ? -1 : 0;
    memcpy(found.part, flags, sizeof flags);
    return found;
}
/* How many positions of a row hold 16 samples each; the others hold `tail`. */
INLINE int64_t whole(const lanes *l, const tensor *t, int64_t wide, int64_t b) {
    if (l->tail == LANES) return t->width;
    return wide ? t->width - 1 : b == t->blocks - 1 ? 0 : t->width;
}

/* ---- links ---- */

#if VL == 16
#define CHAINS 4
#else
#define CHAINS 2
#endif
#define MOST 16 /* vectors of accumulators */

/* How a tile's mean and squared deviations join those before it (Chan, Golub and LeVeque, 1983). */
typedef struct {
    float *at; /* [outs][2][16] */
    int64_t count;
    const bits *only; /* NULL: all lanes */
} moments;

INLINE void joined(float *at, const bits *only, int part, vec mean, vec squares, float share, float spread) {
    float *m = at + part * VL, *q = at + LANES + part * VL;
    vec old = load(m), rest = load(q), step = mean - old, new_mean = old + step * share, new_rest = rest + squares + step * step * spread;
    if (only) {
        new_mean = (vec)(((bits)new_mean & only[part]) | ((bits)old & ~only[part]));
        new_rest = (vec)(((bits)new_rest & only[part]) | ((bits)rest & ~only[part]));
    }
    store(m, new_mean);
    store(q, new_rest);
}

/* The links (i, k) of a window that read the input at row y and column x of what R rows of P positions read. */
#define EACH_IN_WINDOW(R, P, y, x) \
    UNROLL for (int i = 0; i < WINDOW; i++) \
        UNROLL for (int k = 0; k < WINDOW; k++) \
            if (y >= i && y - i < (R) && x >= k && x - k < (P))

/* A whole window's part of the sums of R rows of P positions. */
INLINE void windowed(const int R, const int P, vec *a, const float *restrict s, const int64_t in_row, const float *restrict w) {
    UNROLL for (int y = 0; y < R + WINDOW - 1; y++)
        UNROLL for (int x = 0; x < P + WINDOW - 1; x++)
            UNROLL for (int h = 0; h < PARTS; h++) {
                const vec v = load(s + y * in_row + x * LANES + h * VL);
                EACH_IN_WINDOW(R, P, y, x) a[((y - i) * P + x - k) * PARTS + h] += w[i * WINDOW + k] * v;
            }
}

/* R rows of P positions of all outputs, U sums at a time: as many accumulators as there are registers. The links of one group of channels
   (`start` to `end` of each output), added to what earlier groups left there (`go_on`); `bias` with the first group, after the last one what
   follows a sum. W: WINDOW if links come in windows. */
INLINE void tile(const int W, const int R, const int P, const int U, const int64_t ix, const int64_t ox, const int counts, const int go_on,
                 const int last, const gather_op *g, const float *restrict in, float *restrict out, const int32_t *restrict start,
                 const int32_t *restrict end, const int32_t *restrict offsets, const float *restrict values, const float *restrict bias,
                 moments *count) {
    const int64_t in_row = g->in_row, out_row = g->out_row;
    const int relu = last && g->relu, counting = counts && last;
    float share = 0, spread = 0;
    const float inverse = 1.0f / (R * P);
    if (counting) {
        double n = (double)count->count, more = R * P;
        share = (float)(more / (n + more));
        spread = (float)(n * more / (n + more));
    }
    for (int64_t o = 0; o < g->outs; o++, out += g->out_channel) {
        int32_t j = start[o];
        const int32_t stop = end[o];
        if (j == stop && go_on && !bias && !relu && !counting) continue;
        vec a[MOST];
        if (go_on) {
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int p = 0; p < P; p++)
                    UNROLL for (int h = 0; h < PARTS; h++) a[(r * P + p) * PARTS + h] = load(out + r * out_row + p * ox + h * VL);
            if (bias) UNROLL for (int i = 0; i < R * P * PARTS; i++) a[i] += bias[o];
        } else {
            const vec first = splat(bias ? bias[o] : 0.0f);
            UNROLL for (int i = 0; i < R * P * PARTS; i++) a[i] = first;
        }
        UNROLL for (int i = R * P * PARTS; i < U * R * P * PARTS; i++) a[i] = (vec){0};
        if (W == WINDOW)
            for (; j < stop; j += WINDOW * WINDOW) windowed(R, P, a, in + offsets[j], in_row, values + j);
        for (; j + U <= stop; j += U) {
            UNROLL for (int u = 0; u < U; u++) {
                const float *s = in + offsets[j + u];
                const float w = values[j + u];
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int p = 0; p < P; p++)
                        UNROLL for (int h = 0; h < PARTS; h++)
                            a[((u * R + r) * P + p) * PARTS + h] += w * load(s + r * in_row + p * ix + h * VL);
            }
        }
        if (U > 1)
            for (; j < stop; j++) {
                const float *s = in + offsets[j];
                const float w = values[j];
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int p = 0; p < P; p++)
                        UNROLL for (int h = 0; h < PARTS; h++) a[(r * P + p) * PARTS + h] += w * load(s + r * in_row + p * ix + h * VL);
            }
        UNROLL for (int u = 1; u < U; u++)
            UNROLL for (int i = 0; i < R * P * PARTS; i++) a[i] += a[u * R * P * PARTS + i];
        if (relu) UNROLL for (int i = 0; i < R * P * PARTS; i++) a[i] = positive(a[i]);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int p = 0; p < P; p++)
                UNROLL for (int h = 0; h < PARTS; h++) store(out + r * out_row + p * ox + h * VL, a[(r * P + p) * PARTS + h]);
        if (counting)
            UNROLL for (int h = 0; h < PARTS; h++) {
                vec sum = a[h], squares = {0};
                UNROLL for (int i = 1; i < R * P; i++) sum += a[i * PARTS + h];
                const vec mean = sum * inverse;
                UNROLL for (int i = 0; i < R * P; i++) {
                    vec d = a[i * PARTS + h] - mean;
                    squares += d * d;
                }
                joined(count->at + o * 2 * LANES, count->only, h, mean, squares, share, spread);
            }
    }
    if (counting) count->count += R * P;
}

/* Strides of one and two positions are worth code of their own. */
#define BY_STRIDE(name, counts, R, P, U) \
    static __attribute__((noinline)) void name(const int go_on, const int last, const gather_op *g, const float *in, float *out, \
                                               const int32_t *start, const int32_t *end, const int32_t *offsets, const float *values, \
                                               const float *bias, moments *count) { \
        if (g->window == WINDOW) tile(WINDOW, R, P, U, LANES, LANES, counts, go_on, last, g, in, out, start, end, offsets, values, bias, count); \
        else if (g->in_col == LANES && g->out_col == LANES) \
            tile(1, R, P, U, LANES, LANES, counts, go_on, last, g, in, out, start, end, offsets, values, bias, count); \
        else if (g->in_col == 2 * LANES && g->out_col == LANES) \
            tile(1, R, P, U, 2 * LANES, LANES, counts, go_on, last, g, in, out, start, end, offsets, values, bias, count); \
        else if (g->in_col == LANES && g->out_col == 2 * LANES) \
            tile(1, R, P, U, LANES, 2 * LANES, counts, go_on, last, g, in, out, start, end, offsets, values, bias, count); \
        else tile(1, R, P, U, g->in_col, g->out_col, counts, go_on, last, g, in, out, start, end, offsets, values, bias, count); \
    }
#define SHAPE(R, P, U) \
    BY_STRIDE(tile_##R##_##P, 0, R, P, U) \
    BY_STRIDE(counted_tile_##R##_##P, 1, R, P, U)
#if VL == 16
SHAPE(1, 16, 1) SHAPE(1, 8, 1) SHAPE(1, 4, 2) SHAPE(1, 2, 4) SHAPE(1, 1, 8)
SHAPE(2, 8, 1) SHAPE(2, 4, 1) SHAPE(2, 2, 2) SHAPE(2, 1, 4)
SHAPE(4, 4, 1) SHAPE(4, 2, 1) SHAPE(4, 1, 2)
#elif VL == 8
SHAPE(1, 4, 1) SHAPE(1, 2, 2) SHAPE(1, 1, 4)
#else
SHAPE(1, 2, 1) SHAPE(1, 1, 2)
#endif

static void gather_rows(const int R, const gather_op *g, const context *with, const float *in, float *out, moments *count) {
    const int32_t *starts = with->index + g->starts, *offsets = with->index + g->offsets;
    const float *values = (g->values_in_arena ? with->arena : with->weights) + g->values;
    const float *biases = g->bias < 0 ? 0 : with->weights + g->bias;
    int64_t x = 0;
#define TILES(R, P) \
    for (; x + (P) <= g->cols; x += (P)) \
        for (int64_t i = 0; i < g->groups; i++) { \
            const int32_t *start = starts + i * g->outs, *end = start + g->outs; \
            const int go_on = i > 0 || g->add, last = i == g->groups - 1; \
            const float *bias = i ? 0 : biases; \
            if (g->statistics >= 0) \
                counted_tile_##R##_##P(go_on, last, g, in + x * g->in_col, out + x * g->out_col, start, end, offsets, values, bias, count); \
            else tile_##R##_##P(go_on, last, g, in + x * g->in_col, out + x * g->out_col, start, end, offsets, values, bias, count); \
        }
#if VL == 16
    if (R == 1) { TILES(1, 16) TILES(1, 8) TILES(1, 4) TILES(1, 2) TILES(1, 1) }
    if (R == 2) { TILES(2, 8) TILES(2, 4) TILES(2, 2) TILES(2, 1) }
    if (R == 4) { TILES(4, 4) TILES(4, 2) TILES(4, 1) }
#elif VL == 8
    (void)R;
    TILES(1, 4) TILES(1, 2) TILES(1, 1)
#else
    (void)R;
    TILES(1, 2) TILES(1, 1)
#endif
#undef TILES
}

INLINE void fetch(const float *p, int64_t floats) {
    for (int64_t i = 0; i < floats; i += LANES) __builtin_prefetch(p + i, 0, 2);
}

/* Rows at a time, so that narrow images fill the registers too. */
INLINE int64_t rows_at_once(int64_t cols) { return VL < 16 || cols >= 16 ? 1 : cols >= 8 ? 2 : 4; }

static void gather(const gather_op *g, const context *with, const lanes *l) {
    const int64_t at_once = rows_at_once(g->cols);
    moments count = {with->arena + g->statistics, 0, 0};
    if (g->statistics >= 0) memset(count.at, 0, g->outs * 2 * LANES * sizeof(float));
    for (int64_t b = 0; b < g->blocks; b++) {
        const float *in = with->arena + g->in + b * g->in_block;
        float *out = with->arena + g->out + b * g->out_block;
        int64_t y = 0;
        if (g->statistics >= 0 && b == g->blocks - 1 && l->tail < LANES) count.only = l->part;
#define ROWS(R) gather_rows(R, g, with, in + y * g->in_row, out + y * g->out_row, &count)
        if (at_once == 4)
            for (; y + 4 <= g->rows; y += 4) ROWS(4);
        if (at_once >= 2)
            for (; y + 2 <= g->rows; y += 2) ROWS(2);
        for (; y < g->rows; y++) {
            if (y + 1 < g->rows && g->in_col == LANES) fetch(in + (y + 2) * g->in_row, g->in_row);
            ROWS(1);
        }
#undef ROWS
    }
}

/* A link's sum so far: over its samples if that was `only` all there is. */
INLINE void kept(const int only, const vec *a, float *t, float *gradient) {
    if (only) {
#if defined(__AVX512F__)
        *gradient = _mm512_reduce_add_ps((__m512)a[0]);
#else
        float all[LANES];
        UNROLL for (int h = 0; h < PARTS; h++) store(all + h * VL, a[h]);
        *gradient = sum16(all);
#endif
    } else {
        UNROLL for (int h = 0; h < PARTS; h++) store(t + h * VL, a[h]);
    }
}

/* The links of a whole window; `d`: the output's gradient at R rows of P positions. */
INLINE void weight_window(const int R, const int P, const int only, const int first, const float *restrict s, const int64_t in_row,
                          const vec *d, float *restrict t, float *restrict gradient) {
    vec a[WINDOW * WINDOW * PARTS];
    UNROLL for (int i = 0; i < WINDOW * WINDOW * PARTS; i++) a[i] = only || first ? (vec){0} : load(t + i * VL);
    UNROLL for (int x = 0; x < P + WINDOW - 1; x++)
        UNROLL for (int y = 0; y < R + WINDOW - 1; y++) /* innermost, so that all nine sums take turns */
            UNROLL for (int h = 0; h < PARTS; h++) {
                const vec v = load(s + y * in_row + x * LANES + h * VL);
                EACH_IN_WINDOW(R, P, y, x) a[(i * WINDOW + k) * PARTS + h] += d[((y - i) * P + x - k) * PARTS + h] * v;
            }
    UNROLL for (int i = 0; i < WINDOW * WINDOW; i++) kept(only, a + i * PARTS, t + i * LANES, gradient + i);
}

/* One group's links. `only`: this tile has all positions, and needs no scratch; `first`: nothing is in the scratch yet. */
INLINE void weight_tile(const int W, const int R, const int P, const int64_t ix, const int only, const int first, const weight_op *g,
                        const float *restrict in, const float *restrict slope, const int32_t *restrict start, const int32_t *restrict end,
                        const int32_t *restrict offsets, float *restrict scratch, float *restrict gradient) {
    float *t = scratch;
    for (int64_t o = 0; o < g->outs; o++, slope += g->slope_channel) {
        if (start[o] == end[o]) continue;
        vec d[MOST];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int p = 0; p < P; p++)
                UNROLL for (int h = 0; h < PARTS; h++) d[(r * P + p) * PARTS + h] = load(slope + r * g->slope_row + p * LANES + h * VL);
        int32_t j = start[o];
        if (W == WINDOW)
            for (; j < end[o]; j += WINDOW * WINDOW, t += WINDOW * WINDOW * LANES)
                weight_window(R, P, only, first, in + offsets[j], g->in_row, d, t, gradient + j);
        for (; j < end[o]; j++, t += LANES) {
            const float *s = in + offsets[j];
            vec a[CHAINS * PARTS];
            UNROLL for (int i = 0; i < CHAINS * PARTS; i++) a[i] = i < PARTS && !only && !first ? load(t + i * VL) : (vec){0};
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int p = 0; p < P; p++)
                    UNROLL for (int h = 0; h < PARTS; h++)
                        a[((r * P + p) % CHAINS) * PARTS + h] += d[(r * P + p) * PARTS + h] * load(s + r * g->in_row + p * ix + h * VL);
            UNROLL for (int i = PARTS; i < CHAINS * PARTS; i++) a[i % PARTS] += a[i];
            kept(only, a, t, gradient + j);
        }
    }
}

INLINE void weight_rows(const int W, const int R, const int64_t ix, const weight_op *g, const float *in, const float *slope, const int32_t *start,
                        const int32_t *end, const int32_t *offsets, float *scratch, int *begun) {
    int64_t x = 0;
#define TILES(P) \
    for (; x + (P) <= g->cols; x += (P)) { \
        if (*begun) weight_tile(W, R, P, ix, 0, 0, g, in + x * ix, slope + x * LANES, start, end, offsets, scratch, 0); \
        else weight_tile(W, R, P, ix, 0, 1, g, in + x * ix, slope + x * LANES, start, end, offsets, scratch, 0); \
        *begun = 1; \
    }
#if VL == 16
    if (R == 1) { TILES(16) }
    if (R <= 2) { TILES(8) }
    TILES(4) TILES(2) TILES(1)
#elif VL == 8
    TILES(4) TILES(2) TILES(1)
#else
    TILES(2) TILES(1)
#endif
#undef TILES
}

/* Group by group, so that the scratch of all positions stays in a cache too. */
INLINE void weight_all(const int W, const int64_t ix, const weight_op *g, const context *with) {
    const int32_t *offsets = with->index + g->offsets;
    float *scratch = with->arena + g->scratch, *gradient = with->gradient + g->gradient;
    const int64_t at_once = rows_at_once(g->cols);
    for (int64_t i = 0; i < g->groups; i++) {
        const int32_t *start = with->index + g->starts + i * g->outs, *end = start + g->outs;
        if (g->blocks == 1) { /* one tile may have it all */
            const float *in = with->arena + g->in, *slope = with->arena + g->slope;
#define ONLY(R, P) \
    if (g->rows == (R) && g->cols == (P)) { \
        weight_tile(W, R, P, ix, 1, 1, g, in, slope, start, end, offsets, scratch, gradient); \
        continue; \
    }
            ONLY(1, 1) ONLY(1, 2)
#if VL >= 8
            ONLY(1, 3) ONLY(1, 4)
#endif
#if VL == 16
            ONLY(1, 5) ONLY(1, 6) ONLY(1, 7) ONLY(1, 8) ONLY(2, 2) ONLY(4, 4)
#endif
#undef ONLY
        }
        int begun = 0;
        for (int64_t b = 0; b < g->blocks; b++) {
            const float *in = with->arena + g->in + b * g->in_block, *slope = with->arena + g->slope + b * g->slope_block;
            int64_t y = 0;
#define ROWS(R) weight_rows(W, R, ix, g, in + y * g->in_row, slope + y * g->slope_row, start, end, offsets, scratch, &begun)
            if (at_once == 4)
                for (; y + 4 <= g->rows; y += 4) ROWS(4);
            if (at_once >= 2)
                for (; y + 2 <= g->rows; y += 2) ROWS(2);
            for (; y < g->rows; y++) {
                if (y + 1 < g->rows && ix == LANES) {
                    if (g->groups == 1) fetch(in + (y + 2) * g->in_row, g->in_row);
                    fetch(slope + (y + 1) * g->slope_row, g->slope_row);
                }
                ROWS(1);
            }
#undef ROWS
        }
        const float *t = scratch;
        for (int64_t o = 0; o < g->outs; o++)
            for (int64_t j = start[o]; j < end[o]; j++, t += LANES) gradient[j] = sum16(t);
    }
}

static void weight(const weight_op *g, const context *with) {
    if (g->window == WINDOW) weight_all(WINDOW, LANES, g, with);
    else if (g->in_col == LANES) weight_all(1, LANES, g, with);
    else if (g->in_col == 2 * LANES) weight_all(1, 2 * LANES, g, with);
    else weight_all(1, g->in_col, g, with);
}

static void permute(const permute_op *o, const context *with) {
    const float *values = with->weights + o->values;
    const int32_t *order = with->index + o->order;
    float *out = with->arena + o->out;
    for (int64_t i = 0; i < o->links; i++) out[i] = values[order[i]];
}

/* ---- normalisation ---- */

/* Mean and biased variance of every channel over the batch, from lanes that were counted beside the gather. */
static void counted(const norm_op *o, const context *with, const lanes *l, int64_t c, double *mean, double *variance) {
    const float *m = with->arena + o->statistics + c * 2 * LANES, *q = m + LANES;
    const double positions = (double)(o->in.height * o->in.width);
    double n = 0, centre = 0, squares = 0;
    for (int i = 0; i < LANES; i++) {
        double more = positions * (double)(o->in.blocks - (i >= l->tail));
        if (more == 0) continue;
        double step = m[i] - centre;
        centre += step * more / (n + more);
        squares += q[i] + step * step * n * more / (n + more);
        n += more;
    }
    *mean = centre;
    *variance = squares / n;
}

/* The same in two passes, for whatever was not. `sums` [channels] gets Σ x, or Σ (x − mean)² with `means`. */
static void summed(const norm_op *o, const context *with, const lanes *l, const sum_t *means, sum_t *sums) {
    for (int64_t c = 0; c < o->in.channels; c++) sums[c] = 0;
    EACH_ROW(&o->in) {
        const float *s = cell(with->arena, &o->in, b, y, c), shift = means ? (float)means[c] : 0.0f;
        vec all[PARTS] = {{0}};
        float flat[LANES];
        int64_t full = whole(l, &o->in, o->wide, b);
        for (int64_t x = 0; x < o->in.width; x++)
            UNROLL for (int h = 0; h < PARTS; h++) {
                vec v = load(s + x * LANES + h * VL) - shift;
                if (means) v = v * v;
                all[h] += x < full ? v : where(l->part[h], v);
            }
        UNROLL for (int h = 0; h < PARTS; h++) store(flat + h * VL, all[h]);
        sums[c] += sum16(flat);
    }
}

static void normalised(const norm_op *o, const context *with, const float *k, const float *d) {
    const int relu = o->relu != 0;
    EACH_ROW(&o->in) {
        const float *s = cell(with->arena, &o->in, b, y, c);
        float *z = cell(with->arena, &o->out, b, y, c);
        const float factor = k[c], shift = d[c];
        if (o->shortcut.at >= 0) {
            const float *r = cell(with->arena, &o->shortcut, b, y, c);
            EACH(i, o->in.width) {
                vec v = factor * load(s + i) + shift + load(r + i);
                store(z + i, relu ? positive(v) : v);
            }
        } else if (relu) {
            EACH(i, o->in.width) store(z + i, positive(factor * load(s + i) + shift));
        } else {
            EACH(i, o->in.width) store(z + i, factor * load(s + i) + shift);
        }
    }
}

static void batch_norm(const norm_op *o, const context *with, const lanes *l) {
    const int64_t channels = o->in.channels;
    float *mean = with->arena + o->saved, *inverse = mean + channels;
    float *k = inverse + channels, *d = k + channels;
    sum_t *sums = (sum_t *)(with->arena + o->statistics), *means = sums + channels; /* [channels][2][16] floats are enough */
    const double n = (double)with->samples * (double)(o->in.height * (o->wide ? 1 : o->in.width));
    if (o->training && !o->counted) {
        summed(o, with, l, 0, sums);
        for (int64_t c = 0; c < channels; c++) means[c] = sums[c] / n;
        summed(o, with, l, means, sums);
    }
    for (int64_t c = 0; c < channels; c++) {
        double m, v;
        float *running_mean = o->running_mean < 0 ? 0 : with->weights + o->running_mean + c;
        float *running_var = o->running_var < 0 ? 0 : with->weights + o->running_var + c;
        if (!o->training) {
            m = *running_mean;
            v = *running_var;
        } else {
            if (o->counted) {
                counted(o, with, l, c, &m, &v);
            } else {
                m = means[c];
                v = sums[c] / n;
            }
            if (running_mean) {
                *running_mean = (float)((1 - o->momentum) * *running_mean + o->momentum * m);
                *running_var = (float)((1 - o->momentum) * *running_var + o->momentum * v * n / (n - 1));
            }
        }
        mean[c] = (float)m;
        inverse[c] = (float)(1 / sqrt(v + o->eps));
    }
    for (int64_t c = 0; c < channels; c++) {
        k[c] = inverse[c] * (o->gamma < 0 ? 1.0f : with->weights[o->gamma + c]);
        d[c] = (o->beta < 0 ? 0.0f : with->weights[o->beta + c]) - k[c] * mean[c];
    }
    normalised(o, with, k, d);
}

static void batch_norm_back(const norm_back_op *o, const context *with, const lanes *l) {
    const int64_t channels = o->in.channels;
    const float *mean = with->arena + o->saved, *inverse = mean + channels, *k = inverse + channels, *d = k + channels;
    float *sums = with->arena + o->statistics;
    const int relu = o->relu != 0, looks = o->output.at >= 0;
    const float n = (float)with->samples * (float)(o->in.height * (o->wide ? 1 : o->in.width));
    memset(sums, 0, channels * 2 * LANES * sizeof(float));
    EACH_ROW(&o->in) {
        float *g = cell(with->arena, &o->slope, b, y, c);
        const float *s = cell(with->arena, &o->in, b, y, c), m = mean[c], factor = k[c], shift = d[c];
        float *at = sums + c * 2 * LANES;
        vec sum[PARTS], product[PARTS];
        UNROLL for (int h = 0; h < PARTS; h++) sum[h] = load(at + h * VL), product[h] = load(at + LANES + h * VL);
        if (relu && looks) {
            const float *a = cell(with->arena, &o->output, b, y, c);
            for (int64_t i = 0; i < o->in.width * LANES; i += LANES)
                UNROLL for (int h = 0; h < PARTS; h++) {
                    vec u = passed(load(a + i + h * VL), load(g + i + h * VL));
                    store(g + i + h * VL, u);
                    sum[h] += u;
                    product[h] += u * (load(s + i + h * VL) - m);
                }
        } else if (relu) {
            for (int64_t i = 0; i < o->in.width * LANES; i += LANES)
                UNROLL for (int h = 0; h < PARTS; h++) {
                    vec t = load(s + i + h * VL), u = passed(factor * t + shift, load(g + i + h * VL));
                    sum[h] += u;
                    product[h] += u * (t - m);
                }
        } else {
            for (int64_t i = 0; i < o->in.width * LANES; i += LANES)
                UNROLL for (int h = 0; h < PARTS; h++) {
                    vec u = load(g + i + h * VL);
                    sum[h] += u;
                    product[h] += u * (load(s + i + h * VL) - m);
                }
        }
        UNROLL for (int h = 0; h < PARTS; h++) store(at + h * VL, sum[h]), store(at + LANES + h * VL, product[h]);
    }
    for (int64_t c = 0; c < channels; c++) { /* from now on: mean slope, and mean of slope times deviation over the variance */
        float *at = sums + c * 2 * LANES;
        float beta = sum16(at), gamma = sum16(at + LANES) * inverse[c];
        if (o->beta >= 0) with->gradient[o->beta + c] = beta;
        if (o->gamma >= 0) with->gradient[o->gamma + c] = gamma;
        at[0] = k[c] * beta / n;
        at[1] = k[c] * gamma / n * inverse[c];
    }
    EACH_ROW(&o->in) {
        const float *g = cell(with->arena, &o->slope, b, y, c), *s = cell(with->arena, &o->in, b, y, c);
        float *z = cell(with->arena, &o->to, b, y, c);
        const float *at = sums + c * 2 * LANES, base = at[0], lean = at[1], m = mean[c], factor = k[c], shift = d[c];
        const int64_t full = whole(l, &o->in, o->wide, b);
        const int gated = relu && !looks, add = o->add != 0;
#define SLOPE(at_i) \
    vec t = load(s + (at_i)), u = load(g + (at_i)); \
    if (gated) u = passed(factor * t + shift, u); \
    vec v = factor * u - base - lean * (t - m)
        if (!add && gated) {
            EACH(i, full) {
                vec t = load(s + i), u = passed(factor * t + shift, load(g + i));
                store(z + i, factor * u - base - lean * (t - m));
            }
        } else if (!add) {
            EACH(i, full) store(z + i, factor * load(g + i) - base - lean * (load(s + i) - m));
        } else {
            EACH(i, full) {
                SLOPE(i);
                store(z + i, v + load(z + i));
            }
        }
        for (int64_t x = full; x < o->in.width; x++)
            UNROLL for (int h = 0; h < PARTS; h++) {
                const int64_t i = x * LANES + h * VL;
                SLOPE(i);
                v = where(l->part[h], v);
                store(z + i, add ? v + load(z + i) : v);
            }
#undef SLOPE
    }
}

/* Group norms: every sample by itself, so that lanes never meet. */
static void group_norm(const norm_op *o, const context *with) {
    const int64_t channels = o->in.channels, groups = o->groups, each = channels / groups;
    const float n = (float)(each * o->in.height * o->in.width);
    const int relu = o->relu != 0;
    for (int64_t b = 0; b < o->in.blocks; b++)
        for (int64_t q = 0; q < groups; q++) {
            float *means = with->arena + o->saved + (b * groups + q) * LANES, *inverses = means + o->in.blocks * groups * LANES;
            for (int h = 0; h < PARTS; h++) {
                vec sum = {0}, squares = {0};
                for (int64_t y = 0; y < o->in.height; y++)
                    for (int64_t c = q * each; c < (q + 1) * each; c++) {
                        const float *s = cell(with->arena, &o->in, b, y, c) + h * VL;
                        vec row = {0};
                        for (int64_t x = 0; x < o->in.width; x++) row += load(s + x * LANES);
                        sum += row;
                    }
                const vec mean = sum / n;
                for (int64_t y = 0; y < o->in.height; y++)
                    for (int64_t c = q * each; c < (q + 1) * each; c++) {
                        const float *s = cell(with->arena, &o->in, b, y, c) + h * VL;
                        vec row = {0};
                        for (int64_t x = 0; x < o->in.width; x++) {
                            vec v = load(s + x * LANES) - mean;
                            row += v * v;
                        }
                        squares += row;
                    }
                store(means + h * VL, mean);
                float variance[VL], inverse[VL];
                store(variance, squares / n);
                for (int i = 0; i < VL; i++) inverse[i] = (float)(1 / sqrt((double)variance[i] + o->eps));
                store(inverses + h * VL, load(inverse));
                for (int64_t y = 0; y < o->in.height; y++)
                    for (int64_t c = q * each; c < (q + 1) * each; c++) {
                        const float *s = cell(with->arena, &o->in, b, y, c) + h * VL;
                        const float *r = o->shortcut.at < 0 ? 0 : cell(with->arena, &o->shortcut, b, y, c) + h * VL;
                        float *z = cell(with->arena, &o->out, b, y, c) + h * VL;
                        const vec k = load(inverse) * (o->gamma < 0 ? 1.0f : with->weights[o->gamma + c]);
                        const vec d = (o->beta < 0 ? 0.0f : with->weights[o->beta + c]) - k * mean;
                        for (int64_t x = 0; x < o->in.width * LANES; x += LANES) {
                            vec v = k * load(s + x) + d;
                            if (r) v += load(r + x);
                            store(z + x, relu ? positive(v) : v);
                        }
                    }
            }
        }
}

static void group_norm_back(const norm_back_op *o, const context *with) {
    const int64_t channels = o->in.channels, groups = o->groups, each = channels / groups;
    const float n = (float)(each * o->in.height * o->in.width);
    const int relu = o->relu != 0, looks = o->output.at >= 0;
    float *sums = with->arena + o->statistics;
    memset(sums, 0, channels * 2 * LANES * sizeof(float));
    for (int64_t b = 0; b < o->in.blocks; b++)
        for (int64_t q = 0; q < groups; q++)
            for (int h = 0; h < PARTS; h++) {
                const float *means = with->arena + o->saved + (b * groups + q) * LANES + h * VL;
                const vec mean = load(means), inverse = load(means + o->in.blocks * groups * LANES);
                vec first = {0}, second = {0};
#define SLOPES \
    const float gamma = o->gamma < 0 ? 1.0f : with->weights[o->gamma + c]; \
    const vec k = inverse * gamma, d = (o->beta < 0 ? 0.0f : with->weights[o->beta + c]) - k * mean; \
    float *g = cell(with->arena, &o->slope, b, y, c) + h * VL; \
    const float *s = cell(with->arena, &o->in, b, y, c) + h * VL;
                for (int64_t y = 0; y < o->in.height; y++)
                    for (int64_t c = q * each; c < (q + 1) * each; c++) {
                        SLOPES
                        const float *a = looks ? cell(with->arena, &o->output, b, y, c) + h * VL : 0;
                        vec sum = {0}, product = {0};
                        for (int64_t x = 0; x < o->in.width * LANES; x += LANES) {
                            vec t = load(s + x), u = load(g + x);
                            if (relu) u = passed(a ? load(a + x) : k * t + d, u);
                            if (a) store(g + x, u);
                            sum += u;
                            product += u * ((t - mean) * inverse);
                        }
                        float *at = sums + c * 2 * LANES + h * VL;
                        store(at, load(at) + sum);
                        store(at + LANES, load(at + LANES) + product);
                        first += gamma * sum;
                        second += gamma * product;
                    }
                first /= n;
                second /= n;
                for (int64_t y = 0; y < o->in.height; y++)
                    for (int64_t c = q * each; c < (q + 1) * each; c++) {
                        SLOPES
                        float *z = cell(with->arena, &o->to, b, y, c) + h * VL;
                        for (int64_t x = 0; x < o->in.width * LANES; x += LANES) {
                            vec t = load(s + x), u = load(g + x);
                            if (relu && !looks) u = passed(k * t + d, u);
                            vec v = inverse * (gamma * u - first - (t - mean) * inverse * second);
                            store(z + x, o->add ? v + load(z + x) : v);
                        }
                    }
#undef SLOPES
            }
    for (int64_t c = 0; c < channels; c++) {
        if (o->beta >= 0) with->gradient[o->beta + c] = sum16(sums + c * 2 * LANES);
        if (o->gamma >= 0) with->gradient[o->gamma + c] = sum16(sums + c * 2 * LANES + LANES);
    }
}

/* ---- activations, sums, pooling, forms ---- */

static void relu_back(const relu_back_op *o, const context *with) {
    float *sums = with->arena + o->scratch;
    const int writes = o->to.at >= 0;
    if (o->bias >= 0) memset(sums, 0, o->slope.channels * LANES * sizeof(float));
    EACH_ROW(&o->slope) {
        const float *g = cell(with->arena, &o->slope, b, y, c);
        const float *a = o->output.at < 0 ? 0 : cell(with->arena, &o->output, b, y, c);
        float *z = writes ? cell(with->arena, &o->to, b, y, c) : 0;
        vec sum[PARTS] = {{0}};
        for (int64_t i = 0; i < o->slope.width * LANES; i += LANES)
            UNROLL for (int h = 0; h < PARTS; h++) {
                vec u = load(g + i + h * VL);
                if (a) u = passed(load(a + i + h * VL), u);
                sum[h] += u;
                if (writes) store(z + i + h * VL, o->add ? u + load(z + i + h * VL) : u);
            }
        if (o->bias >= 0) UNROLL for (int h = 0; h < PARTS; h++) store(sums + c * LANES + h * VL, load(sums + c * LANES + h * VL) + sum[h]);
    }
    if (o->bias >= 0)
        for (int64_t c = 0; c < o->slope.channels; c++) with->gradient[o->bias + c] = sum16(sums + c * LANES);
}

static void sum(const sum_op *o, const context *with) {
    const int relu = o->relu != 0;
    EACH_ROW(&o->out) {
        const float *p = cell(with->arena, &o->first, b, y, c);
        const float *q = o->second.at < 0 ? 0 : cell(with->arena, &o->second, b, y, c);
        float *z = cell(with->arena, &o->out, b, y, c);
        EACH(i, o->out.width) {
            vec v = load(p + i);
            if (q) v += load(q + i);
            store(z + i, relu ? positive(v) : v);
        }
    }
}

/* The part [from, to) of a window that lies within an image. */
INLINE void clipped(int64_t start, int64_t length, int64_t size, int64_t *from, int64_t *to) {
    *from = start < 0 ? 0 : start;
    *to = start + length > size ? size : start + length;
}

static void pool(const pool_op *o, const context *with) {
    EACH_ROW(&o->out) {
        float *z = cell(with->arena, &o->out, b, y, c);
        int64_t top, bottom, left, right;
        clipped(y * o->down - o->above, o->height, o->in.height, &top, &bottom);
        for (int64_t x = 0; x < o->out.width; x++) {
            clipped(x * o->across - o->left, o->width, o->in.width, &left, &right);
            for (int h = 0; h < PARTS; h++) {
                vec v = o->mean ? (vec){0} : splat(-INFINITY);
                for (int64_t i = top; i < bottom; i++)
                    for (int64_t j = left; j < right; j++) {
                        vec u = load(cell(with->arena, &o->in, b, i, c) + j * LANES + h * VL);
                        if (o->mean) v += u;
                        else v = (vec)((bits)larger(v, u) | (v != v)); /* once NaN, always NaN */
                    }
                if (o->mean) v /= (float)(o->with_padding ? o->height * o->width : (bottom - top) * (right - left));
                store(z + x * LANES + h * VL, v);
            }
        }
    }
}

static void pool_back(const pool_back_op *o, const context *with) {
    if (!o->add)
        EACH_ROW(&o->to) {
            float *z = cell(with->arena, &o->to, b, y, c);
            EACH(i, o->to.width) store(z + i, (vec){0});
        }
    EACH_ROW(&o->slope) {
        const float *g = cell(with->arena, &o->slope, b, y, c);
        int64_t top, bottom, left, right;
        clipped(y * o->down - o->above, o->height, o->to.height, &top, &bottom);
        for (int64_t x = 0; x < o->slope.width; x++) {
            clipped(x * o->across - o->left, o->width, o->to.width, &left, &right);
            for (int h = 0; h < PARTS; h++) {
                vec u = load(g + x * LANES + h * VL), best = {0};
                bits open = ~(bits){0};
                if (o->mean) u /= (float)(o->with_padding ? o->height * o->width : (bottom - top) * (right - left));
                else best = load(cell(with->arena, &o->out, b, y, c) + x * LANES + h * VL);
                for (int64_t i = top; i < bottom; i++)
                    for (int64_t j = left; j < right; j++) {
                        float *z = cell(with->arena, &o->to, b, i, c) + j * LANES + h * VL;
                        if (o->mean) {
                            store(z, load(z) + u);
                        } else { /* the first that is the largest has the slope */
                            bits taken = open & (load(cell(with->arena, &o->in, b, i, c) + j * LANES + h * VL) == best);
                            open &= ~taken;
                            store(z, load(z) + where(taken, u));
                        }
                    }
            }
        }
    }
}

static void flatten(const flatten_op *o, const context *with) {
    const tensor *in = &o->in;
    const int64_t positions = in->height * in->width, wide = o->out.width * LANES;
    const float share = 1.0f / (float)positions;
    for (int64_t b = 0; b < in->blocks; b++)
        for (int64_t c = 0; c < in->channels; c++) {
            float *mean = with->arena + o->out.at + c * wide + b * LANES;
            vec sums[PARTS] = {{0}};
            for (int64_t y = 0; y < in->height; y++) {
                float *s = cell(with->arena, in, b, y, c);
                for (int64_t x = 0; x < in->width; x++) {
                    float *z = with->arena + o->out.at + (c * positions + y * in->width + x) * wide + b * LANES;
                    UNROLL for (int h = 0; h < PARTS; h++) {
                        float *p = s + x * LANES + h * VL;
                        if (o->back) {
                            vec v = o->mean ? load(mean + h * VL) * share : load(z + h * VL);
                            store(p, o->add ? v + load(p) : v);
                        } else if (o->mean) {
                            sums[h] += load(p);
                        } else {
                            store(z + h * VL, load(p));
                        }
                    }
                }
            }
            if (o->mean && !o->back) UNROLL for (int h = 0; h < PARTS; h++) store(mean + h * VL, sums[h] * share);
        }
}

static void input(const input_op *o, const context *with, int64_t step) {
    const int64_t *rows = with->rows + step * with->samples;
    const float zero[1] = {0};
    const tensor *t = &o->out;
    const int64_t blocks = o->wide ? t->width : t->blocks;
    for (int64_t b = 0; b < blocks; b++) {
        const float *sample[LANES];
        int64_t stride[LANES];
        for (int64_t i = 0; i < LANES; i++) {
            const int there = b * LANES + i < with->samples;
            sample[i] = there ? with->source + rows[b * LANES + i] * with->size : zero;
            stride[i] = there;
        }
        if (o->wide) {
            for (int64_t f = 0; f < t->channels; f++) {
                float *z = with->arena + t->at + (f * t->width + b) * LANES;
                for (int i = 0; i < LANES; i++) z[i] = sample[i][f * stride[i]];
            }
            continue;
        }
        for (int64_t y = 0; y < t->height; y++)
            for (int64_t c = 0; c < t->channels; c++) {
                float *z = cell(with->arena, t, b, y, c);
                const int64_t at = (c * t->height + y) * t->width;
                for (int64_t x = 0; x < t->width; x++)
                    for (int i = 0; i < LANES; i++) z[x * LANES + i] = sample[i][(at + x) * stride[i]];
            }
    }
}

static void output(const output_op *o, const context *with, int64_t step) {
    if (!with->outputs) return;
    float *to = with->outputs + step * with->samples * o->in.channels;
    for (int64_t n = 0; n < with->samples; n++)
        for (int64_t f = 0; f < o->in.channels; f++)
            to[n * o->in.channels + f] = with->arena[o->in.at + (f * o->in.width + n / LANES) * LANES + n % LANES];
}

/* ---- loss ---- */

/* e^x for x <= 0, within 2 units in the last place; NaN stays NaN. */
INLINE vec exponential(vec x) {
    x = larger(splat(-87.0f), x);
    vec shifted = x * 1.44269504f + 12582912.0f; /* its last bits are the nearest whole number */
    vec whole_part = shifted - 12582912.0f;
    vec r = x - whole_part * 0.693359375f;
    r = r - whole_part * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)(((ubits)shifted << 23) + 0x3f800000u);
}

static int64_t cross_entropy(const loss_op *o, const context *with, const lanes *l, int64_t step) {
    const int64_t classes = o->in.channels, wide = o->in.width * LANES;
    const int64_t *rows = with->rows + step * with->samples, *labels = (const int64_t *)with->targets;
    const float *z = with->arena + o->in.at;
    float *g = with->arena + o->to.at;
    const float each = 1.0f / (float)with->samples, even = (float)(o->smoothing / (double)classes) * each;
    double total = 0;
    for (int64_t n = 0; n < with->samples; n++)
        if (labels[rows[n]] < 0 || labels[rows[n]] >= classes) return LABEL_OUT_OF_RANGE;
    for (int64_t b = 0; b < o->in.width; b++) {
        float largest[LANES], sums[LANES], means[LANES];
        UNROLL for (int h = 0; h < PARTS; h++) {
            const int64_t at = b * LANES + h * VL;
            vec top = load(z + at), s = {0}, mean = {0};
            for (int64_t k = 1; k < classes; k++) top = larger(top, load(z + k * wide + at));
            for (int64_t k = 0; k < classes; k++) {
                vec v = load(z + k * wide + at), e = exponential(v - top);
                s += e;
                mean += v;
                store(g + k * wide + at, e);
            }
            const vec share = each / s;
            for (int64_t k = 0; k < classes; k++) {
                vec v = load(g + k * wide + at) * share - even;
                store(g + k * wide + at, b == o->in.width - 1 ? where(l->part[h], v) : v);
            }
            store(largest + h * VL, top);
            store(sums + h * VL, s);
            store(means + h * VL, mean / (float)classes);
        }
        for (int64_t i = 0; i < LANES && b * LANES + i < with->samples; i++) {
            const int64_t at = labels[rows[b * LANES + i]] * wide + b * LANES + i;
            const double normaliser = log((double)sums[i]) + largest[i];
            total += normaliser - (1 - o->smoothing) * z[at] - o->smoothing * means[i];
            g[at] -= (float)(1 - o->smoothing) * each;
        }
    }
    if (with->losses) with->losses[step] = (float)(total / (double)with->samples);
    return DONE;
}

static void squared_error(const loss_op *o, const context *with, const lanes *l, int64_t step) {
    const int64_t outs = o->in.channels, wide = o->in.width * LANES;
    const int64_t *rows = with->rows + step * with->samples;
    const double n = (double)with->samples * (double)outs;
    double total = 0;
    for (int64_t b = 0; b < o->in.width; b++)
        for (int64_t i = 0; i < LANES; i++) {
            const int there = b < o->in.width - 1 || i < l->tail;
            const float *target = there ? (const float *)with->targets + rows[b * LANES + i] * outs : 0;
            for (int64_t k = 0; k < outs; k++) {
                const int64_t at = k * wide + b * LANES + i;
                const double d = there ? (double)with->arena[o->in.at + at] - target[k] : 0;
                total += d * d;
                with->arena[o->to.at + at] = (float)(2 * d / n);
            }
        }
    if (with->losses) with->losses[step] = (float)(total / n);
}

/* ---- descent ---- */

static void descent(const descent_op *o, const context *with, int64_t step) {
    float *restrict w = with->weights, *restrict g = with->gradient, *restrict v = with->velocity;
    const float *restrict r = with->received, *restrict f = with->free;
    const float rate = with->rates[step], momentum = (float)o->momentum, decay = (float)o->decay, pull = (float)o->proximal;
    const int64_t n = o->parameters;
    float shorter = 1.0f;
    if (pull != 0)
        for (int64_t i = 0; i < n; i++) g[i] += pull * (w[i] - r[i]);
    if (o->clip != 0) {
        double square[8] = {0};
        for (int64_t i = 0; i < n; i++) {
            const double part = f ? (double)(g[i] * f[i]) : (double)g[i];
            square[i % 8] += part * part;
        }
        double all = 0;
        for (int i = 0; i < 8; i++) all += square[i];
        shorter = (float)(o->clip / (sqrt(all) + 1e-6));
        if (shorter > 1.0f) shorter = 1.0f;
    }
    if (v)
        for (int64_t i = 0; i < n; i++) {
            v[i] = momentum * v[i] + (g[i] * shorter + decay * w[i]);
            w[i] -= (f ? rate * f[i] : rate) * v[i];
        }
    else if (decay == 0 && shorter == 1.0f && !f)
        for (int64_t i = 0; i < n; i++) w[i] -= rate * g[i];
    else
        for (int64_t i = 0; i < n; i++) w[i] -= (f ? rate * f[i] : rate) * (g[i] * shorter + decay * w[i]);
}

int64_t ENTRY(const operation *program, int64_t operations, const context *with);
int64_t ENTRY(const operation *program, int64_t operations, const context *with) {
    const lanes l = lanes_of(with);
    for (int64_t step = 0; step < with->steps; step++)
        for (int64_t i = 0; i < operations; i++) {
            const operation *o = program + i;
            int64_t wrong = DONE;
            switch (o->kind) {
                case GATHER: gather(&o->as.gather, with, &l); break;
                case WEIGHT: weight(&o->as.weight, with); break;
                case PERMUTE: permute(&o->as.permute, with); break;
                case NORM:
                    if (o->as.norm.groups) group_norm(&o->as.norm, with);
                    else batch_norm(&o->as.norm, with, &l);
                    break;
                case NORM_BACK:
                    if (o->as.norm_back.groups) group_norm_back(&o->as.norm_back, with);
                    else batch_norm_back(&o->as.norm_back, with, &l);
                    break;
                case RELU_BACK: relu_back(&o->as.relu_back, with); break;
                case SUM: sum(&o->as.sum, with); break;
                case POOL: pool(&o->as.pool, with); break;
                case POOL_BACK: pool_back(&o->as.pool_back, with); break;
                case FLATTEN: flatten(&o->as.flatten, with); break;
                case INPUT: input(&o->as.input, with, step); break;
                case OUTPUT: output(&o->as.output, with, step); break;
                case LOSS:
                    if (o->as.loss.squares) squared_error(&o->as.loss, with, &l, step);
                    else wrong = cross_entropy(&o->as.loss, with, &l, step);
                    break;
                case DESCENT: descent(&o->as.descent, with, step); break;
                default: wrong = UNKNOWN_OPERATION;
            }
            if (wrong) return wrong;
        }
    return DONE;
}
