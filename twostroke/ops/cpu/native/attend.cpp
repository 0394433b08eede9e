#include "attend.h"

#include <algorithm>

namespace {

int chunks_of(int total, int size) { return (total + size - 1) / size; }

constexpr int64_t kAlone = 2048;  // elements below which waking the others costs more than it saves

// Rotation and KV writes, all of them before any read: requests of one step may share the blocks it fills.
void write_rows(Context& c, const AttendLayer& L, const AttendBatch& B, const float* qkv, float* q) {
    const int64_t elements = (int64_t)B.rows * (L.heads + 2 * L.kv_heads) * L.head_dim;
    if (B.rows == 1 || elements < kAlone) return c.kernels.attend_write(L, B, qkv, q, 0, B.rows);
    const int size = std::max(1, B.rows / (4 * c.pool.threads()));
    auto body = [&](int i, int) { c.kernels.attend_write(L, B, qkv, q, i * size, std::min(B.rows, (i + 1) * size)); };
    c.pool.each(chunks_of(B.rows, size), body, B.rows == B.requests);  // a thread then reads the rows that it wrote
}

constexpr int kSmallTile = 8;  // rows: smaller ones are not worth it

// How many tasks there are if no row is cut into splits.
int tasks_of(const AttendLayer& L, const AttendBatch& B, int tile) {
    int tasks = 0;
    for (int r = 0; r < B.requests; ++r) tasks += chunks_of(B.starts[r + 1] - B.starts[r], tile) * L.kv_heads;
    return tasks;
}

struct Splits {
    int first, end;
};

// The splits that the rows of one tile see.
Splits splits_of(const AttendLayer& L, const AttendBatch& B, int row, int rows) {
    const int64_t top = B.positions[row], bottom = B.positions[row + rows - 1];
    const int64_t from = L.window > 0 && top >= L.window ? top - L.window + 1 : 0;
    return {(int)(from / kSplit), (int)(bottom / kSplit) + 1};
}

}  // namespace

void attend_step(Context& c, const AttendLayer& L, const AttendBatch& B, const float* qkv, float* out) {
    float* q = c.q.get<float>((size_t)B.rows * L.heads * padded_dim(L.head_dim));
    write_rows(c, L, B, qkv, q);
    attend_lines(c, L, B, q, out);
}

void attend_lines(Context& c, const AttendLayer& L, const AttendBatch& B, float* q, float* out) {
    const int group = L.heads / L.kv_heads, padded = padded_dim(L.head_dim);
    c.reserve_scratch(c.kernels.attend_scratch(group, L.head_dim));

    // Large tiles convert K and V less often, small ones give every thread something to do.
    int tile = c.kernels.attend_tile_rows(group, L.head_dim), whole;
    for (;; tile /= 2) {
        whole = tasks_of(L, B, tile);
        if (whole >= 4 * c.pool.threads() || tile < 2 * kSmallTile) break;
    }
    const bool cut = whole < 4 * c.pool.threads() && c.pool.threads() > 1;

    // Single rows with a long context may be cut into splits, merged below in the order a whole task would.
    const int64_t partial = (int64_t)group * (2 + padded);
    size_t partials = 0;
    auto cuts = [&](int request) { return cut && B.starts[request + 1] - B.starts[request] == 1; };
    for (int r = 0; cut && r < B.requests; ++r)
        if (cuts(r)) {
            const Splits s = splits_of(L, B, B.starts[r], 1);
            partials += (size_t)(s.end - s.first) * L.kv_heads * partial;
        }
    float* const store = partials ? c.partials.get<float>(partials) : nullptr;

    c.tasks.clear();
    float* next = store;
    for (int r = 0; r < B.requests; ++r) {
        const int begin = B.starts[r], end = B.starts[r + 1];
        const int tiles = chunks_of(end - begin, tile);
        for (int t = tiles - 1; t >= 0; --t) {  // the last rows see most: they go first
            const int row = begin + t * tile, rows = std::min(tile, end - row);
            const Splits s = splits_of(L, B, row, rows);
            for (int h = 0; h < L.kv_heads; ++h) {
                AttendTask task{&L, &B, q, r, row, rows, h, s.first, s.end, out, nullptr};
                if (!cuts(r)) {
                    c.tasks.push_back(task);
                    continue;
                }
                for (int i = s.first; i < s.end; ++i, next += partial) {
                    task.split = i, task.split_end = i + 1;
                    task.out = nullptr, task.partial = next;
                    c.tasks.push_back(task);
                }
            }
        }
    }
    // Tasks of single rows are short and have the same length: each thread takes a stretch and knows what comes next.
    const int count = (int)c.tasks.size();
    const bool stretches = B.rows == B.requests;
    c.expected.assign((size_t)c.pool.threads(), -1);
    auto body = [&](int i, int worker) {
        const bool fetched = stretches && c.expected[worker] == i;
        c.expected[worker] = i + 1;
        c.kernels.attend(c.tasks[i], stretches && i + 1 < count ? &c.tasks[i + 1] : nullptr, fetched, c.scratch_of(worker));
    };
    c.pool.each(count, body, stretches);

    next = store;
    for (int r = 0; cut && r < B.requests; ++r) {
        if (!cuts(r)) continue;
        const int row = B.starts[r];
        const Splits s = splits_of(L, B, row, 1);
        for (int h = 0; h < L.kv_heads; ++h) {
            for (int i = 0; i < group; ++i)
                c.kernels.attend_merge(L, h * group + i, next + i * (2 + padded), s.end - s.first, partial,
                                       out + ((int64_t)row * L.heads + h * group + i) * L.value_dim);
            next += (s.end - s.first) * partial;
        }
    }
}
