/* Sampling over a vocabulary on a CPU: the sampled token of every row, and its truncation thresholds. */
#include "winner.h"

/* Thresholds are exact: mass is counted in units of 2^-40, `parts` are exp(x - best) by torch. */
typedef struct {
  float x;
  int64_t mass;
} part;

static int64_t mass_of(float part) { return (double)part * 0x1p40; }

/* The largest number such that the mass of the numbers not below it, plus `before`, reaches the goal; `before` becomes the
   mass above it. Reorders the n numbers. */
static float reach(part *p, int64_t n, double goal, int64_t *before) {
  for (;;) {
    float pivot = p[n / 2].x;
    int64_t above = 0, tied = 0, left = 0, right = n, mass = *before, ties = 0;
    for (int64_t i = 0; i < right;) { /* above, then equal, then below */
      part each = p[i];
      if (each.x > pivot) mass += each.mass, p[i++] = p[left], p[left++] = each;
      else if (each.x == pivot) ties += each.mass, i++;
      else p[i] = p[--right], p[right] = each;
    }
    above = left, tied = right - left;
    if (mass >= goal && above) n = above;
    else if (mass + ties >= goal || above + tied == n) return *before = mass, pivot;
    else *before = mass + ties, p += above + tied, n -= above + tied;
  }
}

enum { BINS = 2048 };
INLINE int bin_of(const row *r, float x) { return at_most((r->best - x) * (BINS / NO_MASS), BINS - 1); }

/* Apply top_p to the kept tokens. room: for `size` parts. */
static cut nucleus(const row *r, cut c, double top_p, const float *parts, part *room) {
  const float *logits = r->logits;
  int64_t masses[BINS] = {}, total = 0, before = 0, n = 0;
  float from = r->best - NO_MASS;
  for (int64_t i = 0; i < r->size; i++)
    if (logits[i] >= from && keeps(c, logits[i], i)) masses[bin_of(r, logits[i])] += mass_of(parts[i]);
  for (int b = 0; b < BINS; b++) total += masses[b];
  double goal = total * top_p;
  int bin = 0;
  while (bin < BINS - 1 && before + masses[bin] < goal) before += masses[bin++];
  for (int64_t i = 0; i < r->size; i++)
    if (logits[i] >= from && keeps(c, logits[i], i) && bin_of(r, logits[i]) == bin)
      room[n++] = (part){logits[i], mass_of(parts[i])};
  float least = reach(room, n, goal, &before);
  for (int64_t i = 0, last = -1;; i++) {
    if (i == r->size || (last >= 0 && before >= goal)) return (cut){least, last};
    if (logits[i] == least && i <= (least == c.least ? c.last : i)) before += mass_of(parts[last = i]);
  }
}

/* scaled and parts (rows, size), dense; params (rows, 4); least and last (rows): see `truncation_thresholds`. room: 32 bytes
   for each token of a row. */
void truncate_rows(const float *scaled, const float *parts, const float *params, float *least, int32_t *last, void *room,
              int64_t rows, int64_t size) {
  int64_t blocks = (size + BLOCK - 1) / BLOCK;
  float *peaks = (float *)((part *)room + size);
  for (int64_t i = 0; i < rows; i++, scaled += size, parts += size, params += 4) {
    row r = {scaled, 0, size, blocks, 1, find_peaks(scaled, 0, size, peaks), peaks, 0, 0, 0};
    cut c = {-INFINITY, size};
    if (params[0] > 0 && isfinite(r.best)) {
      c = everything;
      if (r.best + params[1] > c.least) c.least = r.best + params[1];
      if (params[2] >= 1 && params[2] < size) c = top(&r, c.least, params[2], peaks + blocks);
      if (params[3] < 1) c = nucleus(&r, c, params[3], parts, room);
    }
    least[i] = c.least, last[i] = at_most(c.last, size);
  }
}

/* Flag a row with NaN, or without a logit above -inf, as bad, and give it token 0. */
static void tell(int64_t token, int64_t *tokens, uint8_t *bad) {
  *bad = token == BAD;
  *tokens = token == BAD ? 0 : token;
}

/* logits (rows, size) with a stride; params (rows, 4); words (size); seeds, names, tokens and bad (rows). A token is UNSURE
   if torch has to decide from the processed logits. */
void draw_rows(const void *logits, int64_t stride, int narrow, const float *params, const uint32_t *words,
               const uint64_t *seeds, const uint64_t *names, int64_t *tokens, uint8_t *bad, int64_t rows, int64_t size,
               int threads) {
  int64_t blocks = (size + BLOCK - 1) / BLOCK;
  threads = at_most(threads, at_most(rows, rows * size >> 15));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float *peaks = malloc((blocks + 2 * size) * sizeof(float));
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < rows; i++) {
      row r = {(const char *)logits + i * stride * (narrow ? 2 : 4), narrow, size, blocks, 1, 0, peaks, words, 0, 0};
      key_row(&r, seeds[i], names[i]);
      tell(peaks ? draw_row(&r, params + 4 * i, peaks, peaks + blocks) : UNSURE, tokens + i, bad + i);
    }
    free(peaks);
  }
}

/* The first maximum of every row. */
void argmax_rows(const void *logits, int64_t stride, int narrow, int64_t *tokens, uint8_t *bad, int64_t rows,
                 int64_t size, int threads) {
  int64_t blocks = (size + BLOCK - 1) / BLOCK;
  threads = at_most(threads, at_most(rows, rows * size >> 16));
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < rows; i++) {
    const void *from = (const char *)logits + i * stride * (narrow ? 2 : 4);
    float peaks[blocks], best = find_peaks(from, narrow, size, peaks);
    tell(best > -INFINITY ? first_maximum(from, narrow, size, peaks, best) : BAD, tokens + i, bad + i);
  }
}
