/* Paged attention on a CPU: every query by itself, so that its bits depend on its own row alone.

   q (tokens, heads, size) with a stride, caches (blocks, block_size, kv_heads, size), tables (rows, blocks of a row),
   lengths (rows), starts (rows + 1). */
#include "vec.h"
#include <math.h>

enum { TILE = 64, VECS = 4, PART = 64 /* tokens */, AT_ONCE = 1 << 14 /* entries of queries */ };
enum { FEW = 2 /* queries, for which keys are widened one by one */, MOST_WIDENED = 1024 };

#define TYPE float
#define NAME(what) what##_float
#define LOAD load_float
#define WIDEN widen_float
#define NARROW narrow_float
#include "attention.h"
#undef TYPE
#undef NAME
#undef LOAD
#undef WIDEN
#undef NARROW

static void widen_all(const bf16 *x, float *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = widen(x[i]);
}

#define WIDENS
#define TYPE bf16
#define NAME(what) what##_bf16
#define LOAD load_bf16
#define WIDEN widen_bf16
#define NARROW narrow_bf16
#include "attention.h"
