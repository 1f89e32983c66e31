/* The replay of Mamba-2 over a checkpoint and a ring of later inputs, and the fold of ring entries into the checkpoint.
   Inputs and rings are all float32 or all bfloat16; step sizes and states are float32. Inputs are processed one by one,
   so bits do not depend on where a ring starts. Slot 0 reads as zeros, and writes to slot 0 or ring row 0 are dropped. */
#include "recurrence.h"

enum { MOST_ENTRIES = 64 };

/* Rings, (rows, capacity, ...), of the inputs of a token: x (heads, channels), step (heads), B (groups, size). */
typedef struct {
  void *x, *B;
  float *step;
  int64_t rows, capacity, heads, groups, channels, size;
} ring;

/* Return the inputs of head h for token t of the request in ring row `row`. */
INLINE token entry(const ring *r, float A, int64_t row, int64_t t, int64_t h, float **room, const int wide) {
  int64_t at = row * r->capacity + t % r->capacity, g = h / (r->heads / r->groups);
  float step = r->step[at * r->heads + h];
  return (token){floats(r->x, (at * r->heads + h) * r->channels, r->channels, room, wide),
                 floats(r->B, (at * r->groups + g) * r->size, r->size, room, wide), 0, 0, 0, step, expf(step * A)};
}

/* Copy n inputs without conversion. */
INLINE void copy(void *to, int64_t i, const void *from, int64_t j, int64_t n, const int wide) {
  int64_t bytes = wide ? 4 : 2;
  memcpy((char *)to + i * bytes, (const char *)from + j * bytes, n * bytes);
}

/* Return whether ring row, entries and slot are valid. */
INLINE int ring_is_valid(const ring *r, int64_t row, int64_t start, int64_t held, int64_t slot, int64_t slots) {
  return (uint64_t)row < r->rows && start >= 0 && held >= 0 && held <= r->capacity && (uint64_t)slot < slots;
}

/* Head h of one row: n tokens from `first` on, over the state in `slot` and `held` ring entries from `start` on. The
   tokens are appended to the ring. */
INLINE void replay_head(const inputs *in, const ring *own, int64_t first, int64_t n, int64_t h, float *states,
                        int64_t slot_stride, int64_t slot, int64_t row, int64_t start, int64_t held,
                        const int wide) {
  int64_t of_group = in->heads / in->groups, page = in->channels * in->size;
  float none[slot ? 1 : page], widened[ROOM(held + n, in->channels, in->size, wide)], *room = widened;
  token each[MOST_ENTRIES + MOST_TOKENS];
  for (int64_t i = 0; i < held; i++) each[i] = entry(own, in->A[h], row, start + i, h, &room, wide);
  for (int64_t i = 0; i < n; i++) {
    int64_t t = first + i, g = h / of_group, at = row * own->capacity + (start + held + i) % own->capacity;
    each[held + i] = token_of(in, t, h, NULL, &room, wide);
    if (!row) continue;
    copy(own->x, (at * in->heads + h) * in->channels, in->x, t * in->x_stride + h * in->channels, in->channels, wide);
    own->step[at * in->heads + h] = each[held + i].step;
    if (h == g * of_group)
      copy(own->B, (at * in->groups + g) * in->size, in->B, t * in->B_stride + g * in->size, in->size, wide);
  }
  const float *from = slot ? states + slot * slot_stride + h * page : memset(none, 0, sizeof none);
  if (held) run_tokens(each, held, n, from, NULL, in->D[h], in->channels, in->size, wide);
  else run_tokens(each, 0, n, from, NULL, in->D[h], in->channels, in->size, wide); /* without drafts rings are empty: a constant 0 compiles to faster code */
}

/* Return 1 + the first row with invalid tokens, slot or ring, or without room in its ring; otherwise 0. */
static int64_t unreplayable(const int32_t *starts, const int64_t *slot, const int64_t *ring_row, const int64_t *ring_start,
                   const int64_t *ring_len, int64_t rows, int64_t tokens, int64_t slots, int64_t ring_rows,
                   int64_t capacity) {
  ring own = {.rows = ring_rows, .capacity = capacity};
  for (int64_t r = 0; r < rows; r++) {
    int64_t n = starts[r + 1] - starts[r];
    if (outside(starts[r], n, tokens) || !ring_is_valid(&own, ring_row[r], ring_start[r], ring_len[r], slot[r], slots) ||
        ring_len[r] + n > capacity)
      return r + 1;
  }
  return 0;
}

