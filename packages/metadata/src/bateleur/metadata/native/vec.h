/* Float vectors of the CPU's register width. */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint8_t bvec __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint16_t bf16;
typedef uint8_t fp8; /* e4m3 without infinity: 0x7F and 0xFF are NaN */
enum { FLOAT, BF16, FP8 }; /* dtypes of caches */

#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const void *p) { return *(const vec *)p; }
INLINE void store(void *p, vec v) { *(vec *)p = v; }
INLINE vec all(float x) { return x - (vec){}; }
INLINE vec pick(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }

/* Sum of all lanes, by pairwise halving. */
INLINE float sum_of(vec v) {
  ivec lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (int half = LANES / 2; half; half /= 2) v += __builtin_shuffle(v, lane ^ half);
  return v[0];
}

/* Lane i is the sum of v[i]'s lanes, added in the order of `sum_of`. Overwrites v. */
INLINE vec sums_of(vec v[LANES]) {
  ivec lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
#define HALVED(half)                                                                                                    \
  if (half < LANES) {                                                                                                   \
    ivec second = (lane & half) != 0, own = lane + (second & LANES), other = (lane ^ half) + (second & LANES);          \
    _Pragma("GCC unroll 8") for (int i = 0; i < half; i++) v[i] =                                                       \
        __builtin_shuffle(v[i], v[i + half], own) + __builtin_shuffle(v[i], v[i + half], other);                        \
  }
  HALVED(8) HALVED(4) HALVED(2) HALVED(1)
#undef HALVED
  return v[0];
}

/* Largest lane, ignoring NaN. */
INLINE float most_of(vec v) {
  float most = v[0];
  for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
  return most;
}

/* e^x within two units in the last place; 0 below -87, infinity above 88.4, NaN for NaN. */
INLINE vec exp_of(vec x) {
  ivec small = x < -87.0f;
  x = pick(x > 89.0f, all(89.0f), x); /* gives the exponent of infinity */
  vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* round to the nearest integer */
  vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vec y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  ivec exponent = (__builtin_convertvector(pick(small | (x != x), all(0.0f), n), ivec) + 127) << 23;
  return pick(small, all(0.0f), y * (vec)exponent);
}

INLINE float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

/* Round to nearest even like torch; NaN stays NaN. */
INLINE bf16 narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7FC0;
  return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

/* Saturate at 448 and round to nearest even; NaN stays NaN. */
INLINE fp8 narrow_fp8(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 24 & 0x80;
  float size = x < 0 ? -x : x;
  if (x != x) return sign | 0x7F;
  if (size >= 448) return sign | 0x7E;
  if (size < 0x1p-6f) { /* a multiple of 2^-9: the last bit of 2^14 */
    float shifted = size + 0x1p14f;
    memcpy(&bits, &shifted, 4);
    return sign | (bits & 0xF);
  }
  memcpy(&bits, &size, 4);
  return sign | (((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3));
}

/* Exact. Subnormal numbers are computed without float32's, which some CPUs handle in microcode. */
INLINE vec load_fp8(const fp8 *p) {
  uvec x = __builtin_convertvector(*(const bvec *)p, uvec), bits = (x & 0x7F) << 20;
  uvec small = (uvec)((ivec)bits < 1 << 23), nan = (uvec)((ivec)bits == 0x7F << 20);
  vec y = (vec)(bits + (120u << 23) + (small & 1u << 23)) - (vec)(small & 121u << 23); /* 2^-6 (1 + m / 8) - 2^-6 */
  return (vec)((uvec)y | nan | (x & 0x80) << 24);
}

/* Both dtypes as floats, so that each function is written once. */
INLINE vec load_float(const float *p) { return load(p); }
INLINE vec load_bf16(const bf16 *p) { return (vec)(__builtin_convertvector(*(const hvec *)p, uvec) << 16); }
INLINE void store_float(float *p, vec v) { store(p, v); }
INLINE void store_bf16(bf16 *p, vec v) {
  uvec bits = (uvec)v, rounded = bits + 0x7FFF + ((bits >> 16) & 1), nan = (uvec){} + 0x7FC00000u;
  *(hvec *)p = __builtin_convertvector((uvec)pick(v != v, (vec)nan, (vec)rounded) >> 16, hvec);
}
INLINE float widen_float(float x) { return x; }
INLINE float widen_bf16(bf16 x) { return widen(x); }
INLINE float narrow_float(float x) { return x; }
INLINE bf16 narrow_bf16(float x) { return narrow(x); }

/* Load or store a vector at index i of a float (`wide`) or bfloat16 array. */
INLINE vec load_as(const void *p, int64_t i, int wide) {
  return wide ? load((const float *)p + i) : load_bf16((const bf16 *)p + i);
}
INLINE void store_as(void *p, int64_t i, int wide, vec v) {
  if (wide) store((float *)p + i, v);
  else store_bf16((bf16 *)p + i, v);
}
/* The same for n <= LANES numbers; the other lanes are read as 0 and not written. */
INLINE vec load_some(const void *p, int64_t i, int wide, int64_t n) {
  if (n >= LANES) return load_as(p, i, wide);
  float some[LANES] = {};
  for (int64_t j = 0; j < n; j++) some[j] = wide ? ((const float *)p)[i + j] : widen(((const bf16 *)p)[i + j]);
  return load(some);
}
INLINE void store_some(void *p, int64_t i, int wide, int64_t n, vec v) {
  if (n >= LANES) store_as(p, i, wide, v);
  for (int64_t j = 0; j < n && n < LANES; j++)
    if (wide) ((float *)p)[i + j] = v[j];
    else ((bf16 *)p)[i + j] = narrow(v[j]);
}
INLINE vec rounded(vec v, int wide) {
  bf16 some[LANES];
  if (wide) return v;
  store_bf16(some, v);
  return load_bf16(some);
}
INLINE vec silu(vec x) { return x / (1.0f + exp_of(-x)); }
