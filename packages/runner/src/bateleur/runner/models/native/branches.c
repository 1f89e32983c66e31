/* Branches of a float32 model, all of one in a call: what lies between is C calling C. Each computes as the functions
   that it calls, whose addresses it is given, say of themselves; `room` is for what is only between them. */
#include "vec.h"

/* y (tokens, rows) = x W^T + b; b may be NULL. Returns 0, or anything else where there is no memory. */
typedef struct {
  int64_t (*call)(const float *x, int64_t tokens, int64_t stride, int64_t columns, const void *weight, const float *bias,
                  float *y, int64_t rows, int threads);
  const void *weight;
  const float *bias;
  int64_t rows, columns;
} matrix;

static int64_t product(const matrix *m, const float *x, int64_t stride, int64_t tokens, float *y, int threads) {
  return m->call(x, tokens, stride, m->columns, m->weight, m->bias, y, m->rows, threads);
}

/* Why a branch was not computed. Where a row is REFUSED nothing was written but `room`. */
enum { DONE, REFUSED, NO_MEMORY };

/* A Mamba-2 layer, its states, and the functions of mamba/ops/native. in: z (inner) | x B C (lanes) | dt (heads). */
typedef struct {
  matrix in, out;
  int64_t (*placed)(const int32_t *starts, const int64_t *read, const int64_t *write, int64_t write_stride, int64_t rows,
                    int64_t tokens, int64_t slots);
  int64_t (*conv)(const void *x, int64_t stride, const void *weight, const void *bias, void *states, int64_t slot_stride,
                  int64_t slots, const int32_t *starts, const int64_t *read, const int64_t *offset, const int64_t *write,
                  void *y, int64_t tokens, int64_t rows, int64_t channels, int64_t taps, int is_silu, int wide,
                  int threads);
  int64_t (*update)(float *states, int64_t slot_stride, int64_t slots, const void *x, int64_t x_stride, const void *dt,
                    int64_t dt_stride, const float *A, const void *B, int64_t B_stride, const void *C, int64_t C_stride,
                    const float *D, const float *dt_bias, const int32_t *starts, const int64_t *read,
                    const int64_t *write, int64_t write_stride, void *y, int64_t tokens, int64_t rows, int64_t heads,
                    int64_t groups, int64_t channels, int64_t size, float least, float most, int wide, int threads);
  void (*gated_norm)(const void *x, int64_t x_stride, const void *z, int64_t z_stride, const void *weight, void *y,
               int64_t tokens, int64_t groups, int64_t size, int64_t weights, float eps, int norm_first, int is_silu,
               int wide, int threads);
  const float *conv_weight, *conv_bias, *A, *D, *dt_bias, *norm;
  float *windows, *states;
  int64_t window_stride, state_stride, num_windows, slots, slides, taps, heads, groups, channels, size, norm_weights, norm_first;
  double eps, least, most;
} mamba;

/* What lies between its projections, a part of `room` each. */
typedef struct {
  float *in, *channels, *mixed, *normed;
  int64_t wide, lanes, inner, of_groups;
} between;

static between divided(const mamba *m, int64_t tokens, float *room) {
  int64_t inner = m->heads * m->channels, of_groups = m->groups * m->size, lanes = inner + 2 * of_groups;
  float *channels = room + tokens * m->in.rows, *mixed = channels + tokens * lanes;
  return (between){room, channels, mixed, mixed + tokens * inner, m->in.rows, lanes, inner, of_groups};
}

/* What comes before the recurrence. */
static int64_t convolved(const mamba *m, const between *b, const float *x, int64_t stride, int64_t tokens,
                         const int32_t *starts, const int64_t *read, const int64_t *offset, const int64_t *write,
                         int64_t rows, int threads) {
  if (product(&m->in, x, stride, tokens, b->in, threads)) return NO_MEMORY;
  int64_t wrong = m->conv(b->in + b->inner, b->wide, m->conv_weight, m->conv_bias, m->windows, m->window_stride,
                          m->num_windows, starts, read, m->slides ? offset : NULL, write, b->channels, tokens, rows,
                          b->lanes, m->taps, 1, 1, threads);
  return wrong ? REFUSED : DONE;
}

/* And what comes behind it. */
static int64_t projected(const mamba *m, const between *b, int64_t tokens, float *y, int threads) {
  m->gated_norm(b->mixed, b->inner, b->in, b->wide, m->norm, b->normed, tokens, m->groups, b->inner / m->groups,
                m->norm_weights, m->eps, m->norm_first, 1, 1, threads);
  return product(&m->out, b->normed, b->inner, tokens, y, threads) ? NO_MEMORY : DONE;
}

