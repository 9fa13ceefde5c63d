/* Softmax over rows of logits, in one pass: what log-probs and entropies need, and the gradient in place.

   q = (x - max) / temperature is worked with as t = q log2(e), so that exp(q) is 2^t. Logits of -inf have weight 0; NaN
   gives NaN. */
#include <string.h>

#include "pekoe_native.h"

#define LANES 16
/* Logits whose maximum is sought, and which are then summed while they are in the first cache. */
#define BLOCK 512
#define INLINE static inline __attribute__((always_inline))

/* 1.5 * 2^23 + 127: adding it rounds to an integer, and leaves that integer plus the exponent's bias in the low bits. */
#define ROUND 12583039.0f
#define LOWEST (-127.0f)
#define LN2 0.69314718055994530942

/* 2^t for t <= 0, within 0.9 units in the last place; 0 below 2^-126. */
INLINE float exp2_of(float t) {
    float shifted = t + ROUND;
    float f = t - (shifted - ROUND);
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits <<= 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    float p = 0x1.41fbbcp-13f;
    p = p * f + 0x1.5f3e54p-10f;
    p = p * f + 0x1.3b2d4cp-7f;
    p = p * f + 0x1.c6aee8p-5f;
    p = p * f + 0x1.ebfbdcp-3f;
    p = p * f + 0x1.62e430p-1f;
    p = p * f + 1.0f;
    return p * power;
}

INLINE float scaled(float x, float max, float scale) {
    float t = (x - max) * scale;
    return t < LOWEST ? LOWEST : t;
}

INLINE float block_max(const float *x, int64_t n, float max) {
#pragma omp simd reduction(max : max)
    for (int64_t i = 0; i < n; i++) max = x[i] > max ? x[i] : max;
    return max;
}

INLINE float lane_sum(const float *x, int64_t n) {
    float lane[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
        for (int j = 0; j < LANES; j++) lane[j] += x[i + j];
    }
    for (int j = 0; i + j < n; j++) lane[j] += x[i + j];
    for (int width = LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++) lane[j] += lane[j + width];
    return lane[0];
}

/* Adds 2^t of n logits to sum[0], and 2^t q to sum[1]: in LANES lanes, whatever the machine's vectors. */
INLINE void block_sums(const float *x, int64_t n, float max, float scale, int moments, double *sum) {
    float weight[BLOCK], product[BLOCK];
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float t = scaled(x[i], max, scale);
        weight[i] = exp2_of(t);
        if (moments) product[i] = weight[i] * t;
    }
    sum[0] += lane_sum(weight, n);
    if (moments) sum[1] += LN2 * lane_sum(product, n);
}

INLINE void row_statistics(const float *x, int64_t n, float scale, int moments, float *max, double *sum, double *moment) {
    double total[2] = {*sum, *moment};
    float high = *max;
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t count = n - start < BLOCK ? n - start : BLOCK;
        float higher = block_max(x + start, count, high);
        if (higher > high) {
            float t = scaled(high, higher, scale);
            double shrink = exp2_of(t);
            if (moments) total[1] = shrink * (total[1] + LN2 * t * total[0]);
            total[0] *= shrink;
            high = higher;
        }
        block_sums(x + start, count, high, scale, moments, total);
    }
    *max = high;
    *sum = total[0];
    *moment = total[1];
}

/* Takes a tile of logits [rows, columns] (`stride` floats from row to row) into each row's state: its maximum, the sum
   of exp(q) and, with `moments`, of exp(q) q. States begin as (-FLT_MAX, 0, 0). `picked` becomes the logit of a row's
   target, which counts from `first` at the tile's first column, where the tile has it. */
PEKOE_EXPORT PEKOE_CLONES void pekoe_logprob_statistics(
    const float *logits, int64_t rows, int64_t columns, int64_t stride, const int64_t *targets, int64_t first,
    double temperature, int64_t moments, float *max, double *sum, double *moment, float *picked) {
    const float scale = (float)(1.0 / (LN2 * temperature));
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * stride;
        int64_t target = targets[row] - first;
        if (target >= 0 && target < columns) picked[row] = x[target];
        if (moments)
            row_statistics(x, columns, scale, 1, max + row, sum + row, moment + row);
        else
            row_statistics(x, columns, scale, 0, max + row, sum + row, moment + row);
    }
}

INLINE void row_gradient(const float *x, int64_t n, float scale, float max, float a, float b, float *out) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float t = scaled(x[i], max, scale);
        out[i] = exp2_of(t) * (a + b * t);
    }
}

/* out = exp(q) (a + b q) for a tile of logits [rows, columns], plus `c` at each row's target where the tile has it; `max`,
   `a`, `b` and `c` are [rows]. `out` may be the tile. */
PEKOE_EXPORT PEKOE_CLONES void pekoe_logprob_gradient(
    const float *logits, int64_t rows, int64_t columns, int64_t stride, const int64_t *targets, int64_t first,
    double temperature, const float *max, const float *a, const float *b, const float *c, float *out, int64_t out_stride) {
    const float scale = (float)(1.0 / (LN2 * temperature));
    for (int64_t row = 0; row < rows; row++) {
        float *slope = out + row * out_stride;
        row_gradient(logits + row * stride, columns, scale, max[row], a[row], (float)(LN2 * b[row]), slope);
        int64_t target = targets[row] - first;
        if (target >= 0 && target < columns) slope[target] += c[row];
    }
}
