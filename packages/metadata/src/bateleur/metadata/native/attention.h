/* Paged attention for one TYPE of caches; attention.c includes it once for each TYPE. */
#ifndef ATTENTION
#define ATTENTION

enum { MOST_FETCHING = 16 /* up to so many queries prefetch; with more, compute time hides the memory latency */ };

/* First position that the token at position `past` sees. */
INLINE int64_t first_seen(int64_t past, int64_t window) { return window && past >= window ? past - window + 1 : 0; }

/* Prefetch one share of the next tile into the L2 cache. L1 allows too few outstanding misses. */
INLINE void fetch(const char *const *vectors, int64_t bytes, int64_t share, int64_t shares) {
  int64_t lines = (bytes + 63) / 64;
  for (int64_t line = share * lines / shares; line < (share + 1) * lines / shares; line++)
    for (int i = 0; i < 2 * TILE; i++) __builtin_prefetch(vectors[i] + 64 * line, 0, 2);
}

/* Whether a row's tokens are within q and its visible blocks within the caches. */
static int fits(const int32_t *blocks, int64_t length, int64_t begin, int64_t end, int64_t tokens, int64_t width,
                int64_t cached, int64_t block_size, int64_t window) {
  if (begin < 0 || begin > end || end > tokens || length > width * block_size) return 0;
  int64_t first = first_seen(length - (end - begin), window);
  int outside = 0;
  for (int64_t b = first / block_size; b * block_size < length; b++) outside |= (uint32_t)blocks[b] >= cached;
  return !outside || begin == end;
}
#endif

/* Load a vector; if fewer than LANES numbers are left, load n and fill with zeros. */
INLINE vec NAME(some)(const TYPE *p, int64_t n) {
  if (n >= LANES) return LOAD(p);
  TYPE part[LANES] = {};
  memcpy(part, p, n * sizeof(TYPE));
  return LOAD(part);
}

#ifdef WIDENS
static void NAME(widen_all)(const TYPE *x, float *y, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(y + i, LOAD(x + i));
  for (vec rest = NAME(some)(x + i, n - i); i < n; i++) y[i] = rest[i % LANES];
}
#endif

/* Dot products of a float32 query with LANES keys. */
INLINE vec NAME(scores)(const float *query, const TYPE **keys, const int64_t size) {
  vec sums[LANES];
  for (int i = 0; i < LANES; i++) {
    vec sum = {};
    for (int64_t d = 0; d < size; d += LANES) sum += load(query + d) * NAME(some)(keys[i] + d, size - d);
    sums[i] = sum;
  }
  return sums_of(sums);
}

/* sums = sums * keep + p * values, for `count` vectors. */
INLINE void NAME(weigh)(const int count, float *sums, float keep, const float *p, const TYPE **values, int64_t d,
                        int64_t n, const int64_t size) {
  vec sum[VECS];
  for (int i = 0; i < count; i++) sum[i] = load(sums + d + i * LANES) * keep;
  for (int64_t j = 0; j < n; j++)
    for (int i = 0; i < count; i++) sum[i] += p[j] * NAME(some)(values[j] + d + i * LANES, size - d - i * LANES);
  for (int i = 0; i < count; i++) store(sums + d + i * LANES, sum[i]);
}

/* Online softmax: add n keys and values to one float32 query. `most`: largest score; `total`: sum of
   e^(score - most); `sums`: weighted sum of values. Pointers of whole vectors of keys must be readable. */
INLINE void NAME(add_keys)(const float *query, float *most, float *total, float *sums, const TYPE **keys,
                           const TYPE **values, int64_t n, const int64_t size, float scale) {
  float p[TILE] __attribute__((aligned(64))), before = *most;
  vec top = all(before), added = {};
  ivec lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (int64_t j = 0; j < n; j += LANES) {
    vec s = NAME(scores)(query, keys + j, size) * scale;
    s = pick(lane < (int)(n - j), s, all(-INFINITY));
    top = pick(s > top, s, top);
    store(p + j, s);
  }
  *most = most_of(top);
  float keep = *total == 0 ? 0 : exp_of(all(before - *most))[0];
  for (int64_t j = 0; j < n; j += LANES) {
    vec e = exp_of(load(p + j) - *most);
    store(p + j, e);
    added += e;
  }
  *total = *total * keep + sum_of(added);
  int64_t d = 0;
  for (; d + VECS * LANES <= size; d += VECS * LANES) NAME(weigh)(VECS, sums, keep, p, values, d, n, size);
  for (; d < size; d += LANES) NAME(weigh)(1, sums, keep, p, values, d, n, size);
}

