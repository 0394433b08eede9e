// Paged attention of one layer over a whole step: which thread does which tile.
#pragma once
#include "context.h"

void attend_step(Context& c, const AttendLayer& layer, const AttendBatch& batch, const float* qkv, float* out);
