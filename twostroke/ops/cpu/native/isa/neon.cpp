#include "vec_neon.h"
#include "../kernels/all.h"
#include "../kernels/encode_half.h"
#include "../kernels/matmul_sdot.h"

TS_KERNELS_ENCODING(kernels_neon, "neon", matmul_dots, matmul_scratch, VectorCodes, kEncodeHalf)
