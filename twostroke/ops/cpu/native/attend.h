// Paged attention of one layer over a whole step: which thread does which tile.
#pragma once
#include "context.h"

// The second half alone: softmax(q · k) · v for queries that are rotated, scaled and laid out as AttendTask::q.
void attend_lines(Context& c, const AttendLayer& layer, const AttendBatch& batch, float* q, float* out);
void attend_step(Context& c, const AttendLayer& layer, const AttendBatch& batch, const float* qkv, float* out);
