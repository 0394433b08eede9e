// What the choice of experts needs: scores of the router's outputs, and the sum of the chosen experts' results.
#pragma once

namespace {

TS_INLINE F part_of(const float* x, int k, int n, F rest) { return k + 16 <= n ? load(x + k) : between(load_first(x + k, n - k), 0, n - k, rest); }

// softmax(x) or, value by value, sigmoid(x). `out` has room for whole vectors.
static void scores(const float* x, int count, int sigmoid, float* out) {
    const F one = splat(1.f);
    if (sigmoid) {
        for (int k = 0; k < count; k += 16) store(out + k, div(one, add(one, vexp(sub(splat(0.f), part_of(x, k, count, one))))));
        return;
    }
    F most = part_of(x, 0, count, splat(x[0]));
    for (int k = 16; k < count; k += 16) most = vmax(most, part_of(x, k, count, splat(x[0])));
    const F top = splat(peak(most));
    F total = splat(0.f);
    for (int k = 0; k < count; k += 16) {
        const F e = vexp(sub(part_of(x, k, count, top), top));
        store(out + k, e);
        total = add(total, k + 16 <= count ? e : first(e, count - k));
    }
    const F whole = splat(sum(total));
    for (int k = 0; k < count; k += 16) store(out + k, div(load(out + k), whole));
}

// out = Σ weights[i] · x[rows[i]], in this order.
static void weighted_sum(const float* x, int cols, const int32_t* rows, const float* weights, int count, float* out) {
    int k = 0;
    for (; k + 16 <= cols; k += 16) {
        F total = mul(load(x + (int64_t)rows[0] * cols + k), splat(weights[0]));
        for (int i = 1; i < count; ++i) total = fma(load(x + (int64_t)rows[i] * cols + k), splat(weights[i]), total);
        store(out + k, total);
    }
    if (k == cols) return;
    F total = mul(load_first(x + (int64_t)rows[0] * cols + k, cols - k), splat(weights[0]));
    for (int i = 1; i < count; ++i) total = fma(load_first(x + (int64_t)rows[i] * cols + k, cols - k), splat(weights[i]), total);
    store_first(out + k, total, cols - k);
}

}  // namespace
