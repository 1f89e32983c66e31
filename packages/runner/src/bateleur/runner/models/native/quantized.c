/* Products of float32 tokens with a packed matrix of 8 or 4 bit codes: y = x W^T + b, with W = (code - zero) * scale.

   W lies in panels of WIDTH rows, each panel by columns; of 4 bits, a byte holds an even column in its low bits, and the
   next one. Scales and zeros are float32, WIDTH for each group of columns. A weight is rounded to float32, every sum is
   one chain from the first column to the last, as in linear.c, so that a product has the bits of that with a dequantised
   matrix. For more than TOKENS tokens a part of a panel is dequantised once, and GROUP tokens pass. */
#include "vec.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
enum { TOKENS = 4 };
#else
enum { TOKENS = 2 };
#endif
enum { VECS = 4, WIDTH = LANES * VECS, GROUP = 64, PART = 64 /* columns */, AHEAD = 1 << 10 /* bytes */ };

typedef float sums[WIDTH] __attribute__((aligned(4 * LANES)));

void quantized_width(int64_t *width) { *width = WIDTH; }

#define EACH_VEC for (int v = 0; v < VECS; v++)

/* LANES bytes as integers; gcc converts vectors of bytes one by one. */
INLINE ivec widen_bytes(const int8_t *p) {
#if defined(__AVX512F__)
  return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
  return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
  typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
  return __builtin_convertvector(*(const bytes *)p, ivec);
#endif
}

/* Codes of a column, or of two, as numbers; without zero points those of 4 bits less 8. */
INLINE void codes_i8(const int8_t *w, const int zeros, vec row[2][VECS]) {
  EACH_VEC row[0][v] = __builtin_convertvector(widen_bytes(w + v * LANES), vec);
}

INLINE void codes_i4(const int8_t *w, const int zeros, vec row[2][VECS]) {
  EACH_VEC {
    ivec pair = widen_bytes(w + v * LANES);
#ifdef __AVX512F__
    vec table = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    if (zeros) table += 8.0f;
    row[0][v] = (vec)_mm512_permutexvar_ps((__m512i)pair, (__m512)table); /* which takes the low 4 bits */
    row[1][v] = (vec)_mm512_permutexvar_ps((__m512i)(pair >> 4), (__m512)table);
#else
    row[0][v] = __builtin_convertvector((pair & 15) - (zeros ? 0 : 8), vec);
    row[1][v] = __builtin_convertvector(((pair >> 4) & 15) - (zeros ? 0 : 8), vec);
#endif
  }
}

