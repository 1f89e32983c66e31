/* Samples a token of a row without sorting the vocabulary.

   A row is read in blocks of BLOCK tokens; their largest logits tell which blocks have to be read again. Logarithms,
   exponentials and sums are approximations with error bounds. If the bounds do not decide, the result is UNSURE and torch
   decides, so that tokens equal those of torch. Scores are logit / temperature + noise, see noise.py. */
#pragma once
#include "vec.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>

enum { BLOCK = 128, BAD = -1, UNSURE = -2 };

#define MASS_ERROR 1e-5  /* relative error of sums of masses: exponentials, sums, masses below 2^-40 */
#define NOISE_ERROR 2e-5 /* error of a score by torch in float32, without the rounding of the sum */
#define NO_MASS 28.0f    /* exp(-28) < 2^-40: smaller masses are 0 */

typedef struct {
  const void *logits;
  int narrow; /* bfloat16 */
  int64_t size, blocks;
  float temperature, best; /* best: the largest logit over the temperature */
  const float *peaks;      /* of every block, over the temperature */
  const uint32_t *words;
  uint32_t low, high;
} row;

/* Tokens whose logit is above `least`, or equal to it and whose id is at most `last`. */
typedef struct {
  float least;
  int64_t last;
} cut;

static const cut everything = {-FLT_MAX, INT64_MAX};

INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

/* A block of logits as floats; -inf after the last. */
INLINE void load_block(const void *logits, int narrow, int64_t size, int64_t block, float *restrict x) {
  int64_t first = block * BLOCK, n = at_most(size - first, BLOCK);
  uint32_t *bits = (uint32_t *)x;
  if (!narrow)
    memcpy(x, (const float *)logits + first, n * sizeof(float));
  else if (n == BLOCK)
    for (int i = 0; i < BLOCK; i++) bits[i] = (uint32_t)((const bf16 *)logits)[first + i] << 16;
  else
    for (int i = 0; i < n; i++) bits[i] = (uint32_t)((const bf16 *)logits)[first + i] << 16;
  for (int64_t i = n; i < BLOCK; i++) x[i] = -INFINITY;
}

INLINE float largest(const float *x) {
  vec most = load(x);
  for (int i = LANES; i < BLOCK; i += LANES) most = pick(load(x + i) > most, load(x + i), most);
  return most_of(most);
}

/* The largest logit of every block, and of all; NaN if there is one. */
static float find_peaks(const void *logits, int narrow, int64_t size, float *peaks) {
  float x[BLOCK] __attribute__((aligned(64))), best = -INFINITY;
  ivec broken = {};
  for (int64_t b = 0; b * BLOCK < size; b++) {
    load_block(logits, narrow, size, b, x);
    for (int i = 0; i < BLOCK; i += LANES) broken |= load(x + i) != load(x + i);
    peaks[b] = largest(x);
    if (peaks[b] > best) best = peaks[b];
  }
  for (int i = 0; i < LANES; i++)
    if (broken[i]) return NAN;
  return best;
}

static int64_t first_maximum(const void *logits, int narrow, int64_t size, const float *peaks, float best) {
  float x[BLOCK];
  int64_t b = 0, i = 0;
  while (peaks[b] != best) b++;
  load_block(logits, narrow, size, b, x);
  while (x[i] != best) i++;
  return b * BLOCK + i;
}

/* Logits of a block over the temperature. */
INLINE void temper(const row *r, int64_t block, float *restrict x) {
  load_block(r->logits, r->narrow, r->size, block, x);
  if (r->temperature != 1)
    for (int i = 0; i < BLOCK; i++) x[i] /= r->temperature;
}

INLINE int keeps(cut c, float x, int64_t token) { return x > c.least || (x == c.least && token <= c.last); }

