/* What a recurrent layer does with few tokens a row: convolution, recurrence, gated norm. All float32, but for slots
   and starts of rows. Slot 0 reads as zeros, and what is written to it is dropped. Every row by itself and every number
   in one order, so that its bits depend on its own row alone. */
#include "vec.h"
#include <math.h>

enum { BLOCK = 256, MOST_TAPS = 8, MOST_TOKENS = 16 };

INLINE vec silu(vec x) { return x / (1.0f + exp_of(-x)); }
INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exp_of(-x)); }

/* The first n numbers of a vector, zeros behind them. */
INLINE vec some(const float *p, int64_t n) {
  if (n == LANES) return load(p);
  vec v = {};
  memcpy(&v, p, n * 4);
  return v;
}

INLINE void put(float *p, vec v, int64_t n) {
  if (n == LANES) store(p, v);
  else memcpy(p, &v, n * 4);
}

/* y (tokens, channels) of x, both with a stride; a slot of states holds `kept` windows' entries, (kept, channels). */
void conv(const float *x, int64_t stride, const float *weight, const float *bias, float *states, int64_t slot_stride,
          const int32_t *starts, const int64_t *read, const int64_t *offset, const int64_t *write, float *y,
          int64_t tokens, int64_t rows, int64_t channels, int64_t taps, int is_silu) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t first = starts[r], n = starts[r + 1] - first, before = taps - 1;
    const float *old = states + read[r] * slot_stride + (offset ? offset[r] * channels : 0);
    float *new = states + write[r] * slot_stride;
    for (int64_t c = 0; n && c < channels; c += BLOCK) {
      int64_t width = channels - c < BLOCK ? channels - c : BLOCK;
      float full[MOST_TAPS + MOST_TOKENS][BLOCK] __attribute__((aligned(64))), by_tap[MOST_TAPS][BLOCK];
      for (int64_t i = 0; i < before; i++)
        if (read[r]) memcpy(full[i], old + i * channels + c, width * 4);
        else memset(full[i], 0, width * 4);
      for (int64_t i = 0; i < n; i++) memcpy(full[before + i], x + (first + i) * stride + c, width * 4);
      if (write[r])
        for (int64_t i = 1; i < before + n; i++) memcpy(new + (i - 1) * channels + c, full[i], width * 4);
      for (int64_t w = 0; w < taps; w++)
        for (int64_t j = 0; j < width; j++) by_tap[w][j] = weight[(c + j) * taps + w];
      for (int64_t i = 0; i < n; i++) {
        float sum[BLOCK] __attribute__((aligned(64))) = {};
        for (int64_t w = 0; w < taps; w++)
          for (int64_t j = 0; j < width; j++) sum[j] += full[i + w][j] * by_tap[w][j];
        for (int64_t j = 0; bias && j < width; j++) sum[j] += bias[c + j];
        for (int64_t j = 0; is_silu && j < width; j += LANES) store(sum + j, silu(load(sum + j)));
        memcpy(y + (first + i) * channels + c, sum, width * 4);
      }
    }
  }
  memset(y + starts[rows] * channels, 0, (tokens - starts[rows]) * channels * 4);
}

/* A token of one head: (channels, size) of state <- decay * state + u B^T; y = state C + D x. */
static void advance(const float *from, float *to, const float *x, const float *B, const float *C, float decay,
                    float step, float D, float *y, int64_t channels, int64_t size) {
  for (int64_t p = 0; p < channels; p++, from += size, to += size) {
    float u = x[p] * step, rest = 0;
    vec sum = {};
    int64_t n = 0;
    for (; n + LANES <= size; n += LANES) {
      vec s = load(from + n) * decay + u * load(B + n);
      store(to + n, s);
      sum += s * load(C + n);
    }
    for (; n < size; n++) {
      to[n] = from[n] * decay + u * B[n];
      rest += to[n] * C[n];
    }
    y[p] = sum_of(sum) + rest + D * x[p];
  }
}

/* x and y (tokens, heads, channels), dt (tokens, heads), B and C (tokens, groups, size), the state after token i of row
   r to slot write[r, i]. */
void update(float *states, int64_t slot_stride, const float *x, int64_t x_stride, const float *dt, int64_t dt_stride,
            const float *A, const float *B, int64_t B_stride, const float *C, int64_t C_stride, const float *D,
            const float *dt_bias, const int32_t *starts, const int64_t *read, const int64_t *write,
            int64_t write_stride, float *y, int64_t tokens, int64_t rows, int64_t heads, int64_t groups,
            int64_t channels, int64_t size, float least, float most, int threads) {
  int64_t page = channels * size;
  if (rows * heads * page < 1 << 15) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t item = 0; item < rows * heads; item++) {
    int64_t r = item / heads, h = item % heads, g = h / (heads / groups);
    float scratch[page];
    const float *from = states + read[r] * slot_stride + h * page;
    if (!read[r]) from = memset(scratch, 0, sizeof scratch);
    for (int64_t t = starts[r], i = 0; t < starts[r + 1]; t++, i++) {
      int64_t slot = write[r * write_stride + i];
      float *to = slot ? states + slot * slot_stride + h * page : scratch;
      float raw = dt[t * dt_stride + h] + dt_bias[h], step = raw > 20 ? raw : log1pf(expf(raw));
      step = step < least ? least : step > most ? most : step;
      advance(from, to, x + t * x_stride + h * channels, B + t * B_stride + g * size, C + t * C_stride + g * size,
              expf(step * A[h]), step, D[h], y + (t * heads + h) * channels, channels, size);
      from = to;
    }
  }
  memset(y + starts[rows] * heads * channels, 0, (tokens - starts[rows]) * heads * channels * 4);
}

/* The norm of each of `groups` parts of x * act(z), or norm(x) * act(z); `weights` of them, for every part or all. */
void gated_norm(const float *x, int64_t x_stride, const float *z, int64_t z_stride, const float *weight, float *y,
                int64_t tokens, int64_t groups, int64_t size, int64_t weights, float eps, int norm_first,
                int is_silu, int threads) {
  if (tokens * groups * size < 1 << 14) threads = 1; /* waking a thread takes longer */
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t item = 0; item < tokens * groups; item++) {
    int64_t t = item / groups, g = item % groups;
    const float *xs = x + t * x_stride + g * size, *zs = z + t * z_stride + g * size;
    const float *w = weight + (weights == size ? 0 : g * size);
    float *ys = y + item * size;
    vec total = {};
    for (int64_t j = 0; j < size; j += LANES) {
      int64_t n = size - j < LANES ? size - j : LANES;
      vec a = some(xs + j, n), gate = some(zs + j, n);
      gate = is_silu ? silu(gate) : sigmoid(gate);
      if (!norm_first) a *= gate;
      total += a * a;
      if (!norm_first) put(ys + j, a, n);
    }
    float scale = 1.0f / sqrtf(sum_of(total) / size + eps);
    for (int64_t j = 0; j < size; j += LANES) {
      int64_t n = size - j < LANES ? size - j : LANES;
      vec a = some((norm_first ? xs : ys) + j, n) * scale * some(w + j, n);
      if (norm_first) {
        vec gate = some(zs + j, n);
        a *= is_silu ? silu(gate) : sigmoid(gate);
      }
      put(ys + j, a, n);
    }
  }
}
