/* Activations as the dot products want them, and several matrices with one input. Included once per variant. */

/* --- activations ------------------------------------------------------------------------------------------------ */

typedef struct {
  Rows *rows;
  int int8;
} KERNEL(PrepareContext);

/* Rounds one row to 8 bits per group of 64, or only sums its groups. */
static void KERNEL(prepare_row)(void *context, int t) {
  KERNEL(PrepareContext) *c = context;
  Rows *r = c->rows;
  const float *x = r->x + (size_t)t * r->k;
  float *d = r->d + (size_t)t * r->pitch, *s = r->s + (size_t)t * r->pitch;
  for (int g = r->groups; g < r->pitch; g++) d[g] = s[g] = 0;
  for (int g = 0; g < r->groups; g++, x += GROUP) {
    if (!c->int8) {
      v8f sum = {0};
      for (int i = 0; i < GROUP; i += 8) sum += KERNEL(load8)(x + i);
      d[g] = 1;
      s[g] = KERNEL(sum8)(sum);
      continue;
    }
    float most = 0;
    for (int i = 0; i < GROUP; i++) most = fmaxf(most, fabsf(x[i]));
    float unit = most / 127, inverse = unit > 0 ? 1 / unit : 0;
    int8_t *q = r->q + (size_t)t * r->k + g * GROUP;
    int32_t sum = 0;
    for (int i = 0; i < GROUP; i++) {
      float shifted = x[i] * inverse + 12582912.0f; /* 1.5 * 2^23: the low bits are the nearest integer */
      uint32_t bits;
      memcpy(&bits, &shifted, 4);
      int8_t code = (int8_t)bits;
      q[(i & 1) * 32 + i / 2] = code;
      sum += code;
    }
    d[g] = unit;
    s[g] = unit * (float)sum; /* of the rounded values, or the bias term would not fit them */
  }
}

/* Fills `r` for x [t, k]; uses scratch `which` and the one after it. */
static void KERNEL(prepare)(Handle *h, int which, Rows *r, const float *x, int t, int k, int int8) {
  int groups = k / GROUP, pitch = (groups + 7) & ~7;
  float *sums = scratch(h, which, sizeof(float) * 2 * t * pitch);
  *r = (Rows){x, scratch(h, which + 1, int8 ? (size_t)t * k : 1), sums, sums + (size_t)t * pitch, t, k, groups, pitch};
  KERNEL(PrepareContext) context = {r, int8};
  pool_run(&h->pool, KERNEL(prepare_row), &context, t, (size_t)t * k * 8);
}

/* --- several matrices, one input --------------------------------------------------------------------------------- */

#define MOST_LINEARS 8

typedef struct {
  const Rows *rows;
  const Linear *const *linears;
  float *const *y;
  float *low; /* [count][t][rank]: what the corrections' first halves gave */
  int lows[MOST_LINEARS], starts[MOST_LINEARS + 1], chunk, int8; /* first chunk of each; rows of a chunk */
} KERNEL(LinearsContext);

static void KERNEL(correct)(void *context, int chunk) {
  KERNEL(LinearsContext) *c = context;
  int which = 0, r = chunk;
  while (r >= c->linears[which]->rank) r -= c->linears[which++]->rank;
  const Linear *l = c->linears[which];
  for (int t = 0; t < c->rows->t; t++)
    c->low[c->lows[which] + t * l->rank + r] =
        KERNEL(dot_half)(l->down + (size_t)r * l->k, c->rows->x + (size_t)t * l->k, l->k) * l->lora;
}

static void KERNEL(multiply)(void *context, int chunk) {
  KERNEL(LinearsContext) *c = context;
  int which = 0;
  while (chunk >= c->starts[which + 1]) which++;
  const Linear *l = c->linears[which];
  int first = (chunk - c->starts[which]) * c->chunk, last = first + c->chunk < l->n ? first + c->chunk : l->n;
  for (int t = 0; t < c->rows->t; t++) {
    float *y = c->y[which] + (size_t)t * l->n;
    KERNEL(products)(y + first, l, 0, first, last - first, c->rows, t, c->int8);
    if (!l->rank) continue;
    const float *low = c->low + c->lows[which] + (size_t)t * l->rank;
    for (int n = first; n < last; n++) y[n] += KERNEL(dot_half)(l->up + (size_t)n * l->rank, low, l->rank);
  }
}

/* y[i] [t, n_i] = linears[i] of x [t, k]; all have 4 bits, or all have 8: routers and gates, whose activations stay
   fp32. Uses scratches 0 to 2. */
static void KERNEL(linears)(Handle *h, const float *x, int t, int count, const Linear *const *l, float *const *y) {
  Rows rows;
  int int8 = h->int8 && l[0]->bits == 4, ranks = 0, low = 0;
  size_t row = (size_t)l[0]->k * l[0]->bits / 8, all = 0;
  for (int i = 0; i < count; i++) all += l[i]->n;
  KERNEL(prepare)(h, 0, &rows, x, t, l[0]->k, int8);
  KERNEL(LinearsContext) c = {&rows, l, y, NULL, {0}, {0}, chunk_rows(h, row, all), int8};
  for (int i = 0; i < count; i++) {
    c.lows[i] = low;
    low += t * l[i]->rank;
    ranks += l[i]->rank;
    c.starts[i + 1] = c.starts[i] + chunks_of(l[i]->n, c.chunk);
  }
  c.low = scratch(h, 2, sizeof(float) * (low + 1));
  if (ranks) pool_run(&h->pool, KERNEL(correct), &c, ranks, (size_t)t * ranks * l[0]->k * 4);
  pool_run(&h->pool, KERNEL(multiply), &c, c.starts[count], t * all * row);
}
