// The second half of attention: softmax(q · k) · v over the cached blocks of one tile (see attend_lines.h).
#pragma once

namespace {

constexpr int kFewLines = 8;     // up to so many lines read the cache directly, without converted copies
constexpr int kFloatLines = 24;  // lines of a chunk over a float cache

static int attend_tile_rows(int group, int dim) {
    const int lines = dim <= 64 ? 96 : 48;
    return lines / group > 1 ? lines / group : 1;
}

static size_t attend_scratch(int group, int dim) {  // the running split, and the merge of those before it
    return 2 * lines_bytes(attend_tile_rows(group, dim) * group, padded_dim(dim));
}

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

// Whether this many lines read the cache itself, so that they can ask for what follows as they go. Latents in bytes are
// always converted.
template <int Format> TS_INLINE bool few_lines(int count, int dim) {
    return Format != KVLatent8 && count <= kFewLines && (!is_coded(Format) || is_panel<Format>(dim));
}

// Asks at once for what follows, as far as the rows of this step, [from, to), are not read one by one.
template <int Format> TS_INLINE void fetch_unread(int count, int dim, const Following& ahead, int from, int to) {
    const size_t row = kv_row_bytes(Format, dim);
    const int end = Format == KVInt8 ? whole_blocks(ahead.to) : ahead.to;
    if (Format == KVInt8) to = whole_blocks(to);
    const auto unread = [&](const uint8_t* const* blocks) {
        if (!few_lines<Format>(count, dim)) return fetch_rows(blocks, row, ahead.from, end);
        fetch_rows(blocks, row, ahead.from, from < end ? from : end);
        fetch_rows(blocks, row, to > ahead.from ? to : ahead.from, end);
    };
    unread(ahead.keys);
    unread(ahead.values);
}

// What all lines of a tile read of tokens [from, to) of a float cache, `from` at a block's border: converted copies.
template <int Format>
static void load_step(const AttendLayer& L, const Lines& s, const StepBlocks& blocks, int from, int to) {
    for (int b = from / kBlock; b * kBlock < to; ++b) {
        const int n = tokens_of(b, to);
        float *const keys = s.keys + b * kBlock * s.padded, *const values = s.block + b * kBlock * s.wide;
        if constexpr (Format == KVLatent8) {
            load_latent_bytes(L, blocks.keys[b], blocks.key_scales[b], s.wide, n, keys, values);
        } else {
            load_keys<Format>(blocks.keys[b], L.head_dim, n, keys);
            load_values<Format>(blocks.values[b], L.head_dim, L.value_dim, s.wide, n, values);
        }
    }
}

// Scores of the lines of a chunk, whose queries start at q. few: see few_lines.
template <int Format>
static void score_step(const Lines& s, const float* q, const StepBlocks& blocks, int dim, bool few, int from, int to,
                       const Following& ahead) {
    int b = from / kBlock;
    if (few) {
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
        if (!few) return weigh_all<kRowsAttend, kChunks>(s, BlockValues{s.block, s.wide}, 0, s.count, from, to);
    }
    const auto direct = [&](auto head, auto lines, int i) {
        const CacheValues<Format, decltype(head)::value> source{blocks.values, ahead.values, dim};
        weigh_lines<decltype(lines)::value, kChunksFew>(s, source, i, from, to);
    };
    for_lines(dim, 0, s.count, direct);
}

template <int Format>
static void attend_floats(const AttendTask& task, const Lines& tile, const StepBlocks& blocks, int64_t start, int line, int end, bool few,
                          const Following& ahead) {
    const AttendLayer& L = *task.layer;
    for (; line < end; line += kFloatLines) {
        const Lines s = lines_from(tile, line, end - line < kFloatLines ? end - line : kFloatLines);
        const SeenKeys seen = seen_keys(task, line, s.count, start);
        score_step<Format>(s, queries_of(task, line, s.padded), blocks, L.head_dim, few, seen.from, seen.to, ahead);
        const auto soften = seen.plain ? soften_lines<true, false> : soften_lines<false, false>;
        for (int i = 0; i < s.count; i += 16) soften(s, L.softcap, i, s.count - i < 16 ? s.count - i : 16, seen, nullptr);
        weigh_step<Format>(s, blocks, L.head_dim, few, seen.from, seen.to, ahead);
    }
}

// One step for lines [line, end) of the tile: tokens [from, to) of it.
template <int Format, class Codes>
static void attend_lines(const AttendTask& task, const Lines& tile, const StepBlocks& blocks, int64_t start, int line, int end, int from, int to,
                         const Following& ahead) {
    const int dim = task.layer->head_dim;
    const bool few = few_lines<Format>(tile.count, dim);
    if constexpr (is_coded(Format)) {
        const StepPanels panels = load_panels<Format>(tile, blocks, dim, from, to, Codes::kGather && !few);
        const CodedStep step{task, tile, blocks, panels, ahead, start, from, to};
        if (few) Codes::template attend<true>(step, line, end);
        else Codes::template attend<false>(step, line, end);
    } else {
        if (!few) load_step<Format>(*task.layer, tile, blocks, from, to);
        attend_floats<Format>(task, tile, blocks, start, line, end, few, ahead);
    }
}

// One split of every line of the tile that sees some of it: lines [line, line_end).
template <int Format, class Codes>
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
        attend_lines<Format, Codes>(task, s, blocks, start, a * group, b * group, from, to, ahead);
    }
}

