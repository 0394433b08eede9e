// Products of quantized rows with packed codes.
//
// One output element is, over groups of 32 inputs in ascending order,
//     acc = fma(float(integer dot of the group) · d_weight, d_input, acc)
//     acc = fma(minimum, d_input · (sum of the inputs), acc)        for kinds with a minimum
// and both lines again for the second codes of a group that has them (see Act).
// Integer dots are exact in any order, so this line is the whole definition: it does not know how many rows there are,
// and every path gives the same bits. Few rows are multiplied straight from the packed panel (it is read once, memory
// sets the pace); many rows from a panel expanded to bytes and float scales in the core's own cache, below or, where an
// instruction set has something faster, in matmul_amx.h, matmul_i8mm.h or matmul_sdot.h.
#pragma once
#include <string.h>

namespace {

// A reader walks one panel: next() gives the scales of the coming group and where its codes start.
//   small: codes are 0..31; nibbles: two quads share 64 bytes; halves: scales for 16 inputs each; eight: see first_sum;
//   sixteen: nibbles are signed and split into 16 times their value (see kWideScales); table: nibbles are MXFP4's codes
template <int K> struct Reader;

template <bool Wide> TS_INLINE F load_scale(const uint8_t* p) { return Wide ? load((const float*)p) : load_half((const uint16_t*)p); }
template <bool Wide> constexpr size_t kScaleBytes = Wide ? 64 : 32;  // of 16 outputs

template <> struct Reader<Codes8> {
    static constexpr bool small = false, nibbles = false, minimum = false, eight = false, sixteen = false, table = false;
    static constexpr int halves = 1;
    const uint8_t* p;
    TS_MEMBER const uint8_t* next(int, F* scale, F&) {
        scale[0] = load_half((const uint16_t*)p);
        const uint8_t* codes = p + 32;
        p += 32 + 512;
        return codes;
    }
};
template <> struct Reader<Codes4> {
    static constexpr bool small = !kWideScales, nibbles = true, minimum = false, eight = !kWideScales, sixteen = kWideScales, table = false;
    static constexpr int halves = 1;
    const uint8_t* p;
    TS_MEMBER const uint8_t* next(int, F* scale, F&) {
        constexpr size_t scales = kScaleBytes<kWideScales>;
        scale[0] = load_scale<kWideScales>(p);
        const uint8_t* codes = p + scales;
        p += scales + 256;
        return codes;
    }
};
// Read with 12 added where codes must not be negative.
template <> struct Reader<Codes4X> {
    static constexpr bool small = kUnsignedCodes, nibbles = true, minimum = false, eight = false, sixteen = false, table = true;
    static constexpr int halves = 1;
    const uint8_t* p;
    TS_MEMBER const uint8_t* next(int, F* scale, F&) {
        scale[0] = load_bfloat((const uint16_t*)p);
        const uint8_t* codes = p + 32;
        p += 32 + 256;
        return codes;
    }
};

template <int Bytes> struct ReaderM {
    static constexpr bool small = true, nibbles = Bytes == 256, minimum = true, eight = false, sixteen = false, table = false;
    static constexpr int halves = 1;
    const uint8_t* p;
    TS_MEMBER const uint8_t* next(int, F* scale, F& low) {
        constexpr bool wide = nibbles && kWideScales;
        constexpr size_t scales = kScaleBytes<wide>;
        scale[0] = load_scale<wide>(p);
        low = load_scale<wide>(p + scales);
        const uint8_t* codes = p + 2 * scales;
        p += 2 * scales + Bytes;
        return codes;
    }
};
template <> struct Reader<Codes4M> : ReaderM<256> {};
template <> struct Reader<Codes8M> : ReaderM<512> {};

template <int Bytes> struct ReaderK {
    static constexpr bool small = true, nibbles = Bytes == 256, minimum = true, eight = false, sixteen = false, table = false;
    static constexpr int halves = 1;
    const uint8_t* p;
    F d{}, m{};  // of the running 256 inputs
    TS_MEMBER const uint8_t* next(int g, F* scale, F& low) {
        if (g % 8 == 0) {
            d = load_half((const uint16_t*)p);
            m = sub(splat(0.f), load_half((const uint16_t*)(p + 32)));
            p += 64;
        }
        scale[0] = mul(d, load_uint8(p));  // exact: 11 bits times 6
        low = mul(m, load_uint8(p + 16));
        const uint8_t* codes = p + 32;
        p += 32 + Bytes;
        return codes;
    }
};
template <> struct Reader<Codes4K> : ReaderK<256> {};
template <> struct Reader<Codes8K> : ReaderK<512> {};

template <> struct Reader<Codes8S> {
    static constexpr bool small = false, nibbles = false, minimum = false, eight = false, sixteen = false, table = false;
    static constexpr int halves = 2;
    const uint8_t* p;
    F d{};
    TS_MEMBER const uint8_t* next(int g, F* scale, F&) {
        if (g % 8 == 0) {
            d = load_half((const uint16_t*)p);
            p += 32;
        }
        scale[0] = mul(d, load_int8((const int8_t*)p));
        scale[1] = mul(d, load_int8((const int8_t*)p + 16));
        const uint8_t* codes = p + 32;
        p += 32 + 512;
        return codes;
    }
};

// The expanded form of a panel: for each group the scales as floats, then bytes ready for dot4.
template <class Source> struct Expanded {
    static constexpr bool small = Source::small, nibbles = false, minimum = Source::minimum, eight = Source::eight;
    static constexpr bool sixteen = false, table = Source::table;
    static constexpr int halves = Source::halves;
    static constexpr size_t scales = 64 * (halves + minimum);
    static constexpr size_t group = scales + 512;
    const uint8_t* p;
    TS_MEMBER const uint8_t* next(int, F* scale, F& low) {
        scale[0] = load((const float*)p);
        if (halves == 2) scale[halves - 1] = load((const float*)(p + 64));
        if (minimum) low = load((const float*)(p + 64 * halves));
        const uint8_t* codes = p + scales;
        p += group;
        return codes;
    }
};
template <class R> struct IsExpanded { static constexpr bool value = false; };
template <class S> struct IsExpanded<Expanded<S>> { static constexpr bool value = true; };

// A group's scales (and minimums) as floats. Returns where its codes go.
template <class Source> TS_INLINE uint8_t* store_scales(const F* scale, F low, uint8_t* out) {
    store((float*)out, scale[0]);
    if (Source::halves == 2) store((float*)(out + 64), scale[1]);
    if (Source::minimum) store((float*)(out + 64 * Source::halves), low);
    return out + Expanded<Source>::scales;
}

// Values of MXFP4's codes, those of `split` and the signed ones.
template <int Added> struct FourBitFloats {
    int8_t v[16];
    constexpr FourBitFloats() : v() {
        for (int i = 0; i < 16; ++i) v[i] = (int8_t)(kFourBitFloats[i] + Added);
    }
};
alignas(16) static constexpr FourBitFloats<kUnsignedCodes ? kFourBitMost : 0> kTable;

// Two quads that share 64 bytes.
template <class Source, class Codes = W> TS_INLINE void split(const uint8_t* codes, Codes& low, Codes& high) {
    if constexpr (Source::sixteen) {
        split_signed(codes, low, high);
    } else {
        split_nibbles(codes, low, high);
        if constexpr (Source::table) low = looked_up(kTable.v, low), high = looked_up(kTable.v, high);
    }
}

template <class Source> static void expand(Source source, int groups, uint8_t* out) {
    for (int g = 0; g < groups; ++g) {
        F scale[2], low;
        const uint8_t* codes = source.next(g, scale, low);
        out = store_scales<Source>(scale, low, out);
        for (int i = 0; i < (Source::nibbles ? 4 : 8); ++i) {
            if (Source::nibbles) {
                W a, b;
                split<Source>(codes + 64 * i, a, b);
                store_codes(out + 128 * i, a);
                store_codes(out + 128 * i + 64, b);
            } else {
                const W w = load_codes(codes + 64 * i);
                store_codes(out + 64 * i, Source::small ? w : to_unsigned(w));
            }
        }
        out += 512;
    }
}

// A packed panel comes from memory and is read once. Ask for it early: with a group's products waiting for their codes,
// the core does not look far enough ahead by itself.
template <class R> TS_INLINE void fetch(const uint8_t* p) {
    constexpr int bytes = (R::nibbles ? 256 : 512) + (kWideScales && R::nibbles && R::minimum ? 128 : 64);
    p += R::nibbles ? kAheadNibbles : kAheadBytes;
    TS_UNROLL for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

template <class R> TS_INLINE I first_sum(const Act& act, int half) {
    if (R::eight) return isplat(act.start8);
    if (R::table && kUnsignedCodes) return isplat(act.start8 + (act.start8 - kDotStart) / 2);  // 12 is 8 and half of it
    if (R::small || !kUnsignedCodes) return isplat(kDotStart);
    return isplat(R::halves == 2 ? act.half128[half] : act.start128);
}

// Four quads (16 inputs) of MR rows.
template <class R, int MR, int Half> TS_INLINE void dot16(const uint8_t* codes, const Act* act, I* acc) {
    A a[MR];
    TS_UNROLL for (int r = 0; r < MR; ++r) a[r] = load_inputs(act[r].q + 16 * Half);
    if (R::nibbles) {
        W low, high;
        split<R>(codes + 128 * Half, low, high);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = dot4<0, R::small>(acc[r], low, a[r]);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = dot4<1, R::small>(acc[r], high, a[r]);
        split<R>(codes + 128 * Half + 64, low, high);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = dot4<2, R::small>(acc[r], low, a[r]);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = dot4<3, R::small>(acc[r], high, a[r]);
        return;
    }
    constexpr bool convert = !R::small && !IsExpanded<R>::value;
    const uint8_t* c = codes + 256 * Half;
    W w = load_codes(c);
    if (convert) w = to_unsigned(w);
    TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = dot4<0, R::small>(acc[r], w, a[r]);
    w = load_codes(c + 64);
    if (convert) w = to_unsigned(w);
    TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = dot4<1, R::small>(acc[r], w, a[r]);
    w = load_codes(c + 128);
    if (convert) w = to_unsigned(w);
    TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = dot4<2, R::small>(acc[r], w, a[r]);
    w = load_codes(c + 192);
    if (convert) w = to_unsigned(w);
    TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = dot4<3, R::small>(acc[r], w, a[r]);
}

template <class R, int MR>
TS_INLINE void add_group(const uint8_t* codes, const F* scale, F low, const Act* act, F* out) {
    I acc[MR];
    TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = first_sum<R>(act[r], 0);
    dot16<R, MR, 0>(codes, act, acc);
    if (R::halves == 2) {
        TS_UNROLL for (int r = 0; r < MR; ++r) out[r] = fma(mul(to_float_dot(acc[r]), scale[0]), splat(act[r].d), out[r]);
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = first_sum<R>(act[r], 1);
    }
    dot16<R, MR, 1>(codes, act, acc);
    TS_UNROLL for (int r = 0; r < MR; ++r)
        out[r] = fma(mul(to_float_dot(acc[r]), scale[R::halves - 1]), splat(act[r].d), out[r]);
    if (R::minimum)
        TS_UNROLL for (int r = 0; r < MR; ++r) out[r] = fma(low, splat(act[r].dsum), out[r]);
}

// The second codes of one row: one quad of inputs.
template <class R> TS_INLINE void add_quad(const uint8_t* codes, const F* scale, F low, const Act& act, int quad, F& out) {
    W w, high;
    if (R::nibbles) {
        split<R>(codes + 64 * (quad / 2), w, high);
        if (quad % 2) w = high;
    } else {
        w = load_codes(codes + 64 * quad);
        if (!R::small && !IsExpanded<R>::value) w = to_unsigned(w);
    }
    int32_t inputs[4];
    for (int i = 0; i < 4; ++i) memcpy(inputs + i, act.q + 4 * quad, 4);
    const I acc = dot4<0, R::small>(first_sum<R>(act, quad / 4), w, load_inputs((const int8_t*)inputs));
    out = fma(mul(to_float_dot(acc), scale[R::halves == 2 ? quad / 4 : 0]), splat(act.d), out);
    if (R::minimum) out = fma(low, splat(act.dsum), out);
}

template <class R, int MR>
TS_INLINE void codes_tile(R panel, int groups, const Act* act, int64_t stride, int64_t extra, F* out) {
    TS_UNROLL for (int r = 0; r < MR; ++r) out[r] = splat(0.f);
    for (int g = 0; g < groups; ++g, act += stride) {
        F scale[2], low;
        const uint8_t* codes = panel.next(g, scale, low);
        if (!IsExpanded<R>::value) fetch<R>(codes);
        add_group<R, MR>(codes, scale, low, act, out);
        int32_t more = 0;
        TS_UNROLL for (int r = 0; r < MR; ++r) more |= act[r].more;
        if (more) {
            asm("" : "+r"(codes));  // read them again: kept from above, they would push everything out of the registers
            if constexpr (kSecondsByQuad) {
                TS_UNROLL for (int r = 0; r < MR; ++r)
                    if (act[r].more) add_quad<R>(codes, scale, low, act[extra + r], act[r].more - 1, out[r]);
            } else {
                add_group<R, MR>(codes, scale, low, act + extra, out);
            }
        }
    }
}

// Sums of one row and 16 outputs -> out, with bias and residual.
TS_INLINE void emit(const MatmulArgs& args, int row, int output, F value) {
    float* out = args.out + row * args.out_stride + output;
    const int n = args.outputs - output;
    if (n >= 16) {
        if (args.bias) value = add(value, load(args.bias + output));
        store(out, args.add ? add(load(out), value) : value);
    } else {
        if (args.bias) value = add(value, load_first(args.bias + output, n));
        store_first(out, args.add ? add(load_first(out, n), value) : value, n);
    }
}

template <class R, int MR> static void codes_rows(const MatmulArgs& args, R panel, int row, int output) {
    const int groups = args.cols / kGroup;
    F sums[MR];
    const ActPlace place = place_of(row, args.rows, groups);
    codes_tile<R, MR>(panel, groups, args.acts + place.start, place.stride, args.extra, sums);
    TS_UNROLL for (int r = 0; r < MR; ++r) emit(args, row + r, output, sums[r]);
}

// All rows in [row, end): tiles of MR; what is left is one tile. From an expanded panel it may be two: compiling takes long.
template <class R, int MR> static void codes_all(const MatmulArgs& args, R panel, int row, int end, int output) {
    for (; row + MR <= end; row += MR) codes_rows<R, MR>(args, panel, row, output);
    if constexpr (MR > 1)
        if (row < end) codes_all<R, (IsExpanded<R>::value && MR > 4 ? MR / 2 : MR - 1)>(args, panel, row, end, output);
}

constexpr int kRowBlock = 192;  // rows whose activations stay in the core's cache while panels pass by

template <int K> static void codes_matmul(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    using Source = Reader<K>;
    const int groups = args.cols / kGroup;
    if (args.rows <= kDirectRows) {
        for (int p = panel; p < panel_end; ++p)
            codes_all<Source, kRowsDirect>(args, Source{args.panels + p * args.panel_stride}, 0, args.rows, p * kLanes);
        return;
    }
    if constexpr (kRowsInt > 0)  // 0: another file has what multiplies many rows
        for (int block = 0; block < args.rows; block += kRowBlock) {
            const int end = block + kRowBlock < args.rows ? block + kRowBlock : args.rows;
            for (int p = panel; p < panel_end; ++p) {
                expand(Source{args.panels + p * args.panel_stride}, groups, scratch);
                const Expanded<Source> expanded{scratch};
                codes_all<Expanded<Source>, kRowsInt>(args, expanded, block, end, p * kLanes);
            }
        }
}

static size_t matmul_scratch(int kind, int cols) {
    return is_float(kind) ? 0 : (size_t)cols / kGroup * (512 + 256);
}

}  // namespace
