/* Decoding on a CPU: select, attend over the pages in place, combine.  Called by native_decode.py,
 * which documents the arguments.  All arithmetic is float32; a bfloat16 is a float32's upper half. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define CELL 16
#define RUN 64
#define MOST_DIM 256
#define MOST_GROUP 64
#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef struct {
    const char *data;
    int64_t page, head, row; /* strides in elements */
    int64_t is_bf16;
} Rows;

typedef struct {
    int64_t request, position, front, picks, local, sinks_end, window_start;
} Token;

typedef struct {
    int64_t tokens, heads, group, dim, page_size, block_size, min_max, splits, max_blocks, max_picks;
    const float *q; /* [tokens, heads, group, dim], scaled */
    float *out;     /* likewise */
    Rows k, v, summary;
    const int32_t *table;
    int64_t table_stride;
    const Token *plan;
    const float *sinks; /* [heads, group] or NULL */
    float *logits;      /* [tokens * heads, group + 1, max_blocks] */
    int32_t *chosen;    /* [tokens * heads, max_picks] */
    int32_t *waiting;   /* [tokens * heads] pieces that are not attended yet */
    float *parts;       /* [tokens * heads, splits, group, dim + 2]: sums, maximum, total */
} Decode;

ALWAYS_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
ALWAYS_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

ALWAYS_INLINE void widen(const Rows *rows, int64_t at, int dim, float *to) {
    if (!rows->is_bf16) {
        memcpy(to, (const float *)rows->data + at, dim * sizeof(float));
        return;
    }
    const uint16_t *from = (const uint16_t *)rows->data + at;
    uint32_t *bits = (uint32_t *)__builtin_assume_aligned(to, 4);
    for (int d = 0; d < dim; d++) bits[d] = (uint32_t)from[d] << 16;
}

/* Ask for rows ahead of their use: blocks lie far apart, which the hardware does not foresee. */
ALWAYS_INLINE void prefetch(const Rows *rows, int64_t at, int64_t count, int dim) {
    const int64_t bytes = rows->is_bf16 ? 2 : 4;
    for (int64_t j = 0; j < count; j++)
        for (int64_t line = 0; line < dim * bytes; line += 64)
            __builtin_prefetch(rows->data + (at + j * rows->row) * bytes + line);
}

ALWAYS_INLINE float dot(const float *a, const float *b, int dim) {
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int d = 0; d < dim; d++) total += a[d] * b[d];
    return total;
}

/* exp of count values, none above 0, relative error below 3e-7; below -87 it gives about 1e-38. */
ALWAYS_INLINE void exp_in_place(float *x, int64_t count, float shift) {
#pragma omp simd
    for (int64_t j = 0; j < count; j++) {
        float t = (x[j] - shift) * 1.44269504f;
        t = t < -126.0f ? -126.0f : t;
        float whole = floorf(t + 0.5f), f = t - whole;
        float p = 1.5403530e-4f;
        p = p * f + 1.3333558e-3f;
        p = p * f + 9.6181291e-3f;
        p = p * f + 5.5504109e-2f;
        p = p * f + 2.4022651e-1f;
        p = p * f + 6.9314718e-1f;
        p = p * f + 1.0f;
        int32_t power = ((int32_t)whole + 127) << 23;
        float scale;
        memcpy(&scale, &power, 4);
        x[j] = p * scale;
    }
}

/* Logits of blocks [first, last) of one token and head. */
ALWAYS_INLINE void score_blocks(const Decode *a, const Token *token, int64_t head, const float *q,
                                float *logits, int64_t first, int64_t last, int dim) {
    const int64_t per_block = a->block_size / CELL, per_page = a->page_size / CELL;
    const int64_t step = a->min_max ? 2 : 1;
    const int32_t *pages = a->table + token->request * a->table_stride;
    float low[MOST_DIM], high[MOST_DIM];
    for (int64_t block = first; block < last; block++) {
        for (int64_t g = 0; g < a->group; g++) logits[g * a->max_blocks + block] = -INFINITY;
        for (int64_t cell = block * per_block; cell < (block + 1) * per_block; cell += step) {
            int64_t at = pages[cell / per_page] * a->summary.page + head * a->summary.head +
                         cell % per_page * a->summary.row;
            if (cell % per_page == 0 && cell + 2 * per_page < last * per_block)
                prefetch(&a->summary, at + (int64_t)(pages[cell / per_page + 2] -
                                      pages[cell / per_page]) * a->summary.page, per_page, dim);
            widen(&a->summary, at, dim, low);
            if (a->min_max) widen(&a->summary, at + a->summary.row, dim, high);
            for (int64_t g = 0; g < a->group; g++) {
                const float *row = q + g * dim;
                float value = 0.0f;
                if (a->min_max) {
#pragma omp simd reduction(+ : value)
                    for (int d = 0; d < dim; d++) {
                        float x = row[d] * low[d], y = row[d] * high[d];
                        value += x > y ? x : y;
                    }
                } else {
                    value = dot(row, low, dim);
                }
                float *best = logits + g * a->max_blocks + block;
                *best = value > *best ? value : *best;
            }
        }
    }
}

