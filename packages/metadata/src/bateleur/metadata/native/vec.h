/* Vectors of as many floats as a register of this processor holds, and how many of them there are to sum in. */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, VECS = 4 };
#elif defined(__AVX__)
enum { LANES = 8, VECS = 2 };
#else
enum { LANES = 4, VECS = 4 };
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const void *p) { return *(const vec *)p; }
INLINE void store(void *p, vec v) { *(vec *)p = v; }
INLINE vec all(float x) { return x - (vec){}; }

INLINE float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

/* To the nearest, ties to even, and NaN stays one: as torch rounds. */
INLINE bf16 narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7FC0;
  return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
