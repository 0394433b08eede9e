// weights · v for the lines of a tile and one step of 64 keys, added to the rescaled values so far.
#pragma once

namespace {

template <int Format> static void load_values(const uint8_t* rows, int dim, int padded, int n, float* out) {
    const size_t stride = kv_row_bytes(Format, dim);
    for (int t = 0; t < n; ++t)
        for (int d = 0; d < dim; d += 16) store(out + t * padded + d, kv_chunk<Format>(rows + t * stride, d, dim));
}

// Tokens [from, to) of the step, from the converted block.
template <int N> static void weigh_lines(const Lines& s, int line, int from, int to) {
    for (int d = 0; d < s.padded; d += 16) {
        F acc[N];
        TS_UNROLL for (int i = 0; i < N; ++i)
            acc[i] = mul(load(s.values + (line + i) * s.padded + d), splat(s.rescale[line + i]));
        const float* w = s.scores + line * kStep;
        for (int t = from; t < to; ++t) {
            const F v = load(s.block + t * s.padded + d);
            TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = fma(splat(w[kStep * i + t]), v, acc[i]);
        }
        TS_UNROLL for (int i = 0; i < N; ++i) store(s.values + (line + i) * s.padded + d, acc[i]);
    }
}

template <int N> static void weigh_all(const Lines& s, int line, int end, int from, int to) {
    for (; line + N <= end; line += N) weigh_lines<N>(s, line, from, to);
    if constexpr (N > 1)
        if (line < end) weigh_all<N / 2>(s, line, end, from, to);
}

// The same for few lines straight from the cache. blocks[b]: 16 tokens each.
template <int Format, int N>
static void weigh_few(const Lines& s, int line, const uint8_t* const* blocks, int dim, int from, int to) {
    const size_t stride = kv_row_bytes(Format, dim);
    const float* w = s.scores + line * kStep;
    for (int d = 0; d < dim; d += 16) {
        F acc[N];
        TS_UNROLL for (int i = 0; i < N; ++i)
            acc[i] = mul(load(s.values + (line + i) * s.padded + d), splat(s.rescale[line + i]));
        for (int t = from; t < to; ++t) {
            const F v = kv_chunk<Format>(blocks[t / kBlock] + t % kBlock * stride, d, dim);
            TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = fma(splat(w[kStep * i + t]), v, acc[i]);
        }
        TS_UNROLL for (int i = 0; i < N; ++i) store(s.values + (line + i) * s.padded + d, acc[i]);
    }
}

}  // namespace
