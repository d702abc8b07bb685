/* The record that a page keeps of 64 keys of one KV head; record.py has the table. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define SEGMENT 64 /* keys of a record */
#define VECTORS 32 /* of a record: means of 2 keys */

/* Where the sections begin, of `dim` channels; levels are first. */
#define AT_MEAN(dim) (8 * (dim))
#define AT_VARIANCE(dim) (10 * (dim))
#define AT_PAIRS(dim) (21 * (dim) / 2)
#define AT_SCALES(dim) (43 * (dim) / 4)
#define AT_BASE(dim) (AT_SCALES(dim) + VECTORS)
#define RECORD_BYTES(dim) ((AT_BASE(dim) + 2 + 15) / 16 * 16)

/* Small floats as float32 with a few bits of mantissa: code 0 is FIRST of the float32's bits. */
#define PAIR_SHIFT 22 /* 1 bit of mantissa */
#define PAIR_FIRST 126
#define SCALE_SHIFT 19 /* 4 bits of mantissa */
#define SCALE_FIRST ((127 - 8) << 4)

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int32_t as_bits(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* float32 of an fp16 that is not negative. */
static inline float widen_fp16(uint16_t code) {
    return code < 0x7c00 ? as_float((uint32_t)code << 13) * 0x1p112f : NAN;
}
