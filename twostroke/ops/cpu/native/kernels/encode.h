// The parts of an encoder's layer beside its products, over 16 lanes: activation, residual add with layer norm, attention of
// one text's head. Each row's bits depend on its own text only.
#pragma once

namespace {

// erf to about 2e-7: Abramowitz and Stegun 7.1.26. |x| as a maximum, the sign from the bits.
TS_INLINE F verf(F x) {
    const F size = vmax(x, sub(splat(0.f), x));
    const F t = div(splat(1.f), fma(size, splat(0.3275911f), splat(1.f)));
    F y = splat(1.061405429f);
    y = fma(y, t, splat(-1.453152027f));
    y = fma(y, t, splat(1.421413741f));
    y = fma(y, t, splat(-0.284496736f));
    y = fma(y, t, splat(0.254829592f));
    const F tail = mul(mul(y, t), vexp(sub(splat(0.f), mul(size, size))));
    const F value = sub(splat(1.f), tail);
    return as_float(iadd(bits_of(value), iand(bits_of(x), isplat((int32_t)0x80000000))));
}

TS_INLINE F gelu_erf(F x) {
    const F half = mul(x, splat(0.5f));
    return fma(half, verf(mul(x, splat(0.70710678118654752f))), half);
}

TS_INLINE F activated(F x, int activation) {
    if (activation == EncodeGelu) return gelu_erf(x);
    if (activation == EncodeGeluTanh) return gelu_tanh(x);
    return activation == EncodeRelu ? vmax(x, splat(0.f)) : x;
}

static void encode_activate(float* x, int64_t count, int activation) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(x + i, activated(load(x + i), activation));
    const int left = (int)(count - i);
    if (left) store_first(x + i, activated(load_first(x + i, left), activation), left);
}

// x = norm(x + add) row by row; add may be null. cols: a multiple of 16.
static void encode_add_norm(float* x, const float* add_rows, int cols, const float* weight, const float* shift, float eps, int row,
                            int row_end) {
    for (; row < row_end; ++row) {
        float* const at = x + (int64_t)row * cols;
        F total = splat(0.f);
        for (int k = 0; k < cols; k += kLanes) {
            F v = load(at + k);
            if (add_rows) {
                v = add(v, load(add_rows + (int64_t)row * cols + k));
                store(at + k, v);
            }
            total = add(total, v);
        }
        const F mean = splat(sum(total) / (float)cols);
        F squares = splat(0.f);
        for (int k = 0; k < cols; k += kLanes) {
            const F v = sub(load(at + k), mean);
            squares = fma(v, v, squares);
        }
        const F scale = splat(1.f / square_root(sum(squares) / (float)cols + eps));
        for (int k = 0; k < cols; k += kLanes)
            store(at + k, fma(mul(sub(load(at + k), mean), scale), load(weight + k), load(shift + k)));
    }
}

// Scores of up to kEncodeQueries rows against all keys, keys along the lanes.
template <int MR> static void encode_scores(const float* const* q, const float* keys, int padded, int head_dim, F scale, float* out) {
    for (int key = 0; key < padded; key += kLanes) {
        F acc[MR];
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = splat(0.f);
        for (int d = 0; d < head_dim; ++d) {
            const F k = load(keys + (int64_t)d * padded + key);
            TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = fma(k, splat(q[r][d]), acc[r]);
        }
        TS_UNROLL for (int r = 0; r < MR; ++r) store(out + (int64_t)r * padded + key, mul(acc[r], scale));
    }
}

// The softmax of one row of scores, not yet divided by the sum that it returns. Lanes past the text become 0.
TS_INLINE float encode_softmax(float* scores, int count, int padded) {
    for (int key = count; key < padded; ++key) scores[key] = -3e38f;
    F most = load(scores);
    for (int key = kLanes; key < padded; key += kLanes) most = vmax(most, load(scores + key));
    const F peak_of = splat(peak(most));
    F total = splat(0.f);
    for (int key = 0; key < padded; key += kLanes) {
        F v = vexp_below(sub(load(scores + key), peak_of));
        if (key + kLanes > count) v = first(v, count - key);
        store(scores + key, v);
        total = add(total, v);
    }
    return sum(total);
}

template <int MR> static void encode_rows(const EncodeAttend& a, int row, float* keys, float* scores, int padded) {
    const int64_t stride = 3 * (int64_t)a.hidden;
    const float* q[MR];
    float inverse[MR];
    for (int r = 0; r < MR; ++r) q[r] = a.qkv + (row + r) * stride + a.head * a.head_dim;
    encode_scores<MR>(q, keys, padded, a.head_dim, splat(1.f / square_root((float)a.head_dim)), scores);
    for (int r = 0; r < MR; ++r) inverse[r] = 1.f / encode_softmax(scores + (int64_t)r * padded, a.rows, padded);
    for (int d = 0; d < a.head_dim; d += kLanes) {
        const float* value = a.qkv + 2 * (int64_t)a.hidden + a.head * a.head_dim + d;
        F acc[MR];
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = splat(0.f);
        for (int key = 0; key < a.rows; ++key) {
            const F v = load(value + key * stride);
            TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = fma(v, splat(scores[(int64_t)r * padded + key]), acc[r]);
        }
        TS_UNROLL for (int r = 0; r < MR; ++r)
            store(a.out + (int64_t)(row + r) * a.hidden + a.head * a.head_dim + d, mul(acc[r], splat(inverse[r])));
    }
}

// head_dim: a multiple of 16.
static void encode_attend(const EncodeAttend& a) {
    const int padded = (a.rows + kLanes - 1) / kLanes * kLanes;
    float *const keys = a.scratch, *const scores = keys + (int64_t)padded * a.head_dim;
    const float* from = a.qkv + a.hidden + a.head * a.head_dim;
    for (int key = 0; key < padded; ++key)
        for (int d = 0; d < a.head_dim; ++d)
            keys[(int64_t)d * padded + key] = key < a.rows ? from[key * 3 * (int64_t)a.hidden + d] : 0.f;
    int row = 0;
    for (; row + kEncodeQueries <= a.rows; row += kEncodeQueries) encode_rows<kEncodeQueries>(a, row, keys, scores, padded);
    for (; row < a.rows; ++row) encode_rows<1>(a, row, keys, scores, padded);
}

static const EncodeKernels kEncode = {encode_activate, encode_add_norm, encode_attend, nullptr, nullptr, nullptr, nullptr, kLargestHalf};

}  // namespace
