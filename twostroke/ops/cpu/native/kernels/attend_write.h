// The first half of attention: norm and rotate q and k, write K and V to the cache.
//
// Before K and q become codes, each head is spread (an orthogonal transform that leaves q · k as it is): a dimension with
// large values then costs the codes of its neighbours little.
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

TS_INLINE void subtract(float* x, const float* y, int n) {
    for (int i = 0; i < n; ++i) x[i] -= y[i];
}

struct Signs {
    float of[16];
};

// -1 where a lane takes the difference from its partner, lane ^ h.
constexpr Signs butterfly_signs(int h) {
    Signs signs{};
    for (int i = 0; i < 16; ++i) signs.of[i] = i & h ? -1.f : 1.f;
    return signs;
}

// -1 for every fifth element of a head; this is its chunk of 16 elements.
constexpr Signs fifth_signs(int chunk) {
    Signs signs{};
    for (int i = 0; i < 16; ++i) signs.of[i] = (16 * chunk + i) % 5 ? 1.f : -1.f;
    return signs;
}

alignas(64) static const Signs kButterfly[4] = {butterfly_signs(1), butterfly_signs(2), butterfly_signs(4), butterfly_signs(8)};
alignas(64) static const Signs kFifth[5] = {fifth_signs(0), fifth_signs(1), fifth_signs(2), fifth_signs(3), fifth_signs(4)};

template <int H> TS_INLINE F butterfly(F x, const Signs& signs) { return add(partners<H>(x), mul(x, load(signs.of))); }

// Heads of an odd size: run by run.
TS_INLINE void spread_small(float* x, int dim, int size) {
    for (int i = 0; i < dim; i += 5) x[i] = -x[i];
    for (int h = 1; h < size; h *= 2)
        for (int i = 0; i < dim; i += 2 * h)
            for (int j = i; j < i + h; ++j) {
                const float a = x[j], b = x[j + h];
                x[j] = a + b, x[j + h] = a - b;
            }
}

// Every fifth element changes its sign, then each run of `size` elements, the largest power of two that divides dim, gets
// its Walsh-Hadamard transform without the factor of 1 / sqrt(size). Without the signs, heads that already are a pattern
// of the transform would end in one element. Sums and differences alone: the same bits on every instruction set.
static void spread(float* x, int dim) {
    const int size = dim & -dim;
    if (size < 16) return spread_small(x, dim, size);
    for (int i = 0; i < dim; i += 16) {
        F v = mul(load(x + i), load(kFifth[i / 16 % 5].of));
        v = butterfly<1>(v, kButterfly[0]);
        v = butterfly<2>(v, kButterfly[1]);
        v = butterfly<4>(v, kButterfly[2]);
        store(x + i, butterfly<8>(v, kButterfly[3]));
    }
    for (int h = 16; h < size; h *= 2)
        for (int i = 0; i < dim; i += 2 * h)
            for (int j = i; j < i + h; j += 16) {
                const F a = load(x + j), b = load(x + j + h);
                store(x + j, add(a, b));
                store(x + j + h, sub(a, b));
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

// Asks for the lines that one token's codes will be written to: an int8 token is spread over all lines of its block.
TS_INLINE void fetch_places(const AttendLayer& L, int64_t slot) {
    const int64_t block = slot / kBlock;
    for (int h = 0; h < L.kv_heads; ++h) {
        const uint8_t* const keys = L.keys + block * L.key_block_stride + h * L.key_head_stride;
        const uint8_t* const values = L.values + block * L.value_block_stride + h * L.value_head_stride + slot % kBlock / 4 * L.head_dim * 4;
        for (int i = 0; i < 16 * L.head_dim; i += 64) __builtin_prefetch(keys + i, 1);
        for (int i = 0; i < 4 * L.head_dim; i += 64) __builtin_prefetch(values + i, 1);
    }
}

static void attend_write(const AttendLayer& L, const AttendBatch& B, const float* qkv, float* q, int row, int row_end) {
    const int dim = L.head_dim, padded = padded_dim(dim), group = L.heads / L.kv_heads;
    const int64_t width = (int64_t)(L.heads + 2 * L.kv_heads) * dim;
    const bool coded = is_coded(L.kv_format);
    const float factor = coded ? L.scale / (float)(dim & -dim) : L.scale;  // spread heads of q and k: their product is `size` times as large
    float head[kMaxHeadDim];
    if (L.kv_format == KVInt8) fetch_places(L, B.slots[row]);
    for (int r = row; r < row_end; ++r) {
        const bool next = r + 1 < row_end && B.slots[r + 1] / kBlock != B.slots[r] / kBlock;
        if (L.kv_format == KVInt8 && next) fetch_places(L, B.slots[r + 1]);
        const float* x = qkv + r * width;
        const float* cos = L.rope_half ? L.cos + B.positions[r] * L.rope_half : nullptr;
        const float* sin = L.rope_half ? L.sin + B.positions[r] * L.rope_half : nullptr;
        for (int h = 0; h < L.heads; ++h, x += dim) {
            float* out = q + (((int64_t)(h / group) * B.rows + r) * group + h % group) * padded;
            memcpy(out, x, (size_t)dim * 4);
            for (int i = dim; i < padded; ++i) out[i] = 0.f;
            if (L.query_norm) head_norm(out, dim, L.query_norm, L.query_eps);
            if (cos) rotate(out, L.rope_half, cos, sin);
            if (coded) spread(out, dim);
            for (int i = 0; i < padded; i += 16) store(out + i, mul(load(out + i), splat(factor)));
            if (coded) code_query(out, padded);
        }
        const int64_t block = B.slots[r] / kBlock;
        const int token = (int)(B.slots[r] % kBlock);
        const float* const v = x + (int64_t)L.kv_heads * dim;
        for (int h = 0; h < L.kv_heads; ++h, x += dim) {
            memcpy(head, x, (size_t)dim * 4);
            if (L.key_norm) head_norm(head, dim, L.key_norm, L.key_eps);
            if (cos) rotate(head, L.rope_half, cos, sin);
            if (coded && L.key_center) subtract(head, L.key_center + h * dim, dim);
            if (coded) spread(head, dim);
            write_token(L, head, v + h * dim, h, block, token);
        }
    }
}

}  // namespace
