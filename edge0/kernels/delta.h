/* Linear attention by the delta rule with its short convolution, token by token. Included once per variant. */

typedef struct {
  const float *taps, *in;
  float *history, *out;
  int t, channels, count;
} KERNEL(Stream);

/* Depthwise causal convolution and silu of one run of channels; history [count - 1, channels] moves on. */
static void KERNEL(convolve)(const KERNEL(Stream) *s, int first, int last) {
  for (int i = 0; i < s->t; i++) {
    float *out = s->out + (size_t)i * s->channels;
    for (int c = first; c < last; c++) out[c] = 0;
    for (int tap = 0; tap < s->count; tap++) {
      int from = i + tap - (s->count - 1);
      const float *in = from < 0 ? s->history + (size_t)(s->count - 1 + from) * s->channels
                                 : s->in + (size_t)from * s->channels;
      const float *weight = s->taps + (size_t)tap * s->channels;
      for (int c = first; c < last; c++) out[c] += weight[c] * in[c];
    }
    KERNEL(gate_row)(out + first, out + first, out + first, NULL, last - first);
  }
  for (int kept = 0; kept < s->count - 1; kept++) { /* oldest first: none is overwritten before it is read */
    int from = s->t + kept - (s->count - 1);
    const float *in = from < 0 ? s->history + (size_t)(s->count - 1 + from) * s->channels
                               : s->in + (size_t)from * s->channels;
    memmove(s->history + (size_t)kept * s->channels + first, in + first, sizeof(float) * (last - first));
  }
}

#define CHANNELS 256 /* that one thread convolves at a time */

typedef struct {
  KERNEL(Stream) streams[3];
  int count, chunks[4];
} KERNEL(ConvolutionContext);

static void KERNEL(convolve_chunk)(void *context, int chunk) {
  KERNEL(ConvolutionContext) *c = context;
  int which = 0;
  while (chunk >= c->chunks[which + 1]) which++;
  const KERNEL(Stream) *s = &c->streams[which];
  int first = (chunk - c->chunks[which]) * CHANNELS;
  KERNEL(convolve)(s, first, first + CHANNELS < s->channels ? first + CHANNELS : s->channels);
}

typedef struct {
  const Delta *p;
  const float *q, *k, *v, *gate, *beta, *decay; /* rows of q_row, q_row, v_row, .. floats per token */
  float *state, *mixed;
  int t, q_row, v_row;
} KERNEL(DeltaContext);

/* row *= decay; row . x */
static inline float KERNEL(decayed_dot)(float *row, const float *decay, const float *x, int n) {
  v8f low = {0}, high = {0};
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    v8f a = KERNEL(load8)(row + i) * KERNEL(load8)(decay + i);
    v8f b = KERNEL(load8)(row + i + 8) * KERNEL(load8)(decay + i + 8);
    *(v8f *)(row + i) = a;
    *(v8f *)(row + i + 8) = b;
    low += a * KERNEL(load8)(x + i);
    high += b * KERNEL(load8)(x + i + 8);
  }
  float rest = 0;
  for (; i < n; i++) rest += (row[i] *= decay[i]) * x[i];
  return KERNEL(sum8)(low + high) + rest;
}

/* row += f y; row . x */
static inline float KERNEL(added_dot)(float *row, const float *y, float f, const float *x, int n) {
  v8f low = {0}, high = {0};
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    v8f a = KERNEL(load8)(row + i) + f * KERNEL(load8)(y + i);
    v8f b = KERNEL(load8)(row + i + 8) + f * KERNEL(load8)(y + i + 8);
    *(v8f *)(row + i) = a;
    *(v8f *)(row + i + 8) = b;
    low += a * KERNEL(load8)(x + i);
    high += b * KERNEL(load8)(x + i + 8);
  }
  float rest = 0;
  for (; i < n; i++) rest += (row[i] += f * y[i]) * x[i];
  return KERNEL(sum8)(low + high) + rest;
}

