/* What a recurrent layer does: convolution of few tokens a row, recurrence, gated norm. All float32, but for slots
   and starts of rows. Slot 0 reads as zeros, and what is written to it is dropped. Every row by itself and every number
   in one order, so that its bits depend on its own row alone. */
#include "carry.h"

enum { BLOCK = 256, MOST_TAPS = 8 };

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exp_of(-x)); }

/* 1 + the first row that names a token or a slot that there is not; or -1 where a row writes what another one reads; or
   0. Of a row, slots write[r * stride] and what follows are written to, one for each token, or for all where stride is
   0. */
static int64_t misplaced(const int32_t *starts, const int64_t *read, const int64_t *write, int64_t stride, int64_t rows,
                         int64_t tokens, int64_t slots) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t first = starts[r], n = starts[r + 1] - first;
    int wrong = outside(first, n, tokens) || (uint64_t)read[r] >= slots;
    for (int64_t i = 0; !wrong && i < (stride ? n : 1); i++) wrong = (uint64_t)write[r * (stride ? stride : 1) + i] >= slots;
    if (wrong) return r + 1;
  }
  return apart(starts, read, write, stride, rows, slots) ? 0 : -1;
}

/* Returns what `misplaced` does, and has done nothing then. y (tokens, channels) of x, both with a stride; a slot of
   states holds `kept` windows' entries, (kept, channels). */
int64_t conv(const float *x, int64_t stride, const float *weight, const float *bias, float *states, int64_t slot_stride,
             int64_t slots, const int32_t *starts, const int64_t *read, const int64_t *offset, const int64_t *write, float *y,
             int64_t tokens, int64_t rows, int64_t channels, int64_t taps, int is_silu) {
  int64_t wrong = misplaced(starts, read, write, 0, rows, tokens, slots);
  if (wrong) return wrong;
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
  return 0;
}

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
