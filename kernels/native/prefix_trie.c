/* Samples that share prefixes, merged token by token, and which blocks of keys a block of queries then needs.

   The trie is built of edges: runs of tokens of one sample without a fork. A table from (edge, next token) to edge
   finds the way down, so that the work is one comparison a token. Edge 0 is the root and holds no token. A sample ends
   inside or at the end of its last edge; when that edge is split later, its upper part is the parent. */
#include "pekoe_native.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t start; /* depth of its first token */
    int64_t size;
    int64_t sample; /* the first sample that passes: its tokens are the edge's */
    int32_t parent;
    int32_t child; /* heads and links of the lists of children, -1 at the end */
    int32_t sibling;
    int32_t node; /* of its first token */
} Edge;

typedef struct {
    int64_t token;
    int32_t parent;
    int32_t edge; /* 0: a free place */
} Place;

typedef struct {
    const char *tokens;
    int64_t width;
    const int64_t *cu_seqlens;
    Edge *edges;
    int32_t num_edges;
    Place *table;
    uint64_t mask;
} Trie;

static inline __attribute__((always_inline)) int64_t token_at(const Trie *trie, int64_t place) {
    if (trie->width == 4) {
        int32_t token;
        memcpy(&token, trie->tokens + 4 * place, 4);
        return token;
    }
    int64_t token;
    memcpy(&token, trie->tokens + 8 * place, 8);
    return token;
}

static Place *find(const Trie *trie, int32_t parent, int64_t token) {
    uint64_t hash = ((uint64_t)token * 0x9E3779B97F4A7C15u) ^ ((uint64_t)parent * 0xD6E8FEB86659FD93u);
    hash = (hash ^ (hash >> 32)) * 0x9E3779B97F4A7C15u;
    uint64_t at = (hash >> 29) & trie->mask;
    while (trie->table[at].edge != 0 && (trie->table[at].parent != parent || trie->table[at].token != token))
        at = (at + 1) & trie->mask;
    return &trie->table[at];
}

/* How many of the first `limit` tokens from places `a` and `b` on are the same. */
static int64_t same_tokens(const Trie *trie, int64_t a, int64_t b, int64_t limit) {
    const char *left = trie->tokens + a * trie->width, *right = trie->tokens + b * trie->width;
    int64_t done = 0, block = 64, width = trie->width;
    while (done + block <= limit && !memcmp(left + done * width, right + done * width, (size_t)(block * width)))
        done += block;
    while (done < limit && token_at(trie, a + done) == token_at(trie, b + done)) done++;
    return done;
}

static int32_t add_edge(Trie *trie, int32_t parent, int64_t start, int64_t size, int64_t sample) {
    trie->edges[trie->num_edges] = (Edge){start, size, sample, parent, -1, -1, 0};
    Place *place = find(trie, parent, token_at(trie, trie->cu_seqlens[sample] + start));
    place->token = token_at(trie, trie->cu_seqlens[sample] + start);
    place->parent = parent;
    place->edge = trie->num_edges;
    return trie->num_edges++;
}

/* Cuts `edge` after `size` tokens; the lower part keeps the number, so that what hangs below it stays. Gives the upper
   one. */
static int32_t split(Trie *trie, int32_t edge, int64_t size) {
    Edge *lower = &trie->edges[edge];
    int32_t upper = add_edge(trie, lower->parent, lower->start, size, lower->sample);
    lower->parent = upper;
    lower->start += size;
    lower->size -= size;
    int64_t token = token_at(trie, trie->cu_seqlens[lower->sample] + lower->start);
    Place *place = find(trie, upper, token);
    place->token = token;
    place->parent = upper;
    place->edge = edge;
    return upper;
}

/* The last edge of a sample, made where it leaves the trie. */
static int32_t insert(Trie *trie, int64_t sample) {
    int64_t first = trie->cu_seqlens[sample], length = trie->cu_seqlens[sample + 1] - first, depth = 0;
    int32_t at = 0;
    while (depth < length) {
        int32_t next = find(trie, at, token_at(trie, first + depth))->edge;
        if (next == 0) return add_edge(trie, at, depth, length - depth, sample);
        Edge *edge = &trie->edges[next];
        int64_t limit = edge->size < length - depth ? edge->size : length - depth;
        int64_t same = same_tokens(trie, first + depth, trie->cu_seqlens[edge->sample] + edge->start, limit);
        depth += same;
        at = next;
        if (same < limit) at = split(trie, next, same);
    }
    return at;
}

/* Children in the order of their first samples. */
static void link_children(Trie *trie, int32_t *newest, int64_t num_samples) {
    for (int64_t sample = 0; sample < num_samples; sample++) newest[sample] = -1;
    for (int32_t edge = 1; edge < trie->num_edges; edge++) {
        trie->edges[edge].sibling = newest[trie->edges[edge].sample];
        newest[trie->edges[edge].sample] = edge;
    }
    for (int64_t sample = num_samples - 1; sample >= 0; sample--) {
        for (int32_t edge = newest[sample], after; edge != -1; edge = after) {
            after = trie->edges[edge].sibling;
            Edge *parent = &trie->edges[trie->edges[edge].parent];
            trie->edges[edge].sibling = parent->child;
            parent->child = edge;
        }
    }
}

