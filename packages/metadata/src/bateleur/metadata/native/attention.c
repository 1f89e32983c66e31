/* Paged attention on a CPU, for rows of few tokens: every query by itself, so that its bits depend on its own row alone.

   q (tokens, heads, size) with a stride, caches (blocks, block_size, kv_heads, size), tables (rows, blocks of a row),
   lengths (rows), starts (rows + 1). */
#include "vec.h"
#include <math.h>

enum { TILE = 64, VECS = 4 };

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

#define TYPE bf16
#define NAME(what) what##_bf16
#define LOAD load_bf16
#define WIDEN widen_bf16
#define NARROW narrow_bf16
#include "attention.h"
