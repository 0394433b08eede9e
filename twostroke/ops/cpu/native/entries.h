// Attention over lists of entries: compressed attention's window and chosen entries in one softmax.
#pragma once
#include "context.h"

// entries: of all rows one after the other, row r from starts[r]. q, out: (rows, heads, dim).
void attend_lists(Context& c, const EntriesCall& call, const void* const* entries, const int64_t* starts, const float* q, int rows, float* out);

// Of one row: keys (count, dim) -> out (count).
void score_entries(Context& c, const float* q, const float* weights, int heads, int dim, const float* keys, int count, float* out);
