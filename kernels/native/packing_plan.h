/* What the sources of the packing plans share: stable sorts by falling keys, and each other's functions. */
#ifndef PEKOE_PACKING_PLAN_H
#define PEKOE_PACKING_PLAN_H

#include <stdlib.h>
#include <string.h>

#include "pekoe_native.h"

/* Items are numbered in 32 bits. */
#define MOST_ITEMS (INT32_MAX - 1)

int32_t pekoe_best_fit(int64_t n, const int64_t *lengths, int64_t capacity, int64_t max_items, int64_t *bins,
                       int64_t *num_bins);
int32_t pekoe_equal_count(int64_t n, const double *costs, int64_t num_parts, int64_t *parts);

typedef struct {
    double key;
    int32_t id;
} pair;

/* The bits of a double that is at least 0 are in the order of its values. */
static inline uint64_t bits_of(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Sorts the numbers in order[n] by falling key, equal keys as they stand; spare has n places. */
static inline void sort_falling(int64_t n, const uint64_t *keys, int32_t *order, int32_t *spare) {
    enum { BITS = 11, SIZE = 1 << BITS };
    uint64_t all = ~(uint64_t)0, any = 0;
    for (int64_t i = 0; i < n; i++) {
        all &= keys[i];
        any |= keys[i];
    }
    int32_t *from = order, *to = spare;
    for (int shift = 0; shift < 64; shift += BITS) {
        if ((((all ^ any) >> shift) & (SIZE - 1)) == 0) continue;
        int64_t start[SIZE] = {0};
        for (int64_t i = 0; i < n; i++) start[(~keys[i] >> shift) & (SIZE - 1)]++;
        int64_t sum = 0;
        for (int digit = 0; digit < SIZE; digit++) {
            int64_t count = start[digit];
            start[digit] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < n; i++) to[start[(~keys[from[i]] >> shift) & (SIZE - 1)]++] = from[i];
        int32_t *other = from;
        from = to;
        to = other;
    }
    if (from != order) memcpy(order, from, (size_t)n * sizeof *order);
}

/* Sorts a few pairs by falling key, equal keys as they stand; spare has n places. */
static inline void sort_pairs(int64_t n, pair *pairs, pair *spare) {
    enum { RUN = 8 };
    for (int64_t low = 0; low < n; low += RUN) {
        int64_t high = low + RUN < n ? low + RUN : n;
        for (int64_t i = low + 1; i < high; i++) {
            pair moved = pairs[i];
            int64_t j = i;
            for (; j > low && pairs[j - 1].key < moved.key; j--) pairs[j] = pairs[j - 1];
            pairs[j] = moved;
        }
    }
    pair *from = pairs, *to = spare;
    for (int64_t width = RUN; width < n; width *= 2) {
        for (int64_t low = 0; low < n; low += 2 * width) {
            int64_t middle = low + width < n ? low + width : n;
            int64_t high = middle + width < n ? middle + width : n;
            int64_t a = low, b = middle;
            for (int64_t i = low; i < high; i++)
                to[i] = (b == high || (a < middle && from[a].key >= from[b].key)) ? from[a++] : from[b++];
        }
        pair *other = from;
        from = to;
        to = other;
    }
    if (from != pairs) memcpy(pairs, from, (size_t)n * sizeof *pairs);
}

/* A queue of bins: the lowest load first (equal: fewer items, then the lower number). */
typedef struct {
    double load;
    int32_t count, id;
} bin_load;

static inline int lighter(const bin_load *a, const bin_load *b) {
    if (a->load != b->load) return a->load < b->load;
    if (a->count != b->count) return a->count < b->count;
    return a->id < b->id;
}

/* Puts `moved` in the place of the first of heap[n]. */
static inline void replace_first(bin_load *heap, int64_t n, bin_load moved) {
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && lighter(&heap[child + 1], &heap[child])) child++;
        if (!lighter(&heap[child], &moved)) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

/* Adds to heap[n], which has room. */
static inline void add_bin(bin_load *heap, int64_t n, bin_load added) {
    int64_t at = n;
    for (; at && lighter(&added, &heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = added;
}

/* Empty bins 0 .. n - 1. */
static inline void empty_bins(bin_load *heap, int64_t n) {
    for (int64_t i = 0; i < n; i++) heap[i] = (bin_load){0.0, 0, (int32_t)i};
}

/* Leftist heaps of numbered nodes (-1: none): the root comes first by the order of whoever joins them, and right spines
   are short. */
typedef struct {
    int32_t left, right, spine;
} node;

#define LONE_NODE ((node){-1, -1, 1})

/* Two heaps joined: that of `top`, and `right`, which is what `top` had on its right joined with the other. */
static inline void set_right(node *nodes, int32_t top, int32_t right) {
    node *root = &nodes[top];
    int shallow = root->left < 0 || nodes[root->left].spine < nodes[right].spine;
    root->right = shallow ? root->left : right;
    if (shallow) root->left = right;
    root->spine = root->right < 0 ? 1 : nodes[root->right].spine + 1;
}

#endif
