/* Products with quantised matrices: one dot product per row and token, each in one fixed order, so that a result does
   not depend on threads, on chunks or on what else is computed. Included once per variant. */

static inline float KERNEL(sum8)(v8f v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

static inline v8f KERNEL(load8)(const float *x) { return *(const v8f *)x; }

static float KERNEL(dot)(const float *a, const float *b, int n) {
  v8f low = {0}, high = {0};
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    low += KERNEL(load8)(a + i) * KERNEL(load8)(b + i);
    high += KERNEL(load8)(a + i + 8) * KERNEL(load8)(b + i + 8);
  }
  float rest = 0;
  for (; i < n; i++) rest += a[i] * b[i];
  return KERNEL(sum8)(low + high) + rest;
}

/* y += f x */
static inline void KERNEL(add_scaled)(float *y, const float *x, float f, int n) {
  for (int i = 0; i < n; i++) y[i] += f * x[i];
}

/* e^x to 2e-7, of x held within what floats can say; NaN stays. */
static inline v8f KERNEL(exp8)(v8f x) {
  const v8f least = {-87, -87, -87, -87, -87, -87, -87, -87};
  v8i below = x < least, above = x > -least;
  x = (v8f)(((v8i)least & below) | ((v8i)-least & above) | ((v8i)x & ~(below | above)));
  v8f shifted = x * 1.44269504f + 12582912.0f; /* the low bits are the nearest power of two */
  v8f power = shifted - 12582912.0f;
  v8f r = x - power * 0.693359375f + power * 2.12194440e-4f;
  v8f p = ((((1.9875691e-4f * r + 1.3981999e-3f) * r + 8.3334519e-3f) * r + 4.1665796e-2f) * r + 1.6666665e-1f) * r + 0.5f;
  v8f value = p * r * r + r + 1.0f;
  return (v8f)((v8i)value + ((v8i)shifted << 23)); /* the constant has no bits there: only the power moves */
}

/* y = x / (1 + e^-gate): sigmoid of x = 1, silu of x = gate. */
static inline v8f KERNEL(gate8)(v8f gate, v8f x) { return x / (1.0f + KERNEL(exp8)(-gate)); }

/* y[i] = x[i] * sigmoid(gate[i]) * factor[i]; y may be any of them, factor may be NULL. */
static void KERNEL(gate_row)(float *y, const float *x, const float *gate, const float *factor, int n) {
  for (int i = 0; i < n; i += 8) {
    int count = n - i < 8 ? n - i : 8;
    if (count == 8) {
      v8f value = KERNEL(gate8)(KERNEL(load8)(gate + i), KERNEL(load8)(x + i));
      if (factor) value *= KERNEL(load8)(factor + i);
      *(v8f *)(y + i) = value;
      continue;
    }
    v8f g = {0}, v = {0}, f = {0};
    for (int j = 0; j < count; j++) g[j] = gate[i + j], v[j] = x[i + j], f[j] = factor ? factor[i + j] : 1.0f;
    v8f value = KERNEL(gate8)(g, v) * f;
    for (int j = 0; j < count; j++) y[i + j] = value[j];
  }
}

static inline float KERNEL(sigmoid)(float x) { return 1.0f / (1.0f + expf(-x)); }

/* 8 halves as floats. */
static inline v8f KERNEL(halves)(const uint16_t *x) {
#if defined(__F16C__)
  return (v8f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
#else
  v8f out;
  for (int i = 0; i < 8; i++) out[i] = half_to_float(x[i]);
  return out;
#endif
}

/* dot, of halves and floats. */
static float KERNEL(dot_half)(const uint16_t *a, const float *b, int n) {
  v8f low = {0}, high = {0};
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    low += KERNEL(halves)(a + i) * KERNEL(load8)(b + i);
    high += KERNEL(halves)(a + i + 8) * KERNEL(load8)(b + i + 8);
  }
  float rest = 0;
  for (; i < n; i++) rest += half_to_float(a[i]) * b[i];
  return KERNEL(sum8)(low + high) + rest;
}

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

/* --- dot products ------------------------------------------------------------------------------------------------ */

