/* Decoding on a CPU: select, attend over the pages in place, combine.  Called by native_decode.py,
 * which documents the arguments.  All arithmetic is float32; a bfloat16 is a float32's upper half. */

#include "lanes.h"

#define VECTOR 4 /* tokens of a vector of the sketch */
#define RUN 64
#define MOST_DIM 256
#define MOST_GROUP 64

typedef struct {
    const char *data;
    int64_t page, head, row; /* strides in elements */
    int64_t is_bf16;
} Rows;

/* Vectors of int4 levels (sketch.py); strides in bytes. */
typedef struct {
    const uint8_t *data;
    int64_t page, head;
} Sketch;

typedef struct {
    int64_t request, position, front, picks, local, sinks_end, window_start;
} Token;

typedef struct {
    int32_t chosen;  /* blocks */
    int32_t waiting; /* pieces that are not attended yet */
} Unit;

typedef struct {
    int64_t tokens, heads, group, dim, page_size, block_size, splits;
    int64_t max_blocks, max_picks;
    float least;         /* score of a chosen block, or 0 */
    const float *q;      /* [tokens, heads, group, dim], scaled */
    const float *rotated; /* the same, rotated as the sketch is; NULL where nothing is selected */
    float *out;          /* [tokens, heads, group, dim] */
    Rows k, v;
    Sketch sketch;
    const int32_t *table;
    int64_t table_stride;
    const Token *plan;
    const int32_t *places; /* [heads] most picks of each head, fewer than the token's; or NULL */
    const float *sinks; /* [heads, group] or NULL */
    float *scores;      /* [tokens * heads, group + 1, max_blocks]: by the sketch */
    int32_t *chosen;    /* [tokens * heads, max_picks] blocks, ascending */
    Unit *units;        /* [tokens * heads] */
    float *parts;       /* [tokens * heads, splits, group, dim + 2]: sums, maximum, total */
} Decode;

ALWAYS_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
ALWAYS_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Where the row of a key starts, in elements. */
ALWAYS_INLINE int64_t row_of(const Decode *a, const Rows *rows, const int32_t *pages, int64_t head,
                             int64_t key) {
    return pages[key / a->page_size] * rows->page + head * rows->head +
           key % a->page_size * rows->row;
}

/* Rows to ask for ahead of their use: blocks lie far apart, which the hardware does not foresee.
 * A few are asked for at a time, and into the second-level cache: a block of K and V with the next
 * would fill the first. */
#define ASK(at) __builtin_prefetch(at, 0, 2)

typedef struct {
    const char *data;
    int64_t bytes, count; /* of a row; rows */
} Ahead;

ALWAYS_INLINE Ahead ahead_of(const Decode *a, const Rows *rows, const int32_t *pages, int64_t head,
                             int64_t key, int64_t done, int64_t size) {
    const int64_t bytes = rows->is_bf16 ? 2 : 4, at = row_of(a, rows, pages, head, key);
    const int64_t count = min64(size, a->page_size - key % a->page_size) - done;
    return (Ahead){rows->data + (at + done * rows->row) * bytes, rows->row * bytes, count};
}

/* Logits of `keys` keys that follow one another in a page, for each query head of a group. */
ALWAYS_INLINE void logits_of(const Rows *rows, int64_t at, int64_t keys, Ahead ahead,
                             const float *q, int64_t group, float *logits, int64_t stride,
                             int dim) {
    const int64_t bytes = rows->is_bf16 ? 2 : 4;
    float wide[LANES][MOST_DIM];
    for (int64_t first = 0; first < keys; first += LANES) {
        const int64_t count = min64(LANES, keys - first);
        const char *row[LANES]; /* the last one again where there are fewer */
        for (int64_t j = 0; j < LANES; j++)
            row[j] = rows->data + (at + (first + min64(j, count - 1)) * rows->row) * bytes;
        for (int64_t j = first; j < min64(first + LANES, ahead.count); j++)
            for (int64_t line = 0; line < dim * bytes; line += 64)
                ASK(ahead.data + j * ahead.bytes + line);
        if (rows->is_bf16)
            for (int64_t j = 0; j < LANES; j++) {
                widen(row[j], wide[j], dim);
                row[j] = (const char *)wide[j];
            }
        for (int64_t g = 0; g < group; g++) {
            const Lanes found = dots(q + g * dim, row, dim);
            memcpy(logits + g * stride + first, &found, count * sizeof(float));
        }
    }
}

