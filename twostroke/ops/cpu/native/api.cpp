// The C interface: raw pointers in, an int out (0, or one of the codes below). Called through ctypes, which releases the
// interpreter lock; a context serves one call at a time.
#include "attend.h"
#include "decode.h"
#include "encode.h"
#include "entries.h"
#include "experts.h"
#include "latent.h"
#include "layers.h"
#include "linear.h"
#include "pack.h"
#include "quantize.h"
#include "ranks.h"
#include "router.h"

#include <cmath>
#include <cstring>

#define TS_API extern "C" __attribute__((visibility("default")))

enum Status : int { Fine = 0, NoMemory = 1, BadToken = 2, BadArgument = 3 };

namespace {
template <class Body> int guarded(Context* c, Body body) {
    try {
        std::lock_guard<std::mutex> lock(c->mutex);
        return body();
    } catch (const std::bad_alloc&) {
        return NoMemory;
    } catch (...) {
        return BadArgument;
    }
}

template <class Body> int unlocked(Body body) {
    try {
        body();
        return Fine;
    } catch (...) {
        return NoMemory;
    }
}

template <class Record> Record read_from(const char* bytes) {
    Record record;
    std::memcpy(&record, bytes, sizeof record);
    return record;
}
}  // namespace

// Raised whenever a signature or a shared structure changes; library.py expects the same number.
TS_API int ts_version() { return 15; }

// The name of the i-th instruction set usable here, best first; null past the last.
TS_API const char* ts_isa(int i) {
    const Kernels* k = usable_kernels(i);
    return k ? k->name : nullptr;
}

// isa: one of ts_isa's names, or "" for the best. Null where it is not usable.
TS_API Context* ts_new(int threads, const char* isa) {
    const Kernels* k = find_kernels(isa);
    if (!k || threads < 1) return nullptr;
    try {
        return new Context(*k, threads);
    } catch (...) {
        return nullptr;
    }
}

TS_API void ts_free(Context* c) { delete c; }

TS_API const char* ts_name(const Context* c) { return c->kernels.name; }

// `data[i]`: rows[i] rows of `cols` elements in formats[i], adjacent. Null: no memory, or cols is not whole blocks.
TS_API Weight* ts_pack(Context* c, int parts, const int32_t* formats, const int32_t* rows, const uint8_t* const* data, int cols,
                       const float* bias) {
    Weight* weight = nullptr;
    guarded(c, [&] {
        for (int i = 0; i < parts; ++i)
            if (formats[i] < 0 || formats[i] >= kFormats || stored_row_bytes(formats[i], cols) == 0) return (int)BadArgument;
        weight = pack_weight(*c, parts, formats, rows, data, cols, bias);
        return (int)Fine;
    });
    return weight;
}

// Column k of the weight is input order[k], a permutation of all inputs.
TS_API void ts_weight_order(Weight* weight, const int32_t* order) { weight->order.assign(order, order + weight->cols); }

TS_API void ts_weight_free(Weight* weight) { delete weight; }

TS_API int64_t ts_weight_bytes(const Weight* weight) { return (int64_t)weight->bytes; }

TS_API int ts_embed(Context* c, const Weight* table, const int64_t* tokens, int count, float scale, float* out) {
    return guarded(c, [&] { return embed(*c, *table, tokens, count, scale, out) ? Fine : BadToken; });
}

TS_API int ts_norm(Context* c, const float* x, int64_t stride, int rows, int cols, const float* weight, float eps, float* out) {
    return guarded(c, [&] {
        norm_rows(*c, {RmsNorm, x, stride, rows, cols, weight, eps, out, nullptr, 0, nullptr});
        return Fine;
    });
}

