/* What every kernel is given: quantised matrices, prepared activations, the handle with its threads and its scratch. */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#define GROUP 64       /* weights that share a scale and a bias */
#define CHUNK_ROWS 32  /* rows of a matrix that one thread takes at a time */
#define SCRATCHES 16

typedef float v8f __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t v8i __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint8_t v8u __attribute__((vector_size(8), aligned(1), may_alias));

/* A quantised matrix [n, k] in MLX's layout, y = W x, w = scale * code + bias; beside it, where rank > 0, an unmerged
   correction y += lora * up (down x). */
typedef struct {
  const uint8_t *w;       /* n rows of k * bits / 8 bytes, codes from the low bits up */
  const void *s, *b;      /* [n, k / 64], fp32 where wide, else bf16 */
  const float *down, *up; /* [rank, k], [n, rank] */
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

typedef struct {
  Pool pool;
  int int8;   /* activations in 8 bits, else fp32 */
  int simd;   /* the variant for this processor, else plain C */
  void *scratch[SCRATCHES];
  size_t room[SCRATCHES];
} Handle;

/* At least `bytes` of memory number `which`, 64-byte aligned; what it held is lost when it grows. */
static void *scratch(Handle *h, int which, size_t bytes) {
  if (h->room[which] < bytes) {
    free(h->scratch[which]);
    h->room[which] = (bytes * 5 / 4 + 4095) & ~(size_t)4095;
    if (posix_memalign(&h->scratch[which], 64, h->room[which])) abort();
  }
  return h->scratch[which];
}

static inline float widen(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
