/* Products of tokens with a packed matrix: y = x W^T + b, with W (rows, columns), x (tokens, columns).

   W is stored in panels of WIDTH rows, each panel by columns, so that a product reads memory sequentially. A bfloat16
   panel is stored by pairs of columns, also if x is float32: W is then widened while it is read, to the same bits. Every
   sum runs from the first column to the last, whatever the number of tokens, so the bits of a token do not depend on
   other tokens. A part of a panel stays in the cache for GROUP tokens, TOKENS at a time: as many sums as fit into
   registers. Each of these passes prefetches a share of the memory that follows. */
#include "panels.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

void panel_width(int64_t *width) { *width = WIDTH; }

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
        if (count == 1)                                                                                               \
          BY_TOKENS(few, m, 1, xt, stride, part, apart, n, !k, ahead, step, out + t)                                  \
        else if (m == 1)                                                                                              \
          few(1, 2, xt, stride, part, apart, n, !k, ahead, step, out + t);                                            \
        else                                                                                                          \
          few(2, 2, xt, stride, part, apart, n, !k, ahead, step, out + t);                                            \
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