static inline v8f KERNEL(factors)(const void *values, int wide, size_t at, int count) {
  v8f out = {0};
  if (wide) {
    const float *f = (const float *)values + at;
    if (count == 8) return KERNEL(load8)(f);
    for (int i = 0; i < count; i++) out[i] = f[i];
    return out;
  }
  const uint16_t *half = (const uint16_t *)values + at;
#if defined(__AVX2__)
  if (count == 4)
    return (v8f)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)half)), 16);
  if (count == 8)
    return (v8f)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)half)), 16);
#endif
  for (int i = 0; i < count; i++) out[i] = widen(half[i]);
  return out;
}

/* 4-bit codes with 8-bit activations. */
static inline float KERNEL(dot_int8)(const uint8_t *w, const void *s, const void *b, int wide, size_t at,
                                     const int8_t *q, const float *d, const float *sums, int groups) {
  v8f biased = {0};
#if defined(__AVX2__)
  const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
  __m256 total = _mm256_setzero_ps();
#else
  v8f total = {0};
#endif
  for (int g = 0; g < groups; g += 8) {
    int count = groups - g < 8 ? groups - g : 8;
    v8f unit = KERNEL(factors)(s, wide, at + g, count) * KERNEL(load8)(d + g);
    biased += KERNEL(factors)(b, wide, at + g, count) * KERNEL(load8)(sums + g);
    for (int i = 0; i < count; i++) {
      const uint8_t *p = w + (size_t)(g + i) * 32;
      const int8_t *x = q + (size_t)(g + i) * 64;
#if defined(__AVX2__)
      /* |maddubs| <= 2 * 15 * 127, and the sum of two fits 16 bits. */
      _mm_prefetch((const char *)p + 4096, _MM_HINT_T0);
      __m256i codes = _mm256_loadu_si256((const __m256i *)p);
      __m256i even = _mm256_maddubs_epi16(_mm256_and_si256(codes, low), _mm256_loadu_si256((const __m256i *)x));
      __m256i odd = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(codes, 4), low),
                                         _mm256_loadu_si256((const __m256i *)(x + 32)));
      __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_add_epi16(even, odd), one));
      total = _mm256_fmadd_ps(sum, _mm256_set1_ps(unit[i]), total);
#elif defined(__ARM_FEATURE_DOTPROD)
      int32x4_t sum = vdupq_n_s32(0);
      for (int half = 0; half < 2; half++) {
        uint8x16_t codes = vld1q_u8(p + half * 16);
        int8x16_t even = vreinterpretq_s8_u8(vandq_u8(codes, vdupq_n_u8(15)));
        sum = vdotq_s32(sum, even, vld1q_s8(x + half * 16));
        sum = vdotq_s32(sum, vreinterpretq_s8_u8(vshrq_n_u8(codes, 4)), vld1q_s8(x + 32 + half * 16));
      }
      total[i] += unit[i] * (float)vaddvq_s32(sum);
#else
      int32_t sum = 0;
      for (int j = 0; j < 32; j++) sum += (p[j] & 15) * x[j] + (p[j] >> 4) * x[32 + j];
      total[i] += unit[i] * (float)sum;
#endif
    }
  }
  return KERNEL(sum8)((v8f)total + biased);
}

/* 4-bit or 8-bit codes with fp32 activations. */
static inline float KERNEL(dot_exact)(const uint8_t *w, const void *s, const void *b, int wide, int bits, size_t at,
                                      const float *x, const float *sums, int groups) {
  const v8i shifts = {0, 4, 8, 12, 16, 20, 24, 28};
  v8f total = {0}, biased = {0};
  for (int g = 0; g < groups; g += 8) {
    int count = groups - g < 8 ? groups - g : 8;
    v8f unit = KERNEL(factors)(s, wide, at + g, count);
    biased += KERNEL(factors)(b, wide, at + g, count) * KERNEL(load8)(sums + g);
    for (int i = 0; i < count; i++) {
      const uint8_t *p = w + (size_t)(g + i) * 8 * bits;
      v8f sum = {0}, other = {0};
      for (int j = 0; j < 8; j++) {
        v8i codes;
        if (bits == 4) {
          int32_t word;
          memcpy(&word, p + j * 4, 4);
          codes = (word - (v8i){0}) >> shifts & 15;
        } else {
#if defined(__AVX2__) /* gcc 12 takes the generic conversion apart */
          codes = (v8i)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + j * 8)));
#else
          codes = __builtin_convertvector(*(const v8u *)(p + j * 8), v8i);
#endif
        }
        v8f part = __builtin_convertvector(codes, v8f) * KERNEL(load8)(x + (size_t)(g + i) * GROUP + j * 8);
        if (j & 1)
          other += part;
        else
          sum += part;
      }
      total += (sum + other) * unit[i];
    }
  }
  return KERNEL(sum8)(total + biased);
}

