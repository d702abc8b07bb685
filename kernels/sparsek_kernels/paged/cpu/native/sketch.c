/* The sketch of the keys behind some slots, byte for byte as sketch.py gives it.  Called by
 * sketch.py, which documents the arguments.  Built without freedom to reorder sums. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "rotate.h"

#define VECTOR 4 /* tokens of a vector */
#define MOST_DIM MOST_ROTATED
#define WEIGHTS 8 /* a level of channel d counts 1 << (d % 4), or 16 times that in the upper half */
#define FIRST (111 << 3) /* exponent of scale 0 */
#define LARGEST 8.0f
#define EDGE 7.49f
#define SERIAL 64 /* rows from which threads pay */
#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    int64_t slots_count, heads, dim, page_size, dtype;
    int64_t rotated; /* channels that are rotated together */
    double norm;     /* of the rotation */
    const int64_t *slots;
    const char *keys;
    int64_t key_page, key_head, key_row; /* strides in elements */
    uint8_t *sketch;
    int64_t sketch_page, sketch_head; /* strides in bytes */
} Sketch;

ALWAYS_INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

ALWAYS_INLINE int32_t as_bits(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

ALWAYS_INLINE float widen_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
    const uint32_t finite = (uint32_t)as_bits(as_float(rest) * 0x1p112f);
    return as_float(sign | (rest >= 0x0f800000 ? rest | 0x7f800000 : finite));
}

ALWAYS_INLINE void add_key(const Sketch *a, int64_t at, int dim, float *sum) {
    if (a->dtype == FLOAT32) {
        const float *key = (const float *)a->keys + at;
        for (int d = 0; d < dim; d++) sum[d] += key[d];
        return;
    }
    const uint16_t *key = (const uint16_t *)a->keys + at;
    if (a->dtype == BFLOAT16)
        for (int d = 0; d < dim; d++) sum[d] += as_float((uint32_t)key[d] << 16);
    else
        for (int d = 0; d < dim; d++) sum[d] += widen_half(key[d]);
}

/* A row of bytes of one vector, of which the levels nearest to halfway are moved so that the row's
 * checksum is the scale. */
ALWAYS_INLINE void quantise(const float *vector, int dim, uint8_t *row) {
    const int half = dim / 2;
    int32_t levels[MOST_DIM], keys[MOST_DIM], nearest[WEIGHTS] = {0}, sums[WEIGHTS] = {0};
    int32_t largest = 0; /* floats that are not negative are ordered as their bits */
    for (int d = 0; d < dim; d++) {
        const int32_t bits = as_bits(vector[d]) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    int32_t code = ((as_bits(as_float((uint32_t)largest) / LARGEST) + (1 << 19)) >> 20) - FIRST;
    code = code < 0 ? 0 : code > 255 ? 255 : code;
    const float scale = as_float((uint32_t)(code + FIRST) << 20);
    for (int d = 0; d < dim; d++) {
        float value = vector[d] / scale;
        value = value > -EDGE ? value : -EDGE;
        value = value < EDGE ? value : EDGE;
        const float lower = floorf(value), rest = value - (lower + 0.5f);
        const int32_t run = (d < half ? d : d - half) / 4;
        levels[d] = (int32_t)lower + 8;
        keys[d] = (as_bits(fabsf(rest)) & -128) | run << 1 | (rest < 0.0f);
    }
    for (int upper = 0; upper < 2; upper++)
        for (int d = 0; d < half; d += 4)
            for (int byte = 0; byte < 4; byte++) {
                const int32_t key = keys[upper * half + d + byte];
                int32_t *most = nearest + 4 * upper + byte;
                *most = key > *most ? key : *most;
                sums[4 * upper + byte] += levels[upper * half + d + byte];
            }
    int32_t missing = code, downs = 0;
    for (int w = 0; w < WEIGHTS; w++) missing -= sums[w] << w, downs |= (nearest[w] & 1) << w;
    /* Moving the weights m adds m - 2 * (m & downs): that is `missing` for this m. */
    const int32_t moved = (missing + downs) ^ downs;
    for (int w = 0; w < WEIGHTS; w++) {
        const int32_t channel = w / 4 * half + (nearest[w] >> 1 & 63) * 4 + w % 4;
        if (moved >> w & 1) levels[channel] += nearest[w] & 1 ? -1 : 1;
    }
    for (int d = 0; d < half; d++) row[d] = (uint8_t)(levels[d] | levels[half + d] << 4);
}

ALWAYS_INLINE void sketch_vector(const Sketch *a, int64_t slot, int64_t head, int dim, int size) {
    const int64_t page = slot / a->page_size, offset = slot % a->page_size;
    const int64_t vector = offset / VECTOR, filled = offset % VECTOR + 1;
    float mean[MOST_DIM] = {0}, rotated[MOST_DIM];
    for (int64_t j = 0; j < filled; j++)
        add_key(a,
                page * a->key_page + head * a->key_head + (vector * VECTOR + j) * a->key_row, dim,
                mean);
    for (int d = 0; d < dim; d++) mean[d] /= (float)filled;
    for (int d = 0; d < dim; d += size) rotate(mean + d, size, (float)a->norm, rotated + d);
    quantise(rotated, dim,
             a->sketch + page * a->sketch_page + head * a->sketch_head + vector * (dim / 2));
}

/* Of neighbouring slots in one vector the last one knows how much the vector holds. */
ALWAYS_INLINE int is_last(const Sketch *a, int64_t at) {
    const int64_t slot = a->slots[at];
    return slot % VECTOR == VECTOR - 1 || at + 1 == a->slots_count || a->slots[at + 1] != slot + 1;
}

ALWAYS_INLINE void sketch(const Sketch *a, int dim, int size) {
#pragma omp parallel for schedule(static) if (a->slots_count * a->heads >= SERIAL * VECTOR)
    for (int64_t at = 0; at < a->slots_count; at++)
        if (is_last(a, at))
            for (int64_t head = 0; head < a->heads; head++)
                sketch_vector(a, a->slots[at], head, dim, size);
}

void sparsek_sketch(const Sketch *a) {
    switch (a->dim) { /* the common head dimensions as constants, so that loops unroll */
    case 64: sketch(a, 64, 64); break;
    case 128: sketch(a, 128, 128); break;
    default: sketch(a, (int)a->dim, (int)a->rotated);
    }
}
