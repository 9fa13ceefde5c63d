/* Karmarkar-Karp: parts of nearly equal cost. Costs are finite, at least 0, and never -0.0. */
#include "packing_plan.h"

/* Sets that hold nothing are not stored: as long as a state has less than `k` sets, its difference is
   that of its largest item, so it is the first of the queue again. Hence one state at most is of neither one item nor
   `k` sets, and the queue holds the items that are left, sorted, and a heap of the full states. */

typedef struct {
    int32_t first, last; /* of a chain of items */
} chain;

typedef struct {
    double spread, top; /* the heaviest set less the lightest; the heaviest set */
    int32_t id, slot; /* the first item; its place in the pool */
} state;

typedef struct {
    int64_t k, num_slots, num_full;
    pair *sums; /* [num_slots, k], the id is the chain's */
    state *full; /* heap */
    int32_t *free_slots;
    int64_t num_free;
    chain *chains; /* by their first item */
    int32_t *next;
    pair *joined, *spare; /* [2 k] */
} differencing;

static int before(const state *a, const state *b) {
    if (a->spread != b->spread) return a->spread > b->spread;
    if (a->top != b->top) return a->top > b->top;
    return a->id < b->id;
}

static void push_state(differencing *d, state added) {
    int64_t at = d->num_full++;
    for (; at && before(&added, &d->full[(at - 1) / 2]); at = (at - 1) / 2) d->full[at] = d->full[(at - 1) / 2];
    d->full[at] = added;
}

static state pop_state(differencing *d) {
    state top = d->full[0], moved = d->full[--d->num_full];
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < d->num_full; at = child) {
        if (child + 1 < d->num_full && before(&d->full[child + 1], &d->full[child])) child++;
        if (!before(&d->full[child], &moved)) break;
        d->full[at] = d->full[child];
    }
    d->full[at] = moved;
    return top;
}

static int32_t link_chains(differencing *d, int32_t a, int32_t b) {
    d->next[d->chains[a].last] = d->chains[b].first;
    d->chains[a].last = d->chains[b].last;
    return a;
}

/* One item more for a state of `m` sets; returns the number of sets. */
static int64_t add_item(differencing *d, pair *sets, int64_t m, pair item) {
    int64_t at = m;
    if (m == d->k) {
        item = (pair){sets[--at].key + item.key, link_chains(d, sets[at].id, item.id)};
    } else {
        m++;
    }
    for (; at && sets[at - 1].key < item.key; at--) sets[at] = sets[at - 1];
    sets[at] = item;
    return m;
}

/* A full state joins one of `m` sets. */
static void add_state(differencing *d, pair *sets, int64_t m, const pair *other) {
    for (int64_t i = 0; i < d->k; i++) {
        pair set = other[d->k - 1 - i];
        if (i < m) set = (pair){sets[i].key + set.key, link_chains(d, sets[i].id, set.id)};
        d->joined[i] = set;
    }
    sort_pairs(d->k, d->joined, d->spare);
    memcpy(sets, d->joined, (size_t)d->k * sizeof *sets);
}

