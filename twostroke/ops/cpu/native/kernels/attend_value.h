// weights · v for the lines of a tile and one step of 64 keys, added to the rescaled values so far.
#pragma once

namespace {

// The first `dim` of `head_dim` elements of each row.
template <int Format> static void load_values(const uint8_t* rows, int head_dim, int dim, int wide, int n, float* out) {
    const size_t stride = kv_row_bytes(Format, head_dim);
    for (int t = 0; t < n; ++t)
        for (int d = 0; d < dim; d += 16) store(out + t * wide + d, kv_chunk<Format>(rows + t * stride, d, head_dim));
}

// Where values come from: the converted step, or the cache itself. A place is where one token's values are; place() finds
// it, next() goes on to the next token of the same block, and at() gives dimensions [d, d + 16).
struct BlockValues {
    const float* block;
    int wide;
    using Place = const float*;
    TS_MEMBER Place place(int t) const { return block + t * wide; }
    TS_MEMBER void next(Place& place) const { place += wide; }
    TS_MEMBER void fetch_soon(Place) const {}
    TS_MEMBER F at(Place place, int d) const { return load(place + d); }
};
template <int Format, int Dim> struct CacheValues {
    const uint8_t* const* blocks;
    const uint8_t* const* ahead;  // blocks that are read soon
    int head_dim;
    struct Place {
        const uint8_t *row, *soon;
    };
    TS_MEMBER size_t row_bytes() const { return kv_row_bytes(Format, Dim ? Dim : head_dim); }
    TS_MEMBER Place place(int t) const {
        const size_t offset = (unsigned)t % kBlock * row_bytes();
        return {blocks[(unsigned)t / kBlock] + offset, ahead[(unsigned)t / kBlock] + offset};
    }
    TS_MEMBER void next(Place& place) const { place.row += row_bytes(), place.soon += row_bytes(); }
    TS_MEMBER void fetch_soon(const Place& place) const { fetch_row(place.soon, row_bytes()); }
    TS_MEMBER F at(const Place& place, int d) const { return kv_chunk<Format, Dim>(place.row, d, Dim ? Dim : head_dim); }
};

// N lines, C chunks of 16 dimensions from d on, tokens [from, to) of the step.
template <int N, int C, class Values>
TS_INLINE void weigh_chunks(const Lines& s, const Values& source, int line, int d, int from, int to) {
    F acc[N][C];
    const float* w = s.scores + line * kStep + from;
    TS_UNROLL for (int i = 0; i < N; ++i)
        TS_UNROLL for (int c = 0; c < C; ++c)
            acc[i][c] = mul(load(s.values + (line + i) * s.wide + d + 16 * c), splat(s.rescale[line + i]));
    for (int t = from; t < to;) {
        const int border = t - t % kBlock + kBlock, end = to < border ? to : border;
        auto place = source.place(t);
        for (; t < end; ++t, ++w, source.next(place)) {
            F v[C];
            if (d == 0) source.fetch_soon(place);
            TS_UNROLL for (int c = 0; c < C; ++c) v[c] = source.at(place, d + 16 * c);
            TS_UNROLL for (int i = 0; i < N; ++i) {
                const F x = splat(w[kStep * i]);
                TS_UNROLL for (int c = 0; c < C; ++c) acc[i][c] = fma(x, v[c], acc[i][c]);
            }
        }
    }
    TS_UNROLL for (int i = 0; i < N; ++i)
        TS_UNROLL for (int c = 0; c < C; ++c) store(s.values + (line + i) * s.wide + d + 16 * c, acc[i][c]);
}

template <int N, int C, class Values>
static void weigh_lines(const Lines& s, const Values& source, int line, int from, int to) {
    int d = 0;
    for (; d + 16 * C <= s.wide; d += 16 * C) weigh_chunks<N, C>(s, source, line, d, from, to);
    for (; d < s.wide; d += 16) weigh_chunks<N, 1>(s, source, line, d, from, to);
}

// Lines [line, end): N at a time, then half as many.
template <int N, int C, class Values>
static void weigh_all(const Lines& s, const Values& source, int line, int end, int from, int to) {
    for (; line + N <= end; line += N) weigh_lines<N, C>(s, source, line, from, to);
    if constexpr (N > 1)
        if (line < end) weigh_all<N / 2, C>(s, source, line, end, from, to);
}

}  // namespace
