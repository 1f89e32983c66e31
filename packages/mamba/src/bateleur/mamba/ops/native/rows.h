/* Helpers of the kernels over rows. */
#pragma once
#include "vec.h"
#include <math.h>
#include <stdlib.h>

enum { MOST_TOKENS = 16 };

/* Call f with `wide`, whether inputs are float32, as a constant last argument, so that each case is compiled by itself. */
#define BY_WIDTH(wide, f, ...) ((wide) ? f(__VA_ARGS__, 1) : f(__VA_ARGS__, 0))

/* Load the first n numbers of a vector; the others are zero. */
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

/* Return whether a row does not have 0 to MOST_TOKENS of the tokens. */
INLINE int outside(int64_t first, int64_t n, int64_t tokens) {
  return first < 0 || n < 0 || n > MOST_TOKENS || first + n > tokens;
}

/* Return whether no row writes a slot that another row reads, so that rows can be computed in any order. Row r writes the
   slots from write[r * stride] on, one per token, or only write[r] if stride is 0. starts: NULL if each row has one token.
   All slots are valid. */
static int rows_independent(const int32_t *starts, const int64_t *read, const int64_t *write, int64_t stride, int64_t rows,
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

/* Return 1 + the first row with an invalid token or slot, -1 if a row writes a slot that another row reads, otherwise 0.
   Arguments as in `rows_independent`. */
static int64_t invalid_row(const int32_t *starts, const int64_t *read, const int64_t *write, int64_t stride, int64_t rows,
                         int64_t tokens, int64_t slots) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t first = starts[r], n = starts[r + 1] - first;
    int wrong = outside(first, n, tokens) || (uint64_t)read[r] >= slots;
    for (int64_t i = 0; !wrong && i < (stride ? n : 1); i++) wrong = (uint64_t)write[r * (stride ? stride : 1) + i] >= slots;
    if (wrong) return r + 1;
  }
  return rows_independent(starts, read, write, stride, rows, slots) ? 0 : -1;
}

/* Update a vector of a state: one expression, so that it is rounded in the same way everywhere. */
INLINE vec advanced(vec s, float decay, float u, vec B) { return s * decay + u * B; }

/* Return the step size: softplus of the raw step, clamped to its limits. */
INLINE float step_of(float raw, float least, float most) {
  float soft = raw > 20 ? raw : log1pf(expf(raw));
  return soft < least ? least : soft > most ? most : soft;
}