#define KIND(name, STEP)                                                                                              \
  /* Weights of `STEP` columns. */                                                                                    \
  INLINE void weights_##name(const int8_t *w, const vec *scale, const vec *zero, vec row[2][VECS]) {                  \
    codes_##name(w, zero != 0, row);                                                                                  \
    __builtin_prefetch(w + AHEAD);                                                                                    \
    for (int c = 0; c < STEP; c++) EACH_VEC {                                                                         \
      if (zero) row[c][v] -= zero[v];                                                                                 \
      row[c][v] *= scale[v];                                                                                          \
    }                                                                                                                 \
  }                                                                                                                   \
  /* Sums of up to TOKENS tokens with one panel. */                                                                   \
  INLINE void few_##name(const int tokens, const float *x, int64_t stride, const int8_t *w, const float *scales,      \
                         const float *zeros, int64_t columns, int64_t group, sums *out) {                             \
    vec sum[TOKENS][VECS] = {};                                                                                       \
    for (int64_t k = 0; k < columns; scales += WIDTH, zeros += zeros ? WIDTH : 0) {                                   \
      int64_t end = columns - k < group ? columns : k + group;                                                        \
      vec scale[VECS], zero[VECS];                                                                                    \
      EACH_VEC scale[v] = load(scales + v * LANES);                                                                   \
      if (zeros) EACH_VEC zero[v] = load(zeros + v * LANES);                                                          \
      for (; k < end; k += STEP, w += WIDTH) {                                                                        \
        vec row[2][VECS];                                                                                             \
        weights_##name(w, scale, zeros ? zero : 0, row);                                                              \
        for (int c = 0; c < STEP; c++)                                                                                \
          for (int t = 0; t < tokens; t++) EACH_VEC sum[t][v] += x[t * stride + k + c] * row[c][v];                   \
      }                                                                                                               \
    }                                                                                                                 \
    for (int t = 0; t < tokens; t++) EACH_VEC store(out[t] + v * LANES, sum[t][v]);                                   \
  }                                                                                                                   \
  static void many_##name(const float *x, int64_t tokens, int64_t stride, const int8_t *w, const float *scales,       \
                          const float *zeros, int64_t columns, int64_t group, sums *out) {                            \
    float part[PART][WIDTH] __attribute__((aligned(4 * LANES)));                                                      \
    memset(out, 0, tokens * sizeof *out);                                                                             \
    for (int64_t k = 0, n; k < columns; k += n) {                                                                     \
      const float *own = scales + k / group * WIDTH, *zeros_own = zeros ? zeros + k / group * WIDTH : 0;              \
      int64_t left = group - k % group;                                                                               \
      n = left < PART ? left : PART;                                                                                  \
      n = columns - k < n ? columns - k : n;                                                                          \
      vec scale[VECS], zero[VECS];                                                                                    \
      EACH_VEC scale[v] = load(own + v * LANES);                                                                      \
      if (zeros) EACH_VEC zero[v] = load(zeros_own + v * LANES);                                                      \
      for (int64_t j = 0; j < n; j += STEP, w += WIDTH) {                                                             \
        vec row[2][VECS];                                                                                             \
        weights_##name(w, scale, zeros ? zero : 0, row);                                                              \
        for (int c = 0; c < STEP; c++) EACH_VEC store(part[j + c] + v * LANES, row[c][v]);                            \
      }                                                                                                               \
      for (int64_t t = 0; t < tokens; t += TOKENS) pass(x + t * stride + k, tokens - t, stride, n, part, out + t);    \
    }                                                                                                                 \
  }                                                                                                                   \
  int64_t quantized_##name(const float *x, int64_t tokens, int64_t stride, int64_t columns, const int8_t *w,          \
                           const float *scales, const float *zeros, int64_t group, const float *bias, float *y,       \
                           int64_t rows, int threads) {                                                               \
    int64_t panels = (rows + WIDTH - 1) / WIDTH, groups = (columns + group - 1) / group;                              \
    if (tokens * columns * rows < 1 << 16) threads = 1; /* waking a thread takes longer */                            \
    _Pragma("omp parallel for num_threads(threads) schedule(static) if (threads > 1)")                                \
    for (int64_t p = 0; p < panels; p++)                                                                              \
      for (int64_t t = 0, m; t < tokens; t += m) {                                                                    \
        sums out[GROUP];                                                                                              \
        const int8_t *own = w + p * WIDTH * (columns / STEP);                                                         \
        const float *s = scales + p * groups * WIDTH, *z = zeros ? zeros + p * groups * WIDTH : 0, *xt = x + t * stride;\
        m = tokens - t < GROUP ? tokens - t : GROUP;                                                                  \
        switch (zeros ? -m : m) {                                                                                     \
          case 1: few_##name(1, xt, stride, own, s, 0, columns, group, out); break;                                   \
          case 2: few_##name(2, xt, stride, own, s, 0, columns, group, out); break;                                   \
          case -1: few_##name(1, xt, stride, own, s, z, columns, group, out); break;                                  \
          case -2: few_##name(2, xt, stride, own, s, z, columns, group, out); break;                                  \
          default: many_##name(xt, m, stride, own, s, z, columns, group, out);                                        \
        }                                                                                                             \
        int64_t width = rows - p * WIDTH < WIDTH ? rows - p * WIDTH : WIDTH;                                          \
        for (int64_t i = 0; i < m; i++)                                                                               \
          for (int64_t j = 0; j < width; j++)                                                                         \
            y[(t + i) * rows + p * WIDTH + j] = bias ? out[i][j] + bias[p * WIDTH + j] : out[i][j];                   \
      }                                                                                                               \
    return 0;                                                                                                         \
  }

/* Add to the sums of `tokens` tokens the products with n columns. */
INLINE void pass_of(const int tokens, const float *x, int64_t stride, int64_t n, const float (*part)[WIDTH], sums *out) {
  vec sum[TOKENS][VECS];
  for (int t = 0; t < tokens; t++) EACH_VEC sum[t][v] = load(out[t] + v * LANES);
  for (int64_t k = 0; k < n; k++)
    for (int t = 0; t < tokens; t++) EACH_VEC sum[t][v] += x[t * stride + k] * load(part[k] + v * LANES);
  for (int t = 0; t < tokens; t++) EACH_VEC store(out[t] + v * LANES, sum[t][v]);
}

static void pass(const float *x, int64_t tokens, int64_t stride, int64_t n, const float (*part)[WIDTH], sums *out) {
  switch (tokens < TOKENS ? tokens : TOKENS) {
    case 1: pass_of(1, x, stride, n, part, out); break;
    case 2: pass_of(2, x, stride, n, part, out); break;
    case 3: pass_of(TOKENS < 3 ? TOKENS : 3, x, stride, n, part, out); break;
    default: pass_of(TOKENS, x, stride, n, part, out);
  }
}

KIND(i8, 1)
KIND(i4, 2)
