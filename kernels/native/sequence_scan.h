/* The functions of sequence_scan.c for values of one type: included there with REAL, FOUR_REALS and NAME defined. */

INLINE void NAME(load_four)(const REAL *from, Four *onto) {
    *onto = (Four){(double)from[0], (double)from[1], (double)from[2], (double)from[3]};
}

INLINE void NAME(store_four)(const Four *from, REAL *onto) {
    FOUR_REALS found = __builtin_convertvector(*from, FOUR_REALS);
    memcpy(onto, &found, sizeof(found));
}

/* One block of A = R + discount V_next - V + discount lambda A_next. */
INLINE void NAME(gae_block)(Scan *scan, double discount, const REAL *rewards, const REAL *values, REAL *advantages,
                            REAL *returns) {
    Four low, high, value_low, value_high;
    NAME(load_four)(rewards, &low);
    NAME(load_four)(rewards + 4, &high);
    NAME(load_four)(values, &value_low);
    NAME(load_four)(values + 4, &value_high);
    low = low + discount * SHIFT_1(value_low, value_high) - value_low;
    high = high + discount * SHIFT_1(value_high, scan->value) - value_high;
    scan->value = value_low;
    scan_block(scan, &low, &high);
    NAME(store_four)(&low, advantages);
    NAME(store_four)(&high, advantages + 4);
    low += value_low;
    high += value_high;
    NAME(store_four)(&low, returns);
    NAME(store_four)(&high, returns + 4);
}

/* Active tokens brought together, right-aligned before index TILE; those that do not fill a block wait from there on. */
typedef struct {
    REAL rewards[TILE + BLOCK], values[TILE + BLOCK], advantages[TILE + BLOCK], returns[TILE + BLOCK];
    int64_t places[TILE + BLOCK];
    int64_t num_waiting;
} NAME(Gathered);

/* What the blocks of entries `from` on have given goes to its tokens. */
INLINE void NAME(scatter)(const NAME(Gathered) *gathered, int64_t from, REAL *advantages, REAL *returns) {
    for (int64_t i = from; i < TILE + gathered->num_waiting; i++) {
        advantages[gathered->places[i]] = gathered->advantages[i];
        returns[gathered->places[i]] = gathered->returns[i];
    }
}

/* The first `size` tokens from `begin` on, less than a block, wait. */
INLINE void NAME(wait)(NAME(Gathered) *gathered, const REAL *rewards, const REAL *values, int64_t begin, int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        gathered->rewards[TILE + i] = rewards[i];
        gathered->values[TILE + i] = values[i];
        gathered->places[TILE + i] = begin + i;
    }
    gathered->num_waiting = size;
}

INLINE void NAME(gather_tile)(Scan *scan, NAME(Gathered) *gathered, double discount, const REAL *rewards,
                              const REAL *values, const uint8_t *mask, int64_t begin, int64_t size, int64_t count,
                              REAL *advantages, REAL *returns) {
    int64_t first = TILE - count;
    for (int64_t i = 0, next = first; next < TILE; i++) {
        gathered->rewards[next] = rewards[i];
        gathered->values[next] = values[i];
        gathered->places[next] = begin + i;
        next += mask[i] != 0;
    }
    for (int64_t i = 0; i < size; i++) advantages[begin + i] = 0;
    for (int64_t i = 0; i < size; i++) returns[begin + i] = values[i];
    int64_t rest = (count + gathered->num_waiting) % BLOCK, at = TILE + gathered->num_waiting - BLOCK;
    for (; at >= first + rest; at -= BLOCK)
        NAME(gae_block)(scan, discount, gathered->rewards + at, gathered->values + at, gathered->advantages + at,
                        gathered->returns + at);
    NAME(scatter)(gathered, first + rest, advantages, returns);
    for (int64_t i = rest - 1; i >= 0; i--) {
        gathered->rewards[TILE + i] = gathered->rewards[first + i];
        gathered->values[TILE + i] = gathered->values[first + i];
        gathered->places[TILE + i] = gathered->places[first + i];
    }
    gathered->num_waiting = rest;
}

