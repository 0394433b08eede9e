#include "latent.h"

#include <algorithm>

#include "attend.h"
#include "linear.h"

void latent_step(Context& c, const LatentCall& call, const AttendBatch& B, const float* q, int64_t q_stride, const float* kv,
                 int64_t kv_stride, float* out) {
    const AttendLayer& L = *call.attention;
    const int padded = padded_dim(L.head_dim), latent = L.value_dim, outputs = call.value_up->parts[0].rows;
    float* const lines = c.q.get<float>((size_t)B.rows * L.heads * padded);
    const int size = call.plain_dim + L.head_dim - latent;
    linear_heads(c, *call.key_up, {q, q_stride, size, B.rows, lines, (int64_t)L.heads * padded, padded});

    // All writes before any read: requests of one step may share the blocks it fills.
    const LatentRows rows{q, q_stride, call.plain_dim, kv, kv_stride, lines};
    const int each = std::max(1, B.rows / (4 * c.pool.threads())), tasks = (B.rows + each - 1) / each;
    auto write = [&](int i, int) { c.kernels.latent_write(L, B, rows, i * each, std::min(B.rows, (i + 1) * each)); };
    if (tasks == 1) write(0, 0);
    else c.pool.each(tasks, write);

    float* const sums = c.attended.get<float>((size_t)B.rows * L.heads * latent);
    attend_lines(c, L, B, lines, sums);
    linear_heads(c, *call.value_up, {sums, (int64_t)L.heads * latent, latent, B.rows, out, (int64_t)L.heads * outputs, outputs});
}
