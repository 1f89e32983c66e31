/* Tokens over a state that stands still and a ring of the inputs since, and what folds these into a state. All float32,
   but for starts, slots and rows. A state is carried over the inputs one by one, as an update of each would have, so its
   bits do not depend on where a ring begins. Slot 0 reads as zeros, and what is written to slot or ring row 0 is dropped. */
#include "carry.h"

enum { MOST_ENTRIES = 64 };

/* Inputs since a state, (rows, capacity, ...) of what each token brings: x (heads, channels), step (heads), B (groups,
   size). */
typedef struct {
  float *x, *step, *B;
  int64_t rows, capacity, heads, groups, channels, size;
} ring;

/* The entry of ring row `row` for token t of its request, as head h sees it. */
INLINE token entry(const ring *r, float A, int64_t row, int64_t t, int64_t h) {
  int64_t at = row * r->capacity + t % r->capacity, g = h / (r->heads / r->groups);
  float step = r->step[at * r->heads + h];
  return (token){r->x + (at * r->heads + h) * r->channels, r->B + (at * r->groups + g) * r->size, 0, 0, 0, step,
                 expf(step * A)};
}

/* What `some` row of a ring and a state can be asked for. */
INLINE int there(const ring *r, int64_t row, int64_t start, int64_t held, int64_t slot, int64_t slots) {
  return (uint64_t)row < r->rows && start >= 0 && held >= 0 && held <= r->capacity && (uint64_t)slot < slots;
}

/* Returns 1 + the first row that names what there is not, and has done nothing then, or 0. x and y (tokens, heads,
   channels), dt (tokens, heads), B and C (tokens, groups, size), which the strides are of. */
int64_t replay(const float *states, int64_t slot_stride, int64_t slots, float *ring_x, float *ring_step, float *ring_B,
               int64_t ring_rows, int64_t capacity, const float *x, int64_t x_stride, const float *dt, int64_t dt_stride,
               const float *A, const float *B, int64_t B_stride, const float *C, int64_t C_stride, const float *D,
               const float *dt_bias, const int32_t *starts, const int64_t *slot, const int64_t *ring_row,
               const int64_t *ring_start, const int64_t *ring_len, float *y, int64_t tokens, int64_t rows, int64_t heads,
               int64_t groups, int64_t channels, int64_t size, float least, float most, int threads) {
  ring own = {ring_x, ring_step, ring_B, ring_rows, capacity, heads, groups, channels, size};
  int64_t page = channels * size, of_group = heads / groups;
  for (int64_t r = 0; r < rows; r++) {
    int64_t n = starts[r + 1] - starts[r];
    if (outside(starts[r], n, tokens) || !there(&own, ring_row[r], ring_start[r], ring_len[r], slot[r], slots) ||
        ring_len[r] + n > capacity)
      return r + 1;
  }
  if (rows * heads * page < 1 << 15) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t item = 0; item < rows * heads; item++) {
    int64_t r = item / heads, h = item % heads, g = h / of_group, row = ring_row[r], held = ring_len[r];
    int64_t first = starts[r], n = starts[r + 1] - first, next = ring_start[r] + held;
    token each[MOST_ENTRIES + MOST_TOKENS];
    float none[slot[r] ? 1 : page];
    if (!n) continue;
    for (int64_t i = 0; i < held; i++) each[i] = entry(&own, A[h], row, ring_start[r] + i, h);
    for (int64_t i = 0; i < n; i++) {
      int64_t t = first + i, at = row * capacity + (next + i) % capacity;
      float step = step_of(dt[t * dt_stride + h] + dt_bias[h], least, most);
      const float *xs = x + t * x_stride + h * channels, *Bs = B + t * B_stride + g * size;
      each[held + i] = (token){xs, Bs, C + t * C_stride + g * size, y + (t * heads + h) * channels, 0, step,
                               expf(step * A[h])};
      if (!row) continue;
      memcpy(ring_x + (at * heads + h) * channels, xs, channels * 4);
      ring_step[at * heads + h] = step;
      if (h == g * of_group) memcpy(ring_B + (at * groups + g) * size, Bs, size * 4);
    }
    const float *from = slot[r] ? states + slot[r] * slot_stride + h * page : memset(none, 0, sizeof none);
    carry(each, held, n, from, 0, D[h], channels, size);
  }
  memset(y + starts[rows] * heads * channels, 0, (tokens - starts[rows]) * heads * channels * 4);
  return 0;
}

/* State dst[r] is state src[r] behind the first count[r] entries of ring row ring_row[r]; nothing where dst is 0. Returns
   as `replay` does, and -1 where a row writes what another one reads. */
int64_t fold(float *states, int64_t slot_stride, int64_t slots, float *ring_x, float *ring_step, float *ring_B,
             int64_t ring_rows, int64_t capacity, const float *A, const int64_t *ring_row, const int64_t *ring_start,
             const int64_t *count, const int64_t *src, const int64_t *dst, int64_t rows, int64_t heads, int64_t groups,
             int64_t channels, int64_t size, int threads) {
  ring own = {ring_x, ring_step, ring_B, ring_rows, capacity, heads, groups, channels, size};
  int64_t page = channels * size;
  for (int64_t r = 0; r < rows; r++)
    if (dst[r] && (!there(&own, ring_row[r], ring_start[r], count[r], src[r], slots) || (uint64_t)dst[r] >= slots))
      return r + 1;
  if (!apart(NULL, src, dst, 0, rows, slots)) return -1;
  if (rows * heads * page < 1 << 15) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t item = 0; item < rows * heads; item++) {
    int64_t r = item / heads, h = item % heads;
    token each[MOST_ENTRIES];
    float none[src[r] ? 1 : page];
    if (!dst[r]) continue;
    for (int64_t i = 0; i < count[r]; i++) each[i] = entry(&own, A[h], ring_row[r], ring_start[r] + i, h);
    const float *from = src[r] ? states + src[r] * slot_stride + h * page : memset(none, 0, sizeof none);
    float *to = states + dst[r] * slot_stride + h * page;
    carry(each, count[r], 0, from, to, 0, channels, size);
  }
  return 0;
}
