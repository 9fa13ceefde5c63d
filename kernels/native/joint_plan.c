/* Ranks x micro-batches under a token budget: as few micro-steps as are found, balanced by cost. */
#include "packing_plan.h"

/* As in reference.py. */
enum { LARGE_ITEMS = 4 };
static const int64_t SHARES[] = {0, 1, 2, 4, 6, 7, 8};
static const double CONTENT = 2e-3;

typedef struct {
    int64_t n;
    const int64_t *lengths, *counts; /* counts: NULL where every item is one sequence */
    const double *costs;
    int64_t num_ranks, max_tokens, max_sequences;
    int32_t *order; /* the longest first */
    int64_t *bins, *spare_bins; /* of each item: the last attempt that fitted, and room for the next */
    int64_t placed_steps; /* the micro-steps of `bins` */
    int64_t *fitted, num_fitted; /* best fit of each item, its number of bins */
    int64_t *levels, num_levels; /* the distinct counts, ascending; none without counts */
} problem;

/* How many of the levels are at most `number`. */
static int64_t level_of(const problem *p, int64_t number) {
    int64_t low = 0, high = p->num_levels;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (p->levels[middle] <= number) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Memory of an attempt. */
typedef struct {
    bin_load *active, *parked, *aside; /* parked: by falling room, the `load` is -room; aside: by number */
    double *load;
    int64_t *room, *seats;
    node *nodes; /* of bins that wait for an item of few sequences */
    int32_t *waiting; /* the lightest one of each level of seats, -1 for none */
} workspace;

static void free_workspace(workspace *w) {
    free(w->active);
    free(w->parked);
    free(w->aside);
    free(w->load);
    free(w->room);
    free(w->seats);
    free(w->nodes);
    free(w->waiting);
}

static int make_workspace(workspace *w, int64_t num_bins, int64_t num_levels) {
    size_t size = (size_t)num_bins;
    w->active = malloc(size * sizeof *w->active);
    w->parked = malloc(size * sizeof *w->parked);
    w->aside = malloc(size * sizeof *w->aside);
    w->load = calloc(size, sizeof *w->load);
    w->room = malloc(size * sizeof *w->room);
    w->seats = malloc(size * sizeof *w->seats);
    w->nodes = malloc((num_levels ? size : 1) * sizeof *w->nodes);
    w->waiting = malloc((size_t)(num_levels + 1) * sizeof *w->waiting);
    if (!(w->active && w->parked && w->aside && w->load && w->room && w->seats && w->nodes && w->waiting)) return 0;
    for (int64_t level = 0; level <= num_levels; level++) w->waiting[level] = -1;
    return 1;
}

/* Bins that wait are a leftist heap whose root is the lightest. */
static int32_t join_waiting(workspace *w, int32_t a, int32_t b) {
    if (a < 0) return b;
    if (b < 0) return a;
    if (lighter(&w->aside[b], &w->aside[a])) return join_waiting(w, b, a);
    set_right(w->nodes, a, join_waiting(w, w->nodes[a].right, b));
    return a;
}

static void add_waiting(workspace *w, int64_t level, bin_load bin) {
    w->aside[bin.id] = bin;
    w->nodes[bin.id] = LONE_NODE;
    w->waiting[level] = join_waiting(w, w->waiting[level], bin.id);
}

static void take_waiting(workspace *w, int64_t level) {
    const node *top = &w->nodes[w->waiting[level]];
    w->waiting[level] = join_waiting(w, top->left, top->right);
}

static void park(workspace *w, int64_t *num_parked, bin_load bin) {
    bin.load = -(double)w->room[bin.id];
    add_bin(w->parked, (*num_parked)++, bin);
}

/* `num_fixed` items stay where best fit puts them. */
static void place_fitted(const problem *p, workspace *w, int64_t num_bins, int64_t num_fixed) {
    empty_bins(w->aside, num_bins);
    for (int64_t bin = 0; bin < num_bins; bin++) {
        w->room[bin] = p->max_tokens;
        w->seats[bin] = p->max_sequences;
    }
    for (int64_t i = 0; i < num_fixed; i++) {
        int32_t item = p->order[i];
        int64_t bin = p->spare_bins[item] = p->fitted[item];
        w->room[bin] -= p->lengths[item];
        w->seats[bin]--;
        w->aside[bin].load = w->load[bin] += p->costs[item];
        w->aside[bin].count++;
    }
    for (int64_t bin = 0; bin < num_bins; bin++) add_bin(w->active, bin, w->aside[bin]);
}

/* The level of the lightest bin that waits with enough seats and has room, if it is lighter than `best` (number -1: there
   is none), which it becomes; else -1. */
static int64_t lightest_waiting(const problem *p, workspace *w, int64_t level, int64_t length, int64_t *num_parked,
                                bin_load *best) {
    int64_t found = -1;
    for (; level < p->num_levels; level++) {
        int32_t id;
        while ((id = w->waiting[level]) >= 0 && w->room[id] < length) {
            take_waiting(w, level);
            park(w, num_parked, w->aside[id]);
        }
        if (id >= 0 && (best->id < 0 || lighter(&w->aside[id], best))) {
            *best = w->aside[id];
            found = level;
        }
    }
    return found;
}

/* The longest item first, into the lightest bin that has room; 1 if all found one. A bin that has too little room for
   an item is parked until items are as short as its room, and one with too few seats waits among those with as many;
   neither need be looked at before. */
static int place_all(const problem *p, workspace *w, int64_t num_bins, int64_t num_fixed) {
    int64_t num_active = num_bins, num_parked = 0;
    place_fitted(p, w, num_bins, num_fixed);
    for (int64_t i = num_fixed; i < p->n; i++) {
        int32_t item = p->order[i];
        int64_t length = p->lengths[item], count = p->counts ? p->counts[item] : 1;
        while (num_parked && -w->parked[0].load >= (double)length) {
            bin_load bin = w->parked[0];
            num_parked--;
            replace_first(w->parked, num_parked, w->parked[num_parked]);
            bin.load = w->load[bin.id];
            add_bin(w->active, num_active++, bin);
        }
        bin_load top = {0, 0, -1};
        for (; num_active; top.id = -1) {
            top = w->active[0];
            if (w->room[top.id] >= length && w->seats[top.id] >= count) break;
            num_active--;
            replace_first(w->active, num_active, w->active[num_active]);
            if (w->room[top.id] < length) park(w, &num_parked, top);
            else if (p->counts) add_waiting(w, level_of(p, w->seats[top.id]), top);
            /* else it is full for good */
        }
        int64_t level = lightest_waiting(p, w, level_of(p, count), length, &num_parked, &top);
        if (top.id < 0) return 0;
        w->room[top.id] -= length;
        w->seats[top.id] -= count;
        top.load = w->load[top.id] += p->costs[item];
        top.count++;
        p->spare_bins[item] = top.id;
        if (level >= 0) {
            take_waiting(w, level);
            add_bin(w->active, num_active++, top);
        } else {
            replace_first(w->active, num_active, top);
        }
    }
    return 1;
}

/* Whether the items fit into `num_steps` micro-steps: 1 and the bins, 0, or PEKOE_NO_MEMORY. */
static int attempt(problem *p, int64_t num_steps, int64_t num_fixed) {
    if (num_steps > MOST_ITEMS / p->num_ranks) return PEKOE_NO_MEMORY;
    workspace w;
    int found = PEKOE_NO_MEMORY;
    if (make_workspace(&w, num_steps * p->num_ranks, p->num_levels))
        found = place_all(p, &w, num_steps * p->num_ranks, num_fixed);
    free_workspace(&w);
    if (found == 1) {
        int64_t *other = p->bins;
        p->bins = p->spare_bins;
        p->spare_bins = other;
        p->placed_steps = num_steps;
    }
    return found;
}

static int fit(problem *p) {
    if (p->counts || p->num_fitted) return 0;
    return pekoe_best_fit(p->n, p->lengths, p->max_tokens, p->max_sequences, p->fitted, &p->num_fitted);
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

/* The number of micro-steps; below 0: PEKOE_NO_MEMORY. */
static int64_t fewest_steps(problem *p) {
    int64_t low = lowest_steps(p), high = 2 * low;
    int status = attempt(p, low, 0);
    if (status) return status < 0 ? status : low;
    if (fit(p)) return PEKOE_NO_MEMORY;
    if (p->counts) {
        while (!(status = attempt(p, high, 0))) high *= 2;
        if (status < 0) return status;
    } else {
        high = rounded_up(p->num_fitted, p->num_ranks);
    }
    for (low++; low < high;) {
        int64_t middle = low + (high - low) / 2;
        status = attempt(p, middle, 0);
        if (status < 0) return status;
        if (status) high = middle;
        else low = middle + 1;
    }
    return high;
}

/* Where bins go, and memory to find it out. */
typedef struct {
    int64_t num_bins, num_ranks;
    double *costs, *load;
    uint64_t *keys;
    int32_t *order;
    int64_t *rank, *step, *done;
    pair *pairs;
} placement;

static int make_placement(placement *b, int64_t num_bins, int64_t num_ranks) {
    size_t size = (size_t)num_bins, ways = (size_t)num_ranks;
    b->num_bins = num_bins;
    b->num_ranks = num_ranks;
    b->costs = malloc(size * sizeof *b->costs);
    b->load = malloc(ways * sizeof *b->load);
    b->keys = malloc(size * sizeof *b->keys);
    b->order = malloc(2 * size * sizeof *b->order);
    b->rank = malloc(size * sizeof *b->rank);
    b->step = malloc(size * sizeof *b->step);
    b->done = malloc(ways * sizeof *b->done);
    b->pairs = malloc(2 * ways * sizeof *b->pairs);
    return b->costs && b->load && b->keys && b->order && b->rank && b->step && b->done && b->pairs;
}

static void free_placement(placement *b) {
    free(b->costs);
    free(b->load);
    free(b->keys);
    free(b->order);
    free(b->rank);
    free(b->step);
    free(b->done);
    free(b->pairs);
}

/* Bins in a row are a micro-step, the heaviest on the rank that has least; returns the sum of the heaviest. */
static double spread_steps(placement *b) {
    int64_t num_ranks = b->num_ranks;
    double waited = 0;
    for (int64_t first = 0, number = 0; first < b->num_bins; first += num_ranks, number++) {
        for (int64_t i = 0; i < num_ranks; i++) b->pairs[i] = (pair){-b->load[i], (int32_t)i};
        sort_pairs(num_ranks, b->pairs, b->pairs + num_ranks);
        for (int64_t i = 0; i < num_ranks; i++) {
            int32_t bin = b->order[first + i];
            b->rank[bin] = b->pairs[i].id;
            b->step[bin] = number;
            b->load[b->pairs[i].id] += b->costs[bin];
        }
        waited += b->costs[b->order[first]];
    }
    return waited;
}

/* Rank and micro-step of each bin; returns the cost that the step waits for, below 0: PEKOE_NO_MEMORY. */
static double place_bins(const problem *p, placement *b, int every_step) {
    memset(b->costs, 0, (size_t)b->num_bins * sizeof *b->costs);
    memset(b->load, 0, (size_t)b->num_ranks * sizeof *b->load);
    memset(b->done, 0, (size_t)b->num_ranks * sizeof *b->done);
    for (int64_t i = 0; i < p->n; i++) b->costs[p->bins[i]] += p->costs[i];
    for (int64_t bin = 0; bin < b->num_bins; bin++) {
        b->keys[bin] = bits_of(b->costs[bin]);
        b->order[bin] = (int32_t)bin;
    }
    sort_falling(b->num_bins, b->keys, b->order, b->order + b->num_bins);
    if (every_step) return spread_steps(b);
    if (pekoe_equal_count(b->num_bins, b->costs, b->num_ranks, b->rank)) return PEKOE_NO_MEMORY;
    double waited = 0;
    for (int64_t i = 0; i < b->num_bins; i++) {
        int32_t bin = b->order[i];
        b->step[bin] = b->done[b->rank[bin]]++;
    }
    for (int64_t bin = 0; bin < b->num_bins; bin++) b->load[b->rank[bin]] += b->costs[bin];
    for (int64_t rank = 0; rank < b->num_ranks; rank++)
        if (b->load[rank] > waited) waited = b->load[rank];
    return waited;
}

/* Some of the longest items by best fit, the others into light bins: the share with which ranks wait least. */
static int32_t best_share(problem *p, placement *b, int64_t num_steps, int every_step, int64_t *ranks, int64_t *steps) {
    double least = -1, total = 0;
    for (int64_t i = 0; i < p->n; i++) total += p->costs[i];
    double content = total / (double)p->num_ranks * (1 + CONTENT);
    for (size_t i = 0; i < sizeof SHARES / sizeof *SHARES; i++) {
        if (i == 1 && fit(p)) return PEKOE_NO_MEMORY;
        if (i && (p->counts || p->num_fitted > num_steps * p->num_ranks)) break;
        int status = i || p->placed_steps != num_steps ? attempt(p, num_steps, SHARES[i] * p->n / 8) : 1;
        if (status < 0) return status;
        if (!status) continue;
        double waited = place_bins(p, b, every_step);
        if (waited < 0) return PEKOE_NO_MEMORY;
        if (least >= 0 && waited >= least) continue;
        least = waited;
        for (int64_t item = 0; item < p->n; item++) {
            ranks[item] = b->rank[p->bins[item]];
            steps[item] = b->step[p->bins[item]];
        }
        if (waited <= content) break;
    }
    return 0;
}

static void sort_items(problem *p, uint64_t *keys, int32_t *spare) {
    for (int64_t i = 0; i < p->n; i++) {
        p->order[i] = (int32_t)i;
        keys[i] = bits_of(p->costs[i]);
    }
    sort_falling(p->n, keys, p->order, spare);
    sort_falling(p->n, (const uint64_t *)p->lengths, p->order, spare);
}

static int ascending(const void *a, const void *b) {
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return (left > right) - (left < right);
}

static int find_levels(problem *p) {
    if (!p->counts) return 1;
    p->levels = malloc((size_t)p->n * sizeof *p->levels);
    if (!p->levels) return 0;
    memcpy(p->levels, p->counts, (size_t)p->n * sizeof *p->levels);
    qsort(p->levels, (size_t)p->n, sizeof *p->levels, ascending);
    for (int64_t i = 0; i < p->n; i++)
        if (!i || p->levels[i] != p->levels[p->num_levels - 1]) p->levels[p->num_levels++] = p->levels[i];
    return 1;
}

/* Rank and micro-step of each item, and the number of micro-steps. Lengths are at most `max_tokens`, counts (or NULL) at
   most `max_sequences`, costs finite, at least 0 and never -0.0. */
PEKOE_EXPORT int32_t pekoe_joint_plan(int64_t n, const int64_t *lengths, const double *costs, const int64_t *counts,
                                      int64_t num_ranks, int64_t max_tokens, int64_t max_sequences, int32_t every_step,
                                      int64_t *ranks, int64_t *steps, int64_t *num_steps) {
    *num_steps = 0;
    if (n <= 0) return 0;
    if (n > MOST_ITEMS || num_ranks > MOST_ITEMS) return PEKOE_NO_MEMORY;
    size_t size = (size_t)n;
    problem p = {.n = n, .lengths = lengths, .costs = costs, .counts = counts, .num_ranks = num_ranks,
                 .max_tokens = max_tokens, .max_sequences = max_sequences};
    int64_t *bins = malloc(3 * size * sizeof *bins);
    int32_t *order = malloc(2 * size * sizeof *order), status = PEKOE_NO_MEMORY;
    uint64_t *keys = malloc(size * sizeof *keys);
    if (bins && order && keys) {
        p.bins = bins;
        p.spare_bins = bins + n;
        p.fitted = bins + 2 * n;
        p.order = order;
        sort_items(&p, keys, order + n);
        int64_t found = find_levels(&p) ? fewest_steps(&p) : PEKOE_NO_MEMORY;
        if (found > 0) {
            placement b;
            *num_steps = found;
            if (make_placement(&b, found * num_ranks, num_ranks))
                status = best_share(&p, &b, found, every_step, ranks, steps);
            free_placement(&b);
        }
    }
    free(bins);
    free(order);
    free(keys);
    free(p.levels);
    return status;
}
