/* Parts of nearly equal cost whose numbers of items differ by at most 1: the costliest item to the lightest part, then
   exchanges. Costs are finite, at least 0, and never -0.0. */
#include <math.h>

#include "packing_plan.h"

/* As in reference.py. */
enum { SWAP_TRIES = 64 };
static const double TOLERANCE = 1e-5;

typedef struct {
    int64_t num_parts, largest;
    const double *costs;
    pair *members; /* [num_parts, largest]: cost and number of items, by falling cost */
    int64_t *count;
    double *load;
} partition;

static void deal(partition *p, int64_t n, const int32_t *order, bin_load *heap) {
    int64_t num_full = n - p->num_parts * (p->largest - 1), num_open = p->num_parts;
    empty_bins(heap, num_open);
    for (int64_t i = 0; i < n;) {
        bin_load top = heap[0];
        if (top.count >= p->largest - (num_full <= 0)) {
            num_open--;
            replace_first(heap, num_open, heap[num_open]);
            continue;
        }
        int32_t item = order[i++];
        p->members[top.id * p->largest + top.count] = (pair){p->costs[item], item};
        top.load += p->costs[item];
        top.count++;
        num_full -= top.count == p->largest;
        replace_first(heap, num_open, top);
        p->load[top.id] = top.load;
        p->count[top.id] = top.count;
    }
}

static pair take_member(pair *items, int64_t count, int64_t at) {
    pair taken = items[at];
    memmove(items + at, items + at + 1, (size_t)(count - at - 1) * sizeof *items);
    return taken;
}

static void insert_member(pair *items, int64_t count, pair item) {
    for (; count && items[count - 1].key < item.key; count--) items[count] = items[count - 1];
    items[count] = item;
}

/* The swap whose difference is nearest to half the difference between two parts, if it lowers the heavy one. */
static int exchange(partition *p, int64_t heavy, int64_t light) {
    pair *give = p->members + heavy * p->largest, *take = p->members + light * p->largest;
    int64_t num_give = p->count[heavy], num_take = p->count[light];
    double high = p->load[heavy], low = p->load[light], half = (high - low) / 2, best = INFINITY, moved = 0;
    int64_t best_i = -1, best_j = -1, nearest = 0;
    /* An item that is given away is swapped with one that costs nothing. */
    int64_t num_choices = num_take + (num_give > num_take);
    for (int64_t i = 0; i < num_give; i++) {
        double cost = give[i].key;
        while (nearest < num_choices && cost - (nearest < num_take ? take[nearest].key : 0.0) - half < 0) nearest++;
        for (int64_t j = nearest; j >= 0 && j >= nearest - 1; j--) {
            if (j == num_choices) continue;
            double difference = cost - (j < num_take ? take[j].key : 0.0), score = fabs(difference - half);
            if (score < best && high - difference < high && low + difference < high) {
                best = score;
                best_i = i;
                best_j = j;
                moved = difference;
            }
        }
    }
    if (best_i < 0) return 0;
    p->load[heavy] -= moved;
    p->load[light] += moved;
    pair given = take_member(give, num_give, best_i);
    num_give--;
    if (best_j < num_take) {
        pair taken = take_member(take, num_take, best_j);
        num_take--;
        insert_member(give, num_give++, taken);
    }
    insert_member(take, num_take++, given);
    p->count[heavy] = num_give;
    p->count[light] = num_take;
    return 1;
}

static int64_t heaviest(const partition *p) {
    int64_t found = 0;
    for (int64_t part = 1; part < p->num_parts; part++)
        if (p->load[part] > p->load[found]) found = part;
    return found;
}

/* The lightest part behind `last` in the order of (load, number); -1 for the first. */
static int64_t next_lightest(const partition *p, int64_t last) {
    int64_t found = -1;
    for (int64_t part = 0; part < p->num_parts; part++) {
        double load = p->load[part];
        if (last >= 0 && (load < p->load[last] || (load == p->load[last] && part <= last))) continue;
        if (found < 0 || load < p->load[found]) found = part;
    }
    return found;
}

static void improve(partition *p) {
    double total = 0;
    for (int64_t part = 0; part < p->num_parts; part++) total += p->load[part];
    double mean = total / (double)p->num_parts;
    int64_t tries = 0, most = SWAP_TRIES * p->num_parts;
    while (tries < most) {
        int64_t heavy = heaviest(p), light = -1;
        if (p->load[heavy] <= mean * (1 + TOLERANCE)) return;
        for (int found = 0; !found; tries++) {
            light = next_lightest(p, light);
            if (tries == most || light < 0 || p->load[light] >= p->load[heavy]) return;
            found = exchange(p, heavy, light);
        }
    }
}

PEKOE_EXPORT int32_t pekoe_equal_count(int64_t n, const double *costs, int64_t num_parts, int64_t *parts) {
    if (n <= 0) return 0;
    if (n > MOST_ITEMS || num_parts > MOST_ITEMS) return PEKOE_NO_MEMORY;
    /* With fewer items than parts every item is alone. */
    if (num_parts > n) num_parts = n;
    partition p = {.num_parts = num_parts, .largest = (n + num_parts - 1) / num_parts, .costs = costs};
    size_t size = (size_t)n, sets = (size_t)num_parts;
    int32_t *order = malloc(2 * size * sizeof *order);
    uint64_t *keys = malloc(size * sizeof *keys);
    bin_load *heap = malloc(sets * sizeof *heap);
    p.members = malloc(sets * (size_t)p.largest * sizeof *p.members);
    p.count = calloc(sets, sizeof *p.count);
    p.load = calloc(sets, sizeof *p.load);
    int32_t status = PEKOE_NO_MEMORY;
    if (order && keys && heap && p.members && p.count && p.load) {
        for (int64_t i = 0; i < n; i++) {
            order[i] = (int32_t)i;
            keys[i] = bits_of(costs[i]);
        }
        sort_falling(n, keys, order, order + n);
        deal(&p, n, order, heap);
        if (n > num_parts) improve(&p);
        for (int64_t part = 0; part < num_parts; part++)
            for (int64_t i = 0; i < p.count[part]; i++) parts[p.members[part * p.largest + i].id] = part;
        status = 0;
    }
    free(order);
    free(keys);
    free(heap);
    free(p.members);
    free(p.count);
    free(p.load);
    return status;
}
