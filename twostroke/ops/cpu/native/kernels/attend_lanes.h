// q · k and weights · v for many lines where a multiplication takes one lane of a register (kByLane): four numbers of a line
// are one load. The sums are those of attend_score.h and attend_value.h, in the same order.
#pragma once

namespace {

constexpr int kLinesScored = 4;  // with four keys each: the sums that are open fill 24 registers
constexpr int kLinesWeighed = 4;

// Turned lines of queries: what the four partial sums of a quarter take of 16 dimensions lies side by side,
// [quarter j][dimensions / 16][j, j + 8, j + 4, j + 12].
TS_INLINE void turn_queries(const float* q, int count, int padded, float* out) {
    const int rounds = padded / 16;
    for (int i = 0; i < count; ++i, q += padded, out += padded)
        for (int j = 0; j < 4; ++j)
            for (int m = 0; m < rounds; ++m) {
                float* four = out + (j * rounds + m) * 4;
                const float* from = q + 16 * m + j;
                four[0] = from[0], four[1] = from[8], four[2] = from[4], four[3] = from[12];
            }
}

// One of the four partial sums of a quarter: N lines, four keys, 16 dimensions. A first product is not added to zero: only
// the sign of a score that is zero could tell.
template <int J, int N, class Four> TS_INLINE void add_lane(const Four* x, const float* key, bool begin, Four (*acc)[1]) {
    const Four k = load_x4(key);
    TS_UNROLL for (int i = 0; i < N; ++i) acc[i][0] = begin ? mul_lane<J>(k, x[i]) : fma_lane<J>(k, x[i], acc[i][0]);
}

// quarter_scores for N lines and four keys, from turned queries. Dim: the padded head_dim. Four sums at once: twice as many
// chains as hide the latency of a multiply-add.
template <int N, int Dim, class Four = X>
TS_INLINE void quarter_by_lane(const float* q, const float* keys, int j, Four (*out)[1]) {
    constexpr int rounds = Dim / 16;
    Four a[N][1], b[N][1], c[N][1];
    TS_UNROLL for (int m = 0; m < rounds; ++m) {
        const float* const key = keys + (16 * m + j) * 16;
        Four x[N];
        TS_UNROLL for (int i = 0; i < N; ++i) x[i] = load_x4(q + i * Dim + (j * rounds + m) * 4);
        add_lane<0, N>(x, key, m == 0, out);
        add_lane<1, N>(x, key + 8 * 16, m == 0, a);
        add_lane<2, N>(x, key + 4 * 16, m == 0, b);
        add_lane<3, N>(x, key + 12 * 16, m == 0, c);
    }
    add_scores<N, 1>(out, a);
    add_scores<N, 1>(b, c);
    add_scores<N, 1>(out, b);
    TS_UNROLL for (int i = 0; i < N; ++i) settle(out[i][0]);
}

// One block of 16 keys, (Dim, 16); lines [line, end).
template <int N, int Dim> static void score_by_lane(const float* q, const float* keys, float* scores, int line, int end) {
    for (; line + N <= end; line += N)
        for (int t = 0; t < kBlock; t += 4) {
            const float* lines = q + (int64_t)line * Dim;
            asm("" : "+r"(lines));  // read them again: kept from the last keys, they would push everything out of the registers
            const auto quarter = [&](int j, X (*out)[1]) { quarter_by_lane<N, Dim>(lines, keys + t, j, out); };
            tree_scores<N, 1, X>(quarter, scores + kStep * line + t);
        }
    if constexpr (N > 1)
        if (line < end) score_by_lane<N / 2, Dim>(q, keys, scores, line, end);
}

// score_by_lane for this padded head_dim. The loop over dimensions must be unrolled, so the usual sizes have their own
// code; null for another size, where the tiles of attend_score.h are faster.
using ScoreByLane = void (*)(const float* q, const float* keys, float* scores, int line, int end);
template <bool ByLane> TS_INLINE ScoreByLane scorer_by_lane(int padded) {
    if constexpr (ByLane) {
        switch (padded) {
            case 64: return score_by_lane<kLinesScored, 64>;
            case 80: return score_by_lane<kLinesScored, 80>;
            case 96: return score_by_lane<kLinesScored, 96>;
            case 112: return score_by_lane<kLinesScored, 112>;
            case 128: return score_by_lane<kLinesScored, 128>;
            case 256: return score_by_lane<kLinesScored, 256>;
        }
    }
    return nullptr;
}

// N lines, dimensions [d, d + 16), tokens [from, to) of the converted step.
template <int N> TS_INLINE void weigh_by_lane(const Lines& s, int line, int d, int from, int to) {
    F acc[N];
    const float* w = s.scores + line * kStep;
    const float* v = s.block + from * s.wide + d;
    TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = mul(load(s.values + (line + i) * s.wide + d), splat(s.rescale[line + i]));
    int t = from;
    for (; t + 4 <= to; t += 4) {
        X x[N];
        TS_UNROLL for (int i = 0; i < N; ++i) x[i] = load_x4(w + kStep * i + t);
        F value = load(v);
        TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = fma_lane<0>(value, x[i], acc[i]);
        value = load(v += s.wide);
        TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = fma_lane<1>(value, x[i], acc[i]);
        value = load(v += s.wide);
        TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = fma_lane<2>(value, x[i], acc[i]);
        value = load(v += s.wide);
        TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = fma_lane<3>(value, x[i], acc[i]);
        v += s.wide;
    }
    for (; t < to; ++t, v += s.wide) {
        const F value = load(v);
        TS_UNROLL for (int i = 0; i < N; ++i) acc[i] = fma(splat(w[kStep * i + t]), value, acc[i]);
    }
    TS_UNROLL for (int i = 0; i < N; ++i) store(s.values + (line + i) * s.wide + d, acc[i]);
}

// Lines [line, end): N at a time, then half as many.
template <int N> static void weigh_all_by_lane(const Lines& s, int line, int end, int from, int to) {
    for (; line + N <= end; line += N)
        for (int d = 0; d < s.wide; d += 16) weigh_by_lane<N>(s, line, d, from, to);
    if constexpr (N > 1)
        if (line < end) weigh_all_by_lane<N / 2>(s, line, end, from, to);
}

}  // namespace
