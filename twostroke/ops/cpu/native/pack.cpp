#include "pack.h"

#include <string.h>

#include "half.h"

namespace {

// One group of 32 neighbouring weights, decoded to bytes. Scales are raw: halves or the K formats' small integers.
struct Group {
    int8_t code[kGroup];
    uint16_t d, m;     // of the group, or of its 256 inputs
    uint8_t s, t;      // K formats: scale and minimum, or the scales of the two halves (Q6_K)
};

struct Block {
    size_t elements, bytes;
};

constexpr Block kBlocks[kFormats] = {{1, 4},   {1, 2},   {1, 2},    {32, 34},   {32, 18},  {32, 20},
                                     {32, 22}, {32, 24}, {256, 144}, {256, 176}, {256, 210}, {32, 17}};

inline uint16_t half_at(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return h;
}

void nibbles(const uint8_t* p, int8_t* code) {
    for (int i = 0; i < 16; ++i) {
        code[i] = (int8_t)(p[i] & 15);
        code[i + 16] = (int8_t)(p[i] >> 4);
    }
}

void fifth_bits(const uint8_t* p, int8_t* code) {
    for (int i = 0; i < 32; ++i) code[i] = (int8_t)(code[i] | ((p[i / 8] >> (i % 8)) & 1) << 4);
}

// Q4_K and Q5_K: 6-bit scales and minimums of 8 groups in 12 bytes. 0-3: bytes j and j+4. 4-7: the nibbles of byte
// j+4, topped by the two high bits of bytes j-4 and j.
void six_bits(const uint8_t* p, int j, Group& g) {
    if (j < 4) {
        g.s = p[j] & 63;
        g.t = p[j + 4] & 63;
    } else {
        g.s = (uint8_t)((p[j + 4] & 15) | (p[j - 4] >> 6) << 4);
        g.t = (uint8_t)((p[j + 4] >> 4) | (p[j] >> 6) << 4);
    }
}

void decode_super(int format, const uint8_t* b, int j, Group& g) {  // group j of 8
    if (format == Q6_K) {  // 128 bytes low nibbles, 64 bytes of high pairs, 16 scales, d; two halves of 128 elements
        const uint8_t* low = b + 64 * (j / 4) + 32 * (j % 2);
        const uint8_t* high = b + 128 + 32 * (j / 4);
        for (int i = 0; i < 32; ++i) {
            const int nibble = (low[i] >> (j % 4 / 2 * 4)) & 15, pair = (high[i] >> (2 * (j % 4))) & 3;
            g.code[i] = (int8_t)((nibble | pair << 4) - 32);
        }
        g.s = b[192 + 2 * j];
        g.t = b[192 + 2 * j + 1];
        g.d = half_at(b + 208);
        return;
    }
    g.d = half_at(b);
    g.m = half_at(b + 2);
    six_bits(b + 4, j, g);
    const uint8_t* low = b + (format == Q4_K ? 16 : 48) + 32 * (j / 2);
    for (int i = 0; i < 32; ++i) g.code[i] = (int8_t)((low[i] >> (j % 2 * 4)) & 15);
    if (format == Q5_K)
        for (int i = 0; i < 32; ++i) g.code[i] = (int8_t)(g.code[i] | ((b[16 + i] >> j) & 1) << 4);
}

void decode(int format, const uint8_t* row, int group, Group& g) {
    if (kBlocks[format].elements == kSuper) return decode_super(format, row + group / 8 * kBlocks[format].bytes, group % 8, g);
    const uint8_t* b = row + group * kBlocks[format].bytes;
    if (format == MXFP4) {  // the exponent of a scale, and the codes: 2^(exponent - 128) as bfloat16
        g.d = b[0] < 2 ? (uint16_t)(0x20 << b[0]) : (uint16_t)((b[0] - 1) << 7);
        return nibbles(b + 1, g.code);
    }
    g.d = half_at(b);
    switch (format) {
        case Q8_0: memcpy(g.code, b + 2, 32); return;
        case Q4_0: nibbles(b + 2, g.code); return;
        case Q4_1:
            g.m = half_at(b + 2);
            nibbles(b + 4, g.code);
            return;
        case Q5_0:
            nibbles(b + 6, g.code);
            fifth_bits(b + 2, g.code);
            for (int i = 0; i < 32; ++i) g.code[i] = (int8_t)(g.code[i] - 16);
            return;
        case Q5_1:
            g.m = half_at(b + 2);
            nibbles(b + 8, g.code);
            fifth_bits(b + 4, g.code);
            return;
    }
}

// A scale of a packed group, as a float or as it is.
void put_scale(uint16_t half, bool floats, float factor, int lane, uint8_t* out) {
    const float scale = half_to_float(half) * factor;
    if (floats) memcpy(out + sizeof(float) * lane, &scale, sizeof(float));
    else memcpy(out + 2 * lane, &half, 2);
}

float scale_at(const uint8_t* scales, bool floats, int lane) {
    if (!floats) return half_to_float(half_at(scales + 2 * lane));
    float scale;
    memcpy(&scale, scales + sizeof(float) * lane, sizeof(float));
    return scale;
}

// What scales of nibbles that are read as 16 times their value are multiplied with.
float scale_factor(int kind, bool wide) { return wide && kind == Codes4 ? 1.f / 16 : 1.f; }

// Lane `lane` of one group: its scales and codes into the packed group at `out`.
void place(int kind, bool wide, const Group& g, int lane, uint8_t* out) {
    const bool floats = wide && has_floats(kind);
    if (is_super(kind)) {
        out[lane] = g.s;
        out[16 + lane] = g.t;
    } else {
        put_scale(g.d, floats, scale_factor(kind, wide), lane, out);
        if (has_minimum(kind)) put_scale(g.m, floats, 1.f, lane, out + group_scales(kind, wide) / 2);
    }
    out += group_scales(kind, wide) + 4 * lane;
    const int flip = wide && kind == Codes4 ? 0x88 : 0;  // to two's complement
    if (!is_nibbles(kind)) {
        for (int q = 0; q < 8; ++q) memcpy(out + 64 * q, g.code + 4 * q, 4);
        return;
    }
    for (int r = 0; r < 4; ++r)
        for (int j = 0; j < 4; ++j) out[64 * r + j] = (uint8_t)((g.code[8 * r + j] | g.code[8 * r + 4 + j] << 4) ^ flip);
}

void pack_codes(int format, bool wide, const uint8_t* data, int rows, int cols, int panel, uint8_t* out) {
    const int kind = kind_of(format);
    const size_t row_bytes = stored_row_bytes(format, cols);
    Group g{};
    for (int lane = 0; lane < kLanes; ++lane) {
        const int row = panel * kLanes + lane;
        if (row >= rows) return;  // the panel was zeroed: padding has scale 0
        for (int group = 0; group < cols / kGroup; ++group) {
            decode(format, data + row * row_bytes, group, g);
            uint8_t* at = out + group_offset(kind, group, wide);
            place(kind, wide, g, lane, at);
            if (is_super(kind) && group % 8 == 0) {
                memcpy(at - super_scales(kind) + 2 * lane, &g.d, 2);
                if (kind != Codes8S) memcpy(at - super_scales(kind) + 32 + 2 * lane, &g.m, 2);
            }
        }
    }
}

template <class T> void pack_floats(const uint8_t* data, int rows, int cols, int panel, uint8_t* out) {
    for (int lane = 0; lane < kLanes && panel * kLanes + lane < rows; ++lane) {
        const uint8_t* row = data + (size_t)(panel * kLanes + lane) * cols * sizeof(T);
        for (int k = 0; k < cols; ++k) memcpy(out + ((size_t)k * kLanes + lane) * sizeof(T), row + (size_t)k * sizeof(T), sizeof(T));
    }
}

int code_at(int kind, const uint8_t* codes, int lane, int i) {
    const int quad = i / 4;
    if (!is_nibbles(kind)) return (int8_t)codes[64 * quad + 4 * lane + i % 4];
    return (codes[64 * (quad / 2) + 4 * lane + i % 4] >> (quad % 2 * 4)) & 15;
}

// `super`: the scales of the group's 256 inputs, K kinds only.
void unpack_group(int kind, bool wide, const uint8_t* at, const uint8_t* super, int lane, float* out) {
    const uint8_t* codes = at + group_scales(kind, wide);
    if (kind == Codes4X) {
        const float scale = bfloat_to_float(half_at(at + 2 * lane));
        for (int i = 0; i < kGroup; ++i) out[i] = (float)kFourBitFloats[code_at(kind, codes, lane, i)] * scale;
        return;
    }
    const bool floats = wide && has_floats(kind);
    const float d = scale_at(is_super(kind) ? super : at, floats, lane) / scale_factor(kind, wide);
    float scale[2] = {d, d}, low = 0.f;
    if (kind == Codes8S) {
        scale[0] = d * (float)(int8_t)at[lane];
        scale[1] = d * (float)(int8_t)at[16 + lane];
    } else if (is_super(kind)) {
        scale[0] = scale[1] = d * (float)at[lane];
        low = -(half_to_float(half_at(super + 32 + 2 * lane)) * (float)at[16 + lane]);
    } else if (has_minimum(kind)) {
        low = scale_at(at + group_scales(kind, wide) / 2, floats, lane);
    }
    const int offset = kind == Codes4 ? 8 : 0, flip = wide ? offset : 0;
    for (int i = 0; i < kGroup; ++i) out[i] = (float)((code_at(kind, codes, lane, i) ^ flip) - offset) * scale[i / 16] + low;
}

}  // namespace

