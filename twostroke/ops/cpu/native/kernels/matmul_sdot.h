// Products of many rows with ARM's dot products, from a panel expanded to bytes: 3 rows x 16 outputs in registers.
//
// The loop over groups of 32 inputs is assembly: compilers copy sums between registers, and a copy takes the place of a
// dot product. What is left beside 32 dot products for a row, its 16 outputs and 32 inputs is 8 multiply-adds (12 with a
// minimum): see magic_scales.h. Starts and addends are loaded, which takes no place.
#pragma once
#include "magic_scales.h"

namespace {

// Signed bytes are multiplied where they are packed: only their scales are expanded.
template <class Source> constexpr bool kInPlace = false;
template <> constexpr bool kInPlace<Reader<Codes8>> = true;
constexpr int kPackedScales = 32, kPackedGroup = kPackedScales + 512;  // bytes of Codes8
template <class Source> constexpr int kExpandedGroup = kInPlace<Source> ? MagicGroup<Source>::codes : MagicGroup<Source>::bytes;

template <class Source> static void expand_sdot(Source source, int groups, uint8_t* out) {
    using Group = MagicGroup<Source>;
    for (int g = 0; g < groups; ++g, out += kExpandedGroup<Source>) {
        F scale[2], low;
        const uint8_t* codes = source.next(g, scale, low);
        if (!kInPlace<Source>) fetch<Source>(codes);
        store_magic_scales<Source>(scale, low, out);
        if (kInPlace<Source>) continue;
        TS_UNROLL for (int i = 0; i < 4; ++i) {
            W a, b;
            if (Source::nibbles) split<Source>(codes + 64 * i, a, b);
            else a = load_codes(codes + 128 * i), b = load_codes(codes + 128 * i + 64);
            store_codes(out + Group::codes + 128 * i, a);
            store_codes(out + Group::codes + 128 * i + 64, b);
        }
    }
}

// Where a tile of rows is.
struct SdotWalk {
    const uint8_t* group;  // expanded
    const Act* act;        // of the first row; the others follow
    int64_t groups;        // left
    int64_t stride;        // bytes from group to group of a row
    const int32_t* starts;
    int64_t extra;         // bytes from an Act to its second one
    const uint8_t* codes;  // those in place,
    const uint8_t* ahead;  // and what comes from memory next: two lines are fetched with each group
};
alignas(16) static const int32_t kStarts[4] = {kDotStart, kDotStart, kDotStart, kDotStart};

// Registers: integer sums v0-v11 (row by row), codes v12-v15, inputs of row r in v16 + r, and then its d and dsum; fields of
// the walk in x8-x13. Operands: float sums %0-%11, row by row. A register is loaded as soon as its last use is written:
// loads between the dot products cost nothing, loads in a row would hold them up.
#define TS_LOAD(x, from, offset) "ldr q" #x ", [" from ", " offset "]\n\t"
#define TS_INPUTS_1(offset) TS_LOAD(16, "x10", "#" offset)
#define TS_INPUTS_2(offset) TS_INPUTS_1(offset) TS_LOAD(17, "x10", "#64+" offset)
#define TS_INPUTS_3(offset) TS_INPUTS_2(offset) TS_LOAD(18, "x10", "#128+" offset)
#define TS_DOT(sum, codes, x, quad) "sdot v" #sum ".4s, v" #codes ".16b, v" #x ".4b[" #quad "]\n\t"
#define TS_DOTS_1(quad, codes, a, b, c) TS_DOT(a, codes, 16, quad)
#define TS_DOTS_2(quad, codes, a, b, c) TS_DOTS_1(quad, codes, a, b, c) TS_DOT(b, codes, 17, quad)
#define TS_DOTS_3(quad, codes, a, b, c) TS_DOTS_2(quad, codes, a, b, c) TS_DOT(c, codes, 18, quad)
#define TS_CODES(x, at) TS_LOAD(x, "x9", "%[codes]+" at)
#define TS_QUAD_CODES "add x17, x9, x14, lsl #6\n\tldp q12, q13, [x17, %[codes]]\n\tldp q14, q15, [x17, %[codes]+32]\n\t"
#define TS_BEGIN "ldp x9, x10, [%[walk]]\n\tldp x11, x12, [%[walk], #16]\n\tldp x13, x8, [%[walk], #32]\n\t"
#define TS_NEXT "add x9, x9, %[bytes]\n\tadd x10, x10, x12\n\t"
#define TS_QUAD(rows, quad, next)                                                                     \
    TS_DOTS_##rows(quad, 12, 0, 4, 8) TS_CODES(12, next) TS_DOTS_##rows(quad, 13, 1, 5, 9) TS_CODES(13, next "+16") \
        TS_DOTS_##rows(quad, 14, 2, 6, 10) TS_CODES(14, next "+32") TS_DOTS_##rows(quad, 15, 3, 7, 11) TS_CODES(15, next "+48")
#define TS_LAST_QUAD(rows, quad)                                                 \
    TS_DOTS_##rows(quad, 12, 0, 4, 8) TS_DOTS_##rows(quad, 13, 1, 5, 9)          \
        TS_DOTS_##rows(quad, 14, 2, 6, 10) TS_DOTS_##rows(quad, 15, 3, 7, 11)
#define TS_FIRST_CODES(at) TS_CODES(12, at) TS_CODES(13, at "+16") TS_CODES(14, at "+32") TS_CODES(15, at "+48")
#define TS_THREE_QUADS(rows, at) TS_QUAD(rows, 0, at "+64") TS_QUAD(rows, 1, at "+128") TS_QUAD(rows, 2, at "+192")
#define TS_WHOLE(rows)                                                                                           \
    TS_INPUTS_##rows("0") TS_FIRST_CODES("0") TS_THREE_QUADS(rows, "0") TS_QUAD(rows, 3, "256")                  \
        TS_INPUTS_##rows("16") TS_THREE_QUADS(rows, "256") TS_LAST_QUAD(rows, 3)
#define TS_HALF(rows, input, at) TS_INPUTS_##rows(input) TS_FIRST_CODES(at) TS_THREE_QUADS(rows, at) TS_LAST_QUAD(rows, 3)

// dot · scale in a register that held the addend; then the integer sum starts anew.
#define TS_SCALED(sum, temp, half, j)                                                 \
    TS_LOAD(temp, "x9", "%[addends]+64*" #half "+16*" #j)                             \
    "fmla v" #temp ".4s, v" #sum ".4s, v12.4s\n\tldr q" #sum ", [x13]\n\t"
#define TS_ADD(sum, temp, x) "fmla %" #sum ".4s, v" #temp ".4s, v" #x ".s[0]\n\t"
#define TS_SCALE_1(half, j, a, b, c) TS_SCALED(a, 14, half, j) TS_ADD(a, 14, 16)
#define TS_SCALE_2(half, j, a, b, c) TS_SCALED(a, 14, half, j) TS_SCALED(b, 15, half, j) TS_ADD(a, 14, 16) TS_ADD(b, 15, 17)
#define TS_SCALE_3(half, j, a, b, c)                                                                        \
    TS_SCALED(a, 14, half, j) TS_SCALED(b, 15, half, j) TS_SCALED(c, 19, half, j)                           \
        TS_ADD(a, 14, 16) TS_ADD(b, 15, 17) TS_ADD(c, 19, 18)
#define TS_LOW(sum, x) "fmla %" #sum ".4s, v13.4s, v" #x ".s[1]\n\t"
#define TS_LOW_1(a, b, c) TS_LOW(a, 16)
#define TS_LOW_2(a, b, c) TS_LOW_1(a, b, c) TS_LOW(b, 17)
#define TS_LOW_3(a, b, c) TS_LOW_2(a, b, c) TS_LOW(c, 18)
#define TS_SCALE(rows, half, j, a, b, c) TS_LOAD(12, "x9", "#64*" #half "+16*" #j) TS_SCALE_##rows(half, j, a, b, c)
#define TS_SCALE_LOW(rows, half, j, a, b, c) \
    TS_LOAD(13, "x9", "#128+16*" #j) TS_SCALE(rows, half, j, a, b, c) TS_LOW_##rows(a, b, c)
#define TS_SCALES(rows, half, each)                                                                   \
    TS_INPUTS_##rows("32") each(rows, half, 0, 0, 4, 8) each(rows, half, 1, 1, 5, 9)                  \
        each(rows, half, 2, 2, 6, 10) each(rows, half, 3, 3, 7, 11)

// Second codes of one row: one quad of inputs. x14: which; x17: where its scales are.
#define TS_SECOND_SUM(sum, j)                                                                                           \
    TS_LOAD(12, "x17", "#16*" #j) TS_LOAD(14, "x17", "%[addends]+16*" #j)                                               \
    "fmla v14.4s, v" #sum ".4s, v12.4s\n\tldr q" #sum ", [x13]\n\t" TS_ADD(sum, 14, 17)
#define TS_SECOND_LOW(sum, j) TS_SECOND_SUM(sum, j) TS_LOAD(13, "x9", "#128+16*" #j) TS_LOW(sum, 17)
#define TS_SECOND(row, a, b, c, d, each)                                                                                \
    "ldr w14, [x10, #64*" #row "+56]\n\tcbz w14, 4" #row "f\n\tsub w14, w14, #1\n\t"                                    \
    "add x16, x10, x8\n\tadd x16, x16, #64*" #row "\n\tldr q17, [x16, #32]\n\t"                                         \
    "add x16, x16, x14, lsl #2\n\tld1r {v16.4s}, [x16]\n\t"                                                             \
    TS_QUAD_CODES "lsr x14, x14, %[half]\n\tadd x17, x9, x14, lsl #6\n\t"                                       \
    "sdot v" #a ".4s, v12.16b, v16.16b\n\tsdot v" #b ".4s, v13.16b, v16.16b\n\t"                                        \
    "sdot v" #c ".4s, v14.16b, v16.16b\n\tsdot v" #d ".4s, v15.16b, v16.16b\n\t"                                        \
    each(a, 0) each(b, 1) each(c, 2) each(d, 3) "4" #row ":\n\t"
#define TS_SECONDS_1(each) TS_SECOND(0, 0, 1, 2, 3, each)
#define TS_SECONDS_2(each) TS_SECONDS_1(each) TS_SECOND(1, 4, 5, 6, 7, each)
#define TS_SECONDS_3(each) TS_SECONDS_2(each) TS_SECOND(2, 8, 9, 10, 11, each)

#define TS_START_ROW(a, b, c, d) TS_LOAD(a, "x13", "#0") TS_LOAD(b, "x13", "#0") TS_LOAD(c, "x13", "#0") TS_LOAD(d, "x13", "#0")
#define TS_START_1 TS_START_ROW(0, 1, 2, 3)
#define TS_START_2 TS_START_1 TS_START_ROW(4, 5, 6, 7)
#define TS_START_3 TS_START_2 TS_START_ROW(8, 9, 10, 11)
#define TS_MORE_1 "ldr w15, [x10, #56]\n\tprfm pldl1keep, [x14]\n\t"
#define TS_MORE_2 TS_MORE_1 "ldr w16, [x10, #64+56]\n\tprfm pldl1keep, [x14, #64]\n\torr w15, w15, w16\n\t"
#define TS_MORE_3 TS_MORE_2 "ldr w17, [x10, #128+56]\n\tprfm pldl1keep, [x14, #128]\n\torr w15, w15, w17\n\t"
#define TS_WALK(rows, text, second)                                                                                         \
    asm volatile(TS_BEGIN TS_START_##rows \
                 "\n1:\tadd x14, x10, x12, lsl #1\n\t" TS_MORE_##rows text "cbnz w15, 3f\n"                                 \
                 "2:\t" TS_NEXT "subs x11, x11, #1\n\tb.ne 1b\n\tb 5f\n"                  \
                 "3:\t" TS_SECONDS_##rows(second) "b 2b\n5:"                                                                \
                 : TS_SUMS_##rows(sums)                                                                                     \
                 : [walk] "r"(&walk), [codes] "i"(Group::codes), [addends] "i"(Group::addends), [bytes] "i"(kExpandedGroup<Source>),  \
                   [half] "i"(Source::halves == 2 ? 2 : 3), [packed] "i"(kPackedGroup)                                                                                          \
                 : "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17", "v0", "v1", "v2", "v3", "v4", "v5",  \
                   "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "cc", "memory")
#define TS_SUMS_1(s) "+w"(s[0].v[0]), "+w"(s[0].v[1]), "+w"(s[0].v[2]), "+w"(s[0].v[3])
#define TS_SUMS_2(s) TS_SUMS_1(s), "+w"(s[1].v[0]), "+w"(s[1].v[1]), "+w"(s[1].v[2]), "+w"(s[1].v[3])
#define TS_SUMS_3(s) TS_SUMS_2(s), "+w"(s[2].v[0]), "+w"(s[2].v[1]), "+w"(s[2].v[2]), "+w"(s[2].v[3])
#define TS_WALK_IN_PLACE(rows) TS_WALK(rows, TS_WHOLE(rows) TS_SCALES(rows, 0, TS_SCALE), TS_SECOND_SUM)
#define TS_WALK_KIND(rows)                                                                                                    \
    if constexpr (Source::halves == 2)                                                                                        \
        TS_WALK(rows, TS_HALF(rows, "0", "0") TS_SCALES(rows, 0, TS_SCALE) TS_HALF(rows, "16", "256") TS_SCALES(rows, 1, TS_SCALE), \
                TS_SECOND_SUM);                                                                                               \
    else if constexpr (Source::minimum)                                                                                       \
        TS_WALK(rows, TS_WHOLE(rows) TS_SCALES(rows, 0, TS_SCALE_LOW), TS_SECOND_LOW);                                        \
    else                                                                                                                      \
        TS_WALK(rows, TS_WHOLE(rows) TS_SCALES(rows, 0, TS_SCALE), TS_SECOND_SUM)

static_assert(offsetof(Act, d) == 32 && offsetof(Act, dsum) == 36 && offsetof(Act, more) == 56, "as the assembly reads it");

// All groups of R rows.
template <class Source, int R> TS_INLINE void walk_groups(const SdotWalk& walk, F* sums) {
    using Group = MagicGroup<Source>;
    if constexpr (R == 3) {
        TS_WALK_KIND(3);
    } else if constexpr (R == 2) {
        TS_WALK_KIND(2);
    } else {
        TS_WALK_KIND(1);
    }
}

// The same with codes in place, x7, and the lines ahead, x6.
#undef TS_CODES
#undef TS_QUAD_CODES
#undef TS_BEGIN
#undef TS_NEXT
#define TS_CODES(x, at) TS_LOAD(x, "x7", "#" at)
#define TS_QUAD_CODES "add x17, x7, x14, lsl #6\n\tldp q12, q13, [x17]\n\tldp q14, q15, [x17, #32]\n"
#define TS_BEGIN "ldp x9, x10, [%[walk]]\n\tldp x11, x12, [%[walk], #16]\n\tldp x13, x8, [%[walk], #32]\n\tldp x7, x6, [%[walk], #48]\n\t"
#define TS_NEXT "add x9, x9, %[bytes]\n\tadd x10, x10, x12\n\tadd x7, x7, %[packed]\n\tprfm pldl1keep, [x6]\n\tprfm pldl1keep, [x6, #64]\n\tadd x6, x6, #128\n\t"
template <class Source, int R> TS_INLINE void walk_in_place(const SdotWalk& walk, F* sums) {
    using Group = MagicGroup<Source>;
    if constexpr (R == 3) {
        TS_WALK_IN_PLACE(3);
    } else if constexpr (R == 2) {
        TS_WALK_IN_PLACE(2);
    } else {
        TS_WALK_IN_PLACE(1);
    }
}

#undef TS_LOAD
#undef TS_INPUTS_1
#undef TS_INPUTS_2
#undef TS_INPUTS_3
#undef TS_DOT
#undef TS_DOTS_1
#undef TS_DOTS_2
#undef TS_DOTS_3
#undef TS_CODES
#undef TS_QUAD
#undef TS_LAST_QUAD
#undef TS_FIRST_CODES
#undef TS_THREE_QUADS
#undef TS_WHOLE
#undef TS_HALF
#undef TS_SCALED
#undef TS_ADD
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
#undef TS_SECOND_SUM
#undef TS_SECOND_LOW
#undef TS_SECOND
#undef TS_SECONDS_1
#undef TS_SECONDS_2
#undef TS_SECONDS_3
#undef TS_START_ROW
#undef TS_START_1
#undef TS_START_2
#undef TS_START_3
#undef TS_MORE_1
#undef TS_MORE_2
#undef TS_MORE_3
#undef TS_WALK
#undef TS_SUMS_1
#undef TS_SUMS_2
#undef TS_SUMS_3
#undef TS_WALK_KIND
#undef TS_WALK_IN_PLACE
#undef TS_QUAD_CODES
#undef TS_BEGIN
#undef TS_NEXT

// The next panel, a part for each tile; then, and after the last panel, one that is in the cache already: a fetch of memory
// that is not mapped takes as long as a miss.
struct Ahead {
    const uint8_t *here, *next, *end;
    int64_t step;
    Ahead(const MatmulArgs& args, int panel)
        : here(args.panels + panel * args.panel_stride), next(here + args.panel_stride), end(next + args.panel_stride),
          step(128 * (args.cols / kGroup)) {
        if ((panel + 1) * kLanes >= args.outputs) next = end;
    }
    TS_MEMBER const uint8_t* part() {
        if (next + step > end) return here;
        next += step;
        return next - step;
    }
};

template <class Source, int R>
static void sdot_rows(const MatmulArgs& args, const uint8_t* expanded, int row, int panel, Ahead& ahead) {
    const int groups = args.cols / kGroup;
    const ActPlace place = place_of(row, args.rows, groups);
    const int64_t size = sizeof(Act);
    SdotWalk walk{expanded, args.acts + place.start, groups, place.stride * size, kStarts, args.extra * size, nullptr, nullptr};
    F sums[R];
    TS_UNROLL for (int r = 0; r < R; ++r) sums[r] = splat(0.f);
    if constexpr (kInPlace<Source>) {
        walk.codes = ahead.here + kPackedScales, walk.ahead = ahead.part();
        walk_in_place<Source, R>(walk, sums);
    } else {
        walk_groups<Source, R>(walk, sums);
    }
    TS_UNROLL for (int r = 0; r < R; ++r) emit(args, row + r, panel * kLanes, sums[r]);
}

// Tiles of three rows; the last four are two and two, unless they lie in two blocks of Acts (see place_of).
static bool takes_three(int row, int end) {
    const int left = end - row;
    return left == 3 || left > 4 || (left == 4 && row % kActRows == kActRows - 3);
}

template <int K> static void sdot_matmul(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    using Source = Reader<K>;
    for (int block = 0; block < args.rows; block += kRowBlock) {
        const int end = block + kRowBlock < args.rows ? block + kRowBlock : args.rows;
        for (int p = panel; p < panel_end; ++p) {
            expand_sdot(Source{args.panels + p * args.panel_stride}, args.cols / kGroup, scratch);
            Ahead ahead(args, p);
            int row = block;
            for (; takes_three(row, end); row += 3) sdot_rows<Source, 3>(args, scratch, row, p, ahead);
            for (; row + 2 <= end; row += 2) sdot_rows<Source, 2>(args, scratch, row, p, ahead);
            if (row < end) sdot_rows<Source, 1>(args, scratch, row, p, ahead);
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
