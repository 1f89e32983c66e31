/* Paged attention on a CPU, for rows that are not long: every query by itself, so that its bits depend on its own row alone.

   q (tokens, heads, size) with a stride, caches (blocks, block_size, kv_heads, size), tables (rows, blocks of a row),
   lengths (rows), starts (rows + 1). */
#include "vec.h"
#include <math.h>

enum { TILE = 64, VECS = 4, PART = 64 /* tokens */, WIDENED = 1 << 16 };

#define TYPE float
#define NAME(what) what##_float
#define LOAD load_float
#define WIDEN widen_float
#define NARROW narrow_float
#include "attention.h"
#undef TYPE
#undef NAME
#undef ROW
#undef LOAD
#undef WIDEN
#undef NARROW

static void widened_row(const bf16 *, bf16 *, int64_t, int64_t, int64_t, int64_t, int64_t, const bf16 *, const bf16 *,
                        int64_t, const int32_t *, int64_t, int64_t, int64_t, float);
#define TYPE bf16
#define NAME(what) what##_bf16
#define ROW widened_row
#define LOAD load_bf16
#define WIDEN widen_bf16
#define NARROW narrow_bf16
#include "attention.h"

static void widen_all(const bf16 *x, float *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = widen(x[i]);
}

/* As attend_row, with the same bits: keys and values of short rows are widened once for all queries. */
static void widened_row(const bf16 *q, bf16 *y, int64_t tokens, int64_t q_stride, int64_t y_stride, int64_t group,
                        int64_t size, const bf16 *k_cache, const bf16 *v_cache, int64_t token_stride,
                        const int32_t *blocks, int64_t block_size, int64_t length, int64_t window, float scale) {
  int64_t oldest = window && length - tokens >= window ? length - tokens - window + 1 : 0, n = length - oldest;
  if (n * size > WIDENED) {
    attend_row_bf16(q, y, tokens, q_stride, y_stride, group, size, k_cache, v_cache, token_stride, blocks, block_size,
                    length, window, scale);
    return;
  }
  float *keys = __builtin_malloc((n + group) * size * 2 * sizeof *keys), *values = keys + n * size;
  float *queries = values + n * size, *out = queries + group * size;
  for (int64_t j = 0; j < n; j++) {
    int64_t at = (blocks[(oldest + j) / block_size] * block_size + (oldest + j) % block_size) * token_stride;
    widen_all(k_cache + at, keys + j * size, size);
    widen_all(v_cache + at, values + j * size, size);
  }
  const int32_t whole = 0; /* one block, which begins at `oldest` */
  for (int64_t t = 0; t < tokens; t++, q += q_stride, y += y_stride) {
    int64_t last = length - tokens + t, first = window && last >= window ? last - window + 1 : 0;
    widen_all(q, queries, group * size);
    attend_one_float(queries, out, group, size, keys - oldest * size, values - oldest * size, size, &whole, length, first,
                     last, scale);
    for (int64_t i = 0; i < group * size; i++) y[i] = narrow(out[i]);
  }
  __builtin_free(keys);
}
