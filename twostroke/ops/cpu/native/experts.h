// A layer's experts: the router's choice, the products of each chosen expert with all rows that chose it, the weighted sum.
#pragma once
#include "context.h"
#include "norm_ref.h"

// Mirrored in library.py. Rules: see Routing in interface.py.
struct ExpertsCall {
    const Weight* router;
    const float* correction;        // (experts), or null
    const Weight* const* gate_up;   // of each expert
    const Weight* const* down;
    NormRef norm;                   // before router and experts
    int32_t experts, chosen;
    int32_t scores, normalised;     // scores: 0 softmax, 1 sigmoid, 2 √softplus
    int32_t groups, kept_groups, group_best;
    int32_t gate;                   // a Before
    float factor;
    int32_t vocab;
    const int32_t* table;           // (vocab, chosen): the experts of each token; or null: the best scores choose
};

// x: (rows, hidden) before the norm. tokens: (rows), read with a table alone. out: (rows, hidden), written.
void run_experts(Context& c, const ExpertsCall& call, const float* x, const int64_t* tokens, int rows, int hidden, float* out);
