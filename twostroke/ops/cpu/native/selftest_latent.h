// The part of selftest.cpp for latent attention: one request, all tokens at once, in chunks and one by one.
#pragma once

struct LatentCase {
    int heads, latent, plain, turned, value;
    int kv_format, matrices;  // formats of the cache, and of the matrices of heads
};

struct LatentWeights {
    std::vector<uint8_t> key_up, value_up;
    std::vector<float> norm, cos, sin, q, kv;
    LatentWeights(const LatentCase& c, int tokens) {
        Random random{11};
        key_up = stored_matrix(c.matrices, c.heads * c.latent, c.plain, random);
        value_up = stored_matrix(c.matrices, c.heads * c.value, c.latent, random);
        norm = random.numbers((size_t)c.latent);
        cos = random.numbers((size_t)(tokens * c.turned / 2)), sin = random.numbers((size_t)(tokens * c.turned / 2));
        q = random.numbers((size_t)(tokens * c.heads * (c.plain + c.turned)));
        kv = random.numbers((size_t)(tokens * (c.latent + c.turned)));
    }
};

Weight* pack_heads(Context* context, int heads, int format, int rows, int cols, const std::vector<uint8_t>& data) {
    std::vector<int32_t> formats((size_t)heads, format), counts((size_t)heads, rows);
    std::vector<const uint8_t*> parts;
    for (int h = 0; h < heads; ++h) parts.push_back(&data[(size_t)h * stored_row_bytes(format, (size_t)cols) * (size_t)rows]);
    return ts_pack(context, heads, formats.data(), counts.data(), parts.data(), cols, nullptr);
}

void turn(double* x, int half, const float* cos, const float* sin) {
    for (int i = 0; i < half; ++i) {
        const double a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i], x[half + i] = b * cos[i] + a * sin[i];
    }
}

// An entry as its codes give it back: runs of 64 share a scale.
void code_entry(double* entry, int dim) {
    for (int begin = 0; begin < dim; begin += 64) {
        const int end = std::min(dim, begin + 64);
        double peak = 0;
        for (int i = begin; i < end; ++i) peak = fmax(peak, fabs(entry[i]));
        for (int i = begin; i < end && peak > 0; ++i) entry[i] = nearbyint(entry[i] * 127 / peak) * peak / 127;
    }
}

// The last token's result in double, from matrices in float32 and a cache in float32 or in codes.
std::vector<double> plain_latent(const LatentCase& c, const LatentWeights& w, int tokens, double scale) {
    const int dim = c.latent + c.turned, half = c.turned / 2, last = tokens - 1;
    const float *key_up = (const float*)w.key_up.data(), *value_up = (const float*)w.value_up.data();
    std::vector<double> entries((size_t)(tokens * dim)), out;
    for (int t = 0; t < tokens; ++t) {
        double* const entry = &entries[(size_t)(t * dim)];
        double squares = 0;
        for (int i = 0; i < dim; ++i) entry[i] = w.kv[(size_t)(t * dim + i)];
        for (int i = 0; i < c.latent; ++i) squares += entry[i] * entry[i];
        for (int i = 0; i < c.latent; ++i) entry[i] *= w.norm[(size_t)i] / sqrt(squares / c.latent + 1e-6);
        turn(entry + c.latent, half, &w.cos[(size_t)(t * half)], &w.sin[(size_t)(t * half)]);
        if (c.kv_format == KVLatent8) code_entry(entry, dim);
    }
    for (int h = 0; h < c.heads; ++h) {
        const float* q = &w.q[(size_t)((last * c.heads + h) * (c.plain + c.turned))];
        std::vector<double> query((size_t)dim), weights, sums((size_t)c.latent);
        for (int l = 0; l < c.latent; ++l)
            for (int i = 0; i < c.plain; ++i) query[(size_t)l] += (double)q[i] * key_up[(h * c.latent + l) * c.plain + i];
        for (int i = 0; i < c.turned; ++i) query[(size_t)(c.latent + i)] = q[c.plain + i];
        turn(&query[(size_t)c.latent], half, &w.cos[(size_t)(last * half)], &w.sin[(size_t)(last * half)]);
        double top = -1e300, total = 0;
        for (int t = 0; t < tokens; ++t) {
            double score = 0;
            for (int i = 0; i < dim; ++i) score += query[(size_t)i] * entries[(size_t)(t * dim + i)];
            weights.push_back(score * scale), top = fmax(top, score * scale);
        }
        for (double& weight : weights) total += weight = exp(weight - top);
        for (int t = 0; t < tokens; ++t)
            for (int l = 0; l < c.latent; ++l) sums[(size_t)l] += weights[(size_t)t] / total * entries[(size_t)(t * dim + l)];
        for (int v = 0; v < c.value; ++v) {
            double x = 0;
            for (int l = 0; l < c.latent; ++l) x += sums[(size_t)l] * value_up[(h * c.value + v) * c.latent + l];
            out.push_back(x);
        }
    }
    return out;
}

