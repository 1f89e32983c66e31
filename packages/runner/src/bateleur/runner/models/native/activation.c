/* y (tokens, size) = act(x), or with the gate in the left half of x (tokens, 2 size) act(gate) * up; rounded once.
   kind of act: 0 the square of what is positive, 1 silu, 2 gelu with tanh, where (1 + tanh(z)) / 2 is the sigmoid of
   2 z, 3 gpt-oss's clamped swiglu. Arrays are float where they are `wide`, and bfloat16 else. */
#include "vec.h"

void activate(const char *x, int64_t stride, char *y, int64_t tokens, int64_t size, int gated, int kind, int wide,
              int threads) {
  int64_t bytes = wide ? 4 : 2;
  if (tokens * size < 1 << 15) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t j = 0; j < size; j += LANES) {
      const char *row = x + t * stride * bytes;
      vec v = load_some(row, j, wide, size - j);
      if (kind == 1) v = silu(v);
      else if (kind == 2) v = v / (1.0f + exp_of(-1.59576912f * (v + 0.044715f * v * v * v)));
      else if (kind == 3) v = pick(v > 7, all(7), v), v = v / (1.0f + exp_of(-1.702f * v));
      else v = pick(v < 0, all(0), v), v *= v;
      if (gated) {
        vec up = load_some(row, size + j, wide, size - j);
        if (kind == 3) up = pick(up > 7, all(7), up), up = pick(up < -7, all(-7), up) + 1;
        v *= up;
      }
      store_some(y + t * size * bytes, j, wide, size - j, v);
    }
}
