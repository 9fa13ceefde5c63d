/* Scans and sums inside sequences that lie end to end. Everything is added up in double precision and in an order that
   depends on nothing but the sequence itself. `mask` and `decay` follow `cu_seqlens` [num_sequences + 1], which starts
   at 0 and does not fall (checked by the caller). */
#include "pekoe_native.h"

#define LANES 16

/* Right to left over the active tokens: A = R + discount V_next - V + discount lambda A_next. No branch on the mask: on
   a masked token everything keeps its value. */
#define DEFINE_TOKEN_GAE(NAME, REAL)                                                                                   \
    PEKOE_EXPORT PEKOE_CLONES void NAME(const REAL *rewards, const REAL *values, const uint8_t *mask,                 \
                                        const int64_t *cu_seqlens, int64_t num_sequences, double discount,            \
                                        const double *lambdas, const double *bootstrap, REAL *advantages,             \
                                        REAL *returns) {                                                               \
        for (int64_t row = 0; row < num_sequences; row++) {                                                            \
            double decay = discount * lambdas[row], running = 0;                                                       \
            double following = bootstrap == NULL ? 0 : bootstrap[row];                                                 \
            if (values == NULL) {                                                                                      \
                double ahead = discount * following;                                                                   \
                for (int64_t i = cu_seqlens[row + 1] - 1; i >= cu_seqlens[row]; i--) {                                 \
                    int active = mask[i] != 0;                                                                         \
                    double next = ((double)rewards[i] + ahead) + decay * running;                                      \
                    running = active ? next : running;                                                                 \
                    ahead = active ? 0 : ahead;                                                                        \
                    advantages[i] = active ? (REAL)running : 0;                                                        \
                    returns[i] = advantages[i];                                                                        \
                }                                                                                                      \
                continue;                                                                                              \
            }                                                                                                          \
            for (int64_t i = cu_seqlens[row + 1] - 1; i >= cu_seqlens[row]; i--) {                                     \
                int active = mask[i] != 0;                                                                             \
                double value = (double)values[i];                                                                      \
                double delta = (double)rewards[i] + discount * following - value;                                      \
                double next = delta + decay * running;                                                                 \
                running = active ? next : running;                                                                     \
                following = active ? value : following;                                                                \
                advantages[i] = active ? (REAL)running : 0;                                                            \
                returns[i] = active ? (REAL)(running + value) : values[i];                                             \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_TOKEN_GAE(pekoe_gae_token_f32, float)
DEFINE_TOKEN_GAE(pekoe_gae_token_f64, double)

/* The same with a timestep a turn: a run of active tokens with one number in `turns`, whatever lies between them. */
#define DEFINE_TURN_GAE(NAME, REAL, TURN)                                                                              \
    PEKOE_EXPORT void NAME(const REAL *rewards, const REAL *values, const uint8_t *mask, const TURN *turns,           \
                           const int64_t *cu_seqlens, int64_t num_sequences, double discount, const double *lambdas,  \
                           const double *bootstrap, REAL *advantages, REAL *returns) {                                 \
        for (int64_t row = 0; row < num_sequences; row++) {                                                            \
            double decay = discount * lambdas[row], running = 0;                                                       \
            double following = bootstrap == NULL ? 0 : bootstrap[row];                                                 \
            int64_t begin = cu_seqlens[row], last = cu_seqlens[row + 1] - 1;                                           \
            while (last >= begin) {                                                                                    \
                if (!mask[last]) {                                                                                     \
                    advantages[last] = 0;                                                                              \
                    returns[last] = values == NULL ? 0 : values[last];                                                 \
                    last--;                                                                                            \
                    continue;                                                                                          \
                }                                                                                                      \
                int64_t first = last, i = last - 1;                                                                    \
                for (; i >= begin && (!mask[i] || turns[i] == turns[last]); i--) first = mask[i] ? i : first;          \
                double earned = 0, value = values == NULL ? 0 : (double)values[first];                                 \
                for (i = first; i <= last; i++) earned += mask[i] ? (double)rewards[i] : 0;                            \
                running = (earned + discount * following - value) + decay * running;                                   \
                following = value;                                                                                     \
                for (i = first; i <= last; i++) {                                                                      \
                    advantages[i] = mask[i] ? (REAL)running : 0;                                                       \
                    returns[i] = mask[i] ? (REAL)(running + value) : values == NULL ? 0 : values[i];                   \
                }                                                                                                      \
                last = first - 1;                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_TURN_GAE(pekoe_gae_turn_f32_i32, float, int32_t)
DEFINE_TURN_GAE(pekoe_gae_turn_f32_i64, float, int64_t)
DEFINE_TURN_GAE(pekoe_gae_turn_f64_i32, double, int32_t)
DEFINE_TURN_GAE(pekoe_gae_turn_f64_i64, double, int64_t)

/* x_i = v_i + decay x_{i+1} inside each sequence; from the left, x_i = v_i + decay x_{i-1}, where `from_left`. */
#define DEFINE_DISCOUNTED_SUMS(NAME, REAL)                                                                             \
    PEKOE_EXPORT PEKOE_CLONES void NAME(const REAL *values, const double *decay, const int64_t *cu_seqlens,           \
                                        int64_t num_sequences, int32_t from_left, REAL *out) {                         \
        for (int64_t row = 0; row < num_sequences; row++) {                                                            \
            double by = decay[row], running = 0;                                                                       \
            int64_t begin = cu_seqlens[row], end = cu_seqlens[row + 1];                                                \
            if (from_left) {                                                                                           \
                for (int64_t i = begin; i < end; i++) out[i] = (REAL)(running = (double)values[i] + by * running);     \
            } else {                                                                                                   \
                for (int64_t i = end - 1; i >= begin; i--)                                                             \
                    out[i] = (REAL)(running = (double)values[i] + by * running);                                       \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_DISCOUNTED_SUMS(pekoe_discounted_sums_f32, float)
DEFINE_DISCOUNTED_SUMS(pekoe_discounted_sums_f64, double)

static inline __attribute__((always_inline)) double lane_total(double *lanes) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* Sums, or means, of the tokens where `mask` is not 0 (NULL: of all). */
#define DEFINE_SEGMENTS(NAME, REAL)                                                                                    \
    PEKOE_EXPORT PEKOE_CLONES void NAME(const REAL *values, const uint8_t *mask, const int64_t *cu_seqlens,           \
                                        int64_t num_sequences, int32_t is_mean, REAL *out) {          \
        for (int64_t row = 0; row < num_sequences; row++) {                                                            \
            double lanes[LANES] = {0};                                                                                 \
            int64_t size = cu_seqlens[row + 1] - cu_seqlens[row], i = 0, count = size;                                 \
            const REAL *of = values + cu_seqlens[row];                                                                 \
            if (mask == NULL) {                                                                                        \
                for (; i + LANES <= size; i += LANES)                                                                  \
                    for (int lane = 0; lane < LANES; lane++) lanes[lane] += (double)of[i + lane];                      \
                for (; i < size; i++) lanes[i % LANES] += (double)of[i];                                               \
            } else {                                                                                                   \
                const uint8_t *keep = mask + cu_seqlens[row];                                                          \
                count = 0;                                                                                             \
                for (; i + LANES <= size; i += LANES)                                                                  \
                    for (int lane = 0; lane < LANES; lane++) lanes[lane] += keep[i + lane] ? (double)of[i + lane] : 0; \
                for (; i < size; i++) lanes[i % LANES] += keep[i] ? (double)of[i] : 0;                                 \
                for (i = 0; i < size; i++) count += keep[i] != 0;                                                      \
            }                                                                                                          \
            double total = lane_total(lanes);                                                                          \
            out[row] = (REAL)(is_mean ? total / (double)(count > 0 ? count : 1) : total);                              \
        }                                                                                                              \
    }

DEFINE_SEGMENTS(pekoe_segments_f32, float)
DEFINE_SEGMENTS(pekoe_segments_f64, double)
