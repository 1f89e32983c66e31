/* Products with bfloat16 panels in tiles of AMX, where the kernel lends them: 16 tokens by 16 rows of W by 32 columns in
   one instruction. A token is a row of a tile: its sums take no other row, and are taken in one order whatever the
   number of tokens, so its bits do not depend on what is beside it. A float32 token is three bfloat16 ones, whose sum
   it is, and products of bfloat16 numbers are exact in float32. Numbers below 2^-126 count as 0. */
#include <immintrin.h>

enum { TILE = 16, STEP = 32 /* columns */, ACROSS = 3, LAID = 1 << 20 /* bytes */, SOON = 1 << 13 };
_Static_assert(WIDTH == ACROSS * TILE, "tiles across a panel");

typedef struct {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} tile_shapes;

extern long syscall(long, ...);
static int lent; /* whether this process may use tiles */

__attribute__((constructor)) static void ask_for_tiles(void) {
  lent = !syscall(158 /* arch_prctl */, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18L /* XTILEDATA */);
}

/* Tiles 0 to 5 are sums, three of each of two lots of tokens; 6 are tokens, 7 is W. */
static void shape_tiles(int64_t tokens) {
  tile_shapes shapes = {.palette = 1};
  for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = i < 7 ? tokens : TILE;
  _tile_loadconfig(&shapes);
}

/* The first of three bfloat16 numbers, whose sum x is; x is left the others, which are 0 beside an infinity. */
INLINE hvec take_top(vec *x) {
  uvec bits = (uvec)*x, top = bits & 0xFFFF0000u;
  *x = pick((bits & 0x7FFFFFFFu) == 0x7F800000u, all(0), *x - (vec)top);
  return __builtin_convertvector(top >> 16, hvec);
}

/* Tokens as tiles read them: (lots of `lot` tokens, steps, parts, lot, 32 columns), with zeros where there are none. */
static void lay(const void *x, int wide, int64_t tokens, int64_t stride, int64_t columns, int64_t lot, bf16 *to) {
  int64_t parts = wide ? 3 : 1, steps = (columns + STEP - 1) / STEP;
  if (columns % STEP || tokens % lot) memset(to, 0, (tokens + lot - 1) / lot * steps * parts * lot * STEP * sizeof *to);
  for (int64_t t = 0; t < tokens; t++) {
    bf16 *row = to + (t / lot * steps * parts * lot + t % lot) * STEP;
    for (int64_t k = 0; k < columns; k += STEP, row += parts * lot * STEP) {
      int64_t n = columns - k < STEP ? columns - k : STEP;
      if (!wide) {
        memcpy(row, (const bf16 *)x + t * stride + k, n * sizeof *row);
        continue;
      }
      float some[STEP] = {};
      memcpy(some, (const float *)x + t * stride + k, n * sizeof *some);
      for (int j = 0; j < STEP; j += LANES) {
        vec rest = load(some + j);
        for (int i = 0; i < 3; i++) *(hvec *)(row + i * lot * STEP + j) = take_top(&rest);
      }
    }
  }
}

/* Sums of one lot of tokens or two, which lie `apart`, with a panel, whose last step is `last` if it is no whole one. */
INLINE void sum_tiles(const int lots, const int parts, const bf16 *x, int64_t lot, int64_t apart, const bf16 *w,
                      const bf16 *last, int64_t columns, int fetch, sums *out) {
  __asm__ volatile("" : : "r"(x), "r"(last) : "memory"); /* gcc does not see what tiles read */
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t k = 0; k < columns; k += STEP, w += STEP * WIDTH, x += parts * lot * STEP) {
    const bf16 *step = columns - k < STEP ? last : w;
    for (int line = 0; line < ACROSS * TILE && fetch; line++) __builtin_prefetch((const char *)w + SOON + 64 * line);
#define ADD(tile, sum, second) /* numbers of tiles are part of an instruction */ \
  _tile_loadd(7, step + 2 * TILE * tile, 4 * WIDTH);                             \
  for (int i = 0; i < parts; i++) {                                              \
    _tile_loadd(6, x + i * lot * STEP, 2 * STEP);                                \
    _tile_dpbf16ps(sum, 6, 7);                                                   \
    if (lots < 2) continue;                                                      \
    _tile_loadd(6, x + apart + i * lot * STEP, 2 * STEP);                        \
    _tile_dpbf16ps(second, 6, 7);                                                \
  }
    ADD(0, 0, 3)
    ADD(1, 1, 4)
    ADD(2, 2, 5)
#undef ADD
  }
  _tile_stored(0, out[0], sizeof *out);
  _tile_stored(1, out[0] + TILE, sizeof *out);
  _tile_stored(2, out[0] + 2 * TILE, sizeof *out);
  if (lots < 2) return;
  _tile_stored(3, out[lot], sizeof *out);
  _tile_stored(4, out[lot] + TILE, sizeof *out);
  _tile_stored(5, out[lot] + 2 * TILE, sizeof *out);
}

static void sum_panel(int64_t lots, int wide, const bf16 *x, int64_t lot, int64_t apart, const bf16 *w, const bf16 *last,
                      int64_t columns, int fetch, sums *out) {
  if (lots == 1 && wide) sum_tiles(1, 3, x, lot, apart, w, last, columns, fetch, out);
  else if (lots == 1) sum_tiles(1, 1, x, lot, apart, w, last, columns, fetch, out);
  else if (wide) sum_tiles(2, 3, x, lot, apart, w, last, columns, fetch, out);
  else sum_tiles(2, 1, x, lot, apart, w, last, columns, fetch, out);
}

/* As linear_bf16 or linear_wide: tokens in groups that a cache holds, laid out once for all panels. */
static int64_t linear_tiles(const void *x, int wide, int64_t tokens, int64_t stride, int64_t columns, const bf16 *w,
                            const void *bias, void *y, int64_t rows, int threads) {
  int64_t panels = (rows + WIDTH - 1) / WIDTH, size = (columns + STEP - 1) / STEP * STEP * (wide ? 3 : 1);
  int64_t bytes = wide ? sizeof(float) : sizeof(bf16), rest = columns % STEP;
  int64_t most = LAID / sizeof *w / size / (2 * TILE) * (2 * TILE);
  if (most < 2 * TILE) most = 2 * TILE;
  bf16 *laid = __builtin_malloc((tokens < most ? tokens + TILE : most) * size * sizeof *laid);
  if (!laid) return 1;
  for (int64_t begin = 0, n; begin < tokens; begin += n) {
    n = tokens - begin < most ? tokens - begin : most;
    int64_t lot = n < TILE ? n : TILE;
    lay((const char *)x + begin * stride * bytes, wide, n, stride, columns, lot, laid);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      shape_tiles(lot);
#pragma omp for schedule(static)
      for (int64_t p = 0; p < panels; p++) {
        const bf16 *panel = w + p * WIDTH * columns;
        bf16 last[STEP * WIDTH] = {};
        sums out[2 * TILE];
        memcpy(last, panel + (columns - rest) * WIDTH, rest * WIDTH * sizeof *w);
        for (int64_t t = 0, m; t < n; t += m) {
          m = n - t < 2 * lot ? n - t : 2 * lot;
          sum_panel(m > lot ? 2 : 1, wide, laid + t * size, lot, lot * size, panel, last, columns, !t, out);
          for (int64_t i = 0; i < m; i++)
            if (wide) put_float(out[i], bias, y, begin + t + i, rows, p * WIDTH);
            else put_bf16(out[i], bias, y, begin + t + i, rows, p * WIDTH);
        }
      }
      _tile_release();
    }
  }
  __builtin_free(laid);
  return 0;
}
