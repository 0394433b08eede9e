// Products of many rows with ARM's int8 matrix instructions: 2 rows x 2 outputs x 8 inputs in one, twice the work of a
// dot product. The integer dots are the same, and so is every float operation after them (see matmul_codes.h): the bits
// equal those of every other path.
#pragma once
#include "magic_scales.h"

namespace {

constexpr int kPairs = 2;               // pairs of rows in a tile: 16 registers of sums
constexpr int kMatrixRows = 2 * kPairs;
static const Act kNoSecond{};

// A panel for matrix instructions: for each group its scales, then 4 octets of inputs, each with 8 pairs of outputs as
// [output][8 inputs].
template <class Source> static void expand_octets(Source source, int groups, uint8_t* out) {
    for (int g = 0; g < groups; ++g) {
        F scale[2], low;
        const uint8_t* codes = source.next(g, scale, low);
        store_magic_scales<Source>(scale, low, out);
        out += MagicGroup<Source>::codes;
        TS_UNROLL for (int octet = 0; octet < 4; ++octet) {
            W a, b;
            if (Source::nibbles) {
                split<Source>(codes + 64 * octet, a, b);
            } else {
                a = load_codes(codes + 128 * octet), b = load_codes(codes + 128 * octet + 64);
            }
            TS_UNROLL for (int i = 0; i < 4; ++i) {
                const int32x4_t first = vreinterpretq_s32_s8(a.v[i]), second = vreinterpretq_s32_s8(b.v[i]);
                vst1q_s8((int8_t*)out + 32 * i, vreinterpretq_s8_s32(vzip1q_s32(first, second)));
                vst1q_s8((int8_t*)out + 32 * i + 16, vreinterpretq_s8_s32(vzip2q_s32(first, second)));
            }
            out += 128;
        }
    }
}

// 16 inputs (two octets) of all pairs of rows.
TS_INLINE void multiply_octets(const uint8_t* codes, const Act* const* act, int from, int32x4_t sums[kPairs][8]) {
    int8x16_t inputs[kPairs][2];
    TS_UNROLL for (int p = 0; p < kPairs; ++p) {
        const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(act[2 * p]->q + from));
        const int64x2_t b = vreinterpretq_s64_s8(vld1q_s8(act[2 * p + 1]->q + from));
        inputs[p][0] = vreinterpretq_s8_s64(vtrn1q_s64(a, b));
        inputs[p][1] = vreinterpretq_s8_s64(vtrn2q_s64(a, b));
    }
    TS_UNROLL for (int octet = 0; octet < 2; ++octet)
        TS_UNROLL for (int i = 0; i < 8; ++i) {
            const int8x16_t outputs = vld1q_s8((const int8_t*)codes + 128 * octet + 16 * i);
            TS_UNROLL for (int p = 0; p < kPairs; ++p)
                sums[p][i] = vmmlaq_s32(sums[p][i], inputs[p][octet], outputs);
        }
}

// acc[row] = fma(dot · scale, d of the row, acc[row]).
TS_INLINE void scale_pairs(int32x4_t sums[kPairs][8], const float* scale, const float* addends, const Act* const* act, F* acc) {
    const F weight = load(scale);
    TS_UNROLL for (int p = 0; p < kPairs; ++p) {
        I dot[2];
        TS_UNROLL for (int i = 0; i < 4; ++i) {
            const int64x2_t a = vreinterpretq_s64_s32(sums[p][2 * i]), b = vreinterpretq_s64_s32(sums[p][2 * i + 1]);
            dot[0].v[i] = vreinterpretq_s32_s64(vtrn1q_s64(a, b));
            dot[1].v[i] = vreinterpretq_s32_s64(vtrn2q_s64(a, b));
        }
        TS_UNROLL for (int r = 0; r < 2; ++r) {
            const int row = 2 * p + r;
            acc[row] = fma(fma(as_float(dot[r]), weight, load_addend(addends)), splat(act[row]->d), acc[row]);
        }
    }
}