/* Rows of few tokens: starts (rows + 1,), and slots as `SlotPlan` has them. */
typedef struct {
  const int32_t *starts;
  const int64_t *conv_read, *conv_offset, *conv_write, *read, *write;
  int64_t write_stride, rows;
} slots;

/* y (tokens, hidden) of x (tokens, hidden). room: tokens times what `in` has, the lanes, and 2 inner. */
int64_t mamba_rows(const mamba *m, const slots *s, const float *x, int64_t stride, int64_t tokens, float *room, float *y,
                   int threads) {
  between b = divided(m, tokens, room);
  if (m->placed(s->starts, s->read, s->write, s->write_stride, s->rows, tokens, m->slots)) return REFUSED;
  int64_t failed = convolved(m, &b, x, stride, tokens, s->starts, s->conv_read, s->conv_offset, s->conv_write, s->rows,
                             threads);
  if (failed) return failed;
  m->update(m->states, m->state_stride, m->slots, b.channels, b.lanes, b.in + b.inner + b.lanes, b.wide, m->A,
            b.channels + b.inner, b.lanes, b.channels + b.inner + b.of_groups, b.lanes, m->D, m->dt_bias, s->starts,
            s->read, s->write, s->write_stride, b.mixed, tokens, s->rows, m->heads, m->groups, m->channels, m->size,
            m->least, m->most, 1, threads);
  return projected(m, &b, tokens, y, threads);
}

/* The same over rings, of a layer whose windows are those of running requests. */
typedef struct {
  mamba layer;
  int64_t (*replayable)(const int32_t *starts, const int64_t *slot, const int64_t *row, const int64_t *start,
                        const int64_t *held, int64_t rows, int64_t tokens, int64_t slots, int64_t ring_rows,
                        int64_t capacity);
  int64_t (*replay)(float *states, int64_t slot_stride, int64_t slots, void *ring_x, float *ring_step,
                    void *ring_B, int64_t ring_rows, int64_t capacity, const void *x, int64_t x_stride, const void *dt,
                    int64_t dt_stride, const float *A, const void *B, int64_t B_stride, const void *C,
                    int64_t C_stride, const float *D, const float *dt_bias, const int32_t *starts, const int64_t *slot,
                    const int64_t *row, const int64_t *start, const int64_t *held, const int64_t *through,
                    const int64_t *to, void *y, int64_t tokens,
                    int64_t rows, int64_t heads, int64_t groups, int64_t channels, int64_t size, float least, float most,
                    int wide, int threads);
  float *ring_x, *ring_step, *ring_B;
  int64_t ring_rows, capacity;
} ringed;

/* Rows as `ReplayPlan` has them, and the ring of each; and how far each is folded on the way, see `OnTheWay`, which also
   counts layers, or NULL. */
typedef struct {
  const int32_t *starts;
  const int64_t *slot, *ring_row, *ring_start, *ring_len, *conv_offset, *through, *to;
  int64_t *layers;
  int64_t rows;
} replayed;

/* As `mamba_rows`. */
int64_t ring_rows(const ringed *r, const replayed *s, const float *x, int64_t stride, int64_t tokens, float *room,
                  float *y, int threads) {
  const mamba *m = &r->layer;
  between b = divided(m, tokens, room);
  if (r->replayable(s->starts, s->slot, s->ring_row, s->ring_start, s->ring_len, s->rows, tokens, m->slots,
                    r->ring_rows, r->capacity))
    return REFUSED;
  int64_t failed = convolved(m, &b, x, stride, tokens, s->starts, s->ring_row, s->conv_offset, s->ring_row, s->rows,
                             threads);
  if (failed) return failed;
  if (s->layers) ++*s->layers;
  r->replay(m->states, m->state_stride, m->slots, r->ring_x, r->ring_step, r->ring_B, r->ring_rows, r->capacity,
            b.channels, b.lanes, b.in + b.inner + b.lanes, b.wide, m->A, b.channels + b.inner, b.lanes,
            b.channels + b.inner + b.of_groups, b.lanes, m->D, m->dt_bias, s->starts, s->slot, s->ring_row,
            s->ring_start, s->ring_len, s->through, s->to, b.mixed, tokens, s->rows, m->heads, m->groups, m->channels, m->size, m->least,
            m->most, 1, threads);
  return projected(m, &b, tokens, y, threads);
}

