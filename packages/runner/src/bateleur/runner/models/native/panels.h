/* Panels: WIDTH rows of a matrix, stored by columns. Sums of tokens with a panel run from the first column to the last. */
#pragma once
#include "vec.h"

/* TOKENS * VECS vectors of sums fill the registers, except for a row of W and a token. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { VECS = 3, TOKENS = 8 };
#else
enum { VECS = 2, TOKENS = 6 };
#endif
enum { PAIRED = 2 /* tokens: their sums with one panel are too few to hide latency */ };
enum { WIDTH = LANES * VECS, GROUP = 64, PART = 1 << 17 /* bytes */, AHEAD = 1 << 12 };

typedef float sums[WIDTH] __attribute__((aligned(4 * LANES)));

/* Add the products of some columns with one panel, or with two that are `apart` entries apart, to the sums in `out`;
   `first`: start from 0. Prefetches `step` bytes per vector and panel, for the first one from `ahead` on. Sums of the
   second panel follow those of all tokens. */
#define EACH_VEC for (int p = 0; p < panels; p++) for (int v = 0; v < VECS; v++)
#define EACH_SUM for (int t = 0; t < tokens; t++) EACH_VEC
#define BEGIN_SUMS                                                                                  \
  const char *later = ahead + apart * sizeof *w;                                                    \
  vec sum[TOKENS][2][VECS] = {};                                                                    \
  if (!first) EACH_SUM sum[t][p][v] = load(out[p * tokens + t] + v * LANES);
#define FETCH __builtin_prefetch((p ? later : ahead) + v * step)
#define END_SUMS EACH_SUM store(out[p * tokens + t] + v * LANES, sum[t][p][v]);

INLINE void few_f32(const int tokens, const int panels, const float *x, int64_t stride, const float *w, int64_t apart,
                    int64_t columns, int first, const char *ahead, int64_t step, sums *out) {
  BEGIN_SUMS
#pragma GCC unroll 2
  for (int64_t k = 0; k < columns; k++, w += WIDTH, ahead += VECS * step, later += VECS * step) {
    vec row[2][VECS];
    EACH_VEC {
      row[p][v] = load(w + p * apart + v * LANES);
      FETCH;
    }
    EACH_SUM sum[t][p][v] += x[t * stride + k] * row[p][v];
  }
  END_SUMS
}

INLINE int64_t at_once(int64_t left) {
  if (left <= TOKENS) return left;
  return left < 2 * TOKENS ? (left + 1) / 2 : TOKENS;
}

/* Rounded sums of a token with a panel, whose first row is `row`, to y (tokens, rows). */
#define PUT(type, wide, thin)                                                                                     \
  INLINE void put_##type(const float *sum, const type *bias, type *y, int64_t token, int64_t rows, int64_t row) { \
    int64_t width = rows - row < WIDTH ? rows - row : WIDTH, j = 0;                                               \
    y += token * rows + row;                                                                                      \
    for (; j + LANES <= width; j += LANES) {                                                                      \
      vec v = load(sum + j);                                                                                      \
      if (bias) v += load_##type(bias + row + j);                                                                 \
      store_##type(y + j, v);                                                                                     \
    }                                                                                                             \
    for (; j < width; j++) y[j] = thin(bias ? sum[j] + wide(bias[row + j]) : sum[j]);                             \
  }

PUT(float, widen_float, narrow_float)
PUT(bf16, widen, narrow)

/* Call `few` for m tokens, with m and the number of panels as constants. */
#define BY_TOKENS(few, m, ...)                                     \
  switch (m) {                                                     \
    case 1: few(1, __VA_ARGS__); break;                            \
    case 2: few(2, __VA_ARGS__); break;                            \
    case 3: few(3, __VA_ARGS__); break;                            \
    case 4: few(4, __VA_ARGS__); break;                            \
    case 5: few(5, __VA_ARGS__); break;                            \
    case 6: few(6, __VA_ARGS__); break;                            \
    case 7: few(TOKENS < 7 ? TOKENS : 7, __VA_ARGS__); break;      \
    default: few(TOKENS, __VA_ARGS__);                             \
  }
