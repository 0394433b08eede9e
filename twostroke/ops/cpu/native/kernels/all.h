// All kernels over the 16-lane vectors of the instruction set whose vec_*.h was included before. Each such file is a
// translation unit with its own flags, and everything in it is local to it: a linker merges inline functions of one name,
// and would hand code for one processor to another.
#pragma once
#include "../kernels.h"
#include "elementary.h"
#include "prologue.h"
#include "matmul_codes.h"
#include "matmul_float.h"
#include "argmax.h"
#include "scores.h"
#include "entries.h"
#include "kv.h"
#include "attend_lines.h"
#include "attend_fetch.h"
#include "attend_score.h"
#include "attend_value.h"
#include "attend_lanes.h"
#include "latent_bytes.h"
#include "attend_codes.h"
#include "attend_write.h"
#include "attend.h"
#include "latent_write.h"
#include "encode.h"

// multiply, multiply_scratch: matmul and its scratch, or something faster that gives the same bits. codes: see VectorCodes.
#define TS_KERNELS(symbol, label, multiply, multiply_scratch, codes) \
    TS_KERNELS_ENCODING(symbol, label, multiply, multiply_scratch, codes, kEncode)
#define TS_KERNELS_ENCODING(symbol, label, multiply, multiply_scratch, codes, encoder) \
    TS_KERNELS_TILED(symbol, label, kDirectRows, 0, nullptr, multiply, multiply_scratch, codes, encoder)
#define TS_KERNELS_TILED(symbol, label, direct_rows, tiled_rows, prologue_tile, multiply, multiply_scratch, codes, encoder)         \
    extern const Kernels symbol;                                                                                                  \
    const Kernels symbol = {label,        direct_rows,   tiled_rows,   kWideScales,    prologue,         prologue_tile, multiply, multiply_scratch, \
                            attend_write, attend<codes>, attend_merge, attend_scratch, attend_tile_rows, argmax, latent_write, scores, weighted_sum, attend_entries, entry_scores, &encoder};