/* The last block of a sequence: on the left of what waits, zeros, whose results nobody reads. */
INLINE void NAME(gather_end)(Scan *scan, NAME(Gathered) *gathered, double discount, REAL *advantages, REAL *returns) {
    if (gathered->num_waiting == 0) return;
    int64_t at = TILE + gathered->num_waiting - BLOCK;
    for (int64_t i = at; i < TILE; i++) gathered->rewards[i] = gathered->values[i] = 0;
    NAME(gae_block)(scan, discount, gathered->rewards + at, gathered->values + at, gathered->advantages + at,
                    gathered->returns + at);
    NAME(scatter)(gathered, TILE, advantages, returns);
    gathered->num_waiting = 0;
}

/* A timestep a token. `values` and `bootstrap` may be NULL: 0. Whole tiles of active tokens are taken as they lie. */
PEKOE_EXPORT PEKOE_CLONES void NAME(gae_token)(const REAL *rewards, const REAL *values, const uint8_t *mask,
                                               const int64_t *cu_seqlens, int64_t num_sequences, double discount,
                                               const double *lambdas, const double *bootstrap, REAL *advantages,
                                               REAL *returns) {
    static const REAL zeros[TILE];
    const int64_t width = (int64_t)sizeof(REAL);
    NAME(Gathered) gathered;
    gathered.num_waiting = 0;
    for (int64_t row = 0; row < num_sequences; row++) {
        Scan scan;
        begin_scan(&scan, discount * lambdas[row], bootstrap == NULL ? 0 : bootstrap[row]);
        for (int64_t begin = cu_seqlens[row], end = cu_seqlens[row + 1]; end > begin;) {
            int64_t size = end - begin < TILE ? end - begin : TILE;
            end -= size;
            const REAL *own = values == NULL ? zeros : values + end;
            int64_t next = end - begin < TILE ? end - begin : TILE, count = num_active(mask + end, size);
            fetch_before(rewards + end, next * width);
            fetch_before(advantages + end, next * width);
            fetch_before(returns + end, next * width);
            fetch_before(mask + end, next);
            if (values != NULL) fetch_before(values + end, next * width);
            if (count == size && gathered.num_waiting == 0) {
                int64_t at = size - BLOCK;
                for (; at >= 0; at -= BLOCK)
                    NAME(gae_block)(&scan, discount, rewards + end + at, own + at, advantages + end + at,
                                    returns + end + at);
                NAME(wait)(&gathered, rewards + end, own, end, at + BLOCK);
            } else if (count == 0) {
                memset(advantages + end, 0, (size_t)(size * width));
                memcpy(returns + end, own, (size_t)(size * width));
            } else {
                NAME(gather_tile)(&scan, &gathered, discount, rewards + end, own, mask + end, end, size, count,
                                  advantages, returns);
            }
        }
        NAME(gather_end)(&scan, &gathered, discount, advantages, returns);
    }
}

/* A timestep a turn: a run of active tokens with one number in `turns` of 4 or 8 bytes, whatever lies between them. */
INLINE int NAME(same_turn)(const void *turns, int32_t width, int64_t a, int64_t b) {
    return width == 4 ? ((const int32_t *)turns)[a] == ((const int32_t *)turns)[b]
                      : ((const int64_t *)turns)[a] == ((const int64_t *)turns)[b];
}

PEKOE_EXPORT void NAME(gae_turn)(const REAL *rewards, const REAL *values, const uint8_t *mask, const void *turns,
                                 int32_t turn_width, const int64_t *cu_seqlens, int64_t num_sequences, double discount,
                                 const double *lambdas, const double *bootstrap, REAL *advantages, REAL *returns) {
    for (int64_t row = 0; row < num_sequences; row++) {
        double decay = discount * lambdas[row], running = 0, following = bootstrap == NULL ? 0 : bootstrap[row];
        int64_t begin = cu_seqlens[row], last = cu_seqlens[row + 1] - 1;
        while (last >= begin) {
            if (!mask[last]) {
                advantages[last] = 0;
                returns[last] = values == NULL ? 0 : values[last];
                last--;
                continue;
            }
            int64_t first = last, i = last - 1;
            for (; i >= begin && (!mask[i] || NAME(same_turn)(turns, turn_width, i, last)); i--)
                first = mask[i] ? i : first;
            double earned = 0, value = values == NULL ? 0 : (double)values[first];
            for (i = first; i <= last; i++) earned += mask[i] ? (double)rewards[i] : 0;
            running = (earned + discount * following - value) + decay * running;
            following = value;
            for (i = first; i <= last; i++) {
                advantages[i] = mask[i] ? (REAL)running : 0;
                returns[i] = mask[i] ? (REAL)(running + value) : values == NULL ? 0 : values[i];
            }
            last = first - 1;
        }
    }
}