template <int Format, class Codes> static void attend_format(const AttendTask& task, const AttendTask* next, bool fetched, uint8_t* scratch) {
    const AttendLayer& L = *task.layer;
    const int group = L.heads / L.kv_heads, padded = padded_dim(L.head_dim), wide = padded_dim(L.value_dim), count = task.rows * group;
    const Lines s = place_lines(count, padded, wide, scratch);
    const bool alone = task.split_end - task.split == 1;  // every line sees some of it, and nothing is merged
    const Lines merged = alone ? s : place_lines(count, padded, wide, scratch + lines_bytes(count, padded));
    float* total = merged.rescale;  // the merged lines need no rescale factor, but a plain sum
    for (int i = 0; !alone && i < count; ++i) merged.maximum[i] = kNever;
    if (!is_coded(Format) && scorer_by_lane<kByLane>(padded) && !few_lines<Format>(count, L.head_dim))
        turn_queries(queries_of(task, 0, padded), count, padded, s.queries);
    if (!fetched) fetch_first_step(task);
    for (int64_t split = task.split; split < task.split_end; ++split) {
        int line, line_end;
        attend_split<Format, Codes>(task, next, s, split, line, line_end);
        if (alone) break;
        for (; line < line_end; line += 16) merge_lines(merged, total, s, line, line_end - line < 16 ? line_end - line : 16);
    }
    for (int i = 0; alone && i < count; ++i) total[i] = sum(load(s.sums + 16 * i));
    for (int i = 0; i < count; ++i) {
        const float* v = merged.values + (int64_t)i * wide;
        if (task.out) {
            const int head = task.kv_head * group + i % group;
            float* out = task.out + ((int64_t)(task.row + i / group) * L.heads + head) * L.value_dim;
            finish_line(L, head, merged.maximum[i], total[i], v, out);
        } else {
            float* out = task.partial + (int64_t)i * (2 + padded);
            out[0] = merged.maximum[i];
            out[1] = total[i];
            memcpy(out + 2, v, sizeof(float) * (size_t)wide);
        }
    }
}

// Codes: how the products over a coded cache are computed, see VectorCodes.
template <class Codes> static void attend(const AttendTask& task, const AttendTask* next, bool fetched, uint8_t* scratch) {
    switch (task.layer->kv_format) {
        case KVFloat: return attend_format<KVFloat, VectorCodes>(task, next, fetched, scratch);
        case KVHalf: return attend_format<KVHalf, VectorCodes>(task, next, fetched, scratch);
        case KVBfloat: return attend_format<KVBfloat, VectorCodes>(task, next, fetched, scratch);
        case KVLatent8: return attend_format<KVLatent8, VectorCodes>(task, next, fetched, scratch);
    }
    const int lines = task.rows * (task.layer->heads / task.layer->kv_heads);
    Codes::begin(lines, padded_dim(task.layer->head_dim));
    if (task.layer->kv_format == KVInt8) attend_format<KVInt8, Codes>(task, next, fetched, scratch);
    else attend_format<KVInt4, Codes>(task, next, fetched, scratch);
    Codes::finish(lines);
}

// The splits of one line of a query head, `stride` floats apart, merged in ascending order into value_dim results.
static void attend_merge(const AttendLayer& L, int head, const float* partials, int splits, int64_t stride, float* out) {
    const int wide = padded_dim(L.value_dim);
    float values[kMaxEntryDim];
    float maximum = partials[0], total = partials[1];
    memcpy(values, partials + 2, sizeof(float) * (size_t)wide);
    for (int s = 1; s < splits; ++s) {
        const float* p = partials + s * stride;
        merge_line(maximum, total, values, p[0], p[1], p + 2, wide);
    }
    finish_line(L, head, maximum, total, values, out);
}

}  // namespace
