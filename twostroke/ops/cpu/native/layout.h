// How a weight matrix lies in memory once packed, and how a quantized row of activations does.
//
// A matrix (rows = outputs, cols = inputs) is cut into panels of 16 outputs; the last panel is padded with zeros. A
// vector lane is an output, so a product needs no sum across lanes and scales apply to whole vectors. Panels follow
// each other; a panel is one run of memory that a product reads front to back.
//
//   float kinds   for each input k:   16 values (one per output)
//   coded kinds   for each group of 32 inputs: the group's scales, then its codes
//       codes, 8 bits: 8 quads of 64 bytes; quad q holds inputs 4q..4q+3 as [output][4]
//       codes, 4 bits: 4 x 64 bytes; byte i of run r holds byte i of quad 2r (low nibble) and of quad 2r+1 (high)
//
//   kind      value of a weight            scales before the codes of a group     per 256 inputs, before 8 groups
//   Codes8    code · d        (signed)     d[16] f16
//   Codes4    (code - 8) · d               d[16] f16
//   Codes4M   code · d + m                 d[16] f16, m[16] f16
//   Codes8M   code · d + m    (0..31)      d[16] f16, m[16] f16
//   Codes4X   table[code] · d              d[16] bf16
//   Codes4K   code · D s - M t             s[16] u8, t[16] u8                     D[16] f16, M[16] f16
//   Codes8K   code · D s - M t (0..31)     s[16] u8, t[16] u8                     D[16] f16, M[16] f16
//   Codes8S   code · D s      (signed)     s[16] i8 inputs 0-15, s[16] i8 16-31   D[16] f16
//
// An instruction set may prefer wide scales (Kernels::wide_scales): Codes4 and Codes4M then have d and m as floats, and
// Codes4 has d / 16 before nibbles that hold code - 8 in two's complement: in the upper half of a byte, such a nibble is 16
// times its value. Codes of 8 bits keep float16: products of one row wait for memory there.
//
// Every GGUF format maps to one of these without loss: Q8_0, Q5_0 -> Codes8, Q4_0 -> Codes4, Q4_1 -> Codes4M,
// Q5_1 -> Codes8M, Q4_K -> Codes4K, Q5_K -> Codes8K, Q6_K -> Codes8S, MXFP4 -> Codes4X.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum Format : int { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4, kFormats };
enum Kind : int { Float32, Half, Bfloat, Codes8, Codes4, Codes4M, Codes8M, Codes4X, Codes4K, Codes8K, Codes8S };

constexpr int kLanes = 16;   // outputs in a panel
constexpr int kGroup = 32;   // inputs that share a scale
constexpr int kSuper = 256;  // inputs that share the scale of the scales (K kinds)

static inline Kind kind_of(int format) {
    constexpr Kind kinds[kFormats] = {Float32, Half, Bfloat, Codes8, Codes4, Codes4M, Codes8, Codes8M, Codes4K, Codes8K, Codes8S, Codes4X};
    return kinds[format];
}

static inline bool is_float(int kind) { return kind <= Bfloat; }
static inline bool is_super(int kind) { return kind >= Codes4K; }
static inline bool is_nibbles(int kind) { return kind == Codes4 || kind == Codes4M || kind == Codes4X || kind == Codes4K; }
static inline bool has_floats(int kind) { return kind == Codes4 || kind == Codes4M; }  // scales, where they are wide

// MXFP4: twice the value that a code stands for; the scale is half of the file's.
constexpr int8_t kFourBitFloats[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int kFourBitMost = 12;

static inline bool has_minimum(int kind) { return kind == Codes4M || kind == Codes8M; }  // one for each group

// Bytes of scales in front of a group's codes, and in front of eight groups. wide: see above.
static inline size_t group_scales(int kind, bool wide) {
    return is_super(kind) ? 32 : (has_minimum(kind) ? 2 : 1) * kLanes * (wide && has_floats(kind) ? sizeof(float) : 2);
}
static inline size_t super_scales(int kind) { return !is_super(kind) ? 0 : kind == Codes8S ? 32 : 64; }
static inline size_t group_bytes(int kind, bool wide) { return group_scales(kind, wide) + (is_nibbles(kind) ? 256 : 512); }

static inline size_t panel_bytes(int kind, size_t cols, bool wide) {
    if (is_float(kind)) return cols * kLanes * (kind == Float32 ? 4 : 2);
    return cols / kGroup * group_bytes(kind, wide) + (is_super(kind) ? cols / kSuper * super_scales(kind) : 0);
}

// Where the codes' scales of input group g start within its panel.
static inline size_t group_offset(int kind, size_t g, bool wide) {
    return g * group_bytes(kind, wide) + (is_super(kind) ? (g / 8 + 1) * super_scales(kind) : 0);
}

// 32 inputs of one row, quantized: value = q · d. One cache line.
//
// An input that holds most of its group's energy would leave the others only a few of the 255 steps. Where that costs
// most, which is after a norm (outlying channels are the same in all rows), it is taken out of such a group (its code is
// 0) and gets a second Act, at a distance that the arguments give (`extra`): the one code 127 or -127, and a scale of its own.
// Instruction sets that multiply several rows together find a second Act without it too, whose d and dsum are zero: adding its
// product changes nothing.
constexpr float kDominance = 1.5f;  // second codes where this times the largest square exceeds the sum of squares
struct alignas(64) Act {
    int8_t q[kGroup];
    float d;          // absmax / 127, NaN or infinite if an input was
    float dsum;       // d · (sum of q): what a minimum is multiplied with
    int32_t start8;       // where an integer sum starts for codes with 8 added (see kDotStart)
    int32_t start128;     // and for signed codes read with 128 added (instruction sets that need it);
    int32_t half128[2];   // the same for inputs 0-15 and 16-31 alone
    int32_t more;         // not 0: there is a second Act, and this is 1 + the quad of inputs that its code is in
};
static_assert(sizeof(Act) == 64, "one cache line");

// Rows lie in blocks of 24 (the last may be smaller), and in a block first group 0 of all its rows, then group 1: one
// pointer serves all rows of a register tile. 24 is a multiple of the rows of every such tile.
constexpr int kActRows = 24;
struct ActPlace {  // of one row's group g: start + g · stride
    int64_t start, stride;
};
static inline ActPlace place_of(int row, int rows, int groups) {
    const int block = row / kActRows * kActRows;
    return {(int64_t)block * groups + row - block, rows - block < kActRows ? rows - block : kActRows};
}

// The same for 16 rows side by side, as matrix units with tiles read them; a last tile may have fewer rows.
constexpr int kTileRows = 16;
struct alignas(64) ActTile {
    int8_t q[kTileRows][kGroup];
    float d[kTileRows];
    float dsum[kTileRows];
    int32_t more;  // the second tile is not zero
};
static_assert(sizeof(ActTile) == 704, "whole cache lines");
