/* Ranks x micro-batches under a token budget: as few micro-steps as are found, balanced by cost. */
#include "packing_plan.h"

/* As in reference.py. */
enum { LARGE_ITEMS = 4 };

typedef struct {
    int64_t n;
    const int64_t *lengths, *counts; /* counts: NULL where every item is one sequence */
    const double *costs;
    int64_t num_ranks, max_tokens, max_sequences;
    int32_t *order; /* the longest first */
    int64_t *bins, *spare_bins; /* of each item: the result so far, and room for the next attempt */
} problem;

/* Memory of an attempt. */
typedef struct {
    bin_load *active, *parked, *aside; /* parked: by falling room, the `load` is -room */
    double *load;
    int64_t *room, *seats;
} workspace;

static void free_workspace(workspace *w) {
    free(w->active);
    free(w->parked);
    free(w->aside);
    free(w->load);
    free(w->room);
    free(w->seats);
}

static int make_workspace(workspace *w, int64_t num_bins) {
    size_t size = (size_t)num_bins;
    w->active = malloc(size * sizeof *w->active);
    w->parked = malloc(size * sizeof *w->parked);
    w->aside = malloc(size * sizeof *w->aside);
    w->load = calloc(size, sizeof *w->load);
    w->room = malloc(size * sizeof *w->room);
    w->seats = malloc(size * sizeof *w->seats);
    return w->active && w->parked && w->aside && w->load && w->room && w->seats;
}

/* The longest item first, into the lightest bin that has room; 1 if all found one. A bin that has too little room for
   an item is parked until items are as short as its room; it need not be looked at before. */
static int place_all(const problem *p, workspace *w, int64_t num_bins) {
    int64_t num_active = num_bins, num_parked = 0;
    empty_bins(w->active, num_bins);
    for (int64_t bin = 0; bin < num_bins; bin++) {
        w->room[bin] = p->max_tokens;
        w->seats[bin] = p->max_sequences;
    }
    for (int64_t i = 0; i < p->n; i++) {
        int32_t item = p->order[i];
        int64_t length = p->lengths[item], count = p->counts ? p->counts[item] : 1, num_aside = 0;
        while (num_parked && -w->parked[0].load >= (double)length) {
            bin_load bin = w->parked[0];
            num_parked--;
            replace_first(w->parked, num_parked, w->parked[num_parked]);
            bin.load = w->load[bin.id];
            add_bin(w->active, num_active++, bin);
        }
        bin_load top;
        for (;;) {
            if (!num_active) return 0;
            top = w->active[0];
            if (w->room[top.id] >= length && w->seats[top.id] >= count) break;
            num_active--;
            replace_first(w->active, num_active, w->active[num_active]);
            if (w->room[top.id] < length) {
                top.load = -(double)w->room[top.id];
                add_bin(w->parked, num_parked++, top);
            } else if (p->counts) {
                w->aside[num_aside++] = top;
            } /* else it is full for good */
        }
        w->room[top.id] -= length;
        w->seats[top.id] -= count;
        top.load = w->load[top.id] += p->costs[item];
        top.count++;
        p->spare_bins[item] = top.id;
        replace_first(w->active, num_active, top);
        while (num_aside) add_bin(w->active, num_active++, w->aside[--num_aside]);
    }
    return 1;
}

/* Whether the items fit into `num_steps` micro-steps: 1 and the bins, 0, or PEKOE_NO_MEMORY. */
static int attempt(problem *p, int64_t num_steps) {
    if (num_steps > MOST_ITEMS / p->num_ranks) return PEKOE_NO_MEMORY;
    workspace w;
    int found = PEKOE_NO_MEMORY;
    if (make_workspace(&w, num_steps * p->num_ranks)) found = place_all(p, &w, num_steps * p->num_ranks);
    free_workspace(&w);
    if (found == 1) {
        int64_t *other = p->bins;
        p->bins = p->spare_bins;
        p->spare_bins = other;
    }
    return found;
}

static int64_t rounded_up(int64_t count, int64_t size) { return size > 1 ? count / size + (count % size != 0) : count; }

/* No plan has fewer micro-steps: by all tokens, all sequences, and the items of which at most `most` fit into one bin. */
static int64_t lowest_steps(const problem *p) {
    int64_t tokens = 0, sequences = 0, num_bins;
    for (int64_t i = 0; i < p->n; i++) {
        tokens += p->lengths[i];
        sequences += p->counts ? p->counts[i] : 1;
    }
    int64_t by_tokens = rounded_up(tokens, p->max_tokens), by_sequences = rounded_up(sequences, p->max_sequences);
    num_bins = by_tokens > by_sequences ? by_tokens : by_sequences;
    for (int64_t most = 1; most <= LARGE_ITEMS; most++) {
        int64_t num_large = 0, limit = p->max_tokens / (most + 1);
        while (num_large < p->n && p->lengths[p->order[num_large]] > limit) num_large++;
        num_large = rounded_up(num_large, most);
        if (num_large > num_bins) num_bins = num_large;
    }
    int64_t found = rounded_up(num_bins, p->num_ranks);
    return found > 1 ? found : 1;
}

