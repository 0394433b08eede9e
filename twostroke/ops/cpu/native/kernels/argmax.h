// The largest of many, the lowest index among equals; -1 where a NaN is among them.
#pragma once

namespace {

static int64_t argmax(const float* x, int64_t count) {
    constexpr int64_t kChunk = 1024;
    const float none = -__builtin_inff();
    float top = none;
    int64_t where = 0;  // the chunk that holds it first
    for (int64_t start = 0; start < count; start += kChunk) {
        const int64_t end = start + kChunk < count ? start + kChunk : count;
        F best = splat(none), bad = splat(0.f);
        int64_t k = start;
        for (; k + 16 <= end; k += 16) {
            const F v = load(x + k);
            best = vmax(best, v);
            bad = fma(v, splat(0.f), bad);  // becomes NaN by a NaN, but by an infinity too
        }
        float high = peak(best);
        bool odd = sum(bad) != 0.f;
        for (; k < end; ++k) {
            high = x[k] > high ? x[k] : high;
            odd |= x[k] != x[k];
        }
        if (odd)
            for (int64_t i = start; i < end; ++i)
                if (x[i] != x[i]) return -1;
        if (high > top) {
            top = high;
            where = start;
        }
    }
    while (where < count && x[where] != top) ++where;
    return where < count ? where : 0;
}

}  // namespace
