#include "layers.h"

#include <string.h>

#include "attend.h"
#include "linear.h"

namespace {

void gather_rows(const float* from, const int64_t* rows, int count, int width, float* to) {
    for (int i = 0; i < count; ++i) memcpy(to + (int64_t)i * width, from + rows[i] * width, sizeof(float) * (size_t)width);
}

// Few rows are done before memory has sent the weights: those of the coming product are fetched while threads wait.
void announce(Context& c, const Weight& weight, int rows) {
    if (rows <= c.kernels.direct_rows) c.pool.announce(weight.parts[0].data, weight.bytes);
}

// x += after(value)
void add_rows(Context& c, const float* value, int rows, int64_t hidden, const NormRef& after, float* x) {
    if (after.weight) {
        float* normed = c.normed.get<float>((size_t)rows * (size_t)hidden);
        norm_rows(c, {RmsNorm, value, hidden, rows, (int)hidden, after.weight, after.eps, normed, nullptr, 0, nullptr});
        value = normed;
    }
    for (int64_t i = 0; i < rows * hidden; ++i) x[i] += value[i];
}

// x += after(weight · before(inner))
void add_product(Context& c, const Weight& weight, const float* inner, int width, int rows, int before, const NormRef& after,
                 float* x) {
    const int64_t hidden = weight.rows;
    if (!after.weight) return linear(c, weight, {inner, width, rows, before, nullptr, 0.f, x, hidden, 1});
    float* product = c.product.get<float>((size_t)rows * (size_t)hidden);
    linear(c, weight, {inner, width, rows, before, nullptr, 0.f, product, hidden, 0});
    add_rows(c, product, rows, hidden, after, x);
}

// Columns [from, from + cols) of qkv, each row divided by their root mean square.
void norm_columns(Context& c, float* qkv, int64_t stride, int rows, int from, int cols, const NormRef& norm) {
    float* normed = c.normed.get<float>((size_t)rows * (size_t)cols);
    norm_rows(c, {RmsNorm, qkv + from, stride, rows, cols, norm.weight, norm.eps, normed, nullptr, 0, nullptr});
    for (int r = 0; r < rows; ++r) memcpy(qkv + r * stride + from, normed + (int64_t)r * cols, sizeof(float) * (size_t)cols);
}

void norm_heads(Context& c, const LayerCall& layer, float* qkv, int rows) {
    const int dim = layer.attention->head_dim, queries = layer.attention->heads * dim, keys = layer.attention->kv_heads * dim;
    if (layer.queries.weight) norm_columns(c, qkv, layer.qkv->rows, rows, 0, queries, layer.queries);
    if (layer.keys.weight) norm_columns(c, qkv, layer.qkv->rows, rows, queries, keys, layer.keys);
}

void add_dense(Context& c, const LayerCall& layer, int hidden, int rows, const Weight* next, float* x) {
    const int width = layer.gate_up->rows;
    float* gate_up = c.gate_up.get<float>((size_t)rows * (size_t)width);
    announce(c, *layer.down, rows);
    linear(c, *layer.gate_up, {x, hidden, rows, RmsNorm, layer.feed_norm.weight, layer.feed_norm.eps, gate_up, width, 0});
    if (next) announce(c, *next, rows);
    add_product(c, *layer.down, gate_up, width, rows, layer.gate, layer.feed_out, x);
}

void add_experts(Context& c, const LayerCall& layer, int hidden, int rows, const Weight* next, float* x) {
    float* total = c.total.get<float>((size_t)rows * (size_t)hidden);
    run_experts(c, *layer.experts, x, nullptr, rows, hidden, total);
    if (layer.gate_up) {
        const int width = layer.gate_up->rows;
        float* gate_up = c.gate_up.get<float>((size_t)rows * (size_t)width);
        announce(c, *layer.down, rows);
        linear(c, *layer.gate_up, {x, hidden, rows, RmsNorm, layer.feed_norm.weight, layer.feed_norm.eps, gate_up, width, 0});
        linear(c, *layer.down, {gate_up, width, rows, layer.gate, nullptr, 0.f, total, hidden, 1});
    }
    if (next) announce(c, *next, rows);
    add_rows(c, total, rows, hidden, layer.feed_out, x);
}

}  // namespace

void run_layers(Context& c, const LayersArgs& a) {
    float* x = a.x;
    int rows = a.rows;
    for (int i = 0; i < a.count; ++i) {
        const LayerCall& layer = a.layers[i];
        const AttendBatch& batch = *a.groups[layer.group];
        const int inner = layer.attention->heads * layer.attention->head_dim;
        float* qkv = c.qkv.get<float>((size_t)rows * (size_t)layer.qkv->rows);
        float* attended = c.attended.get<float>((size_t)rows * (size_t)inner);
        announce(c, *layer.output, rows);
        linear(c, *layer.qkv, {x, a.hidden, rows, RmsNorm, layer.attention_norm.weight, layer.attention_norm.eps, qkv, layer.qkv->rows, 0});
        norm_heads(c, layer, qkv, rows);
        attend_step(c, *layer.attention, batch, qkv, attended);
        if (i + 1 == a.count) {
            gather_rows(x, a.keep, a.kept, a.hidden, a.out);
            float* kept = c.gate_up.get<float>((size_t)a.kept * (size_t)inner);  // read before gate and up are written
            gather_rows(attended, a.keep, a.kept, inner, kept);
            x = a.out, attended = kept, rows = a.kept;
            if (rows == 0) return;
        }
        announce(c, layer.experts ? *layer.experts->router : *layer.gate_up, rows);
        add_product(c, *layer.output, attended, inner, rows, Nothing, layer.attention_out, x);
        const Weight* next = i + 1 < a.count ? a.layers[i + 1].qkv : nullptr;
        if (layer.experts) add_experts(c, layer, a.hidden, rows, next, x);
        else add_dense(c, layer, a.hidden, rows, next, x);
    }
}
