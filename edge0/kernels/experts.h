/* Routed experts: gate, up, SwiGLU and down of the chosen rows of a stack. Included once per variant. */

typedef struct {
  int slot, pair; /* pair: token * experts + which of its experts */
} KERNEL(Pair);

typedef struct {
  const Linear *gate, *up, *down;
  const Rows *x, *act;
  const KERNEL(Pair) *pairs; /* by slot */
  const int *firsts;         /* of each slot in use, its first pair; one more at the end */
  float *hidden, *raised, *y;
  int experts, chunk, chunks, int8; /* rows of a chunk; chunks of a matrix */
} KERNEL(ExpertsContext);

static int KERNEL(by_slot)(const void *left, const void *right) {
  const KERNEL(Pair) *a = left, *b = right;
  return a->slot != b->slot ? (a->slot > b->slot) - (a->slot < b->slot) : a->pair - b->pair;
}

static void KERNEL(raise)(void *context, int chunk) {
  KERNEL(ExpertsContext) *c = context;
  int group = chunk / c->chunks, width = c->gate->n;
  int first = chunk % c->chunks * c->chunk, last = first + c->chunk < width ? first + c->chunk : width;
  for (int i = c->firsts[group]; i < c->firsts[group + 1]; i++) {
    float *gate = c->hidden + (size_t)i * width + first, *up = c->raised + (size_t)i * width + first;
    int t = c->pairs[i].pair / c->experts, slot = c->pairs[i].slot;
    KERNEL(products)(gate, c->gate, slot, first, last - first, c->x, t, c->int8);
    KERNEL(products)(up, c->up, slot, first, last - first, c->x, t, c->int8);
    KERNEL(gate_row)(gate, gate, gate, up, last - first);
  }
}

static void KERNEL(lower)(void *context, int chunk) {
  KERNEL(ExpertsContext) *c = context;
  int group = chunk / c->chunks, width = c->down->n;
  int first = chunk % c->chunks * c->chunk, last = first + c->chunk < width ? first + c->chunk : width;
  for (int i = c->firsts[group]; i < c->firsts[group + 1]; i++) {
    float *y = c->y + (size_t)c->pairs[i].pair * width + first;
    KERNEL(products)(y, c->down, c->pairs[i].slot, first, last - first, c->act, i, c->int8);
  }
}

/* y [t, experts, D]: for each token its experts, rows `slots` [t, experts] of the stacks; unweighted.
   Uses scratches 0, 1 and 3 to 7. */
static void KERNEL(experts)(Handle *h, const Linear *gate, const Linear *up, const Linear *down, const float *x, int t,
                            const uint32_t *slots, int experts, float *y) {
  int count = t * experts, groups = 0;
  KERNEL(Pair) *pairs = scratch(h, 3, sizeof *pairs * count);
  int *firsts = scratch(h, 4, sizeof(int) * (count + 1));
  for (int i = 0; i < count; i++) pairs[i] = (KERNEL(Pair)){(int)slots[i], i};
  if (t > 1) qsort(pairs, count, sizeof *pairs, KERNEL(by_slot));
  for (int i = 0; i < count; i++)
    if (i == 0 || pairs[i].slot != pairs[i - 1].slot) firsts[groups++] = i;
  firsts[groups] = count;
  Rows rows, act;
  KERNEL(prepare)(h, 0, &rows, x, t, gate->k, h->int8);
  float *hidden = scratch(h, 5, sizeof(float) * 2 * count * gate->n), *raised = hidden + (size_t)count * gate->n;
  KERNEL(ExpertsContext) c = {gate, up, down, &rows, &act, pairs, firsts, hidden, raised, y, experts, 0, 0, h->int8};
  c.chunk = chunk_rows(h, gate->k / 2, (size_t)groups * gate->n);
  c.chunks = chunks_of(gate->n, c.chunk);
  pool_run(&h->pool, KERNEL(raise), &c, groups * c.chunks, (size_t)count * gate->n * gate->k);
  KERNEL(prepare)(h, 6, &act, hidden, count, down->k, h->int8);
  c.chunk = chunk_rows(h, down->k / 2, (size_t)groups * down->n);
  c.chunks = chunks_of(down->n, c.chunk);
  pool_run(&h->pool, KERNEL(lower), &c, groups * c.chunks, (size_t)count * down->n * down->k / 2);
}

/* out [t, D] = x + (the sum of weights [t, experts] times y [t, experts, D], + shared), within +-clip where that is
   above 0: NaN is 0 then. */
static void KERNEL(combine)(const float *x, const float *y, const float *weights, const float *shared, int t,
                            int experts, int width, float clip, float *out) {
  for (int i = 0; i < t; i++, x += width, shared += width, out += width) {
    for (int n = 0; n < width; n++) out[n] = 0;
    for (int e = 0; e < experts; e++, y += width) KERNEL(add_scaled)(out, y, *weights++, width);
    for (int n = 0; n < width; n++) out[n] = x[n] + (out[n] + shared[n]);
    if (clip > 0)
      for (int n = 0; n < width; n++) out[n] = out[n] > clip ? clip : out[n] < -clip ? -clip : out[n] == out[n] ? out[n] : 0;
  }
}

/* y [t, D] = down(silu(gate x) * up x), for a shared expert or a dense layer; times sigmoid(share x) where there is one.
   Uses scratches 0 to 4. */
static void KERNEL(gated)(Handle *h, const Linear *gate, const Linear *up, const Linear *down, const Linear *share,
                          const float *x, int t, float *y) {
  size_t width = (size_t)gate->n * t;
  float *raised = scratch(h, 3, sizeof(float) * 2 * width);
  KERNEL(linears)(h, x, t, 2, (const Linear *[]){gate, up}, (float *[]){raised, raised + width});
  KERNEL(gate_row)(raised, raised, raised, raised + width, (int)width);
  KERNEL(linears)(h, raised, t, 1, &down, &y);
  if (!share) return;
  float *parts = scratch(h, 4, sizeof(float) * t);
  KERNEL(linears)(h, x, t, 1, &share, &parts);
  for (int i = 0; i < t; i++, y += down->n)
    for (int n = 0; n < down->n; n++) y[n] *= KERNEL(sigmoid)(parts[i]);
}

/* What a block of experts adds to x [t, D], in one call: the routed experts and the shared one of `normed` [t, D], and
   `combine`. Uses scratches 0 to 7, 12 and 13. */
static void KERNEL(mixture)(Handle *h, const Mixture *m, const float *x, const float *normed, int t,
                            const uint32_t *slots, int experts, const float *weights, float clip, float *out) {
  int width = m->down->n;
  float *y = scratch(h, 12, sizeof(float) * t * experts * width), *shared = scratch(h, 13, sizeof(float) * t * width);
  KERNEL(experts)(h, m->gate, m->up, m->down, normed, t, slots, experts, y);
  KERNEL(gated)(h, m->shared_gate, m->shared_up, m->shared_down, m->share, normed, t, shared);
  KERNEL(combine)(x, y, weights, shared, t, experts, width, clip, out);
}
