/* All draft passes of a step for an EAGLE-3 head with one layer, in float32, from features to tokens. heads/eagle.py and
   passes.py define the computation.

   The first pass has the kept tokens of the target's step, the others one token a row. Keys and values go to the cache;
   those of drafts follow the row's own, and the next step's first pass overwrites them. */
#include "winner.h"

enum { TILE = 64, VECS = 4, PART = 64, AT_ONCE = 1 << 14 };
#define TYPE float
#define NAME(what) what##_float
#define LOAD load_float
#define WIDEN widen_float
#define NARROW narrow_float
#include "write_kv.h"
#include "attention.h"

/* y (tokens, rows) = x W^T + b by a kernel that defines the layout of W (rows, columns); b may be NULL. It returns 0, or
   another value if it is out of memory. */
typedef struct {
  int64_t (*call)(const float *x, int64_t tokens, int64_t stride, int64_t columns, const void *weight, const float *bias,
                  float *y, int64_t rows, int threads);
  const void *weight;
  const float *bias;
  int64_t rows, columns;
} matrix;

/* Missing norms and tables are NULL, also fc.call. cos, sin: (positions, lanes). words, target_ids: by draft id.
   tap_norms: one for each tap, if there are any. */
typedef struct {
  matrix fc, qkv, o, up, down, output;
  const float *const *tap_norms;
  const float *input_norm, *embedding, *token_norm, *hidden_norm, *q_norm, *k_norm, *mlp_norm, *norm, *cos, *sin;
  const int64_t *target_ids;
  const uint32_t *words;
  float *k_cache, *v_cache;
  int64_t hidden, taps, tap_width, heads, kv_heads, size, lanes, block_size, positions, norms_residual, feeds_normed;
  double eps;
} head;

/* One feature tensor of the target; `stride` is the distance of two tokens in floats. */
typedef struct {
  const float *at;
  int64_t stride;
} tap;

/* Rows of the target's step, see `DraftContext`. drafts: (rows, width), -1 where there is no draft; at most k drafts of a
   row are made. longest: most tokens of a sequence. start_positions:
   (rows,) first position to attend to, or NULL for 0. room: workspace of floats; places: (rows + tokens) * 6 integers. */
typedef struct {
  const int32_t *input_ids, *starts, *table;
  const int64_t *positions, *next_token, *num_valid, *seeds, *start_positions;
  const tap *taps;
  const float *temperature;
  int64_t *drafts, *places;
  float *room;
  int64_t rows, k, table_stride, longest, width, threads;
} step;

/* A pass: its tokens, each of the row `owner` of the step; token last[j] draws for row[j]. source: in the first pass, the
   tokens of the step. */
typedef struct {
  int64_t tokens, rows, *id, *position, *owner, *last, *row, *source;
} pass;

static void rms(const float *x, const float *weight, float *y, int64_t size, double eps) {
  vec total = {};
  float rest = 0;
  int64_t j = 0;
  for (; j + LANES <= size; j += LANES) total += load(x + j) * load(x + j);
  for (; j < size; j++) rest += x[j] * x[j];
  float scale = 1.0f / sqrtf((sum_of(total) + rest) / size + (float)eps);
  for (j = 0; j < size; j++) y[j] = x[j] * scale * weight[j];
}

static int64_t product(const matrix *m, const float *x, int64_t tokens, float *y, int threads) {
  return m->call(x, tokens, m->columns, m->columns, m->weight, m->bias, y, m->rows, threads);
}

static void add(float *x, const float *y, int64_t n) {
  for (int64_t j = 0; j < n; j++) x[j] += y[j];
}

/* gate and up (2, size) to silu(gate) * up. */
static void gated(const float *x, float *y, int64_t size) {
  int64_t j = 0;
  for (; j + LANES <= size; j += LANES) store(y + j, load(x + j) / (1.0f + exp_of(-load(x + j))) * load(x + size + j));
  for (; j < size; j++) y[j] = x[j] / (1.0f + expf(-x[j])) * x[size + j];
}

