/* What a recurrent layer does: the recurrence, and the gated norm. All float32, but for slots and starts of
   rows. Slot 0 reads as zeros, and what is written to it is dropped. Every row by itself and every number
   in one order, so that its bits depend on its own row alone. */
#include "carry.h"

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exp_of(-x)); }

/* The state after token i of row r to slot write[r, i]. Returns what `misplaced` does, and has done nothing then. */
int64_t update(float *states, int64_t slot_stride, int64_t slots, const float *x, int64_t x_stride, const float *dt, int64_t dt_stride,
            const float *A, const float *B, int64_t B_stride, const float *C, int64_t C_stride, const float *D,
            const float *dt_bias, const int32_t *starts, const int64_t *read, const int64_t *write,
            int64_t write_stride, float *y, int64_t tokens, int64_t rows, int64_t heads, int64_t groups,
            int64_t channels, int64_t size, float least, float most, int threads) {
  int64_t page = channels * size, wrong = misplaced(starts, read, write, write_stride, rows, tokens, slots);
  if (wrong) return wrong;
  if (rows * heads * page < 1 << 15) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t item = 0; item < rows * heads; item++) {
    int64_t r = item / heads, h = item % heads;
    int64_t first = starts[r], n = starts[r + 1] - first, g = h / (heads / groups);
    float none[read[r] ? 1 : page];
    const float *from = read[r] ? states + read[r] * slot_stride + h * page : memset(none, 0, sizeof none);
    token each[MOST_TOKENS];
    for (int64_t i = 0, t = first; i < n; i++, t++) {
      int64_t slot = write[r * write_stride + i];
      float step = step_of(dt[t * dt_stride + h] + dt_bias[h], least, most);
      each[i] = (token){x + t * x_stride + h * channels, B + t * B_stride + g * size, C + t * C_stride + g * size,
                        y + (t * heads + h) * channels, slot ? states + slot * slot_stride + h * page : NULL, step,
                        expf(step * A[h])};
    }
    if (n) carry(each, 0, n, from, NULL, D[h], channels, size);
  }
  memset(y + starts[rows] * heads * channels, 0, (tokens - starts[rows]) * heads * channels * 4);
  return 0;
}

/* The same over prompts: tokens of chunk k end at bounds[k + 1], the state behind them goes to slot write[k]; row r has
   chunks ends[r] to ends[r + 1]. */
void scan(float *states, int64_t slot_stride, const float *x, int64_t x_stride, const float *dt, int64_t dt_stride,
          const float *A, const float *B, int64_t B_stride, const float *C, int64_t C_stride, const float *D,
          const float *dt_bias, const int32_t *bounds, const int32_t *ends, const int64_t *read, const int64_t *write,
          float *y, int64_t tokens, int64_t rows, int64_t heads, int64_t groups, int64_t channels, int64_t size,
          float least, float most, int threads) {
  int64_t page = channels * size, last = bounds[ends[rows]];
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
  for (int64_t item = 0; item < rows * heads; item++) {
    int64_t r = item / heads, h = item % heads, g = h / (heads / groups);
    float room[page + LANES], *state = (float *)(((uintptr_t)room + 63) & ~63ull); /* at the begin of a cache line */
    if (read[r]) memcpy(state, states + read[r] * slot_stride + h * page, page * 4);
    else memset(state, 0, page * 4);
    for (int64_t k = ends[r]; k < ends[r + 1]; k++) {
      for (int64_t t = bounds[k], n; t < bounds[k + 1]; t += n) {
        token each[MOST_TOKENS];
        n = bounds[k + 1] - t < MOST_TOKENS ? bounds[k + 1] - t : MOST_TOKENS;
        for (int64_t i = 0; i < n; i++) {
          float step = step_of(dt[(t + i) * dt_stride + h] + dt_bias[h], least, most);
          each[i] = (token){x + (t + i) * x_stride + h * channels, B + (t + i) * B_stride + g * size,
                            C + (t + i) * C_stride + g * size, y + ((t + i) * heads + h) * channels, NULL, step,
                            expf(step * A[h])};
        }
        carry(each, 0, n, state, state, D[h], channels, size);
      }
      if (write[k]) memcpy(states + write[k] * slot_stride + h * page, state, page * 4);
    }
  }
  memset(y + last * heads * channels, 0, (tokens - last) * heads * channels * 4);
}

/* Of `size` numbers, from x[at], z[from] and weight[w] on, to y from `to` on: normed x * act(z), or norm(x) * act(z). */
INLINE void norm(const void *x, int64_t at, const void *z, int64_t from, const void *weight, int64_t w, void *y, int64_t to,
                 int64_t size, float eps, int norm_first, int is_silu, const int wide) {
  float kept[size + LANES]; /* what is normed */
  vec total = {};
  for (int64_t j = 0; j < size; j += LANES) {
    vec a = load_some(x, at + j, wide, size - j);
    if (!norm_first) {
      vec gate = load_some(z, from + j, wide, size - j);
      a *= is_silu ? silu(gate) : sigmoid(gate);
    }
    total += a * a;
    store(kept + j, a);
  }
  float scale = 1.0f / sqrtf(sum_of(total) / size + eps);
  for (int64_t j = 0; j < size; j += LANES) {
    vec a = load(kept + j) * scale, own = load_some(weight, w + j, wide, size - j);
    a = norm_first ? a * own : rounded(a, wide) * own;
    if (norm_first) {
      vec gate = load_some(z, from + j, wide, size - j);
      a *= is_silu ? silu(gate) : sigmoid(gate);
    }
    store_some(y, to + j, wide, size - j, a);
  }
}

/* The norm of each of `groups` parts of x * act(z), or norm(x) * act(z); `weights` of them, for every part or all. All
   float32, or all bfloat16, of which a norm behind its gate is rounded before it is weighted. */
void gated_norm(const void *x, int64_t x_stride, const void *z, int64_t z_stride, const void *weight, void *y,
                int64_t tokens, int64_t groups, int64_t size, int64_t weights, float eps, int norm_first,
                int is_silu, int wide, int threads) {
  if (tokens * groups * size < 1 << 14) threads = 1; /* waking a thread takes longer */
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t item = 0; item < tokens * groups; item++) {
    int64_t t = item / groups, part = item % groups * size, at = t * x_stride + part, from = t * z_stride + part;
    int64_t w = weights == size ? 0 : part;
    if (wide) norm(x, at, z, from, weight, w, y, item * size, size, eps, norm_first, is_silu, 1);
    else norm(x, at, z, from, weight, w, y, item * size, size, eps, norm_first, is_silu, 0);
  }
}
