// Attention over coded caches on AMX tiles: 16 lines x 16 keys x 64 dimensions, or 16 lines x 16 dimensions x 64 keys, in one
// instruction. The integer dots are the same and so is every float operation after them: the bits equal those of VectorCodes.
#pragma once

namespace {

// Tiles 0-3: sums. 4: queries or weights of 16 lines, 64 bytes each. 6: 16 quads of keys or values. 5 and 7: the last
// dimensions of a head that is no multiple of 64, or else 7 is another 6.
TS_INLINE void configure_attention(int padded) {
    TileConfig config;
    const int rest = padded % 64;
    for (int i = 0; i < 8; ++i) {
        config.bytes[i] = (uint16_t)(i == 5 && rest ? rest : 64);
        config.rows[i] = (uint8_t)(i == 7 && rest ? rest / 4 : 16);
    }
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
}

// The number of a tile is part of the instruction.
#define TS_SCORE_TILE(sums, a, b)                             \
    if (sums < count) {                                       \
        _tile_loadd(b, keys[sums] + 16 * d, 64);              \
        _tile_dpbssd(sums, a, b);                             \
    }
#define TS_SCORE_TILES(a, even, odd) \
    TS_SCORE_TILE(0, a, even) TS_SCORE_TILE(1, a, odd) TS_SCORE_TILE(2, a, even) TS_SCORE_TILE(3, a, odd)
#define TS_STORE_SCORES(sums) \
    if (sums < count) _tile_stored(sums, scores + 16 * sums, sizeof(float) * kStep)

// Integer dots of 16 lines with `count` panels of keys, in the place of the scores.
TS_INLINE void dot_keys(const int8_t* q, int padded, const uint8_t* const* keys, int count, float* scores) {
    const int whole = padded / 64 * 64, stride = padded * (int)sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int d = 0;
    for (; d < whole; d += 64) {
        _tile_loadd(4, q + d, stride);
        if (whole == padded) {
            TS_SCORE_TILES(4, 6, 7)
        } else {
            TS_SCORE_TILES(4, 6, 6)
        }
    }
    if (d < padded) {
        _tile_loadd(5, q + d, stride);
        TS_SCORE_TILES(5, 7, 7)
    }
    TS_STORE_SCORES(0);
    TS_STORE_SCORES(1);
    TS_STORE_SCORES(2);
    TS_STORE_SCORES(3);
    asm volatile("" ::: "memory");
}
#undef TS_STORE_SCORES
#undef TS_SCORE_TILES
#undef TS_SCORE_TILE

// Integer dots of the weights of 16 lines with 16 dimensions of the step's values. number: 0 to 3, in turn.
#define TS_WEIGH_TILE(sums)                   \
    _tile_loadd(6, values, 4 * padded);       \
    _tile_zero(sums);                         \
    _tile_dpbssd(sums, 4, 6);                 \
    _tile_stored(sums, out, 64)
TS_INLINE void dot_values(int number, const uint8_t* values, int padded, int32_t* out) {
    switch (number) {
        case 0: TS_WEIGH_TILE(0); return;
        case 1: TS_WEIGH_TILE(1); return;
        case 2: TS_WEIGH_TILE(2); return;
        default: TS_WEIGH_TILE(3);
    }
}
#undef TS_WEIGH_TILE

// What 16 lines gain from a step, from the integer dots of their weights: (padded / 16, 16 lines, 16 dimensions).
TS_INLINE void add_up(const Lines& s, int line, const int32_t* sums) {
    for (int i = line; i < line + 16; ++i, sums += 16) {
        const F step = splat(s.steps[i]), rescale = splat(s.rescale[i]);
        float* const into = s.values + i * s.padded;
        for (int d = 0; d < s.padded; d += 16) {
            const F dot = {_mm512_cvtepi32_ps(_mm512_load_si512(sums + 16 * d))};
            store(into + d, fma(dot, step, mul(load(into + d), rescale)));
        }
    }
}

struct TileCodes : VectorCodes {
    static constexpr int kLinesTogether = 32;
    static constexpr bool kGather = true;

    TS_MEMBER static void begin(int lines, int padded) {
        if (lines >= 16) configure_attention(padded);
    }
    TS_MEMBER static void finish(int lines) {
        if (lines >= 16) _tile_release();
    }

    TS_MEMBER static void score(const CodedStep& step, const Lines& s, float* q, int from, int to) {
        const int first = from / kBlock, count = (to + kBlock - 1) / kBlock - first;
        for (int line = 0; line < s.count; line += 16, q += 16 * s.padded) {
            float* const scores = s.scores + kStep * line + kBlock * first;
            dot_keys((const int8_t*)q, s.padded, step.panels.keys + first, count, scores);
            for (int b = 0; b < count; ++b) {
                const F key_scales = load(step.blocks.key_scales[first + b]);
                TS_UNROLL for (int i = 0; i < 16; ++i) {
                    float* const score = scores + kStep * i + kBlock * b;
                    store(score, mul(to_float_dot(bits_of(load(score))), mul(key_scales, splat(query_scale(q + i * s.padded, s.padded)))));
                }
            }
        }
    }

    // Codes of keys that are not seen are 0, and so is what they add, whatever lies in the place of their values.
    TS_MEMBER static void weigh(const CodedStep& step, const Lines& s) {
        const uint8_t* const values = (const uint8_t*)step.tile.block;
        int32_t* const sums = (int32_t*)(values + kStep * s.padded);  // behind them
        for (int line = 0; line < s.count; line += 16) {
            _tile_loadd(4, s.codes + kStep * line, kStep);
            for (int c = 0; c < s.padded / 16; ++c) dot_values(c % 4, values + 64 * c, s.padded, sums + line * s.padded + 256 * c);
        }
        asm volatile("" ::: "memory");
        for (int line = 0; line < s.count; line += 16) add_up(s, line, sums + line * s.padded);
    }

    // Lines [line, end) of the tile: as many as fill tiles, and the rest with vectors.
    template <bool Fetch> static void attend(const CodedStep& step, int line, int end) {
        const int whole = end - (end - line) % 16;
        for (; line < whole; line += kLinesTogether) {
            const Lines s = lines_from(step.tile, line, whole - line < kLinesTogether ? whole - line : kLinesTogether);
            const SeenKeys seen = seen_keys(step.task, line, s.count, step.start);
            score(step, s, queries_of(step.task, line, s.padded), seen.from, seen.to);
            soften_chunk(step, s, seen);
            weigh(step, s);
        }
        VectorCodes::attend<Fetch>(step, whole, end);
    }
};

}  // namespace
