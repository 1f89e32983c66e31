/* A head's state over several tokens, each part of it in registers from the first of them to the last. */
#pragma once
#include "rows.h"

enum { VECS = 4, ROWS = 2 };

/* A token as one head sees it. */
typedef struct {
  const float *x, *B, *C; /* (channels,), (size,), (size,) */
  float *y, *to;          /* (channels,); (channels, size) for the state behind it, or NULL where nobody asks */
  float step, decay;
} token;

/* Of the states of `rows` channels, the first of which begins at entry `at`, `vecs` vectors from entry n on, of which the
   last has `own` entries: over `silent` tokens, and over `count` whose outputs are asked for. u: what B is multiplied
   with, of LANES channels for each token. */
INLINE void pass(const token *tokens, int64_t silent, int64_t count, const int rows, const int vecs, const float *from,
                 float *last, int64_t at, int64_t size, int64_t n, int64_t own, const float *u, vec *sums) {
#define EACH for (int r = 0; r < rows; r++) for (int v = 0; v < vecs; v++)
  vec s[ROWS][VECS];
  EACH s[r][v] = some(from + at + r * size + n + v * LANES, own);
  for (int64_t i = 0; i < silent; i++, u += LANES)
    for (int v = 0; v < vecs; v++) {
      vec B = some(tokens[i].B + n + v * LANES, own);
      for (int r = 0; r < rows; r++) s[r][v] = advanced(s[r][v], tokens[i].decay, u[r], B);
    }
  tokens += silent;
  for (int64_t i = 0; i < count; i++, u += LANES) {
    vec sum[ROWS];
    for (int r = 0; r < rows; r++) sum[r] = sums[i * LANES + r];
    for (int v = 0; v < vecs; v++) {
      vec B = some(tokens[i].B + n + v * LANES, own), C = some(tokens[i].C + n + v * LANES, own);
      for (int r = 0; r < rows; r++) {
        s[r][v] = advanced(s[r][v], tokens[i].decay, u[r], B);
        sum[r] += s[r][v] * C;
      }
    }
    for (int r = 0; r < rows; r++) sums[i * LANES + r] = sum[r];
    if (tokens[i].to) EACH put(tokens[i].to + at + r * size + n + v * LANES, s[r][v], own);
  }
  if (last) EACH put(last + at + r * size + n + v * LANES, s[r][v], own);
#undef EACH
}

/* Of each token in turn, state (channels, size) <- decay * state + step x B^T, and behind the `silent` first of them
   y = state C + D x. The state before them is `from`, and the one behind them goes to `last` if that is not NULL; these
   and `to` of tokens may be one. Every number has the bits that it gets from tokens taken one by one. */
INLINE void carry(const token *tokens, int64_t silent, int64_t count, const float *from, float *last, float D,
                  int64_t channels, int64_t size) {
  float u[silent + count][LANES] __attribute__((aligned(64)));
  vec sums[MOST_TOKENS][LANES] __attribute__((aligned(64)));
  for (int64_t first = 0; first < channels; first += LANES) {
    int64_t width = channels - first < LANES ? channels - first : LANES;
    for (int64_t i = 0; i < silent + count; i++) store(u[i], some(tokens[i].x + first, width) * tokens[i].step);
    memset(sums, 0, count * sizeof *sums);
    for (int64_t p = 0; p < width; p += ROWS) {
      int64_t at = (first + p) * size, n = 0;
      for (; p + ROWS <= width && n + VECS * LANES <= size; n += VECS * LANES)
        pass(tokens, silent, count, ROWS, VECS, from, last, at, size, n, LANES, *u + p, *sums + p);
      for (; n < size; n += LANES)
        for (int64_t r = 0, own = size - n < LANES ? size - n : LANES; r < ROWS && p + r < width; r++)
          pass(tokens, silent, count, 1, 1, from, last, at + r * size, size, n, own, *u + p + r, *sums + p + r);
    }
    for (int64_t i = 0; i < count; i++) {
      const token *t = tokens + silent + i;
      put(t->y + first, sums_of(sums[i]) + D * some(t->x + first, width), width);
    }
  }
}
