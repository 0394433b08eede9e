// What happens to a row before a product: RMS norm or gate, then quantization to groups of 32 signed bytes.
#pragma once

namespace {

TS_INLINE float square_root(float x) { return __builtin_sqrtf(x); }

TS_INLINE float sum_of_squares(const float* x, int n) {
    F total = splat(0.f);
    int k = 0;
    for (; k + 16 <= n; k += 16) {
        const F v = load(x + k);
        total = fma(v, v, total);
    }
    if (k < n) {
        const F v = load_first(x + k, n - k);
        total = fma(v, v, total);
    }
    return sum(total);
}

TS_INLINE float inverse_rms(const float* x, int n, float eps) {
    return 1.f / square_root(sum_of_squares(x, n) / (float)n + eps);
}

struct Codes {
    I a, b;  // inputs 0-15 and 16-31
    float d;
    TS_MEMBER Codes(F x, F y, float step, float inverse)
        : a(round_even(mul(x, splat(inverse)))), b(round_even(mul(y, splat(inverse)))), d(step) {}
};

// Where the codes of one row and group go.
struct ActPair {
    Act &first, &second;

    TS_MEMBER static void write(const Codes& codes, Act& out) {
        store_int8(out.q, codes.a);
        store_int8(out.q + 16, codes.b);
        const int32_t sum_a = isum(codes.a), sum_b = isum(codes.b);
        out.d = codes.d;
        out.dsum = codes.d * (float)(sum_a + sum_b);
        out.more = 0;
        if (kWideScales) return;  // every sum starts at the same number
        out.start8 = kDotStart - 8 * (sum_a + sum_b);
        out.start128 = kDotStart - 128 * (sum_a + sum_b);
        out.half128[0] = kDotStart - 128 * sum_a;
        out.half128[1] = kDotStart - 128 * sum_b;
    }
    TS_MEMBER void put_first(const Codes& codes) { write(codes, first); }
    TS_MEMBER void put_second(const Codes& codes, int k) {
        write(codes, second);
        first.more = 1 + k / 4;
    }
    TS_MEMBER void put_no_second() {  // whatever its codes are
        second.d = second.dsum = 0.f;
        if (!kWideScales) second.start8 = second.start128 = second.half128[0] = second.half128[1] = kDotStart;
    }
};

// The absolute maximum is taken on the bits, where NaN is above infinity is above every number: a bad input makes the
// scale bad, and with it every product of this row.
TS_INLINE float peak_of(F a, F b) {
    const I magnitude = isplat(0x7fffffff);
    return bits_to_float((uint32_t)ipeak(imax(iand(bits_of(a), magnitude), iand(bits_of(b), magnitude))));
}

TS_INLINE Codes codes_of(F a, F b, float peak) {
    const bool tiny = peak < 1e-30f;
    return Codes(a, b, tiny ? 0.f : peak / 127.f, tiny ? 0.f : 127.f / peak);
}

// The largest input apart, as the one code 127 of a second Act: see Act.
template <class Out> static void quantize_apart(F a, F b, float peak, Out out) {
    alignas(64) float x[kGroup], largest[kGroup] = {0};
    store(x, a);
    store(x + 16, b);
    int k = 0;
    while (__builtin_fabsf(x[k]) != peak) ++k;
    largest[k] = x[k] < 0 ? -127.f : 127.f;
    x[k] = 0.f;
    a = load(x), b = load(x + 16);
    out.put_first(codes_of(a, b, peak_of(a, b)));
    out.put_second(Codes(load(largest), load(largest + 16), peak / 127.f, 1.f), k);
}

template <bool Seconds, class Out> TS_INLINE void quantize_group(F a, F b, Out out) {
    const float peak = peak_of(a, b);
    if (Seconds && peak >= 1e-30f && kDominance * peak * peak > sum(fma(b, b, mul(a, a)))) return quantize_apart(a, b, peak, out);
    out.put_first(codes_of(a, b, peak));
    if constexpr (Seconds) out.put_no_second();
}

// 16 lanes of before(x); `n` of them lie within the row.
struct Prologue {
    const PrologueArgs& args;
    const float* x;
    float scale;

    TS_MEMBER F at(int k, int n) const {
        if (n < 16) return tail(k, n);
        const F v = load(x + k);
        switch (args.before) {
            case RmsNorm: return mul(mul(v, splat(scale)), load(args.norm + k));
            case GateSilu: return mul(silu(v), load(x + args.cols + k));
            case GateGelu: return mul(gelu_tanh(v), load(x + args.cols + k));
            case GateOai: return swiglu_oai(v, load(x + args.cols + k));
            case GateTen: return swiglu_ten(v, load(x + args.cols + k));
            default: return v;
        }
    }
    F tail(int k, int n) const {
        const F v = load_first(x + k, n);
        switch (args.before) {
            case RmsNorm: return mul(mul(v, splat(scale)), load_first(args.norm + k, n));
            case GateSilu: return mul(silu(v), load_first(x + args.cols + k, n));
            case GateGelu: return mul(gelu_tanh(v), load_first(x + args.cols + k, n));
            case GateOai: return swiglu_oai(v, load_first(x + args.cols + k, n));
            case GateTen: return swiglu_ten(v, load_first(x + args.cols + k, n));
            default: return v;
        }
    }
};

}  // namespace

#ifdef TS_FOUR_GROUPS
#include "prologue_four.h"
#else
namespace {

template <bool Seconds> static void quantize_row(const Prologue& source, int groups, Act* act, int64_t stride, int64_t extra) {
    for (int g = 0; g < groups; ++g, act += stride)
        quantize_group<Seconds>(source.at(g * kGroup, 16), source.at(g * kGroup + 16, 16), ActPair{*act, act[Seconds ? extra : 0]});
}

}  // namespace
#endif

namespace {

static void prologue(const PrologueArgs& args, int row, int row_end) {
    const int groups = args.cols / kGroup;
    for (int r = row; r < row_end; ++r) {
        const float* x = row_of(args, r);
        const Prologue source{args, x, args.before == RmsNorm ? inverse_rms(x, args.cols, args.eps) : 0.f};
        if (args.plain) {
            float* out = args.plain + (int64_t)r * args.cols;
            int k = 0;
            for (; k + 16 <= args.cols; k += 16) store(out + k, source.at(k, 16));
            if (k < args.cols) store_first(out + k, source.at(k, args.cols - k), args.cols - k);
        }
        if (args.acts) {
            const ActPlace place = place_of(r, args.rows, groups);
            Act* const act = args.acts + place.start;
            if (has_seconds(args.before)) quantize_row<true>(source, groups, act, place.stride, args.extra);
            else quantize_row<false>(source, groups, act, place.stride, args.extra);
        }
    }
}

}  // namespace
