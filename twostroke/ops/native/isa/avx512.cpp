#include "vec_avx512.h"
#include "../kernels/all.h"

TS_KERNELS(kernels_avx512, "avx512")
