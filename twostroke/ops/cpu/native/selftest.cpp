// Every kernel against plain loops in double, on every instruction set of the machine, through the C interface.
//
// Prints one line for each case: its name and a checksum of the result's bits. Bits must not depend on the number of
// rows, threads or the instruction set; that is checked here. They must not depend on the architecture either: compare
// the output of two builds.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "half.h"
#include "kernels.h"
#include "latent.h"
#include "pack.h"
#include "router.h"

extern "C" {
const char* ts_isa(int);
Context* ts_new(int, const char*);
void ts_free(Context*);
Weight* ts_pack(Context*, int, const int32_t*, const int32_t*, const uint8_t* const*, int, const float*);
void ts_weight_free(Weight*);
int ts_embed(Context*, const Weight*, const int64_t*, int, float, float*);
int ts_norm(Context*, const float*, int64_t, int, int, const float*, float, float*);
int ts_linear(Context*, const Weight*, const float*, int64_t, int, int, const float*, float, float*, int64_t, int);
int ts_attend(Context*, const AttendLayer*, const AttendBatch*, const float*, float*);
int ts_attend_latent(Context*, const LatentCall*, const AttendBatch*, const float*, int64_t, const float*, int64_t, float*);
int ts_argmax(Context*, const float*, int64_t, int, int64_t, int64_t*);
RouterCore* ts_router_new();
void ts_router_free(RouterCore*);
int ts_router_update(RouterCore*, int32_t, const char*);
int ts_router_pause(RouterCore*, int32_t);
int ts_router_lost(RouterCore*, int32_t);
int ts_router_stored(RouterCore*, int32_t, const char*, int64_t);
int64_t ts_router_cached(RouterCore*, int32_t, const char*, int64_t);
void ts_router_standing(RouterCore*, int32_t, WorkerStanding*);
int ts_router_choose(RouterCore*, const char*, int64_t, const char*, RouterAnswer*);
}