template <class Source> static void add_octets(const uint8_t* panel, const Act* const* act, F* acc) {
    using Group = MagicGroup<Source>;
    const uint8_t* const codes = panel + Group::codes;
    int32x4_t sums[kPairs][8];
    TS_UNROLL for (int half = 0; half < 2; ++half) {
        if (half == 0 || Source::halves == 2)
            TS_UNROLL for (int p = 0; p < kPairs; ++p)
                TS_UNROLL for (int i = 0; i < 8; ++i) sums[p][i] = vdupq_n_s32(kDotStart);
        multiply_octets(codes + 256 * half, act, 16 * half, sums);
        if (half == 1 || Source::halves == 2) {
            const uint8_t* const scale = panel + (Source::halves == 2 ? 64 * half : 0);
            scale_pairs(sums, (const float*)scale, (const float*)(scale + Group::addends), act, acc);
        }
    }
    if (Source::minimum) {
        const F low = load((const float*)(panel + Group::minimum));
        TS_UNROLL for (int r = 0; r < kMatrixRows; ++r) acc[r] = fma(low, splat(act[r]->dsum), acc[r]);
    }
}

// Rows [row, row + count) x 16 outputs, count at most kMatrixRows: the last row stands in for those that are missing.
template <class Source>
static void octet_rows(const MatmulArgs& args, const uint8_t* panel, int row, int count, int output) {
    const int groups = args.cols / kGroup;
    const ActPlace place = place_of(row, args.rows, groups);
    const Act* act[kMatrixRows];
    F acc[kMatrixRows];
    for (int r = 0; r < kMatrixRows; ++r) {
        act[r] = args.acts + place.start + (r < count ? r : count - 1);
        acc[r] = splat(0.f);
    }
    for (int g = 0; g < groups; ++g, panel += MagicGroup<Source>::bytes) {
        add_octets<Source>(panel, act, acc);
        int32_t more = 0;
        for (int r = 0; r < kMatrixRows; ++r) more |= act[r]->more;
        if (more) {
            const Act* second[kMatrixRows];
            for (int r = 0; r < kMatrixRows; ++r) second[r] = act[r]->more ? act[r] + args.extra : &kNoSecond;
            add_octets<Source>(panel, second, acc);
        }
        for (int r = 0; r < kMatrixRows; ++r) act[r] += place.stride;
    }
    for (int r = 0; r < count; ++r) emit(args, row + r, output, acc[r]);
}

template <int K> static void octet_matmul(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    using Source = Reader<K>;
    const int groups = args.cols / kGroup;
    for (int block = 0; block < args.rows; block += kRowBlock) {
        const int end = block + kRowBlock < args.rows ? block + kRowBlock : args.rows;
        for (int p = panel; p < panel_end; ++p) {
            expand_octets(Source{args.panels + p * args.panel_stride}, groups, scratch);
            for (int row = block; row < end; row += kMatrixRows)
                octet_rows<Source>(args, scratch, row, end - row < kMatrixRows ? end - row : kMatrixRows, p * kLanes);
        }
    }
}

static void matmul_octets(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    if (args.rows > kDirectRows) switch (args.kind) {
            case Codes8: return octet_matmul<Codes8>(args, panel, panel_end, scratch);
            case Codes4: return octet_matmul<Codes4>(args, panel, panel_end, scratch);
            case Codes4M: return octet_matmul<Codes4M>(args, panel, panel_end, scratch);
            case Codes8M: return octet_matmul<Codes8M>(args, panel, panel_end, scratch);
            case Codes4X: return octet_matmul<Codes4X>(args, panel, panel_end, scratch);
            case Codes4K: return octet_matmul<Codes4K>(args, panel, panel_end, scratch);
            case Codes8K: return octet_matmul<Codes8K>(args, panel, panel_end, scratch);
            case Codes8S: return octet_matmul<Codes8S>(args, panel, panel_end, scratch);
        }
    matmul(args, panel, panel_end, scratch);
}

}  // namespace
