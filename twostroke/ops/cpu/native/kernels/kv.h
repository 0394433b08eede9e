// One token's head in the KV cache: how it is written, and read back.
//
// Float caches and int4 hold the tokens of a block one after the other. An int8 block (16 tokens of one head) lies as the
// dot-product instructions read it, four neighbours of what they sum over side by side:
//   keys    [dim / 4][16 tokens][4 dimensions]; where dim / 4 leaves a rest of 2, then [16 tokens][2 dimensions]
//   values  [4][dim][4 tokens]: token t is byte t % 4 of part t / 4
// So a token's bytes are spread over its block, and a block is read whole, however many of its tokens exist.
#pragma once

namespace {

TS_INLINE size_t kv_row_bytes(int format, int dim) {
    switch (format) {
        case KVFloat: return (size_t)dim * 4;
        case KVInt8: case KVLatent8: return (size_t)dim;
        case KVInt4: return (size_t)dim / 2;
        default: return (size_t)dim * 2;
    }
}

constexpr float kRounder = 12582912.f;  // 1.5·2^23: the low bits of x + kRounder are x, rounded to the nearest, half to even
constexpr float kTiny = 1e-30f;       // what is smaller is coded as zeros: its inverse would be too large

TS_INLINE constexpr bool is_coded(int format) { return format == KVInt8 || format == KVInt4; }

TS_INLINE F load_some(const float* x, int n) { return n >= 16 ? load(x) : load_first(x, n); }

TS_INLINE float absolute_peak(const float* x, int dim) {  // not a number if one of them is not
    const I magnitude = isplat(0x7fffffff);
    I bits = isplat(0);
    for (int d = 0; d < dim; d += 16) bits = imax(bits, iand(bits_of(load_some(x + d, dim - d)), magnitude));
    return bits_to_float((uint32_t)ipeak(bits));
}

// x as codes, value = code · scale; returns the scale. codes: room for a padded head_dim of them.
TS_INLINE float code_head(const float* x, int dim, float limit, int8_t* codes) {
    const float top = absolute_peak(x, dim), scale = top / limit;
    const bool some = top >= kTiny && top < 3e38f;  // else there is nothing to code, or the scale alone says that it is no number
    const F divisor = splat(some ? scale : __builtin_inff());
    for (int d = 0; d < dim; d += 16)
        store_low_bytes(codes + d, bits_of(add(div(load_some(x + d, dim - d), divisor), splat(kRounder))));
    return scale;
}

struct KeyCodes {  // where the codes of a token lie in its block
    static void put(const int8_t* codes, int dim, int token, uint8_t* block) {
        int d = 0;
        for (; d + 4 <= dim; d += 4) memcpy(block + 16 * d + 4 * token, codes + d, 4);
        if (d < dim) memcpy(block + 16 * d + 2 * token, codes + d, 2);
    }
};

struct ValueCodes {
    static void put(const int8_t* codes, int dim, int token, uint8_t* block) {
        uint8_t* const part = block + token / 4 * dim * 4 + token % 4;
        int d = 0;  // the bytes between belong to tokens that another thread may write now
        for (; d + 16 <= dim; d += 16) store_fourth_bytes(part + 4 * d, codes + d);
        for (; d < dim; ++d) part[4 * d] = (uint8_t)codes[d];
    }
};

// x: head_dim floats. block: the head's part of the token's block. Codes: KeyCodes or ValueCodes.
template <class Codes> static void kv_store(int format, const float* x, int dim, int token, uint8_t* block, float* scale) {
    uint8_t* const row = block + (size_t)token * kv_row_bytes(format, dim);
    int8_t codes[kMaxHeadDim];
    switch (format) {
        case KVFloat: memcpy(row, x, (size_t)dim * 4); return;
        case KVHalf: {
            int i = 0;
            for (; i + 16 <= dim; i += 16) store_half((uint16_t*)row + i, load(x + i));
            for (; i < dim; ++i) ((uint16_t*)row)[i] = float_to_half(x[i]);
            return;
        }
        case KVBfloat:
            for (int i = 0; i < dim; ++i) ((uint16_t*)row)[i] = float_to_bfloat(x[i]);
            return;
        case KVInt8:
            *scale = code_head(x, dim, 127.f, codes);
            Codes::put(codes, dim, token, block);
            return;
        default:
            *scale = code_head(x, dim, 7.f, codes);
            for (int i = 0; i < dim; i += 2) row[i / 2] = (uint8_t)((codes[i] + 8) | (codes[i + 1] + 8) << 4);
    }
}

// 16 elements of a float cache from element d on; of latents in bytes the codes.
template <int Format> TS_INLINE F kv_load(const uint8_t* row, int d) {
    switch (Format) {
        case KVFloat: return load((const float*)row + d);
        case KVHalf: return load_half((const uint16_t*)row + d);
        case KVLatent8: return load_int8((const int8_t*)row + d);
        default: return load_bfloat((const uint16_t*)row + d);
    }
}

// The last elements of a head whose size is no multiple of 16, and zeros: never reads past the head.
template <int Format> TS_INLINE F kv_load_tail(const uint8_t* row, int d, int dim) {
    uint8_t copy[64] = {0};
    const size_t offset = kv_row_bytes(Format, d), bytes = kv_row_bytes(Format, dim) - offset;
    if (bytes > sizeof copy) __builtin_unreachable();  // fewer than 16 elements
    memcpy(copy, row + offset, bytes);
    return first(kv_load<Format>(copy, 0), dim - d);
}

// Dim: head_dim where it is known when compiling, else 0.
template <int Format, int Dim = 0> TS_INLINE F kv_chunk(const uint8_t* row, int d, int head_dim) {
    if (Dim % 16 == 0 && Dim > 0) return kv_load<Format>(row, d);
    const int dim = Dim ? Dim : head_dim;
    return d + 16 <= dim ? kv_load<Format>(row, d) : kv_load_tail<Format>(row, d, dim);
}

}  // namespace
