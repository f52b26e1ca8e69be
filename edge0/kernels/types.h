/* What every kernel is given: quantised matrices, prepared activations, the handle with its threads and its scratch. */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#define GROUP 64          /* weights that share a scale and a bias */
#define CHUNK_BYTES 65536 /* of a matrix that one thread takes at a time: memory gives shorter runs more slowly */
#define AHEAD 4096        /* bytes that are asked for before they are multiplied */
#define SCRATCHES 16
#define ALWAYS inline __attribute__((always_inline)) /* what is unrolled by its caller's constants */

typedef float v8f __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t v8i __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint8_t v8u __attribute__((vector_size(8), aligned(1), may_alias));

/* A quantised matrix [n, k] in MLX's layout, y = W x, w = scale * code + bias; beside it, where rank > 0, an unmerged
   correction y += lora * up (down x). */
typedef struct {
  const uint8_t *w;       /* n rows of k * bits / 8 bytes, codes from the low bits up */
  const void *s, *b;      /* [n, k / 64], fp32 where wide, else bf16 */
  const uint16_t *down, *up; /* halves [rank, k], [n, rank] */
  int32_t n, k, bits, wide, rank;
  float lora;
} Linear;

/* Activations [t, k] as the dot products want them. int8: q per group 32 even then 32 odd elements, d its unit, s its
   sum; exact: x as it is and s its sum. d and s are [t, groups], rows padded to `pitch` floats. */
typedef struct {
  const float *x;
  int8_t *q;
  float *d, *s;
  int t, k, groups, pitch;
} Rows;

typedef struct Variant Variant;

typedef struct {
  Pool pool;
  int int8; /* activations in 8 bits, else fp32 */
  const Variant *variant;
  void *scratch[SCRATCHES];
  size_t room[SCRATCHES];
} Handle;

/* Rows of `bytes` each that one thread takes at a time, where a call goes through `rows` of them: few enough that
   threads which were held up leave their part to others. */
static int chunk_rows(const Handle *h, size_t bytes, size_t rows) {
  size_t most = CHUNK_BYTES / bytes, fair = rows / (4 * (size_t)(h->pool.count + 1)), take = most < fair ? most : fair;
  return take > 8 ? (int)take & ~7 : 8;
}

static inline int chunks_of(int rows, int each) { return (rows + each - 1) / each; }

/* At least `bytes` of memory number `which`, 64-byte aligned; what it held is lost when it grows. */
static void *scratch(Handle *h, int which, size_t bytes) {
  if (h->room[which] < bytes) {
    free(h->scratch[which]);
    h->room[which] = (bytes * 5 / 4 + 4095) & ~(size_t)4095;
    if (posix_memalign(&h->scratch[which], 64, h->room[which])) abort();
  }
  return h->scratch[which];
}

static inline float half_to_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, bits = half & 0x7fff;
  float value;
  if (bits >= 0x7c00) /* infinite, or not a number */
    bits = 0x7f800000 | bits << 13;
  else if (bits >= 0x400)
    bits = (bits << 13) + ((127 - 15) << 23);
  else {
    value = (float)bits * 5.9604645e-8f; /* 2^-24 */
    memcpy(&bits, &value, 4);
  }
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}

static inline float widen(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/* --- one layer's attention, between its two norms ----------------------------------------------------------------- */

typedef struct {
  const float *before, *after; /* weights of the norm before attention and of the one after the residual, [hidden] */
  float eps;
  int32_t hidden;
} Norms;

/* Gated attention with grouped queries. `turns`: angle per position of each rotated pair, [rotated / 2]. */
typedef struct {
  Norms norms;
  const Linear *q, *k, *v, *o; /* q gives each head its query, then its gate */
  const float *q_norm, *k_norm, *turns;
  int32_t heads, pairs, width, rotated;
  float eps, scale;
} Attention;

/* Attention on a latent (MLA), absorbed: queries meet the latent itself. */
typedef struct {
  Norms norms;
  const Linear *q_a, *q_b, *kv_a, *gate, *o;
  const float *q_norm, *kv_norm, *turns;
  const float *keys, *values; /* [heads, latent, plain], [heads, width, latent] */
  int32_t heads, latent, plain, rotated, width, q_rank;
  float q_eps, kv_eps, scale;
} Latent;

/* Linear attention by the delta rule, behind a short convolution of q, k and v: in one stream (decay per head,
   `lower` is 0) or in three (decay per head and key element, bounded below by exp(lower)). */
typedef struct {
  Norms norms;
  const Linear *in[6], *o; /* one stream: qkv, gate, beta, decay; three: q, k, v, gate, beta, decay */
  const float *taps[3];    /* of each stream, [taps, channels] */
  const float *rate, *shift, *norm; /* exp(A_log) [heads]; [heads] or [heads, key]; [value] */
  int32_t streams, key_heads, heads, key, value, count;
  float eps, lower;
} Delta;

/* A block of experts: stacks of the routed ones, and the shared one with its gate, `share`, where it has one. */
typedef struct {
  const Linear *gate, *up, *down, *shared_gate, *shared_up, *shared_down, *share;
} Mixture;

/* The kernels for one kind of processor. */
struct Variant {
  const char *name;
  void (*linears)(Handle *, const float *, int, int, const Linear *const *, float *const *);
  void (*experts)(Handle *, const Linear *, const Linear *, const Linear *, const float *, int, const uint32_t *, int,
                  float *);
  void (*gated)(Handle *, const Linear *, const Linear *, const Linear *, const Linear *, const float *, int, float *);
  void (*combine)(const float *, const float *, const float *, const float *, int, int, int, float, float *);
  void (*mixture)(Handle *, const Mixture *, const float *, const float *, int, const uint32_t *, int, const float *,
                  float, float *);
  void (*attention)(Handle *, const Attention *, const float *, int, int, float *, float *, int, float *, float *);
  void (*latent)(Handle *, const Latent *, const float *, int, int, float *, float *, float *, float *);
  void (*delta)(Handle *, const Delta *, const float *, int, float *const *, float *, float *, float *);
  void (*dense)(Handle *, const void *, int, const float *, int, int, int, int, int, float *);
};
