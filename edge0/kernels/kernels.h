/* All kernels of one variant. */
#include "quantised.h"
#include "experts.h"
