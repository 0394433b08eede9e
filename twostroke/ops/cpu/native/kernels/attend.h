// The second half of attention: softmax(q · k) · v over the cached blocks of one tile (see attend_lines.h).
#pragma once

namespace {

constexpr int kFewLines = 8;  // up to so many lines read the cache directly, without converted copies

static int attend_tile_rows(int group, int dim) {
    const int lines = dim <= 64 ? 192 : dim <= 128 ? 96 : 48;
    return lines / group > 1 ? lines / group : 1;
}

static size_t attend_scratch(int group, int dim) {  // the running split, and the merge of those before it
    return 2 * lines_bytes(attend_tile_rows(group, dim) * group, padded_dim(dim));
}

template <int Value> struct Constant { static constexpr int value = Value; };

// body(head_dim as a constant or 0, 3 or 1 lines as a constant, first line) for all lines in [line, end).
template <class Body> TS_INLINE void for_lines(int dim, int line, int end, const Body& body) {
    for (; line + 3 <= end; line += 3) {
        if (dim == 64) body(Constant<64>{}, Constant<3>{}, line);
        else if (dim == 128) body(Constant<128>{}, Constant<3>{}, line);
        else body(Constant<0>{}, Constant<3>{}, line);
    }
    for (; line < end; ++line) {
        if (dim == 64) body(Constant<64>{}, Constant<1>{}, line);
        else if (dim == 128) body(Constant<128>{}, Constant<1>{}, line);
        else body(Constant<0>{}, Constant<1>{}, line);
    }
}

// Whether this many lines read keys straight from the cache.
template <int Format> TS_INLINE bool few_lines(int count, int dim) {
    return count <= kFewLines && (Format == KVInt8 ? dim % 64 == 0 : Format != KVInt4);
}

// Asks at once for what follows, as far as the rows of this step, [from, to), are not read one by one.
template <int Format> TS_INLINE void fetch_unread(int count, int dim, const Following& ahead, int from, int to) {
    const size_t row = kv_row_bytes(Format, dim);
    const auto unread = [&](const uint8_t* const* blocks, bool few) {
        if (!few) return fetch_rows(blocks, row, ahead.from, ahead.to);
        fetch_rows(blocks, row, ahead.from, from < ahead.to ? from : ahead.to);
        fetch_rows(blocks, row, to > ahead.from ? to : ahead.from, ahead.to);
    };
    unread(ahead.keys, few_lines<Format>(count, dim));
    unread(ahead.values, count <= kFewLines);
}

// What all lines of a tile read of tokens [from, to), `from` at a block's border: converted copies, and scales.
template <int Format>
static void load_step(const Lines& s, const StepBlocks& blocks, int dim, int from, int to) {
    for (int b = from / kBlock; b * kBlock < to; ++b) {
        const int n = tokens_of(b, to);
        float* const keys = s.keys + b * kBlock * s.padded;
        if constexpr (Format == KVInt8 || Format == KVInt4) {
            for (int t = 0; t < 16; ++t) {  // tokens that do not exist get scale 0
                s.scales[b * kBlock + t] = t < n ? blocks.key_scales[b][t] : 0.f;
                s.scales[kStep + b * kBlock + t] = t < n ? blocks.value_scales[b][t] : 0.f;
            }
            if (!few_lines<Format>(s.count, dim)) load_key_codes<Format>(blocks.keys[b], dim, s.padded, n, (uint8_t*)keys);
        } else if (!few_lines<Format>(s.count, dim)) {
            load_keys<Format>(blocks.keys[b], dim, n, keys);
        }
        if (s.count > kFewLines) load_values<Format>(blocks.values[b], dim, s.padded, n, s.block + b * kBlock * s.padded);
    }
}

// Scores of the lines of a chunk, whose queries start at q. few: see few_lines.
template <int Format>
static void score_step(const Lines& s, const float* q, const StepBlocks& blocks, int dim, bool few, int from, int to,
                       const Following& ahead) {
    int b = from / kBlock;
    if constexpr (Format == KVInt8 || Format == KVInt4) {
        for (; b * kBlock < to; ++b) {
            const float* scales = s.scales + b * kBlock;
            const auto direct = [&](auto, auto lines, int i) {
                score_few_codes<decltype(lines)::value>(blocks.keys[b], dim, tokens_of(b, to), q + i * s.padded, scales,
                                                        s.scores + kStep * i + b * kBlock, ahead.keys[b]);
            };
            if (few) for_lines(0, 0, s.count, direct);
            else score_all_codes<kRowsAttend>(q, (const uint8_t*)(s.keys + b * kBlock * s.padded), s.padded, scales, s.scores + b * kBlock, 0, s.count);
        }
    } else if (few) {
        for (; b * kBlock < to; ++b) {
            const auto direct = [&](auto head, auto lines, int i) {
                score_few<Format, decltype(lines)::value, decltype(head)::value>(
                    blocks.keys[b], dim, tokens_of(b, to), q + i * s.padded, s.padded, s.scores + kStep * i + b * kBlock, ahead.keys[b]);
            };
            for_lines(dim, 0, s.count, direct);
        }
    } else if (const auto by_lane = scorer_by_lane<kByLane>(s.padded)) {
        for (; b * kBlock < to; ++b) by_lane(s.queries, s.keys + b * kBlock * s.padded, s.scores + b * kBlock, 0, s.count);
    } else {
        constexpr int V = kBlocksScored;
        const float* keys = s.keys + b * kBlock * s.padded;
        for (; (b + V - 1) * kBlock < to; b += V, keys += V * s.padded * kBlock)
            score_all<kRowsAttend, V>(q, keys, s.padded, s.scores + b * kBlock, 0, s.count);
        for (; b * kBlock < to; ++b, keys += s.padded * kBlock)
            score_all<kRowsAttend, 1>(q, keys, s.padded, s.scores + b * kBlock, 0, s.count);
    }
}

template <int Format>
static void weigh_step(const Lines& s, const StepBlocks& blocks, int dim, bool few, int from, int to,
                       const Following& ahead) {
    if constexpr (kByLane) {
        if (!few) return weigh_all_by_lane<kLinesWeighed>(s, 0, s.count, from, to);
    } else {
        if (!few) return weigh_all<kRowsAttend, kChunks>(s, BlockValues{s.block, s.padded}, 0, s.count, from, to);
    }
    const auto direct = [&](auto head, auto lines, int i) {
        const CacheValues<Format, decltype(head)::value> source{blocks.values, ahead.values, dim};
        weigh_lines<decltype(lines)::value, kChunksFew>(s, source, i, from, to);
    };
    for_lines(dim, 0, s.count, direct);
}

// What the lines of a chunk, the first of which is `line` of the tile, see of the step at `start`.
TS_INLINE SeenKeys seen_keys(const AttendTask& task, int line, int count, int64_t start) {
    const AttendLayer& L = *task.layer;
    const int group = L.heads / L.kv_heads;
    const int64_t* positions = task.batch->positions + task.row;
    const Seen top(L, positions[line / group]), bottom(L, positions[(line + count - 1) / group]);
    SeenKeys seen;
    seen.from = within_step(top.first, start) / kBlock * kBlock;
    seen.to = within_step(bottom.end, start);
    seen.plain = bottom.first <= start && top.end >= start + kStep && !(L.softcap > 0.f);
    for (int i = 0; i < count && !seen.plain; ++i) {
        const Seen keys(L, positions[(line + i) / group]);
        seen.low[i] = within_step(keys.first, start), seen.high[i] = within_step(keys.end, start);
    }
    return seen;
}

TS_INLINE const float* queries_of(const AttendTask& task, int line, int padded) {
    const AttendLayer& L = *task.layer;
    return task.q + (((int64_t)task.kv_head * task.batch->rows + task.row) * (L.heads / L.kv_heads) + line) * padded;
}

// One step for lines [line, line + count) of the tile.
template <int Format>
static void attend_chunk(const AttendTask& task, const Lines& tile, const StepBlocks& blocks, int64_t start, int line, int count,
                         const Following& ahead) {
    const AttendLayer& L = *task.layer;
    const Lines s = lines_from(tile, line, count);
    const float* q = queries_of(task, line, s.padded);
    const SeenKeys seen = seen_keys(task, line, count, start);
    const bool few_keys = few_lines<Format>(tile.count, L.head_dim), few_values = tile.count <= kFewLines;
    score_step<Format>(s, q, blocks, L.head_dim, few_keys, seen.from, seen.to, ahead);
    const float* scales = Format == KVInt8 || Format == KVInt4 ? s.scales + kStep : nullptr;
    const auto soften = seen.plain ? soften_lines<true> : soften_lines<false>;
    for (int i = 0; i < count; i += 16) soften(s, L.softcap, i, count - i < 16 ? count - i : 16, seen, scales);
    weigh_step<Format>(s, blocks, L.head_dim, few_values, seen.from, seen.to, ahead);
}

// One split of every line of the tile that sees some of it: lines [line, line_end).
template <int Format>
static void attend_split(const AttendTask& task, const AttendTask* next, const Lines& s, int64_t split, int& line, int& line_end) {
    const AttendLayer& L = *task.layer;
    const int group = L.heads / L.kv_heads;
    const int64_t* positions = task.batch->positions + task.row;
    const Seen top(L, positions[0]), bottom(L, positions[task.rows - 1]);
    const int64_t begin = split * kSplit, end = begin + kSplit < bottom.end ? begin + kSplit : bottom.end;
    reset_lines(s);
    line = s.count, line_end = 0;
    const int64_t first = top.first > begin ? top.first : begin;
    for (int64_t start = first / kStep * kStep; start < end; start += kStep) {
        int a = 0, b = task.rows;  // rows that see some of this step
        while (a < b && positions[a] < start) ++a;
        while (b > a && Seen(L, positions[b - 1]).first >= start + kStep) --b;
        if (a == b) continue;
        if (a * group < line) line = a * group;
        if (b * group > line_end) line_end = b * group;
        const int from = within_step(Seen(L, positions[a]).first, start) / kBlock * kBlock;
        const int to = within_step(Seen(L, positions[b - 1]).end, start);
        const StepBlocks blocks(task, start, from, to);
        const Following ahead(task, next, start, blocks);
        fetch_unread<Format>(s.count, L.head_dim, ahead, from, to);
        load_step<Format>(s, blocks, L.head_dim, from, to);
        for (int i = a * group; i < b * group; i += kChunkLines)
            attend_chunk<Format>(task, s, blocks, start, i, b * group - i < kChunkLines ? b * group - i : kChunkLines, ahead);
    }
}

template <int Format> static void attend_format(const AttendTask& task, const AttendTask* next, bool fetched, uint8_t* scratch) {
    const AttendLayer& L = *task.layer;
    const int group = L.heads / L.kv_heads, padded = padded_dim(L.head_dim), count = task.rows * group;
    const Lines s = place_lines(count, padded, scratch);
    const Lines merged = place_lines(count, padded, scratch + lines_bytes(count, padded));
    float* total = merged.rescale;  // the merged lines need no rescale factor, but a plain sum
    for (int i = 0; i < count; ++i) merged.maximum[i] = kNever;
    if (scorer_by_lane<kByLane>(padded) && (Format == KVFloat || Format == KVHalf || Format == KVBfloat) && !few_lines<Format>(count, L.head_dim))
        turn_queries(queries_of(task, 0, padded), count, padded, s.queries);
    if (!fetched) fetch_first_step(task);
    for (int64_t split = task.split; split < task.split_end; ++split) {
        int line, line_end;
        attend_split<Format>(task, next, s, split, line, line_end);
        for (int i = line; i < line_end; ++i) {
            const float l = sum(load(s.sums + 16 * i));
            const float* v = s.values + (int64_t)i * padded;
            float* into = merged.values + (int64_t)i * padded;
            if (merged.maximum[i] == kNever) {  // the first split is taken as it is
                merged.maximum[i] = s.maximum[i];
                total[i] = l;
                memcpy(into, v, sizeof(float) * (size_t)padded);
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
            memcpy(out + 2, v, sizeof(float) * (size_t)padded);
        }
    }
}

static void attend(const AttendTask& task, const AttendTask* next, bool fetched, uint8_t* scratch) {
    switch (task.layer->kv_format) {
        case KVFloat: return attend_format<KVFloat>(task, next, fetched, scratch);
        case KVHalf: return attend_format<KVHalf>(task, next, fetched, scratch);
        case KVBfloat: return attend_format<KVBfloat>(task, next, fetched, scratch);
        case KVInt8: return attend_format<KVInt8>(task, next, fetched, scratch);
        case KVInt4: return attend_format<KVInt4>(task, next, fetched, scratch);
    }
}

// The splits of one line, `stride` floats apart, merged in ascending order into head_dim results.
static void attend_merge(const AttendLayer& L, const float* partials, int splits, int64_t stride, float* out) {
    const int padded = padded_dim(L.head_dim);
    float values[kMaxHeadDim];
    float maximum = partials[0], total = partials[1];
    memcpy(values, partials + 2, sizeof(float) * (size_t)padded);
    for (int s = 1; s < splits; ++s) {
        const float* p = partials + s * stride;
        merge_line(maximum, total, values, p[0], p[1], p + 2, padded);
    }
    finish_line(total, values, L.head_dim, out);
}

}  // namespace
