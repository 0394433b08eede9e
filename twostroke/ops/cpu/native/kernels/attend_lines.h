// The running softmax of the lines of one tile.
//
// A "line" is one query head of one row. Lines of one tile share a KV head and a request, so a step of K and V is
// converted once for all of them; they are scored, softened and weighed a chunk at a time. What a line computes depends on
// its own keys and their absolute positions only:
//   score of key t    float caches: 16 partial sums over the dimensions d = j (mod 16), each in ascending order, then the
//                     tree of sum(); coded caches: an exact integer dot of codes, times both scales
//   step of 64 keys   one maximum, one rescale, then values in ascending t (coded caches: see attend_codes.h)
//   split of 256 keys one running (maximum, sum, values); splits are merged in ascending order
// so neither tile, thread count nor phase changes a bit. Keys a line does not see contribute exactly nothing; tokens
// after the request's last one are never read.
#pragma once

namespace {

constexpr int kStep = 64;         // keys of one softmax update, at multiples of this position
constexpr int kChunkLines = 32;   // lines, at most, whose scores are in the nearest cache together
constexpr float kNever = -1e30f;  // below every score: the maximum before the first key

template <int Value> struct Constant { static constexpr int value = Value; };

struct Lines {
    int count, padded, wide;  // lines; head_dim and value_dim, padded
    float* scores;    // (chunk, 64): scores, then weights of the current step
    float* sums;      // (count, 16): lane sums of the weights
    float* values;    // (count, wide)
    float* rescale;   // (count)
    float* maximum;   // (count)
    float* keys;      // the step's keys: (4 blocks, padded, 16) floats, or panels of codes where the cache has none
    float* block;     // the step's values: (64, wide) floats, or panels of codes
    int8_t* codes;    // (chunk, 64): weights as codes, and
    float* steps;     // (chunk): what one is worth, over a coded cache
    float* queries;   // (count, padded): turned, where attention multiplies by lane
};

TS_INLINE Lines place_lines(int count, int padded, int wide, uint8_t* scratch) {
    float* p = (float*)scratch;
    Lines s{};
    s.count = count, s.padded = padded, s.wide = wide;
    s.scores = p, p += kChunkLines * kStep;
    s.sums = p, p += count * 16;
    s.values = p, p += count * wide;
    s.keys = p, p += padded * kStep;
    s.block = p, p += padded * kStep;
    s.codes = (int8_t*)p, p += kChunkLines * kStep / 4;
    s.steps = p, p += kChunkLines;
    s.queries = p, p += kByLane ? count * padded : 0;
    s.rescale = p, p += count + 16;  // read and written 16 at a time
    s.maximum = p;
    return s;
}

TS_INLINE Lines lines_from(Lines s, int line, int count) {
    s.count = count;
    s.sums += 16 * line, s.values += line * s.wide, s.rescale += line, s.maximum += line, s.queries += line * s.padded;
    return s;
}

static size_t lines_bytes(int count, int padded) {
    const int chunk = kChunkLines * (kStep + kStep / 4 + 1), lines = count * (16 + (kByLane ? 2 : 1) * padded + 2) + 32;
    return (sizeof(float) * (size_t)(chunk + lines + 2 * padded * kStep) + 63) / 64 * 64;
}

TS_INLINE void reset_lines(const Lines& s) {
    for (int i = 0; i < s.count; ++i) s.maximum[i] = kNever;
    memset(s.sums, 0, sizeof(float) * (size_t)s.count * 16);
    memset(s.values, 0, sizeof(float) * (size_t)s.count * s.wide);
}

TS_INLINE float exp_of(float x) {  // through the same vector code: one definition of e^x
    float lane[16];
    store(lane, vexp(splat(x)));
    return lane[0];
}

// Which keys of a step the lines of a chunk see: [low, high) each. None of them sees a key outside of [from, to).
struct SeenKeys {
    int from, to;
    bool plain;  // every line sees all 64, and there is no cap: the next two are not filled
    int low[kChunkLines], high[kChunkLines];
};

TS_INLINE F seen_only(F x, const SeenKeys& seen, int line, int t, F other) {
    const int low = seen.low[line] - t, high = seen.high[line] - t;
    if (low <= 0 && high >= 16) return x;
    return between(x, low < 0 ? 0 : low > 16 ? 16 : low, high < 0 ? 0 : high > 16 ? 16 : high, other);
}

// Weights of lines [line, line + count), in the place of the scores, as codes of a step. peaks_of: their largest, each in 16 lanes.
template <bool Plain> static void code_weights(const Lines& s, int line, int count, const SeenKeys& seen, const F* peaks_of) {
    const int from = Plain ? 0 : seen.from, to = Plain ? kStep : seen.to;
    const F top = peaks(peaks_of);
    alignas(64) float highest[16], inverse[16];
    store(highest, top);
    store(inverse, div(splat(127.f), top));
    store(s.steps + line, div(top, splat(127.f)));
    for (int i = 0; i < count; ++i) {
        const float* w = s.scores + kStep * (line + i);
        int8_t* codes = s.codes + kStep * (line + i);
        if (!Plain) memset(codes, 0, kStep);
        if (!(highest[i] >= kTiny)) {
            memset(codes, 0, kStep);
            s.steps[line + i] = 0.f;
            continue;
        }
        for (int t = from; t < to; t += 16)  // kExp[0] is kRounder, to be loaded
            store_low_bytes(codes + t, bits_of(fma(load(w + t), splat(inverse[i]), addend(kExp[0]))));
    }
}

// Turn the scores of lines [line, line + count) into weights, at most 16 of them: what is one number for a line is a lane
// here. scales: of the values of a coded cache, block by block; its weights become codes. Plain: see SeenKeys.
template <bool Plain, bool Coded>
static void soften_lines(const Lines& s, float cap, int line, int count, const SeenKeys& seen, const float* const* scales) {
    const int from = Plain ? 0 : seen.from, to = Plain ? kStep : seen.to;
    F lane[16];
    for (int i = 0; i < 16; ++i) lane[i] = splat(kNever);
    for (int i = 0; i < count; ++i) {
        float* w = s.scores + kStep * (line + i);
        for (int t = from; t < to; t += 16) {
            F x = load(w + t);
            if (!Plain) {
                if (cap > 0.f) x = softcap(x, cap);
                x = seen_only(x, seen, line + i, t, splat(kNever));
                store(w + t, x);
            }
            lane[i] = vmax(lane[i], x);
        }
    }
    const F before = load(s.maximum + line), now = vmax(before, peaks(lane)), factor = vexp_below(sub(before, now));
    store(s.maximum + line, now);  // lines past `count` keep what they have
    store(s.rescale + line, factor);
    for (int i = 0; i < count; ++i) {
        float* w = s.scores + kStep * (line + i);
        const F top = splat(s.maximum[line + i]);
        F total = splat(0.f), highest = splat(0.f);
        for (int t = from; t < to; t += 16) {
            F p = vexp_below(sub(load(w + t), top));
            if (!Plain) p = seen_only(p, seen, line + i, t, splat(0.f));
            total = add(total, p);
            if (Coded) {
                p = mul(p, load(scales[t / kBlock]));
                if (!Plain) p = seen_only(p, seen, line + i, t, splat(0.f));  // scales of other tokens may be anything
                highest = vmax(highest, p);
            }
            store(w + t, p);
        }
        lane[i] = highest;
        float* lanes = s.sums + 16 * (line + i);
        store(lanes, fma(load(lanes), splat(s.rescale[line + i]), total));
    }
    if (Coded) code_weights<Plain>(s, line, count, seen, lane);
}

// (maximum, sum, values) of one line, merged with what came before it.
TS_INLINE void merge_line(float& maximum, float& total, float* values, float m, float l, const float* v, int wide) {
    const float top = m > maximum || m != m ? m : maximum;
    const float before = exp_of(maximum - top), after = exp_of(m - top);
    total = __builtin_fmaf(total, before, l * after);
    maximum = top;
    for (int d = 0; d < wide; d += 16)
        store(values + d, fma(load(values + d), splat(before), mul(load(v + d), splat(after))));
}

// The split that ended, lines [line, line + count) of s, merged into what came before it. At most 16: see merge_line.
static void merge_lines(const Lines& merged, float* total, const Lines& s, int line, int count) {
    alignas(64) float highest[16], first[16], before[16], after[16];
    const F old = load(merged.maximum + line), now = load(s.maximum + line), top = vmax(old, now);
    store(highest, top), store(first, old), store(before, vexp(sub(old, top))), store(after, vexp(sub(now, top)));
    for (int i = 0; i < count; ++i) {
        const float l = sum(load(s.sums + 16 * (line + i)));
        const float* v = s.values + (int64_t)(line + i) * s.wide;
        float* into = merged.values + (int64_t)(line + i) * s.wide;
        merged.maximum[line + i] = highest[i];
        if (first[i] == kNever) {  // the first split is taken as it is
            total[line + i] = l;
            memcpy(into, v, sizeof(float) * (size_t)s.wide);
            continue;
        }
        total[line + i] = __builtin_fmaf(total[line + i], before[i], l * after[i]);
        for (int d = 0; d < s.wide; d += 16) store(into + d, fma(load(into + d), splat(before[i]), mul(load(v + d), splat(after[i]))));
    }
}

// The result of a line of this query head. Its sink, where there is one, comes last: one more score, whose value is zero.
TS_INLINE void finish_line(const AttendLayer& L, int head, float maximum, float total, const float* values, float* out) {
    const int dim = L.value_dim;
    float factor = 1.f;
    if (L.sinks) {
        const float sink = L.sinks[head], top = maximum > sink || maximum != maximum ? maximum : sink;
        factor = exp_of(maximum - top);
        total = __builtin_fmaf(total, factor, exp_of(sink - top));
    }
    for (int d = 0; d < dim; d += 16) {
        const F x = load(values + d), v = div(L.sinks ? mul(x, splat(factor)) : x, splat(total));
        if (d + 16 <= dim) store(out + d, v);
        else store_first(out + d, v, dim - d);
    }
}

}  // namespace
