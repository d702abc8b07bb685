/* The rotation of the sketch (sketch.py), of keys and of queries. */

#pragma once

#define MOST_ROTATED 512

/* Each pass takes halves to pairs.  After as many passes as the size has bits, every channel is in
 * its place, and is the product with a row of the Hadamard matrix.  Sums are exact in float64. */
static inline __attribute__((always_inline)) void rotate(const float *from, int size, float norm,
                                                         float *to) {
    double rows[2][MOST_ROTATED], *x = rows[0], *y = rows[1];
    const int half = size / 2;
    for (int d = 0; d < size; d++) x[d] = from[d];
    for (int passes = size; passes > 1; passes /= 2) {
        for (int d = 0; d < half; d++) {
            y[2 * d] = x[d] + x[half + d];
            y[2 * d + 1] = x[d] - x[half + d];
        }
        double *const done = y;
        y = x, x = done;
    }
    for (int d = 0; d < size; d++) to[d] = (float)x[d] * norm;
}
