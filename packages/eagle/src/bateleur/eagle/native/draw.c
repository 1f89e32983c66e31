/* Sampling over a vocabulary on a CPU: the sampled token of every row. */
#include "winner.h"

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
