/* Verification under COUPLED on a CPU: the target draws, place after place, as long as drafts are what it drew. */
#include "winner.h"

static const float largest_of_all[4];

/* logits (tokens, size) with a stride, of which those of row r begin at starts[r]; laws (tokens, 4), or NULL where every
   row takes its largest; words (size); seeds, first and drafts (rows, most) with a stride: position of the row's first
   draw. out (rows, 1 + most), -1 behind the last that is emitted; emitted and bad (rows): how many there are, and whether
   the row of logits behind them was bad. Returns whether something was left open: a draw that the whole law has to
   tell, no memory, or rows that there are not. */
int64_t coupled_rows(const void *logits, int64_t stride, int narrow, int64_t tokens, const float *laws,
                     const uint32_t *words, const uint64_t *seeds, const int64_t *first, const int32_t *starts,
                     const int64_t *drafts, int64_t drafts_stride, int64_t *out, int64_t *emitted, uint8_t *bad,
                     int64_t rows, int64_t most, int64_t size, int threads) {
  int64_t blocks = (size + BLOCK - 1) / BLOCK, open = 0;
  for (int64_t r = 0; r < rows; r++)
    if (starts[r] < 0 || starts[r + 1] < starts[r] || starts[r + 1] > tokens) return 1;
  threads = at_most(threads, at_most(rows, tokens * size >> 15));
#pragma omp parallel num_threads(threads) reduction(| : open) if (threads > 1)
  {
    float *peaks = malloc((blocks + 2 * size) * sizeof(float));
    open |= !peaks;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++) {
      int64_t *own = out + r * (1 + most), n = at_most(starts[r + 1] - starts[r], 1 + most), count = 0, token = 0;
      for (int64_t i = 0; i <= most; i++) own[i] = -1;
      for (int64_t i = 0; i < n && peaks; i++) {
        int64_t at = starts[r] + i;
        row each = {(const char *)logits + at * stride * (narrow ? 2 : 4), narrow, size, blocks, 1, 0, peaks, words, 0, 0};
        key_row(&each, seeds[r], first[r] + i);
        token = draw_row(&each, laws ? laws + 4 * at : largest_of_all, peaks, peaks + blocks);
        open |= token == UNSURE;
        if (token < 0) break;
        own[count++] = token;
        if (i == most || token != drafts[r * drafts_stride + i]) break;
      }
      emitted[r] = count, bad[r] = n > 0 && token == BAD;
    }
    free(peaks);
  }
  return open;
}
