#include "encode.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "half.h"
#include "linear.h"
#include "pack.h"
#include "quantize.h"

namespace {

constexpr int kPanels = 2, kPanelsOfOneTile = 4;  // that a task multiplies with
constexpr size_t kArena = 64u << 20;

int chunks(int count, int size) { return (count + size - 1) / size; }

// What one call needs between its ops. It grows with the rows and is kept.
struct Workspace {
    Buffer split, qkv, attended, up, product;
};

Workspace& workspace_of(Context& c) {
    if (!c.encoding) c.encoding = std::make_shared<Workspace>();
    return *static_cast<Workspace*>(c.encoding.get());
}

void rows_apart(Context& c, int rows, void (*work)(void*, int, int), void* context) {
    const int size = std::max(1, rows / (4 * c.pool.threads()));
    auto body = [&](int i, int) { work(context, i * size, std::min(rows, (i + 1) * size)); };
    c.pool.each(chunks(rows, size), body);
}

template <class Body> void each_rows(Context& c, int rows, Body body) {
    rows_apart(c, rows, [](void* b, int from, int to) { (*static_cast<Body*>(b))(from, to); }, &body);
}

void product(Context& c, const EncodeWeight& weight, const float* x, int rows, int activation, float* out) {
    const EncodeKernels& kernels = *c.kernels.encode;
    if (!weight.tiles) {
        linear(c, *weight.plain, {x, weight.inputs, rows, Nothing, nullptr, 0.f, out, weight.outputs, 0});
        if (activation)
            each_rows(c, rows, [&](int from, int to) {
                kernels.activate(out + (int64_t)from * weight.outputs, (int64_t)(to - from) * weight.outputs, activation);
            });
        return;
    }
    const int tiles = chunks(rows, kEncodeRows), blocks = weight.inputs / kEncodeInputs;
    uint16_t* const split = workspace_of(c).split.get<uint16_t>((size_t)tiles * (size_t)blocks * 2 * kEncodeTile);
    auto spread = [&](int i, int) { kernels.split(x, rows, weight.inputs, split, i); };
    c.pool.each(tiles, spread);
    c.reserve_scratch(kernels.scratch(weight.inputs));
    EncodeProduct args{split, rows, weight.inputs, weight.tiles, weight.scales.data(), weight.outputs,
                       weight.bias.empty() ? nullptr : weight.bias.data(), activation, out};
    const int panels = weight.outputs / kLanes;
    const int together = tiles == 1 ? kPanelsOfOneTile : kPanels;
    auto body = [&](int i, int worker) {
        kernels.multiply(args, i * together, std::min(panels, (i + 1) * together), c.scratch_of(worker));
    };
    c.pool.each(chunks(panels, together), body);
}

// In large pages, which many weights share.
uint8_t* take_panels(Context& c, EncodeWeight& weight, size_t bytes) {
    const size_t padded = (bytes + 63) / 64 * 64;
    uint8_t* found = c.arena ? c.arena->take(padded) : nullptr;
    if (!found) {
        c.arena = std::make_shared<Arena>(std::max(padded + 64, kArena));
        found = c.arena->take(padded);
    }
    if (!found) throw std::bad_alloc();
    weight.arena = c.arena;
    return found;
}

void pack_plain(Context& c, EncodeWeight& weight, int32_t format, const uint8_t* data, const float* bias) {
    const int32_t rows = weight.outputs;
    weight.plain.reset(pack_weight(c, 1, &format, &rows, &data, weight.inputs, bias));
}

void attend(Context& c, const EncodeArgs& a, const float* qkv, float* out) {
    int longest = 0;
    for (int i = 0; i < a.texts; ++i) longest = std::max(longest, a.starts[i + 1] - a.starts[i]);
    const int padded = chunks(longest, kLanes) * kLanes, head_dim = a.hidden / a.heads;
    c.reserve_scratch(sizeof(float) * (size_t)padded * (size_t)(head_dim + kEncodeQueries));
    auto body = [&](int i, int worker) {
        const int text = i / a.heads, first = a.starts[text];
        const EncodeAttend args{qkv + (int64_t)first * 3 * a.hidden, a.starts[text + 1] - first, a.hidden, head_dim, i % a.heads,
                                out + (int64_t)first * a.hidden, reinterpret_cast<float*>(c.scratch_of(worker))};
        c.kernels.encode->attend(args);
    };
    c.pool.each(a.texts * a.heads, body);
}

}  // namespace