/* Probabilities summed over the group, then the best candidates, ties to the lower block. */
static void pick_blocks(const Decode *a, const Token *token, float *logits, int32_t *chosen) {
    const int64_t blocks = token->position / a->block_size;
    float *scores = logits + a->group * a->max_blocks;
    memset(scores, 0, blocks * sizeof(float));
    for (int64_t g = 0; g < a->group; g++) {
        float *row = logits + g * a->max_blocks, top = -INFINITY, total = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t b = 0; b < blocks; b++) top = row[b] > top ? row[b] : top;
        exp_in_place(row, blocks, top);
#pragma omp simd reduction(+ : total)
        for (int64_t b = 0; b < blocks; b++) total += row[b];
        for (int64_t b = 0; b < blocks; b++) scores[b] += row[b] / total;
    }
    for (int64_t place = 0; place < token->picks; place++) {
        int64_t best = token->front;
        for (int64_t b = best + 1; b < token->local; b++)
            if (scores[b] > scores[best]) best = b;
        chosen[place] = (int32_t)best;
        scores[best] = -INFINITY;
    }
}

ALWAYS_INLINE int64_t listed_block(const Token *token, const int32_t *chosen, int64_t entry) {
    if (entry < token->front) return entry;
    entry -= token->front;
    return entry < token->picks ? chosen[entry] : token->local + entry - token->picks;
}

/* Online softmax over entries [first, last) of a token's list of blocks. */
ALWAYS_INLINE void attend_blocks(const Decode *a, const Token *token, int64_t head, const float *q,
                                 const int32_t *chosen, int64_t first, int64_t last, float *part,
                                 int dim) {
    const int64_t group = a->group, size = a->block_size, width = dim + 2;
    const int32_t *pages = a->table + token->request * a->table_stride;
    float tile[RUN * MOST_DIM], weights[MOST_GROUP][RUN], sum[MOST_DIM];
    memset(part, 0, group * width * sizeof(float));
    for (int64_t g = 0; g < group; g++) part[g * width + dim] = -INFINITY;
    const int64_t run = min64(RUN, min64(size, a->page_size));
    for (int64_t entry = first; entry < last; entry++) {
        const int64_t block = listed_block(token, chosen, entry);
        if (entry + 1 < last) {
            const int64_t key = listed_block(token, chosen, entry + 1) * size;
            const int64_t page = pages[key / a->page_size], row = key % a->page_size;
            prefetch(&a->k, page * a->k.page + head * a->k.head + row * a->k.row, run, dim);
            prefetch(&a->v, page * a->v.page + head * a->v.head + row * a->v.row, run, dim);
        }
        int64_t end = min64((block + 1) * size, token->position + 1);
        for (int64_t key = block * size; key < end;) {
            const int64_t page = pages[key / a->page_size], row = key % a->page_size;
            const int64_t keys = min64(run, min64(end - key, a->page_size - row));
            const int64_t k_at = page * a->k.page + head * a->k.head + row * a->k.row;
            const int64_t v_at = page * a->v.page + head * a->v.head + row * a->v.row;
            const int64_t hidden_from = min64(max64(token->sinks_end - key, 0), keys);
            const int64_t hidden_to = min64(token->window_start - key, keys);
            if (hidden_from == 0 && hidden_to == keys) {
                key += keys;
                continue;
            }
            for (int64_t j = 0; j < keys; j++) widen(&a->k, k_at + j * a->k.row, dim, tile + j * dim);
            for (int64_t g = 0; g < group; g++) {
                for (int64_t j = 0; j < keys; j++)
                    weights[g][j] = dot(q + g * dim, tile + j * dim, dim);
                for (int64_t j = hidden_from; j < hidden_to; j++) weights[g][j] = -INFINITY;
            }
            for (int64_t j = 0; j < keys; j++) widen(&a->v, v_at + j * a->v.row, dim, tile + j * dim);
            for (int64_t j = hidden_from; j < hidden_to; j++) memset(tile + j * dim, 0, dim * 4);
            for (int64_t g = 0; g < group; g++) {
                float *state = part + g * width, *weight = weights[g];
                float top = state[dim], total = 0.0f;
#pragma omp simd reduction(max : top)
                for (int64_t j = 0; j < keys; j++) top = weight[j] > top ? weight[j] : top;
                const float keep = top > state[dim] ? expf(state[dim] - top) : 1.0f;
                exp_in_place(weight, keys, top);
#pragma omp simd reduction(+ : total)
                for (int64_t j = 0; j < keys; j++) total += weight[j];
                for (int d = 0; d < dim; d++) sum[d] = state[d] * keep;
                for (int64_t j = 0; j < keys; j++)
                    for (int d = 0; d < dim; d++) sum[d] += weight[j] * tile[j * dim + d];
                memcpy(state, sum, dim * sizeof(float));
                state[dim] = top;
                state[dim + 1] = state[dim + 1] * keep + total;
            }
            key += keys;
        }
    }
}

