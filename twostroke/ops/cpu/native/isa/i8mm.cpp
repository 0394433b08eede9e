#include "vec_neon.h"
#include "../kernels/all.h"
#include "../kernels/encode_half.h"
#include "../kernels/matmul_i8mm.h"
#include "../kernels/attend_octets.h"

TS_KERNELS_ENCODING(kernels_i8mm, "i8mm", matmul_octets, matmul_scratch, OctetCodes, kEncodeHalf)
