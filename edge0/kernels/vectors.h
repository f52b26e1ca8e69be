/* Sums, exponentials and gates of 8 floats at a time. Included once per variant. */

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
