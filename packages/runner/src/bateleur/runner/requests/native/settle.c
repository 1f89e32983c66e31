/* What a step did to rows of the request table. */
#include <stdint.h>

/* book: addresses of the table's token_ids and drafted (rows of the table, length), and of num_known, num_settled,
   num_computed, num_tokens and slack. rows and lens (n): rows of the table, all different, and tokens that the step
   computed for each. tokens (n, ...), with a stride, and counts (n): of each, the first so many are known from now on.
   before and after (n): what was settled. Returns n, or the first row whose tokens would leave it or are more than were
   computed, before anything is written. */
int64_t settle_rows(const int64_t *book, int64_t length, const int64_t *rows, const int32_t *lens,
                    const int64_t *tokens, int64_t stride, const int64_t *counts, int64_t n, int32_t *before,
                    int32_t *after) {
  int32_t *ids = (int32_t *)book[0], *known = (int32_t *)book[2], *settled = (int32_t *)book[3];
  int32_t *computed = (int32_t *)book[4], *num_tokens = (int32_t *)book[5], *slack = (int32_t *)book[6];
  uint8_t *drafted = (uint8_t *)book[1];
  for (int64_t i = 0; i < n; i++) {
    int64_t count = counts[i];
    if (count < 0 || count > lens[i] || known[rows[i]] + count > length) return i;
  }
  for (int64_t i = 0; i < n; i++) {
    int64_t row = rows[i], count = counts[i], at = row * length + known[row];
    for (int64_t j = 0; j < count; j++) {
      ids[at + j] = (int32_t)tokens[i * stride + j];
      drafted[at + j] = j < count - 1;
    }
    known[row] += count;
    before[i] = settled[row];
    after[i] = settled[row] += count;
    computed[row] -= lens[i] - count, num_tokens[row] -= lens[i] - count;
    slack[row] -= lens[i] - 1;
  }
  return n;
}

/* book: addresses of the table's num_known and watched_from. packed (n, width): of each of the rows (n) of the table how
   many tokens were emitted, whether its logits were bad, the tokens, at most `most`, and drafts, -1 where there is none.
   stops: by token of `size` whether it may end a request; one below 0 does not. taken and num_drafts (n): tokens that
   were emitted, and drafts before the first that is none. looked (n):
   rows, by number, which may take others than were emitted or do more with them. Returns how many these are. */
int64_t read_rows(const int64_t *book, const int64_t *rows, const int64_t *packed, int64_t width, int64_t most,
                  int64_t n, const uint8_t *stops, int64_t size, int64_t *taken, int64_t *num_drafts, int64_t *looked) {
  const int32_t *known = (const int32_t *)book[0], *watched_from = (const int32_t *)book[1];
  int64_t found = 0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t *own = packed + i * width, *tokens = own + 2, *drafts = tokens + most;
    int64_t count = own[0], drafted = 0;
    int look = own[1] > 0 || known[rows[i]] + count >= watched_from[rows[i]];
    for (int64_t j = 0; j < most; j++) look |= tokens[j] >= 0 && (tokens[j] >= size || stops[tokens[j]]);
    while (drafted < width - 2 - most && drafts[drafted] >= 0) drafted++;
    if (look) looked[found++] = i;
    taken[i] = count, num_drafts[i] = drafted;
  }
  return found;
}
