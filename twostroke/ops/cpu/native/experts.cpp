#include "experts.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "linear.h"

namespace {

constexpr float kTiny = 1e-20f;  // added to a sum of weights before it divides

// The index of the largest key among those that are free, the lowest among equals; it is free no longer.
int take_best(const float* keys, uint8_t* free, int count) {
    int best = -1;
    for (int i = 0; i < count; ++i)
        if (free[i] && (best < 0 || keys[i] > keys[best])) best = i;
    if (best >= 0) free[best] = 0;
    return best;
}

struct Choice {  // of one row; memory for as many as there are experts
    float *scores, *keys, *group_keys;
    uint8_t *free, *free_groups;
};

// Only experts of the best groups stay free.
void keep_groups(const ExpertsCall& call, const Choice& at) {
    const int size = call.experts / call.groups;
    for (int g = 0; g < call.groups; ++g) {
        float sum = 0.f;
        for (int i = 0; i < call.group_best; ++i) sum += at.keys[g * size + take_best(at.keys + g * size, at.free + g * size, size)];
        at.group_keys[g] = sum;
        at.free_groups[g] = 1;
    }
    memset(at.free, 0, (size_t)call.experts);
    for (int i = 0; i < call.kept_groups; ++i)
        memset(at.free + take_best(at.group_keys, at.free_groups, call.groups) * size, 1, (size_t)size);
}

float sqrt_softplus(double x) { return (float)sqrt((x > 0 ? x : 0) + log1p(exp(-fabs(x)))); }

void choose(const Kernels& kernels, const ExpertsCall& call, const float* logits, const int32_t* given, const Choice& at, int32_t* chosen, float* weights) {
    const int count = call.experts;
    if (call.scores == 2) for (int i = 0; i < count; ++i) at.scores[i] = sqrt_softplus(logits[i]);
    else kernels.scores(logits, count, call.scores, at.scores);
    for (int i = 0; i < count; ++i) at.keys[i] = call.correction ? at.scores[i] + call.correction[i] : at.scores[i];
    memset(at.free, 1, (size_t)count);
    if (call.groups > 1) keep_groups(call, at);
    float sum = 0.f;
    for (int i = 0; i < call.chosen; ++i) {
        chosen[i] = given ? given[i] : take_best(at.keys, at.free, count);
        weights[i] = at.scores[chosen[i]];
        sum += weights[i];
    }
    for (int i = 0; i < call.chosen; ++i) weights[i] = (call.normalised ? weights[i] / (sum + kTiny) : weights[i]) * call.factor;
}

int padded(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Experts and weights of every row, (rows, chosen), the best first.
void choose_all(Context& c, const ExpertsCall& call, const float* logits, const int64_t* tokens, int rows, int32_t* chosen, float* weights) {
    const int cuts = std::min(rows, rows < 16 ? 1 : 2 * c.pool.threads()), width = padded(call.experts);
    float* const floats = c.choice.get<float>((size_t)cuts * (size_t)width * 4);  // the last quarter: bytes
    auto body = [&](int i, int) {
        float* const mine = floats + (size_t)i * (size_t)width * 4;
        uint8_t* const bytes = reinterpret_cast<uint8_t*>(mine + 3 * width);
        const Choice at{mine, mine + width, mine + 2 * width, bytes, bytes + width};
        for (int r = (int)((int64_t)rows * i / cuts); r < (int)((int64_t)rows * (i + 1) / cuts); ++r)
            choose(c.kernels, call, logits + (int64_t)r * call.experts, call.table ? call.table + tokens[r] * call.chosen : nullptr, at, chosen + (int64_t)r * call.chosen, weights + (int64_t)r * call.chosen);
    };
    c.pool.each(cuts, body);
}

// (row, choice) pairs sorted by expert, rows in order: the place of each pair, the row at each place, and where an expert's
// places start.
void group_rows(const ExpertsCall& call, const int32_t* chosen, int pairs, int32_t* place, int32_t* rows_of, std::vector<int>& starts) {
    starts.assign((size_t)call.experts + 1, 0);
    for (int i = 0; i < pairs; ++i) ++starts[(size_t)chosen[i] + 1];
    for (int e = 0; e < call.experts; ++e) starts[(size_t)e + 1] += starts[(size_t)e];
    for (int i = 0; i < pairs; ++i) {
        place[i] = starts[(size_t)chosen[i]]++;
        rows_of[place[i]] = i / call.chosen;
    }
    for (int e = call.experts; e > 0; --e) starts[(size_t)e] = starts[(size_t)e - 1];
    starts[0] = 0;
}

void list_groups(const Weight* const* weights, const std::vector<int>& starts, std::vector<RowGroup>& out) {
    out.clear();
    for (size_t e = 0; e + 1 < starts.size(); ++e)
        if (starts[e + 1] > starts[e]) out.push_back({weights[e], starts[e], starts[e + 1] - starts[e]});
}

// A piece of work for each thread; few rows are done at once.
template <class Body> void by_rows(Context& c, int rows, Body& row) {
    const int cuts = rows < 8 ? 1 : std::min(rows, 4 * c.pool.threads());
    auto body = [&](int i, int) {
        for (int r = (int)((int64_t)rows * i / cuts); r < (int)((int64_t)rows * (i + 1) / cuts); ++r) row(r);
    };
    c.pool.each(cuts, body);
}

}  // namespace

void run_experts(Context& c, const ExpertsCall& call, const float* x, const int64_t* tokens, int rows, int hidden, float* out) {
    const int count = call.chosen, pairs = rows * count, width = call.gate_up[0]->rows;
    float* const logits = c.product.get<float>((size_t)rows * (size_t)call.experts);
    linear(c, *call.router, {x, hidden, rows, RmsNorm, call.norm.weight, call.norm.eps, logits, call.experts, 0});
    int32_t* const chosen = c.pairs.get<int32_t>(4 * (size_t)pairs);
    int32_t *const place = chosen + pairs, *const rows_of = place + pairs;  // sorted by expert: where a pair is, whose it is
    float* const weights = reinterpret_cast<float*>(rows_of + pairs);
    choose_all(c, call, logits, tokens, rows, chosen, weights);
    group_rows(call, chosen, pairs, place, rows_of, c.starts);

    float* const inner = c.gate_up.get<float>((size_t)pairs * (size_t)width);
    float* const products = c.product.get<float>((size_t)pairs * (size_t)hidden);
    list_groups(call.gate_up, c.starts, c.row_groups);
    linear_groups(c, c.row_groups, {x, hidden, pairs, RmsNorm, call.norm.weight, call.norm.eps, inner, width, 0, rows_of}, rows == 1);
    list_groups(call.down, c.starts, c.row_groups);
    linear_groups(c, c.row_groups, {inner, width, pairs, call.gate, nullptr, 0.f, products, hidden, 0});
    auto add_up = [&](int r) {
        c.kernels.weighted_sum(products, hidden, place + (int64_t)r * count, weights + (int64_t)r * count, count, out + (int64_t)r * hidden);
    };
    by_rows(c, rows, add_up);
}
