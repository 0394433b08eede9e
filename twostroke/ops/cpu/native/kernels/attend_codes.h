// Attention over coded caches (int8, int4) in bytes: both products are integer dots, exact in any order.
//
//   q · k        q of a line as codes with one scale; score = dot · (scale of the key · scale of q), softmax in float
//   weights · v  x = weight · scale of the value, 0 for keys that the line does not see; the 64 of a step as codes
//                round(x · 127 / peak), 0 to 127; values = fma(dot, peak / 127, values · rescale)
// A step whose peak is below kTiny adds nothing. What a step adds depends on the line's own keys in it alone.
//
// Codes of a step are read as panels, 16 tokens each: keys as [padded / 4][16 tokens][4], values as [4][padded][4 tokens].
// An int8 block in the cache is such a panel if the head is a multiple of 16; others are made into one for every tile.
#pragma once

namespace {

// A query head as codes, in the place of its floats: padded codes, then the scale, then where the integer sum starts.
TS_INLINE float query_scale(const float* line, int padded) { return line[padded / 4]; }
TS_INLINE int32_t query_start(const float* line, int padded) { return (int32_t)float_to_bits(line[padded / 4 + 1]); }

static void code_query(float* line, int padded) {
    float x[kMaxHeadDim];
    memcpy(x, line, sizeof(float) * (size_t)padded);
    const float top = absolute_peak(x, padded);
    const bool empty = !(top >= kTiny && top < 3e38f);
    const F inverse = splat(127.f / top);
    const I zero = isplat(-0x4b400000);
    int32_t total = 0;
    for (int d = 0; d < padded; d += 16) {
        const I code = bits_of(add(empty ? splat(0.f) : mul(load(x + d), inverse), splat(kRounder)));
        store_low_bytes((int8_t*)line + d, code);
        total += isum(iadd(code, zero));
    }
    line[padded / 4] = top < kTiny ? 0.f : top / 127.f;
    line[padded / 4 + 1] = bits_to_float((uint32_t)(kDotStart - (kUnsignedCodes ? 128 * total : 0)));
}

struct StepPanels {
    const uint8_t* keys[kStep / kBlock];
    const uint8_t* values[kStep / kBlock];
};

template <int Format> TS_INLINE constexpr bool is_panel(int dim) { return Format == KVInt8 && dim % 16 == 0; }

// An int8 block whose head is no multiple of 16, with zeros for the dimensions that do not exist.
static void pad_keys(const uint8_t* block, int dim, int padded, uint8_t* out) {
    memset(out, 0, (size_t)padded * 16);
    memcpy(out, block, (size_t)(dim / 4) * 64);
    for (int t = 0; t < 16 && dim % 4; ++t) memcpy(out + dim / 4 * 64 + 4 * t, block + dim / 4 * 64 + 2 * t, 2);
}

static void pad_values(const uint8_t* block, int dim, int padded, uint8_t* out) {
    for (int part = 0; part < 4; ++part, block += dim * 4, out += padded * 4) {
        memcpy(out, block, (size_t)dim * 4);
        memset(out + dim * 4, 0, (size_t)(padded - dim) * 4);
    }
}

// 16 codes of a row of an int4 block.
TS_INLINE B int4_codes(const uint8_t* row, int d, int dim) {
    if (d + 16 <= dim) return load_nibbles(row + d / 2);
    uint8_t copy[8];
    memset(copy, 0x88, sizeof copy);
    memcpy(copy, row + d / 2, (size_t)(dim - d) / 2);
    return load_nibbles(copy);
}

static void turn_int4_keys(const uint8_t* rows, int dim, int padded, uint8_t* out) {
    alignas(64) int8_t block[16][64];
    for (int d = 0; d < padded; d += 64) {  // 16 tokens x 16 quads, transposed as 32-bit lanes
        const int end = padded - d < 64 ? padded - d : 64;
        F lane[16];
        for (int t = 0; t < 16; ++t) {
            for (int i = 0; i < end; i += 16) store_bytes(block[t] + i, int4_codes(rows + t * (dim / 2), d + i, dim));
            lane[t] = load((const float*)block[t]);
        }
        transpose(lane);
        for (int i = 0; 4 * i < end; ++i) store((float*)(out + 16 * d + 64 * i), lane[i]);
    }
}

static void turn_int4_values(const uint8_t* rows, int dim, int padded, uint8_t* out) {
    for (int part = 0; part < 4; ++part, rows += 2 * dim)
        for (int d = 0; d < padded; d += 16, out += 64) {
            const auto row = [&](int t) { return int4_codes(rows + t * (dim / 2), d, dim); };
            store_codes(out, interleave(row(0), row(1), row(2), row(3)));
        }
}

// Panels of tokens [from, to): the cache itself, or made here. gather: values are copied, so that they lie side by side.
template <int Format>
static StepPanels load_panels(const Lines& s, const StepBlocks& blocks, int dim, int from, int to, bool gather) {
    StepPanels panels;
    for (int b = from / kBlock; b * kBlock < to; ++b) {
        uint8_t* const keys = (uint8_t*)s.keys + b * kBlock * s.padded;
        uint8_t* const values = (uint8_t*)s.block + b * kBlock * s.padded;
        panels.keys[b] = is_panel<Format>(dim) ? blocks.keys[b] : keys;
        panels.values[b] = is_panel<Format>(dim) && !gather ? blocks.values[b] : values;
        if (is_panel<Format>(dim) && gather) memcpy(values, blocks.values[b], (size_t)(kBlock * dim));
        if (is_panel<Format>(dim)) continue;
        if (Format == KVInt8) pad_keys(blocks.keys[b], dim, s.padded, keys), pad_values(blocks.values[b], dim, s.padded, values);
        else turn_int4_keys(blocks.keys[b], dim, s.padded, keys), turn_int4_values(blocks.values[b], dim, s.padded, values);
    }
    return panels;
}

// body(Constant<lines>, first line) for lines [line, end): N at a time, then what is left at once.
template <int N, class Body> TS_INLINE void lines_at_once(int line, int end, const Body& body) {
    for (; line + N <= end; line += N) body(Constant<N>{}, line);
    if constexpr (N > 1)
        if (line < end) lines_at_once<N - 1>(line, end, body);
}

constexpr int at_once(int sums, int lines) { return sums >= 4 * lines ? 4 : sums >= 2 * lines ? 2 : 1; }

// ---- q · k -----------------------------------------------------------------------------------------------------------

// One quad of V panels for N lines. Fetch: the same place of the panels that are read next is asked for.
template <int Quad, int N, int V, bool Fetch>
TS_INLINE void add_key_quad(const uint8_t* const* keys, const uint8_t* const* ahead, int offset, const A* a, I (*acc)[V]) {
    TS_UNROLL for (int v = 0; v < V; ++v) {
        if (Fetch) __builtin_prefetch(ahead[v] + offset + 64 * Quad);
        const W w = to_unsigned(load_codes(keys[v] + offset + 64 * Quad));
        TS_UNROLL for (int i = 0; i < N; ++i) acc[i][v] = dot4_keys<Quad>(acc[i][v], w, a[i]);
    }
}

// N lines, V panels.
template <int N, int V, bool Fetch>
static void score_codes(float* q, int padded, const uint8_t* const* keys, const float* const* scales, const uint8_t* const* ahead,
                        float* scores) {
    I acc[N][V];
    TS_UNROLL for (int i = 0; i < N; ++i)
        TS_UNROLL for (int v = 0; v < V; ++v) acc[i][v] = isplat(query_start(q + i * padded, padded));
    for (int d = 0; d < padded; d += 16) {
        A a[N];
        TS_UNROLL for (int i = 0; i < N; ++i) a[i] = load_inputs((const int8_t*)(q + i * padded) + d);
        add_key_quad<0, N, V, Fetch>(keys, ahead, 16 * d, a, acc);
        add_key_quad<1, N, V, Fetch>(keys, ahead, 16 * d, a, acc);
        add_key_quad<2, N, V, Fetch>(keys, ahead, 16 * d, a, acc);
        add_key_quad<3, N, V, Fetch>(keys, ahead, 16 * d, a, acc);
    }
    TS_UNROLL for (int v = 0; v < V; ++v) {
        const F key_scales = load(scales[v]);
        TS_UNROLL for (int i = 0; i < N; ++i)
            store(scores + kStep * i + 16 * v, mul(to_float_dot(acc[i][v]), mul(key_scales, splat(query_scale(q + i * padded, padded)))));
    }
}

// ---- weights · v -----------------------------------------------------------------------------------------------------

template <int Quad, int N, int C, bool Fetch>
TS_INLINE void add_value_quad(const uint8_t* values, const uint8_t* ahead, const A* a, I (*acc)[C]) {
    TS_UNROLL for (int c = 0; c < C; ++c) {
        if (Fetch) __builtin_prefetch(ahead + 64 * c);
        const W w = load_codes(values + 64 * c);
        TS_UNROLL for (int i = 0; i < N; ++i) acc[i][c] = dot4_weights<Quad>(acc[i][c], w, a[i]);
    }
}

// N lines, dimensions [d, d + 16 C), blocks [b, end).
template <int N, int C, bool Fetch>
TS_INLINE void weigh_codes(const Lines& s, const uint8_t* const* values, const uint8_t* const* ahead, int line, int d, int b, int end) {
    I acc[N][C];
    TS_UNROLL for (int i = 0; i < N; ++i)
        TS_UNROLL for (int c = 0; c < C; ++c) acc[i][c] = isplat(kDotStart);
    const int part = 4 * s.padded;
    for (; b < end; ++b) {
        A a[N];
        TS_UNROLL for (int i = 0; i < N; ++i) a[i] = load_inputs(s.codes + (line + i) * kStep + b * kBlock);
        const uint8_t *const from = values[b] + 4 * d, *const next = ahead[b] + 4 * d;
        add_value_quad<0, N, C, Fetch>(from, next, a, acc);
        add_value_quad<1, N, C, Fetch>(from + part, next + part, a, acc);
        add_value_quad<2, N, C, Fetch>(from + 2 * part, next + 2 * part, a, acc);
        add_value_quad<3, N, C, Fetch>(from + 3 * part, next + 3 * part, a, acc);
    }
    TS_UNROLL for (int i = 0; i < N; ++i)
        TS_UNROLL for (int c = 0; c < C; ++c) {
            float* const into = s.values + (line + i) * s.padded + d + 16 * c;
            store(into, fma(to_float_dot(acc[i][c]), splat(s.steps[line + i]), mul(load(into), splat(s.rescale[line + i]))));
        }
}

// ---- a step of a tile ------------------------------------------------------------------------------------------------

struct CodedStep {
    const AttendTask& task;
    const Lines& tile;
    const StepBlocks& blocks;
    const StepPanels& panels;
    const Following& ahead;
    int64_t start;
    int from, to;  // tokens of the step that the tile reads
};

TS_INLINE void soften_chunk(const CodedStep& step, const Lines& s, const SeenKeys& seen) {
    const auto soften = seen.plain ? soften_lines<true, true> : soften_lines<false, true>;
    for (int i = 0; i < s.count; i += 16)
        soften(s, step.task.layer->softcap, i, s.count - i < 16 ? s.count - i : 16, seen, step.blocks.value_scales);
}

// A step over a coded cache with vectors. Others give the same bits: attend_tiles.h, attend_octets.h.
struct VectorCodes {
    static constexpr int kLinesTogether = 24;
    static constexpr bool kGather = false;  // the values of a step must lie side by side

