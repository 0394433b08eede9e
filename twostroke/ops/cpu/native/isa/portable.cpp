#include "vec_portable.h"
#include "../kernels/all.h"

TS_KERNELS(kernels_portable, "portable", matmul, matmul_scratch, VectorCodes)
