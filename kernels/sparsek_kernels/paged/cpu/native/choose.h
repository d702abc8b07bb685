/* The cells of 2 keys that a unit attends: a sample by the records of segments.  The rule is
 * docs/selection.md, "The sample"; sample.py has it in torch. */

#pragma once

#include "decode.h"
#include "record.h"

#define SHARES (VECTORS / WIDE) /* registers with a number of each of a record's vectors */
#define AHEAD 192               /* bytes of a record for 16 channels: three lines */
#define LARGEST 32767.0f        /* factor of a level */
#define MOST_SCORE 80.0f        /* logarithm; keys end far below */
#define KEY_SHIFT 21            /* 4 keys an octave */
#define KEYS 64
#define CELL_BITS 21  /* of a list's entry, a cell and the log of its weight */
#define STEPS 32      /* of a weight's log in an octave */
#define WHOLE_BITS 16 /* behind the point of shares */
#define THREADS 8     /* a segment's cells come as this many threads hold them */
#define COLUMNS (VECTORS / THREADS)
#define COUNTERS 4    /* of a key, so that equal neighbours do not wait for each other */

/* What a unit chooses by; segments and cells count from the sequence's first. */
typedef struct {
    int64_t cells, segments;
    float *shares; /* [rows, cells]: exp of logits less the segment's best */
    float *best;   /* [rows, segments]: of logits */
    float *sums;   /* [rows, segments]: of shares */
    float *gains;  /* [rows, segments]: logarithms; then factors of shares in scores */
    uint8_t *keys; /* [cells] */
} Choice;

ALWAYS_INLINE Choice choice_of(const Decode *a, int64_t unit) {
    Choice c;
    c.cells = a->max_blocks;
    c.segments = c.cells / VECTORS;
    c.shares = a->scores + slot_of(a, unit) * a->scores_size;
    c.best = c.shares + a->rows * c.cells;
    c.sums = c.best + a->rows * c.segments;
    c.gains = c.sums + a->rows * c.segments;
    c.keys = (uint8_t *)(c.gains + a->rows * c.segments);
    return c;
}

/* The record of a unit's segment. */
ALWAYS_INLINE const uint8_t *record_of(const Decode *a, const Token *token, int64_t unit,
                                       int64_t segment, int dim) {
    const int32_t per_page = (int32_t)a->page_size / SEGMENT, page = (int32_t)segment / per_page;
    const int32_t *pages = a->table + token->request * a->table_stride;
    return a->summary.data + pages[page] * a->summary.page + unit % a->heads * a->summary.head +
           (segment - page * per_page) * RECORD_BYTES(dim);
}

#define WORDS(dim) (((dim) + 15) / 16) /* of a row of levels */
#define LEVELS(dim) (16 * WORDS(dim))

/* Levels stand by quarters, as the fields of a byte do, and a quarter's by words: of bytes 0, 2, 1
 * and 3, so that neighbours are in both halves of the word.  The byte of number `at`: */
ALWAYS_INLINE int byte_at(int at) { return (at & ~3) | (at & 1) << 1 | (at >> 1 & 1); }

/* A query, times the scale of logits. */
typedef struct {
    float channels[MOST_DIM];
    float squares[MOST_DIM / 2]; /* sums of the squares of RoPE pairs */
    float levels[MOST_DIM];      /* in the levels' order */
} Query;

ALWAYS_INLINE void load_queries(const Decode *a, int64_t unit, int dim, Query *queries) {
    const int half = dim / 2, quarter = dim / 4;
    for (int64_t g = 0; g < rows_of(a, unit); g++) {
        Query *query = queries + g;
        memset(query, 0, sizeof *query);
        scaled_query(a, unit, g, dim, query->channels);
        const float *x = query->channels;
        for (int p = 0; p < half; p++) query->squares[p] = x[p] * x[p] + x[half + p] * x[half + p];
        for (int k = 0; k < 4; k++)
            for (int at = 0; at < 4 * WORDS(dim); at++)
                if (byte_at(at) < quarter)
                    query->levels[k * 4 * WORDS(dim) + at] = x[k * quarter + byte_at(at)];
    }
}

/* A record: its levels by words, each of all vectors. */
typedef struct {
    WideBits words[WORDS(MOST_DIM)][SHARES];
    float scales[VECTORS];
    float mean[MOST_DIM];
    float variances[MOST_DIM / 2]; /* of pairs */
    float sizes[MOST_DIM];         /* of pairs, in the levels' order */
} Record;