/* One head through all tokens: state [value, key] decays, is corrected towards v at k, and is read at q. */
static void KERNEL(delta_head)(void *context, int head) {
  KERNEL(DeltaContext) *c = context;
  const Delta *p = c->p;
  int key = p->key, value = p->value, from = head / (p->heads / p->key_heads);
  float *state = c->state + (size_t)head * value * key;
  float q[WIDEST], k[WIDEST], decay[WIDEST], read[WIDEST], scale = 1.0f / sqrtf((float)key);
  for (int t = 0; t < c->t; t++) {
    const float *raw = c->decay + (size_t)t * p->heads * (p->lower ? key : 1);
    const float *v = c->v + (size_t)t * c->v_row + (size_t)head * value;
    float beta = KERNEL(sigmoid)(c->beta[(size_t)t * p->heads + head]), rate = p->rate[head];
    KERNEL(norm)(q, c->q + (size_t)t * c->q_row + (size_t)from * key, NULL, 1e-6f * scale * scale, key);
    KERNEL(norm)(k, c->k + (size_t)t * c->q_row + (size_t)from * key, NULL, 1e-6f * scale * scale, key);
    for (int i = 0; i < key; i++) {
      q[i] *= scale * scale;
      k[i] *= scale;
    }
    if (p->lower) {
      const float *shift = p->shift + (size_t)head * key;
      for (int i = 0; i < key; i++)
        decay[i] = expf(p->lower * KERNEL(sigmoid)(rate * (raw[(size_t)head * key + i] + shift[i])));
    } else {
      float x = raw[head] + p->shift[head], softplus = fmaxf(x, 0) + log1pf(expf(-fabsf(x)));
      float factor = expf(-rate * softplus);
      for (int i = 0; i < key; i++) decay[i] = factor;
    }
    for (int j = 0; j < value; j++) {
      float *row = state + (size_t)j * key;
      float delta = (v[j] - KERNEL(decayed_dot)(row, decay, k, key)) * beta;
      read[j] = KERNEL(added_dot)(row, k, delta, q, key);
    }
    size_t at = ((size_t)t * p->heads + head) * value;
    KERNEL(norm)(read, read, p->norm, p->eps, value);
    KERNEL(gate_row)(c->mixed + at, read, c->gate + at, p->lower ? NULL : c->gate + at, value);
  }
}

/* x [t, hidden] to out = x + delta(norm(x)) and its norm; histories (one per stream, [count - 1, channels]) and state
   [heads, value, key] move on by t tokens. Uses scratches 0 to 2, 8, 10 and 11. */
static void KERNEL(delta)(Handle *h, const Delta *p, const float *x, int t, float *const *histories, float *state,
                          float *out, float *normed) {
  int queries = p->key_heads * p->key, values = p->heads * p->value, mixed_channels = 2 * queries + values;
  int three = p->streams == 3, decays = p->heads * (p->lower ? p->key : 1), ins = three ? 6 : 4;
  const float *entered = KERNEL(enter)(h, &p->norms, x, t);
  float *in = scratch(h, 10, sizeof(float) * t * (2 * mixed_channels + values + p->heads + decays));
  float *convolved = in + (size_t)t * mixed_channels, *gate = convolved + (size_t)t * mixed_channels;
  float *beta = gate + (size_t)t * values, *decay = beta + (size_t)t * p->heads;
  size_t second = (size_t)t * queries, third = 2 * second; /* where streams of their own begin */
  float *one[] = {in, gate, beta, decay}, *six[] = {in, in + second, in + third, gate, beta, decay};
  KERNEL(linears)(h, entered, t, ins, p->in, three ? six : one);
  KERNEL(ConvolutionContext) conv = {.count = p->streams};
  int channels[] = {three ? queries : mixed_channels, queries, values};
  size_t begins[] = {0, second, third};
  for (int i = 0; i < p->streams; i++) {
    conv.streams[i] = (KERNEL(Stream)){p->taps[i],   in + begins[i], histories[i], convolved + begins[i],
                                       t, channels[i], p->count};
    conv.chunks[i + 1] = conv.chunks[i] + (channels[i] + CHANNELS - 1) / CHANNELS;
  }
  pool_run(&h->pool, KERNEL(convolve_chunk), &conv, conv.chunks[p->streams], (size_t)t * mixed_channels * 64);
  float *mixed = scratch(h, 11, sizeof(float) * t * values);
  const float *k = convolved + (three ? second : (size_t)queries), *v = convolved + (three ? third : (size_t)2 * queries);
  KERNEL(DeltaContext) c = {p,    convolved, k, v, gate, beta, decay, state, mixed,
                            t, three ? queries : mixed_channels, three ? values : mixed_channels};
  pool_run(&h->pool, KERNEL(delta_head), &c, p->heads, (size_t)t * p->heads * p->value * p->key * 8);
  KERNEL(leave)(h, &p->norms, p->o, mixed, x, t, out, normed);
}
