// The first half of attention: norm and rotate q and k, write K and V to the cache.
#pragma once

namespace {

// x -> out, n elements: x · inverse_rms · weight.
TS_INLINE void head_norm(float* x, int n, const float* weight, float eps) {
    const float scale = inverse_rms(x, n, eps);
    int i = 0;
    for (; i + 16 <= n; i += 16) store(x + i, mul(mul(load(x + i), splat(scale)), load(weight + i)));
    if (i < n) store_first(x + i, mul(mul(load_first(x + i, n - i), splat(scale)), load_first(weight + i, n - i)), n - i);
}

// Element i of the first half pairs with element i of the second.
TS_INLINE void rotate(float* x, int half, const float* cos, const float* sin) {
    for (int i = 0; i < half; i += 16) {
        const int n = half - i < 16 ? half - i : 16;
        const F c = load_first(cos + i, n), s = load_first(sin + i, n);
        const F a = load_first(x + i, n), b = load_first(x + half + i, n);
        store_first(x + i, fma(a, c, sub(splat(0.f), mul(b, s))), n);
        store_first(x + half + i, fma(b, c, mul(a, s)), n);
    }
}

// K and V of one token and head. Where a value is not a number the scale of the key is not either: whatever sees the token
// then shows it, although the codes of weights · v are numbers in any case.
TS_INLINE void write_token(const AttendLayer& L, const float* k, const float* v, int h, int64_t block, int token) {
    float* key_scale = L.key_scales ? L.key_scales + block * L.key_scale_block_stride + h * L.key_scale_head_stride + token : nullptr;
    float* value_scale =
        L.value_scales ? L.value_scales + block * L.value_scale_block_stride + h * L.value_scale_head_stride + token : nullptr;
    kv_store<KeyCodes>(L.kv_format, k, L.head_dim, token, L.keys + block * L.key_block_stride + h * L.key_head_stride, key_scale);
    kv_store<ValueCodes>(L.kv_format, v, L.head_dim, token, L.values + block * L.value_block_stride + h * L.value_head_stride, value_scale);
    if (value_scale && !(*value_scale < 3e38f)) *key_scale = *value_scale * 0.f;
}

static void attend_write(const AttendLayer& L, const AttendBatch& B, const float* qkv, float* q, int row, int row_end) {
    const int dim = L.head_dim, padded = padded_dim(dim), group = L.heads / L.kv_heads;
    const int64_t width = (int64_t)(L.heads + 2 * L.kv_heads) * dim;
    float head[kMaxHeadDim];
    for (int r = row; r < row_end; ++r) {
        const float* x = qkv + r * width;
        const float* cos = L.rope_half ? L.cos + B.positions[r] * L.rope_half : nullptr;
        const float* sin = L.rope_half ? L.sin + B.positions[r] * L.rope_half : nullptr;
        for (int h = 0; h < L.heads; ++h, x += dim) {
            float* out = q + (((int64_t)(h / group) * B.rows + r) * group + h % group) * padded;
            memcpy(out, x, (size_t)dim * 4);
            for (int i = dim; i < padded; ++i) out[i] = 0.f;
            if (L.query_norm) head_norm(out, dim, L.query_norm, L.query_eps);
            if (cos) rotate(out, L.rope_half, cos, sin);
            for (int i = 0; i < padded; i += 16) store(out + i, mul(load(out + i), splat(L.scale)));
            if (is_coded(L.kv_format)) code_query(out, padded);
        }
        const int64_t block = B.slots[r] / kBlock;
        const int token = (int)(B.slots[r] % kBlock);
        const float* const v = x + (int64_t)L.kv_heads * dim;
        for (int h = 0; h < L.kv_heads; ++h, x += dim) {
            memcpy(head, x, (size_t)dim * 4);
            if (L.key_norm) head_norm(head, dim, L.key_norm, L.key_eps);
            if (cos) rotate(head, L.rope_half, cos, sin);
            write_token(L, head, v + h * dim, h, block, token);
        }
    }
}

}  // namespace
