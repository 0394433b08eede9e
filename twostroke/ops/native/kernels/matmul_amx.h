// Products of many rows on AMX tiles: 16 rows x 16 outputs x 32 inputs in one instruction. The integer dots are the
// same, and so is every float operation after them (see matmul_codes.h): the bits equal those of every other path.
#pragma once
#include <immintrin.h>

namespace {

constexpr int kTileRows = 16;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {0};
    uint16_t bytes[16] = {0};
    uint8_t rows[16] = {0};
};

// Tiles 0, 1: sums (16 x 16 int32). 2, 3: inputs (16 rows x 32 bytes). 4, 5: codes (8 quads x 64 bytes).
TS_INLINE void configure_tiles() {
    TileConfig config;
    for (int i = 0; i < 6; ++i) {
        config.bytes[i] = i == 2 || i == 3 ? 32 : 64;
        config.rows[i] = i < 4 ? 16 : 8;
    }
    _tile_loadconfig(&config);
}

// A panel for tiles: for each group its scales (and minimums) as floats, then signed bytes, quads as in the packed form.
template <class Source> static void expand_signed(Source source, int groups, uint8_t* out) {
    for (int g = 0; g < groups; ++g) {
        F scale[2], low;
        const uint8_t* codes = source.next(g, scale, low);
        store((float*)out, scale[0]);
        if (Source::minimum) store((float*)(out + 64), low);
        out += Expanded<Source>::scales;
        TS_UNROLL for (int i = 0; i < (Source::nibbles ? 4 : 8); ++i) {
            if (Source::nibbles) {
                W a, b;
                split_nibbles(codes + 64 * i, a, b);
                if (Source::eight) {
                    const __m512i eight = _mm512_set1_epi8(8);
                    a.v = _mm512_sub_epi8(a.v, eight), b.v = _mm512_sub_epi8(b.v, eight);
                }
                store_codes(out + 128 * i, a);
                store_codes(out + 128 * i + 64, b);
            } else {
                store_codes(out + 64 * i, load_codes(codes + 64 * i));
            }
        }
        out += 512;
    }
    asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
}

// The scales of 16 rows side by side: for each group d[16], then d · (sum of q)[16].
static void gather_scales(const Act* acts, int groups, float* out) {
    for (int g = 0; g < groups; ++g, out += 32)
        for (int r = 0; r < kTileRows; ++r) {
            out[r] = acts[(int64_t)r * groups + g].d;
            out[16 + r] = acts[(int64_t)r * groups + g].dsum;
        }
}

template <int Odd> TS_INLINE void multiply_tile(const Act* acts, int64_t stride, const uint8_t* codes, int32_t* sums) {
    if constexpr (Odd) {
        _tile_loadd(3, acts->q, stride);
        _tile_loadd(5, codes, 64);
        _tile_zero(1);
        _tile_dpbssd(1, 3, 5);
        _tile_stored(1, sums, 64);
    } else {
        _tile_loadd(2, acts->q, stride);
        _tile_loadd(4, codes, 64);
        _tile_zero(0);
        _tile_dpbssd(0, 2, 4);
        _tile_stored(0, sums, 64);
    }
}

template <bool Minimum> TS_INLINE void scale_tile(const int32_t* sums, const uint8_t* panel, const float* scales, F* acc) {
    const F scale = load((const float*)panel);
    const F low = Minimum ? load((const float*)(panel + 64)) : F{};
    TS_UNROLL for (int r = 0; r < kTileRows; ++r) {
        const F dot = {_mm512_cvtepi32_ps(_mm512_load_si512(sums + 16 * r))};
        acc[r] = fma(dot, mul(scale, splat(scales[r])), acc[r]);
        if (Minimum) acc[r] = fma(low, splat(scales[16 + r]), acc[r]);
    }
}

// 16 rows x 16 outputs. The next group's tile is under way while this group's sums are scaled.
template <class Source>
static void tile_rows(const MatmulArgs& args, const uint8_t* panel, const float* scales, int row, int output) {
    constexpr size_t group = Expanded<Source>::group, codes = Expanded<Source>::scales;
    const int groups = args.cols / kGroup;
    const Act* acts = args.acts + (int64_t)row * groups;
    const int64_t stride = (int64_t)groups * (int64_t)sizeof(Act);
    alignas(64) int32_t sums[2][256];
    F acc[kTileRows];
    TS_UNROLL for (int r = 0; r < kTileRows; ++r) acc[r] = splat(0.f);
    multiply_tile<0>(acts, stride, panel + codes, sums[0]);
    int g = 0;
    for (; g + 2 <= groups; g += 2) {
        multiply_tile<1>(acts + g + 1, stride, panel + (g + 1) * group + codes, sums[1]);
        scale_tile<Source::minimum>(sums[0], panel + g * group, scales + g * 32, acc);
        if (g + 2 < groups) multiply_tile<0>(acts + g + 2, stride, panel + (g + 2) * group + codes, sums[0]);
        scale_tile<Source::minimum>(sums[1], panel + (g + 1) * group, scales + (g + 1) * 32, acc);
    }
    if (g < groups) scale_tile<Source::minimum>(sums[0], panel + g * group, scales + g * 32, acc);
    TS_UNROLL for (int r = 0; r < kTileRows; ++r) emit(args, row + r, output, acc[r]);
}

template <int K> static void tile_matmul(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    using Source = Reader<K>;
    const int groups = args.cols / kGroup, tiled = args.rows / kTileRows * kTileRows;
    float* const scales = (float*)(scratch + groups * Expanded<Source>::group);
    configure_tiles();
    for (int block = 0; block < tiled; block += kRowBlock) {
        const int end = block + kRowBlock < tiled ? block + kRowBlock : tiled;
        for (int row = block; row < end; row += kTileRows)
            gather_scales(args.acts + (int64_t)row * groups, groups, scales + (row - block) / kTileRows * groups * 32);
        for (int p = panel; p < panel_end; ++p) {
            const Source source{args.panels + p * args.panel_stride};
            expand_signed(source, groups, scratch);
            for (int row = block; row < end; row += kTileRows)
                tile_rows<Source>(args, scratch, scales + (row - block) / kTileRows * groups * 32, row, p * kLanes);
            if (end == tiled) codes_all<Source, kDirectRows>(args, source, tiled, args.rows, p * kLanes);
        }
    }
    _tile_release();
}

static void matmul_tiles(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    if (args.rows >= kTileRows) switch (args.kind) {
            case Codes8: return tile_matmul<Codes8>(args, panel, panel_end, scratch);
            case Codes4: return tile_matmul<Codes4>(args, panel, panel_end, scratch);
            case Codes4M: return tile_matmul<Codes4M>(args, panel, panel_end, scratch);
            case Codes8M: return tile_matmul<Codes8M>(args, panel, panel_end, scratch);
            case Codes4K: return tile_matmul<Codes4K>(args, panel, panel_end, scratch);
            case Codes8K: return tile_matmul<Codes8K>(args, panel, panel_end, scratch);
        }
    matmul(args, panel, panel_end, scratch);
}

static size_t tiles_scratch(int kind, int cols) {
    return matmul_scratch(kind, cols) + (is_float(kind) ? 0 : (size_t)cols / kGroup * 128 * (kRowBlock / kTileRows));
}

}  // namespace
