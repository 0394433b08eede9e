// Products of float rows with float32, float16 or bfloat16 weights: acc = fma(w, x, acc) over inputs in ascending
// order, in float32. One chain per output element whatever the number of rows.
#pragma once

namespace {

template <int K> TS_INLINE F load_weights(const uint8_t* panel, int64_t k) {
    if (K == Float32) return load((const float*)panel + k * kLanes);
    if (K == Half) return load_half((const uint16_t*)panel + k * kLanes);
    return load_bfloat((const uint16_t*)panel + k * kLanes);
}

template <int K, int MR> static void float_rows(const MatmulArgs& args, const uint8_t* panel, int row, int output) {
    const float* x[MR];
    F acc[MR];
    TS_UNROLL for (int r = 0; r < MR; ++r) {
        x[r] = args.x + (row + r) * args.x_stride;
        acc[r] = splat(0.f);
    }
    int k = 0;
    for (; k + 4 <= args.cols; k += 4) {
        X four[MR];
        TS_UNROLL for (int r = 0; r < MR; ++r) four[r] = load_x4(x[r] + k);
        F w = load_weights<K>(panel, k);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = fma_lane<0>(w, four[r], acc[r]);
        w = load_weights<K>(panel, k + 1);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = fma_lane<1>(w, four[r], acc[r]);
        w = load_weights<K>(panel, k + 2);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = fma_lane<2>(w, four[r], acc[r]);
        w = load_weights<K>(panel, k + 3);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = fma_lane<3>(w, four[r], acc[r]);
    }
    for (; k < args.cols; ++k) {
        const F w = load_weights<K>(panel, k);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = fma(w, splat(x[r][k]), acc[r]);
    }
    TS_UNROLL for (int r = 0; r < MR; ++r) emit(args, row + r, output, acc[r]);
}

template <int K, int MR>
static void float_all(const MatmulArgs& args, const uint8_t* panel, int row, int end, int output) {
    for (; row + MR <= end; row += MR) float_rows<K, MR>(args, panel, row, output);
    if constexpr (MR > 1)
        if (row < end) float_all<K, MR / 2>(args, panel, row, end, output);
}

template <int K> static void float_matmul(const MatmulArgs& args, int panel, int panel_end) {
    for (int block = 0; block < args.rows; block += kRowBlock) {
        const int end = block + kRowBlock < args.rows ? block + kRowBlock : args.rows;
        for (int p = panel; p < panel_end; ++p)
            float_all<K, kRowsFloat>(args, args.panels + p * args.panel_stride, block, end, p * kLanes);
    }
}

static void matmul(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    switch (args.kind) {
        case Float32: return float_matmul<Float32>(args, panel, panel_end);
        case Half: return float_matmul<Half>(args, panel, panel_end);
        case Bfloat: return float_matmul<Bfloat>(args, panel, panel_end);
        case Codes8: return codes_matmul<Codes8>(args, panel, panel_end, scratch);
        case Codes4: return codes_matmul<Codes4>(args, panel, panel_end, scratch);
        case Codes4M: return codes_matmul<Codes4M>(args, panel, panel_end, scratch);
        case Codes8M: return codes_matmul<Codes8M>(args, panel, panel_end, scratch);
        case Codes4X: return codes_matmul<Codes4X>(args, panel, panel_end, scratch);
        case Codes4K: return codes_matmul<Codes4K>(args, panel, panel_end, scratch);
        case Codes8K: return codes_matmul<Codes8K>(args, panel, panel_end, scratch);
        case Codes8S: return codes_matmul<Codes8S>(args, panel, panel_end, scratch);
    }
}

}  // namespace
