/* Dot products of a quantised matrix's rows with a token: each in one fixed order, so that a result does not depend on
   threads, on chunks or on what else is computed. Included once per variant. */

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

/* What int8 dot products add up: of groups 4n, 4n + 1, 4n + 2 and 4n + 3 one sum each. */
#if defined(__AVX2__)
typedef struct {
  __m256 each[4];
} KERNEL(Sums);

static ALWAYS __m256 KERNEL(whole)(const KERNEL(Sums) *sums) {
  return _mm256_add_ps(_mm256_add_ps(sums->each[0], sums->each[2]), _mm256_add_ps(sums->each[1], sums->each[3]));
}

/* Adds units[i] * (codes . x) of `count` groups, up to 8. */
static ALWAYS void KERNEL(add_groups)(KERNEL(Sums) *sums, const uint8_t *w, const int8_t *x, v8f units, int count) {
  const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) {
    const __m256i *p = (const __m256i *)(w + i * 32), *q = (const __m256i *)(x + i * GROUP);
    _mm_prefetch((const char *)p + AHEAD, _MM_HINT_T0);
    /* |maddubs| <= 2 * 15 * 127, and the sum of two fits 16 bits. */
    __m256i codes = _mm256_loadu_si256(p);
    __m256i even = _mm256_maddubs_epi16(_mm256_and_si256(codes, low), _mm256_loadu_si256(q));
    __m256i odd = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(codes, 4), low),
                                       _mm256_loadu_si256(q + 1));
    __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_add_epi16(even, odd), one));
    sums->each[i & 3] = _mm256_fmadd_ps(sum, _mm256_set1_ps(units[i]), sums->each[i & 3]);
  }
}

#else
typedef struct {
  v8f each;
} KERNEL(Sums);

static inline v8f KERNEL(whole)(const KERNEL(Sums) *sums) { return sums->each; }

/* Adds units[i] * (codes . x) of `count` groups, up to 8. */
static ALWAYS void KERNEL(add_groups)(KERNEL(Sums) *sums, const uint8_t *w, const int8_t *x, v8f units, int count) {
  for (int i = 0; i < count; i++) {
    const uint8_t *p = w + i * 32;
    const int8_t *q = x + i * GROUP;
#if defined(__ARM_FEATURE_DOTPROD)
    int32x4_t sum = vdupq_n_s32(0);
    for (int half = 0; half < 2; half++) {
      uint8x16_t codes = vld1q_u8(p + half * 16);
      int8x16_t even = vreinterpretq_s8_u8(vandq_u8(codes, vdupq_n_u8(15)));
      sum = vdotq_s32(sum, even, vld1q_s8(q + half * 16));
      sum = vdotq_s32(sum, vreinterpretq_s8_u8(vshrq_n_u8(codes, 4)), vld1q_s8(q + 32 + half * 16));
    }
    sums->each[i] += units[i] * (float)vaddvq_s32(sum);
#else
    int32_t sum = 0;
    for (int j = 0; j < 32; j++) sum += (p[j] & 15) * q[j] + (p[j] >> 4) * q[32 + j];
    sums->each[i] += units[i] * (float)sum;
#endif
  }
}
#endif

/* What `count` groups of one row add, up to 8: `w` their codes, `at` the first's place among scales and biases. */
static ALWAYS v8f KERNEL(add_part)(KERNEL(Sums) *total, v8f biased, const Linear *l, int wide, size_t at,
                                   const uint8_t *w, const int8_t *q, const float *d, const float *sums, int count) {
  KERNEL(add_groups)(total, w, q, KERNEL(factors)(l->s, wide, at, count) * KERNEL(load8)(d), count);
  return biased + KERNEL(factors)(l->b, wide, at, count) * KERNEL(load8)(sums);
}

/* `count` rows of 4-bit codes from row `first` on, with 8-bit activations. Runs of 8 and of 4 groups, which is what
   hidden sizes come to, are unrolled. */
static ALWAYS void KERNEL(rows_int8)(float *y, const Linear *l, int wide, size_t first, int count, const Rows *r, int t) {
  const int8_t *q = r->q + (size_t)t * r->k;
  const float *d = r->d + (size_t)t * r->pitch, *sums = r->s + (size_t)t * r->pitch;
  int groups = r->groups, rest = groups & 7, whole = groups - rest;
  for (int n = 0; n < count; n++) {
    size_t at = (first + n) * groups;
    const uint8_t *w = l->w + at * 32;
    KERNEL(Sums) total = {0};
    v8f biased = {0};
    for (int g = 0; g < whole; g += 8)
      biased = KERNEL(add_part)(&total, biased, l, wide, at + g, w + g * 32, q + g * GROUP, d + g, sums + g, 8);
    at += whole, w += whole * 32;
    if (rest == 4)
      biased = KERNEL(add_part)(&total, biased, l, wide, at, w, q + whole * GROUP, d + whole, sums + whole, 4);
    else if (rest)
      biased = KERNEL(add_part)(&total, biased, l, wide, at, w, q + whole * GROUP, d + whole, sums + whole, rest);
    y[n] = KERNEL(sum8)((v8f)KERNEL(whole)(&total) + biased);
  }
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

/* y[i] = row `first + i` of matrix `matrix` of a stack, times token t; `count` rows. */
static void KERNEL(products)(float *y, const Linear *l, size_t matrix, int first, int count, const Rows *r, int t,
                             int int8) {
  size_t at = matrix * l->n + first, row = (size_t)r->k / 8 * l->bits;
  if (int8 && l->bits == 4 && l->wide) return KERNEL(rows_int8)(y, l, 1, at, count, r, t);
  if (int8 && l->bits == 4) return KERNEL(rows_int8)(y, l, 0, at, count, r, t);
  const float *sums = r->s + (size_t)t * r->pitch, *x = r->x + (size_t)t * r->k;
  for (int n = 0; n < count; n++, at++) {
    const uint8_t *w = l->w + at * row;
    y[n] = l->bits == 8 ? KERNEL(dot_exact)(w, l->s, l->b, l->wide, 8, at * r->groups, x, sums, r->groups)
                        : KERNEL(dot_exact)(w, l->s, l->b, l->wide, 4, at * r->groups, x, sums, r->groups);
  }
}
