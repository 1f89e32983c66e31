/* The causal convolution of decodes and prefills, in float32, or in bfloat16 with float32 sums that are rounded once.
   Slot 0 reads as zeros, and writes to it are dropped. The inputs of a token are summed in a fixed order, so its bits
   depend only on its own inputs. */
#include "rows.h"

enum { SOME = 4 * LANES, BLOCK = 32 * LANES, APART = BLOCK + LANES /* not a power of two, which would cause cache conflicts */ };
enum { MOST_TAPS = 8, USUAL_TAPS = 4 /* loops over them are unrolled */ };

/* x and y (tokens, channels), where `stride` is the distance of tokens of x; weight (channels, taps); bias (channels,)
   or NULL. */
typedef struct {
  const void *x, *weight, *bias;
  void *y;
  int64_t stride, channels, taps;
  int is_silu;
} layer;

/* `width` channels from c on: their weights by tap, and their inputs in order, starting with the window. For prefills a
   block is so small that it stays in the L1 cache. For decodes it is as large as possible, because the windows of many
   rows are read from memory, and long reads are faster. */
typedef struct {
  int64_t c, width;
  float by_tap[MOST_TAPS][APART], bias[APART], line[MOST_TAPS + MOST_TOKENS][APART];
} block;

INLINE void widened(float *to, const void *p, int64_t i, int64_t n, const int wide) {
  for (int64_t j = 0; j < n; j += LANES) store(to + j, load_some(p, i + j, wide, n - j));
}
INLINE void narrowed(void *p, int64_t i, const float *from, int64_t n, const int wide) {
  for (int64_t j = 0; j < n; j += LANES) store_some(p, i + j, wide, n - j, load(from + j));
}

INLINE void by_tap(block *b, const layer *l, const int64_t taps, const int wide) {
  for (int64_t j = 0, i = b->c * taps; j < b->width; j++, i += taps)
    for (int64_t w = 0; w < taps; w++)
      b->by_tap[w][j] = wide ? ((const float *)l->weight)[i + w] : widen(((const bf16 *)l->weight)[i + w]);
}

INLINE void begin(block *b, const layer *l, int64_t c, int64_t most, const int wide) {
  b->c = c, b->width = l->channels - c < most ? l->channels - c : most;
  if (l->taps == USUAL_TAPS) by_tap(b, l, USUAL_TAPS, wide);
  else by_tap(b, l, l->taps, wide);
  if (l->bias) widened(b->bias, l->bias, c, b->width, wide);
}

/* Load the window of the slot at states[from]; zeros if `there` is 0. */
INLINE void load_window(block *b, const layer *l, const void *states, int64_t from, int there, const int wide) {
  for (int64_t i = 0; i < l->taps - 1; i++)
    if (there) widened(b->line[i], states, from + i * l->channels + b->c, b->width, wide);
    else memset(b->line[i], 0, b->width * sizeof(float));
}

/* Store `count` inputs, from `first` on, to the slot at states[to]. */
INLINE void store_window(const block *b, const layer *l, int64_t first, int64_t count, void *states, int64_t to, const int wide) {
  for (int64_t i = 0; i < count; i++)
    narrowed(states, to + i * l->channels + b->c, b->line[first + i], b->width, wide);
}

/* Compute the outputs of n tokens from t on, whose inputs are appended to the window. */
INLINE void convolve_of(block *b, const layer *l, int64_t t, int64_t n, const int64_t taps, const int wide) {
  float (*tokens)[APART] = b->line + taps - 1;
  for (int64_t i = 0; i < n; i++) widened(tokens[i], l->x, (t + i) * l->stride + b->c, b->width, wide);
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < b->width; j += LANES) {
      vec sum = {};
      for (int64_t w = 0; w < taps; w++) sum += load(b->line[i + w] + j) * load(b->by_tap[w] + j);
      if (l->bias) sum += load(b->bias + j);
      if (l->is_silu) sum = silu(sum);
      store_some(l->y, (t + i) * l->channels + b->c + j, wide, b->width - j, sum);
    }
}

INLINE void convolve(block *b, const layer *l, int64_t t, int64_t n, const int wide) {
  if (l->taps == USUAL_TAPS) convolve_of(b, l, t, n, USUAL_TAPS, wide);
  else convolve_of(b, l, t, n, l->taps, wide);
}

