#include "vec_avx512.h"
#include "../kernels/all.h"
#include "../kernels/matmul_amx.h"

TS_KERNELS(kernels_avx512, "avx512", matmul, matmul_scratch)
TS_KERNELS(kernels_amx, "amx", matmul_tiles, tiles_scratch)
