// Products of several rows on AMX tiles: up to 16 rows x 16 outputs x 32 inputs in one instruction. The integer dots are
// the same, and so is every float operation after them (see matmul_codes.h): the bits equal those of every other path.
#pragma once
#include <immintrin.h>

namespace {

constexpr int kTiledFrom = 9;  // rows: fewer are multiplied faster by vectors
constexpr int kSums = 4;       // tiles of sums that are under way at a time

// When a panel serves one tile of rows only, its groups are expanded shortly before their turn. Not just before it: a
// tile load waits until what it reads has left the store buffer.
constexpr int kLead = 4;
constexpr int kSlots = kLead + kSums;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {0};
    uint16_t bytes[16] = {0};
    uint8_t rows[16] = {0};
};

// Tiles 0-3: sums (rows x 16 int32). 4, 5: inputs (rows x 32 bytes). 6, 7: codes (8 quads x 64 bytes). Of half a group
// if halves is 2.
TS_INLINE void configure_tiles(int rows, int halves) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.bytes[i] = (uint16_t)(i == 4 || i == 5 ? kGroup / halves : 64);
        config.rows[i] = (uint8_t)(i < 6 ? rows : 8 / halves);
    }
    asm volatile("" ::"r"(&config) : "memory");  // all of it is read, more than the compiler is told
    _tile_loadconfig(&config);
}

// A group for tiles: its scales (and minimums) as floats, then, where the packed codes are nibbles, signed bytes.
template <class Source> TS_INLINE const uint8_t* expand_group(Source& source, int g, uint8_t* out) {
    F scale[2], low;
    const uint8_t* codes = source.next(g, scale, low);
    fetch<Source::nibbles ? 320 : 576>(codes);
    out = store_scales<Source>(scale, low, out);
    if (Source::nibbles)
        TS_UNROLL for (int i = 0; i < 4; ++i) {
            W a, b;
            split_nibbles(codes + 64 * i, a, b);
            if (Source::eight) {
                const __m512i eight = _mm512_set1_epi8(8);
                a.v = _mm512_sub_epi8(a.v, eight), b.v = _mm512_sub_epi8(b.v, eight);
            }
            store_codes(out + 128 * i, a);
            store_codes(out + 128 * i + 64, b);
        }
    asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
    return codes;
}

// The tile's number must be written out: it is part of the instruction.
#define TS_MULTIPLY_TILE(c, a, b)                  \
    _tile_loadd(a, inputs, kGroup);                \
    _tile_loadd(b, codes, 64);                     \
    _tile_zero(c);                                 \
    _tile_dpbssd(c, a, b);                         \
    _tile_stored(c, sums, 64)
template <int Number> TS_INLINE void multiply_tile(const int8_t* inputs, const uint8_t* codes, int32_t* sums) {
    if constexpr (Number == 0) { TS_MULTIPLY_TILE(0, 4, 6); }
    if constexpr (Number == 1) { TS_MULTIPLY_TILE(1, 5, 7); }
    if constexpr (Number == 2) { TS_MULTIPLY_TILE(2, 4, 6); }
    if constexpr (Number == 3) { TS_MULTIPLY_TILE(3, 5, 7); }
}
#undef TS_MULTIPLY_TILE

// What rows of one tile are multiplied with, in order: every group (half by half where halves have scales of their own),
// and after it the second codes of that group if one of the rows has any.
struct Step {
    const ActTile* acts;
    int32_t group, half;
};

static int64_t list_steps(const ActTile* acts, int64_t extra, int groups, int halves, Step* out) {
    Step* next = out;
    for (int g = 0; g < groups; ++g)
        for (int pass = 0; pass <= acts[g].more; ++pass)
            for (int half = 0; half < halves; ++half) *next++ = {acts + g + pass * extra, g, half};
    return next - out;
}

struct TilePanel {
    const uint8_t* packed;
    uint8_t* expanded;
    int slots;   // groups that `expanded` holds at a time: a power of two
    bool fresh;  // nothing is expanded yet
    int output;
};

// Up to MR rows x 16 outputs.
template <int K, int MR> struct TileProduct {
    using Source = Reader<K>;
    static constexpr size_t scales = Expanded<Source>::scales;
    const TilePanel& panel;
    const Step* steps;
    Source source;
    int groups, expanded;
    int32_t (*sums)[16 * kTileRows];

    TS_MEMBER uint8_t* slot(int g) const { return panel.expanded + (size_t)(g & (panel.slots - 1)) * Expanded<Source>::group; }

    template <int Number> TS_MEMBER void start(int64_t i) {
        const Step step = steps[i];
        while (expanded < groups && expanded <= step.group + kLead) {
            expand_group(source, expanded, slot(expanded));
            ++expanded;
        }
        const uint8_t* codes = Source::nibbles ? slot(step.group) + scales
                                               : panel.packed + group_offset(K, (size_t)step.group) + group_scales(K);
        multiply_tile<Number>(step.acts->q[0] + 16 * step.half, codes + 256 * step.half, sums[Number]);
    }
    template <int Number> TS_MEMBER void finish(int64_t i, F* acc) const {
        const Step step = steps[i];
        const float* const scales_of = (const float*)slot(step.group);
        const F scale = load(scales_of + 16 * step.half), low = Source::minimum ? load(scales_of + 16) : F{};
        TS_UNROLL for (int r = 0; r < MR; ++r) {
            const F dot = {_mm512_cvtepi32_ps(_mm512_load_si512(sums[Number] + 16 * r))};
            acc[r] = fma(dot, mul(scale, splat(step.acts->d[r])), acc[r]);
            if (Source::minimum) acc[r] = fma(low, splat(step.acts->dsum[r]), acc[r]);
        }
    }
};