// Rows [begin, end) in chunks. All at once first: that fills the cache. Then chunks that begin and end inside of a block and
// lie on both sides of a split of 256 keys, of more rows than keep all threads busy with one head and of fewer; then single
// rows at the borders of blocks (16), steps (64) and splits. Rows between borders run the same code as their neighbours.
constexpr int kTokens = 270;
constexpr struct {
    int begin, end, chunk;
} kPasses[] = {{0, kTokens, kTokens}, {170, 260, 90}, {240, 270, 30}, {0, 3, 1}, {14, 18, 1}, {62, 66, 1}, {126, 130, 1}, {254, 259, 1}, {266, kTokens, 1}};

void check_latent(const std::vector<Backend>& backends, const LatentCase& c, const std::string& name) {
    const int dim = c.latent + c.turned, columns = (kTokens + 15) / 16, inner = c.heads * c.value, wide = c.heads * (c.plain + c.turned);
    const LatentWeights w(c, kTokens);
    std::vector<int32_t> table;
    std::vector<int64_t> positions, slots;
    for (int i = 0; i < columns; ++i) table.push_back((i * 7) % columns);
    for (int i = 0; i < kTokens; ++i) positions.push_back(i), slots.push_back(table[(size_t)(i / 16)] * 16 + i % 16);
    std::vector<float> first;
    for (const Backend& b : backends) {
        Weight* const key_up = pack_heads(b.context, c.heads, c.matrices, c.latent, c.plain, w.key_up);
        Weight* const value_up = pack_heads(b.context, c.heads, c.matrices, c.value, c.latent, w.value_up);
        const int64_t block = 16 * dim * (c.kv_format == KVFloat ? 4 : c.kv_format == KVLatent8 ? 1 : 2);
        std::vector<float> scales((size_t)(columns * 16 * ((dim + 63) / 64)), NAN);
        std::vector<uint8_t> cache((size_t)(columns * block), 255);
        AttendLayer L{};
        L.heads = c.heads, L.kv_heads = 1, L.head_dim = dim, L.value_dim = c.latent, L.scale = 0.05f, L.rope_half = c.turned / 2;
        L.kv_format = c.kv_format, L.cos = w.cos.data(), L.sin = w.sin.data(), L.key_norm = w.norm.data(), L.key_eps = 1e-6f;
        L.keys = L.values = cache.data(), L.key_block_stride = L.value_block_stride = block;
        if (c.kv_format == KVLatent8) L.key_scales = scales.data(), L.key_scale_block_stride = 16 * ((dim + 63) / 64), L.key_scale_head_stride = 16;
        const LatentCall call{&L, key_up, value_up, c.plain, 0};
        for (const auto& pass : kPasses)
            for (int row = pass.begin; row < pass.end; row += pass.chunk) {
                const int rows = pass.chunk;
                const int32_t starts[2] = {0, rows}, context = row + rows;
                const AttendBatch B{rows, 1, &positions[(size_t)row], &slots[(size_t)row], table.data(), columns, starts, &context};
                std::vector<float> out((size_t)(rows * inner));
                if (ts_attend_latent(b.context, &call, &B, &w.q[(size_t)(row * wide)], wide, &w.kv[(size_t)(row * dim)], dim, out.data()))
                    fail(name + " was refused");
                if (first.empty()) first = out;
                if (!same(&first[(size_t)(row * inner)], out.data(), out.size()))
                    fail(name + " differs in chunks of " + std::to_string(rows) + " on " + b.isa);
            }
        ts_weight_free(key_up), ts_weight_free(value_up);
    }
    const std::vector<float> last(first.end() - inner, first.end());
    const bool known = c.matrices == F32 && (c.kv_format == KVFloat || c.kv_format == KVLatent8);
    const double error = c.kv_format == KVLatent8 ? 3e-4 : 1e-5;  // a number between two codes may get the other one
    if (known && !close(last, plain_latent(c, w, kTokens, 0.05f), error)) fail(name + " is far from the plain loops");
    printf("%s %016llx\n", name.c_str(), (unsigned long long)checksum(first));
}
