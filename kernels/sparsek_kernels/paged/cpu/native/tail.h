/* The tail of a choice: what is left of each segment, as one more key of its mean value. */

#pragma once

#include "choose.h"

#define TOGETHER 128 /* segments */

typedef uint8_t Bytes __attribute__((vector_size(WIDE)));

/* Adds the weighted levels of mean values to up to four heads' sums, by channels. */
ALWAYS_INLINE void add_levels(const uint8_t *values, int64_t count, float weights[4][TOGETHER],
                              int heads, float sums[4][MOST_DIM], int dim) {
    const int half = dim / 2;
    for (int b = 0; b < half; b += WIDE) {
        const int64_t size = min64(half - b, WIDE) * sizeof(float);
        Wide low[4] = {{0}}, high[4] = {{0}};
        for (int g = 0; g < heads; g++) {
            copy(low + g, sums[g] + b, size, sizeof *low);
            copy(high + g, sums[g] + half + b, size, sizeof *high);
        }
        for (int64_t j = 0; j < count; j++) {
            Bytes bytes = {0};
            copy(&bytes, values + j * half + b, size / 4, sizeof bytes);
            const WideBits levels = __builtin_convertvector(bytes, WideBits);
            const Wide x = __builtin_convertvector((WideInts)(levels & 15), Wide);
            const Wide y = __builtin_convertvector((WideInts)(levels >> 4), Wide);
            for (int g = 0; g < heads; g++) {
                low[g] += weights[g][j] * x;
                high[g] += weights[g][j] * y;
            }
        }
        for (int g = 0; g < heads; g++) {
            copy(sums[g] + b, low + g, size, sizeof *low);
            copy(sums[g] + half + b, high + g, size, sizeof *high);
        }
    }
}

/* Adds sums over keys whose weights are relative to `top` to a part. */
ALWAYS_INLINE void join(const float *sums, float top, float total, int is_bf16, float *part,
                        int dim) {
    float *state = part + PART(dim) - 2;
    const float most = top > state[0] ? top : state[0];
    const float keep = expf(state[0] - most), share = expf(top - most);
    for (int d = 0; d < dim; d++) {
        const int i = d % CHUNK, at = is_bf16 ? d - i + i / 2 + i % 2 * WIDE : d;
        part[at] = keep * part[at] + share * sums[d];
    }
    state[0] = most;
    state[1] = keep * state[1] + share * total;
}

/* Adds what is left of segments [first, last) to up to four rows of a part. */
ALWAYS_INLINE void add_tails(const Decode *a, int64_t unit, int64_t from, int heads, int64_t first,
                             int64_t last, float *part, int dim) {
    const Choice c = choice_of(a, unit);
    float sums[4][MOST_DIM] = {{0}}, totals[4] = {0}, middles[4] = {0};
    for (int64_t begin = first; begin < last; begin += TOGETHER) {
        const int64_t count = min64(last - begin, TOGETHER);
        float weights[4][TOGETHER];
        for (int g = 0; g < heads; g++) {
            const float *left = c.best + (from + g) * c.segments + begin;
            for (int64_t j = 0; j < count; j++) {
                weights[g][j] = left[j] * c.scales[begin + j];
                totals[g] += left[j];
                middles[g] += 7.5f * weights[g][j];
            }
        }
        add_levels(c.values + begin * (dim / 2), count, weights, heads, sums, dim);
    }
    for (int g = 0; g < heads; g++) {
        for (int d = 0; d < dim; d++) sums[g][d] -= middles[g];
        if (totals[g] != 0.0f) /* or NaN */
            join(sums[g], c.tops[from + g], totals[g], a->v.is_bf16, part + g * PART(dim), dim);
    }
}

static void add_tail(const Decode *a, int64_t unit, int64_t first, int64_t last, float *part,
                     int dim) {
    const int64_t count = rows_of(a, unit);
    for (int64_t g = 0; g < count; g += 4) {
        float *rows = part + g * PART(dim);
        switch (min64(count - g, 4)) { /* constants, so that loops unroll */
        case 1: add_tails(a, unit, g, 1, first, last, rows, dim); break;
        case 2: add_tails(a, unit, g, 2, first, last, rows, dim); break;
        case 3: add_tails(a, unit, g, 3, first, last, rows, dim); break;
        default: add_tails(a, unit, g, 4, first, last, rows, dim);
        }
    }
}