/* An attention layer, its caches (blocks, block_size, kv_heads, size), and the functions of attention.c. qkv: queries | keys
   | values. */
typedef struct {
  matrix qkv, out;
  int64_t (*write)(float *q, const float *k, const float *v, float *k_cache, float *v_cache, const int64_t *slots,
                   const float *cos, const float *sin, int64_t tokens, int64_t cached, int64_t heads, int64_t kv_heads,
                   int64_t size, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t turn_stride,
                   int64_t lanes);
  int64_t (*attend)(const float *q, const float *k_cache, const float *v_cache, const int32_t *tables,
                    const int32_t *lengths, const int32_t *starts, float *y, int64_t tokens, int64_t rows, int64_t heads,
                    int64_t kv_heads, int64_t size, int64_t q_stride, int64_t table_stride, int64_t width,
                    int64_t cached, int64_t block_size, int64_t window, float scale, int threads);
  float *keys, *values;
  int64_t heads, kv_heads, size, blocks, block_size, window;
  double scale;
} attention;

/* Rows as `PagedAttentionMetadata` has them. */
typedef struct {
  const int32_t *table, *lengths, *starts;
  const int64_t *slots;
  int64_t table_stride, width, rows;
} paged;

/* y (tokens, hidden) of x (tokens, hidden). cos, sin: of each token a stride apart, or NULL, with 0 lanes. room: tokens
   times what `qkv` has, and the lanes of all queries. Of a row that is refused keys may have been written. */
int64_t attention_rows(const attention *m, const paged *s, const float *x, int64_t stride, int64_t tokens,
                       const float *cos, const float *sin, int64_t turn_stride, int64_t lanes, float *room, float *y,
                       int threads) {
  int64_t wide = m->qkv.rows, queries = m->heads * m->size;
  float *k = room + queries, *v = k + m->kv_heads * m->size, *seen = room + tokens * wide;
  if (product(&m->qkv, x, stride, tokens, room, threads)) return NO_MEMORY;
  if (m->write(room, k, v, m->keys, m->values, s->slots, cos, sin, tokens, m->blocks * m->block_size, m->heads,
               m->kv_heads, m->size, wide, wide, wide, turn_stride, lanes))
    return REFUSED;
  if (m->attend(room, m->keys, m->values, s->table, s->lengths, s->starts, seen, tokens, s->rows, m->heads, m->kv_heads,
                m->size, wide, s->table_stride, s->width, m->blocks, m->block_size, m->window, m->scale, threads))
    return REFUSED;
  return product(&m->out, seen, queries, tokens, y, threads) ? NO_MEMORY : DONE;
}

/* A norm, as rms_norm of norm.c computes it. */
typedef struct {
  void (*call)(void *h, int64_t h_stride, int h_wide, void *first, int64_t first_stride, float factor, void *second,
               int64_t second_stride, float second_factor, int term_wide, const void *weight, int weight_wide, void *y,
               int y_wide, int64_t tokens, int64_t size, float eps, int threads);
  const float *weight;
  int64_t size;
  double eps;
} norm;

/* y (tokens, size) of h + factor * term, which h becomes; term may be NULL. */
void norm_rows(const norm *m, float *h, int64_t stride, float *term, int64_t term_stride, float factor, float *y,
               int64_t tokens, int threads) {
  m->call(h, stride, 1, term, term_stride, factor, NULL, 0, 0, 1, m->weight, 1, y, 1, tokens, m->size, m->eps, threads);
}

/* up, what is between, and down. act: (x, stride, y, tokens, size, gated, is_silu, wide, threads). */
typedef struct {
  matrix up, down;
  void (*act)(const char *x, int64_t stride, char *y, int64_t tokens, int64_t size, int gated, int is_silu, int wide,
              int threads);
  int64_t gated, is_silu;
} mlp;

/* room: tokens times what `up` has, and the columns of `down`. */
int64_t mlp_rows(const mlp *m, const float *x, int64_t stride, int64_t tokens, float *room, float *y, int threads) {
  float *mid = room + tokens * m->up.rows;
  if (product(&m->up, x, stride, tokens, room, threads)) return NO_MEMORY;
  m->act((const char *)room, m->up.rows, (char *)mid, tokens, m->down.columns, m->gated, m->is_silu, 1, threads);
  return product(&m->down, mid, m->down.columns, tokens, y, threads) ? NO_MEMORY : DONE;
}