/* Decode rows, for the channels from c on. All inputs but the oldest are stored in the slot. */
INLINE void decode_block(const layer *l, int64_t c, int64_t most, void *states, int64_t slot_stride, const int32_t *starts, const int64_t *read,
                const int64_t *offset, const int64_t *write, int64_t rows, const int wide) {
  block b[1];
  begin(b, l, c, most, wide);
  for (int64_t r = 0; r < rows; r++) {
    int64_t n = starts[r + 1] - starts[r], entry = offset ? offset[r] : 0;
    if (!n) continue;
    load_window(b, l, states, read[r] * slot_stride + entry * l->channels, read[r] != 0, wide);
    convolve(b, l, starts[r], n, wide);
    if (write[r]) store_window(b, l, 1, l->taps - 2 + n, states, write[r] * slot_stride, wide);
  }
}

/* Prefill rows, for the channels from c on, chunk by chunk. */
INLINE void prefill_block(const layer *l, int64_t c, void *states, int64_t slot_stride, void *request_conv, int64_t window_stride,
                    const int64_t *read, const int32_t *bounds, const int32_t *row, const int64_t *write,
                    const int64_t *request_conv_write, int64_t chunks, const int wide) {
  int64_t before = l->taps - 1;
  block b[1];
  begin(b, l, c, SOME, wide);
  for (int64_t k = 0; k < chunks; k++) {
    int64_t r = row[k];
    if (!k || row[k - 1] != r) load_window(b, l, states, read[r] * slot_stride, read[r] != 0, wide);
    for (int64_t t = bounds[k], n; t < bounds[k + 1]; t += n) {
      n = bounds[k + 1] - t < MOST_TOKENS ? bounds[k + 1] - t : MOST_TOKENS;
      convolve(b, l, t, n, wide);
      for (int64_t i = 0; i < before; i++) memcpy(b->line[i], b->line[n + i], b->width * sizeof(float));
    }
    if (write[k]) store_window(b, l, 0, before, states, write[k] * slot_stride, wide);
    int last = k + 1 == chunks || row[k + 1] != r;
    if (last && request_conv && request_conv_write[r]) store_window(b, l, 0, before, request_conv, request_conv_write[r] * window_stride, wide);
  }
}

static void clear(const layer *l, int64_t first, int64_t tokens, int wide) {
  int64_t bytes = l->channels * (wide ? 4 : 2);
  memset((char *)l->y + first * bytes, 0, (tokens - first) * bytes);
}

/* Decode rows. Returns the result of `invalid_row`, and does nothing if that is not 0. A slot of states is (entries,
   channels). */
int64_t conv(const void *x, int64_t stride, const void *weight, const void *bias, void *states, int64_t slot_stride,
             int64_t slots, const int32_t *starts, const int64_t *read, const int64_t *offset, const int64_t *write, void *y,
             int64_t tokens, int64_t rows, int64_t channels, int64_t taps, int is_silu, int wide, int threads) {
  layer l = {x, weight, bias, y, stride, channels, taps, is_silu};
  int64_t wrong = invalid_row(starts, read, write, 0, rows, tokens, slots);
  if (wrong) return wrong;
  if (tokens * channels < 1 << 15) threads = 1; /* starting a thread takes longer */
  int64_t share = (channels / threads + SOME - 1) / SOME * SOME, most = share < SOME ? SOME : share < BLOCK ? share : BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t c = 0; c < channels; c += most)
    BY_WIDTH(wide, decode_block, &l, c, most, states, slot_stride, starts, read, offset, write, rows);
  clear(&l, starts[rows], tokens, wide);
  return 0;
}

/* Prefill rows. Chunk k has the tokens bounds[k] to bounds[k + 1], and the window after it is stored in slot write[k].
   The window after row r is stored in row request_conv_write[r] of `request_conv`, which has the layout of states, or is
   NULL. Returns 0, or 1 + the first chunk with invalid tokens, and does nothing then. */
int64_t conv_prompts(const void *x, int64_t stride, const void *weight, const void *bias, void *states, int64_t slot_stride,
                     void *request_conv, int64_t window_stride, const int64_t *read, const int32_t *bounds, const int32_t *row,
                     const int64_t *write, const int64_t *request_conv_write, void *y, int64_t tokens, int64_t chunks,
                     int64_t channels, int64_t taps, int is_silu, int wide, int threads) {
  layer l = {x, weight, bias, y, stride, channels, taps, is_silu};
  for (int64_t k = 0; k < chunks; k++)
    if (bounds[k] < 0 || bounds[k + 1] < bounds[k] || bounds[k + 1] > tokens) return k + 1;
  if (tokens * channels < 1 << 15) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t c = 0; c < channels; c += SOME)
    BY_WIDTH(wide, prefill_block, &l, c, states, slot_stride, request_conv, window_stride, read, bounds, row, write, request_conv_write, chunks);
  clear(&l, bounds[chunks], tokens, wide);
  return 0;
}