namespace {

int failures = 0;

void fail(const std::string& what) {
    printf("FAILED %s\n", what.c_str());
    ++failures;
}

struct Random {  // the same numbers everywhere
    uint64_t state;
    uint32_t next() {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return (uint32_t)(state >> 33);
    }
    int below(int n) { return (int)(next() % (uint32_t)n); }
    float number() { return (float)((int)(next() & 0xffff) - 32768) * (1.f / 16384); }  // [-2, 2)
    std::vector<float> numbers(size_t n) {
        std::vector<float> x(n);
        for (float& v : x) v = number();
        return x;
    }
};

uint64_t checksum(const std::vector<float>& x) {
    uint64_t h = 1469598103934665603ull;
    for (float v : x) h = (h ^ float_to_bits(v)) * 1099511628211ull;
    return h;
}

bool same(const float* a, const float* b, size_t n) { return memcmp(a, b, n * sizeof(float)) == 0; }

bool close(const std::vector<float>& got, const std::vector<double>& expected, double limit) {
    double error = 0, size = 1e-30;
    for (size_t i = 0; i < got.size(); ++i) {
        error += (got[i] - expected[i]) * (got[i] - expected[i]);
        size += expected[i] * expected[i];
    }
    return sqrt(error / size) < limit;  // false for NaN
}

// ---- products ---------------------------------------------------------------------------------------------------------

const char* const kNames[kFormats] = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4"};

std::vector<uint8_t> stored_matrix(int format, int rows, int cols, Random& random) {
    std::vector<uint8_t> data(stored_row_bytes(format, (size_t)cols) * (size_t)rows);
    auto put_half = [&](size_t at, float x) {
        const uint16_t h = float_to_half(x);
        memcpy(&data[at], &h, 2);
    };
    if (format <= BF16) {
        for (size_t i = 0; i < (size_t)rows * (size_t)cols; ++i) {
            const float x = random.number();
            const uint16_t h = format == F16 ? float_to_half(x) : float_to_bfloat(x);
            if (format == F32) memcpy(&data[4 * i], &x, 4);
            else memcpy(&data[2 * i], &h, 2);
        }
        return data;
    }
    for (uint8_t& byte : data) byte = (uint8_t)random.next();
    const size_t block = data.size() / ((size_t)rows * (size_t)cols / (format >= Q4_K && format <= Q6_K ? 256 : 32));
    for (size_t at = 0; at < data.size(); at += block) {
        if (format == MXFP4) data[at] = (uint8_t)(118 + random.next() % 4);
        else put_half(format == Q6_K ? at + 208 : at, random.number() * 0.01f);
        if (format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K) put_half(at + 2, random.number() * 0.01f);
    }
    return data;
}

double gelu(double x) { return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }

std::vector<double> before_rows(const std::vector<float>& x, int rows, int cols, int before, const std::vector<float>& norm) {
    std::vector<double> out((size_t)rows * (size_t)cols);
    const int width = before >= GateSilu ? 2 * cols : cols;
    for (int r = 0; r < rows; ++r) {
        const float* row = &x[(size_t)r * (size_t)width];
        double squares = 0;
        for (int k = 0; k < cols; ++k) squares += (double)row[k] * row[k];
        for (int k = 0; k < cols; ++k) {
            double v = row[k];
            if (before == RmsNorm) v = v / sqrt(squares / cols + 1e-5) * norm[(size_t)k];
            if (before == GateSilu) v = v / (1 + exp(-v)) * row[cols + k];
            if (before == GateGelu) v = gelu(v) * row[cols + k];
            out[(size_t)r * (size_t)cols + (size_t)k] = v;
        }
    }
    return out;
}

void quantize_rows(std::vector<double>& x, bool seconds) {  // groups of 32, as the kernels do: see Act
    for (size_t g = 0; g < x.size(); g += 32) {
        double squares = 0;
        size_t largest = g;
        for (size_t i = g; i < g + 32; ++i) {
            squares += x[i] * x[i];
            if (fabs(x[i]) > fabs(x[largest])) largest = i;
        }
        const bool apart = seconds && kDominance * x[largest] * x[largest] > squares;
        double peak = 0;
        for (size_t i = g; i < g + 32; ++i)
            if (!apart || i != largest) peak = fmax(peak, fabs(x[i]));
        for (size_t i = g; i < g + 32 && peak > 0; ++i)
            if (!apart || i != largest) x[i] = nearbyint(x[i] / peak * 127) * peak / 127;
    }
}

struct LinearCase {
    int format, rows, outputs, cols, before;
    bool add;
};

struct Backend {
    std::string isa;
    int threads;
    Context* context;
};

void check_linear(const std::vector<Backend>& backends, const LinearCase& c, const std::string& name) {
    Random random{(uint64_t)(c.format * 1000003 + c.rows * 1009 + c.cols * 17 + c.before)};
    const int width = c.before >= GateSilu ? 2 * c.cols : c.cols;
    const auto data = stored_matrix(c.format, c.outputs, c.cols, random);
    auto x = random.numbers((size_t)c.rows * (size_t)width);
    for (size_t i = 7; i < x.size(); i += 41) x[i] *= i % 3 ? 1.f : 40.f;  // some groups that one input dominates
    const auto norm = random.numbers((size_t)c.cols);
    const auto bias = random.numbers((size_t)c.outputs), target = random.numbers((size_t)c.rows * (size_t)c.outputs);
    std::vector<float> first, first_table;
    std::vector<int64_t> every((size_t)c.outputs);
    for (int i = 0; i < c.outputs; ++i) every[(size_t)i] = i;
    for (const Backend& b : backends) {
        const uint8_t* pointer = data.data();
        const int32_t format = c.format, outputs = c.outputs;
        Weight* weight = ts_pack(b.context, 1, &format, &outputs, &pointer, c.cols, bias.data());
        std::vector<float> table((size_t)c.outputs * (size_t)c.cols);
        ts_embed(b.context, weight, every.data(), c.outputs, 1.f, table.data());
        if (first_table.empty()) first_table = table;
        if (!same(first_table.data(), table.data(), table.size())) fail(name + " unpacks differently on " + b.isa);
        std::vector<float> out = target;
        ts_linear(b.context, weight, x.data(), width, c.rows, c.before, norm.data(), 1e-5f, out.data(), c.outputs, c.add);
        if (first.empty()) {
            first = out;
            auto inner = before_rows(x, c.rows, c.cols, c.before, norm);
            if (c.format > BF16) quantize_rows(inner, has_seconds(c.before));
            std::vector<double> expected(out.size());
            for (int r = 0; r < c.rows; ++r)
                for (int n = 0; n < c.outputs; ++n) {
                    double sum = bias[(size_t)n];
                    for (int k = 0; k < c.cols; ++k) sum += inner[(size_t)(r * c.cols + k)] * table[(size_t)(n * c.cols + k)];
                    expected[(size_t)(r * c.outputs + n)] = sum + (c.add ? target[(size_t)(r * c.outputs + n)] : 0);
                }
            if (!close(out, expected, c.format > BF16 && c.before ? 3e-3 : 3e-6)) fail(name + " is far from the plain loops");
        }
        if (!same(first.data(), out.data(), out.size())) fail(name + " differs on " + b.isa);
        for (int begin = 0, size = 1; begin < c.rows; begin += size, ++size) {  // 1 row, 2 rows, 3 rows, ...
            const int rows = size < c.rows - begin ? size : c.rows - begin;
            std::vector<float> part(target.begin() + begin * c.outputs, target.begin() + (begin + rows) * c.outputs);
            ts_linear(b.context, weight, &x[(size_t)(begin * width)], width, rows, c.before, norm.data(), 1e-5f, part.data(), c.outputs, c.add);
            if (!same(part.data(), &out[(size_t)(begin * c.outputs)], part.size())) fail(name + " knows its neighbours on " + b.isa);
        }
        ts_weight_free(weight);
    }
    printf("%s %016llx\n", name.c_str(), (unsigned long long)checksum(first));
}

// ---- attention --------------------------------------------------------------------------------------------------------

struct AttendCase {
    const char* name;
    int heads, kv_heads, dim, window, format;
    float cap;
    bool norms, sinks;
};

const char* const kKvNames[] = {"float32", "float16", "bfloat16", "int8", "int4"};
constexpr int kOld[] = {0, 20, 63, 0, 520, 255}, kNew[] = {37, 13, 1, 1, 1, 2};  // tokens before the step and in it
constexpr int kRequests = 6, kColumns = 36;

struct Cache {
    std::vector<uint8_t> data;
    std::vector<float> scales;
};

void describe(const AttendCase& c, Cache& cache, AttendLayer& L) {
    const int64_t row = c.format == KVFloat ? c.dim * 4 : c.format == KVInt8 ? c.dim : c.format == KVInt4 ? c.dim / 2 : c.dim * 2;
    const int64_t head = 16 * row, block = 2 * c.kv_heads * head;
    L.value_dim = c.dim;
    L.keys = cache.data.data();
    L.values = L.keys + c.kv_heads * head;
    L.key_block_stride = L.value_block_stride = block;
    L.key_head_stride = L.value_head_stride = head;
    if (c.format < KVInt8) return;
    L.key_scales = cache.scales.data();
    L.value_scales = L.key_scales + c.kv_heads * 16;
    L.key_scale_block_stride = L.value_scale_block_stride = 2 * c.kv_heads * 16;
    L.key_scale_head_stride = L.value_scale_head_stride = 16;
}

// Where element i of a token's head lies in an int8 block: see kernels/kv.h.
int place_in_block(const AttendCase& c, bool value, int token, int i) {
    if (value) return token / 4 * c.dim * 4 + i * 4 + token % 4;
    return i < c.dim / 4 * 4 ? i / 4 * 64 + token * 4 + i % 4 : c.dim / 4 * 64 + token * 2 + i % 4;
}

// What a cache holds, without the scale of a coded one. codes: the head's part of the block.
double cached(const AttendCase& c, const uint8_t* codes, bool value, int token, int i) {
    switch (c.format) {
        case KVFloat: return ((const float*)codes)[token * c.dim + i];
        case KVHalf: return half_to_float(((const uint16_t*)codes)[token * c.dim + i]);
        case KVBfloat: return bfloat_to_float(((const uint16_t*)codes)[token * c.dim + i]);
        case KVInt8: return ((const int8_t*)codes)[place_in_block(c, value, token, i)];
        default: return (codes[(token * c.dim + i) / 2] >> (i % 2 * 4) & 15) - 8;
    }
}

void rotate_plain(std::vector<double>& x, const AttendLayer& L, int64_t position, const float* norm, float eps) {
    if (norm) {
        double squares = 0;
        for (double v : x) squares += v * v;
        for (size_t i = 0; i < x.size(); ++i) x[i] = x[i] / sqrt(squares / (double)x.size() + eps) * norm[i];
    }
    for (int i = 0; i < L.rope_half; ++i) {
        const double cos = L.cos[position * L.rope_half + i], sin = L.sin[position * L.rope_half + i];
        const double a = x[(size_t)i], b = x[(size_t)(i + L.rope_half)];
        x[(size_t)i] = a * cos - b * sin;
        x[(size_t)(i + L.rope_half)] = b * cos + a * sin;
    }
}

// Every fifth element negated, then the Walsh-Hadamard transform of each run of the largest power of two that divides the
// head, by its definition.
void spread_plain(std::vector<double>& x) {
    for (size_t i = 0; i < x.size(); i += 5) x[i] = -x[i];
    const size_t size = x.size() & -x.size();
    std::vector<double> out(x.size());
    for (size_t i = 0; i < x.size(); ++i)
        for (size_t j = 0; j < size; ++j) {
            const bool odd = __builtin_popcountll((i % size) & j) % 2;
            out[i] += odd ? -x[i / size * size + j] : x[i / size * size + j];
        }
    x = out;
}

// Weights of one line as the byte codes of a coded cache: each step of 64 keys has a scale of its own.
void code_weights(std::vector<double>& weights, int64_t from) {
    for (size_t begin = 0, end; begin < weights.size(); begin = end) {
        end = std::min(weights.size(), begin + 64 - ((size_t)from + begin) % 64);
        double peak = 0;
        for (size_t i = begin; i < end; ++i) peak = fmax(peak, weights[i]);
        for (size_t i = begin; i < end; ++i) weights[i] = peak > 0 ? nearbyint(weights[i] * 127 / peak) * peak / 127 : 0;
    }
}

// One line over positions [from, position], in double.
std::vector<double> plain_line(const AttendCase& c, const AttendLayer& L, const int32_t* table, const std::vector<double>& q, int head,
                               int64_t from, int64_t position) {
    const int shared = head / (c.heads / c.kv_heads);
    const bool coded = c.format >= KVInt8;
    std::vector<double> weights, values((size_t)c.dim);
    double total = 0, top = -1e300;
    for (int64_t p = from; p <= position; ++p) {
        const int64_t id = table[p / 16];
        double score = 0;
        for (int i = 0; i < c.dim; ++i)
            score += q[(size_t)i] * cached(c, L.keys + id * L.key_block_stride + shared * L.key_head_stride, false, (int)(p % 16), i);
        if (coded) score *= L.key_scales[id * L.key_scale_block_stride + shared * L.key_scale_head_stride + p % 16];
        if (c.cap > 0) score = c.cap * tanh(score / c.cap);
        weights.push_back(score);
        top = fmax(top, score);
    }
    for (double& weight : weights) total += weight = exp(weight - top);
    if (coded) {
        for (int64_t p = from; p <= position; ++p)
            weights[(size_t)(p - from)] *= L.value_scales[table[p / 16] * L.value_scale_block_stride + shared * L.value_scale_head_stride + p % 16];
        code_weights(weights, from);
    }
    for (int64_t p = from; p <= position; ++p)
        for (int i = 0; i < c.dim; ++i)
            values[(size_t)i] += weights[(size_t)(p - from)] *
                                 cached(c, L.values + table[p / 16] * L.value_block_stride + shared * L.value_head_stride, true, (int)(p % 16), i);
    if (L.sinks) total += exp(L.sinks[head] - top);
    for (double& value : values) value /= total;
    return values;
}

// What the cache holds after the step, attended in double.
std::vector<double> plain_attention(const AttendCase& c, const AttendLayer& L, const AttendBatch& B, const std::vector<float>& qkv) {
    const int width = (c.heads + 2 * c.kv_heads) * c.dim;
    std::vector<double> out;
    for (int r = 0, request = 0; r < B.rows; ++r) {
        while (r >= B.starts[request + 1]) ++request;
        const int64_t position = B.positions[r], from = c.window && position >= c.window ? position - c.window + 1 : 0;
        for (int h = 0; h < c.heads; ++h) {
            std::vector<double> q(&qkv[(size_t)(r * width + h * c.dim)], &qkv[(size_t)(r * width + h * c.dim)] + c.dim);
            rotate_plain(q, L, position, L.query_norm, L.query_eps);
            for (double& v : q) v *= L.scale;
            if (c.format >= KVInt8) {
                double peak = 0;
                spread_plain(q);
                for (double& v : q) v /= (double)(c.dim & -c.dim);
                for (double v : q) peak = fmax(peak, fabs(v));
                for (double& v : q) v = nearbyint(v * 127 / peak) * peak / 127;
            }
            const auto line = plain_line(c, L, B.tables + request * B.table_stride, q, h, from, position);
            out.insert(out.end(), line.begin(), line.end());
        }
    }
    return out;
}

void check_attention(const std::vector<Backend>& backends, const AttendCase& c) {
    const std::string name = std::string("attend ") + c.name + " " + kKvNames[c.format];
    Random random{(uint64_t)(c.dim * 31 + c.window)};
    const int half = c.dim / 2, width = (c.heads + 2 * c.kv_heads) * c.dim;
    const auto cos = random.numbers(600 * (size_t)half), sin = random.numbers(600 * (size_t)half);
    const auto query_norm = random.numbers((size_t)c.dim), key_norm = random.numbers((size_t)c.dim);
    AttendLayer L{};
    L.heads = c.heads, L.kv_heads = c.kv_heads, L.head_dim = c.dim, L.window = c.window;
    L.scale = 0.2f, L.softcap = c.cap, L.rope_half = half, L.kv_format = c.format;
    L.cos = cos.data(), L.sin = sin.data();
    const auto sinks = random.numbers(c.heads);
    if (c.sinks) L.sinks = sinks.data();
    if (c.norms) L.query_norm = query_norm.data(), L.key_norm = key_norm.data(), L.query_eps = L.key_eps = 1e-6f;

    std::vector<int32_t> tables(kRequests * kColumns), starts{0}, contexts;
    for (size_t i = 0; i < tables.size(); ++i) tables[i] = (int32_t)i;
    for (size_t i = tables.size() - 1; i > 0; --i) std::swap(tables[i], tables[(size_t)random.below((int)i + 1)]);
    std::vector<int64_t> positions, slots, old_positions, old_slots;
    std::vector<int32_t> old_starts{0}, old_contexts;
    for (int r = 0; r < kRequests; ++r) {
        for (int p = 0; p < kOld[r] + kNew[r]; ++p) {
            const int64_t slot = (int64_t)tables[(size_t)(r * kColumns + p / 16)] * 16 + p % 16;
            (p < kOld[r] ? old_positions : positions).push_back(p);
            (p < kOld[r] ? old_slots : slots).push_back(slot);
        }
        starts.push_back((int32_t)positions.size());
        contexts.push_back(kOld[r] + kNew[r]);
        old_starts.push_back((int32_t)old_positions.size());
        old_contexts.push_back(kOld[r]);
    }
    AttendBatch B{(int32_t)positions.size(), kRequests, positions.data(), slots.data(), tables.data(), kColumns, starts.data(), contexts.data()};
    AttendBatch old{(int32_t)old_positions.size(), kRequests, old_positions.data(), old_slots.data(), tables.data(), kColumns, old_starts.data(), old_contexts.data()};
    const auto qkv = random.numbers((size_t)(B.rows * width)), old_qkv = random.numbers((size_t)(old.rows * width));

    std::vector<float> first;
    for (const Backend& b : backends) {
        Cache cache{std::vector<uint8_t>(tables.size() * (size_t)(2 * c.kv_heads * 16 * c.dim * 4), 0xff),  // NaN where nothing is stored
                    std::vector<float>(tables.size() * (size_t)(2 * c.kv_heads * 16), NAN)};
        describe(c, cache, L);
        std::vector<float> out((size_t)(B.rows * c.heads * c.dim)), ignored((size_t)(old.rows * c.heads * c.dim));
        AttendLayer write = L;
        write.window = 1;  // what is stored does not depend on what is seen
        ts_attend(b.context, &write, &old, old_qkv.data(), ignored.data());
        ts_attend(b.context, &L, &B, qkv.data(), out.data());
        if (first.empty()) {
            first = out;
            if (!close(out, plain_attention(c, L, B, qkv), c.format >= KVInt8 ? 3e-3 : 1e-5)) fail(name + " is far from the plain loops");
        }
        if (!same(first.data(), out.data(), out.size())) fail(name + " differs on " + b.isa);
        for (int r = 0; r < kRequests; ++r) {  // each request alone, and its rows one by one
            for (int step = kNew[r]; step >= 1; step = step > 1 ? 1 : 0)
                for (int row = starts[(size_t)r]; row < starts[(size_t)r + 1]; row += step) {
                    const int32_t some[2] = {0, step}, context = (int32_t)positions[(size_t)(row + step - 1)] + 1;
                    AttendBatch alone{step, 1, &positions[(size_t)row], &slots[(size_t)row], &tables[(size_t)(r * kColumns)], kColumns, some, &context};
                    std::vector<float> part((size_t)(step * c.heads * c.dim));
                    ts_attend(b.context, &L, &alone, &qkv[(size_t)(row * width)], part.data());
                    if (!same(part.data(), &first[(size_t)(row * c.heads * c.dim)], part.size())) fail(name + " knows its neighbours on " + b.isa);
                }
        }
    }
    printf("%s %016llx\n", name.c_str(), (unsigned long long)checksum(first));
}

#include "selftest_latent.h"
#include "selftest_router.h"

void check_argmax(const std::vector<Backend>& backends) {
    Random random{5};
    auto x = random.numbers(4 * 3001);
    x[7] = x[2000] = 9, x[3001 + 3000] = 9, x[2 * 3001 + 11] = NAN, x[3 * 3001 + 100] = INFINITY;
    const int64_t expected[4] = {7, 3000, -1, 100};
    for (const Backend& b : backends) {
        int64_t out[4];
        ts_argmax(b.context, x.data(), 3001, 4, 3001, out);
        if (memcmp(out, expected, sizeof out)) fail("argmax on " + b.isa);
    }
}

}  // namespace

