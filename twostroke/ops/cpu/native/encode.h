// Encoders (the BERT family): every token sees its whole text. One call runs all layers over the rows of some texts.
#pragma once
#include <memory>
#include <string>

#include "context.h"

// A matrix for encoders. Its weights are rounded to float16: half the bytes to read where they are kept so, and vectors that
// differ from those of float32 weights by 1e-7 in cosine.
struct EncodeWeight {
    int outputs = 0, inputs = 0;
    std::unique_ptr<Weight> plain;  // where there are no products of their own
    std::shared_ptr<Arena> arena;
    const uint16_t* tiles = nullptr;  // (panels of 16 outputs, inputs, 16 outputs) float16, or what `pack` makes
    std::vector<float> scales;        // of the outputs, if `pack` made them
    std::vector<float> bias;
};

// One layer. Mirrored in library.py.
struct EncodeLayer {
    const EncodeWeight *qkv, *output, *up, *down;
    const float *attention_norm, *attention_shift, *feed_norm, *feed_shift;
};

struct EncodeArgs {
    const EncodeLayer* layers;
    int count;
    int heads, activation;
    float eps;
    float* x;  // (rows, hidden), changed in place
    int rows, hidden;
    const int32_t* starts;  // text i has the rows starts[i] to starts[i + 1]
    int texts;
};

// coded: 8 bits for a weight and for an input, for vectors that need not be exact.
EncodeWeight* pack_encode_weight(Context& c, const float* values, int outputs, int inputs, const float* bias, bool coded);
void run_encoder(Context& c, const EncodeArgs& args);
void layer_norm(Context& c, float* x, int rows, int cols, const float* weight, const float* shift, float eps);
