/* All kernels of one variant. */
static const char *KERNEL(path)(void) {
#if defined(__AVX2__)
  return "avx2";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "neon-dotprod";
#else
  return "plain";
#endif
}

#include "quantised.h"
#include "experts.h"
#include "attention.h"
#include "delta.h"
#include "dense.h"
