/* Products with plain matrices of floats or halves, several at once: prerouter heads, a router that is not quantised.
   Included once per variant. */

typedef struct {
  const void *w;
  const float *x;
  float *y;
  int n, k, t, chunk, chunks, half, gelu;
} KERNEL(DenseContext);

static void KERNEL(dense_chunk)(void *context, int chunk) {
  KERNEL(DenseContext) *c = context;
  size_t which = chunk / c->chunks;
  int first = chunk % c->chunks * c->chunk, last = first + c->chunk < c->n ? first + c->chunk : c->n;
  for (int n = first; n < last; n++)
    for (int t = 0; t < c->t; t++) {
      size_t row = (which * c->n + n) * c->k;
      const float *x = c->x + (which * c->t + t) * c->k;
      float value = c->half ? KERNEL(dot_half)((const uint16_t *)c->w + row, x, c->k)
                            : KERNEL(dot)((const float *)c->w + row, x, c->k);
      c->y[(which * c->t + t) * c->n + n] = c->gelu ? 0.5f * value * (1 + erff(value * (float)M_SQRT1_2)) : value;
    }
}

/* y [count, t, n] = w [count, n, k] of x [count, t, k], through the exact gelu where asked for. */
static void KERNEL(dense)(Handle *h, const void *w, int half, const float *x, int count, int t, int n, int k, int gelu,
                          float *y) {
  size_t row = (size_t)k * (half ? 2 : 4);
  int chunk = chunk_rows(h, row, (size_t)count * n);
  KERNEL(DenseContext) c = {w, x, y, n, k, t, chunk, chunks_of(n, chunk), half, gelu};
  pool_run(&h->pool, KERNEL(dense_chunk), &c, count * c.chunks, (size_t)count * t * n * row);
}
