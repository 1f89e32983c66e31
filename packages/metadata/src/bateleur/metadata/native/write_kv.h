/* Rotary embedding and the write of keys and values for one TYPE of both; attention.c includes it for each TYPE. */

/* Rotate lanes i to i + n - 1 of both halves of a head. x may equal y. */
INLINE void NAME(turn_some)(const int n, const TYPE *x, TYPE *y, int64_t half, const TYPE *cos, const TYPE *sin) {
  float a[LANES], b[LANES];
  for (int i = 0; i < n; i++) a[i] = WIDEN(x[i]), b[i] = WIDEN(x[i + half]);
  TYPE c[LANES], d[LANES];
  for (int i = 0; i < n; i++) {
    c[i] = NARROW(a[i] * WIDEN(cos[i]) + b[i] * WIDEN(sin[i]));
    d[i] = NARROW(b[i] * WIDEN(cos[i + half]) + a[i] * WIDEN(sin[i + half]));
  }
  memcpy(y, c, n * sizeof *y);
  memcpy(y + half, d, n * sizeof *y);
}

/* Rotate the first `lanes` lanes of `heads` heads; lane i is paired with lane i + lanes / 2. x may equal y. */
static void NAME(turn)(const TYPE *x, TYPE *y, int64_t heads, int64_t size, const TYPE *cos, const TYPE *sin,
                       int64_t lanes) {
  for (int64_t h = 0, half = lanes / 2; h < heads; h++, x += size, y += size) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) NAME(turn_some)(LANES, x + i, y + i, half, cos + i, sin + i);
    for (; i < half; i++) NAME(turn_some)(1, x + i, y + i, half, cos + i, sin + i);
  }
}

/* Store x / scale, `size` numbers of each of `heads` heads, in a cache of dtype `kind`. scales: one a head, or NULL. */
static void NAME(keep)(const TYPE *x, void *to, int kind, int64_t heads, int64_t size, const float *scales) {
  for (int64_t h = 0; h < heads; h++)
    for (int64_t i = h * size; i < (h + 1) * size; i++) {
      float y = scales ? WIDEN(x[i]) / scales[h] : WIDEN(x[i]);
      if (kind == FP8) ((fp8 *)to)[i] = narrow_fp8(y);
      else if (kind == BF16) ((bf16 *)to)[i] = narrow(y);
      else ((float *)to)[i] = y;
    }
}

/* Rotate q and k, store k and v by slot. Returns 0, or the first slot outside of the cache (then nothing is stored). */
int64_t NAME(write)(TYPE *q, const TYPE *k, const TYPE *v, void *k_cache, void *v_cache, const int64_t *slots,
                    const TYPE *cos, const TYPE *sin, const float *scales, int64_t kind, int64_t tokens, int64_t cached,
                    int64_t heads, int64_t kv_heads, int64_t size, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                    int64_t turn_stride, int64_t lanes) {
  int64_t width = kv_heads * size, bytes = width * (kind == FLOAT ? sizeof(float) : kind == BF16 ? sizeof(bf16) : sizeof(fp8));
  TYPE turned[width];
  for (int64_t t = 0; t < tokens; t++)
    if (slots[t] >= cached) return slots[t];
  for (int64_t t = 0; t < tokens; t++, q += q_stride, k += k_stride, v += v_stride) {
    const TYPE *cos_t = cos + t * turn_stride, *sin_t = sin + t * turn_stride;
    if (lanes) NAME(turn)(q, q, heads, size, cos_t, sin_t, lanes);
    if (slots[t] < 0) continue;
    memcpy(turned, k, width * sizeof(TYPE));
    if (lanes) NAME(turn)(k, turned, kv_heads, size, cos_t, sin_t, lanes);
    NAME(keep)(turned, (char *)k_cache + slots[t] * bytes, kind, kv_heads, size, scales);
    NAME(keep)(v, (char *)v_cache + slots[t] * bytes, kind, kv_heads, size, scales ? scales + kv_heads : 0);
  }
  return 0;
}