/* Adds the weighted rows of `keys` keys to `count` channels of up to four heads' sums. */
ALWAYS_INLINE void add_channels(const char *rows, int64_t row_bytes, int is_bf16, int64_t keys,
                                Ahead ahead, const float *weights, int heads, float *sums,
                                int64_t width, int64_t channel, int64_t first, int64_t second) {
    Lanes x[4], y[4];
    for (int g = 0; g < heads; g++) {
        x[g] = load((const char *)(sums + g * width), 0, channel, first);
        y[g] = load((const char *)(sums + g * width), 0, channel + LANES, second);
    }
    for (int64_t j = 0; j < keys; j++) {
        const char *row = rows + j * row_bytes;
        if (j < ahead.count && !(is_bf16 && channel % 32))
            ASK(ahead.data + j * ahead.bytes + channel * (is_bf16 ? 2 : 4));
        const Lanes a = load(row, is_bf16, channel, first);
        const Lanes b = load(row, is_bf16, channel + LANES, second);
        for (int g = 0; g < heads; g++) {
            x[g] += weights[g * RUN + j] * a;
            y[g] += weights[g * RUN + j] * b;
        }
    }
    for (int g = 0; g < heads; g++) {
        memcpy(sums + g * width + channel, &x[g], 4 * first);
        memcpy(sums + g * width + channel + LANES, &y[g], 4 * second);
    }
}

ALWAYS_INLINE void add_heads(const char *rows, int64_t row_bytes, int is_bf16, int64_t keys,
                             Ahead ahead, const float *weights, int heads, float *sums,
                             int64_t width, int dim) {
    const int whole = dim / (2 * LANES) * (2 * LANES), rest = dim - whole;
    for (int d = 0; d < whole; d += 2 * LANES)
        add_channels(rows, row_bytes, is_bf16, keys, ahead, weights, heads, sums, width, d,
                     LANES, LANES);
    if (rest)
        add_channels(rows, row_bytes, is_bf16, keys, ahead, weights, heads, sums, width, whole,
                     min64(rest, LANES), max64(rest - LANES, 0));
}

/* Adds the rows of `keys` keys, weighted, to the sums of each query head of a group. */
ALWAYS_INLINE void add_rows(const Rows *rows, int64_t at, int64_t keys, Ahead ahead,
                            const float *weights, int64_t group, float *sums, int64_t width,
                            int dim) {
    const int64_t bytes = rows->is_bf16 ? 2 : 4;
    const char *from = rows->data + at * bytes;
    for (int64_t g = 0; g < group; g += 4) {
        const float *weight = weights + g * RUN;
        float *sum = sums + g * width;
        if (g) ahead.count = 0; /* the first heads asked */
        switch (min64(group - g, 4) * 2 + rows->is_bf16) { /* constants, so that loops unroll */
        case 2: add_heads(from, rows->row * bytes, 0, keys, ahead, weight, 1, sum, width, dim); break;
        case 3: add_heads(from, rows->row * bytes, 1, keys, ahead, weight, 1, sum, width, dim); break;
        case 4: add_heads(from, rows->row * bytes, 0, keys, ahead, weight, 2, sum, width, dim); break;
        case 5: add_heads(from, rows->row * bytes, 1, keys, ahead, weight, 2, sum, width, dim); break;
        case 6: add_heads(from, rows->row * bytes, 0, keys, ahead, weight, 3, sum, width, dim); break;
        case 7: add_heads(from, rows->row * bytes, 1, keys, ahead, weight, 3, sum, width, dim); break;
        case 8: add_heads(from, rows->row * bytes, 0, keys, ahead, weight, 4, sum, width, dim); break;
        default: add_heads(from, rows->row * bytes, 1, keys, ahead, weight, 4, sum, width, dim);
        }
    }
}

/* Scale of a row of `half` bytes of the sketch: its checksum, 5 bits of exponent and 3 of mantissa. */
ALWAYS_INLINE float row_scale(const uint8_t *row, int64_t half) {
    uint32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < half / 4; i++) {
        uint32_t word;
        memcpy(&word, row + 4 * i, 4);
        sum += word + (word >> 8 << 1) + (word >> 16 << 2) + (word >> 24 << 3);
    }
    const uint32_t bits = ((sum & 255) + (111 << 3)) << 20;
    float scale;
    memcpy(&scale, &bits, 4);
    return scale;
}

