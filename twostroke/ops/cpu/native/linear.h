// before(x) · weightᵀ + bias, and rows of a table.
#pragma once
#include "context.h"

Weight* pack_weight(Context& c, int parts, const int32_t* formats, const int32_t* rows, const uint8_t* const* data, int cols,
                    const float* bias);

struct LinearArgs {
    const float* x;
    int64_t x_stride;
    int rows;
    int before;
    const float* norm;
    float eps;
    float* out;
    int64_t out_stride;
    int add;
    const int32_t* index = nullptr;  // which row of x is the r-th of the input: only with something before the product
};

void linear(Context& c, const Weight& weight, const LinearArgs& args);

// The same for groups of rows that follow each other, each with a weight of its own; all weights have the same shape.
// same: one row is the input of all groups, which then have one row each.
void linear_groups(Context& c, const std::vector<RowGroup>& groups, const LinearArgs& args, bool same = false);
void norm_rows(Context& c, const PrologueArgs& args);
bool embed(Context& c, const Weight& table, const int64_t* tokens, int count, float scale, float* out);