/* Numbers the nodes depth first and writes their tokens and positions; gives how many they are. */
static int64_t number_nodes(Trie *trie, char *tokens, int32_t *positions, int32_t *subtree_end) {
    int64_t count = 0;
    for (int32_t at = trie->edges[0].child; at > 0;) {
        Edge *edge = &trie->edges[at];
        edge->node = (int32_t)count;
        memcpy(tokens + count * trie->width,
               trie->tokens + (trie->cu_seqlens[edge->sample] + edge->start) * trie->width,
               (size_t)(edge->size * trie->width));
        for (int64_t i = 0; i < edge->size; i++) positions[count + i] = (int32_t)(edge->start + i);
        count += edge->size;
        if (edge->child != -1) {
            at = edge->child;
            continue;
        }
        for (; at > 0; at = trie->edges[at].parent) {
            edge = &trie->edges[at];
            for (int64_t i = 0; i < edge->size; i++) subtree_end[edge->node + i] = (int32_t)count;
            if (edge->sibling != -1) break;
        }
        if (at > 0) at = edge->sibling;
    }
    return count;
}

static void fill_slots(const Trie *trie, int64_t sample, int32_t last, int32_t *slots) {
    int64_t first = trie->cu_seqlens[sample], length = trie->cu_seqlens[sample + 1] - first;
    for (int32_t at = last; at > 0; at = trie->edges[at].parent) {
        const Edge *edge = &trie->edges[at];
        int64_t end = edge->start + edge->size < length ? edge->start + edge->size : length;
        for (int64_t i = edge->start; i < end; i++) slots[first + i] = (int32_t)(edge->node + (i - edge->start));
    }
}

/* `tokens` [M] of `width` 4 or 8 bytes. Out, with room for M: `nodes` tokens of the nodes, `positions`, `subtree_end`;
   `slots` [M] the node of each token. Gives the number of nodes, or PEKOE_NO_MEMORY. */
PEKOE_EXPORT int64_t pekoe_prefix_trie(const char *tokens, int64_t width, const int64_t *cu_seqlens,
                                       int64_t num_samples, char *nodes, int32_t *positions, int32_t *subtree_end,
                                       int32_t *slots) {
    uint64_t room = 16;
    while (room < 4 * (uint64_t)num_samples + 4) room *= 2;
    Trie trie = {tokens, width, cu_seqlens, NULL, 1, NULL, room - 1};
    trie.edges = malloc((2 * (size_t)num_samples + 2) * sizeof(Edge));
    trie.table = calloc((size_t)room, sizeof(Place));
    int32_t *last = malloc((2 * (size_t)num_samples + 1) * sizeof(int32_t));
    int64_t count = PEKOE_NO_MEMORY;
    if (trie.edges != NULL && trie.table != NULL && last != NULL) {
        trie.edges[0] = (Edge){0, 0, 0, 0, -1, -1, 0};
        for (int64_t sample = 0; sample < num_samples; sample++) last[sample] = insert(&trie, sample);
        link_children(&trie, last + num_samples, num_samples);
        count = number_nodes(&trie, nodes, positions, subtree_end);
        for (int64_t sample = 0; sample < num_samples; sample++) fill_slots(&trie, sample, last[sample], slots);
    }
    free(last);
    free(trie.table);
    free(trie.edges);
    return count;
}

/* Smallest and largest `subtree_end` of each block of keys. */
static void block_ends(const int32_t *subtree_end, int64_t num_nodes, int64_t block, int32_t *lowest,
                       int32_t *highest) {
    for (int64_t k = 0; k < num_nodes; k++) {
        int64_t at = k / block;
        if (k % block == 0) lowest[at] = highest[at] = subtree_end[k];
        if (subtree_end[k] < lowest[at]) lowest[at] = subtree_end[k];
        if (subtree_end[k] > highest[at]) highest[at] = subtree_end[k];
    }
}

/* The blocks of keys that hold an ancestor of a query's node, for each block of queries, ascending, the own one last:
   `offsets` [blocks + 1]; with `keys` not NULL also `keys` and `is_full` [offsets' last]. An earlier block is needed
   while some subtree of it reaches the block's first query, and never again afterwards; it is full where all of them
   reach past its last query. Work and memory follow the result. Gives 0 or PEKOE_NO_MEMORY. */
PEKOE_EXPORT int64_t pekoe_block_map(const int32_t *subtree_end, int64_t num_nodes, int64_t block, int64_t *offsets,
                                     int32_t *keys, uint8_t *is_full) {
    int64_t num_blocks = (num_nodes + block - 1) / block, num_open = 0;
    int32_t *ends = malloc((3 * (size_t)num_blocks + 1) * sizeof(int32_t));
    if (ends == NULL) return PEKOE_NO_MEMORY;
    int32_t *lowest = ends, *highest = ends + num_blocks, *open = ends + 2 * num_blocks;
    block_ends(subtree_end, num_nodes, block, lowest, highest);
    offsets[0] = 0;
    for (int64_t query = 0; query < num_blocks; query++) {
        int64_t first = query * block, last = (first + block < num_nodes ? first + block : num_nodes) - 1, kept = 0;
        for (int64_t i = 0; i < num_open; i++) {
            open[kept] = open[i];
            kept += highest[open[i]] > first;
        }
        num_open = kept;
        for (int64_t i = 0; keys != NULL && i < num_open; i++) {
            keys[offsets[query] + i] = open[i];
            is_full[offsets[query] + i] = lowest[open[i]] > last;
        }
        if (keys != NULL) {
            keys[offsets[query] + num_open] = (int32_t)query;
            is_full[offsets[query] + num_open] = first == last;
        }
        offsets[query + 1] = offsets[query] + num_open + 1;
        open[num_open++] = (int32_t)query;
    }
    free(ends);
    return 0;
}
