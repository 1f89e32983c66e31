/* Products of tokens with a packed matrix: y = x W^T + b, with W (rows, columns), x (tokens, columns).

   W is stored in panels of WIDTH rows, each panel by columns, so that a product reads memory sequentially. A bfloat16
   panel is stored by pairs of columns, also if x is float32: W is then widened while it is read, to the same bits. Every
   sum runs from the first column to the last, whatever the number of tokens, so the bits of a token do not depend on
   other tokens. A part of a panel stays in the cache for GROUP tokens, TOKENS at a time: as many sums as fit into
   registers. Each of these passes prefetches a share of the memory that follows. */
#include "vec.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

/* TOKENS * VECS vectors of sums fill the registers, except for a row of W and a token. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { VECS = 3, TOKENS = 8 };
#else
enum { VECS = 2, TOKENS = 6 };
#endif
enum { PAIRED = 2 /* tokens: their sums with one panel are too few to hide latency */ };
enum { WIDTH = LANES * VECS, GROUP = 64, PART = 1 << 17 /* bytes */, AHEAD = 1 << 12 };

typedef float sums[WIDTH] __attribute__((aligned(4 * LANES)));

void panel_width(int64_t *width) { *width = WIDTH; }

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

/* sum + the products of a pair of columns. */
INLINE vec add_pair(vec sum, uint32_t x, uvec w) {
#ifdef __AVX512BF16__
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
#else
  return sum + widen(x) * (vec)(w << 16) + widen(x >> 16) * (vec)(w & 0xFFFF0000u);
#endif
}

INLINE void few_bf16(const int tokens, const int panels, const bf16 *x, int64_t stride, const bf16 *w, int64_t apart,
                     int64_t columns, int first, const char *ahead, int64_t step, sums *out) {
  BEGIN_SUMS
#pragma GCC unroll 2
  for (int64_t k = 0; k < columns; k += 2, w += 2 * WIDTH, ahead += VECS * step, later += VECS * step) {
    uvec row[2][VECS];
    EACH_VEC {
      row[p][v] = *(const uvec *)(w + p * apart + 2 * v * LANES);
      FETCH;
    }
    for (int t = 0; t < tokens; t++) {
      uint32_t pair;
      memcpy(&pair, x + t * stride + k, 4);
      EACH_VEC sum[t][p][v] = add_pair(sum[t][p][v], pair, row[p][v]);
    }
  }
  END_SUMS
}

/* few_f32, with the same bits, for a W stored in bfloat16. */
INLINE void few_wide(const int tokens, const int panels, const float *x, int64_t stride, const bf16 *w, int64_t apart,
                     int64_t columns, int first, const char *ahead, int64_t step, sums *out) {
  BEGIN_SUMS
  for (int64_t k = 0; k < columns; k += 2, w += 2 * WIDTH, ahead += VECS * step, later += VECS * step)
    for (int second = 0; second < 2; second++) {
      vec row[2][VECS];
      EACH_VEC {
        uvec pair = *(const uvec *)(w + p * apart + 2 * v * LANES);
        row[p][v] = second ? (vec)(pair & 0xFFFF0000u) : (vec)(pair << 16);
        if (second) FETCH;
      }
      EACH_SUM sum[t][p][v] += x[t * stride + k + second] * row[p][v];
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

/* panel_##name computes the rows of `count` panels of y (tokens, rows) from `row` on: one panel for up to GROUP tokens,
   two for up to PAIRED. linear_##name computes all of y and returns 0. */
#define PANEL(name, type, entry, few)                                                                                 \
  static void panel_##name(const type *x, int64_t tokens, int64_t stride, int64_t columns, const entry *w, int count, \
                           const type *bias, type *y, int64_t rows, int64_t row) {                                    \
    int64_t passes = (tokens + TOKENS - 1) / TOKENS, apart = columns * WIDTH;                                         \
    sums out[GROUP];                                                                                                  \
    for (int64_t k = 0, n, most = PART / sizeof *w / WIDTH & ~1; k < columns; k += n) {                               \
      n = columns - k < most ? columns - k : most;                                                                    \
      const entry *part = w + k * WIDTH;                                                                              \
      int64_t bytes = n * WIDTH * sizeof *w, step = 64 / passes;                                                      \
      const char *ahead = (const char *)part + (passes > 1 ? bytes : AHEAD);                                          \
      for (int64_t t = 0, m; t < tokens; t += m, ahead += bytes / 64 * step) {                                        \
        const type *xt = x + t * stride + k;                                                                          \
        m = at_once(tokens - t);                                                                                      \
        switch (count > 1 ? -m : m) {                                                                                 \
          case -1: few(1, 2, xt, stride, part, apart, n, !k, ahead, step, out + t); break;                            \
          case -2: few(2, 2, xt, stride, part, apart, n, !k, ahead, step, out + t); break;                            \
          case 1: few(1, 1, xt, stride, part, apart, n, !k, ahead, step, out + t); break;                             \
          case 2: few(2, 1, xt, stride, part, apart, n, !k, ahead, step, out + t); break;                             \
          case 3: few(3, 1, xt, stride, part, apart, n, !k, ahead, step, out + t); break;                             \
          case 4: few(4, 1, xt, stride, part, apart, n, !k, ahead, step, out + t); break;                             \
          case 5: few(5, 1, xt, stride, part, apart, n, !k, ahead, step, out + t); break;                             \
          case 6: few(6, 1, xt, stride, part, apart, n, !k, ahead, step, out + t); break;                             \
          case 7: few(TOKENS < 7 ? TOKENS : 7, 1, xt, stride, part, apart, n, !k, ahead, step, out + t); break;       \
          default: few(TOKENS, 1, xt, stride, part, apart, n, !k, ahead, step, out + t);                              \
        }                                                                                                             \
      }                                                                                                               \
    }                                                                                                                 \
    for (int64_t i = 0; i < count * tokens; i++)                                                                      \
      put_##type(out[i], bias, y, i % tokens, rows, row + i / tokens * WIDTH);                                      \
  }                                                                                                                   \
  int64_t linear_##name(const type *x, int64_t tokens, int64_t stride, int64_t columns, const entry *w,               \
                        const type *bias, type *y, int64_t rows, int threads) {                                       \
    int64_t panels = (rows + WIDTH - 1) / WIDTH, together = tokens <= PAIRED ? 2 : 1;                                 \
    if (tokens * columns * rows < 1 << 16) threads = 1; /* waking a thread takes longer */                            \
    _Pragma("omp parallel for num_threads(threads) schedule(static) if (threads > 1)")                                \
    for (int64_t p = 0; p < panels; p += together)                                                                    \
      for (int64_t t = 0; t < tokens; t += GROUP)                                                                     \
        panel_##name(x + t * stride, tokens - t < GROUP ? tokens - t : GROUP, stride, columns,                        \
                     w + p * WIDTH * columns, p + together <= panels ? together : 1, bias, y + t * rows, rows,        \
                     p * WIDTH);                                                                                      \
    return 0;                                                                                                         \
  }

PANEL(float, float, float, few_f32)
PANEL(bf16, bf16, bf16, few_bf16)
PANEL(wide, float, bf16, few_wide)
