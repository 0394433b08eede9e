// Products of many rows on AMX tiles: 16 rows x 16 outputs x 32 inputs in one instruction. The integer dots are the
// same, and so is every float operation after them (see matmul_codes.h): the bits equal those of every other path.
#pragma once
#include <immintrin.h>

#include <new>

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

// What 16 rows are multiplied with, in order: every group of inputs, and after it the second codes of that group if one
// of the rows has any.
struct Step {
    const Act* acts;  // of the first row
    int64_t group;
};
struct Steps {
    int64_t count;
    Step* step;
    float* scales;  // for each step d[16], then d · (sum of q)[16]

    Steps(uint8_t* memory, int groups)
        : count(0), step((Step*)(memory + 256 * (size_t)groups)), scales((float*)memory) {}
    static size_t bytes(int groups) { return (256 + 2 * sizeof(Step)) * (size_t)groups; }

    void add(const Act* acts, int groups, int group) {
        float* out = scales + 32 * count;
        for (int r = 0; r < kTileRows; ++r) {
            out[r] = acts[(int64_t)r * groups].d;
            out[16 + r] = acts[(int64_t)r * groups].dsum;
        }
        step[count++] = {acts, group};
    }
};

static Steps gather_steps(const Act* acts, int64_t extra, int groups, uint8_t* memory) {
    Steps steps(memory, groups);
    for (int g = 0; g < groups; ++g) {
        int32_t more = 0;
        for (int r = 0; r < kTileRows; ++r) more |= acts[(int64_t)r * groups + g].more;
        steps.add(acts + g, groups, g);
        if (more) steps.add(acts + extra + g, groups, g);
    }
    return steps;
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

// 16 rows x 16 outputs. The next step's tile is under way while this step's sums are scaled.
template <class Source>
static void tile_rows(const MatmulArgs& args, const uint8_t* panel, const Steps& steps, int row, int output) {
    constexpr size_t group = Expanded<Source>::group, codes = Expanded<Source>::scales;
    const int64_t stride = args.cols / kGroup * (int64_t)sizeof(Act);
    const Step* const step = steps.step;
    alignas(64) int32_t sums[2][256];
    F acc[kTileRows];
    TS_UNROLL for (int r = 0; r < kTileRows; ++r) acc[r] = splat(0.f);
    const auto at = [&](int64_t i) { return panel + step[i].group * group; };
    multiply_tile<0>(step[0].acts, stride, at(0) + codes, sums[0]);
    int64_t i = 0;
    for (; i + 2 <= steps.count; i += 2) {
        multiply_tile<1>(step[i + 1].acts, stride, at(i + 1) + codes, sums[1]);
        scale_tile<Source::minimum>(sums[0], at(i), steps.scales + i * 32, acc);
        if (i + 2 < steps.count) multiply_tile<0>(step[i + 2].acts, stride, at(i + 2) + codes, sums[0]);
        scale_tile<Source::minimum>(sums[1], at(i + 1), steps.scales + (i + 1) * 32, acc);
    }
    if (i < steps.count) scale_tile<Source::minimum>(sums[0], at(i), steps.scales + i * 32, acc);
    TS_UNROLL for (int r = 0; r < kTileRows; ++r) emit(args, row + r, output, acc[r]);
}

template <int K> static void tile_matmul(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    using Source = Reader<K>;
    const int groups = args.cols / kGroup, tiled = args.rows / kTileRows * kTileRows;
    uint8_t* const memory = scratch + groups * Expanded<Source>::group;
    configure_tiles();
    for (int block = 0; block < tiled; block += kRowBlock) {
        const int end = block + kRowBlock < tiled ? block + kRowBlock : tiled;
        Steps* const steps = (Steps*)memory;
        uint8_t* const lists = memory + kRowBlock / kTileRows * sizeof(Steps);
        for (int row = block, i = 0; row < end; row += kTileRows, ++i)
            new (steps + i) Steps(
                gather_steps(args.acts + (int64_t)row * groups, args.extra, groups, lists + i * Steps::bytes(groups)));
        for (int p = panel; p < panel_end; ++p) {
            const Source source{args.panels + p * args.panel_stride};
            expand_signed(source, groups, scratch);
            for (int row = block, i = 0; row < end; row += kTileRows, ++i)
                tile_rows<Source>(args, scratch, steps[i], row, p * kLanes);
            if (end == tiled) codes_all<Source, kRowsDirect>(args, source, tiled, args.rows, p * kLanes);
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
    if (is_float(kind)) return matmul_scratch(kind, cols);
    return matmul_scratch(kind, cols) + kRowBlock / kTileRows * (sizeof(Steps) + Steps::bytes(cols / kGroup));
}

}  // namespace
