/* Rows of padded arrays end to end and back, and what a token knows of its sequence. Widths and strides are in bytes,
   so that any dtype of a fixed size goes through; `cu_seqlens` has num_sequences + 1 entries, from 0. Every byte of the
   output is written once. A status k > 0 names sequence k - 1, which does not fit. */
#include "pekoe_native.h"

#include <string.h>

static inline __attribute__((always_inline)) int64_t begin_of(const int64_t *starts, int64_t row) {
    return starts == NULL ? 0 : starts[row];
}

/* 0, or 1 + the first sequence that does not lie inside rows of `length` tokens. */
static int64_t row_outside(const int64_t *cu_seqlens, const int64_t *starts, int64_t num_sequences, int64_t length) {
    for (int64_t row = 0; row < num_sequences; row++) {
        int64_t size = cu_seqlens[row + 1] - cu_seqlens[row], begin = begin_of(starts, row);
        if (size < 0 || begin < 0 || begin > length - size) return row + 1;
    }
    return 0;
}

PEKOE_EXPORT int64_t pekoe_pack(const char *padded, int64_t row_stride, int64_t length, int64_t width,
                                const int64_t *cu_seqlens, const int64_t *starts, int64_t num_sequences, char *packed) {
    int64_t status = row_outside(cu_seqlens, starts, num_sequences, length);
    if (status != 0) return status;
    for (int64_t row = 0; row < num_sequences; row++) {
        int64_t size = cu_seqlens[row + 1] - cu_seqlens[row];
        memcpy(packed + cu_seqlens[row] * width, padded + row * row_stride + begin_of(starts, row) * width,
               (size_t)(size * width));
    }
    return 0;
}

/* `bytes` bytes of the pattern of `item` bytes, a divisor of `bytes`. */
static void repeat_pattern(char *out, int64_t bytes, const char *pattern, int64_t item) {
    if (bytes == 0) return;
    int uniform = 1;
    for (int64_t i = 1; i < item; i++) uniform &= pattern[i] == pattern[0];
    if (uniform) {
        memset(out, pattern[0], (size_t)bytes);
        return;
    }
    memcpy(out, pattern, (size_t)item);
    for (int64_t done = item; done < bytes;) {
        int64_t more = done < bytes - done ? done : bytes - done;
        memcpy(out + done, out, (size_t)more);
        done += more;
    }
}

PEKOE_EXPORT int64_t pekoe_unpack(const char *packed, int64_t width, const int64_t *cu_seqlens, const int64_t *starts,
                                  int64_t num_sequences, int64_t length, const char *fill, int64_t item, char *padded) {
    int64_t status = row_outside(cu_seqlens, starts, num_sequences, length);
    if (status != 0) return status;
    for (int64_t row = 0; row < num_sequences; row++) {
        int64_t size = cu_seqlens[row + 1] - cu_seqlens[row], begin = begin_of(starts, row);
        char *out = padded + row * length * width;
        repeat_pattern(out, begin * width, fill, item);
        memcpy(out + begin * width, packed + cu_seqlens[row] * width, (size_t)(size * width));
        repeat_pattern(out + (begin + size) * width, (length - begin - size) * width, fill, item);
    }
    return 0;
}

PEKOE_EXPORT PEKOE_CLONES int64_t pekoe_position_ids(const int64_t *cu_seqlens, int64_t num_sequences, int32_t *out) {
    for (int64_t row = 0; row < num_sequences; row++) {
        int64_t size = cu_seqlens[row + 1] - cu_seqlens[row];
        if (size < 0) return row + 1;
        int32_t *place = out + cu_seqlens[row];
#pragma omp simd
        for (int64_t i = 0; i < size; i++) place[i] = (int32_t)i;
    }
    return 0;
}

PEKOE_EXPORT PEKOE_CLONES int64_t pekoe_sequence_index(const int64_t *cu_seqlens, int64_t num_sequences, int32_t *out) {
    for (int64_t row = 0; row < num_sequences; row++) {
        int64_t size = cu_seqlens[row + 1] - cu_seqlens[row];
        if (size < 0) return row + 1;
        int32_t *place = out + cu_seqlens[row];
#pragma omp simd
        for (int64_t i = 0; i < size; i++) place[i] = (int32_t)row;
    }
    return 0;
}

/* Chunks of each sequence for context parallelism: see kernels/packing/zigzag.py. `padded` [num_sequences + 1] are the
   boundaries with every length a multiple of 2 num_ranks; `indices` and `positions` [num_ranks, padded total /
   num_ranks], `inverse` [tokens]. */
PEKOE_EXPORT PEKOE_CLONES int64_t pekoe_zigzag(const int64_t *cu_seqlens, const int64_t *padded, int64_t num_sequences,
                                               int64_t num_ranks, int32_t *indices, int32_t *positions,
                                               int32_t *inverse) {
    int64_t share = padded[num_sequences] / num_ranks;
    for (int64_t row = 0; row < num_sequences; row++) {
        int64_t first = cu_seqlens[row], size = cu_seqlens[row + 1] - first;
        int64_t chunk = (padded[row + 1] - padded[row]) / (2 * num_ranks);
        if (size < 0 || size > 2 * num_ranks * chunk) return row + 1;
        for (int64_t part = 0; part < 2 * num_ranks; part++) {
            int64_t is_late = part >= num_ranks, rank = is_late ? 2 * num_ranks - 1 - part : part;
            int64_t place = rank * share + padded[row] / num_ranks + is_late * chunk, begin = part * chunk;
            int64_t real = size - begin < 0 ? 0 : (size - begin < chunk ? size - begin : chunk);
#pragma omp simd
            for (int64_t i = 0; i < chunk; i++) {
                positions[place + i] = (int32_t)(begin + i);
                indices[place + i] = i < real ? (int32_t)(first + begin + i) : -1;
            }
#pragma omp simd
            for (int64_t i = 0; i < real; i++) inverse[first + begin + i] = (int32_t)(place + i);
        }
    }
    return 0;
}
