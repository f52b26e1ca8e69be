/* Attention of some tokens over a cache that they are written to first; each token by itself, so that the bits of a
   prompt do not depend on how it is cut. Included once per variant. */

#define BLOCK 64    /* keys that are scored together */
#define WIDEST 1024 /* elements of a head, or of a latent with its rotated part */

static void KERNEL(norm)(float *y, const float *x, const float *weight, float eps, int n) {
  float factor = 1.0f / sqrtf(KERNEL(dot)(x, x, n) / n + eps);
  for (int i = 0; i < n; i++) y[i] = x[i] * factor * (weight ? weight[i] : 1.0f);
}

/* The norm before attention, into scratch 8. */
static float *KERNEL(enter)(Handle *h, const Norms *n, const float *x, int t) {
  float *y = scratch(h, 8, sizeof(float) * t * n->hidden);
  for (int i = 0; i < t; i++) KERNEL(norm)(y + (size_t)i * n->hidden, x + (size_t)i * n->hidden, n->before, n->eps, n->hidden);
  return y;
}

/* out = x + o(mixed), and its norm. */
static void KERNEL(leave)(Handle *h, const Norms *n, const Linear *o, const float *mixed, const float *x, int t,
                          float *out, float *normed) {
  KERNEL(linears)(h, mixed, t, 1, &o, &out);
  for (size_t i = 0; i < (size_t)t * n->hidden; i++) out[i] += x[i];
  for (int i = 0; i < t; i++)
    KERNEL(norm)(normed + (size_t)i * n->hidden, out + (size_t)i * n->hidden, n->after, n->eps, n->hidden);
}

/* Cosine and sine of each pair at the positions of t tokens, [t, rotated]. Uses scratch 9. */
static float *KERNEL(angles)(Handle *h, const float *turns, int rotated, int t, int offset) {
  float *table = scratch(h, 9, sizeof(float) * t * rotated), *at = table;
  for (int i = 0; i < t; i++)
    for (int pair = 0; pair < rotated / 2; pair++) {
      float angle = (float)(offset + i) * turns[pair];
      *at++ = cosf(angle);
      *at++ = sinf(angle);
    }
  return table;
}

/* Turns pairs (i, i + step) of x; step 1: neighbours. */
static void KERNEL(rotate)(float *x, const float *table, int rotated, int step) {
  for (int pair = 0; pair < rotated / 2; pair++) {
    float *a = x + (step == 1 ? 2 * pair : pair), *b = a + step, c = table[2 * pair], s = table[2 * pair + 1], was = *a;
    *a = was * c - *b * s;
    *b = was * s + *b * c;
  }
}

/* out [width] = softmax over `count` keys of scale * (query . key + extra . other), times the values. `extra`: the
   rotated part of a latent, or nothing. Keys, values and others are rows of their own lengths. */
static void KERNEL(attend)(float *out, const float *query, const float *keys, int key, const float *extra,
                           const float *others, int other, const float *values, int width, int count, float scale) {
  float sum[WIDEST], score[BLOCK], most = -INFINITY, total = 0;
  memset(sum, 0, sizeof(float) * width);
  for (int first = 0; first < count; first += BLOCK) {
    int here = count - first < BLOCK ? count - first : BLOCK;
    float highest = most;
    for (int j = 0; j < here; j++) {
      score[j] = KERNEL(dot)(query, keys + (size_t)(first + j) * key, key);
      if (other) score[j] += KERNEL(dot)(extra, others + (size_t)(first + j) * other, other);
      score[j] *= scale;
      highest = fmaxf(highest, score[j]);
    }
    float shrink = expf(most - highest);
    total *= shrink;
    for (int i = 0; i < width; i++) sum[i] *= shrink;
    for (int j = 0; j < here; j++) {
      float weight = expf(score[j] - highest);
      total += weight;
      KERNEL(add_scaled)(sum, values + (size_t)(first + j) * width, weight, width);
    }
    most = highest;
  }
  for (int i = 0; i < width; i++) out[i] = sum[i] / total;
}

/* --- gated, grouped queries --------------------------------------------------------------------------------------- */

typedef struct {
  const Attention *p;
  float *q, *mixed;
  const float *keys, *values, *table;
  int offset, room;
} KERNEL(AttentionContext);

static void KERNEL(attend_head)(void *context, int chunk) {
  KERNEL(AttentionContext) *c = context;
  const Attention *p = c->p;
  int t = chunk / p->heads, head = chunk % p->heads, width = p->width;
  float *query = c->q + ((size_t)t * p->heads + head) * 2 * width, *gate = query + width;
  float *out = c->mixed + ((size_t)t * p->heads + head) * width;
  size_t pair = (size_t)(head / (p->heads / p->pairs)) * c->room * width;
  KERNEL(norm)(query, query, p->q_norm, p->eps, width);
  KERNEL(rotate)(query, c->table + (size_t)t * p->rotated, p->rotated, p->rotated / 2);
  KERNEL(attend)(out, query, c->keys + pair, width, NULL, NULL, 0, c->values + pair, width, c->offset + t + 1, p->scale);
  KERNEL(gate_row)(out, out, gate, NULL, width);
}

/* x [t, hidden] to out = x + attention(norm(x)) and its norm; keys and values [pairs, room, width] hold `offset` tokens
   and get t more. Uses scratches 0 to 2 and 8 to 11. */