ALWAYS_INLINE void load_record(const uint8_t *from, int dim, Record *to) {
    const int words = WORDS(dim), quarter = dim / 4;
    for (int first = 0; first < VECTORS; first += LANES)
        for (int c = 0; c < words; c += LANES) {
            Bits rows[LANES] = {{0}};
            for (int j = 0; j < LANES; j++)
                copy(rows + j, from + (first + j) * quarter + 4 * c, quarter - 4 * c, sizeof *rows);
            transpose(rows);
            for (int i = 0; i < LANES && c + i < words; i++)
                memcpy((float *)to->words[c + i] + first, rows + i, sizeof *rows);
        }
    for (int i = 0; i < VECTORS; i++) {
        const uint32_t code = from[AT_SCALES(dim) + i];
        to->scales[i] = code ? as_float((code + SCALE_FIRST) << SCALE_SHIFT) : 0.0f;
    }
    for (int d = 0; d < dim; d++) {
        uint16_t half;
        memcpy(&half, from + AT_MEAN(dim) + 2 * d, 2);
        to->mean[d] = half >> 15 ? -widen_fp16(half & 0x7fff) : widen_fp16(half);
    }
    for (int p = 0; p < dim / 2; p++) {
        to->variances[p] = widen_fp16((uint16_t)(from[AT_VARIANCE(dim) + p] << 8)); /* e5m2 */
    }
    uint32_t pairs[WORDS(MOST_DIM)] = {0};
    copy(pairs, from + AT_PAIRS(dim), quarter, sizeof pairs);
    for (int i = 0; i < words; i++)
        pairs[i] = (pairs[i] & 0xff0000ff) | (pairs[i] >> 8 & 0xff00) | (pairs[i] & 0xff00) << 8;
    const uint8_t *codes = (const uint8_t *)pairs;
    const uint32_t base = from[AT_BASE(dim)] + PAIR_FIRST;
    for (int k = 0; k < 4; k++)
        for (int at = 0; at < 4 * words; at++)
            to->sizes[4 * words * k + at] =
                as_float((base - (codes[at] >> k % 2 * 4 & 15)) << PAIR_SHIFT);
}

/* Factors of a record's levels in 16 bits, so that products are sums of integers. */
typedef struct {
    int16_t of[MOST_DIM]; /* in the levels' order */
    int32_t total;
    float step;
} LevelFactors;

ALWAYS_INLINE void quantise_factors(const Query *query, const Record *record, int dim,
                                    LevelFactors *to) {
    float factors[MOST_DIM], largest = 0.0f;
    int32_t total = 0;
#pragma omp simd reduction(max : largest)
    for (int at = 0; at < LEVELS(dim); at++) {
        factors[at] = query->levels[at] * record->sizes[at];
        const float size = fabsf(factors[at]);
        largest = size > largest ? size : largest;
    }
    const float inverse = largest > 0.0f ? LARGEST / largest : 0.0f;
#pragma omp simd reduction(+ : total)
    for (int at = 0; at < LEVELS(dim); at++) {
        const int32_t level = (int32_t)rintf(factors[at] * inverse);
        to->of[at] = (int16_t)level;
        total += level;
    }
    to->total = total;
    to->step = largest / LARGEST;
}

