// All layers of a model in one call: between the ops of a decode step nothing but the next op happens.
#pragma once
#include "context.h"
#include "experts.h"

// One layer. Mirrored in library.py.
struct LayerCall {
    const Weight *qkv, *output;
    const Weight *gate_up, *down;     // with experts: of the one that every row takes, or null
    const AttendLayer* attention;
    const ExpertsCall* experts;       // or null
    NormRef attention_norm, feed_norm;
    NormRef attention_out, feed_out;  // before the residual add, where the family has them
    NormRef queries, keys;            // over all heads together, where the family has them
    int32_t group;                    // whose block table the layer follows
    int32_t gate;                     // GateSilu or GateGelu
};

struct LayersArgs {
    const LayerCall* layers;
    int count;
    const AttendBatch* const* groups;
    float* x;             // (rows, hidden): the residual stream, changed in place
    int rows, hidden;
    const int64_t* keep;  // rows that go on after the last attention (rows meet nowhere after it),
    int kept;
    float* out;           // (kept, hidden)
};

void run_layers(Context& c, const LayersArgs& args);