/* add_keys for one head size; common sizes have unrolled loops. */
typedef void NAME(adds)(const float *query, float *most, float *total, float *sums, const TYPE **keys,
                        const TYPE **values, int64_t n, int64_t size, float scale);
#define ADDS(name, of_size)                                                                                   \
  static void NAME(name)(const float *query, float *most, float *total, float *sums, const TYPE **keys,       \
                         const TYPE **values, int64_t n, int64_t size, float scale) {                         \
    NAME(add_keys)(query, most, total, sums, keys, values, n, of_size, scale);                                \
  }
ADDS(add_64, 64)
ADDS(add_128, 128)
ADDS(add_any, size)
#undef ADDS

static NAME(adds) *NAME(adding)(int64_t size) {
  return size == 64 ? NAME(add_64) : size == 128 ? NAME(add_128) : NAME(add_any);
}

/* Keys and values of one head of a row with `length` tokens, from position `begin` on. */
typedef struct {
  const TYPE *k_cache, *v_cache;
  const int32_t *blocks;
  int64_t begin, length;
} NAME(tile);

/* Write pointers to the tile's values, then to its keys. Positions after the last key point to `other`. */
static void NAME(find)(const NAME(tile) *t, int64_t token_stride, int64_t block_size, const TYPE *other,
                       const TYPE **vectors) {
  int64_t block = t->begin / block_size, offset = t->begin % block_size, j = 0;
  for (int64_t position = t->begin; position < t->length && (!j || position % TILE); position++, offset++, j++) {
    if (offset == block_size) block++, offset = 0;
    int64_t at = (t->blocks[block] * block_size + offset) * token_stride;
    vectors[j] = t->v_cache + at, vectors[j + TILE] = t->k_cache + at;
  }
  for (; j < TILE; j++) vectors[j] = vectors[j + TILE] = other;
}

/* Attention of the last `tokens` of a row's `length` tokens, for one key head with `group` queries per token.
   `sinks`, of these heads, are scores of keys without values, or NULL.
   Online softmax over tiles of TILE keys from position 0 on. All queries use a tile while it is in the CPU cache. With
   few queries, the next tile is prefetched; the last one prefetches `after`. */
static void NAME(attend_some)(const void *q, int64_t q_at, void *y, int64_t y_at, int wide_q, int64_t tokens,
                              int64_t q_stride, int64_t y_stride, int64_t group, int64_t size, const TYPE *k_cache,
                              const TYPE *v_cache, int64_t token_stride, const int32_t *blocks, int64_t block_size,
                              int64_t length, int64_t window, float scale, float v_scale,
                              const float *sinks, const NAME(tile) *after) {
  const int64_t wide = (size + LANES - 1) / LANES * LANES, count = tokens * group, past = length - tokens;
  float sums[count * wide] __attribute__((aligned(64))), queries[count * wide] __attribute__((aligned(64)));
  float most[count], total[count];
  const TYPE *here[2 * TILE + LANES], *soon[2 * TILE], **values = here, **keys = here + TILE;
#ifdef WIDENS
  int64_t widened = count > FEW && size <= MOST_WIDENED ? TILE * size : 0;
  float copies[2 * widened + 1] __attribute__((aligned(64)));
  const float *wide_keys[TILE + LANES], *wide_values[TILE];
#endif
  NAME(adds) *add = NAME(adding)(size);
  memset(sums, 0, sizeof sums);
  for (int64_t i = 0; i < count; i++) {
    most[i] = sinks ? sinks[i % group] : -INFINITY, total[i] = sinks != 0;
    for (int64_t d = 0; d < wide; d += LANES)
      store(queries + i * wide + d,
            load_some(q, q_at + i / group * q_stride + i % group * size + d, wide_q, size - d));
  }
  for (int64_t begin = first_seen(past, window), end; begin < length; begin = end) {
    NAME(tile) tile = {k_cache, v_cache, blocks, begin, length};
    end = begin / TILE * TILE + TILE;
    if (end > length) end = length;
    NAME(find)(&tile, token_stride, block_size, k_cache, here);
    for (int64_t j = end - begin; j < TILE + LANES; j++) keys[j] = keys[0];
    tile.begin = end;
    if (count <= MOST_FETCHING) NAME(find)(end < length ? &tile : after, token_stride, block_size, keys[0], soon);
#ifdef WIDENS
    for (int64_t j = 0; j < TILE + LANES && widened; j++) {
      wide_keys[j] = copies + (j < end - begin ? j * size : 0);
      if (j >= end - begin) continue;
      wide_values[j] = wide_keys[j] + widened;
      NAME(widen_all)(keys[j], copies + j * size, size);
      NAME(widen_all)(values[j], copies + j * size + widened, size);
    }
#endif
    for (int64_t i = 0; i < count; i++) {
      int64_t last = past + i / group, first = first_seen(last, window), skipped = first > begin ? first - begin : 0;
      int64_t n = (last < end ? last + 1 : end) - begin - skipped;
      if (n <= 0) continue;
      if (count <= MOST_FETCHING) fetch((const char *const *)soon, size * sizeof(TYPE), i, count);
#ifdef WIDENS
      if (widened) {
        adding_float(size)(queries + i * wide, most + i, total + i, sums + i * wide, wide_keys + skipped,
                           wide_values + skipped, n, size, scale);
        continue;
      }
#endif
      add(queries + i * wide, most + i, total + i, sums + i * wide, keys + skipped, values + skipped, n, size, scale);
    }
  }
  for (int64_t i = 0; i < count; i++) {
    int64_t to = y_at + i / group * y_stride + i % group * size;
    float inverse = total[i] == 0 ? 0 : v_scale / total[i];
    for (int64_t d = 0; d < size; d += LANES)
      store_some(y, to + d, wide_q, size - d, load(sums + i * wide + d) * inverse);
  }
}

