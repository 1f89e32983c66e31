/* What a step folds under FOLD; see `bateleur.mamba.planners.plan_fold`. */
#include <stdint.h>

static int64_t held(int64_t x, int64_t least, int64_t most) { return x < least ? least : x > most ? most : x; }

/* computed (n) and starts (n + 1); rows from `decodes` on were scanned. flush (n) or NULL. A ring keeps `most` entries.
   accepted, request_row, and of a `ReplayPlan` slot, fold_slot, ring_start and ring_len (n). through (n): tokens that
   were folded on the way, so that the checkpoint is in fold_slot, and slot says so then; or NULL. What follows is
   written, (n) each, and `kept` and `base` go to the states (3, num_states), which are accepted, prev_col and base, -1
   for all tokens; row 0 of these stays neutral. Returns how many rows fold; or -1 if one names no row of states or has
   less than no tokens: nothing is written then. */
int64_t fold_rows(const int32_t *computed, const int32_t *starts, int64_t n, int64_t decodes, const uint8_t *flush,
                  int64_t block_size, int64_t most, const int64_t *accepted, const int64_t *request_row,
                  const int64_t *through, int64_t *slot, const int64_t *fold_slot, const int64_t *ring_start,
                  const int64_t *ring_len, int64_t *states, int64_t num_states, int64_t *dst, int64_t *count, int64_t *page_offset, int64_t *base,
                  int64_t *kept) {
  int64_t folds = 0;
  for (int64_t i = 0; i < n; i++)
    if (request_row[i] < 0 || request_row[i] >= num_states || starts[i + 1] < starts[i]) return -1;
  for (int64_t i = 0; i < n; i++) {
    int64_t len = starts[i + 1] - starts[i], keep = 0, folded = through && i < decodes ? through[i] : 0;
    dst[i] = count[i] = page_offset[i] = 0, base[i] = ring_start[i] + folded;
    if (folded) slot[i] = fold_slot[i];
    if (i >= decodes) {
      kept[i] = 1, base[i] = computed[i] + len;
      continue;
    }
    kept[i] = len ? held(accepted[i], 1, len) : 0;
    if (!len) continue;
    int64_t ring = ring_len[i] + kept[i] - folded;
    keep = (computed[i] + kept[i]) % block_size; /* behind the last boundary, if the ring reaches back beyond it */
    if (keep > ring) keep = ring;
    if (keep > most || (flush && flush[i] && keep == ring)) keep = 0;
    if (keep == ring && !(folded && flush && flush[i])) continue; /* a prompt that goes on reads the page's window */
    count[i] = ring - keep, base[i] += count[i];
    dst[i] = fold_slot[i], page_offset[i] = kept[i] - keep - 1, folds++;
  }
  for (int64_t i = 0; i < n; i++) {
    int all = i < decodes && through && through[i] && through[i] == ring_len[i] + kept[i];
    states[request_row[i]] = kept[i], states[2 * num_states + request_row[i]] = all ? -1 : base[i];
  }
  states[0] = 1, states[num_states] = -1, states[2 * num_states] = 0;
  return folds;
}
