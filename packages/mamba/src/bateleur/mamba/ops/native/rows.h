/* What kernels over rows of few tokens share. */
#pragma once
#include "vec.h"
#include <math.h>
#include <stdlib.h>

enum { MOST_TOKENS = 16 };

/* The first n numbers of a vector, zeros behind them. */
INLINE vec some(const float *p, int64_t n) {
  if (n == LANES) return load(p);
  vec v = {};
  memcpy(&v, p, n * 4);
  return v;
}

INLINE void put(float *p, vec v, int64_t n) {
  if (n == LANES) store(p, v);
  else memcpy(p, &v, n * 4);
}

/* Whether a row has other tokens than 0 to MOST_TOKENS of those there are. */
INLINE int outside(int64_t first, int64_t n, int64_t tokens) {
  return first < 0 || n < 0 || n > MOST_TOKENS || first + n > tokens;
}

/* Whether no row writes a slot that another one reads, so that rows may be computed in any order. Of row r slots
   write[r * stride] and what follows are written to, one for each of its tokens, or one where stride is 0; starts: NULL
   where each row has a token. All slots are there. */
static int apart(const int32_t *starts, const int64_t *read, const int64_t *write, int64_t stride, int64_t rows,
                 int64_t slots) {
  int32_t *reader = calloc(slots, sizeof *reader), found = reader != NULL;
  for (int64_t r = 0; r < rows && found; r++)
    if (read[r] && (!starts || starts[r + 1] > starts[r])) reader[read[r]] = reader[read[r]] ? -1 : r + 1;
  for (int64_t r = 0; r < rows && found; r++)
    for (int64_t i = 0, n = starts ? starts[r + 1] - starts[r] : 1; i < (stride && starts ? n : n > 0) && found; i++) {
      int64_t slot = write[r * (stride ? stride : 1) + i];
      found = !slot || !reader[slot] || reader[slot] == r + 1;
    }
  free(reader);
  return found;
}

/* 1 + the first row that names a token or a slot that there is not; or -1 where a row writes what another one reads; or
   0. Of a row, slots write[r * stride] and what follows are written to, one for each token, or for all where stride is
   0. */
static int64_t misplaced(const int32_t *starts, const int64_t *read, const int64_t *write, int64_t stride, int64_t rows,
                         int64_t tokens, int64_t slots) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t first = starts[r], n = starts[r + 1] - first;
    int wrong = outside(first, n, tokens) || (uint64_t)read[r] >= slots;
    for (int64_t i = 0; !wrong && i < (stride ? n : 1); i++) wrong = (uint64_t)write[r * (stride ? stride : 1) + i] >= slots;
    if (wrong) return r + 1;
  }
  return apart(starts, read, write, stride, rows, slots) ? 0 : -1;
}

/* A part of a state behind a token: one expression, so that it is rounded in one way wherever it stands. */
INLINE vec advanced(vec s, float decay, float u, vec B) { return s * decay + u * B; }

/* A raw step as it is applied: softplus, held to its limits. */
INLINE float step_of(float raw, float least, float most) {
  float soft = raw > 20 ? raw : log1pf(expf(raw));
  return soft < least ? least : soft > most ? most : soft;
}
