/* The records (record.h) of segments that are complete, from their keys.  Called by
 * records.py, which documents the arguments.  Sums are float32, but for the mean keys'. */

#include "record.h"

#define MOST_DIM 512
#define MOST_E5M2 57344.0f
#define MOST_FP16 65504.0f
#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef struct {
    const char *data;
    int64_t page, head, row; /* strides in elements */
    int64_t is_bf16;
} Rows;

typedef struct {
    int64_t count, heads, dim, page_segments, threads;
    const int64_t *segments; /* [count]: of all pages, in their order */
    Rows k;
    uint8_t *records;
    int64_t records_page, records_head; /* strides in bytes */
} Records;

ALWAYS_INLINE void load_row(const Rows *rows, int64_t at, int dim, float *to) {
    if (!rows->is_bf16) {
        memcpy(to, rows->data + 4 * at, 4 * dim);
        return;
    }
    const uint16_t *halves = (const uint16_t *)rows->data + at;
    for (int d = 0; d < dim; d++) to[d] = as_float((uint32_t)halves[d] << 16);
}

ALWAYS_INLINE int32_t clamp(int32_t x, int32_t low, int32_t high) {
    return x < low ? low : x > high ? high : x;
}

/* The nearest e5m2 of a number that is not negative, ties to even. */
ALWAYS_INLINE uint8_t e5m2_code(float x) {
    x = x < MOST_E5M2 ? x : MOST_E5M2;
    const int32_t bits = as_bits(x), code = ((bits + 0xfffff + (bits >> 21 & 1)) >> 21) - (112 << 2);
    return (uint8_t)(x < 0x1p-14f ? (int32_t)rintf(x * 0x1p16f) : code);
}

/* The nearest fp16, ties to even; one NaN for all. */
ALWAYS_INLINE uint16_t fp16_code(float number) {
    if (number != number) return 0x7e00;
    const uint16_t sign = (uint16_t)(as_bits(number) >> 16 & 0x8000);
    float x = fabsf(number);
    x = x < MOST_FP16 ? x : MOST_FP16;
    const int32_t bits = as_bits(x), code = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
    return (uint16_t)(sign | (x < 0x1p-14f ? (int32_t)rintf(x * 0x1p24f) : code));
}

/* The size of each RoPE pair, over all vectors, as codes of 4 bits below the largest; and the
 * factors of a channel that divide by it.  Returns the largest code. */
ALWAYS_INLINE uint8_t size_pairs(float vectors[VECTORS][MOST_DIM], int dim, uint8_t *pairs,
                                 float *inverse) {
    const int half = dim / 2, quarter = dim / 4;
    float squares[MOST_DIM] = {0};
    int32_t codes[MOST_DIM / 2], base = 0;
    for (int i = 0; i < VECTORS; i++)
        for (int d = 0; d < dim; d++) squares[d] += vectors[i][d] * vectors[i][d];
    for (int p = 0; p < half; p++) {
        const float size = sqrtf((squares[p] + squares[half + p]) / (2 * VECTORS));
        const int32_t bits = as_bits(size) + (1 << (PAIR_SHIFT - 1));
        codes[p] = clamp((bits >> PAIR_SHIFT) - PAIR_FIRST, 0, 255);
        base = codes[p] > base ? codes[p] : base;
    }
    const int32_t most = base < 15 ? base : 15;
    for (int p = 0; p < half; p++) {
        codes[p] = base - codes[p] < most ? base - codes[p] : most;
        const float scale = as_float((uint32_t)(base - codes[p] + PAIR_FIRST) << PAIR_SHIFT);
        inverse[p] = inverse[half + p] = 1.0f / scale;
    }
    for (int b = 0; b < quarter; b++) pairs[b] = (uint8_t)(codes[b] | codes[quarter + b] << 4);
    return (uint8_t)base;
}

