// q · k for the lines of a tile and one block of 16 keys.
#pragma once

namespace {

// keys[d][t] of one block; tokens >= n are zero.
template <int Format> static void load_keys(const uint8_t* rows, int dim, int n, float* out) {
    const size_t stride = kv_row_bytes(Format, dim);
    for (int d = 0; d < dim; d += 16) {
        F token[16];
        TS_UNROLL for (int t = 0; t < 16; ++t) token[t] = t < n ? kv_chunk<Format>(rows + t * stride, d, dim) : splat(0.f);
        transpose(token);
        TS_UNROLL for (int i = 0; i < 16; ++i) store(out + (d + i) * 16, token[i]);
    }
}

// One partial sum (dimensions j, j + 16, ...) of N lines and V blocks of 16 keys.
template <int N, int V>
TS_INLINE void partial_scores(const float* q, const float* keys, int padded, int j, F (*acc)[V]) {
    TS_UNROLL for (int i = 0; i < N; ++i)
        TS_UNROLL for (int v = 0; v < V; ++v) acc[i][v] = splat(0.f);
    for (int d = j; d < padded; d += 16) {
        F k[V];
        TS_UNROLL for (int v = 0; v < V; ++v) k[v] = load(keys + (v * padded + d) * 16);
        TS_UNROLL for (int i = 0; i < N; ++i) {
            const F x = splat(q[i * padded + d]);
            TS_UNROLL for (int v = 0; v < V; ++v) acc[i][v] = fma(x, k[v], acc[i][v]);
        }
    }
}

template <int N, int V, class Lanes> TS_INLINE void add_scores(Lanes (*a)[V], Lanes (*b)[V]) {
    TS_UNROLL for (int i = 0; i < N; ++i)
        TS_UNROLL for (int v = 0; v < V; ++v) a[i][v] = add(a[i][v], b[i][v]);
}

template <int N, int V>
TS_INLINE void quarter_scores(const float* q, const float* keys, int padded, int j, F (*out)[V]) {
    F a[N][V], b[N][V];
    partial_scores<N, V>(q, keys, padded, j, out);
    partial_scores<N, V>(q, keys, padded, j + 8, a);
    add_scores<N, V>(out, a);
    partial_scores<N, V>(q, keys, padded, j + 4, a);
    partial_scores<N, V>(q, keys, padded, j + 12, b);
    add_scores<N, V>(a, b);
    add_scores<N, V>(out, a);
}

// The tree of sum(), each partial sum being V vectors over the keys. quarter(j, out): see quarter_scores.
template <int N, int V, class Lanes, class Quarter> TS_INLINE void tree_scores(const Quarter& quarter, float* scores) {
    Lanes low[N][V], high[N][V], one[N][V];
    quarter(0, low);
    quarter(1, one);
    add_scores<N, V>(low, one);
    quarter(2, high);
    quarter(3, one);
    add_scores<N, V>(high, one);
    add_scores<N, V>(low, high);
    TS_UNROLL for (int i = 0; i < N; ++i)
        TS_UNROLL for (int v = 0; v < V; ++v) store(scores + kStep * i + 16 * v, low[i][v]);
}

// keys: V blocks, each (padded, 16).
template <int N, int V> static void score_lines(const float* q, const float* keys, int padded, float* scores) {
    tree_scores<N, V, F>([&](int j, F (*out)[V]) { quarter_scores<N, V>(q, keys, padded, j, out); }, scores);
}

// Lines [line, end): N at a time, then half as many.
template <int N, int V>
static void score_all(const float* q, const float* keys, int padded, float* scores, int line, int end) {
    for (; line + N <= end; line += N)
        score_lines<N, V>(q + (int64_t)line * padded, keys, padded, scores + kStep * line);
    if constexpr (N > 1)
        if (line < end) score_all<N / 2, V>(q, keys, padded, scores, line, end);
}

// The same sums for few lines, straight from the cache: lanes are dimensions, summed across at the end.
// Dim: head_dim where it is known when compiling, else 0. ahead: a block that is read soon.
template <int Format, int N, int Dim>
static void score_few(const uint8_t* rows, int head_dim, int n, const float* q, int padded, float* scores, const uint8_t* ahead) {
    const int dim = Dim ? Dim : head_dim;
    const size_t stride = kv_row_bytes(Format, dim);
    F part[N][16];
    for (int t = 0; t < n; ++t) {
        fetch_row(ahead + t * stride, stride);
        F acc[N];
        TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = splat(0.f);
        TS_UNROLL for (int d = 0; d < dim; d += 16) {
            const F k = kv_chunk<Format, Dim>(rows + t * stride, d, dim);
            TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = fma(load(q + i * padded + d), k, acc[i]);
        }
        TS_UNROLL for (int i = 0; i < N; ++i) part[i][t] = acc[i];
    }
    for (int t = n; t < 16; ++t)
        TS_UNROLL for (int i = 0; i < N; ++i) part[i][t] = splat(0.f);
    TS_UNROLL for (int i = 0; i < N; ++i) store(scores + kStep * i, sums(part[i]));
}

}  // namespace
