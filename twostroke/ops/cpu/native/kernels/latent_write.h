// The first half of latent attention: finish the queries, write each token's normed latent and rotated key part.
#pragma once

namespace {

// Lines hold the absorbed queries, value_dim numbers; the rotated part comes after them.
static void latent_write(const AttendLayer& L, const AttendBatch& B, const LatentRows& rows, int row, int row_end) {
    const int dim = L.head_dim, latent = L.value_dim, turned = dim - latent, padded = padded_dim(dim);
    const int head_size = rows.plain_dim + turned;
    float entry[kMaxEntryDim];
    for (int r = row; r < row_end; ++r) {
        const float* const cos = L.cos + B.positions[r] * L.rope_half;
        const float* const sin = L.sin + B.positions[r] * L.rope_half;
        for (int h = 0; h < L.heads; ++h) {
            float* const line = rows.lines + ((int64_t)r * L.heads + h) * padded;
            memcpy(line + latent, rows.q + r * rows.q_stride + (int64_t)h * head_size + rows.plain_dim, (size_t)turned * 4);
            for (int i = dim; i < padded; ++i) line[i] = 0.f;
            rotate(line + latent, L.rope_half, cos, sin);
            for (int i = 0; i < padded; i += 16) store(line + i, mul(load(line + i), splat(L.scale)));
        }
        memcpy(entry, rows.kv + r * rows.kv_stride, (size_t)dim * 4);
        head_norm(entry, latent, L.key_norm, L.key_eps);
        rotate(entry + latent, L.rope_half, cos, sin);
        const int64_t block = B.slots[r] / kBlock;
        const int token = (int)(B.slots[r] % kBlock);
        uint8_t* const keys = L.keys + block * L.key_block_stride;
        if (L.kv_format == KVLatent8)
            store_latent_bytes(entry, dim, keys + token * dim, L.key_scales + block * L.key_scale_block_stride + token, L.key_scale_head_stride);
        else kv_store<KeyCodes>(L.kv_format, entry, dim, token, keys, nullptr);
    }
}

}  // namespace