/* Logits of a record's vectors for up to four query heads, as shares of the best one. */
ALWAYS_INLINE void score_record(const Record *record, const uint8_t *ahead, const Query *queries,
                                int heads, const Choice *c, int64_t first, int64_t segment,
                                int dim) {
    LevelFactors factors[4];
    WideInts sums[4][SHARES] = {{{0}}};
    for (int g = 0; g < heads; g++) quantise_factors(queries + g, record, dim, factors + g);
    for (int i = 0; i < WORDS(dim); i++) {
        ask(ahead + i * AHEAD, AHEAD);
        WideBits levels[SHARES]; /* halves of levels, and 2 */
        for (int h = 0; h < SHARES; h++) levels[h] = record->words[i][h] ^ 0xaaaaaaaa;
        for (int n = 0; n < 8; n++) {
            const int byte = n / 4, quarter = n % 4, place = 8 * byte + 6 - 2 * quarter;
            WideBits own[SHARES];
            for (int h = 0; h < SHARES; h++) own[h] = levels[h] >> place & 0x30003;
            for (int g = 0; g < heads; g++) {
                uint32_t pair;
                memcpy(&pair, &factors[g].of[4 * WORDS(dim) * quarter + 4 * i + 2 * byte], 4);
                for (int h = 0; h < SHARES; h++) sums[g][h] = add_pairs(sums[g][h], pair, own[h]);
            }
        }
    }
    for (int g = 0; g < heads; g++) {
        const Query *query = queries + g;
        float base = 0.0f, gain = 1.0f, best = -INFINITY, sum = 0.0f, logits[VECTORS];
        const int32_t *products = (const int32_t *)sums[g];
#pragma omp simd reduction(+ : base)
        for (int d = 0; d < dim; d++) base += query->channels[d] * record->mean[d];
#pragma omp simd reduction(+ : gain)
        for (int p = 0; p < dim / 2; p++) gain += query->squares[p] * record->variances[p];
#pragma omp simd reduction(max : best)
        for (int i = 0; i < VECTORS; i++) {
            const float product = (float)(2 * products[i] - 3 * factors[g].total);
            logits[i] = base + factors[g].step * record->scales[i] * product;
            best = logits[i] > best ? logits[i] : best;
        }
        exp_in_place(logits, VECTORS, best);
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < VECTORS; i++) sum += logits[i];
        const int64_t at = (first + g) * c->segments + segment;
        memcpy(c->shares + (first + g) * c->cells + segment * VECTORS, logits, sizeof logits);
        c->best[at] = best;
        c->sums[at] = sum;
        c->gains[at] = sqrtf(gain) - 1.0f;
    }
}

/* Shares of segments [first, last) of a unit's rows. */
ALWAYS_INLINE void score_records(const Decode *a, const Token *token, int64_t unit, int64_t first,
                                 int64_t last, int dim) {
    const Choice c = choice_of(a, unit);
    const int64_t rows = rows_of(a, unit);
    Query queries[MOST_ROWS];
    Record record;
    load_queries(a, unit, dim, queries);
    for (int64_t segment = first; segment < last; segment++) {
        const uint8_t *ahead = record_of(a, token, unit, min64(segment + 1, last - 1), dim);
        const uint8_t *from = record_of(a, token, unit, segment, dim);
        load_record(from, dim, &record);
        for (int64_t g = 0; g < rows; g += 4) {
            const Query *own = queries + g;
            switch (min64(rows - g, 4)) { /* constants, so that loops unroll */
            case 1: score_record(&record, ahead, own, 1, &c, g, segment, dim); break;
            case 2: score_record(&record, ahead, own, 2, &c, g, segment, dim); break;
            case 3: score_record(&record, ahead, own, 3, &c, g, segment, dim); break;
            default: score_record(&record, ahead, own, 4, &c, g, segment, dim);
            }
        }
    }
}

/* Factors of a row's shares in scores, of segments [first, last), once those of [first, own) have
 * shares. */
static void normalise(const Decode *a, const Choice *c, int64_t unit, int64_t g, int64_t first,
                      int64_t last, int64_t own) {
    float *best = c->best + g * c->segments, *gains = c->gains + g * c->segments;
    const float *sums = c->sums + g * c->segments;
    float top = -INFINITY, total = 0.0f;
#pragma omp simd reduction(max : top)
    for (int64_t n = first; n < own; n++) top = best[n] > top ? best[n] : top;
    for (int64_t s = 0; s < a->splits; s++) {
        const float other = state_of(part_of(a, unit, s, g), a->dim)[0];
        top = other > top ? other : top;
    }
    for (int64_t s = 0; s < a->splits; s++) {
        const float *state = state_of(part_of(a, unit, s, g), a->dim);
        total += state[1] > 0.0f ? state[1] * expf(state[0] - top) : state[1];
    }
    for (int64_t n = first; n < last; n++) gains[n] += best[n];
    exp_in_place(best + first, own - first, top);
#pragma omp simd reduction(+ : total)
    for (int64_t n = first; n < own; n++) total += 2.0f * best[n] * sums[n]; /* keys of a cell */
    total = top + logf(total) - logf(2.0f);
    for (int64_t n = first; n < last; n++) {
        const float score = gains[n] - total;
        gains[n] = score > MOST_SCORE ? MOST_SCORE : score;
    }
    exp_in_place(gains + first, last - first, 0.0f);
}

/* Keys of the cells of segments [first, last): scores as integers.  The last octave is that of the
 * scores of which no more cells than `picks` can be. */