static void combine(const Decode *a, int64_t unit) {
    const int64_t dim = a->dim, width = dim + 2;
    for (int64_t g = 0; g < a->group; g++) {
        const float *parts = a->parts + (unit * a->splits * a->group + g) * width;
        const int64_t stride = a->group * width;
        float *out = a->out + (unit * a->group + g) * dim, top = -INFINITY, total = 0.0f;
        if (a->sinks) top = a->sinks[unit % a->heads * a->group + g];
        if (a->sinks) total = 1.0f;
        for (int64_t s = 0; s < a->splits; s++) {
            float other = parts[s * stride + dim];
            if (other > top) total *= expf(top - other), top = other;
        }
        memset(out, 0, dim * sizeof(float));
        for (int64_t s = 0; s < a->splits; s++) {
            const float *part = parts + s * stride;
            if (part[dim + 1] == 0.0f) continue;
            const float weight = expf(part[dim] - top);
            total += weight * part[dim + 1];
            for (int64_t d = 0; d < dim; d++) out[d] += weight * part[d];
        }
        for (int64_t d = 0; d < dim; d++) out[d] /= total;
    }
}

ALWAYS_INLINE void decode(const Decode *a, int dim) {
    const int64_t units = a->tokens * a->heads, group = a->group;
#pragma omp parallel
    {
#pragma omp for schedule(static, 1)
        for (int64_t unit = 0; unit < units; unit++) {
            const Token *token = a->plan + unit / a->heads;
            float *logits = a->logits + unit * (group + 1) * a->max_blocks;
            a->waiting[unit] = (int32_t)a->splits;
            if (!token->picks) continue;
            score_blocks(a, token, unit % a->heads, a->q + unit * group * dim, logits, 0,
                         token->position / a->block_size, dim);
            pick_blocks(a, token, logits, a->chosen + unit * a->max_picks);
        }
#pragma omp for schedule(static, 1) nowait
        for (int64_t piece = 0; piece < units * a->splits; piece++) {
            const int64_t unit = piece / a->splits, split = piece % a->splits;
            const Token *token = a->plan + unit / a->heads;
            const int64_t own = token->position / a->block_size;
            const int64_t count = token->front + token->picks + max64(own + 1 - token->local, 0);
            attend_blocks(a, token, unit % a->heads, a->q + unit * group * dim,
                          a->chosen + unit * a->max_picks, count * split / a->splits,
                          count * (split + 1) / a->splits, a->parts + piece * group * (dim + 2), dim);
            if (!__atomic_sub_fetch(a->waiting + unit, 1, __ATOMIC_ACQ_REL)) combine(a, unit);
        }
    }
}

void sparsek_decode(const Decode *a) {
    switch (a->dim) { /* the common head dimensions as constants, so that loops unroll */
    case 64: decode(a, 64); break;
    case 128: decode(a, 128); break;
    default: decode(a, (int)a->dim);
    }
}
