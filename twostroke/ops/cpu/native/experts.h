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
    int32_t sigmoid, normalised;
    int32_t groups, kept_groups, group_best;
    int32_t gate;                   // a Before
    float factor;
    int32_t unused;
};

// x: (rows, hidden) before the norm. out: (rows, hidden), written.
void run_experts(Context& c, const ExpertsCall& call, const float* x, int rows, int hidden, float* out);