/* x_i = v_i + decay x_{i+1} inside each sequence; from the left, x_i = v_i + decay x_{i-1}, where `from_left`. */
INLINE void NAME(sums_block)(Scan *scan, const REAL *values, int32_t from_left, REAL *out) {
    Four low, high;
    NAME(load_four)(values, &low);
    NAME(load_four)(values + 4, &high);
    if (from_left) {
        Four first = REVERSED(low);
        low = REVERSED(high);
        high = first;
    }
    scan_block(scan, &low, &high);
    if (from_left) {
        Four first = REVERSED(high);
        high = REVERSED(low);
        low = first;
    }
    NAME(store_four)(&low, out);
    NAME(store_four)(&high, out + 4);
}

PEKOE_EXPORT PEKOE_CLONES void NAME(discounted_sums)(const REAL *values, const double *decay,
                                                     const int64_t *cu_seqlens, int64_t num_sequences,
                                                     int32_t from_left, REAL *out) {
    for (int64_t row = 0; row < num_sequences; row++) {
        Scan scan;
        begin_scan(&scan, decay[row], 0);
        int64_t begin = cu_seqlens[row], size = cu_seqlens[row + 1] - begin, rest = size % BLOCK;
        if (from_left)
            for (int64_t at = 0; at < size - rest; at += BLOCK)
                NAME(sums_block)(&scan, values + begin + at, 1, out + begin + at);
        else
            for (int64_t at = size - BLOCK; at >= rest; at -= BLOCK)
                NAME(sums_block)(&scan, values + begin + at, 0, out + begin + at);
        if (rest == 0) continue;
        REAL last[BLOCK] = {0};
        int64_t place = from_left ? begin + size - rest : begin, inside = from_left ? 0 : BLOCK - rest;
        memcpy(last + inside, values + place, (size_t)rest * sizeof(REAL));
        NAME(sums_block)(&scan, last, from_left, last);
        memcpy(out + place, last + inside, (size_t)rest * sizeof(REAL));
    }
}

/* Sums, or means, of the tokens where `mask` is not 0 (NULL: of all). */
PEKOE_EXPORT PEKOE_CLONES void NAME(segments)(const REAL *restrict values, const uint8_t *restrict mask,
                                              const int64_t *cu_seqlens, int64_t num_sequences, int32_t is_mean,
                                              REAL *restrict out) {
    for (int64_t row = 0; row < num_sequences; row++) {
        double lanes[LANES] = {0};
        int64_t size = cu_seqlens[row + 1] - cu_seqlens[row], i = 0, count = size;
        const REAL *of = values + cu_seqlens[row];
        if (mask == NULL) {
            for (; i + LANES <= size; i += LANES)
                for (int lane = 0; lane < LANES; lane++) lanes[lane] += (double)of[i + lane];
            for (; i < size; i++) lanes[i % LANES] += (double)of[i];
        } else {
            const uint8_t *keep = mask + cu_seqlens[row];
            REAL kept[TILE];
            count = num_active(keep, size);
            for (int64_t from = 0; from < size; from += TILE) {
                int64_t part = size - from < TILE ? size - from : TILE;
                for (int64_t j = 0; j < part; j++) {
                    REAL value = of[from + j];
                    kept[j] = keep[from + j] != 0 ? value : (REAL)0;
                }
                for (i = 0; i + LANES <= part; i += LANES)
                    for (int lane = 0; lane < LANES; lane++) lanes[lane] += (double)kept[i + lane];
                for (; i < part; i++) lanes[i % LANES] += (double)kept[i];
            }
        }
        double total = lane_total(lanes);
        out[row] = (REAL)(is_mean ? total / (double)(count > 0 ? count : 1) : total);
    }
}