/* Bins and the number of micro-steps; below 0: PEKOE_NO_MEMORY. */
static int64_t fewest_steps(problem *p) {
    int64_t low = lowest_steps(p), high = low, num_bins = 0;
    int status = attempt(p, low), attempted = 1;
    if (status) return status < 0 ? status : low;
    if (p->counts) {
        do {
            high *= 2;
            status = attempt(p, high);
        } while (status == 0);
        if (status < 0) return status;
    } else {
        if (pekoe_best_fit(p->n, p->lengths, p->max_tokens, p->max_sequences, p->bins, &num_bins)) return -1;
        high = rounded_up(num_bins, p->num_ranks);
        attempted = high == low;
    }
    for (low++; low < high;) {
        int64_t middle = low + (high - low) / 2;
        status = attempt(p, middle);
        if (status < 0) return status;
        if (status) {
            high = middle;
            attempted = 1;
        } else {
            low = middle + 1;
        }
    }
    if (!attempted && attempt(p, high) < 0) return -1;
    return high;
}

static void spread_steps(int64_t num_steps, int64_t num_ranks, const double *costs, const int32_t *order, int64_t *rank,
                         int64_t *step, double *load, pair *pairs) {
    for (int64_t number = 0; number < num_steps; number++) {
        for (int64_t i = 0; i < num_ranks; i++) pairs[i] = (pair){-load[i], (int32_t)i};
        sort_pairs(num_ranks, pairs, pairs + num_ranks);
        for (int64_t i = 0; i < num_ranks; i++) {
            int32_t bin = order[number * num_ranks + i];
            rank[bin] = pairs[i].id;
            step[bin] = number;
            load[pairs[i].id] += costs[bin];
        }
    }
}

/* Rank and micro-step of each bin. */
static int32_t place_bins(const problem *p, int64_t num_steps, int every_step, int64_t *ranks, int64_t *steps) {
    size_t ways = (size_t)p->num_ranks, size = (size_t)num_steps * ways;
    double *costs = calloc(size, sizeof *costs), *load = calloc(ways, sizeof *load);
    uint64_t *keys = malloc(size * sizeof *keys);
    int32_t *order = malloc(2 * size * sizeof *order), status = PEKOE_NO_MEMORY;
    int64_t *of_bin = malloc(2 * size * sizeof *of_bin), *done = calloc(ways, sizeof *done);
    pair *pairs = malloc(2 * ways * sizeof *pairs);
    if (costs && load && keys && order && of_bin && done && pairs) {
        int64_t num_bins = (int64_t)size, *rank = of_bin, *step = of_bin + size;
        for (int64_t i = 0; i < p->n; i++) costs[p->bins[i]] += p->costs[i];
        for (int64_t bin = 0; bin < num_bins; bin++) {
            keys[bin] = bits_of(costs[bin]);
            order[bin] = (int32_t)bin;
        }
        sort_falling(num_bins, keys, order, order + size);
        if (every_step) {
            spread_steps(num_steps, p->num_ranks, costs, order, rank, step, load, pairs);
            status = 0;
        } else {
            status = pekoe_equal_count(num_bins, costs, p->num_ranks, rank);
            if (!status)
                for (int64_t i = 0; i < num_bins; i++) step[order[i]] = done[rank[order[i]]]++;
        }
        for (int64_t i = 0; i < p->n && !status; i++) {
            ranks[i] = rank[p->bins[i]];
            steps[i] = step[p->bins[i]];
        }
    }
    free(costs);
    free(load);
    free(keys);
    free(order);
    free(of_bin);
    free(done);
    free(pairs);
    return status;
}

static void sort_items(problem *p, uint64_t *keys, int32_t *spare) {
    for (int64_t i = 0; i < p->n; i++) {
        p->order[i] = (int32_t)i;
        keys[i] = bits_of(p->costs[i]);
    }
    sort_falling(p->n, keys, p->order, spare);
    sort_falling(p->n, (const uint64_t *)p->lengths, p->order, spare);
}

/* Rank and micro-step of each item, and the number of micro-steps. Lengths are at most `max_tokens`, counts (or NULL) at
   most `max_sequences`, costs finite, at least 0 and never -0.0. */
PEKOE_EXPORT int32_t pekoe_joint_plan(int64_t n, const int64_t *lengths, const double *costs, const int64_t *counts,
                                      int64_t num_ranks, int64_t max_tokens, int64_t max_sequences, int32_t every_step,
                                      int64_t *ranks, int64_t *steps, int64_t *num_steps) {
    *num_steps = 0;
    if (n <= 0) return 0;
    if (n > MOST_ITEMS || num_ranks > MOST_ITEMS) return PEKOE_NO_MEMORY;
    problem p = {n, lengths, counts, costs, num_ranks, max_tokens, max_sequences, NULL, NULL, NULL};
    size_t size = (size_t)n;
    int64_t *bins = malloc(2 * size * sizeof *bins);
    int32_t *order = malloc(2 * size * sizeof *order), status = PEKOE_NO_MEMORY;
    uint64_t *keys = malloc(size * sizeof *keys);
    if (bins && order && keys) {
        p.bins = bins;
        p.spare_bins = bins + n;
        p.order = order;
        sort_items(&p, keys, order + n);
        int64_t found = fewest_steps(&p);
        if (found > 0) {
            *num_steps = found;
            status = place_bins(&p, found, every_step, ranks, steps);
        }
    }
    free(bins);
    free(order);
    free(keys);
    return status;
}
