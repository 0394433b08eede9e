// Entries of latent attention in int8: tokens one after the other, value = code · scale. Each 64 numbers of an entry share a
// scale, so the rotated part behind a latent of 512 has its own. Attention converts a step to floats, as of a float cache.
#pragma once

namespace {

constexpr int kLatentGroup = 64;

// scales: of this token in its block; those of the next 64 numbers lie `stride` further on.
static void store_latent_bytes(const float* x, int dim, uint8_t* row, float* scales, int64_t stride) {
    int8_t codes[kLatentGroup];
    for (int d = 0; d < dim; d += kLatentGroup, scales += stride) {
        const int n = dim - d < kLatentGroup ? dim - d : kLatentGroup;
        *scales = code_head(x + d, n, 127.f, codes);
        memcpy(row + d, codes, (size_t)n);
    }
}

// One block for all lines of a tile: keys[d][t], where tokens >= n are zero, and values[t][d], the first value_dim numbers.
static void load_latent_bytes(const AttendLayer& L, const uint8_t* rows, const float* scales, int wide, int n, float* keys, float* values) {
    const int dim = L.head_dim;
    for (int d = 0; d < dim; d += 16) {
        const float* const scale = scales + d / kLatentGroup * L.key_scale_head_stride;
        F token[16];
        TS_UNROLL for (int t = 0; t < 16; ++t)
            token[t] = t < n ? mul(kv_chunk<KVLatent8>(rows + t * dim, d, dim), splat(scale[t])) : splat(0.f);
        for (int t = 0; t < n && d < L.value_dim; ++t) store(values + t * wide + d, token[t]);
        transpose(token);
        TS_UNROLL for (int i = 0; i < 16; ++i) store(keys + (d + i) * 16, token[i]);
    }
}

}  // namespace
