// The second half of attention: softmax(q · k) · v over the cached blocks, block by block.
//
// A "line" is one query head of one row. Lines of one tile share a KV head and a request, so a block of K and V is
// converted once for all of them. What a line computes depends on its own keys and their absolute positions only:
//   score of key t: 16 partial sums over the dimensions d = j (mod 16), each in ascending order, then the tree of sum()
//   block of 16 keys: maximum, rescale, then values in ascending t
//   split of 256 keys: one running (maximum, sum, values); splits are merged in ascending order
// so neither tile, thread count nor phase changes a bit. Keys a line does not see contribute exactly nothing; tokens
// after the request's last one are never read.
#pragma once

namespace {

constexpr float kNever = -1e30f;  // below every score: the maximum before the first key

struct Lines {           // the running softmax of `count` lines, arrays in the tile's scratch
    int count, padded;
    float* scores;       // (count, 16): scores, then weights of the current block
    float* rescale;      // (count)
    float* maximum;      // (count)
    float* sums;         // (count, 16) lane sums of the weights
    float* values;       // (count, padded)
    float* keys;         // (padded, 16): the block's keys, dimension-major
    float* block;        // (16, padded): the block's values
};

static inline Lines place_lines(int count, int padded, uint8_t* scratch) {
    float* p = (float*)scratch;
    Lines s{count, padded, p, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    p += count * 16;
    s.sums = p, p += count * 16;
    s.values = p, p += count * padded;
    s.keys = p, p += padded * 16;
    s.block = p, p += padded * 16;
    s.rescale = p, p += count;
    s.maximum = p;
    return s;
}

static size_t attend_scratch_lines(int count, int padded) {
    return sizeof(float) * (size_t)(count * (32 + 2 + padded) + 32 * padded) + 64;
}

static int attend_tile_rows(int group, int dim) {
    const int lines = dim <= 64 ? 48 : dim <= 128 ? 32 : 16;
    return lines / group > 1 ? lines / group : 1;
}

static size_t attend_scratch(int group, int dim) {  // the running split, and the merge of those before it
    const int count = attend_tile_rows(group, dim) * group;
    return 2 * attend_scratch_lines(count, padded_dim(dim));
}

// keys[d][t] of one block; tokens >= n are zero.
template <int Format> static void load_keys(const uint8_t* rows, const float* scales, int dim, int n, float* out) {
    const size_t stride = kv_row_bytes(Format, dim);
    for (int d = 0; d < dim; d += 16) {
        F token[16];
        for (int t = 0; t < 16; ++t)
            token[t] = t < n ? kv_chunk<Format>(rows + t * stride, d, dim, scales ? scales[t] : 0.f) : splat(0.f);
        transpose(token);
        for (int i = 0; i < 16; ++i) store(out + (d + i) * 16, token[i]);
    }
}

template <int Format> static void load_values(const uint8_t* rows, const float* scales, int dim, int padded, int n, float* out) {
    const size_t stride = kv_row_bytes(Format, dim);
    for (int t = 0; t < n; ++t)
        for (int d = 0; d < dim; d += 16)
            store(out + t * padded + d, kv_chunk<Format>(rows + t * stride, d, dim, scales ? scales[t] : 0.f));
}

// One partial sum: dimensions j, j + 16, ...
template <int N> static inline void partial_scores(const float* const* q, const float* keys, int padded, int j, F* acc) {
    for (int i = 0; i < N; ++i) acc[i] = splat(0.f);
    for (int d = j; d < padded; d += 16) {
        const F k = load(keys + d * 16);
        for (int i = 0; i < N; ++i) acc[i] = fma(splat(q[i][d]), k, acc[i]);
    }
}

template <int N> static inline void quarter_scores(const float* const* q, const float* keys, int padded, int j, F* out) {
    F a[N], b[N];
    partial_scores<N>(q, keys, padded, j, a);
    partial_scores<N>(q, keys, padded, j + 8, b);
    for (int i = 0; i < N; ++i) out[i] = add(a[i], b[i]);
    partial_scores<N>(q, keys, padded, j + 4, a);
    partial_scores<N>(q, keys, padded, j + 12, b);
    for (int i = 0; i < N; ++i) out[i] = add(out[i], add(a[i], b[i]));
}

template <int N> static void score_lines(const float* q, const float* keys, int padded, float* scores) {
    const float* line[N];
    for (int i = 0; i < N; ++i) line[i] = q + i * padded;
    F low[N], high[N], one[N];
    quarter_scores<N>(line, keys, padded, 0, low);
    quarter_scores<N>(line, keys, padded, 1, one);
    for (int i = 0; i < N; ++i) low[i] = add(low[i], one[i]);
    quarter_scores<N>(line, keys, padded, 2, high);
    quarter_scores<N>(line, keys, padded, 3, one);
    for (int i = 0; i < N; ++i) store(scores + 16 * i, add(low[i], add(high[i], one[i])));
}

template <int N> static void weigh_lines(const Lines& s, int line, int n) {
    for (int d = 0; d < s.padded; d += 16) {
        F acc[N];
        for (int i = 0; i < N; ++i) acc[i] = mul(load(s.values + (line + i) * s.padded + d), splat(s.rescale[line + i]));
        const float* w = s.scores + line * 16;
        for (int t = 0; t < n; ++t) {
            const F v = load(s.block + t * s.padded + d);
            for (int i = 0; i < N; ++i) acc[i] = fma(splat(w[16 * i + t]), v, acc[i]);
        }
        for (int i = 0; i < N; ++i) store(s.values + (line + i) * s.padded + d, acc[i]);
    }
}

// Turn a line's scores into weights; keys [low, high) of the block are seen.
static inline void soften(const Lines& s, const AttendLayer& L, int line, int low, int high) {
    float* w = s.scores + 16 * line;
    F x = load(w);
    if (L.softcap > 0.f) x = softcap(x, L.softcap);
    const bool all = low <= 0 && high >= 16;
    if (!all) x = between(x, low, high, splat(kNever));
    const float top = peak(x), before = s.maximum[line];
    const float maximum = top > before || top != top ? top : before;
    F p = vexp(sub(x, splat(maximum)));
    if (!all) p = between(p, low, high, splat(0.f));
    // The rescale factor through the same vector exp: one definition of e^x for every line.
    float lane[16];
    store(lane, vexp(splat(before - maximum)));
    s.maximum[line] = maximum;
    s.rescale[line] = lane[0];
    store(w, p);
    store(s.sums + 16 * line, fma(load(s.sums + 16 * line), splat(lane[0]), p));
}

template <int N> static inline void score_some(const float* q, const float* keys, int padded, float* scores, int count) {
    if (count == N) return score_lines<N>(q, keys, padded, scores);
    if constexpr (N > 1) score_some<N - 1>(q, keys, padded, scores, count);
}
template <int N> static inline void weigh_some(const Lines& s, int line, int n, int count) {
    if (count == N) return weigh_lines<N>(s, line, n);
    if constexpr (N > 1) weigh_some<N - 1>(s, line, n, count);
}

// What one row of the tile sees.
struct Seen {
    int64_t first, end;  // key positions
    Seen(const AttendLayer& L, int64_t position)
        : first(L.window > 0 && position >= L.window ? position - L.window + 1 : 0), end(position + 1) {}
};

static inline int within_block(int64_t position, int64_t start) {
    const int64_t d = position - start;
    return d < 0 ? 0 : d > kBlock ? kBlock : (int)d;
}

template <int Format>
static void attend_block(const AttendTask& task, const Lines& s, int64_t start, int line, int line_end, int n) {
    const AttendLayer& L = *task.layer;
    const AttendBatch& B = *task.batch;
    const int group = L.heads / L.kv_heads;
    const int64_t id = B.tables[task.request * B.table_stride + start / kBlock];
    const float* key_scales = L.key_scales ? L.key_scales + id * L.key_scale_block_stride + task.kv_head * L.key_scale_head_stride : nullptr;
    const float* value_scales =
        L.value_scales ? L.value_scales + id * L.value_scale_block_stride + task.kv_head * L.value_scale_head_stride : nullptr;
    load_keys<Format>(L.keys + id * L.key_block_stride + task.kv_head * L.key_head_stride, key_scales, L.head_dim, n, s.keys);
    load_values<Format>(L.values + id * L.value_block_stride + task.kv_head * L.value_head_stride, value_scales, L.head_dim,
                        s.padded, n, s.block);
    const float* q = task.q + ((int64_t)task.kv_head * B.rows + task.row) * group * s.padded;
    for (int i = line; i < line_end; i += kRowsAttend)
        score_some<kRowsAttend>(q + (int64_t)i * s.padded, s.keys, s.padded, s.scores + 16 * i,
                                line_end - i < kRowsAttend ? line_end - i : kRowsAttend);
    for (int i = line; i < line_end; ++i) {
        const Seen seen(L, B.positions[task.row + i / group]);
        soften(s, L, i, within_block(seen.first, start), within_block(seen.end, start));
    }
    for (int i = line; i < line_end; i += kRowsAttend)
        weigh_some<kRowsAttend>(s, i, n, line_end - i < kRowsAttend ? line_end - i : kRowsAttend);
}

// One split of every line of the tile that sees some of it: lines [line, line_end).
template <int Format>
static void attend_split(const AttendTask& task, const Lines& s, int64_t split, int& line, int& line_end) {
    const AttendLayer& L = *task.layer;
    const AttendBatch& B = *task.batch;
    const int group = L.heads / L.kv_heads;
    for (int i = 0; i < s.count; ++i) s.maximum[i] = kNever;
    memset(s.sums, 0, sizeof(float) * (size_t)s.count * 16);
    memset(s.values, 0, sizeof(float) * (size_t)s.count * s.padded);
    const int64_t* positions = B.positions + task.row;
    const Seen top(L, positions[0]), bottom(L, positions[task.rows - 1]);
    const int64_t begin = split * kSplit, end = begin + kSplit < bottom.end ? begin + kSplit : bottom.end;
    const int64_t from = top.first > begin ? top.first / kBlock * kBlock : begin;
    line = s.count, line_end = 0;
    for (int64_t start = from; start < end; start += kBlock) {
        int a = 0, b = task.rows;  // rows that see some of this block
        while (a < b && positions[a] < start) ++a;
        while (b > a && Seen(L, positions[b - 1]).first >= start + kBlock) --b;
        if (a == b) continue;
        if (a * group < line) line = a * group;
        if (b * group > line_end) line_end = b * group;
        attend_block<Format>(task, s, start, a * group, b * group, within_block(bottom.end, start));
    }
}

// (maximum, sum, values) of one line, merged with what came before. The first split is taken as it is.
static inline void merge_line(float& maximum, float& total, float* values, float m, float l, const float* v, int padded) {
    const float top = m > maximum || m != m ? m : maximum;
    float lane[16];
    store(lane, vexp(splat(maximum - top)));
    const F before = splat(lane[0]);
    store(lane, vexp(splat(m - top)));
    const F after = splat(lane[0]);
    float b[16], a[16];
    store(b, before);
    store(a, after);
    total = __builtin_fmaf(total, b[0], l * a[0]);
    maximum = top;
    for (int d = 0; d < padded; d += 16) store(values + d, fma(load(values + d), before, mul(load(v + d), after)));
}

static inline void finish_line(float total, const float* values, int dim, float* out) {
    for (int d = 0; d < dim; d += 16) {
        const F v = div(load(values + d), splat(total));
        if (d + 16 <= dim) store(out + d, v);
        else store_first(out + d, v, dim - d);
    }
}

template <int Format> static void attend_format(const AttendTask& task, uint8_t* scratch) {
    const AttendLayer& L = *task.layer;
    const int group = L.heads / L.kv_heads, padded = padded_dim(L.head_dim), count = task.rows * group;
    const Lines s = place_lines(count, padded, scratch);
    const Lines merged = place_lines(count, padded, scratch + attend_scratch_lines(count, padded));
    float* total = merged.rescale;  // the merged lines need no rescale factor, but a plain sum
    for (int i = 0; i < count; ++i) merged.maximum[i] = kNever;
    for (int64_t split = task.split; split < task.split_end; ++split) {
        int line, line_end;
        attend_split<Format>(task, s, split, line, line_end);
        for (int i = line; i < line_end; ++i) {
            const float l = sum(load(s.sums + 16 * i));
            const float* v = s.values + (int64_t)i * padded;
            float* into = merged.values + (int64_t)i * padded;
            if (merged.maximum[i] == kNever) {
                merged.maximum[i] = s.maximum[i];
                total[i] = l;
                memcpy(into, v, sizeof(float) * padded);
            } else {
                merge_line(merged.maximum[i], total[i], into, s.maximum[i], l, v, padded);
            }
        }
    }
    for (int i = 0; i < count; ++i) {
        const float* v = merged.values + (int64_t)i * padded;
        if (task.out) {
            float* out = task.out + ((int64_t)(task.row + i / group) * L.heads + task.kv_head * group + i % group) * L.head_dim;
            finish_line(total[i], v, L.head_dim, out);
        } else {
            float* out = task.partial + (int64_t)i * (2 + padded);
            out[0] = merged.maximum[i];
            out[1] = total[i];
            memcpy(out + 2, v, sizeof(float) * padded);
        }
    }
}

static void attend(const AttendTask& task, uint8_t* scratch) {
    switch (task.layer->kv_format) {
        case KVFloat: return attend_format<KVFloat>(task, scratch);
        case KVHalf: return attend_format<KVHalf>(task, scratch);
        case KVBfloat: return attend_format<KVBfloat>(task, scratch);
        case KVInt8: return attend_format<KVInt8>(task, scratch);
        case KVInt4: return attend_format<KVInt4>(task, scratch);
    }
}

// The splits of one line, `stride` floats apart, merged in ascending order into head_dim results.
static void attend_merge(const AttendLayer& L, const float* partials, int splits, int64_t stride, float* out) {
    const int padded = padded_dim(L.head_dim);
    float values[kMaxHeadDim];
    float maximum = partials[0], total = partials[1];
    memcpy(values, partials + 2, sizeof(float) * padded);
    for (int s = 1; s < splits; ++s) {
        const float* p = partials + s * stride;
        merge_line(maximum, total, values, p[0], p[1], p + 2, padded);
    }
    finish_line(total, values, L.head_dim, out);
}

}  // namespace