/* The k-th largest of n numbers, from 1; reorders them (Hoare 1961). */
static float kth(float *x, int64_t n, int64_t k) {
  int64_t left = 0, right = n - 1, at = k - 1;
  while (left < right) {
    float pivot = x[left + (right - left) / 2];
    int64_t i = left, j = right;
    while (i <= j) {
      while (x[i] > pivot) i++;
      while (x[j] < pivot) j--;
      if (i <= j) {
        float swap = x[i];
        x[i++] = x[j], x[j--] = swap;
      }
    }
    if (at <= j) right = j;
    else if (at >= i) left = i;
    else break;
  }
  return x[at];
}

/* Apply top_k to the tokens that are at least `least`. room: for 2 * `size` numbers. */
static cut top(const row *r, float least, int64_t k, float *room) {
  float x[BLOCK] __attribute__((aligned(64))), *tall = room, *order = room + r->size, edge = least;
  int64_t n = 0, above = 0;
  if (k <= r->blocks) { /* k blocks have a token that is at least the k-th largest peak */
    memcpy(order, r->peaks, r->blocks * sizeof(float));
    float peak = kth(order, r->blocks, k);
    if (peak > edge) edge = peak;
  }
  for (int64_t b = 0; b < r->blocks; b++)
    if (r->peaks[b] >= edge) {
      temper(r, b, x);
      for (int i = 0; i < BLOCK; i++)
        if (x[i] >= edge) tall[n++] = x[i];
    }
  if (n <= k) return (cut){edge, INT64_MAX};
  memcpy(order, tall, n * sizeof(float));
  edge = kth(order, n, k);
  for (int64_t i = 0; i < n; i++) above += tall[i] > edge;
  for (int64_t b = 0, ties = k - above;; b++)
    if (r->peaks[b] >= edge) {
      temper(r, b, x);
      for (int i = 0; i < BLOCK; i++)
        if (x[i] == edge && !--ties) return (cut){edge, b * BLOCK + i};
    }
}

/* The threshold of kept tokens of a block, except for the `ties` in the block of `last`. */
static float edge_in(cut c, const float *x, int64_t block, float *ties) {
  int64_t last = c.last - block * BLOCK;
  *ties = 0;
  if (last >= BLOCK - 1) return nextafterf(c.least, -INFINITY);
  for (int64_t i = 0; i <= last; i++) *ties += x[i] == c.least;
  return c.least;
}

/* The sums of exp(x - best) over the kept tokens, and over those that `inner` keeps. */
static double masses(const row *r, cut c, cut inner, double *before) {
  float x[BLOCK] __attribute__((aligned(64))), ties, inner_ties;
  double mass = 0, above = 0, tie = exp((double)c.least - r->best), inner_tie = exp((double)inner.least - r->best);
  for (int64_t b = 0; b < r->blocks; b++) {
    if (r->peaks[b] < c.least || r->peaks[b] < r->best - NO_MASS) continue;
    temper(r, b, x);
    float edge = edge_in(c, x, b, &ties), inner_edge = edge_in(inner, x, b, &inner_ties);
    vec sum = {}, inner_sum = {};
    for (int i = 0; i < BLOCK; i += LANES) {
      vec v = load(x + i), part = exp_of(v - r->best);
      sum += pick(v > edge, part, (vec){});
      inner_sum += pick(v > inner_edge, part, (vec){});
    }
    mass += sum_of(sum) + ties * tie;
    above += sum_of(inner_sum) + inner_ties * inner_tie;
  }
  *before = above;
  return mass;
}

typedef struct {
  double lead, second;
  int64_t token;
  float logit;
} winner;

static double slack(double score) { return NOISE_ERROR + fabs(score) * 0x1p-22; }

/* Add a token to a draw; `bits` are its random bits. */
static void contend(winner *w, float x, uint32_t bits, int64_t token) {
  float part = (double)(float)bits * 0x1.fffffep-32, u = (double)part + 0x1p-32; /* two roundings, as in torch */
  double score = x - log(-log1p(-(double)u));
  if (score > w->lead)
    w->second = w->lead, w->lead = score, w->token = token, w->logit = x;
  else if (score > w->second)
    w->second = score;
}

/* The kept token with the largest score. A score is computed only if its upper bound, which needs no logarithm, reaches
   the best so far: noise is at most -log(u), and the bits of a float are a lower bound of its logarithm. */
