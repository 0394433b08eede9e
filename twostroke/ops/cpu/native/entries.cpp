#include "entries.h"

#include <algorithm>

namespace {
constexpr int kHeadsAtATime = 8;
constexpr int kKeysAtATime = 256;
}  // namespace

void attend_lists(Context& c, const EntriesCall& call, const void* const* entries, const int64_t* starts, const float* q, int rows, float* out) {
    const int cuts = (call.heads + kHeadsAtATime - 1) / kHeadsAtATime;
    int64_t most = 0;
    for (int r = 0; r < rows; ++r) most = std::max(most, starts[r + 1] - starts[r]);
    const size_t floats = (size_t)call.dim + (size_t)kHeadsAtATime * (size_t)((most + 15) / 16 * 16);
    c.reserve_scratch(floats * sizeof(float));
    auto body = [&](int i, int worker) {
        const int r = i / cuts, head = i % cuts * kHeadsAtATime;
        const int64_t place = ((int64_t)r * call.heads + head) * call.dim;
        const EntriesTask task{&call, entries + starts[r], (int)(starts[r + 1] - starts[r]), head, std::min(call.heads, head + kHeadsAtATime), q + place, out + place};
        c.kernels.attend_entries(task, reinterpret_cast<float*>(c.scratch_of(worker)));
    };
    c.pool.each(rows * cuts, body);
}

void score_entries(Context& c, const float* q, const float* weights, int heads, int dim, const float* keys, int count, float* out) {
    auto body = [&](int i, int) {
        c.kernels.entry_scores(q, weights, heads, dim, keys, i * kKeysAtATime, std::min(count, (i + 1) * kKeysAtATime), out);
    };
    c.pool.each((count + kKeysAtATime - 1) / kKeysAtATime, body);
}
