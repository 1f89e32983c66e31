/* Paged attention on a CPU: every query by itself, so that its bits depend on its own row alone.

   q (tokens, heads, size) with a stride, caches (blocks, block_size, kv_heads, size), tables (rows, blocks of a row),
   lengths (rows), starts (rows + 1). */
#include "vec.h"
#include <math.h>

enum { TILE = 64, VECS = 4, PART = 64 /* tokens */, AT_ONCE = 1 << 14 /* entries of queries */ };
enum { FEW = 2 /* queries, for which keys are widened one by one */, MOST_WIDENED = 1024 };
enum { MOST_FETCHING = 16 /* queries: more of them take as long as memory does */ };

/* The first position that a token behind `past` others sees. */
INLINE int64_t first_seen(int64_t past, int64_t window) { return window && past >= window ? past - window + 1 : 0; }

/* A share of what is read soon, to the second level of caches: the first has too few misses under way at once. */
INLINE void fetch(const char *const *vectors, int64_t bytes, int64_t share, int64_t shares) {
  int64_t lines = (bytes + 63) / 64;
  for (int64_t line = share * lines / shares; line < (share + 1) * lines / shares; line++)
    for (int i = 0; i < 2 * TILE; i++) __builtin_prefetch(vectors[i] + 64 * line, 0, 2);
}

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