EncodeWeight* pack_encode_weight(Context& c, const float* values, int outputs, int inputs, const float* bias, bool coded) {
    auto weight = std::make_unique<EncodeWeight>();
    weight->outputs = outputs, weight->inputs = inputs;
    if (coded) {
        if (inputs % kGroup) throw std::domain_error("inputs are not whole groups");
        const int64_t groups = (int64_t)outputs * inputs / kGroup;
        std::vector<uint8_t> codes((size_t)outputs * stored_row_bytes(Q8_0, (size_t)inputs));
        quantize_eight(values, groups, codes.data());
        pack_plain(c, *weight, Q8_0, codes.data(), bias);
        return weight.release();
    }
    float most = 0.f;
    std::vector<uint16_t> halves((size_t)outputs * (size_t)inputs);
    for (size_t i = 0; i < halves.size(); ++i) {
        if (!(std::fabs(values[i]) <= kLargestHalf)) throw std::domain_error("a weight does not fit float16");
        most = std::max(most, std::fabs(values[i]));
        halves[i] = float_to_half(values[i]);
    }
    const EncodeKernels& kernels = *c.kernels.encode;
    if (!kernels.multiply || most > kernels.largest || inputs % kEncodeInputs || outputs % kLanes) {
        pack_plain(c, *weight, F16, reinterpret_cast<const uint8_t*>(halves.data()), bias);
        return weight.release();
    }
    if (bias) weight->bias.assign(bias, bias + outputs);
    uint16_t* to = reinterpret_cast<uint16_t*>(take_panels(c, *weight, sizeof(uint16_t) * halves.size()));
    weight->tiles = to;
    if (kernels.pack) {
        weight->scales.resize((size_t)outputs);
        kernels.pack(values, outputs, inputs, to, weight->scales.data());
        return weight.release();
    }
    for (int panel = 0; panel < outputs / kLanes; ++panel)
        for (int k = 0; k < inputs; ++k)
            for (int lane = 0; lane < kLanes; ++lane) *to++ = halves[(size_t)(panel * kLanes + lane) * (size_t)inputs + (size_t)k];
    return weight.release();
}

void layer_norm(Context& c, float* x, int rows, int cols, const float* weight, const float* shift, float eps) {
    each_rows(c, rows, [&](int from, int to) { c.kernels.encode->add_norm(x, nullptr, cols, weight, shift, eps, from, to); });
}

void run_encoder(Context& c, const EncodeArgs& a) {
    Workspace& w = workspace_of(c);
    const auto size = [&](int width) { return (size_t)a.rows * (size_t)width; };
    const EncodeKernels& kernels = *c.kernels.encode;
    float* qkv = w.qkv.get<float>(size(3 * a.hidden));
    float* attended = w.attended.get<float>(size(a.hidden));
    float* out = w.product.get<float>(size(a.hidden));
    for (int i = 0; i < a.count; ++i) {
        const EncodeLayer& layer = a.layers[i];
        product(c, *layer.qkv, a.x, a.rows, 0, qkv);
        attend(c, a, qkv, attended);
        product(c, *layer.output, attended, a.rows, 0, out);
        each_rows(c, a.rows, [&](int from, int to) {
            kernels.add_norm(a.x, out, a.hidden, layer.attention_norm, layer.attention_shift, a.eps, from, to);
        });
        float* up = w.up.get<float>(size(layer.up->outputs));
        product(c, *layer.up, a.x, a.rows, a.activation, up);
        product(c, *layer.down, up, a.rows, 0, out);
        each_rows(c, a.rows, [&](int from, int to) {
            kernels.add_norm(a.x, out, a.hidden, layer.feed_norm, layer.feed_shift, a.eps, from, to);
        });
    }
}
