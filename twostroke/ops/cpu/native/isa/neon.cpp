#include "vec_neon.h"
#include "../kernels/all.h"

TS_KERNELS(kernels_neon, "neon", matmul, matmul_scratch)
