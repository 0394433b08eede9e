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

// ---- coded caches: both sides are signed bytes, the dot is exact -------------------------------------------------------

// One query head as codes. Follows the tile's lines in memory, `padded` floats apart like the float form.
struct CodedQuery {
    float scale;
    int32_t start;    // of the integer sum
    int8_t codes[1];  // padded head_dim of them
};

static void code_query(float* line, int padded) {
    float x[kMaxHeadDim];
    memcpy(x, line, sizeof(float) * (size_t)padded);
    CodedQuery* out = (CodedQuery*)line;
    const I magnitude = isplat(0x7fffffff);
    I bits = isplat(0);
    for (int d = 0; d < padded; d += 16) bits = imax(bits, iand(bits_of(load(x + d)), magnitude));
    const float top = bits_to_float((uint32_t)ipeak(bits));
    const bool tiny = top < 1e-30f;
    const F inverse = splat(tiny ? 0.f : 127.f / top);
    int32_t total = 0;
    for (int d = 0; d < padded; d += 16) {
        const I code = round_even(mul(load(x + d), inverse));
        store_int8(out->codes + d, code);
        total += isum(code);
    }
    out->scale = tiny ? 0.f : top / 127.f;
    out->start = kDotStart - (kUnsignedCodes ? 128 * total : 0);
}

// Codes of one block as quads, [padded / 4][16 tokens][4]: the layout of a weight panel. Tokens >= n are zero.
template <int Format> static void load_key_codes(const uint8_t* rows, int dim, int padded, int n, uint8_t* out) {
    const size_t stride = kv_row_bytes(Format, dim);
    const int whole = dim / 16 * 16, width = (padded + 63) / 64 * 64;
    alignas(64) int8_t block[16][kMaxHeadDim];
    for (int t = 0; t < 16; ++t) {
        int d = 0;
        for (; t < n && d < whole; d += 16) {
            const uint8_t* row = rows + t * stride;
            store_bytes(block[t] + d, Format == KVInt8 ? load_bytes(row + d) : load_nibbles(row + d / 2));
        }
        for (; t < n && d < dim; ++d) {  // a head whose size is no multiple of 16
            const uint8_t* row = rows + t * stride;
            block[t][d] = (int8_t)(Format == KVInt8 ? row[d] : ((row[d / 2] >> (d % 2 * 4)) & 15) - 8);
        }
        memset(block[t] + d, 0, (size_t)(width - d));
    }
    for (int d = 0; d < padded; d += 64) {  // 16 tokens x 16 quads, transposed as 32-bit lanes
        F lane[16];
        TS_UNROLL for (int t = 0; t < 16; ++t) lane[t] = load((const float*)(block[t] + d));
        transpose(lane);
        for (int i = 0; i < 16 && d + 4 * i < padded; ++i) {
            uint8_t* quad = out + (size_t)(d / 4 + i) * 64;
            store((float*)quad, lane[i]);
            store_codes(quad, to_unsigned(load_codes(quad)));
        }
    }
}

// Four quads of 16 tokens, for N lines. Ready: the codes are as dot4 wants them.
template <int N, bool Ready> TS_INLINE void add_quads(const uint8_t* quads, const A* a, I* acc) {
    const auto quad = [&](int i) { return Ready ? load_codes(quads + 64 * i) : to_unsigned(load_codes(quads + 64 * i)); };
    W w = quad(0);
    TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = dot4<0, false>(acc[i], w, a[i]);
    w = quad(1);
    TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = dot4<1, false>(acc[i], w, a[i]);
    w = quad(2);
    TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = dot4<2, false>(acc[i], w, a[i]);
    w = quad(3);
    TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = dot4<3, false>(acc[i], w, a[i]);
}

template <int N> TS_INLINE void scale_scores(const I* acc, const CodedQuery* const* line, const float* scales, float* scores) {
    const F key_scales = load(scales);
    TS_UNROLL for (int i = 0; i < N; ++i)
        store(scores + kStep * i, mul(to_float_dot(acc[i]), mul(key_scales, splat(line[i]->scale))));
}

template <int N> static void score_codes(const float* q, const uint8_t* keys, int padded, const float* scales, float* scores) {
    const CodedQuery* line[N];
    I acc[N];
    TS_UNROLL for (int i = 0; i < N; ++i) {
        line[i] = (const CodedQuery*)(q + i * padded);
        acc[i] = isplat(line[i]->start);
    }
    for (int d = 0; d < padded; d += 16, keys += 256) {
        A a[N];
        TS_UNROLL for (int i = 0; i < N; ++i) a[i] = load_inputs(line[i]->codes + d);
        add_quads<N, true>(keys, a, acc);
    }
    scale_scores<N>(acc, line, scales, scores);
}

// 64 dimensions of the n tokens of an int8 block as quads, [16 quads][16 tokens][4]. Tokens >= n are zero.
TS_INLINE void turn_codes(const uint8_t* rows, int stride, int n, uint8_t* out) {
    F lane[16];
    if (n == 16) {
        TS_UNROLL for (int t = 0; t < 16; ++t) lane[t] = load((const float*)(rows + t * stride));
    } else {
        for (int t = 0; t < 16; ++t) lane[t] = t < n ? load((const float*)(rows + t * stride)) : splat(0.f);
    }
    transpose(lane);
    TS_UNROLL for (int i = 0; i < 16; ++i) store((float*)(out + 64 * i), lane[i]);
}

// The same for few lines, straight from an int8 cache. head_dim is a multiple of 64. ahead: a block that is read soon.
template <int N>
static void score_few_codes(const uint8_t* rows, int dim, int n, const float* q, const float* scales, float* scores,
                            const uint8_t* ahead) {
    fetch_rows(&ahead, (size_t)dim, 0, n);
    const CodedQuery* line[N];
    I acc[N];
    TS_UNROLL for (int i = 0; i < N; ++i) {
        line[i] = (const CodedQuery*)(q + i * dim);
        acc[i] = isplat(line[i]->start);
    }
    alignas(64) uint8_t quads[16 * 64];
    for (int d = 0; d < dim; d += 64) {
        turn_codes(rows + d, dim, n, quads);
        TS_UNROLL for (int j = 0; j < 4; ++j) {
            A a[N];
            TS_UNROLL for (int i = 0; i < N; ++i) a[i] = load_inputs(line[i]->codes + d + 16 * j);
            add_quads<N, false>(quads + 256 * j, a, acc);
        }
    }
    scale_scores<N>(acc, line, scales, scores);
}

template <int N>
static void score_all_codes(const float* q, const uint8_t* keys, int padded, const float* scales, float* scores, int line, int end) {
    for (; line + N <= end; line += N)
        score_codes<N>(q + (int64_t)line * padded, keys, padded, scales, scores + kStep * line);
    if constexpr (N > 1)
        if (line < end) score_all_codes<N / 2>(q, keys, padded, scales, scores, line, end);
}

}  // namespace