static winner draw_among(const row *r, cut c) {
  float x[BLOCK] __attribute__((aligned(64))), bound[BLOCK] __attribute__((aligned(64)));
  uint32_t bits[BLOCK] __attribute__((aligned(64)));
  winner w = {-INFINITY, -INFINITY, BAD, 0};
  float floor = -FLT_MAX;
  for (int64_t b = 0; b < r->blocks; b++) {
    if (r->peaks[b] < c.least || r->peaks[b] + 22.5f < floor) continue;
    int64_t first = b * BLOCK, n = at_most(r->size - first, BLOCK);
    temper(r, b, x);
    const uint32_t *word = r->words + first;
    if (n < BLOCK) {
      memcpy(bits, word, n * 4);
      memset(bits + n, 0, (BLOCK - n) * 4);
      word = bits;
    }
    for (int i = 0; i < BLOCK; i++) {
      uint32_t y = ((word[i] ^ r->low) * 0x7FEB352Du) ^ r->high;
      y = (y ^ (y >> 15)) * 0x846CA68Bu;
      bits[i] = (y ^ (y >> 16)) * 0x2C1B3C6Du & 0x7FFFFFFF;
      union { float f; int32_t i; } u = {(float)(int32_t)bits[i] * 0x1.fffffep-32f + 0x1p-32f};
      bound[i] = x[i] + ((float)(0x3F800000 - u.i) * 8.262958e-08f + 1e-3f);
    }
    if (!(largest(bound) >= floor)) continue;
    for (int i = 0; i < BLOCK; i++)
      if (bound[i] >= floor && keeps(c, x[i], first + i)) {
        contend(&w, x[i], bits[i], first + i);
        double reach = w.lead - 2 * slack(w.lead);
        if (reach > floor) floor = nextafterf((float)reach, -INFINITY);
      }
  }
  return w;
}

/* top_p needs no threshold: if the winner of a larger set is in the nucleus, it is the sample. If not, it is removed with
   all tokens that are not above it, and the rest draws again. */
static int64_t draw_nucleus(const row *r, cut c, double top_p) {
  winner w = draw_among(r, c);
  while (w.lead - w.second > slack(w.lead)) {
    cut above = {w.logit, w.token - 1};
    double before, limit = masses(r, c, above, &before) * top_p;
    if (before * (1 + MASS_ERROR) < limit * (1 - MASS_ERROR)) return w.token;
    if (before * (1 - MASS_ERROR) < limit * (1 + MASS_ERROR)) break;
    w = draw_among(r, above);
  }
  return UNSURE;
}

/* param: sampling parameters: temperature, log(min_p) or -inf, top_k, top_p. */
static int64_t draw_row(row *r, const float *param, float *peaks, float *room) {
  float best = find_peaks(r->logits, r->narrow, r->size, peaks);
  if (!(best > -INFINITY)) return BAD;
  if (!(param[0] > 0)) return first_maximum(r->logits, r->narrow, r->size, peaks, best);
  for (int64_t b = 0; b < r->blocks; b++) peaks[b] /= param[0];
  r->temperature = param[0], r->best = best / param[0];
  if (r->best == INFINITY) return UNSURE;
  cut c = everything;
  if (r->best + param[1] > c.least) c.least = r->best + param[1];
  if (param[2] >= 1 && param[2] < r->size) c = top(r, c.least, param[2], room);
  if (param[3] < 1) return draw_nucleus(r, c, param[3]);
  winner w = draw_among(r, c);
  return w.lead - w.second > slack(w.lead) ? w.token : UNSURE;
}

static uint64_t fmix64(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDull;
  x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53ull;
  return x ^ (x >> 33);
}

/* The random words of a row, from `seed` and the name of the draw. */
INLINE void key_row(row *r, uint64_t seed, uint64_t name) {
  uint64_t word = fmix64(fmix64(seed + 0x9E3779B97F4A7C15ull) ^ name);
  r->low = (uint32_t)word, r->high = (uint32_t)(word >> 32);
}
