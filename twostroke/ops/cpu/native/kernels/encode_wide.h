// Products for encoders where widening float16 weights costs as much as multiplying with them: the panels hold float32.
// acc = fma(w, x, acc) over inputs in ascending order, as in matmul_float.h, so the bits are the same.
#pragma once

namespace {

template <int MR> static void wide_rows(const EncodeProduct& a, const float* panel, int row, int output) {
    const float* x[MR];
    F acc[MR];
    TS_UNROLL for (int r = 0; r < MR; ++r) {
        x[r] = a.floats + (int64_t)(row + r) * a.inputs;
        acc[r] = splat(0.f);
    }
    for (int k = 0; k < a.inputs; k += 4) {
        X four[MR];
        TS_UNROLL for (int r = 0; r < MR; ++r) four[r] = load_x4(x[r] + k);
        F w = load(panel + (int64_t)k * kLanes);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = fma_lane<0>(w, four[r], acc[r]);
        w = load(panel + (int64_t)(k + 1) * kLanes);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = fma_lane<1>(w, four[r], acc[r]);
        w = load(panel + (int64_t)(k + 2) * kLanes);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = fma_lane<2>(w, four[r], acc[r]);
        w = load(panel + (int64_t)(k + 3) * kLanes);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = fma_lane<3>(w, four[r], acc[r]);
    }
    const F bias = a.bias ? load(a.bias + output) : splat(0.f);
    TS_UNROLL for (int r = 0; r < MR; ++r)
        store(a.out + (int64_t)(row + r) * a.outputs + output, activated(add(acc[r], bias), a.activation));
}

// `rows` rows from `row` on: at most MR.
template <int MR> static void wide_group(const EncodeProduct& a, const float* panel, int row, int rows, int output) {
    if (rows == MR) return wide_rows<MR>(a, panel, row, output);
    if constexpr (MR > 1) wide_group<MR - 1>(a, panel, row, rows, output);
}

// Rows in groups of about the same size: the last one is not a single row.
static void wide_multiply(const EncodeProduct& a, int panel, int panel_end, uint8_t*) {
    const int groups = (a.rows + kRowsFloat - 1) / kRowsFloat;
    for (; panel < panel_end; ++panel)
        for (int64_t g = 0; g < groups; ++g) {
            const int row = (int)(a.rows * g / groups), end = (int)(a.rows * (g + 1) / groups);
            wide_group<kRowsFloat>(a, a.wide + (int64_t)panel * a.inputs * kLanes, row, end - row, panel * kLanes);
        }
}

static size_t wide_scratch(int) { return 0; }

static const EncodeKernels kEncodeWide = {encode_activate, encode_add_norm, encode_attend, nullptr, wide_multiply, wide_scratch, true};

}  // namespace
