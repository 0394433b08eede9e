// What a task reads: which keys its lines see, where the blocks of a step of keys lie, and how those that are read next are
// asked for in time.
#pragma once

namespace {

// What one row sees: key positions [first, end).
struct Seen {
    int64_t first, end;
    TS_MEMBER Seen(const AttendLayer& L, int64_t position)
        : first(L.window > 0 && position >= L.window ? position - L.window + 1 : 0), end(position + 1) {}
};

TS_INLINE int within_step(int64_t position, int64_t start) {
    const int64_t d = position - start;
    return d < 0 ? 0 : d > kStep ? kStep : (int)d;
}

TS_INLINE int whole_blocks(int tokens) { return (tokens + kBlock - 1) / kBlock * kBlock; }

TS_INLINE int tokens_of(int b, int to) { return to - b * kBlock < kBlock ? to - b * kBlock : kBlock; }

// The four blocks of one step, for the KV head of the task. Only blocks in [from, to) may be looked at.
struct StepBlocks {
    const uint8_t* keys[kStep / kBlock];
    const uint8_t* values[kStep / kBlock];
    const float* key_scales[kStep / kBlock];
    const float* value_scales[kStep / kBlock];

    TS_MEMBER StepBlocks(const AttendTask& task, int64_t start, int from, int to) {
        const AttendLayer& L = *task.layer;
        const AttendBatch& B = *task.batch;
        const int32_t* table = B.tables + task.request * B.table_stride + start / kBlock;
        for (int b = from / kBlock; b * kBlock < to; ++b) {
            const int64_t id = table[b];
            keys[b] = L.keys + id * L.key_block_stride + task.kv_head * L.key_head_stride;
            values[b] = L.values + id * L.value_block_stride + task.kv_head * L.value_head_stride;
            if (!L.key_scales) continue;
            key_scales[b] = L.key_scales + id * L.key_scale_block_stride + task.kv_head * L.key_scale_head_stride;
            value_scales[b] = L.value_scales + id * L.value_scale_block_stride + task.kv_head * L.value_scale_head_stride;
        }
    }
};

// The keys that a task reads: positions [first, end).
TS_INLINE Seen keys_of(const AttendTask& task) {
    const int64_t* positions = task.batch->positions + task.row;
    Seen keys(*task.layer, positions[0]);
    keys.end = positions[task.rows - 1] + 1;
    const int64_t begin = (int64_t)task.split * kSplit, end = (int64_t)task.split_end * kSplit;
    if (keys.first < begin) keys.first = begin;
    if (keys.end > end) keys.end = end;
    return keys;
}

// Where the rows lie that are read after a step: those of the task's next step, else of the first one of the task that
// follows. No prefetcher finds them, and asking for all at once fills the buffers for lines under way and stalls every load
// behind: row t is asked for when row t of this step is read.
struct Following {
    const uint8_t* keys[kStep / kBlock];
    const uint8_t* values[kStep / kBlock];
    int from = 0, to = 0;  // tokens of that step; where it has no block, the pointer is this step's own

    TS_MEMBER Following(const AttendTask& task, const AttendTask* next, int64_t start, const StepBlocks& now) {
        memcpy(keys, now.keys, sizeof keys);
        memcpy(values, now.values, sizeof values);
        const AttendTask* whose = &task;
        Seen seen = keys_of(task);
        if (start + kStep < seen.end) {
            seen.first = start + kStep;
        } else {
            if (!next) return;
            whose = next;
            seen = keys_of(*next);
        }
        const int64_t step = seen.first / kStep * kStep;
        from = within_step(seen.first, step) / kBlock * kBlock, to = within_step(seen.end, step);
        const StepBlocks there(*whose, step, from, to);
        for (int b = from / kBlock; b * kBlock < to; ++b) keys[b] = there.keys[b], values[b] = there.values[b];
    }
};

TS_INLINE void fetch_row(const uint8_t* row, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

// Rows [from, to) of a step at once.
TS_INLINE void fetch_rows(const uint8_t* const* blocks, size_t row_bytes, int from, int to) {
    for (int t = from; t < to; ++t) fetch_row(blocks[(unsigned)t / kBlock] + (unsigned)t % kBlock * row_bytes, row_bytes);
}

TS_INLINE void fetch_first_step(const AttendTask& task) {
    const AttendLayer& L = *task.layer;
    const Seen seen = keys_of(task);
    const int64_t start = seen.first / kStep * kStep;
    const int from = within_step(seen.first, start) / kBlock * kBlock, to = within_step(seen.end, start);
    const StepBlocks blocks(task, start, from, to);
    const size_t row = kv_row_bytes(L.kv_format, L.head_dim);
    const int end = L.kv_format == KVInt8 ? whole_blocks(to) : to;
    fetch_rows(blocks.keys, row, from, end);
    fetch_rows(blocks.values, row, from, end);
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

TS_INLINE float* queries_of(const AttendTask& task, int line, int padded) {
    const AttendLayer& L = *task.layer;
    return task.q + (((int64_t)task.kv_head * task.batch->rows + task.row) * (L.heads / L.kv_heads) + line) * padded;
}

}  // namespace
