#include "vec_avx512.h"
#include "../kernels/all.h"
#include "../kernels/matmul_amx.h"
#include "../kernels/attend_tiles.h"
#include "../kernels/encode_amx.h"
#include "../kernels/encode_pairs.h"
#include "../kernels/prologue_tile.h"

TS_KERNELS_ENCODING(kernels_avx512, "avx512", matmul, matmul_scratch, VectorCodes, kEncodePairs)
TS_KERNELS_TILED(kernels_amx, "amx", kTileRows, kTiledFrom, prologue_tile, matmul_tiles, tiles_scratch, TileCodes, kEncodeTiles)