// before: 0 nothing, 1 norm (weight, eps), 2 silu gate, 3 tanh-gelu gate, 4 gpt-oss' gate, 5 DeepSeek V4's.
TS_API int ts_linear(Context* c, const Weight* weight, const float* x, int64_t x_stride, int rows, int before, const float* norm,
                     float eps, float* out, int64_t out_stride, int add) {
    return guarded(c, [&] {
        if (rows > 0) linear(*c, *weight, {x, x_stride, rows, before, norm, eps, out, out_stride, add});
        return Fine;
    });
}

TS_API int ts_attend(Context* c, const AttendLayer* layer, const AttendBatch* batch, const float* qkv, float* out) {
    return guarded(c, [&] {
        if (batch->rows > 0) attend_step(*c, *layer, *batch, qkv, out);
        return Fine;
    });
}

// q and kv: rows of floats, so many elements apart.
TS_API int ts_attend_latent(Context* c, const LatentCall* call, const AttendBatch* batch, const float* q, int64_t q_stride,
                            const float* kv, int64_t kv_stride, float* out) {
    return guarded(c, [&] {
        if (batch->rows > 0) latent_step(*c, *call, *batch, q, q_stride, kv, kv_stride, out);
        return Fine;
    });
}

// tokens: of the rows, for experts that a table chooses.
TS_API int ts_experts(Context* c, const ExpertsCall* call, const float* x, const int64_t* tokens, int rows, int hidden, float* out) {
    return guarded(c, [&] {
        for (int r = 0; r < rows && call->table; ++r)
            if (tokens[r] < 0 || tokens[r] >= call->vocab) return BadToken;
        if (rows > 0) run_experts(*c, *call, x, tokens, rows, hidden, out);
        return Fine;
    });
}

TS_API int ts_attend_entries(Context* c, const EntriesCall* call, const void* const* entries, const int64_t* starts, const float* q,
                             int rows, float* out) {
    return guarded(c, [&] {
        if (call->dim < kLanes || call->dim % kLanes || call->format > KVBfloat) return BadArgument;
        if (rows > 0) attend_lists(*c, *call, entries, starts, q, rows, out);
        return Fine;
    });
}

TS_API int ts_entry_scores(Context* c, const float* q, const float* weights, int heads, int dim, const float* keys, int count, float* out) {
    return guarded(c, [&] {
        if (dim < kLanes || dim % kLanes) return BadArgument;
        score_entries(*c, q, weights, heads, dim, keys, count, out);
        return Fine;
    });
}

// keep: the rows that are wanted after the last layer, (kept, hidden) to `out`. x is changed.
TS_API int ts_layers(Context* c, const LayerCall* layers, int count, const AttendBatch* const* groups, float* x, int rows,
                     int hidden, const int64_t* keep, int kept, float* out) {
    return guarded(c, [&] {
        for (int i = 0; i < kept; ++i)
            if (keep[i] < 0 || keep[i] >= rows) return BadArgument;
        if (rows > 0) run_layers(*c, {layers, count, groups, x, rows, hidden, keep, kept, out});
        return Fine;
    });
}

// chosen: for each row the token with the largest logit, -1 where it is not a number; or null.
TS_API int ts_decode(Context* c, const DecodeCall* call, const DecodeRow* given, int rows, float* logits, int64_t* chosen) {
    return guarded(c, [&] {
        if (rows > 0 && !decode_step(*c, *call, given, rows, logits)) return BadToken;
        const int64_t vocab = call->head->rows;
        auto body = [&](int r, int) {
            const int64_t best = c->kernels.argmax(logits + r * vocab, vocab);
            chosen[r] = best >= 0 && std::isfinite(logits[r * vocab + best]) ? best : -1;
        };
        if (chosen) c->pool.each(rows, body);
        return Fine;
    });
}

TS_API EncodeWeight* ts_encode_pack(Context* c, const float* values, int outputs, int inputs, const float* bias, int coded) {
    EncodeWeight* weight = nullptr;
    guarded(c, [&] {
        weight = pack_encode_weight(*c, values, outputs, inputs, bias, coded != 0);
        return Fine;
    });
    return weight;
}

