/* What decode.py hands to a decode in C, and what its parts keep for one another. */

#pragma once

#include <omp.h>

#include "lanes.h"

#define MOST_DIM 256
#define MOST_ROWS 64

typedef struct {
    char *data;
    int64_t page, head, row; /* strides in elements; for q and out, of a token and a head */
    int64_t is_bf16;
} Rows;

/* The records (record.py) that pages keep; strides in bytes. */
typedef struct {
    const uint8_t *data;
    int64_t page, head;
} Summary;

/* A token, or the tokens of a request that choose together: the first one, and how many. */
typedef struct {
    int64_t request, row, count, position, front, picks, local, sinks_end, window_start;
} Token;

typedef struct {
    int32_t chosen;  /* entries */
    int32_t waiting; /* pieces that are not done yet, of the pass over it */
} Unit;

typedef struct {
    int64_t lists, heads, group, rows, dim, page_size, threads, splits;
    int64_t max_blocks, max_picks;
    int64_t scores_size;
    float scale;       /* of logits */
    Rows q, out, k, v; /* q, out: [tokens, heads * group, dim] */
    Summary summary;
    const int32_t *table;
    int64_t table_stride;
    const Token *plan;
    const float *sinks; /* [heads, group] or NULL */
    float *scores;      /* [slots, scores_size]: what a choice is made from */
    int32_t *chosen;    /* [slots, max_picks + 1] entries: cells and weights */
    Unit *units;        /* [slots] */
    float *parts;       /* [slots, splits, rows, PART]: sums, by chunks; maximum, total */
} Decode;

/* The tokens of a unit. */
ALWAYS_INLINE const Token *token_of(const Decode *a, int64_t unit) {
    return a->plan + unit / a->heads;
}

/* Rows of a unit: the query heads of each of its tokens; `rows` of Decode is the most of them. */
ALWAYS_INLINE int64_t rows_of(const Decode *a, int64_t unit) {
    return token_of(a, unit)->count * a->group;
}

/* Where a unit, tokens and a KV head, keeps what it needs: it has a slot of its own where several
 * pieces work on it, and else its thread's. */
ALWAYS_INLINE int64_t slot_of(const Decode *a, int64_t unit) {
    return a->splits > 1 ? unit : omp_get_thread_num();
}

/* Floats of a part: whole chunks of any processor, and two. */
#define PART(dim) (((dim) + 31) / 32 * 32 + 2)

ALWAYS_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
ALWAYS_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* A unit's row g in q or out. */
ALWAYS_INLINE char *query_row(const Decode *a, const Rows *rows, int64_t unit, int64_t g) {
    const int64_t head = unit % a->heads * a->group + g % a->group;
    const int64_t at = (token_of(a, unit)->row + g / a->group) * rows->page + head * rows->head;
    return rows->data + at * (rows->is_bf16 ? 2 : 4);
}

/* A query, times the scale of logits. */
ALWAYS_INLINE void scaled_query(const Decode *a, int64_t unit, int64_t g, int dim, float *to) {
    const char *row = query_row(a, &a->q, unit, g);
    for (int d = 0; d < dim; d++) {
        float value;
        if (a->q.is_bf16) {
            uint16_t half;
            memcpy(&half, row + 2 * d, 2);
            const uint32_t bits = (uint32_t)half << 16;
            memcpy(&value, &bits, 4);
        } else {
            memcpy(&value, row + 4 * d, 4);
        }
        to[d] = value * a->scale;
    }
}

/* A row to ask for ahead of its use: blocks lie far apart, which the hardware does not foresee.
 * Into the second-level cache: two runs would fill the first. */
ALWAYS_INLINE void ask(const void *row, int64_t bytes) {
    const char *lines = row;
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(lines + line, 0, 2);
}

/* Floats of a part's sums of one row: channels in the order of chunks. */
ALWAYS_INLINE float *part_of(const Decode *a, int64_t unit, int64_t split, int64_t g) {
    return a->parts + ((slot_of(a, unit) * a->splits + split) * a->rows + g) * PART(a->dim);
}

/* Maximum and total of a part of one row. */
ALWAYS_INLINE float *state_of(float *part, int64_t dim) { return part + PART(dim) - 2; }

/* Entries of the cells that a unit chooses, and a spare one behind them. */
ALWAYS_INLINE int32_t *chosen_of(const Decode *a, int64_t unit) {
    return a->chosen + slot_of(a, unit) * (a->max_picks + 1);
}