size_t stored_row_bytes(int format, size_t cols) {
    const Block b = kBlocks[format];
    return cols % b.elements ? 0 : cols / b.elements * b.bytes;
}

void pack_panels(int format, bool wide, const uint8_t* data, int rows, int cols, int panel, int panel_end, uint8_t* out) {
    const size_t bytes = panel_bytes(kind_of(format), cols, wide);
    for (int p = panel; p < panel_end; ++p) {
        uint8_t* at = out + p * bytes;
        if ((p + 1) * kLanes > rows) memset(at, 0, bytes);
        switch (format) {
            case F32: pack_floats<uint32_t>(data, rows, cols, p, at); break;
            case F16:
            case BF16: pack_floats<uint16_t>(data, rows, cols, p, at); break;
            default: pack_codes(format, wide, data, rows, cols, p, at);
        }
    }
}

void unpack_row(int kind, bool wide, const uint8_t* panels, int row, int cols, float* out) {
    const uint8_t* panel = panels + row / kLanes * panel_bytes(kind, cols, wide);
    const int lane = row % kLanes;
    if (kind == Float32)
        for (int k = 0; k < cols; ++k) memcpy(out + k, panel + ((size_t)k * kLanes + lane) * 4, 4);
    else if (kind == Half)
        for (int k = 0; k < cols; ++k) out[k] = half_to_float(half_at(panel + ((size_t)k * kLanes + lane) * 2));
    else if (kind == Bfloat)
        for (int k = 0; k < cols; ++k) out[k] = bfloat_to_float(half_at(panel + ((size_t)k * kLanes + lane) * 2));
    else
        for (int g = 0; g < cols / kGroup; ++g) {
            const uint8_t* super = panel + group_offset(kind, g / 8 * 8, wide) - super_scales(kind);
            unpack_group(kind, wide, panel + group_offset(kind, g, wide), super, lane, out + g * kGroup);
        }
}