/* Logits of blocks [0, blocks) of one token and head, each its best vector's. */
ALWAYS_INLINE void score_blocks(const Decode *a, const Token *token, int64_t head, const float *q,
                                float *scores, int64_t blocks, int dim) {
    const int64_t per_block = a->block_size / VECTOR, per_page = a->page_size / VECTOR;
    const int32_t *pages = a->table + token->request * a->table_stride;
    const int64_t half = dim / 2, vectors = blocks * per_block;
    float levels[LANES][MOST_DIM];
    Lanes scale = {0};
    const char *row[LANES];
    for (int64_t j = 0; j < LANES; j++) row[j] = (const char *)levels[j];
    memset(levels, 0, sizeof levels);
    for (int64_t g = 0; g < a->group; g++)
        for (int64_t block = 0; block < blocks; block++)
            scores[g * a->max_blocks + block] = -INFINITY;
    for (int64_t first = 0; first < vectors; first += LANES) {
        const int64_t count = min64(LANES, vectors - first);
        for (int64_t j = 0; j < count; j++) {
            const int64_t vector = first + j;
            const uint8_t *packed = a->sketch.data + pages[vector / per_page] * a->sketch.page +
                                    head * a->sketch.head + vector % per_page * half;
            scale[j] = row_scale(packed, half);
#pragma omp simd
            for (int64_t d = 0; d < half; d++) {
                levels[j][d] = (float)(packed[d] & 15) - 7.5f;
                levels[j][d + half] = (float)(packed[d] >> 4) - 7.5f;
            }
        }
        for (int64_t g = 0; g < a->group; g++) {
            const Lanes found = scale * dots(q + g * dim, row, dim);
            float *best = scores + g * a->max_blocks;
            for (int64_t j = 0; j < count; j++) {
                const int64_t block = (first + j) / per_block;
                best[block] = found[j] > best[block] ? found[j] : best[block];
            }
        }
    }
}

/* The `count` best of scores [first, last) of at least `least`, ascending, and how many they are;
 * ties to the lower index, NaN counts as 0.  Non-negative floats order as their bits, so the
 * count-th largest is found bit by bit. */
static int32_t best_of(float *scores, int64_t first, int64_t last, int64_t count, float least,
                       int32_t *best) {
    int32_t found = 0;
    int64_t above = 0;
    if (last - first <= count && least == 0.0f) {
        for (int64_t b = first; b < last; b++) best[found++] = (int32_t)b;
        return found;
    }
    uint32_t threshold = 0, lowest;
    memcpy(&lowest, &least, sizeof lowest);
    for (int64_t b = first; b < last; b++) scores[b] = scores[b] > 0.0f ? scores[b] : 0.0f;
    const uint32_t *keys = (const uint32_t *)scores;
    for (int bit = 30; bit >= 0; bit--) {
        const uint32_t wanted = threshold | 1u << bit;
        int64_t reach = 0;
#pragma omp simd reduction(+ : reach)
        for (int64_t b = first; b < last; b++) reach += keys[b] >= wanted;
        if (reach >= count || wanted <= lowest) threshold = wanted;
    }
    for (int64_t b = first; b < last; b++) above += keys[b] > threshold;
    int64_t equal = count - above; /* places for the keys that equal the threshold, the first ones */
    for (int64_t b = first; b < last && found < count; b++) {
        if (keys[b] < threshold || (keys[b] == threshold && equal-- <= 0)) continue;
        best[found++] = (int32_t)b;
    }
    return found;
}

/* Replaces each row of logits by its softmax over [0, count) and adds it to sums. */
static void add_shares(float *rows, int64_t stride, int64_t group, int64_t count, float *sums) {
    memset(sums, 0, count * sizeof(float));
    for (int64_t g = 0; g < group; g++) {
        float *row = rows + g * stride, top = -INFINITY, total = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t b = 0; b < count; b++) top = row[b] > top ? row[b] : top;
        exp_in_place(row, count, top);
#pragma omp simd reduction(+ : total)
        for (int64_t b = 0; b < count; b++) total += row[b];
        for (int64_t b = 0; b < count; b++) sums[b] += row[b] / total;
    }
}

/* The blocks that a unit chooses, by the sketch. */
ALWAYS_INLINE void choose_blocks(const Decode *a, const Token *token, int64_t unit, int dim) {
    float *scores = a->scores + unit * (a->group + 1) * a->max_blocks;
    float *sums = scores + a->group * a->max_blocks;
    const int64_t blocks = token->position / a->block_size;
    const int64_t picks = a->places ? a->places[unit % a->heads] : token->picks;
    score_blocks(a, token, unit % a->heads, a->rotated + unit * a->group * dim, scores, blocks, dim);
    add_shares(scores, a->max_blocks, a->group, blocks, sums);
    a->units[unit].chosen = best_of(sums, token->front, token->local, picks, a->least,
                                    a->chosen + unit * a->max_picks);
}

