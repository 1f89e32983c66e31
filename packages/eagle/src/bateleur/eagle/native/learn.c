/* What became of the drafts of a step: the counts of `AcceptStats` and the estimates of `AcceptanceEstimates`. */
#include <stdint.h>

typedef struct {
  double fade, memory;
  int64_t k, *totals, *counted;
  double *seen, *all;
} Book;

/* rows, drafts, accepted and, if not NULL, allowed (n): see `Learning.update`. totals (4): rows with drafts, rows without,
   drafts, accepted ones; counted (2, k): drafts that were reached, and accepted. seen (rows of the table, 2, k) and all
   (2, k): the same of each row, faded, and of all, of which a step leaves memory / (memory + what it adds); here a draft
   that was not made counts, too. Everything is added to but totals. Returns the first row whose counts can't be, before
   anything is written; n if there is none. A product is rounded before its sum, as numpy rounds it. */
__attribute__((optimize("fp-contract=off"))) int64_t learn_rows(const Book *book, const int64_t *rows,
                                                                const int64_t *drafts, const int64_t *accepted,
                                                                const int32_t *allowed, int64_t n) {
  int64_t k = book->k, *totals = book->totals, *counted = book->counted;
  double fade = book->fade, memory = book->memory, *seen = book->seen, *all = book->all;
  for (int64_t i = 0; i < n; i++)
    if (accepted[i] < 0 || accepted[i] > drafts[i] || drafts[i] > k) return i;
  int64_t before[2 * k + 1], unmade[k + 1];
  for (int64_t j = 0; j < 2 * k; j++) before[j] = counted[j];
  for (int64_t j = 0; j < k; j++) unmade[j] = 0;
  totals[0] = totals[1] = totals[2] = totals[3] = 0;
  for (int64_t i = 0; i < n; i++) {
    double *own = seen + rows[i] * 2 * k;
    totals[drafts[i] ? 0 : 1]++, totals[2] += drafts[i], totals[3] += accepted[i];
    int64_t j = 0;
    for (; j < drafts[i] && j <= accepted[i]; j++) {
      int kept = j < accepted[i];
      own[j] = own[j] * fade + 1, own[k + j] = own[k + j] * fade + kept;
      counted[j]++, counted[k + j] += kept;
    }
    if (allowed && drafts[i] && drafts[i] < allowed[i] && j == accepted[i] && j < k)
      own[j] = own[j] * fade + 1, own[k + j] *= fade, unmade[j]++;
  }
  for (int64_t j = 0; j < k; j++) {
    int64_t more = counted[j] - before[j] + unmade[j];
    if (!more) continue;
    double left = memory / (memory + more);
    all[j] = all[j] * left + more;
    all[k + j] = all[k + j] * left + (counted[k + j] - before[k + j]);
  }
  return n;
}
