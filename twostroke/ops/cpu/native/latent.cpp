#include "latent.h"

#include <algorithm>
#include <stdexcept>

#include "attend.h"
#include "linear.h"
#include "pack.h"

namespace {

// Head h of every row times part h of the weight. Strides from row to row and from head to head.
struct HeadsArgs {
    const float* x;
    int64_t x_stride, x_head;
    int rows;
    float* out;
    int64_t out_stride, out_head;
};

constexpr int kHeadRows = 32;  // so many rows or more keep all threads busy with one head after the other

// Part h of a weight as a weight of its own.
Weight head_weight(const Weight& whole, int h) {
    Weight one;
    one.parts.push_back(whole.parts[(size_t)h]);
    Part& part = one.parts[0];
    part.output = 0;
    one.rows = part.rows, one.cols = whole.cols, one.panels = part.panels;
    (is_float(part.kind) ? one.floats : one.coded) = true;
    one.bytes = part.panels * part.panel_stride;
    return one;
}

// Few rows: heads are shared out over the threads, some panels of one at a time.
void few_rows_by_head(Context& c, const Weight& weight, const HeadsArgs& a) {
    const int heads = (int)weight.parts.size(), groups = weight.cols / kGroup;
    const int64_t size = (int64_t)a.rows * groups;  // codes of one head
    Act* const acts = weight.coded ? c.acts.get<Act>((size_t)(heads * size)) : nullptr;
    auto code = [&](int h, int) {
        if (is_float(weight.parts[(size_t)h].kind)) return;
        const float* x = a.x + h * a.x_head;
        c.kernels.prologue({Nothing, x, a.x_stride, a.rows, weight.cols, nullptr, 0.f, nullptr, acts + h * size, size, nullptr}, 0, a.rows);
    };
    if (weight.coded) c.pool.each(heads, code);
    const int cuts = std::max(1, std::min(weight.parts[0].panels, (4 * c.pool.threads() + heads - 1) / heads));
    auto body = [&](int i, int worker) {
        const int h = i / cuts, cut = i % cuts;
        const Part& part = weight.parts[(size_t)h];
        MatmulArgs args{};
        args.kind = part.kind, args.panels = part.data, args.panel_stride = part.panel_stride;
        args.outputs = part.rows, args.cols = weight.cols, args.rows = a.rows;
        if (is_float(part.kind)) args.x = a.x + h * a.x_head, args.x_stride = a.x_stride;
        else args.acts = acts + h * size, args.extra = size;
        args.out = a.out + h * a.out_head, args.out_stride = a.out_stride;
        c.kernels.matmul(args, part.panels * cut / cuts, part.panels * (cut + 1) / cuts, c.scratch_of(worker));
    };
    c.pool.each(heads * cuts, body);
}

void linear_heads(Context& c, const Weight& weight, const HeadsArgs& a) {
    size_t scratch = 0;
    for (const Part& part : weight.parts) scratch = std::max(scratch, c.kernels.matmul_scratch(part.kind, weight.cols));
    c.reserve_scratch(scratch);
    if (a.rows < kHeadRows) return few_rows_by_head(c, weight, a);
    for (int h = 0; h < (int)weight.parts.size(); ++h)
        linear(c, head_weight(weight, h), {a.x + h * a.x_head, a.x_stride, a.rows, Nothing, nullptr, 0.f, a.out + h * a.out_head, a.out_stride, 0});
}

}  // namespace

void latent_step(Context& c, const LatentCall& call, const AttendBatch& B, const float* q, int64_t q_stride, const float* kv,
                 int64_t kv_stride, float* out) {
    const AttendLayer& L = *call.attention;
    if (call.key_up->parts.size() != (size_t)L.heads || call.value_up->parts.size() != (size_t)L.heads)
        throw std::invalid_argument("one matrix for each head");
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