TS_API void ts_encode_weight_free(EncodeWeight* weight) { delete weight; }

TS_API int ts_layer_norm(Context* c, float* x, int rows, int cols, const float* weight, const float* shift, float eps) {
    return guarded(c, [&] {
        layer_norm(*c, x, rows, cols, weight, shift, eps);
        return Fine;
    });
}

// All layers of an encoder over the rows of some texts; x is changed. hidden and hidden / heads: multiples of 16.
TS_API int ts_encode(Context* c, const EncodeLayer* layers, int count, int heads, int activation, float eps, float* x, int hidden,
                     const int32_t* starts, int texts) {
    return guarded(c, [&] {
        if (heads < 1 || hidden % heads || hidden / heads % kLanes || starts[0] != 0) return BadArgument;
        for (int i = 0; i < texts; ++i)
            if (starts[i + 1] <= starts[i]) return BadArgument;
        run_encoder(*c, {layers, count, heads, activation, eps, x, starts[texts], hidden, starts, texts});
        return Fine;
    });
}

TS_API int ts_argmax(Context* c, const float* logits, int64_t stride, int rows, int64_t count, int64_t* out) {
    return guarded(c, [&] {
        auto body = [&](int i, int) { out[i] = c->kernels.argmax(logits + i * stride, count); };
        c->pool.each(rows, body);
        return Fine;
    });
}

// Groups of 32 weights into 8 bits (no factors) or 4 (the scale searched among `factors`): see quantize.h.
TS_API void ts_quantize(const float* values, int64_t groups, const float* factors, int trials, uint8_t* out) {
    if (factors)
        quantize_four(values, groups, factors, trials, out);
    else
        quantize_eight(values, groups, out);
}

// Sums over processes (ranks.h). They use no context: a rank waits for others here.
TS_API int64_t ts_ranks_bytes(int parts, int64_t most) { return (int64_t)ranks_bytes(parts, most); }

TS_API void ts_ranks_give(void* memory, int parts, int64_t most, int rank, uint32_t turn, const float* part, int64_t count) {
    ranks_give(memory, parts, most, rank, turn, part, count);
}

TS_API int ts_ranks_take(void* memory, int parts, int64_t most, uint32_t turn, float* out, int64_t count, int64_t micros) {
    return ranks_take(memory, parts, most, turn, out, count, micros);
}

// The router of a deployment (router.h): one call at a time. names: 8 bytes each.
TS_API RouterCore* ts_router_new() {
    RouterCore* router = nullptr;
    unlocked([&] { router = make_router(); });
    return router;
}

TS_API void ts_router_free(RouterCore* router) { free_router(router); }

// report: a WorkerReport at any address.
TS_API int ts_router_update(RouterCore* router, int32_t number, const char* report) {
    return unlocked([&] { router_update(*router, number, read_from<WorkerReport>(report)); });
}

TS_API int ts_router_pause(RouterCore* router, int32_t number) {
    return unlocked([&] { router_pause(*router, number); });
}

TS_API int ts_router_lost(RouterCore* router, int32_t number) {
    return unlocked([&] { router_lost(*router, number); });
}

TS_API int ts_router_stored(RouterCore* router, int32_t number, const char* names, int64_t count) {
    return unlocked([&] { router_stored(*router, number, {names, count}); });
}

TS_API int64_t ts_router_cached(RouterCore* router, int32_t number, const char* names, int64_t count) {
    return router_cached(*router, number, {names, count});
}

TS_API void ts_router_standing(RouterCore* router, int32_t number, WorkerStanding* out) { *out = router_standing(*router, number); }

// ask: a RouterAsk at any address.
TS_API int ts_router_choose(RouterCore* router, const char* names, int64_t count, const char* ask, RouterAnswer* out) {
    return unlocked([&] { *out = router_choose(*router, {names, count}, read_from<RouterAsk>(ask)); });
}
