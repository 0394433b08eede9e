// weights · v for the lines of a tile and one step of 64 keys, added to the rescaled values so far.
#pragma once

namespace {

template <int Format> static void load_values(const uint8_t* rows, int dim, int padded, int n, float* out) {
    const size_t stride = kv_row_bytes(Format, dim);
    for (int t = 0; t < n; ++t)
        for (int d = 0; d < dim; d += 16) store(out + t * padded + d, kv_chunk<Format>(rows + t * stride, d, dim));
}

// Where a value of token t, dimensions [d, d + 16) comes from: the converted block, or the cache itself.
struct BlockValues {
    const float* block;
    int padded;
    TS_MEMBER F at(int t, int d) const { return load(block + t * padded + d); }
};
template <int Format, int Dim> struct CacheValues {
    const uint8_t* const* blocks;
    int head_dim;
    TS_MEMBER F at(int t, int d) const {
        const int dim = Dim ? Dim : head_dim;
        return kv_chunk<Format, Dim>(blocks[(unsigned)t / kBlock] + (unsigned)t % kBlock * kv_row_bytes(Format, dim), d, dim);
    }
};

// N lines, C chunks of 16 dimensions from d on, tokens [from, to) of the step.
template <int N, int C, class Values>
TS_INLINE void weigh_chunks(const Lines& s, const Values& source, int line, int d, int from, int to) {
    F acc[N][C];
    const float* w = s.scores + line * kStep;
    TS_UNROLL for (int i = 0; i < N; ++i)
        TS_UNROLL for (int c = 0; c < C; ++c)
            acc[i][c] = mul(load(s.values + (line + i) * s.padded + d + 16 * c), splat(s.rescale[line + i]));
    for (int t = from; t < to; ++t) {
        F v[C];
        TS_UNROLL for (int c = 0; c < C; ++c) v[c] = source.at(t, d + 16 * c);
        TS_UNROLL for (int i = 0; i < N; ++i) {
            const F x = splat(w[kStep * i + t]);
            TS_UNROLL for (int c = 0; c < C; ++c) acc[i][c] = fma(x, v[c], acc[i][c]);
        }
    }
    TS_UNROLL for (int i = 0; i < N; ++i)
        TS_UNROLL for (int c = 0; c < C; ++c) store(s.values + (line + i) * s.padded + d + 16 * c, acc[i][c]);
}

template <int N, int C, class Values>
static void weigh_lines(const Lines& s, const Values& source, int line, int from, int to) {
    int d = 0;
    for (; d + 16 * C <= s.padded; d += 16 * C) weigh_chunks<N, C>(s, source, line, d, from, to);
    for (; d < s.padded; d += 16) weigh_chunks<N, 1>(s, source, line, d, from, to);
}

// Lines [line, end): N at a time, then half as many.
template <int N, int C, class Values>
static void weigh_all(const Lines& s, const Values& source, int line, int end, int from, int to) {
    for (; line + N <= end; line += N) weigh_lines<N, C>(s, source, line, from, to);
    if constexpr (N > 1)
        if (line < end) weigh_all<N / 2, C>(s, source, line, end, from, to);
}

}  // namespace
