/* Vector arithmetic of decode.c: several float32 at a time, by the compiler's vector types; pairs
 * of bfloat16 and of int16 by the processor's own instruction where it has one. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

#define LANES 8 /* float32 side by side: one or two registers of any processor */
typedef float Lanes __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));

#ifdef __AVX512F__ /* as wide as the registers, for long loops */
#define WIDE 16
#else
#define WIDE 8
#endif
typedef float Wide __attribute__((vector_size(WIDE * 4)));
typedef uint32_t WideBits __attribute__((vector_size(WIDE * 4)));
typedef int32_t WideInts __attribute__((vector_size(WIDE * 4)));

#define UPPER 0xffff0000u /* of a pair of bfloat16: the second one, as float32 */

/* Lanes of a and b by their places: b's begin at LANES. */
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (Bits){__VA_ARGS__})
#endif

/* Neighbouring channels of a row.  Pairs of bfloat16 are a word each: the even channels are in x,
 * the odd ones in y.  Of float32 the first half is in x. */
#define CHUNK (2 * WIDE)
typedef struct {
    Wide x, y;
} Chunk;

/* memcpy of `most` bytes or fewer, none below 1.  A constant size makes it one instruction. */
ALWAYS_INLINE void copy(void *to, const void *from, int64_t bytes, int64_t most) {
    if (bytes >= most) memcpy(to, from, most);
    else if (bytes == most / 2) memcpy(to, from, most / 2);
    else if (bytes > 0) memcpy(to, from, bytes);
}

/* `count` channels of a row of bfloat16, as words; zeros behind them. */
ALWAYS_INLINE WideBits load_pairs(const char *row, int64_t channel, int64_t count) {
    WideBits words = {0};
    copy(&words, row + 2 * channel, 2 * count, sizeof words);
    return words;
}

/* `count` channels of a row, of CHUNK or fewer; zeros behind them. */
ALWAYS_INLINE Chunk load_chunk(const char *row, int is_bf16, int64_t channel, int64_t count) {
    if (is_bf16) {
        const WideBits words = load_pairs(row, channel, count);
        return (Chunk){(Wide)(words << 16), (Wide)(words & UPPER)};
    }
    Chunk found = {{0}, {0}};
    copy(&found.x, row + 4 * channel, 4 * count, sizeof found.x);
    copy(&found.y, row + 4 * (channel + WIDE), 4 * (count - WIDE), sizeof found.y);
    return found;
}

/* float32 of which the upper halves are the nearest bfloat16, ties to even; one NaN for all. */
ALWAYS_INLINE WideBits rounded(Wide x) {
    const WideBits bits = (WideBits)x, known = (WideBits)(x == x);
    return ((bits + 0x7fff + (bits >> 16 & 1)) & known) | (0x7fc00000 & ~known);
}

ALWAYS_INLINE void store_chunk(char *row, int is_bf16, int64_t channel, int64_t count, Chunk from) {
    if (is_bf16) {
        const WideBits words = rounded(from.x) >> 16 | (rounded(from.y) & UPPER);
        copy(row + 2 * channel, &words, 2 * count, sizeof words);
    } else {
        copy(row + 4 * channel, &from.x, 4 * count, sizeof from.x);
        copy(row + 4 * (channel + WIDE), &from.y, 4 * (count - WIDE), sizeof from.y);
    }
}

/* A chunk of q or k for add_products: where the processor multiplies pairs of bfloat16, x is the
 * words themselves. */
ALWAYS_INLINE Chunk load_factors(const char *row, int is_bf16, int64_t channel, int64_t count) {
#ifdef __AVX512BF16__
    if (is_bf16) return (Chunk){(Wide)load_pairs(row, channel, count), {0}};
#endif
    return load_chunk(row, is_bf16, channel, count);
}

ALWAYS_INLINE Wide add_products(Wide sum, Chunk q, Chunk k, int is_bf16) {
#ifdef __AVX512BF16__
    if (is_bf16) return (Wide)_mm512_dpbf16_ps((__m512)sum, (__m512bh)q.x, (__m512bh)k.x);
#endif
    (void)is_bf16;
    return sum + q.x * k.x + q.y * k.y;
}

/* Adds the products of both int16 of `pair` with those of each word; exact, on every processor. */
ALWAYS_INLINE WideInts add_pairs(WideInts sum, uint32_t pair, WideBits words) {
#if defined(__AVX512VNNI__)
    return (WideInts)_mm512_dpwssd_epi32((__m512i)sum, _mm512_set1_epi32(pair), (__m512i)words);
#elif defined(__AVX512BW__)
    return sum + (WideInts)_mm512_madd_epi16(_mm512_set1_epi32(pair), (__m512i)words);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (WideInts)_mm256_madd_epi16(_mm256_set1_epi32(pair), (__m256i)words);
#else
    const WideInts low = (WideInts)(words << 16) >> 16, high = (WideInts)words >> 16;
    return sum + low * (int16_t)pair + high * (int16_t)(pair >> 16);
#endif
}

/* Word j of x[i] becomes word i of x[j].  Each pass interleaves the halves of the rows. */
ALWAYS_INLINE void transpose(Bits x[LANES]) {
    for (int pass = 0; pass < 3; pass++) {
        Bits y[LANES];
        for (int j = 0; j < LANES / 2; j++) {
            y[2 * j] = PICK(x[j], x[j + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            y[2 * j + 1] = PICK(x[j], x[j + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        memcpy(x, y, sizeof y);
    }
}

/* The sums of the first and the second half of the lanes. */
ALWAYS_INLINE Lanes fold(Wide x) {
    Lanes halves[WIDE / LANES];
    memcpy(halves, &x, sizeof x);
    return WIDE > LANES ? halves[0] + halves[WIDE / LANES - 1] : halves[0];
}

/* Lane j of the result is the sum of the lanes of x[j]. */
ALWAYS_INLINE Lanes sums_of(const Lanes of[LANES]) {
    Lanes x[LANES / 2];
    for (int j = 0; j < 4; j++)
        x[j] = PICK(of[j], of[j + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
               PICK(of[j], of[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int j = 0; j < 2; j++)
        x[j] = PICK(x[j], x[j + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
               PICK(x[j], x[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return PICK(x[0], x[1], 0, 8, 2, 10, 4, 12, 6, 14) +
           PICK(x[0], x[1], 1, 9, 3, 11, 5, 13, 7, 15);
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
