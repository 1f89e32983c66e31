/* Products of tokens with a packed matrix: y = x W^T + b, with W (rows, columns), x (tokens, columns).

   W lies in panels of WIDTH rows, each by columns, so that a product reads memory from one end to the other; a bfloat16
   panel by pairs of columns, also where x is float32: then W is widened on the way, to the same bits. Every sum is one chain from the first column to the last, whatever the number of tokens:
   the bits of a token do not depend on what is beside it. Where there are tiles, they do it (tiles.h). A part of a panel stays in the cache while GROUP tokens pass,
   TOKENS at once, which are as many as sums fit into registers; what follows it in memory is fetched meanwhile, a share
   with each of these passes, so that memory has all the time that they take. */
#include "vec.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

/* Sums of TOKENS times VECS vectors fill the registers, but for a row of W and a token. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { VECS = 3, TOKENS = 8 };
#else
enum { VECS = 2, TOKENS = 6 };
#endif
enum { WIDTH = LANES * VECS, GROUP = 64, PART = 1 << 17 /* bytes */, AHEAD = 1 << 12 };

typedef float sums[WIDTH] __attribute__((aligned(4 * LANES)));

void panel_width(int64_t *width) { *width = WIDTH; }

/* Sums of some columns; `first` of them are what they begin with. `step` bytes from `ahead` on are fetched per vector. */
INLINE void few_f32(const int tokens, const float *x, int64_t stride, const float *w, int64_t columns, int first,
                    const char *ahead, int64_t step, sums *out) {
  vec sum[TOKENS][VECS] = {};
  for (int t = 0; t < tokens && !first; t++)
    for (int v = 0; v < VECS; v++) sum[t][v] = load(out[t] + v * LANES);
#pragma GCC unroll 2
  for (int64_t k = 0; k < columns; k++, w += WIDTH, ahead += VECS * step) {
    vec row[VECS];
    for (int v = 0; v < VECS; v++) {
      row[v] = load(w + v * LANES);
      __builtin_prefetch(ahead + v * step);
    }
    for (int t = 0; t < tokens; t++)
      for (int v = 0; v < VECS; v++) sum[t][v] += x[t * stride + k] * row[v];
  }
  for (int t = 0; t < tokens; t++)
    for (int v = 0; v < VECS; v++) store(out[t] + v * LANES, sum[t][v]);
}

/* sum + the products of a pair of columns. */
INLINE vec add_pair(vec sum, uint32_t x, uvec w) {
#ifdef __AVX512BF16__
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
#else
  return sum + widen(x) * (vec)(w << 16) + widen(x >> 16) * (vec)(w & 0xFFFF0000u);
#endif
}

INLINE void few_bf16(const int tokens, const bf16 *x, int64_t stride, const bf16 *w, int64_t columns, int first,
                     const char *ahead, int64_t step, sums *out) {
  vec sum[TOKENS][VECS] = {};
  for (int t = 0; t < tokens && !first; t++)
    for (int v = 0; v < VECS; v++) sum[t][v] = load(out[t] + v * LANES);
#pragma GCC unroll 2
  for (int64_t k = 0; k < columns; k += 2, w += 2 * WIDTH, ahead += VECS * step) {
    uvec row[VECS];
    for (int v = 0; v < VECS; v++) {
      row[v] = *(const uvec *)(w + 2 * v * LANES);
      __builtin_prefetch(ahead + v * step);
    }
    for (int t = 0; t < tokens; t++) {
      uint32_t pair;
      memcpy(&pair, x + t * stride + k, 4);
      for (int v = 0; v < VECS; v++) sum[t][v] = add_pair(sum[t][v], pair, row[v]);
    }
  }
  for (int t = 0; t < tokens; t++)
    for (int v = 0; v < VECS; v++) store(out[t] + v * LANES, sum[t][v]);
}

