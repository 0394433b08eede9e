// One token's head in the KV cache: how it is written, and read back as 16 float lanes.
#pragma once

namespace {

TS_INLINE size_t kv_row_bytes(int format, int dim) {
    switch (format) {
        case KVFloat: return (size_t)dim * 4;
        case KVInt8: return (size_t)dim;
        case KVInt4: return (size_t)dim / 2;
        default: return (size_t)dim * 2;
    }
}

TS_INLINE float absolute_peak(const float* x, int dim) {
    float peak = 0.f;
    for (int i = 0; i < dim; ++i) {
        const float a = __builtin_fabsf(x[i]);
        peak = a > peak || a != a ? a : peak;
    }
    return peak;
}

TS_INLINE int rounded(float x) { return (int)(float_to_bits(x + 12582912.f) - 0x4b400000u); }  // half to even

// x: head_dim floats. The scale of a coded head is the only thing besides its codes: value = code · scale.
static void kv_store(int format, const float* x, int dim, void* out, float* scale) {
    switch (format) {
        case KVFloat: memcpy(out, x, (size_t)dim * 4); return;
        case KVHalf: {
            int i = 0;
            for (; i + 16 <= dim; i += 16) store_half((uint16_t*)out + i, load(x + i));
            for (; i < dim; ++i) ((uint16_t*)out)[i] = float_to_half(x[i]);
            return;
        }
        case KVBfloat:
            for (int i = 0; i < dim; ++i) ((uint16_t*)out)[i] = float_to_bfloat(x[i]);
            return;
    }
    const float limit = format == KVInt8 ? 127.f : 7.f;
    const float s = absolute_peak(x, dim) / limit;
    *scale = s;
    const bool empty = !(s > 0.f) || s > 3e38f;  // nothing to code, or not a number: the scale alone says so
    for (int i = 0; i < dim; ++i) {
        const int code = empty ? 0 : rounded(x[i] / s);
        if (format == KVInt8) {
            ((int8_t*)out)[i] = (int8_t)code;
        } else {
            uint8_t& byte = ((uint8_t*)out)[i / 2];
            byte = i % 2 ? (uint8_t)(byte | (code + 8) << 4) : (uint8_t)(code + 8);
        }
    }
}

// 16 elements from element d on, without the scale of a coded cache.
template <int Format> TS_INLINE F kv_load(const uint8_t* row, int d) {
    switch (Format) {
        case KVFloat: return load((const float*)row + d);
        case KVHalf: return load_half((const uint16_t*)row + d);
        case KVBfloat: return load_bfloat((const uint16_t*)row + d);
        case KVInt8: return load_int8((const int8_t*)row + d);
        default: return float_bytes(load_nibbles(row + d / 2));
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
