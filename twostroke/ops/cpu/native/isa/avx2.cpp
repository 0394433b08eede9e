#include "vec_avx2.h"
#include "../kernels/all.h"

TS_KERNELS(kernels_avx2, "avx2", matmul, matmul_scratch, VectorCodes)
