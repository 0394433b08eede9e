// The running softmax of the lines of one tile.
//
// A "line" is one query head of one row. Lines of one tile share a KV head and a request, so a block of K and V is
// converted once for all of them. What a line computes depends on its own keys and their absolute positions only:
//   score of key t    float caches: 16 partial sums over the dimensions d = j (mod 16), each in ascending order, then the
//                     tree of sum(); coded caches: an exact integer dot of codes, times both scales
//   step of 64 keys   one maximum, one rescale, then values in ascending t
//   split of 256 keys one running (maximum, sum, values); splits are merged in ascending order
// so neither tile, thread count nor phase changes a bit. Keys a line does not see contribute exactly nothing; tokens
// after the request's last one are never read.
#pragma once

namespace {

constexpr int kStep = 64;         // keys of one softmax update, at multiples of this position
constexpr float kNever = -1e30f;  // below every score: the maximum before the first key

struct Lines {
    int count, padded;
    float* scores;    // (count, 64): scores, then weights of the current step
    float* sums;      // (count, 16): lane sums of the weights
    float* values;    // (count, padded)
    float* rescale;   // (count)
    float* maximum;   // (count)
    float* keys;      // the step's keys, dimension-major: (4 blocks, padded, 16) floats or (4, padded / 4, 16, 4) codes
    float* block;     // (64, padded): the step's values, without the scales of a coded cache
    float* scales;    // (2, 64): key and value scales of a coded cache
};

TS_INLINE Lines place_lines(int count, int padded, uint8_t* scratch) {
    float* p = (float*)scratch;
    Lines s{};
    s.count = count, s.padded = padded;
    s.scores = p, p += count * kStep;
    s.sums = p, p += count * 16;
    s.values = p, p += count * padded;
    s.keys = p, p += padded * kStep;
    s.block = p, p += padded * kStep;
    s.scales = p, p += 2 * kStep;
    s.rescale = p, p += count;
    s.maximum = p;
    return s;
}

static size_t lines_bytes(int count, int padded) {
    return (sizeof(float) * (size_t)(count * (kStep + 16 + padded + 2) + 2 * padded * kStep + 2 * kStep) + 63) / 64 * 64;
}

TS_INLINE void reset_lines(const Lines& s) {
    for (int i = 0; i < s.count; ++i) s.maximum[i] = kNever;
    memset(s.sums, 0, sizeof(float) * (size_t)s.count * 16);
    memset(s.values, 0, sizeof(float) * (size_t)s.count * s.padded);
}

TS_INLINE float exp_of(float x) {  // through the same vector code: one definition of e^x
    float lane[16];
    store(lane, vexp(splat(x)));
    return lane[0];
}

// Turn a line's scores into weights; keys [low, high) of the step are seen, and [from, to) are multiplied with values.
// `scales`: what a weight is multiplied with for a coded cache, or null.
TS_INLINE void soften(const Lines& s, float cap, int line, int low, int high, int from, int to, const float* scales) {
    float* w = s.scores + kStep * line;
    F top = splat(kNever);
    for (int t = low / 16 * 16; t < high; t += 16) {
        F x = load(w + t);
        if (cap > 0.f) x = softcap(x, cap);
        if (t < low || t + 16 > high) x = between(x, low - t > 0 ? low - t : 0, high - t < 16 ? high - t : 16, splat(kNever));
        store(w + t, x);
        top = vmax(top, x);
    }
    const float peak_ = peak(top), before = s.maximum[line];
    const float maximum = peak_ > before || peak_ != peak_ ? peak_ : before;
    F total = splat(0.f);
    for (int t = from; t < to; t += 16) {
        F p = splat(0.f);
        if (t + 16 > low && t < high) {
            p = vexp(sub(load(w + t), splat(maximum)));
            if (t < low || t + 16 > high) p = between(p, low - t > 0 ? low - t : 0, high - t < 16 ? high - t : 16, splat(0.f));
            total = add(total, p);
            if (scales) p = mul(p, load(scales + t));
        }
        store(w + t, p);
    }
    const float factor = before == maximum ? 1.f : exp_of(before - maximum);
    s.maximum[line] = maximum;
    s.rescale[line] = factor;
    store(s.sums + 16 * line, fma(load(s.sums + 16 * line), splat(factor), total));
}

// (maximum, sum, values) of one line, merged with what came before it.
TS_INLINE void merge_line(float& maximum, float& total, float* values, float m, float l, const float* v, int padded) {
    const float top = m > maximum || m != m ? m : maximum;
    const float before = exp_of(maximum - top), after = exp_of(m - top);
    total = __builtin_fmaf(total, before, l * after);
    maximum = top;
    for (int d = 0; d < padded; d += 16)
        store(values + d, fma(load(values + d), splat(before), mul(load(v + d), splat(after))));
}

TS_INLINE void finish_line(float total, const float* values, int dim, float* out) {
    for (int d = 0; d < dim; d += 16) {
        const F v = div(load(values + d), splat(total));
        if (d + 16 <= dim) store(out + d, v);
        else store_first(out + d, v, dim - d);
    }
}

}  // namespace