/* Row n of matrix `l` of a stack, times token t. */
static inline float KERNEL(product)(const Linear *l, size_t matrix, int n, const Rows *r, int t, int int8) {
  size_t row = matrix * l->n + n, at = row * r->groups;
  const uint8_t *w = l->w + row * r->k / 8 * l->bits;
  const float *sums = r->s + (size_t)t * r->pitch, *x = r->x + (size_t)t * r->k;
  if (l->bits == 8) return KERNEL(dot_exact)(w, l->s, l->b, l->wide, 8, at, x, sums, r->groups);
  if (!int8) return KERNEL(dot_exact)(w, l->s, l->b, l->wide, 4, at, x, sums, r->groups);
  const int8_t *q = r->q + (size_t)t * r->k;
  const float *d = r->d + (size_t)t * r->pitch;
  if (l->wide) return KERNEL(dot_int8)(w, l->s, l->b, 1, at, q, d, sums, r->groups);
  return KERNEL(dot_int8)(w, l->s, l->b, 0, at, q, d, sums, r->groups);
}

/* --- several matrices, one input --------------------------------------------------------------------------------- */

#define MOST_LINEARS 8

typedef struct {
  const Rows *rows;
  const Linear *const *linears;
  float *const *y;
  float *low; /* [count][t][rank]: what the corrections' first halves gave */
  int lows[MOST_LINEARS], starts[MOST_LINEARS + 1], count, int8;
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
  int first = (chunk - c->starts[which]) * CHUNK_ROWS, last = first + CHUNK_ROWS < l->n ? first + CHUNK_ROWS : l->n;
  for (int n = first; n < last; n++)
    for (int t = 0; t < c->rows->t; t++) {
      float value = KERNEL(product)(l, 0, n, c->rows, t, c->int8);
      if (l->rank)
        value += KERNEL(dot_half)(l->up + (size_t)n * l->rank, c->low + c->lows[which] + (size_t)t * l->rank, l->rank);
      c->y[which][(size_t)t * l->n + n] = value;
    }
}

/* y[i] [t, n_i] = linears[i] of x [t, k]; all have 4 bits, or all have 8: routers and gates, whose activations stay
   fp32. Uses scratches 0 to 2. */
static void KERNEL(linears)(Handle *h, const float *x, int t, int count, const Linear *const *l, float *const *y) {
  Rows rows;
  int int8 = h->int8 && l[0]->bits == 4, ranks = 0, low = 0;
  size_t bytes = 0;
  KERNEL(prepare)(h, 0, &rows, x, t, l[0]->k, int8);
  KERNEL(LinearsContext) c = {&rows, l, y, NULL, {0}, {0}, count, int8};
  for (int i = 0; i < count; i++) {
    c.lows[i] = low;
    low += t * l[i]->rank;
    ranks += l[i]->rank;
    bytes += (size_t)t * l[i]->n * l[i]->k * l[i]->bits / 8;
    c.starts[i + 1] = c.starts[i] + (l[i]->n + CHUNK_ROWS - 1) / CHUNK_ROWS;
  }
  c.low = scratch(h, 2, sizeof(float) * (low + 1));
  if (ranks) pool_run(&h->pool, KERNEL(correct), &c, ranks, (size_t)t * ranks * l[0]->k * 4);
  pool_run(&h->pool, KERNEL(multiply), &c, c.starts[count], bytes);
}
