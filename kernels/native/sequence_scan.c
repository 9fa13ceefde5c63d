/* Scans and sums inside sequences that lie end to end. Everything is added up in double precision and in an order that
   depends on nothing but the sequence itself. `cu_seqlens` [num_sequences + 1] starts at 0 and does not fall, which the
   caller has checked. The functions are in sequence_scan.h, once for each type of the values. */
#include "pekoe_native.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#define TILE 128
#define BLOCK 8
#define LANES 16

/* Four doubles: as many as most instruction sets take at once, or several of what they take (an extension of gcc and
   clang; without wide registers the compiler splits it up). */
typedef double Four __attribute__((vector_size(32)));
typedef float FourSingle __attribute__((vector_size(16)));

/* The four entries from `by` on of two fours that lie end to end. */
#if defined(__clang__)
#define SHIFT_1(a, b) __builtin_shufflevector(a, b, 1, 2, 3, 4)
#define SHIFT_2(a, b) __builtin_shufflevector(a, b, 2, 3, 4, 5)
#define REVERSED(a) __builtin_shufflevector(a, a, 3, 2, 1, 0)
#else
typedef int64_t FourIndices __attribute__((vector_size(32)));
#define SHIFT_1(a, b) __builtin_shuffle(a, b, (FourIndices){1, 2, 3, 4})
#define SHIFT_2(a, b) __builtin_shuffle(a, b, (FourIndices){2, 3, 4, 5})
#define REVERSED(a) __builtin_shuffle(a, (FourIndices){3, 2, 1, 0})
#endif

/* A scan x_i = v_i + decay x_{i+1} from the right, BLOCK timesteps at a time. Alone it is a chain of a multiplication and
   an addition a timestep. Here the sums over 2, 4 and 8 timesteps from each one on are made by doubling, which has no
   chain, and only every eighth timestep waits for the one before. What a block leaves for the one on its left are the
   first entries of each level. A timestep is computed in the same way wherever the blocks are cut. */
typedef struct {
    Four value, single, pair, quad, total_low, total_high;
    double by1, by2, by4, by8;
} Scan;

INLINE void begin_scan(Scan *scan, double decay, double following) {
    const Four none = {0, 0, 0, 0};
    scan->single = scan->pair = scan->quad = scan->total_low = scan->total_high = none;
    scan->value = none + following;
    scan->by1 = decay;
    scan->by2 = scan->by1 * scan->by1;
    scan->by4 = scan->by2 * scan->by2;
    scan->by8 = scan->by4 * scan->by4;
}

/* The next block on the left, `low` and `high`: its v_i become its x_i. */
INLINE void scan_block(Scan *scan, Four *low, Four *high) {
    Four pair_low = *low + scan->by1 * SHIFT_1(*low, *high);
    Four pair_high = *high + scan->by1 * SHIFT_1(*high, scan->single);
    Four quad_low = pair_low + scan->by2 * SHIFT_2(pair_low, pair_high);
    Four quad_high = pair_high + scan->by2 * SHIFT_2(pair_high, scan->pair);
    scan->single = *low;
    scan->pair = pair_low;
    *low = (quad_low + scan->by4 * quad_high) + scan->by8 * scan->total_low;
    *high = (quad_high + scan->by4 * scan->quad) + scan->by8 * scan->total_high;
    scan->quad = quad_low;
    scan->total_low = *low;
    scan->total_high = *high;
}

/* Asks for the memory of the tile before `from`, which is next: its order defeats the hardware's guesses. */
INLINE void fetch_before(const void *from, int64_t bytes) {
    for (int64_t at = 64; at <= bytes; at += 64) __builtin_prefetch((const char *)from - at);
}

INLINE int64_t num_active(const uint8_t *mask, int64_t size) {
    int64_t count = 0;
    for (int64_t at = 0; at < size; at += TILE) {
        uint8_t here = 0; /* a byte counts up to a tile */
        int64_t end = size - at < TILE ? size - at : TILE;
        for (int64_t i = 0; i < end; i++) here = (uint8_t)(here + (mask[at + i] != 0));
        count += here;
    }
    return count;
}

INLINE double lane_total(double *lanes) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

#define REAL float
#define FOUR_REALS FourSingle
#define NAME(name) pekoe_##name##_f32
#include "sequence_scan.h"
#undef REAL
#undef FOUR_REALS
#undef NAME

#define REAL double
#define FOUR_REALS Four
#define NAME(name) pekoe_##name##_f64
#include "sequence_scan.h"
