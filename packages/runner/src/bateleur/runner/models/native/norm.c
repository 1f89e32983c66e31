/* Norms over rows of a residual stream h (tokens, size), after adding up to two terms to it:
   y = x / sqrt(mean(x^2) + eps) * weight, rounded once, with x = h in the dtype of y. Each sum is rounded to the dtype
   of h. Arrays are float if `wide`, else bfloat16; rows of h and of terms are a stride apart. */
#include "vec.h"
#include <math.h>

typedef struct {
  char *at; /* NULL: no term */
  int64_t stride;
  int wide;
  float factor;
} term;

/* Row t of a term. */
INLINE void *row(term m, int64_t t) { return m.at + t * m.stride * (m.wide ? 4 : 2); }

/* Lanes of x from j on, with the terms added. */
INLINE vec take(void *x, int wide, const term *terms, int64_t t, int64_t j, int64_t n) {
  vec v = load_some(x, j, wide, n);
  for (int i = 0; i < 2 && terms[i].at; i++)
    v = rounded(v + terms[i].factor * load_some(row(terms[i], t), j, terms[i].wide, n), wide);
  if (terms[0].at) store_some(x, j, wide, n, v);
  return v;
}

static void norm_row(term h, const term *terms, const void *weight, int weight_wide, void *y, int y_wide, int64_t t,
                     int64_t size, float eps) {
  void *x = row(h, t);
  vec total[4] = {};
  for (int64_t j = 0, i = 0; j < size; j += LANES, i++) {
    vec v = rounded(take(x, h.wide, terms, t, j, size - j), y_wide | !h.wide);
    total[i % 4] += v * v;
  }
  float scale = 1.0f / sqrtf(sum_of((total[0] + total[1]) + (total[2] + total[3])) / size + eps);
  for (int64_t j = 0; j < size; j += LANES) {
    vec v = rounded(load_some(x, j, h.wide, size - j), y_wide | !h.wide);
    store_some(y, t * size + j, y_wide, size - j, v * scale * load_some(weight, j, weight_wide, size - j));
  }
}

void rms_norm(void *h, int64_t h_stride, int h_wide, void *first, int64_t first_stride, float factor, void *second,
              int64_t second_stride, float second_factor, int term_wide, const void *weight, int weight_wide, void *y,
              int y_wide, int64_t tokens, int64_t size, float eps, int threads) {
  term stream = {h, h_stride, h_wide};
  term terms[] = {{first, first_stride, term_wide, factor}, {second, second_stride, term_wide, second_factor}};
  if (tokens * size < 1 << 15) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t t = 0; t < tokens; t++) norm_row(stream, terms, weight, weight_wide, y, y_wide, t, size, eps);
}
