// A step whose rows are the newest tokens of requests and their guesses, from token ids to logits in one call: the
// interpreter's work between the ops of such a step costs up to a twentieth of it.
#pragma once
#include "layers.h"

// The block tables of one KV group. Mirrored in library.py, as the two below.
struct DecodeGroup {
    const int32_t* tables;  // (requests, columns)
    int64_t stride;         // elements from request to request
    int32_t requests, columns;
    int32_t span;           // tokens of a block
    int32_t unused;
};

struct DecodeCall {
    const LayerCall* layers;
    const Weight *table, *head;
    const DecodeGroup* groups;
    NormRef norm;  // before the head
    int32_t layer_count, group_count, hidden;
    float scale;  // of the embedding
};

struct DecodeRow {
    int64_t token, position, request;  // request: its row of the block tables
};

// False: a token, a position or a request lies outside its table. logits: (rows, vocabulary).
bool decode_step(Context& c, const DecodeCall& call, const DecodeRow* given, int rows, float* logits);
