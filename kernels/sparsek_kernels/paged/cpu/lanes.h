/* Vector arithmetic of decode.c: several float32 at a time, by the compiler's vector types. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

#define LANES 8 /* float32 side by side: one or two registers of any processor */
typedef float Lanes __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

/* Lanes of a and b by their places: b's begin at LANES. */
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (Bits){__VA_ARGS__})
#endif

/* `count` channels of a row, 8 of them or fewer; zeros in the others. */
ALWAYS_INLINE Lanes load(const char *row, int is_bf16, int64_t channel, int64_t count) {
    Lanes x = {0};
    if (is_bf16) {
        Halves halves = {0};
        memcpy(&halves, row + 2 * channel, 2 * count);
        return (Lanes)(__builtin_convertvector(halves, Bits) << 16);
    }
    memcpy(&x, row + 4 * channel, 4 * count);
    return x;
}

/* A bfloat16 row as float32. */
ALWAYS_INLINE void widen(const char *row, float *to, int dim) {
    const int whole = dim / LANES * LANES, rest = dim - whole;
    for (int d = 0; d < whole; d += LANES) {
        const Lanes x = load(row, 1, d, LANES);
        memcpy(to + d, &x, sizeof x);
    }
    if (rest) {
        const Lanes x = load(row, 1, whole, rest);
        memcpy(to + whole, &x, 4 * rest);
    }
}

/* Lane j of the result is the sum of the lanes of x[j]. */
ALWAYS_INLINE Lanes sums_of(Lanes x[LANES]) {
    for (int j = 0; j < 4; j++)
        x[j] = PICK(x[j], x[j + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
               PICK(x[j], x[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int j = 0; j < 2; j++)
        x[j] = PICK(x[j], x[j + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
               PICK(x[j], x[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return PICK(x[0], x[1], 0, 8, 2, 10, 4, 12, 6, 14) +
           PICK(x[0], x[1], 1, 9, 3, 11, 5, 13, 7, 15);
}

/* Dot products of q with eight rows. */
ALWAYS_INLINE Lanes dots(const float *q, const char *const rows[LANES], int dim) {
    Lanes sums[LANES] = {0};
    const int whole = dim / LANES * LANES, rest = dim - whole;
    for (int d = 0; d < whole; d += LANES) {
        const Lanes x = load((const char *)q, 0, d, LANES);
        for (int j = 0; j < LANES; j++) sums[j] += x * load(rows[j], 0, d, LANES);
    }
    if (rest) {
        const Lanes x = load((const char *)q, 0, whole, rest);
        for (int j = 0; j < LANES; j++) sums[j] += x * load(rows[j], 0, whole, rest);
    }
    return sums_of(sums);
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
