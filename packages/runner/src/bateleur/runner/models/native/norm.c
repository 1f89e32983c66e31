/* y = x / sqrt(mean(x^2) + eps) * weight, row by row of x (tokens, size), whose rows lie `stride` apart. */
#include "vec.h"
#include <math.h>

void rms_norm(const float *x, int64_t stride, const float *weight, float *y, int64_t tokens, int64_t size, float eps) {
  for (int64_t t = 0; t < tokens; t++, x += stride, y += size) {
    vec total[4] = {};
    float rest = 0;
    int64_t j = 0, i = 0;
    for (; j + LANES <= size; j += LANES, i++) total[i % 4] += load(x + j) * load(x + j);
    for (; j < size; j++) rest += x[j] * x[j];
    float scale = 1.0f / sqrtf((sum_of((total[0] + total[1]) + (total[2] + total[3])) + rest) / size + eps);
    for (j = 0; j < size; j++) y[j] = x[j] * scale * weight[j];
  }
}
