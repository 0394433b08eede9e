// Products of many rows with ARM's dot products, from a panel expanded to bytes: 3 rows x 16 outputs in registers.
//
// The loop over groups of 32 inputs is assembly: compilers copy sums between registers, and a copy takes the place of a
// dot product. What is left beside 32 dot products for a row, its 16 outputs and 32 inputs is 8 multiply-adds (12 with a
// minimum): see magic_scales.h. Starts and addends are loaded, which takes no place.
#pragma once
#include "magic_scales.h"

namespace {

constexpr int kSdotRows = 3;

template <class Source> static void expand_sdot(Source source, int groups, uint8_t* out) {
    using Group = MagicGroup<Source>;
    for (int g = 0; g < groups; ++g, out += Group::bytes) {
        F scale[2], low;
        const uint8_t* codes = source.next(g, scale, low);
        fetch<Source>(codes);
        store_magic_scales<Source>(scale, low, out);
        TS_UNROLL for (int i = 0; i < 4; ++i) {
            W a, b;
            if (Source::nibbles) split<Source>(codes + 64 * i, a, b);
            else a = load_codes(codes + 128 * i), b = load_codes(codes + 128 * i + 64);
            store_codes(out + Group::codes + 128 * i, a);
            store_codes(out + Group::codes + 128 * i + 64, b);
        }
    }
}

// Where a tile of rows is. `more` is an output: the last group that was added has second codes in one of the rows.
struct SdotWalk {
    const uint8_t* group;  // expanded
    const Act* act;        // of the first row; the others follow
    int64_t groups;        // left
    int64_t stride;        // bytes from group to group of a row
    const int32_t* starts;
    int64_t more;
};
alignas(32) static const int32_t kStarts[8] = {kDotStart, kDotStart, kDotStart, kDotStart, kDotStart, kDotStart, kDotStart, kDotStart};

// Registers: integer sums v0-v11 (row by row), codes v12-v15, inputs of row r in v16 + r, and then its d and dsum; fields of
// the walk in x9-x13. Operands: float sums %0-%11, row by row.
#define TS_START_ROW(a, b, c, d) "ldp q" #a ", q" #b ", [x13]\n\tldp q" #c ", q" #d ", [x13]\n\t"
#define TS_START_1 TS_START_ROW(0, 1, 2, 3)
#define TS_START_2 TS_START_1 TS_START_ROW(4, 5, 6, 7)
#define TS_START_3 TS_START_2 TS_START_ROW(8, 9, 10, 11)
#define TS_INPUT(x, offset) "ldr q" #x ", [x10, #" offset "]\n\t"
#define TS_INPUTS_1(offset) TS_INPUT(16, offset)
#define TS_INPUTS_2(offset) TS_INPUTS_1(offset) TS_INPUT(17, "64+" offset)
#define TS_INPUTS_3(offset) TS_INPUTS_2(offset) TS_INPUT(18, "128+" offset)
#define TS_DOT(sum, codes, x, quad) "sdot v" #sum ".4s, v" #codes ".16b, v" #x ".4b[" #quad "]\n\t"
#define TS_DOT_ROW(a, b, c, d, x, quad) TS_DOT(a, 12, x, quad) TS_DOT(b, 13, x, quad) TS_DOT(c, 14, x, quad) TS_DOT(d, 15, x, quad)
#define TS_DOTS_1(quad) TS_DOT_ROW(0, 1, 2, 3, 16, quad)
#define TS_DOTS_2(quad) TS_DOTS_1(quad) TS_DOT_ROW(4, 5, 6, 7, 17, quad)
#define TS_DOTS_3(quad) TS_DOTS_2(quad) TS_DOT_ROW(8, 9, 10, 11, 18, quad)
#define TS_QUAD(rows, half, quad)                                      \
    "ldp q12, q13, [x9, %[codes]+256*" #half "+64*" #quad "]\n\t"      \
    "ldp q14, q15, [x9, %[codes]+256*" #half "+64*" #quad "+32]\n\t" TS_DOTS_##rows(quad)
#define TS_HALF(rows, half) \
    TS_INPUTS_##rows("16*" #half) TS_QUAD(rows, half, 0) TS_QUAD(rows, half, 1) TS_QUAD(rows, half, 2) TS_QUAD(rows, half, 3)

#define TS_SCALE_SUM(sum, temp, x, half, j)                                           \
    "ldr q" #temp ", [x9, %[addends]+64*" #half "+16*" #j "]\n\t"                     \
    "fmla v" #temp ".4s, v" #sum ".4s, v12.4s\n\t"                                    \
    "fmla %" #sum ".4s, v" #temp ".4s, v" #x ".s[0]\n\t"
#define TS_SCALE_1(half, j, a, b, c) TS_SCALE_SUM(a, 14, 16, half, j)
#define TS_SCALE_2(half, j, a, b, c) TS_SCALE_1(half, j, a, b, c) TS_SCALE_SUM(b, 15, 17, half, j)
#define TS_SCALE_3(half, j, a, b, c) TS_SCALE_2(half, j, a, b, c) TS_SCALE_SUM(c, 19, 18, half, j)
#define TS_LOW(sum, x) "fmla %" #sum ".4s, v13.4s, v" #x ".s[1]\n\t"
#define TS_LOW_1(a, b, c) TS_LOW(a, 16)
#define TS_LOW_2(a, b, c) TS_LOW_1(a, b, c) TS_LOW(b, 17)
#define TS_LOW_3(a, b, c) TS_LOW_2(a, b, c) TS_LOW(c, 18)
#define TS_SCALE(rows, half, j, a, b, c) "ldr q12, [x9, #64*" #half "+16*" #j "]\n\t" TS_SCALE_##rows(half, j, a, b, c)
#define TS_SCALE_LOW(rows, half, j, a, b, c) \
    "ldr q13, [x9, #128+16*" #j "]\n\t" TS_SCALE(rows, half, j, a, b, c) TS_LOW_##rows(a, b, c)
#define TS_SCALES(rows, half, each)                                                                   \
    TS_INPUTS_##rows("32") each(rows, half, 0, 0, 4, 8) each(rows, half, 1, 1, 5, 9)                  \
        each(rows, half, 2, 2, 6, 10) each(rows, half, 3, 3, 7, 11)

#define TS_MORE_1 "ldr w15, [x10, #56]\n\tprfm pldl1keep, [x14]\n\t"
#define TS_MORE_2 TS_MORE_1 "ldr w16, [x10, #64+56]\n\tprfm pldl1keep, [x14, #64]\n\torr w15, w15, w16\n\t"
#define TS_MORE_3 TS_MORE_2 "ldr w17, [x10, #128+56]\n\tprfm pldl1keep, [x14, #128]\n\torr w15, w15, w17\n\t"
#define TS_WALK(rows, text, sums)                                                                                           \
    asm volatile("ldp x9, x10, [%[walk]]\n\tldp x11, x12, [%[walk], #16]\n\tldr x13, [%[walk], #32]\n"                      \
                 "1:\tadd x14, x10, x12, lsl #1\n\t" TS_MORE_##rows text                                                    \
                 "add x9, x9, %[bytes]\n\tadd x10, x10, x12\n\tsubs x11, x11, #1\n\tb.eq 2f\n\tcbz w15, 1b\n"               \
                 "2:\tstp x9, x10, [%[walk]]\n\tstr x11, [%[walk], #16]\n\tstr x15, [%[walk], #40]"                         \
                 : TS_SUMS_##rows(sums)                                                                                     \
                 : [walk] "r"(&walk), [codes] "i"(Group::codes), [addends] "i"(Group::addends), [bytes] "i"(Group::bytes)   \
                 : "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17", "v0", "v1", "v2", "v3", "v4", "v5", "v6",  \
                   "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "cc", "memory")
#define TS_SUMS_1(s) "+w"(s[0].v[0]), "+w"(s[0].v[1]), "+w"(s[0].v[2]), "+w"(s[0].v[3])
#define TS_SUMS_2(s) TS_SUMS_1(s), "+w"(s[1].v[0]), "+w"(s[1].v[1]), "+w"(s[1].v[2]), "+w"(s[1].v[3])
#define TS_SUMS_3(s) TS_SUMS_2(s), "+w"(s[2].v[0]), "+w"(s[2].v[1]), "+w"(s[2].v[2]), "+w"(s[2].v[3])
#define TS_WALK_KIND(rows)                                                                                                    \
    if constexpr (Source::halves == 2)                                                                                        \
        TS_WALK(rows, TS_START_##rows TS_HALF(rows, 0) TS_SCALES(rows, 0, TS_SCALE)                                           \
                          TS_START_##rows TS_HALF(rows, 1) TS_SCALES(rows, 1, TS_SCALE), sums);                               \
    else if constexpr (Source::minimum)                                                                                       \
        TS_WALK(rows, TS_START_##rows TS_HALF(rows, 0) TS_HALF(rows, 1) TS_SCALES(rows, 0, TS_SCALE_LOW), sums);              \
    else                                                                                                                      \
        TS_WALK(rows, TS_START_##rows TS_HALF(rows, 0) TS_HALF(rows, 1) TS_SCALES(rows, 0, TS_SCALE), sums)

static_assert(offsetof(Act, d) == 32 && offsetof(Act, dsum) == 36 && offsetof(Act, more) == 56, "as the assembly reads it");

// Groups of R rows until none is left or one of the rows has second codes in the last one.
template <class Source, int R> TS_INLINE void walk_groups(SdotWalk& walk, F* sums) {
    using Group = MagicGroup<Source>;
    if constexpr (R == 3) {
        TS_WALK_KIND(3);
    } else if constexpr (R == 2) {
        TS_WALK_KIND(2);
    } else {
        TS_WALK_KIND(1);
    }
}

#undef TS_START_ROW
#undef TS_START_1
#undef TS_START_2
#undef TS_START_3
#undef TS_INPUT
#undef TS_INPUTS_1
#undef TS_INPUTS_2
#undef TS_INPUTS_3
#undef TS_DOT
#undef TS_DOT_ROW
#undef TS_DOTS_1
#undef TS_DOTS_2
#undef TS_DOTS_3
#undef TS_QUAD
#undef TS_HALF
#undef TS_SCALE_SUM
#undef TS_SCALE_1
#undef TS_SCALE_2
#undef TS_SCALE_3
#undef TS_LOW
#undef TS_LOW_1
#undef TS_LOW_2
#undef TS_LOW_3
#undef TS_SCALE
#undef TS_SCALE_LOW
#undef TS_SCALES
#undef TS_MORE_1
#undef TS_MORE_2
#undef TS_MORE_3
#undef TS_WALK
#undef TS_SUMS_1
#undef TS_SUMS_2
#undef TS_SUMS_3
#undef TS_WALK_KIND

// Second codes of one group: of all rows together, or of each row that has some.
template <class Source, int R> static void add_seconds(const uint8_t* group, const Act* act, int64_t extra, F* sums) {
    bool all = true;
    for (int r = 0; r < R; ++r) all &= act[r].more != 0;
    SdotWalk walk{group, act + extra, 1, 0, kStarts, 0};
    if (all) return walk_groups<Source, R>(walk, sums);
    for (int r = 0; r < R; ++r) {
        if (!act[r].more) continue;
        walk = {group, act + extra + r, 1, 0, kStarts, 0};
        walk_groups<Source, 1>(walk, sums + r);
    }
}

template <class Source, int R> static void sdot_rows(const MatmulArgs& args, const uint8_t* panel, int row, int output) {
    const int groups = args.cols / kGroup;
    const ActPlace place = place_of(row, args.rows, groups);
    SdotWalk walk{panel, args.acts + place.start, groups, place.stride * (int64_t)sizeof(Act), kStarts, 0};
    F sums[R];
    TS_UNROLL for (int r = 0; r < R; ++r) sums[r] = splat(0.f);
    do {
        walk_groups<Source, R>(walk, sums);
        if (walk.more) add_seconds<Source, R>(walk.group - MagicGroup<Source>::bytes, walk.act - place.stride, args.extra, sums);
    } while (walk.groups);
    TS_UNROLL for (int r = 0; r < R; ++r) emit(args, row + r, output, sums[r]);
}

template <int K> static void sdot_matmul(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    using Source = Reader<K>;
    for (int block = 0; block < args.rows; block += kRowBlock) {
        const int end = block + kRowBlock < args.rows ? block + kRowBlock : args.rows;
        for (int p = panel; p < panel_end; ++p) {
            expand_sdot(Source{args.panels + p * args.panel_stride}, args.cols / kGroup, scratch);
            int row = block;
            for (; row + kSdotRows <= end; row += kSdotRows) sdot_rows<Source, kSdotRows>(args, scratch, row, p * kLanes);
            if (end - row == 2) sdot_rows<Source, 2>(args, scratch, row, p * kLanes);
            else if (end - row == 1) sdot_rows<Source, 1>(args, scratch, row, p * kLanes);
        }
    }
}

static void matmul_dots(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    if (args.rows > kDirectRows) switch (args.kind) {
            case Codes8: return sdot_matmul<Codes8>(args, panel, panel_end, scratch);
            case Codes4: return sdot_matmul<Codes4>(args, panel, panel_end, scratch);
            case Codes4M: return sdot_matmul<Codes4M>(args, panel, panel_end, scratch);
            case Codes8M: return sdot_matmul<Codes8M>(args, panel, panel_end, scratch);
            case Codes4X: return sdot_matmul<Codes4X>(args, panel, panel_end, scratch);
            case Codes4K: return sdot_matmul<Codes4K>(args, panel, panel_end, scratch);
            case Codes8K: return sdot_matmul<Codes8K>(args, panel, panel_end, scratch);
            case Codes8S: return sdot_matmul<Codes8S>(args, panel, panel_end, scratch);
        }
    matmul(args, panel, panel_end, scratch);
}

}  // namespace