/* Levels of a vector, and the code of its scale. */
ALWAYS_INLINE uint8_t quantise(const float *vector, const float *inverse, int dim, uint8_t *row) {
    const int quarter = dim / 4;
    float z[MOST_DIM], squares = 0.0f, product = 0.0f;
    uint8_t levels[MOST_DIM]; /* half of each, rounded down, in 2 bits */
    for (int d = 0; d < dim; d++) {
        z[d] = vector[d] * inverse[d];
        squares += z[d] * z[d];
    }
    const float edge = squares / (float)dim;
    for (int d = 0; d < dim; d++) {
        const int large = z[d] * z[d] >= edge;
        product += fabsf(z[d]) * (large ? 3.0f : 1.0f);
        levels[d] = (uint8_t)((z[d] < 0.0f ? 3 : 0) ^ large);
    }
    for (int b = 0; b < quarter; b++)
        row[b] = (uint8_t)(levels[b] << 6 | levels[quarter + b] << 4 |
                           levels[2 * quarter + b] << 2 | levels[3 * quarter + b]);
    const float scale = product > 0.0f ? squares / product : 0.0f;
    const int32_t bits = as_bits(scale) + (1 << (SCALE_SHIFT - 1));
    return (uint8_t)clamp((bits >> SCALE_SHIFT) - SCALE_FIRST, 0, 255);
}

ALWAYS_INLINE void write_record(const Records *a, int64_t segment, int64_t head, int dim) {
    const int64_t page = segment / a->page_segments, place = segment % a->page_segments;
    const int64_t k = page * a->k.page + head * a->k.head + place * SEGMENT * a->k.row;
    uint8_t *record = a->records + page * a->records_page + head * a->records_head +
                      place * RECORD_BYTES(dim);
    const int half = dim / 2;
    double sums[MOST_DIM] = {0}; /* means that are nearly 0 have all their bits */
    float vectors[VECTORS][MOST_DIM], mean[MOST_DIM];
    float squares[MOST_DIM] = {0}, inverse[MOST_DIM], row[MOST_DIM], next[MOST_DIM];
    for (int i = 0; i < VECTORS; i++) {
        load_row(&a->k, k + 2 * i * a->k.row, dim, row);
        load_row(&a->k, k + (2 * i + 1) * a->k.row, dim, next);
        for (int d = 0; d < dim; d++) {
            const float rest = (row[d] - next[d]) * 0.5f;
            vectors[i][d] = (row[d] + next[d]) * 0.5f;
            sums[d] += (double)row[d] + (double)next[d];
            squares[d] += rest * rest;
        }
    }
    memset(record + AT_BASE(dim), 0, RECORD_BYTES(dim) - AT_BASE(dim));
    for (int d = 0; d < dim; d++) {
        const uint16_t code = fp16_code((float)(sums[d] / SEGMENT));
        memcpy(record + AT_MEAN(dim) + 2 * d, &code, 2);
        mean[d] = code >> 15 ? -widen_fp16(code & 0x7fff) : widen_fp16(code);
    }
    for (int p = 0; p < half; p++)
        record[AT_VARIANCE(dim) + p] = e5m2_code((squares[p] + squares[half + p]) / (2 * VECTORS));
    for (int i = 0; i < VECTORS; i++)
        for (int d = 0; d < dim; d++) vectors[i][d] -= mean[d];
    record[AT_BASE(dim)] = size_pairs(vectors, dim, record + AT_PAIRS(dim), inverse);
    for (int i = 0; i < VECTORS; i++)
        record[AT_SCALES(dim) + i] = quantise(vectors[i], inverse, dim, record + i * (dim / 4));
}

ALWAYS_INLINE void write_records(const Records *a, int dim) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(a->threads)
    for (int64_t i = 0; i < a->count; i++)
        for (int64_t head = 0; head < a->heads; head++)
            write_record(a, a->segments[i], head, dim);
}

void sparsek_records(const Records *a) {
    switch (a->dim) { /* the common head dimensions as constants, so that loops unroll */
    case 64: write_records(a, 64); break;
    case 128: write_records(a, 128); break;
    default: write_records(a, (int)a->dim);
    }
}