/* Tokens of a block: those that choose none go by runs, whatever the size of blocks, so that the
 * result does not depend on it. */
ALWAYS_INLINE int64_t block_tokens(const Decode *a, const Token *token) {
    return token->picks ? a->block_size : RUN;
}

/* Entries of what a token attends: sinks, chosen blocks, window. */
ALWAYS_INLINE int64_t num_entries(const Decode *a, const Token *token, int64_t unit) {
    const int64_t locals = token->position / block_tokens(a, token) + 1 - token->local;
    return token->front + a->units[unit].chosen + max64(locals, 0);
}

ALWAYS_INLINE int64_t entry_block(const Decode *a, const Token *token, int64_t unit,
                                  int64_t entry) {
    if (entry < token->front) return entry;
    entry -= token->front;
    const int64_t chosen = a->units[unit].chosen;
    return entry < chosen ? a->chosen[unit * a->max_picks + entry] : token->local + entry - chosen;
}

/* Online softmax over entries [first, last) of a token's list of blocks. */
ALWAYS_INLINE void attend_blocks(const Decode *a, const Token *token, int64_t unit, int64_t first,
                                 int64_t last, float *part, int dim) {
    const int64_t group = a->group, size = block_tokens(a, token), width = dim + 2;
    const int64_t head = unit % a->heads;
    const float *q = a->q + unit * group * dim;
    const int32_t *pages = a->table + token->request * a->table_stride;
    float weights[MOST_GROUP][RUN];
    memset(part, 0, group * width * sizeof(float));
    for (int64_t g = 0; g < group; g++) part[g * width + dim] = -INFINITY;
    for (int64_t entry = first; entry < last; entry++) {
        const int64_t block = entry_block(a, token, unit, entry);
        const int64_t then = entry_block(a, token, unit, min64(entry + 1, last - 1)) * size;
        const int64_t end = min64((block + 1) * size, token->position + 1);
        for (int64_t key = block * size, keys; key < end; key += keys) {
            const int64_t sinks_end = token->sinks_end, window_start = token->window_start;
            keys = min64(min64(RUN, end - key), a->page_size - key % a->page_size);
            if (sinks_end <= key && key < window_start) { /* between sinks and window: not seen */
                keys = min64(window_start, end) - key;
                continue;
            }
            if (key < sinks_end && sinks_end < window_start) keys = min64(keys, sinks_end - key);
            const int64_t done = key - block * size;
            logits_of(&a->k, row_of(a, &a->k, pages, head, key), keys,
                      ahead_of(a, &a->k, pages, head, then, done, size), q, group, weights[0], RUN,
                      dim);
            for (int64_t g = 0; g < group; g++) {
                float *state = part + g * width, *weight = weights[g];
                float top = state[dim], total = 0.0f;
#pragma omp simd reduction(max : top)
                for (int64_t j = 0; j < keys; j++) top = weight[j] > top ? weight[j] : top;
                const float keep = top > state[dim] ? expf(state[dim] - top) : 1.0f;
                exp_in_place(weight, keys, top);
#pragma omp simd reduction(+ : total)
                for (int64_t j = 0; j < keys; j++) total += weight[j];
                for (int d = 0; d < dim; d++) state[d] *= keep;
                state[dim] = top;
                state[dim + 1] = state[dim + 1] * keep + total;
            }
            add_rows(&a->v, row_of(a, &a->v, pages, head, key), keys,
                     ahead_of(a, &a->v, pages, head, then, done, size), weights[0], group, part,
                     width, dim);
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
            a->units[unit] = (Unit){0, (int32_t)a->splits};
            if (token->picks) choose_blocks(a, token, unit, dim);
        }
#pragma omp for schedule(static, 1) nowait
        for (int64_t piece = 0; piece < units * a->splits; piece++) {
            const int64_t unit = piece / a->splits, split = piece % a->splits;
            const Token *token = a->plan + unit / a->heads;
            const int64_t count = num_entries(a, token, unit);
            attend_blocks(a, token, unit, count * split / a->splits,
                          count * (split + 1) / a->splits, a->parts + piece * group * (dim + 2), dim);
            if (!__atomic_sub_fetch(&a->units[unit].waiting, 1, __ATOMIC_ACQ_REL)) combine(a, unit);
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
