/* Paged attention on a CPU. Each query is computed separately, so that its result does not depend on other rows.

   q (tokens, heads, size) with a token stride, caches (blocks, block_size, kv_heads, size), tables (rows, max_blocks),
   lengths (rows), starts (rows + 1), scales (2, kv_heads) or NULL. Caches have the dtype of q, or another one: `kind`. */
#include "vec.h"
#include <math.h>

enum { TILE = 64, VECS = 4, PART = 64 /* tokens */, AT_ONCE = 1 << 14 /* entries of queries */ };
/* Up to FEW queries widen keys on the fly. More queries share a float32 copy, for heads up to MOST_WIDENED. */
enum { FEW = 2, MOST_WIDENED = 1024 };

#define TYPE float
#define NAME(what) what##_float
#define WIDEN widen_float
#define NARROW narrow_float
#include "write_kv.h"
#define LOAD load_float
#include "attention.h"
#undef TYPE
#undef NAME
#undef LOAD
#undef WIDEN
#undef NARROW

#define WIDENS
#define TYPE bf16
#define NAME(what) what##_bf16
#define WIDEN widen_bf16
#define NARROW narrow_bf16
#include "write_kv.h"
#define LOAD load_bf16
#include "attention.h"
#undef TYPE
#undef NAME
#undef LOAD

#define TYPE fp8
#define NAME(what) what##_fp8
#define LOAD load_fp8
#include "attention.h"
