/* The Mamba-2 recurrence of one head over several tokens. A tile of the state stays in registers for all tokens. */
#pragma once
#include "rows.h"

/* A tile of ROWS channels and VECS vectors fills the registers; B and C are read once for all its channels. */
enum { VECS = 4, ROWS = LANES == 16 ? 4 : 2 };

/* Inputs and outputs: x and y (tokens, heads, channels), dt (tokens, heads), B and C (tokens, groups, size), float or
   bfloat16. Strides are distances of tokens. */
typedef struct {
  const void *x, *dt, *B, *C;
  void *y;
  const float *A, *D, *dt_bias;
  int64_t x_stride, dt_stride, B_stride, C_stride, heads, groups, channels, size;
  float least, most;
} inputs;

/* Inputs and outputs of one token and head. */
typedef struct {
  const float *x, *B, *C; /* (channels,), (size,), (size,) */
  void *y;                /* (channels,), of the inputs' dtype */
  float *to;              /* (channels, size) for the state after the token, or NULL */
  float step, decay;
} token;

/* Number of floats for the inputs of bfloat16 tokens after conversion; 1 for float32 (`wide`). */
#define ROOM(tokens, channels, size, wide) ((wide) ? 1 : (tokens) * ((channels) + 2 * (size) + 3 * LANES))

/* Return n numbers from p[i] on as floats: in place, or for bfloat16 converted to *room, which is advanced. */
INLINE const float *floats(const void *p, int64_t i, int64_t n, float **room, const int wide) {
  float *to = *room;
  if (wide) return (const float *)p + i;
  for (int64_t j = 0; j < n; j += LANES, *room += LANES) store(*room, load_some(p, i + j, wide, n - j));
  return to;
}

/* Return the inputs of token t for head h; the state after it is written to `to`. */
INLINE token token_of(const inputs *in, int64_t t, int64_t h, float *to, float **room, const int wide) {
  int64_t g = h / (in->heads / in->groups), at = (t * in->heads + h) * in->channels, raw = t * in->dt_stride + h;
  float dt = wide ? ((const float *)in->dt)[raw] : widen(((const bf16 *)in->dt)[raw]);
  float step = step_of(dt + in->dt_bias[h], in->least, in->most);
  return (token){floats(in->x, t * in->x_stride + h * in->channels, in->channels, room, wide),
                 floats(in->B, t * in->B_stride + g * in->size, in->size, room, wide),
                 floats(in->C, t * in->C_stride + g * in->size, in->size, room, wide),
                 (char *)in->y + at * (wide ? 4 : 2), to, step, expf(step * in->A[h])};
}

/* Zero the outputs of tokens from `first` on, which belong to no row. */
INLINE void no_outputs(const inputs *in, int64_t first, int64_t tokens, const int wide) {
  int64_t bytes = in->heads * in->channels * (wide ? 4 : 2);
  memset((char *)in->y + first * bytes, 0, (tokens - first) * bytes);
}

/* One tile: `rows` channels from state entry `at` on, and `vecs` vectors from column n on, of which the last has `own`
   entries. Processes `silent` tokens without outputs, then `count` tokens whose outputs are added to `sums`. u: x * step of
   LANES channels for each token. */
INLINE void run_tile(const token *tokens, int64_t silent, int64_t count, const int rows, const int vecs, const float *from,
                 float *last, int64_t at, int64_t size, int64_t n, int64_t own, const float *u, vec *sums) {
#define EACH for (int r = 0; r < rows; r++) for (int v = 0; v < vecs; v++)
  vec s[ROWS][VECS];
  EACH s[r][v] = some(from + at + r * size + n + v * LANES, own);
  for (int64_t i = 0; i < silent; i++, u += LANES) {
    for (int v = 0; v < vecs; v++) {
      vec B = some(tokens[i].B + n + v * LANES, own);
      for (int r = 0; r < rows; r++) s[r][v] = advanced(s[r][v], tokens[i].decay, u[r], B);
    }
    if (tokens[i].to) EACH put(tokens[i].to + at + r * size + n + v * LANES, s[r][v], own);
  }
  tokens += silent;
  for (int64_t i = 0; i < count; i++, u += LANES) {
    vec sum[ROWS];
    for (int r = 0; r < rows; r++) sum[r] = sums[i * LANES + r];
    for (int v = 0; v < vecs; v++) {
      vec B = some(tokens[i].B + n + v * LANES, own), C = some(tokens[i].C + n + v * LANES, own);
      for (int r = 0; r < rows; r++) {
        s[r][v] = advanced(s[r][v], tokens[i].decay, u[r], B);
        sum[r] += s[r][v] * C;
      }
    }
    for (int r = 0; r < rows; r++) sums[i * LANES + r] = sum[r];
    if (tokens[i].to) EACH put(tokens[i].to + at + r * size + n + v * LANES, s[r][v], own);
  }
  if (last) EACH put(last + at + r * size + n + v * LANES, s[r][v], own);
#undef EACH
}

/* For each token: state (channels, size) <- decay * state + step x B^T; after the first `silent` tokens also y = state C +
   D x. `from` is the initial state, and `last` gets the final one unless it is NULL. `from`, `last` and `to` of tokens may
   be the same memory. Results have the same bits as processing the tokens one by one. */
INLINE void run_tokens(const token *tokens, int64_t silent, int64_t count, const float *from, float *last, float D,
                  int64_t channels, int64_t size, const int wide) {
  float u[silent + count][LANES] __attribute__((aligned(64)));
  vec sums[MOST_TOKENS][LANES] __attribute__((aligned(64)));
  for (int64_t first = 0; first < channels; first += LANES) {
    int64_t width = channels - first < LANES ? channels - first : LANES;
    for (int64_t i = 0; i < silent + count; i++) store(u[i], some(tokens[i].x + first, width) * tokens[i].step);
    memset(sums, 0, count * sizeof *sums);
    for (int64_t p = 0; p < width; p += ROWS) {
      int64_t at = (first + p) * size, n = 0;
      for (; p + ROWS <= width && n + VECS * LANES <= size; n += VECS * LANES)
        run_tile(tokens, silent, count, ROWS, VECS, from, last, at, size, n, LANES, *u + p, *sums + p);
      for (; n < size; n += LANES)
        for (int64_t r = 0, own = size - n < LANES ? size - n : LANES; r < ROWS && p + r < width; r++)
          run_tile(tokens, silent, count, 1, 1, from, last, at + r * size, size, n, own, *u + p + r, *sums + p + r);
    }
    for (int64_t i = 0; i < count; i++) {
      const token *t = tokens + silent + i;
      store_some(t->y, first, wide, width, sums_of(sums[i]) + D * some(t->x + first, width));
    }
  }
}