/* Normalise and rotate queries and keys; store keys and values. */
static void place(const head *h, float *qkv, int64_t position, const int32_t *table) {
  int64_t size = h->size, kv = h->kv_heads * size;
  float *k = qkv + h->heads * size;
  for (int64_t i = 0; h->q_norm && i < h->heads; i++) rms(qkv + i * size, h->q_norm, qkv + i * size, size, h->eps);
  for (int64_t i = 0; h->k_norm && i < h->kv_heads; i++) rms(k + i * size, h->k_norm, k + i * size, size, h->eps);
  const float *cos = h->cos + position * h->lanes, *sin = h->sin + position * h->lanes;
  if (h->lanes) turn_float(qkv, qkv, h->heads, size, cos, sin, h->lanes);
  if (h->lanes) turn_float(k, k, h->kv_heads, size, cos, sin, h->lanes);
  int64_t block = table[position / h->block_size], slot = block * h->block_size + position % h->block_size;
  if (!block) return;
  memcpy(h->k_cache + slot * kv, k, kv * 4);
  memcpy(h->v_cache + slot * kv, k + kv, kv * 4);
}

/* The draft id with the largest of n logits over the temperature, plus noise of the target's stream if the temperature is
   above 0; -1 if none is above -inf, or one is NaN. */
static int64_t drawn(const float *logits, int64_t n, float temperature, const uint32_t *words, uint64_t seed,
                     uint64_t name) {
  int64_t blocks = (n + BLOCK - 1) / BLOCK;
  float peaks[blocks], param[] = {temperature, -INFINITY, 0, 1};
  row r = {logits, 0, n, blocks, 1, 0, peaks, words, 0, 0};
  key_row(&r, seed, name);
  int64_t token = draw_row(&r, param, peaks, NULL);
  return token == UNSURE ? draw_among(&r, everything).token : token; /* drafts may differ from those of torch */
}

/* A pass without its draw: `hidden` (tokens, H) is its input, then (rows, H) the input of the next pass. Returns (rows, Vd)
   logits, or NULL if out of memory. If no row draws, it only stores keys and values. */
static float *logits_of(const head *h, const step *s, const pass *p, float *hidden, float *room) {
  int64_t H = h->hidden, wide = 2 * H, heads = h->heads * h->size, group = h->heads / h->kv_heads, n = p->rows;
  float *x = room, *qkv = x + p->tokens * wide, *residual = qkv + p->tokens * h->qkv.rows, *seen = residual + n * H;
  float *out = seen + n * heads, *up = out + n * H, *mid = up + n * h->up.rows, *logits = mid + n * h->down.columns;
  for (int64_t t = 0; t < p->tokens; t++) {
    rms(h->embedding + p->id[t] * H, h->token_norm, x + t * wide, H, h->eps);
    rms(hidden + t * H, h->hidden_norm, x + t * wide + H, H, h->eps);
  }
  if (product(&h->qkv, x, p->tokens, qkv, s->threads)) return NULL;
  for (int64_t t = 0; t < p->tokens; t++)
    place(h, qkv + t * h->qkv.rows, p->position[t], s->table + p->owner[t] * s->table_stride);
  if (!n) return logits;
  const tile_float nothing = {0}; /* nothing to prefetch: a head reads little */
#pragma omp parallel for num_threads(s->threads) schedule(dynamic, 1) if (s->threads > 1 && n > 8)
  for (int64_t j = 0; j < n; j++) {
    int64_t t = p->last[j];
    memcpy(residual + j * H, h->norms_residual ? x + t * wide + H : hidden + t * H, H * 4);
    for (int64_t g = 0; g < h->kv_heads; g++)
      attend_some_float(qkv, t * h->qkv.rows + g * group * h->size, seen, j * heads + g * group * h->size, 1, 1, 0, 0,
                        group, h->size, h->k_cache + g * h->size, h->v_cache + g * h->size, h->kv_heads * h->size,
                        s->table + p->row[j] * s->table_stride, h->block_size, p->position[t] + 1,
                        p->position[t] + 1 - (s->start_positions ? s->start_positions[p->row[j]] : 0),
                        1.0f / sqrtf(h->size), 1, 0, &nothing);
  }
  if (product(&h->o, seen, n, out, s->threads)) return NULL;
  add(residual, out, n * H);
  for (int64_t j = 0; j < n; j++) rms(residual + j * H, h->mlp_norm, out + j * H, H, h->eps);
  if (product(&h->up, out, n, up, s->threads)) return NULL;
  for (int64_t j = 0; j < n; j++) gated(up + j * h->up.rows, mid + j * h->down.columns, h->down.columns);
  if (product(&h->down, mid, n, out, s->threads)) return NULL;
  add(residual, out, n * H);
  for (int64_t j = 0; j < n; j++) rms(residual + j * H, h->norm, out + j * H, H, h->eps);
  memcpy(hidden, h->feeds_normed ? out : residual, n * H * 4);
  if (product(&h->output, out, n, logits, s->threads)) return NULL;
  return logits;
}