// "quick": one number of threads instead of two, for sanitizers. "best": that, and the best instruction set only, for
// emulators of several machines.
int main(int count, char** arguments) {
    const bool best = count > 1 && strcmp(arguments[1], "best") == 0, quick = best || (count > 1 && strcmp(arguments[1], "quick") == 0);
    std::vector<Backend> backends;
    for (int i = 0; const char* isa = ts_isa(i); ++i)
        for (int threads : {3, 1})
            if ((threads > 1 || !quick) && (i == 0 || !best)) backends.push_back({isa, threads, ts_new(threads, isa)});
    fprintf(stderr, "best: %s\n", backends[0].isa.c_str());
    for (int format = 0; format < kFormats; ++format) {
        const LinearCase cases[] = {{format, 37, 50, 256, Nothing, false}, {format, 21, 33, 512, RmsNorm, true}, {format, 9, 16, 256, GateSilu, false}, {format, 2, 20, 256, GateGelu, true}};
        for (const LinearCase& c : cases)
            check_linear(backends, c, std::string("linear ") + kNames[format] + " " + std::to_string(c.rows) + "x" + std::to_string(c.outputs) + "x" + std::to_string(c.cols) + " before " + std::to_string(c.before));
    }
    check_linear(backends, {F32, 7, 19, 33, RmsNorm, false}, "linear F32 odd");
    check_linear(backends, {F16, 3, 5, 7, Nothing, true}, "linear F16 odd");
    for (int format = KVFloat; format <= KVInt4; ++format) {
        check_attention(backends, {"plain", 9, 3, 64, 0, format, 0.f, false, false});
        check_attention(backends, {"window", 4, 2, 16, 24, format, 0.f, true, false});
        check_attention(backends, {"odd head", 2, 1, 40, 0, format, 5.f, false, false});
        check_attention(backends, {"wide head", 2, 2, 128, 300, format, 0.f, true, false});
        check_attention(backends, {"head of 80", 3, 1, 80, 0, format, 0.f, true, false});
        check_attention(backends, {"uneven head", 3, 1, 90, 0, format, 0.f, false, false});
        check_attention(backends, {"sinks", 8, 2, 64, 0, format, 0.f, false, true});
        check_attention(backends, {"sinks, window", 4, 4, 32, 24, format, 0.f, false, true});
    }
    check_latent(backends, {5, 64, 32, 16, 20, KVFloat, F32}, "latent F32");
    check_latent(backends, {3, 40, 12, 6, 10, KVHalf, F32}, "latent odd");
    check_latent(backends, {6, 128, 32, 32, 32, KVBfloat, Q8_0}, "latent Q8_0");
    check_latent(backends, {16, 128, 32, 32, 32, KVLatent8, F32}, "latent int8");
    check_latent(backends, {3, 40, 12, 6, 10, KVLatent8, F32}, "latent int8 odd");
    check_argmax(backends);
    check_router(8);
    check_router(100);
    for (Backend& b : backends) ts_free(b.context);
    printf(failures ? "%d failures\n" : "ok\n", failures);
    return failures ? 1 : 0;
}
