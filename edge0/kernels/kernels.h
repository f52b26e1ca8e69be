/* All kernels of one variant. */
#include "quantised.h"
#include "experts.h"
#include "attention.h"
#include "delta.h"
#include "dense.h"