// The coming tiles are under way while the sums of the last one are scaled.
template <int K, int MR>
static void tile_rows(const MatmulArgs& args, const TilePanel& panel, const Step* steps, int64_t count, int row, int rows) {
    const int groups = args.cols / kGroup;
    alignas(64) int32_t sums[kSums][16 * kTileRows];
    TileProduct<K, MR> p{panel, steps, {panel.packed}, groups, panel.fresh ? 0 : groups, sums};
    F acc[MR];
    TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = splat(0.f);
    p.template start<0>(0);
    if (count > 1) p.template start<1>(1);
    if (count > 2) p.template start<2>(2);
    for (int64_t i = 0; i < count; i += 4) {
        if (i + 3 < count) p.template start<3>(i + 3);
        p.template finish<0>(i, acc);
        if (i + 4 < count) p.template start<0>(i + 4);
        if (i + 1 < count) p.template finish<1>(i + 1, acc);
        if (i + 5 < count) p.template start<1>(i + 5);
        if (i + 2 < count) p.template finish<2>(i + 2, acc);
        if (i + 6 < count) p.template start<2>(i + 6);
        if (i + 3 < count) p.template finish<3>(i + 3, acc);
    }
    TS_UNROLL for (int r = 0; r < MR; ++r)
        if (r < rows) emit(args, row + r, panel.output, acc[r]);
}

template <int K> static void tile_matmul(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    using Source = Reader<K>;
    const int groups = args.cols / kGroup;
    Step* const steps = (Step*)(scratch + groups * Expanded<Source>::group);
    int64_t counts[kRowBlock / kTileRows];
    configure_tiles(args.rows < kTileRows ? args.rows : kTileRows, Source::halves);
    for (int block = 0; block < args.rows; block += kRowBlock) {
        const int end = block + kRowBlock < args.rows ? block + kRowBlock : args.rows;
        const auto steps_of = [&](int row) { return steps + (int64_t)(row - block) / kTileRows * 2 * Source::halves * groups; };
        for (int row = block; row < end; row += kTileRows)
            counts[(row - block) / kTileRows] =
                list_steps(args.tiles + row / kTileRows * args.tile_stride, args.extra, groups, Source::halves, steps_of(row));
        for (int p = panel; p < panel_end; ++p) {
            const int slots = end - block > kTileRows ? 1 << 30 : kSlots;
            TilePanel place{args.panels + p * args.panel_stride, scratch, slots, true, p * kLanes};
            for (int row = block; row < end; row += kTileRows, place.fresh = false) {
                const int64_t count = counts[(row - block) / kTileRows];
                const int rows = end - row;
                if (rows <= 4) tile_rows<K, 4>(args, place, steps_of(row), count, row, rows);
                else if (rows <= 8) tile_rows<K, 8>(args, place, steps_of(row), count, row, rows);
                else if (rows <= 12) tile_rows<K, 12>(args, place, steps_of(row), count, row, rows);
                else tile_rows<K, 16>(args, place, steps_of(row), count, row, rows < kTileRows ? rows : kTileRows);
            }
        }
    }
    _tile_release();
}

static size_t tiles_scratch(int kind, int cols) {
    if (is_float(kind)) return matmul_scratch(kind, cols);
    const size_t groups = (size_t)cols / kGroup;
    return matmul_scratch(kind, cols) + kRowBlock / kTileRows * 2 * (kind == Codes8S ? 2 : 1) * groups * sizeof(Step);
}

static void matmul_tiles(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    if (args.tiles) switch (args.kind) {
            case Codes8: return tile_matmul<Codes8>(args, panel, panel_end, scratch);
            case Codes4: return tile_matmul<Codes4>(args, panel, panel_end, scratch);
            case Codes4M: return tile_matmul<Codes4M>(args, panel, panel_end, scratch);
            case Codes8M: return tile_matmul<Codes8M>(args, panel, panel_end, scratch);
            case Codes4K: return tile_matmul<Codes4K>(args, panel, panel_end, scratch);
            case Codes8K: return tile_matmul<Codes8K>(args, panel, panel_end, scratch);
            case Codes8S: return tile_matmul<Codes8S>(args, panel, panel_end, scratch);
        }
    matmul(args, panel, panel_end, scratch);
}

}  // namespace
