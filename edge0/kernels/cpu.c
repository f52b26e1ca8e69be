/* CPU kernels for 4-bit models, loaded by ctypes: no Python and no MLX in here.

   Each header of kernels is included twice, for any processor and for this one's vectors; what runs is chosen when a
   handle is opened. A call is synchronous: it reads and writes memory that its caller owns, and keeps nothing of it. */
#define _GNU_SOURCE /* M_SQRT1_2 */
#include <math.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

#include "router.h"
#include "types.h"

#define KERNEL(name) name##_plain
#include "kernels.h"
#undef KERNEL

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define KERNEL(name) name##_simd
#include "kernels.h"
#undef KERNEL
#pragma GCC pop_options
static const Variant *fast(void) {
  int runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return runs ? &variant_simd : NULL;
}

#elif defined(__aarch64__)
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#define KERNEL(name) name##_simd
#include "kernels.h"
#undef KERNEL
#pragma GCC pop_options
static const Variant *fast(void) { return getauxval(AT_HWCAP) >> 20 & 1 ? &variant_simd : NULL; } /* HWCAP_ASIMDDP */

#else
static const Variant *fast(void) { return NULL; }
#endif

/* The kernels for this processor's vectors where there are any, else plain C. */
static const Variant *variant(int simd) { return simd && fast() ? fast() : &variant_plain; }

#define EXPORT __attribute__((visibility("default")))

/* Changes with any signature or structure: another version of Python's side refuses to call it. */
#define ABI 4
EXPORT int edge0_abi(void) { return ABI; }

/* The name of the variant that runs here, "plain" where this processor or the compiler had none. */
EXPORT const char *edge0_variant(void) { return variant(1)->name; }

/* A handle with its own threads, NULL without memory. One thread at a time may use it. */
EXPORT Handle *edge0_open(int threads, int int8, int simd) {
  Handle *h = calloc(1, sizeof *h);
  if (!h) return NULL;
  h->int8 = int8;
  h->variant = variant(simd);
  pool_start(&h->pool, threads);
  return h;
}

/* With the caller's; fewer than asked for where the system gave no more. */
EXPORT int edge0_threads(const Handle *h) { return h->pool.count + 1; }

EXPORT void edge0_close(Handle *h) {
  pool_stop(&h->pool);
  for (int which = 0; which < SCRATCHES; which++) free(h->scratch[which]);
  free(h);
}

EXPORT void edge0_linears(Handle *h, const float *x, int t, int count, const Linear *const *l, float *const *y) {
  h->variant->linears(h, x, t, count, l, y);
}

EXPORT void edge0_experts(Handle *h, const Linear *gate, const Linear *up, const Linear *down, const float *x, int t,
                          const uint32_t *slots, int experts, float *y) {
  h->variant->experts(h, gate, up, down, x, t, slots, experts, y);
}

EXPORT void edge0_gated(Handle *h, const Linear *gate, const Linear *up, const Linear *down, const Linear *share,
                        const float *x, int t, float *y) {
  h->variant->gated(h, gate, up, down, share, x, t, y);
}

EXPORT void edge0_combine(Handle *h, const float *x, const float *y, const float *weights, const float *shared, int t,
                          int experts, int width, float clip, float *out) {
  h->variant->combine(x, y, weights, shared, t, experts, width, clip, out);
}

EXPORT void edge0_mixture(Handle *h, const Mixture *m, const float *x, const float *normed, int t, const uint32_t *slots,
                          int experts, const float *weights, float clip, float *out) {
  h->variant->mixture(h, m, x, normed, t, slots, experts, weights, clip, out);
}

EXPORT void edge0_attention(Handle *h, const Attention *p, const float *x, int t, int offset, float *keys, float *values,
                            int room, float *out, float *normed) {
  h->variant->attention(h, p, x, t, offset, keys, values, room, out, normed);
}

EXPORT void edge0_latent(Handle *h, const Latent *p, const float *x, int t, int offset, float *latents, float *others,
                         float *out, float *normed) {
  h->variant->latent(h, p, x, t, offset, latents, others, out, normed);
}

EXPORT void edge0_delta(Handle *h, const Delta *p, const float *x, int t, float *const *histories, float *state,
                        float *out, float *normed) {
  h->variant->delta(h, p, x, t, histories, state, out, normed);
}

EXPORT void edge0_route(Handle *h, const Routing *p, const float *logits, const float *bias, int t, int experts, int forced,
                        uint32_t *ids, float *weights) {
  route(h, p, logits, bias, t, experts, forced, ids, weights);
}

EXPORT void edge0_dense(Handle *h, const void *w, int half, const float *x, int count, int t, int n, int k, int gelu,
                        float *y) {
  h->variant->dense(h, w, half, x, count, t, n, k, gelu, y);
}