/* The first pass: kept tokens, each with the id of the next one, and the rows that can draw. A row without kept tokens has
   ended with an error. */
static void begin(const step *s, pass *p, int64_t positions) {
  for (int64_t r = 0; r < s->rows; r++) {
    int64_t t = s->starts[r], last = t + s->num_valid[r] - 1;
    if (last < t) continue;
    for (; t <= last && s->positions[t] < positions; t++, p->tokens++) {
      p->id[p->tokens] = t < last ? s->input_ids[t + 1] : s->next_token[r];
      p->position[p->tokens] = s->positions[t], p->owner[p->tokens] = r, p->source[p->tokens] = t;
    }
    if (t > last) p->last[p->rows] = p->tokens - 1, p->row[p->rows++] = r;
  }
}

/* Input of the first pass: (tokens, H) of the taps, concatenated in `wide`, or of the only one. Returns 1 if out of
   memory. */
static int64_t fuse(const head *h, const step *s, const pass *p, float *hidden, float *wide) {
  int64_t width = h->tap_width, all = h->taps * width;
  float *out = h->fc.call ? wide : hidden;
  for (int64_t i = 0; i < p->tokens; i++, out += all) {
    for (int64_t j = 0; j < h->taps; j++) {
      const float *from = s->taps[j].at + p->source[i] * s->taps[j].stride;
      if (h->tap_norms) rms(from, h->tap_norms[j], out + j * width, width, h->eps);
      else memcpy(out + j * width, from, width * 4);
    }
    if (h->input_norm) rms(out, h->input_norm, out, all, h->eps);
  }
  return h->fc.call ? product(&h->fc, wide, p->tokens, hidden, s->threads) : 0;
}

/* The next pass: the drawn token of each row that drew and can store it. */
static void follow(const head *h, const step *s, pass *p, int64_t column, float *hidden) {
  int64_t n = 0;
  for (int64_t j = 0; j < p->rows; j++) {
    int64_t r = p->row[j], id = s->drafts[r * s->width + column], position = p->position[p->last[j]] + 1;
    if (id < 0 || position >= h->positions) continue;
    memmove(hidden + n * h->hidden, hidden + j * h->hidden, h->hidden * 4);
    p->id[n] = id, p->position[n] = position, p->owner[n] = r, p->row[n++] = r;
  }
  for (int64_t j = 0; j < n; j++) p->last[j] = j;
  p->tokens = p->rows = n;
}

/* Returns 0, or -1 if out of memory. */
int64_t draft(const head *h, const step *s) {
  int64_t total = s->starts[s->rows] + s->rows, *at = s->places;
  pass p = {0, 0, at, at + total, at + 2 * total, at + 3 * total, at + 4 * total, at + 5 * total};
  float *hidden = s->room, *room = s->room + s->starts[s->rows] * h->hidden;
  memset(s->drafts, -1, s->rows * s->width * sizeof(int64_t));
  begin(s, &p, h->positions);
  if (fuse(h, s, &p, hidden, room)) return -1;
  for (int64_t column = 0; column < s->k; column++) {
    if (column) follow(h, s, &p, column - 1, hidden);
    if (!p.tokens) break;
    const float *logits = logits_of(h, s, &p, hidden, room);
    if (!logits) return -1;
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1 && p.rows > 8)
    for (int64_t j = 0; j < p.rows; j++) {
      int64_t r = p.row[j], index = p.position[p.last[j]] + 2;
      const float *own = logits + j * h->output.rows;
      int64_t id = -1;
      if (index < s->longest) id = drawn(own, h->output.rows, s->temperature[r], h->words, s->seeds[r], index);
      s->drafts[r * s->width + column] = id < 0 || !h->target_ids ? id : h->target_ids[id];
    }
  }
  return 0;
}
