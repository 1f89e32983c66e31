/* Verification under COUPLED on a CPU: the target draws, place after place, as long as drafts are what it drew. */
#include "winner.h"

static const float largest_of_all[4];

/* What draws: logits (tokens, size) with a stride, in bytes, of which a row of `narrow` ones is bfloat16; laws (tokens, 4),
   or NULL where every row takes its largest; words (size). */
typedef struct {
  const char *logits;
  int64_t stride, size, blocks;
  int narrow;
  const float *laws;
  const uint32_t *words;
} target;

/* Draw row after row of logits, `n` from the one at `at`, while each is the draft that it comes before: own (1 + most),
   -1 behind the last that is emitted. peaks: room for blocks + 2 * size floats. Returns what was drawn last, BAD or UNSURE. */
static int64_t emit_row(const target *t, int64_t at, int64_t n, int64_t most, uint64_t seed, int64_t first,
                        const int64_t *drafts, float *peaks, int64_t *own, int64_t *emitted) {
  int64_t count = 0, token = 0;
  for (int64_t i = 0; i <= most; i++) own[i] = -1;
  for (int64_t i = 0; i < n; i++, at++) {
    row each = {t->logits + at * t->stride, t->narrow, t->size, t->blocks, 1, 0, peaks, t->words, 0, 0};
    key_row(&each, seed, first + i);
    token = draw_row(&each, t->laws ? t->laws + 4 * at : largest_of_all, peaks, peaks + t->blocks);
    if (token < 0) break;
    own[count++] = token;
    if (i == most || token != drafts[i]) break;
  }
  *emitted = count;
  return token;
}

static target target_of(const void *logits, int64_t stride, int narrow, int64_t size, const float *laws,
                        const uint32_t *words) {
  return (target){logits, stride * (narrow ? 2 : 4), size, (size + BLOCK - 1) / BLOCK, narrow, laws, words};
}

static int misplaced(const int32_t *starts, int64_t rows, int64_t tokens) {
  for (int64_t r = 0; r < rows; r++)
    if (starts[r] < 0 || starts[r + 1] < starts[r] || starts[r + 1] > tokens) return 1;
  return 0;
}

/* The logits of row r begin at starts[r]; seeds, first and drafts (rows, most) with a stride: position of the row's first
   draw. out (rows, 1 + most), -1 behind the last that is emitted; emitted and bad (rows): how many there are, and whether
   the row of logits behind them was bad. Returns whether something was left open: a draw that the whole law has to
   tell, no memory, or rows that there are not. */
int64_t coupled_rows(const void *logits, int64_t stride, int narrow, int64_t tokens, const float *laws,
                     const uint32_t *words, const uint64_t *seeds, const int64_t *first, const int32_t *starts,
                     const int64_t *drafts, int64_t drafts_stride, int64_t *out, int64_t *emitted, uint8_t *bad,
                     int64_t rows, int64_t most, int64_t size, int threads) {
  target t = target_of(logits, stride, narrow, size, laws, words);
  int64_t open = 0;
  if (misplaced(starts, rows, tokens)) return 1;
  threads = at_most(threads, at_most(rows, tokens * size >> 15));
#pragma omp parallel num_threads(threads) reduction(| : open) if (threads > 1)
  {
    float *peaks = malloc((t.blocks + 2 * size) * sizeof(float));
    open |= !peaks;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++) {
      int64_t n = peaks ? at_most(starts[r + 1] - starts[r], 1 + most) : 0;
      int64_t token = emit_row(&t, starts[r], n, most, seeds[r], first[r], drafts + r * drafts_stride, peaks,
                               out + r * (1 + most), emitted + r);
      open |= token == UNSURE, bad[r] = n > 0 && token == BAD;
    }
    free(peaks);
  }
  return open;
}

typedef struct {
  const float *laws;
  const uint32_t *words;
  const uint64_t *seeds;
  const int32_t *starts, *num_drafts;
  const int64_t *places, *tokens;
  int64_t *next, rows, most;
} Steady;

/* The same of rows of a table: row r has the one at places[r], of next (..., 1 + most), which holds its last token and
   drafts behind it, and of num_drafts, of which so many are tested as it has logits for. positions: by token of the step, of
   which the first logits of row r are behind tokens[r]. packed (rows, 3 + 2 * most): tokens that are emitted, whether the logits behind them are bad, the tokens, and the
   drafts that were tested, -1 behind the last of each; emitted (rows). If nothing was left open, the last token of each
   row is its next one. */
int64_t coupled_ends(const Steady *s, const void *logits, int64_t stride, int narrow, int64_t tokens,
                     int64_t size, const int64_t *positions, int64_t *packed, int64_t *emitted, int threads) {
  target t = target_of(logits, stride, narrow, size, s->laws, s->words);
  int64_t open = 0, most = s->most, width = 3 + 2 * most;
  if (misplaced(s->starts, s->rows, tokens)) return 1;
  threads = at_most(threads, at_most(s->rows, tokens * size >> 15));
#pragma omp parallel num_threads(threads) reduction(| : open) if (threads > 1)
  {
    float *peaks = malloc((t.blocks + 2 * size) * sizeof(float));
    open |= !peaks;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < s->rows; r++) {
      int64_t at = s->starts[r], n = peaks ? s->starts[r + 1] - at : 0, place = s->places[r];
      int64_t *own = packed + r * width, *drafts = own + 3 + most, count = at_most(s->num_drafts[place], n - 1);
      for (int64_t i = 0; i < most; i++) drafts[i] = i < count ? s->next[place * (1 + most) + 1 + i] : -1;
      int64_t token = n > 0 && n <= 1 + most
                          ? emit_row(&t, at, n, most, s->seeds[r], positions[s->tokens[r]] + 1, drafts, peaks, own + 2, own)
                          : UNSURE;
      open |= token == UNSURE, own[1] = token == BAD;
    }
    free(peaks);
  }
  for (int64_t r = 0; r < s->rows && !open; r++) {
    int64_t *own = packed + r * width, count = emitted[r] = own[0];
    s->next[s->places[r] * (1 + most)] = count ? own[1 + count] : 0;
  }
  return open;
}