static void difference(differencing *d, int64_t n, const double *costs, const int32_t *order, int64_t *parts) {
    int64_t position = 0, m = 0;
    pair *sets = NULL;
    state current = {0, 0, 0, 0};
    while (position < n || d->num_full) {
        int single = position < n;
        state taken = {0, 0, 0, 0};
        if (single) {
            taken = (state){costs[order[position]], costs[order[position]], order[position], 0};
            single = !d->num_full || before(&taken, &d->full[0]);
        }
        if (single) position++;
        else taken = pop_state(d);
        if (!sets) {
            if (single) {
                current = (state){taken.spread, taken.top, taken.id, d->free_slots[--d->num_free]};
                sets = d->sums + current.slot * d->k;
                m = add_item(d, sets, 0, (pair){costs[taken.id], taken.id});
            } else {
                current = taken;
                sets = d->sums + current.slot * d->k;
                m = d->k;
            }
            continue;
        }
        if (single) {
            m = add_item(d, sets, m, (pair){costs[taken.id], taken.id});
        } else {
            add_state(d, sets, m, d->sums + taken.slot * d->k);
            d->free_slots[d->num_free++] = taken.slot;
            m = d->k;
        }
        if (m == d->k) {
            current.spread = sets[0].key - sets[m - 1].key;
            current.top = sets[0].key;
            /* The last state is the result. */
            if (position == n && !d->num_full) break;
            push_state(d, current);
            sets = NULL;
        }
    }
    for (int64_t part = 0; part < m; part++) {
        int32_t last = d->chains[sets[part].id].last;
        for (int32_t item = d->chains[sets[part].id].first;; item = d->next[item]) {
            parts[item] = part;
            if (item == last) break;
        }
    }
}

/* Items that cost nothing, each to the part with the fewest items. */
static void deal_rest(int64_t n, const double *costs, int64_t k, int64_t *parts, int64_t *num_items) {
    int64_t item = 0, lowest = INT64_MAX;
    memset(num_items, 0, (size_t)k * sizeof *num_items);
    for (int64_t i = 0; i < n; i++)
        if (costs[i] > 0) num_items[parts[i]]++;
    for (int64_t part = 0; part < k; part++)
        if (num_items[part] < lowest) lowest = num_items[part];
    for (;; lowest++)
        for (int64_t part = 0; part < k; part++) {
            if (num_items[part] != lowest) continue;
            while (item < n && costs[item] > 0) item++;
            if (item == n) return;
            parts[item++] = part;
            num_items[part]++;
        }
}

PEKOE_EXPORT int32_t pekoe_karmarkar_karp(int64_t n, const double *costs, int64_t k, int64_t *parts) {
    if (n <= 0) return 0;
    if (n > MOST_ITEMS) return PEKOE_NO_MEMORY;
    /* A state never has more sets than items; the parts behind them stay empty. */
    if (k > n) k = n;
    if (k == 1) {
        memset(parts, 0, (size_t)n * sizeof *parts);
        return 0;
    }
    size_t size = (size_t)n;
    differencing d = {.k = k, .num_slots = n / k + 2};
    int32_t *order = malloc(size * sizeof *order);
    int64_t *num_items = malloc((size_t)k * sizeof *num_items);
    d.sums = malloc((size_t)(d.num_slots * k) * sizeof *d.sums);
    d.full = malloc((size_t)d.num_slots * sizeof *d.full);
    d.free_slots = malloc((size_t)d.num_slots * sizeof *d.free_slots);
    d.chains = malloc(size * sizeof *d.chains);
    d.next = malloc(size * sizeof *d.next);
    d.joined = malloc(2 * (size_t)k * sizeof *d.joined);
    uint64_t *keys = malloc(size * sizeof *keys);
    int32_t status = PEKOE_NO_MEMORY;
    if (order && num_items && d.sums && d.full && d.free_slots && d.chains && d.next && d.joined && keys) {
        int64_t num_costly = 0;
        d.spare = d.joined + k;
        for (int64_t i = 0; i < n; i++) {
            order[i] = (int32_t)i;
            keys[i] = bits_of(costs[i]);
            d.chains[i] = (chain){(int32_t)i, (int32_t)i};
            num_costly += costs[i] > 0;
        }
        for (; d.num_free < d.num_slots; d.num_free++) d.free_slots[d.num_free] = (int32_t)d.num_free;
        sort_falling(n, keys, order, d.next);
        if (num_costly) difference(&d, num_costly, costs, order, parts);
        deal_rest(n, costs, k, parts, num_items);
        status = 0;
    }
    free(order);
    free(num_items);
    free(d.sums);
    free(d.full);
    free(d.free_slots);
    free(d.chains);
    free(d.next);
    free(d.joined);
    free(keys);
    return status;
}
