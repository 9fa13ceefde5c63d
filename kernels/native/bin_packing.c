/* Best fit decreasing in O(n log n): a counting sort, and the open bins by what room they have left. */
#include "packing_plan.h"

/* A set of whole numbers below a size: bit `i` of level 0 is number i, bit i of level k + 1 is word i of level k. */
enum { LEVELS = 6 };
typedef struct {
    uint64_t *words[LEVELS];
    int64_t sizes[LEVELS];
    int levels;
} number_set;

static int make_set(number_set *set, int64_t size) {
    memset(set, 0, sizeof *set);
    do {
        size = (size + 63) / 64;
        set->sizes[set->levels] = size;
        set->words[set->levels] = calloc((size_t)size, sizeof(uint64_t));
        if (!set->words[set->levels++]) return 0;
    } while (size > 1);
    return 1;
}

static void free_set(number_set *set) {
    for (int level = 0; level < set->levels; level++) free(set->words[level]);
}

static void set_add(number_set *set, int64_t number) {
    for (int level = 0; level < set->levels; level++, number >>= 6)
        set->words[level][number >> 6] |= (uint64_t)1 << (number & 63);
}

static void set_remove(number_set *set, int64_t number) {
    for (int level = 0; level < set->levels; level++, number >>= 6)
        if (set->words[level][number >> 6] &= ~((uint64_t)1 << (number & 63))) return;
}

/* The smallest member that is at least `number`; -1 for none. */
static int64_t set_next(const number_set *set, int64_t number) {
    for (int level = 0; level < set->levels; level++) {
        int64_t word = number >> 6;
        if (word >= set->sizes[level]) return -1;
        uint64_t found = set->words[level][word] & (~(uint64_t)0 << (number & 63));
        if (found) {
            int64_t at = word << 6 | __builtin_ctzll(found);
            while (level--) at = at << 6 | __builtin_ctzll(set->words[level][at]);
            return at;
        }
        number = word + 1;
    }
    return -1;
}

/* Bins with equal room are a leftist heap whose root is the lowest number. */
static int32_t join(node *nodes, int32_t a, int32_t b) {
    if (a < 0) return b;
    if (b < 0) return a;
    if (b < a) return join(nodes, b, a);
    set_right(nodes, a, join(nodes, nodes[a].right, b));
    return a;
}

static int64_t fill(int64_t n, const int64_t *lengths, const int32_t *order, int64_t capacity, int64_t max_items,
                    number_set *rooms, int32_t *heap_of_room, node *nodes, int32_t *num_items, int64_t *bins) {
    int32_t used = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t item = order[i], bin;
        int64_t room = set_next(rooms, lengths[item]);
        if (room < 0) {
            room = capacity;
            bin = used++;
            num_items[bin] = 0;
        } else {
            bin = heap_of_room[room];
            heap_of_room[room] = join(nodes, nodes[bin].left, nodes[bin].right);
            if (heap_of_room[room] < 0) set_remove(rooms, room);
        }
        bins[item] = bin;
        if (++num_items[bin] >= max_items) continue;
        room -= lengths[item];
        int64_t found = set_next(rooms, room);
        nodes[bin] = LONE_NODE;
        heap_of_room[room] = found == room ? join(nodes, heap_of_room[room], bin) : bin;
        set_add(rooms, room);
    }
    return used;
}

/* Bin of each item; lengths are at least 0 and at most `capacity`. */
PEKOE_EXPORT int32_t pekoe_best_fit(int64_t n, const int64_t *lengths, int64_t capacity, int64_t max_items,
                                    int64_t *bins, int64_t *num_bins) {
    *num_bins = 0;
    if (n <= 0) return 0;
    if (n > MOST_ITEMS) return PEKOE_NO_MEMORY;
    int64_t total = 0;
    for (int64_t i = 0; i < n && total < capacity; i++) total += lengths[i];
    /* What is never used of a bin needs no place in the set. */
    if (total < capacity) capacity = total;
    int32_t status = PEKOE_NO_MEMORY;
    size_t size = (size_t)n;
    int32_t *order = malloc(size * sizeof *order), *num_items = malloc(size * sizeof *num_items);
    int32_t *heap_of_room = malloc((size_t)(capacity + 1) * sizeof *heap_of_room);
    node *nodes = malloc(size * sizeof *nodes);
    number_set rooms;
    if (make_set(&rooms, capacity + 1) && order && num_items && heap_of_room && nodes) {
        for (int64_t i = 0; i < n; i++) order[i] = (int32_t)i;
        sort_falling(n, (const uint64_t *)lengths, order, num_items);
        *num_bins = fill(n, lengths, order, capacity, max_items, &rooms, heap_of_room, nodes, num_items, bins);
        status = 0;
    }
    free_set(&rooms);
    free(order);
    free(num_items);
    free(heap_of_room);
    free(nodes);
    return status;
}
