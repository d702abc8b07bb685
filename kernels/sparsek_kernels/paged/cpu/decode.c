/* Decoding on a CPU: select, attend over the pages in place, combine.  Called by native_decode.py,
 * which documents the arguments.  All arithmetic is float32; a bfloat16 is a float32's upper half. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define VECTOR 4 /* tokens of a vector of the sketch */
#define RUN 64
#define MOST_DIM 256
#define MOST_GROUP 64
#define ALWAYS_INLINE static inline __attribute__((always_inline))

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
    int64_t request, position, front, picks, local, sinks_end, window_start, listed;
} Token;

typedef struct {
    int64_t tokens, heads, group, dim, page_size, block_size, splits;
    int64_t max_blocks, max_slots, max_picks;
    const float *q;      /* [tokens, heads, group, dim], scaled */
    const float *rotated; /* the same, rotated as the sketch is; NULL where nothing is selected */
    float *out;          /* [tokens, heads, group, dim] */
    Rows k, v;
    Sketch sketch;
    const int32_t *table;
    int64_t table_stride;
    const Token *plan;
    const int32_t *places; /* [heads] picks of each head, fewer than the token's; or NULL */
    const float *sinks; /* [heads, group] or NULL */
    float *scores;      /* [tokens * heads, group + 1, max_blocks]: by the sketch */
    float *logits;      /* [tokens * heads, group, max_slots, block_size]: of the keys read */
    int32_t *listed;    /* [tokens * heads, max_slots] blocks of the candidates */
    int32_t *chosen;    /* [tokens * heads, max_picks] places in listed, ascending */
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

/* Ask for a row ahead of its use: blocks lie far apart, which the hardware does not foresee.  One
 * row is asked for with each that is read, since a processor waits where it is asked for many. */
ALWAYS_INLINE void prefetch(const Rows *rows, int64_t at, int dim) {
    const int64_t bytes = rows->is_bf16 ? 2 : 4;
    for (int64_t line = 0; line < dim * bytes; line += 64)
        __builtin_prefetch(rows->data + at * bytes + line);
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
    const int64_t half = dim / 2;
    float levels[MOST_DIM];
    for (int64_t block = 0; block < blocks; block++) {
        for (int64_t g = 0; g < a->group; g++) scores[g * a->max_blocks + block] = -INFINITY;
        for (int64_t vector = block * per_block; vector < (block + 1) * per_block; vector++) {
            const uint8_t *packed = a->sketch.data + pages[vector / per_page] * a->sketch.page +
                                    head * a->sketch.head + vector % per_page * half;
            const float scale = row_scale(packed, half);
#pragma omp simd
            for (int64_t d = 0; d < half; d++) {
                levels[d] = (float)(packed[d] & 15) - 7.5f;
                levels[d + half] = (float)(packed[d] >> 4) - 7.5f;
            }
            for (int64_t g = 0; g < a->group; g++) {
                const float value = scale * dot(q + g * dim, levels, dim);
                float *best = scores + g * a->max_blocks + block;
                *best = value > *best ? value : *best;
            }
        }
    }
}

/* The `count` best of scores [first, last), ascending; ties to the lower index, NaN counts as 0.
 * Non-negative floats order as their bits, so the count-th largest is found bit by bit. */
static int64_t best_of(float *scores, int64_t first, int64_t last, int64_t count, int32_t *best) {
    int64_t found = 0, above = 0;
    if (last - first <= count) {
        for (int64_t b = first; b < last; b++) best[found++] = (int32_t)b;
        return found;
    }
    uint32_t threshold = 0;
    for (int64_t b = first; b < last; b++) scores[b] = scores[b] > 0.0f ? scores[b] : 0.0f;
    const uint32_t *keys = (const uint32_t *)scores;
    for (int bit = 30; bit >= 0; bit--) {
        const uint32_t wanted = threshold | 1u << bit;
        int64_t reach = 0;
#pragma omp simd reduction(+ : reach)
        for (int64_t b = first; b < last; b++) reach += keys[b] >= wanted;
        if (reach >= count) threshold = wanted;
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

/* First step: the candidates whose keys are read, by the sketch. */
ALWAYS_INLINE void list_blocks(const Decode *a, const Token *token, int64_t unit, int dim) {
    float *scores = a->scores + unit * (a->group + 1) * a->max_blocks;
    float *sums = scores + a->group * a->max_blocks;
    const int64_t blocks = token->position / a->block_size;
    if (token->local - token->front > token->listed) {
        score_blocks(a, token, unit % a->heads, a->rotated + unit * a->group * dim, scores, blocks,
                     dim);
        add_shares(scores, a->max_blocks, a->group, blocks, sums);
    }
    best_of(sums, token->front, token->local, token->listed, a->listed + unit * a->max_slots);
}

/* Tokens of a block: those that choose none go by runs, whatever the size of blocks, so that the
 * result does not depend on it. */
ALWAYS_INLINE int64_t block_tokens(const Decode *a, const Token *token) {
    return token->picks ? a->block_size : RUN;
}

/* Blocks that a unit keeps of its candidates. */
ALWAYS_INLINE int64_t unit_picks(const Decode *a, const Token *token, int64_t unit) {
    return token->picks && a->places ? a->places[unit % a->heads] : token->picks;
}

/* What a unit reads: sinks, then window, then candidates. */
ALWAYS_INLINE int64_t local_slots(const Decode *a, const Token *token) {
    return token->position / block_tokens(a, token) + 1 - token->local;
}

ALWAYS_INLINE int64_t slot_block(const Token *token, const int32_t *listed, int64_t locals,
                                 int64_t slot) {
    if (slot < token->front) return slot;
    slot -= token->front;
    return slot < locals ? token->local + slot : listed[slot - locals];
}

/* Logits of the keys of slots [first, last); keys after the token have -inf. */
ALWAYS_INLINE void read_keys(const Decode *a, const Token *token, int64_t unit, int64_t first,
                             int64_t last, int dim) {
    const int64_t size = a->block_size, locals = local_slots(a, token), head = unit % a->heads;
    const int32_t *pages = a->table + token->request * a->table_stride;
    const int32_t *listed = a->listed + unit * a->max_slots;
    const float *q = a->q + unit * a->group * dim;
    float *logits = a->logits + unit * a->group * a->max_slots * size, key_row[MOST_DIM];
    for (int64_t slot = first; slot < last; slot++) {
        const int64_t start = slot_block(token, listed, locals, slot) * size;
        const int64_t then = slot_block(token, listed, locals, min64(slot + 1, last - 1)) * size;
        const int64_t then_row = then % a->page_size, ahead = min64(size, a->page_size - then_row);
        const int64_t then_at = pages[then / a->page_size] * a->k.page + head * a->k.head +
                                then_row * a->k.row;
        for (int64_t j = 0; j < size; j++) {
            if (j < ahead) prefetch(&a->k, then_at + j * a->k.row, dim);
            const int64_t key = start + j, seen = key <= token->position;
            if (seen) {
                const int64_t page = pages[key / a->page_size], row = key % a->page_size;
                widen(&a->k, page * a->k.page + head * a->k.head + row * a->k.row, dim, key_row);
            }
            for (int64_t g = 0; g < a->group; g++)
                logits[(g * a->max_slots + slot) * size + j] =
                    seen ? dot(q + g * dim, key_row, dim) : -INFINITY;
        }
    }
}

/* Second step: the candidates with the largest share of the attention to what was read. */
ALWAYS_INLINE void choose_blocks(const Decode *a, const Token *token, int64_t unit) {
    const int64_t size = a->block_size, locals = local_slots(a, token);
    const int64_t fixed = token->front + locals, slots = fixed + token->listed;
    const float *logits = a->logits + unit * a->group * a->max_slots * size;
    float *masses = a->scores + unit * (a->group + 1) * a->max_blocks;
    float *sums = masses + a->group * a->max_blocks;
    for (int64_t g = 0; g < a->group; g++) {
        const float *row = logits + g * a->max_slots * size;
        float top = -INFINITY, some[RUN * 4];
        for (int64_t j = 0; j < slots * size; j++) top = row[j] > top ? row[j] : top;
        for (int64_t slot = 0; slot < slots; slot++) {
            float total = 0.0f;
            for (int64_t from = 0; from < size; from += RUN * 4) {
                const int64_t count = min64(RUN * 4, size - from);
                memcpy(some, row + slot * size + from, count * sizeof(float));
                exp_in_place(some, count, top);
                for (int64_t j = 0; j < count; j++) total += some[j];
            }
            masses[g * a->max_blocks + slot] = logf(total);
        }
    }
    add_shares(masses, a->max_blocks, a->group, slots, sums);
    best_of(sums, fixed, slots, unit_picks(a, token, unit), a->chosen + unit * a->max_picks);
}

/* Block of an entry of what a token attends: sinks, chosen blocks, window. */
ALWAYS_INLINE int64_t entry_slot(const Decode *a, const Token *token, int64_t unit, int64_t entry) {
    const int64_t picks = unit_picks(a, token, unit);
    if (entry < token->front) return entry;
    entry -= token->front;
    return entry < picks ? a->chosen[unit * a->max_picks + entry] : token->front + entry - picks;
}

ALWAYS_INLINE int64_t entry_block(const Decode *a, const Token *token, int64_t unit,
                                  int64_t entry) {
    if (!token->picks)
        return entry < token->front ? entry : token->local + entry - token->front;
    const int64_t slot = entry_slot(a, token, unit, entry);
    return slot_block(token, a->listed + unit * a->max_slots, local_slots(a, token), slot);
}

/* Online softmax over entries [first, last) of a token's list of blocks. */
ALWAYS_INLINE void attend_blocks(const Decode *a, const Token *token, int64_t unit, int64_t first,
                                 int64_t last, float *part, int dim) {
    const int64_t group = a->group, size = block_tokens(a, token), width = dim + 2;
    const int64_t head = unit % a->heads;
    const float *q = a->q + unit * group * dim;
    const float *known = a->logits + unit * group * a->max_slots * size;
    const int32_t *pages = a->table + token->request * a->table_stride;
    float tile[RUN * MOST_DIM], weights[MOST_GROUP][RUN], sum[MOST_DIM];
    memset(part, 0, group * width * sizeof(float));
    for (int64_t g = 0; g < group; g++) part[g * width + dim] = -INFINITY;
    const int64_t run = min64(RUN, min64(size, a->page_size));
    for (int64_t entry = first; entry < last; entry++) {
        const int64_t block = entry_block(a, token, unit, entry);
        const int64_t then = entry_block(a, token, unit, min64(entry + 1, last - 1)) * size;
        const int64_t then_page = pages[then / a->page_size], then_row = then % a->page_size;
        const int64_t then_k = then_page * a->k.page + head * a->k.head + then_row * a->k.row;
        const int64_t then_v = then_page * a->v.page + head * a->v.head + then_row * a->v.row;
        const int64_t ahead = min64(size, a->page_size - then_row);
        int64_t end = min64((block + 1) * size, token->position + 1);
        for (int64_t key = block * size; key < end;) {
            const int64_t page = pages[key / a->page_size], row = key % a->page_size;
            const int64_t keys = min64(run, min64(end - key, a->page_size - row));
            const int64_t done = key - block * size;
            const int64_t k_at = page * a->k.page + head * a->k.head + row * a->k.row;
            const int64_t v_at = page * a->v.page + head * a->v.head + row * a->v.row;
            const int64_t hidden_from = min64(max64(token->sinks_end - key, 0), keys);
            const int64_t hidden_to = min64(token->window_start - key, keys);
            if (hidden_from == 0 && hidden_to == keys) {
                key += keys;
                continue;
            }
            if (token->picks) { /* the second step read these keys */
                const int64_t slot = entry_slot(a, token, unit, entry);
                for (int64_t g = 0; g < group; g++)
                    memcpy(weights[g], known + (g * a->max_slots + slot) * size + key % size,
                           keys * sizeof(float));
            } else {
                for (int64_t j = 0; j < keys; j++) {
                    if (done + j < ahead) prefetch(&a->k, then_k + (done + j) * a->k.row, dim);
                    widen(&a->k, k_at + j * a->k.row, dim, sum);
                    for (int64_t g = 0; g < group; g++) weights[g][j] = dot(q + g * dim, sum, dim);
                }
                for (int64_t g = 0; g < group; g++)
                    for (int64_t j = hidden_from; j < hidden_to; j++) weights[g][j] = -INFINITY;
            }
            for (int64_t j = 0; j < keys; j++) {
                if (done + j < ahead) prefetch(&a->v, then_v + (done + j) * a->v.row, dim);
                widen(&a->v, v_at + j * a->v.row, dim, tile + j * dim);
            }
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
            a->waiting[unit] = (int32_t)a->splits;
            if (token->picks) list_blocks(a, token, unit, dim);
        }
#pragma omp for schedule(static, 1)
        for (int64_t piece = 0; piece < units * a->splits; piece++) {
            const int64_t unit = piece / a->splits, split = piece % a->splits;
            const Token *token = a->plan + unit / a->heads;
            if (!token->picks) continue;
            const int64_t slots = token->front + local_slots(a, token) + token->listed;
            read_keys(a, token, unit, slots * split / a->splits, slots * (split + 1) / a->splits,
                      dim);
        }
#pragma omp for schedule(static, 1)
        for (int64_t unit = 0; unit < units; unit++) {
            const Token *token = a->plan + unit / a->heads;
            if (token->picks) choose_blocks(a, token, unit);
        }
#pragma omp for schedule(static, 1) nowait
        for (int64_t piece = 0; piece < units * a->splits; piece++) {
            const int64_t unit = piece / a->splits, split = piece % a->splits;
            const Token *token = a->plan + unit / a->heads;
            const int64_t count =
                token->front + unit_picks(a, token, unit) + max64(local_slots(a, token), 0);
            attend_blocks(a, token, unit, count * split / a->splits,
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
