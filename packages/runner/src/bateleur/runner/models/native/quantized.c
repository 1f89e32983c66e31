/* Products of float32 tokens with a packed matrix of 8 or 4 bit codes: y = x W^T + b.

   W = (code - zero) * scale lies in panels of WIDTH rows. A word of a row has the signed codes of the next 4 or 8
   columns, the first one in its low bits. Scales and zeros are float32, WIDTH for each group of columns. A weight is
   rounded to float32, every sum is one chain from the first column to the last, as in linear.c, so that a product has
   the bits of that with a dequantised matrix. For more than 4 tokens, a part of a panel is dequantised once. */
#include "panels.h"

enum { COLUMNS = 64 /* of a part */, ZEROS = GROUP + 1 };

typedef struct {
  const int32_t *codes;
  const float *scales, *zeros; /* zeros may be 0 */
} panel;

INLINE vec weight(const int bits, ivec word, int column, vec scale, const float *zeros) {
  vec x = __builtin_convertvector(word << (32 - bits - bits * column) >> (32 - bits), vec);
#ifdef __AVX512F__
  if (bits == 4) /* faster: a shuffle takes the low 4 bits of its index */
    x = __builtin_shuffle((vec){0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1}, word >> 4 * column);
#endif
  if (zeros) x -= load(zeros);
  return x * scale;
}

INLINE void next_group(panel *own) {
  own->scales += WIDTH;
  if (own->zeros) own->zeros += WIDTH;
}

/* Sums of a few tokens with one panel, or with two whose codes are `apart` words apart and scales `groups_apart`.
   zeros: whether there are any. */
INLINE void few(const int tokens, const int panels, const int bits, const int zeros, const float *x, int64_t stride,
                panel own, int64_t columns, int64_t group, int64_t apart, int64_t groups_apart, sums *out) {
  vec sum[TOKENS][2][VECS] = {};
  const int step = 32 / bits;
  for (int64_t k = 0, end; k < columns; next_group(&own)) {
    vec scale[2][VECS];
    EACH_VEC scale[p][v] = load(own.scales + p * groups_apart + v * LANES);
    for (end = columns - k < group ? columns : k + group; k < end; k += step, own.codes += WIDTH) {
      ivec word[2][VECS];
      EACH_VEC {
        const int32_t *at = own.codes + p * apart + v * LANES;
        word[p][v] = *(const ivec *)at;
        __builtin_prefetch((const char *)at + AHEAD);
      }
#define ADD_COLUMN(c)                                                                                      \
  EACH_VEC {                                                                                               \
    const float *zero = zeros ? own.zeros + p * groups_apart + v * LANES : 0;                              \
    vec w = weight(bits, word[p][v], c, scale[p][v], zero);                                                \
    for (int t = 0; t < tokens; t++) sum[t][p][v] += x[t * stride + k + c] * w;                            \
  }
      if (end - k >= step) {
        _Pragma("GCC unroll 8") for (int c = 0; c < step; c++) ADD_COLUMN(c)
      } else
        for (int c = 0; c < end - k; c++) ADD_COLUMN(c)
    }
  }
  EACH_SUM store(out[p * tokens + t] + v * LANES, sum[t][p][v]);
}

/* Sums of up to GROUP tokens with one panel. */
INLINE void many(const int bits, const float *x, int64_t tokens, int64_t stride, panel own, int64_t columns,
                 int64_t group, sums *out) {
  float part[COLUMNS * WIDTH] __attribute__((aligned(4 * LANES)));
  const int step = 32 / bits;
  int64_t passes = (tokens + TOKENS - 1) / TOKENS, ahead = 64 / step / passes;
  for (int64_t k = 0, n; k < columns; k += n) {
    int64_t left = group - k % group;
    n = left < COLUMNS ? left : COLUMNS;
    n = columns - k < n ? columns - k : n;
    for (int64_t j = 0; j < n; j += step, own.codes += WIDTH)
      for (int v = 0; v < VECS; v++) {
        ivec word = *(const ivec *)(own.codes + v * LANES);
        vec scale = load(own.scales + v * LANES);
        const float *zero = own.zeros ? own.zeros + v * LANES : 0;
        _Pragma("GCC unroll 8") for (int c = 0; c < step; c++)
          store(part + ((j + c) * VECS + v) * LANES, weight(bits, word, c, scale, zero));
      }
    if (n == left) next_group(&own);
    const char *later = (const char *)own.codes;
    for (int64_t t = 0, m; t < tokens; t += m, later += n * VECS * ahead) {
      m = at_once(tokens - t);
      BY_TOKENS(few_f32, m, 1, x + t * stride + k, stride, part, 0, n, !k, later, ahead, out + t)
    }
  }
}

/* y (tokens, rows) = x W^T + bias, for x (tokens, columns) with `stride` numbers from a token to the next. */
#define KIND(name, bits)                                                                                             \
  int64_t name(const float *x, int64_t tokens, int64_t stride, int64_t columns, const int32_t *w,                    \
               const float *scales, const float *zeros, int64_t group, const float *bias, float *y, int64_t rows,    \
               int threads) {                                                                                        \
    int64_t panels = (rows + WIDTH - 1) / WIDTH, together = tokens == 1 ? 2 : 1;                                     \
    int64_t apart = (columns + 32 / bits - 1) / (32 / bits) * WIDTH, groups = (columns + group - 1) / group * WIDTH; \
    if (tokens * columns * rows < 1 << 16) threads = 1; /* waking a thread takes longer */                           \
    _Pragma("omp parallel for num_threads(threads) schedule(static) if (threads > 1)")                               \
    for (int64_t p = 0; p < panels; p += together)                                                                   \
      for (int64_t t = 0, m; t < tokens; t += m) {                                                                   \
        sums out[GROUP];                                                                                             \
        const float *xt = x + t * stride;                                                                            \
        panel own = {w + p * apart, scales + p * groups, zeros ? zeros + p * groups : 0};                            \
        int64_t count = p + together <= panels ? together : 1;                                                       \
        m = tokens - t < GROUP ? tokens - t : GROUP;                                                                 \
        switch ((count == 2 ? 0 : m) + (zeros ? ZEROS : 0)) {                                                        \
          case 0: few(1, 2, bits, 0, xt, stride, own, columns, group, apart, groups, out); break;                    \
          case 1: few(1, 1, bits, 0, xt, stride, own, columns, group, 0, 0, out); break;                             \
          case 2: few(2, 1, bits, 0, xt, stride, own, columns, group, 0, 0, out); break;                             \
          case 3: few(3, 1, bits, 0, xt, stride, own, columns, group, 0, 0, out); break;                             \
          case 4: few(4, 1, bits, 0, xt, stride, own, columns, group, 0, 0, out); break;                             \
          case ZEROS: few(1, 2, bits, 1, xt, stride, own, columns, group, apart, groups, out); break;                \
          case ZEROS + 1: few(1, 1, bits, 1, xt, stride, own, columns, group, 0, 0, out); break;                     \
          case ZEROS + 2: few(2, 1, bits, 1, xt, stride, own, columns, group, 0, 0, out); break;                     \
          default: many(bits, xt, m, stride, own, columns, group, out);                                              \
        }                                                                                                            \
        for (int64_t i = 0; i < count * m; i++)                                                                      \
          put_float(out[i], bias, y, t + i % m, rows, (p + i / m) * WIDTH);                                          \
      }                                                                                                              \
    return 0;                                                                                                        \
  }

KIND(quantized_i8, 8)
KIND(quantized_i4, 4)
