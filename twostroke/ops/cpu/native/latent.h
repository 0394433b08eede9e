// Latent attention of one layer over a whole step, in the absorbed form: queries are brought into the space of the cached
// latents, all heads attend over the same entries, and each head's sum of latents becomes its value.
#pragma once
#include "context.h"

// Mirrored in library.py.
struct LatentCall {
    const AttendLayer* attention;  // one KV head: keys of latent and rotated part, values their first value_dim numbers
    const Weight *key_up, *value_up;  // one part for each head
    int32_t plain_dim, unused;
};

// q: (rows, heads, plain_dim + rotated part), kv: (rows, latent + rotated part), out: (rows, heads, outputs of value_up).
void latent_step(Context& c, const LatentCall& call, const AttendBatch& batch, const float* q, int64_t q_stride, const float* kv,
                 int64_t kv_stride, float* out);