    TS_MEMBER static void begin(int, int) {}
    TS_MEMBER static void finish(int) {}

    // Fetch: what follows is asked for on the way.
    template <bool Fetch> static void score(const CodedStep& step, const Lines& s, float* q, int from, int to) {
        lines_at_once<kLinesCoded>(0, s.count, [&](auto lines, int i) {
            constexpr int N = decltype(lines)::value, V = at_once(kScoreSums, N);
            int b = from / kBlock;
            const auto panels = [&](auto count) {
                score_codes<N, decltype(count)::value, Fetch>(q + (int64_t)i * s.padded, s.padded, step.panels.keys + b, step.blocks.key_scales + b,
                                                              step.ahead.keys + b, s.scores + kStep * i + kBlock * b);
            };
            for (; (b + V - 1) * kBlock < to; b += V) panels(Constant<V>{});
            if constexpr (V > 1)
                for (; b * kBlock < to; ++b) panels(Constant<1>{});
        });
    }

    template <bool Fetch> static void weigh(const CodedStep& step, const Lines& s, int from, int to) {
        const int b = from / kBlock, end = (to + kBlock - 1) / kBlock;
        lines_at_once<kLinesCoded>(0, s.count, [&](auto lines, int i) {
            constexpr int N = decltype(lines)::value, C = at_once(kWeighSums, N);
            int d = 0;
            for (; d + 16 * C <= s.padded; d += 16 * C) weigh_codes<N, C, Fetch>(s, step.panels.values, step.ahead.values, i, d, b, end);
            if constexpr (C > 1)
                for (; d < s.padded; d += 16) weigh_codes<N, 1, Fetch>(s, step.panels.values, step.ahead.values, i, d, b, end);
        });
    }

    // Lines [line, end) of the tile.
    template <bool Fetch> static void attend(const CodedStep& step, int line, int end) {
        for (; line < end; line += kLinesTogether) {
            const Lines s = lines_from(step.tile, line, end - line < kLinesTogether ? end - line : kLinesTogether);
            const SeenKeys seen = seen_keys(step.task, line, s.count, step.start);
            score<Fetch>(step, s, queries_of(step.task, line, s.padded), seen.from, seen.to);
            soften_chunk(step, s, seen);
            weigh<Fetch>(step, s, seen.from, seen.to);
        }
    }
};

}  // namespace