/* Returns the result of `unreplayable`, and does nothing if that is not 0. Strides as in `inputs`. */
int64_t replay(float *states, int64_t slot_stride, int64_t slots, void *ring_x, float *ring_step, void *ring_B,
               int64_t ring_rows, int64_t capacity, const void *x, int64_t x_stride, const void *dt, int64_t dt_stride,
               const float *A, const void *B, int64_t B_stride, const void *C, int64_t C_stride, const float *D,
               const float *dt_bias, const int32_t *starts, const int64_t *slot, const int64_t *ring_row,
               const int64_t *ring_start, const int64_t *ring_len, void *y, int64_t tokens, int64_t rows, int64_t heads,
               int64_t groups, int64_t channels, int64_t size, float least, float most, int wide, int threads) {
  inputs in = {x, dt, B, C, y, A, D, dt_bias, x_stride, dt_stride, B_stride, C_stride, heads, groups, channels, size, least, most};
  ring own = {ring_x, ring_B, ring_step, ring_rows, capacity, heads, groups, channels, size};
  int64_t wrong = unreplayable(starts, slot, ring_row, ring_start, ring_len, rows, tokens, slots, ring_rows, capacity);
  if (wrong) return wrong;
  if (rows * heads * channels * size < 1 << 15) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t item = 0; item < rows * heads; item++) {
    int64_t r = item / heads, h = item % heads, t = starts[r], n = starts[r + 1] - t;
    if (!n) continue;
    BY_WIDTH(wide, replay_head, &in, &own, t, n, h, states, slot_stride, slot[r], ring_row[r], ring_start[r], ring_len[r]);
  }
  no_outputs(&in, starts[rows], tokens, wide);
  return 0;
}

/* Head h of one row: write the state `from` (zeros if NULL) updated with `count` ring entries to `to`. */
INLINE void fold_head(const ring *own, float A, int64_t row, int64_t start, int64_t count, int64_t h, const float *from,
                      float *to, const int wide) {
  float none[from ? 1 : own->channels * own->size];
  float widened[ROOM(count + 1, own->channels, own->size, wide)], *room = widened;
  token each[MOST_ENTRIES];
  for (int64_t i = 0; i < count; i++) each[i] = entry(own, A, row, start + i, h, &room, wide);
  run_tokens(each, count, 0, from ? from : memset(none, 0, sizeof none), to, 0, own->channels, own->size, wide);
}

/* Tensors of the layers of one recurrence: states, rings, A, and conv windows. `next_...` is the distance of layers. Windows
   of running requests are (rows, window_len, entry), of which `kept` entries are copied to a slot of `pages`; all
   distances of windows and pages are in bytes. */
typedef struct {
  float *states;
  void *ring_x, *ring_B;
  float *ring_step;
  const float *A;
  char *pages;
  const char *windows;
  int64_t layers, next_states, next_x, next_B, next_step, next_A, next_pages, next_windows, slot_stride, slots, ring_rows,
      capacity, heads, groups, channels, size, page_stride, window_stride, window_len, kept, entry, wide;
} fold_layers;

/* Return 1 + the first row with a destination and an invalid slot or ring, -1 if a row writes a slot that another row
   reads, otherwise 0. */
static int64_t unfoldable(const fold_layers *f, const int64_t *ring_row, const int64_t *ring_start, const int64_t *count,
                          const int64_t *src, const int64_t *dst, int64_t rows) {
  ring own = {.rows = f->ring_rows, .capacity = f->capacity};
  int64_t read[rows + 1];
  for (int64_t r = 0; r < rows; r++) {
    read[r] = dst[r] ? src[r] : 0;
    if (dst[r] && (!ring_is_valid(&own, ring_row[r], ring_start[r], count[r], src[r], f->slots) || (uint64_t)dst[r] >= f->slots))
      return r + 1;
  }
  return rows_independent(NULL, read, dst, 0, rows, f->slots) ? 0 : -1;
}

/* In each layer, write state src[r] updated with the first count[r] entries of ring row ring_row[r] to state dst[r], and
   the window from page_offset[r] on to pages[dst[r]]. A row with dst 0 is skipped. Returns the result of `unfoldable`, and
   does nothing if that is not 0. */
int64_t fold(const fold_layers *f, const int64_t *ring_row, const int64_t *ring_start, const int64_t *count,
             const int64_t *src, const int64_t *dst, const int64_t *page_offset, int64_t rows, int threads) {
  int64_t wrong = unfoldable(f, ring_row, ring_start, count, src, dst, rows);
  if (wrong) return wrong;
  int64_t page = f->channels * f->size, bytes = f->wide ? 4 : 2, last = f->window_len - f->kept;
  if (f->layers * rows * f->heads * page < 1 << 15) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t item = 0; item < f->layers * rows * f->heads; item++) {
    int64_t layer = item / f->heads / rows, r = item / f->heads % rows, h = item % f->heads;
    if (!dst[r]) continue;
    ring own = {(char *)f->ring_x + layer * f->next_x * bytes, (char *)f->ring_B + layer * f->next_B * bytes,
                f->ring_step + layer * f->next_step, f->ring_rows, f->capacity, f->heads, f->groups, f->channels, f->size};
    float A = f->A[layer * f->next_A + h], *states = f->states + layer * f->next_states;
    const float *from = src[r] ? states + src[r] * f->slot_stride + h * page : NULL;
    float *to = states + dst[r] * f->slot_stride + h * page;
    BY_WIDTH(f->wide, fold_head, &own, A, ring_row[r], ring_start[r], count[r], h, from, to);
    int64_t first = page_offset[r] < 0 ? 0 : page_offset[r] > last ? last : page_offset[r];
    if (!h)
      memcpy(f->pages + layer * f->next_pages + dst[r] * f->page_stride,
             f->windows + layer * f->next_windows + ring_row[r] * f->window_stride + first * f->entry, f->kept * f->entry);
  }
  return 0;
}