/* As few_f32, with the same bits, of a W that bfloat16 holds. */
INLINE void few_wide(const int tokens, const float *x, int64_t stride, const bf16 *w, int64_t columns, int first,
                     const char *ahead, int64_t step, sums *out) {
  vec sum[TOKENS][VECS] = {};
  for (int t = 0; t < tokens && !first; t++)
    for (int v = 0; v < VECS; v++) sum[t][v] = load(out[t] + v * LANES);
  for (int64_t k = 0; k < columns; k += 2, w += 2 * WIDTH, ahead += VECS * step) {
    for (int second = 0; second < 2; second++) {
      vec row[VECS];
      for (int v = 0; v < VECS; v++) {
        uvec pair = *(const uvec *)(w + 2 * v * LANES);
        row[v] = second ? (vec)(pair & 0xFFFF0000u) : (vec)(pair << 16);
        if (second) __builtin_prefetch(ahead + v * step);
      }
      for (int t = 0; t < tokens; t++)
        for (int v = 0; v < VECS; v++) sum[t][v] += x[t * stride + k + second] * row[v];
    }
  }
  for (int t = 0; t < tokens; t++)
    for (int v = 0; v < VECS; v++) store(out[t] + v * LANES, sum[t][v]);
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

#ifdef __AMX_BF16__
#include "tiles.h"
#else
enum { lent };
INLINE int64_t linear_tiles(const void *x, int wide, int64_t tokens, int64_t stride, int64_t columns, const bf16 *w,
                            const void *bias, void *y, int64_t rows, int threads) {
  return 0;
}
#endif

int64_t in_tiles(void) { return lent; }

/* Whether the processor multiplies numbers in bfloat16. */
int64_t in_bfloat16(void) {
#ifdef __AVX512BF16__
  return 1;
#else
  return lent;
#endif
}

/* Of y (tokens, rows), the rows of a panel from `row` on, for up to GROUP tokens; and all of it, by `linear_##name`,
   which returns 1 and has done nothing where there is no memory, else 0. */
#define PANEL(name, type, entry, few, tiled)                                                                      \
  static void panel_##name(const type *x, int64_t tokens, int64_t stride, int64_t columns, const entry *w,        \
                           const type *bias, type *y, int64_t rows, int64_t row) {                                \
    int64_t passes = (tokens + TOKENS - 1) / TOKENS;                                                              \
    sums out[GROUP];                                                                                              \
    for (int64_t k = 0, n, most = PART / sizeof *w / WIDTH & ~1; k < columns; k += n) {                           \
      n = columns - k < most ? columns - k : most;                                                                \
      const entry *part = w + k * WIDTH;                                                                          \
      int64_t bytes = n * WIDTH * sizeof *w, step = 64 / passes;                                                  \
      const char *ahead = (const char *)part + (passes > 1 ? bytes : AHEAD);                                      \
      for (int64_t t = 0, m; t < tokens; t += m, ahead += bytes / 64 * step) {                                    \
        const type *xt = x + t * stride + k;                                                                      \
        switch (m = at_once(tokens - t)) {                                                                        \
          case 1: few(1, xt, stride, part, n, !k, ahead, step, out + t); break;                                   \
          case 2: few(2, xt, stride, part, n, !k, ahead, step, out + t); break;                                   \
          case 3: few(3, xt, stride, part, n, !k, ahead, step, out + t); break;                                   \
          case 4: few(4, xt, stride, part, n, !k, ahead, step, out + t); break;                                   \
          case 5: few(5, xt, stride, part, n, !k, ahead, step, out + t); break;                                   \
          case 6: few(6, xt, stride, part, n, !k, ahead, step, out + t); break;                                   \
          case 7: few(TOKENS < 7 ? TOKENS : 7, xt, stride, part, n, !k, ahead, step, out + t); break;             \
          default: few(TOKENS, xt, stride, part, n, !k, ahead, step, out + t);                                    \
        }                                                                                                         \
      }                                                                                                           \
    }                                                                                                             \
    for (int64_t t = 0; t < tokens; t++) put_##type(out[t], bias, y, t, rows, row);                               \
  }                                                                                                               \
  int64_t linear_##name(const type *x, int64_t tokens, int64_t stride, int64_t columns, const entry *w,           \
                        const type *bias, type *y, int64_t rows, int threads) {                                   \
    int64_t panels = (rows + WIDTH - 1) / WIDTH;                                                                  \
    if (tokens * columns * rows < 1 << 16) threads = 1; /* waking a thread takes longer */                        \
    if (tiled)                                                                                                    \
      return linear_tiles(x, sizeof *x > sizeof *w, tokens, stride, columns, (const bf16 *)w, bias, y, rows,      \
                          threads);                                                                               \
    _Pragma("omp parallel for num_threads(threads) schedule(static) if (threads > 1)")                            \
    for (int64_t p = 0; p < panels; p++)                                                                          \
      for (int64_t t = 0; t < tokens; t += GROUP)                                                                 \
        panel_##name(x + t * stride, tokens - t < GROUP ? tokens - t : GROUP, stride, columns,                    \
                     w + p * WIDTH * columns, bias, y + t * rows, rows, p * WIDTH);                               \
    return 0;                                                                                                     \
  }

PANEL(float, float, float, few_f32, 0)
PANEL(bf16, bf16, bf16, few_bf16, lent)
PANEL(wide, float, bf16, few_wide, lent)
