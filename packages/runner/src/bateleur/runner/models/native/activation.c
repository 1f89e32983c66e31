/* y (tokens, size) = act(x), or with the gate in the left half of x (tokens, 2 size) act(gate) * up; rounded once.
   act is silu, or the square of what is positive. Arrays are float where they are `wide`, and bfloat16 else. */
#include "vec.h"

void activate(const char *x, int64_t stride, char *y, int64_t tokens, int64_t size, int gated, int is_silu, int wide,
              int threads) {
  int64_t bytes = wide ? 4 : 2;
  if (tokens * size < 1 << 15) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t j = 0; j < size; j += LANES) {
      const char *row = x + t * stride * bytes;
      vec v = load_some(row, j, wide, size - j);
      if (is_silu) v = silu(v);
      else v = pick(v < 0, all(0), v), v *= v;
      if (gated) v *= load_some(row, size + j, wide, size - j);
      store_some(y + t * size * bytes, j, wide, size - j, v);
    }
}