static void KERNEL(attention)(Handle *h, const Attention *p, const float *x, int t, int offset, float *keys,
                              float *values, int room, float *out, float *normed) {
  int width = p->width, row = p->pairs * width;
  const float *entered = KERNEL(enter)(h, &p->norms, x, t);
  const float *table = KERNEL(angles)(h, p->turns, p->rotated, t, offset);
  float *q = scratch(h, 10, sizeof(float) * t * (2 * p->heads * width + 2 * row));
  float *k = q + (size_t)t * 2 * p->heads * width, *v = k + (size_t)t * row;
  KERNEL(linears)(h, entered, t, 3, (const Linear *[]){p->q, p->k, p->v}, (float *[]){q, k, v});
  for (int i = 0; i < t; i++)
    for (int pair = 0; pair < p->pairs; pair++) {
      size_t at = ((size_t)pair * room + offset + i) * width, from = (size_t)i * row + pair * width;
      KERNEL(norm)(keys + at, k + from, p->k_norm, p->eps, width);
      KERNEL(rotate)(keys + at, table + (size_t)i * p->rotated, p->rotated, p->rotated / 2);
      memcpy(values + at, v + from, sizeof(float) * width);
    }
  float *mixed = scratch(h, 11, sizeof(float) * t * p->heads * width);
  KERNEL(AttentionContext) c = {p, q, mixed, keys, values, table, offset, room};
  pool_run(&h->pool, KERNEL(attend_head), &c, t * p->heads, (size_t)t * p->heads * (offset + t) * width * 8);
  KERNEL(leave)(h, &p->norms, p->o, mixed, x, t, out, normed);
}

/* --- on a latent -------------------------------------------------------------------------------------------------- */

typedef struct {
  const Latent *p;
  float *q, *mixed;
  const float *latents, *others, *table, *gate;
  int offset;
} KERNEL(LatentContext);

static void KERNEL(attend_latent)(void *context, int chunk) {
  KERNEL(LatentContext) *c = context;
  const Latent *p = c->p;
  int t = chunk / p->heads, head = chunk % p->heads, latent = p->latent;
  float *query = c->q + ((size_t)t * p->heads + head) * (p->plain + p->rotated), *rotated = query + p->plain;
  float *out = c->mixed + ((size_t)t * p->heads + head) * p->width, absorbed[WIDEST], found[WIDEST];
  const float *keys = p->keys + (size_t)head * latent * p->plain, *values = p->values + (size_t)head * p->width * latent;
  KERNEL(rotate)(rotated, c->table + (size_t)t * p->rotated, p->rotated, 1);
  for (int i = 0; i < latent; i++) absorbed[i] = KERNEL(dot)(query, keys + (size_t)i * p->plain, p->plain);
  KERNEL(attend)(found, absorbed, c->latents, latent, rotated, c->others, p->rotated, c->latents, latent,
                 c->offset + t + 1, p->scale);
  float gate = KERNEL(sigmoid)(c->gate[(size_t)t * p->heads + head]);
  for (int i = 0; i < p->width; i++) out[i] = gate * KERNEL(dot)(found, values + (size_t)i * latent, latent);
}

/* As `attention`; latents [room, latent] and others [room, rotated] hold `offset` tokens and get t more.
   Uses scratches 0 to 2 and 8 to 11. */
static void KERNEL(latent)(Handle *h, const Latent *p, const float *x, int t, int offset, float *latents, float *others,
                           float *out, float *normed) {
  int row = p->latent + p->rotated, query = p->heads * (p->plain + p->rotated);
  const float *entered = KERNEL(enter)(h, &p->norms, x, t);
  const float *table = KERNEL(angles)(h, p->turns, p->rotated, t, offset);
  float *low = scratch(h, 10, sizeof(float) * t * (p->q_rank + row + p->heads + query));
  float *kv = low + (size_t)t * p->q_rank, *gate = kv + (size_t)t * row, *q = gate + (size_t)t * p->heads;
  KERNEL(linears)(h, entered, t, 3, (const Linear *[]){p->q_a, p->kv_a, p->gate}, (float *[]){low, kv, gate});
  for (int i = 0; i < t; i++) {
    float *latent = latents + (size_t)(offset + i) * p->latent, *other = others + (size_t)(offset + i) * p->rotated;
    KERNEL(norm)(low + (size_t)i * p->q_rank, low + (size_t)i * p->q_rank, p->q_norm, p->q_eps, p->q_rank);
    KERNEL(norm)(latent, kv + (size_t)i * row, p->kv_norm, p->kv_eps, p->latent);
    memcpy(other, kv + (size_t)i * row + p->latent, sizeof(float) * p->rotated);
    KERNEL(rotate)(other, table + (size_t)i * p->rotated, p->rotated, 1);
  }
  KERNEL(linears)(h, low, t, 1, &p->q_b, &q);
  float *mixed = scratch(h, 11, sizeof(float) * t * p->heads * p->width);
  KERNEL(LatentContext) c = {p, q, mixed, latents, others, table, gate, offset};
  size_t each = (size_t)p->latent * (p->plain + p->width) + (size_t)(offset + t) * (2 * p->latent + p->rotated);
  pool_run(&h->pool, KERNEL(attend_latent), &c, t * p->heads, t * p->heads * each * 4);
  KERNEL(leave)(h, &p->norms, p->o, mixed, x, t, out, normed);
}