/* Returns 0, or 1 + the first row that does not fit (nothing is computed then). */
int64_t NAME(attend)(const void *q, const TYPE *k_cache, const TYPE *v_cache, const int32_t *tables,
                     const int32_t *lengths, const int32_t *starts, const float *sinks, const float *scales, void *y,
                     int64_t wide_q, int64_t tokens, int64_t rows,
                     int64_t heads, int64_t kv_heads, int64_t size, int64_t q_stride, int64_t table_stride,
                     int64_t width, int64_t cached, int64_t block_size, int64_t window, float scale, int threads) {
  int64_t group = heads / kv_heads, work = 0, parts = 1;
  int64_t most = AT_ONCE / (group * size) ? AT_ONCE / (group * size) : 1; /* tokens whose queries fit the CPU cache */
  for (int64_t r = 0; r < rows; r++) {
    if (!fits(tables + r * table_stride, lengths[r], starts[r], starts[r + 1], tokens, width, cached, block_size, window))
      return r + 1;
    int64_t n = starts[r + 1] - starts[r];
    work += n * lengths[r];
    if (n > parts * PART) parts = (n + PART - 1) / PART;
  }
  if (work * heads * size < 1 << 16) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
  for (int64_t i = 0; i < rows * kv_heads * parts; i++) {
    int64_t row = i / parts / kv_heads, h = i / parts % kv_heads, end = starts[row + 1];
    int64_t begin = starts[row] + i % parts * PART, n = end - begin < PART ? end - begin : PART;
    if (n <= 0) continue;
    /* Prefetch for the item that a thread probably takes next. Cores share the L3 cache. */
    int64_t next = i / parts + threads, r = next / kv_heads, offset = next % kv_heads * size;
    NAME(tile) after = {k_cache + offset, v_cache + offset, tables + r * table_stride};
    if (r < rows) after.length = lengths[r], after.begin = first_seen(lengths[r] - starts[r + 1] + starts[r], window);
    for (int64_t last = begin + n, m; begin < last; begin += m) {
      m = last - begin < most ? last - begin : most;
      NAME(attend_some)(q, begin * q_stride + h * group * size, y, (begin * heads + h * group) * size, wide_q, m,
                        q_stride, heads * size, group, size, k_cache + h * size, v_cache + h * size, kv_heads * size,
                        tables + row * table_stride, block_size, lengths[row] - (end - begin - m), window,
                        scales ? scale * scales[h] : scale, scales ? scales[kv_heads + h] : 1,
                        sinks ? sinks + h * group : sinks, &after);
    }
  }
  int64_t bytes = heads * size * (wide_q ? sizeof(float) : sizeof(bf16));
  memset((char *)y + starts[rows] * bytes, 0, (tokens - starts[rows]) * bytes);
  return 0;
}