static void find_keys(const Choice *c, int64_t rows, int64_t picks, int64_t first, int64_t last) {
    const int32_t octave = 127 - (63 - __builtin_clzll(max64(picks / rows, 1)));
    const int32_t first_key = (octave << 2) - (KEYS - 1);
    for (int64_t n = first; n < last; n++) {
        float scores[VECTORS] = {0};
        for (int64_t g = 0; g < rows; g++) {
            const float *shares = c->shares + g * c->cells + n * VECTORS;
            const float factor = c->gains[g * c->segments + n];
            for (int i = 0; i < VECTORS; i++) scores[i] += factor * shares[i];
        }
        for (int i = 0; i < VECTORS; i++) {
            const float score = scores[i] > 0.0f ? scores[i] : 0.0f;
            const int32_t key = (as_bits(score) >> KEY_SHIFT) - first_key;
            c->keys[n * VECTORS + i] = (uint8_t)(key < 0 ? 0 : key > KEYS - 1 ? KEYS - 1 : key);
        }
    }
}

/* Steps of the weights of cells of each key, of which there are `counts`, more than `places` in
 * all. */
static void weigh(const int32_t counts[KEYS], int64_t places, int32_t steps[KEYS]) {
    double until[KEYS], rest = 0.0, larger = 0.0; /* sizes up to a key; cells of larger ones */
    for (int k = 0; k < KEYS; k++) until[k] = rest += counts[k] * exp2(k / 4.0);
    int top = KEYS - 1; /* the last key whose cells are not kept for certain */
    for (; top > 0 && larger + until[top] / exp2(top / 4.0) < places; top--) larger += counts[top];
    /* Where it is the size of a key, the last bits of a sum do not decide. */
    const double threshold = ceil(STEPS * log2(until[top] / (places - larger)) - 1e-6);
    for (int k = 0; k < KEYS; k++) steps[k] = (int32_t)fmax(threshold - STEPS / 4 * k, 0.0);
}

/* What a running sum of shares starts from. */
static uint32_t first_sum(int64_t position) {
    return (uint32_t)position * 0x9E3779B1u >> (32 - WHOLE_BITS);
}

/* How many cells [first, last), a multiple of COUNTERS, there are of each key. */
static void count_keys(const uint8_t *keys, int64_t first, int64_t last, int32_t counts[KEYS]) {
    int32_t each[COUNTERS][KEYS] = {{0}};
    for (int64_t i = first; i < last; i += COUNTERS)
        for (int j = 0; j < COUNTERS; j++) each[j][keys[i + j]]++;
    for (int k = 0; k < KEYS; k++) {
        counts[k] = 0;
        for (int j = 0; j < COUNTERS; j++) counts[k] += each[j][k];
    }
}

/* A sample of the cells [first, last) of whole segments; returns how many are drawn.  While the sum
 * is in a place each cell is written there, so that the one which takes it beyond stays.  Steps are
 * rounded up and shares down, so that the sum ends in the place behind the last one at most: a
 * spare one. */
static int32_t sample_cells(const uint8_t *keys, int64_t first, int64_t last, int64_t places,
                            uint32_t sum, int32_t *chosen) {
    int32_t counts[KEYS], steps[KEYS];
    uint32_t shares[KEYS];
    count_keys(keys, first, last, counts);
    weigh(counts, places, steps);
    for (int k = 0; k < KEYS; k++)
        shares[k] = (uint32_t)exp2(WHOLE_BITS - steps[k] / (double)STEPS);
    for (int32_t segment = (int32_t)first; segment < last; segment += VECTORS)
#pragma GCC unroll 32
        for (int i = 0; i < VECTORS; i++) { /* 0, 8, 16, 24, 1, 9, ... */
            const int32_t cell = segment + i / COLUMNS + i % COLUMNS * THREADS;
            chosen[sum >> WHOLE_BITS] = cell;
            sum += shares[keys[cell]];
        }
    const int32_t found = (int32_t)(sum >> WHOLE_BITS);
    for (int32_t i = 0; i < found; i++) chosen[i] += steps[keys[chosen[i]]] << CELL_BITS;
    return found;
}

/* The cells of segments [front, local) that a unit attends. */
static void choose_cells(const Decode *a, const Token *token, int64_t unit) {
    const Choice c = choice_of(a, unit);
    const int64_t first = token->front / VECTORS, last = token->local / VECTORS;
    const int64_t own = token->position / SEGMENT, rows = rows_of(a, unit);
    for (int64_t g = 0; g < rows; g++) normalise(a, &c, unit, g, first, last, own);
    find_keys(&c, rows, token->picks, first, last);
    a->units[slot_of(a, unit)].chosen =
        sample_cells(c.keys, token->front, token->local, token->picks,
                     first_sum(token->position), chosen_of(a, unit));
}
