// Attention over a list of entries that are keys and values alike, and the scores by which entries are chosen.
#pragma once

namespace {

template <class Load> TS_INLINE void read_entry(const Load& at, int dim, float* line) {
    for (int k = 0; k < dim; k += 16) store(line + k, at(k));
}

// `dim` numbers as floats; dim is a multiple of 16.
static void entry_line(const void* entry, int format, int dim, float* line) {
    if (format == KVFloat) read_entry([&](int k) { return load((const float*)entry + k); }, dim, line);
    else if (format == KVHalf) read_entry([&](int k) { return load_half((const uint16_t*)entry + k); }, dim, line);
    else read_entry([&](int k) { return load_bfloat((const uint16_t*)entry + k); }, dim, line);
}

TS_INLINE float dot(const float* a, const float* b, int dim) {
    F total = mul(load(a), load(b));
    for (int k = 16; k < dim; k += 16) total = fma(load(a + k), load(b + k), total);
    return sum(total);
}

// Heads [head, head_end) of one row. The sink is merged last.
static void attend_entries(const EntriesTask& t, float* scratch) {
    const EntriesCall& call = *t.call;
    const int dim = call.dim, heads = t.head_end - t.head, n = t.count, padded = (n + 15) / 16 * 16;
    float *const line = scratch, *const weights = scratch + dim;  // (heads, padded)
    for (int e = 0; e < n; ++e) {
        entry_line(t.entries[e], call.format, dim, line);
        for (int h = 0; h < heads; ++h) weights[h * padded + e] = dot(t.q + h * dim, line, dim) * call.scale;
    }
    for (int h = 0; h < heads; ++h) {
        float* const mine = weights + h * padded;
        const float sink = call.sinks[t.head + h];
        float top = sink;
        for (int e = 0; e < n; ++e) top = mine[e] > top ? mine[e] : top;
        for (int e = n; e < padded; ++e) mine[e] = top;
        F total = splat(0.f);
        for (int e = 0; e < padded; e += 16) {
            const F value = vexp(sub(load(mine + e), splat(top)));
            const F kept = e + 16 <= n ? value : first(value, n - e);
            store(mine + e, kept);
            total = add(total, kept);
        }
        float rest[16];
        store(rest, vexp(splat(sink - top)));
        const float whole = sum(total) + rest[0];
        for (int e = 0; e < padded; e += 16) store(mine + e, div(load(mine + e), splat(whole)));
        for (int k = 0; k < dim; k += 16) store(t.out + h * dim + k, splat(0.f));
    }
    for (int e = 0; e < n; ++e) {
        entry_line(t.entries[e], call.format, dim, line);
        for (int h = 0; h < heads; ++h) {
            const F weight = splat(weights[h * padded + e]);
            for (int k = 0; k < dim; k += 16) store(t.out + h * dim + k, fma(load(line + k), weight, load(t.out + h * dim + k)));
        }
    }
}

// out[e] = Σ over heads of weights[h] · max(0, q[h] · keys[e]).
static void entry_scores(const float* q, const float* weights, int heads, int dim, const float* keys, int from, int to, float* out) {
    for (int e = from; e < to; ++e) {
        float total = 0.f;
        for (int h = 0; h < heads; ++h) {
            const float product = dot(q + h * dim, keys + (int64_t)e * dim, dim);
            total += weights[h] * (product > 0.f ? product : 0.f);
        }
        out[e] = total;
    }
}

}  // namespace
