/* All kernels of one variant. */
#include "vectors.h"
#include "dots.h"
#include "quantised.h"
#include "experts.h"
#include "attention.h"
#include "delta.h"
#include "dense.h"

static const Variant KERNEL(variant) = {
#if defined(__AVX2__)
    "avx2",
#elif defined(__ARM_FEATURE_DOTPROD)
    "neon-dotprod",
#else
    "plain",
#endif
    KERNEL(linears), KERNEL(experts),   KERNEL(gated),  KERNEL(combine),
    KERNEL(mixture), KERNEL(attention), KERNEL(latent), KERNEL(delta),
    KERNEL(dense),
};
