/* Products of float32 tokens with a matrix of eight bits: y = x W^T + b, with W (rows, columns), x (tokens, columns).

   A row of W is whole numbers of -127 to 127 times its scale, and so is a token once it is rounded, by its own largest
   number. Their sums are whole numbers, exact in any order: the bits of a token do not depend on what is beside it.

   The instruction multiplies bytes without a sign by bytes with one, four columns at a time. So tokens come with 128
   added, and sums begin with what takes that off again. W lies in panels of WIDTH rows: where their sums begin, their
   scales, then their bytes, those of four columns of a row side by side. */
#include "vec.h"
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#include <immintrin.h>

#if defined(__AVX512VNNI__)
enum { VECS = 4, TOKENS = 6 };
INLINE ivec add_four(ivec sum, int32_t x, ivec w) {
  return (ivec)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(x), (__m512i)w);
}
#else
enum { VECS = 2, TOKENS = 6 };
INLINE ivec add_four(ivec sum, int32_t x, ivec w) {
  return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, _mm256_set1_epi32(x), (__m256i)w);
}
#endif
enum { WIDTH = LANES * VECS, AHEAD = 1 << 12 /* bytes */ };

void coarse_width(int64_t *width) { *width = WIDTH; }

/* A token's numbers as bytes, 128 for 0, to a whole number of fours; returns what one of them is worth. */
static float round_token(const float *x, int64_t columns, int64_t padded, uint8_t *to) {
  vec most = {}, wrong = {};
  int64_t j = 0;
  for (; j < columns; j += LANES) {
    vec v = load_some(x, j, 1, columns - j);
    wrong += v * 0.0f; /* NaN where a number is NaN or infinite */
    vec size = (vec)((uvec)v & 0x7FFFFFFFu);
    most = pick(size > most, size, most);
  }
  float largest = most_of(most), scale = largest / 127, times = largest > 0 ? 127 / largest : 0;
  if (times > 3e38f) times = scale = 0; /* numbers of which 127ths are too small to divide by */
  for (j = 0; j < columns; j += LANES) {
    vec whole = load_some(x, j, 1, columns - j) * times + 12582912.0f; /* the nearest one in the lowest bits */
    typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    bytes b = __builtin_convertvector((uvec)whole, bytes) ^ 0x80;
    memcpy(to + j, &b, padded - j < LANES ? padded - j : LANES);
  }
  return scale + sum_of(wrong);
}

INLINE void few(const int tokens, const uint8_t *x, int64_t padded, const int32_t *begins, const int8_t *w,
                const float *scales, const float *bias, float *y, int64_t rows, int64_t row) {
  const float *scale = (const float *)(begins + WIDTH);
  ivec sum[TOKENS][VECS];
  for (int t = 0; t < tokens; t++)
    for (int v = 0; v < VECS; v++) sum[t][v] = *(const ivec *)(begins + v * LANES);
  for (int64_t k = 0; k < padded; k += 4, w += 4 * WIDTH) {
    int32_t four[TOKENS];
    for (int t = 0; t < tokens; t++) memcpy(four + t, x + t * padded + k, 4);
    for (int v = 0; v < VECS; v++) {
      ivec part = *(const ivec *)(w + 4 * v * LANES);
      __builtin_prefetch(w + AHEAD + 4 * v * LANES);
      for (int t = 0; t < tokens; t++) sum[t][v] = add_four(sum[t][v], four[t], part);
    }
  }
  for (int t = 0; t < tokens; t++)
    for (int v = 0; v < VECS && row + v * LANES < rows; v++) {
      int64_t at = row + v * LANES, n = rows - at;
      vec whole = __builtin_convertvector(sum[t][v], vec) * (load(scale + v * LANES) * scales[t]);
      if (bias) whole += load_some(bias, at, 1, n);
      store_some(y + t * rows, at, 1, n, whole);
    }
}

/* Returns 0, or 1 where there is no memory. */
int64_t linear_coarse(const float *x, int64_t tokens, int64_t stride, int64_t columns, const char *w, const float *bias,
                      float *y, int64_t rows, int threads) {
  int64_t panels = (rows + WIDTH - 1) / WIDTH, padded = (columns + 3) / 4 * 4, size = WIDTH * (8 + padded);
  float *scales = __builtin_malloc(tokens * (sizeof *scales + padded) + 1);
  if (!scales) return 1;
  uint8_t *bytes = (uint8_t *)(scales + tokens);
  if (tokens * columns * rows < 1 << 18) threads = 1; /* waking a thread takes longer */
  for (int64_t t = 0; t < tokens; t++) scales[t] = round_token(x + t * stride, columns, padded, bytes + t * padded);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t p = 0; p < panels; p++) {
    const int32_t *begins = (const int32_t *)(w + p * size);
    const int8_t *panel = (const int8_t *)(begins + 2 * WIDTH);
    for (int64_t t = 0, n; t < tokens; t += n) {
      n = tokens - t < TOKENS ? tokens - t : TOKENS;
#define FEW(count) few(count, bytes + t * padded, padded, begins, panel, scales + t, bias, y + t * rows, rows, p * WIDTH)
      if (n == 1) FEW(1);
      else if (n == 2) FEW(2);
      else if (n == 3) FEW(3);
      else if (n == 4) FEW(4);
      else if (n == 5) FEW(5);
      else FEW(6);
#undef FEW
    }
  }
  __builtin_free(scales);
  return 0;
}
#else
void coarse_width(int64_t *width) { *width = 0; }
int64_t linear_coarse(const float *x, int64_t tokens, int64_t stride, int64_t columns, const char *w, const float *bias,
                      float *y, int64_t rows, int threads) {
  return 1;
}
#endif
