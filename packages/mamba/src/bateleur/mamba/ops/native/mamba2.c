/* The Mamba-2 recurrence of decodes and prefills, and the gated norm. Inputs are all float32 or all bfloat16; states and
   sums are float32. Slot 0 reads as zeros, and writes to it are dropped. Rows are independent and sums have a fixed order,
   so the bits of a row depend only on its own inputs. */
#include "recurrence.h"

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exp_of(-x)); }

/* Head h of one row: n tokens from t on; the state after token i is written to slot write[i]. */
INLINE void update_head(const inputs *in, int64_t t, int64_t n, int64_t h, float *states, int64_t slot_stride, int64_t read,
                        const int64_t *write, const int wide) {
  int64_t page = in->channels * in->size;
  float none[read ? 1 : page], widened[ROOM(n + 1, in->channels, in->size, wide)], *room = widened;
  const float *from = read ? states + read * slot_stride + h * page : memset(none, 0, sizeof none);
  token each[MOST_TOKENS];
  for (int64_t i = 0; i < n; i++)
    each[i] = token_of(in, t + i, h, write[i] ? states + write[i] * slot_stride + h * page : NULL, &room, wide);
  if (n) run_tokens(each, 0, n, from, NULL, in->D[h], in->channels, in->size, wide);
}

/* Decode rows; the state after token i of row r is written to slot write[r, i]. Returns the result of `invalid_row`, and
   does nothing if that is not 0. */
int64_t update(float *states, int64_t slot_stride, int64_t slots, const void *x, int64_t x_stride, const void *dt,
               int64_t dt_stride, const float *A, const void *B, int64_t B_stride, const void *C, int64_t C_stride,
               const float *D, const float *dt_bias, const int32_t *starts, const int64_t *read, const int64_t *write,
               int64_t write_stride, void *y, int64_t tokens, int64_t rows, int64_t heads, int64_t groups,
               int64_t channels, int64_t size, float least, float most, int wide, int threads) {
  inputs in = {x, dt, B, C, y, A, D, dt_bias, x_stride, dt_stride, B_stride, C_stride, heads, groups, channels, size, least, most};
  int64_t wrong = invalid_row(starts, read, write, write_stride, rows, tokens, slots);
  if (wrong) return wrong;
  if (rows * heads * channels * size < 1 << 15) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t item = 0; item < rows * heads; item++) {
    int64_t r = item / heads, h = item % heads, n = starts[r + 1] - starts[r];
    const int64_t *to = write + r * write_stride;
    BY_WIDTH(wide, update_head, &in, starts[r], n, h, states, slot_stride, read[r], to);
  }
  no_outputs(&in, starts[rows], tokens, wide);
  return 0;
}

/* Head h of one chunk: the tokens from `first` to `end`; `state` (channels, size) is updated. */
INLINE void scan_chunk(const inputs *in, int64_t first, int64_t end, int64_t h, float *state, const int wide) {
  float widened[ROOM(MOST_TOKENS, in->channels, in->size, wide)];
  for (int64_t t = first, n; t < end; t += n) {
    float *room = widened;
    token each[MOST_TOKENS];
    n = end - t < MOST_TOKENS ? end - t : MOST_TOKENS;
    for (int64_t i = 0; i < n; i++) each[i] = token_of(in, t + i, h, NULL, &room, wide);
    run_tokens(each, 0, n, state, state, in->D[h], in->channels, in->size, wide);
  }
}

/* Prefill rows. Row r has the chunks ends[r] to ends[r + 1], chunk k the tokens bounds[k] to bounds[k + 1]. The state after
   chunk k is written to slot write[k]. */
void scan(float *states, int64_t slot_stride, const void *x, int64_t x_stride, const void *dt, int64_t dt_stride,
          const float *A, const void *B, int64_t B_stride, const void *C, int64_t C_stride, const float *D,
          const float *dt_bias, const int32_t *bounds, const int32_t *ends, const int64_t *read, const int64_t *write,
          void *y, int64_t tokens, int64_t rows, int64_t heads, int64_t groups, int64_t channels, int64_t size,
          float least, float most, int wide, int threads) {
  inputs in = {x, dt, B, C, y, A, D, dt_bias, x_stride, dt_stride, B_stride, C_stride, heads, groups, channels, size, least, most};
  int64_t page = channels * size;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
  for (int64_t item = 0; item < rows * heads; item++) {
    int64_t r = item / heads, h = item % heads;
    float room[page + LANES], *state = (float *)(((uintptr_t)room + 63) & ~63ull); /* aligned to a cache line */
    if (read[r]) memcpy(state, states + read[r] * slot_stride + h * page, page * 4);
    else memset(state, 0, page * 4);
    for (int64_t k = ends[r]; k < ends[r + 1]; k++) {
      BY_WIDTH(wide, scan_chunk, &in, bounds[k], bounds[k + 1], h, state);
      if (write[k]) memcpy(states + write[k] * slot_stride + h * page, state, page * 4);
    }
  }
  no_outputs(&in, bounds[ends[rows]], tokens, wide);
}

/* One group of `size` channels at x[at], z[from], weight[w] and y[to]: norm(x * act(z)), or norm(x) * act(z). */
INLINE void norm(const void *x, int64_t at, const void *z, int64_t from, const void *weight, int64_t w, void *y, int64_t to,
                 int64_t size, float eps, int norm_first, int is_silu, const int wide) {
  float kept[size + LANES]; /* the values to normalize */
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

/* The gated norm over `groups` groups of channels. `weights` is `size` if all groups share the weight. All tensors are
   float32 or all bfloat16. Without norm_first, the normalized value is rounded before it is multiplied with the weight. */
void gated_norm(const void *x, int64_t x_stride, const void *z, int64_t z_stride, const void *weight, void *y,
                int64_t tokens, int64_t groups, int64_t size, int64_t weights, float eps, int norm_first,
                int is_silu, int wide, int threads) {
  if (tokens * groups * size < 1 << 14) threads = 1; /* starting a thread takes longer */
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t item = 0; item < tokens * groups; item++) {
    int64_t t = item / groups, part = item % groups * size, at = t * x_stride + part, from = t * z_stride + part;
    int64_t w = weights == size ? 0 : part;
    BY_WIDTH(wide, norm, x, at, z, from, weight, w, y, item * size, size, eps, norm_first, is_silu);
  }
}
