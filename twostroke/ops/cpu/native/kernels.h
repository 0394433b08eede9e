// What every instruction set provides: one table of functions over plain arguments.
#pragma once
#include "layout.h"

enum Before : int { Nothing, RmsNorm, GateSilu, GateGelu, GateOai, GateTen };

static inline bool is_gate(int before) { return before >= GateSilu; }
static inline bool has_seconds(int before) { return before == RmsNorm; }  // second codes: see Act

// before(x), row by row, as floats (`plain`) and/or quantized (`acts`); either may be null.
struct PrologueArgs {
    int before;
    const float* x;
    int64_t x_stride;  // elements from row to row
    int rows, cols;    // of the result; a gate reads twice as many columns
    const float* norm;
    float eps;
    float* plain;      // (rows, cols), rows adjacent
    Act* acts;         // see place_of; the second ones `extra` further on
    int64_t extra;
    ActTile* tiles;    // instead of acts: (rows / 16, with second codes 2, cols / 32)
    const int32_t* index = nullptr;  // which row of x is the r-th; null: row r
};

static inline const float* row_of(const PrologueArgs& args, int r) { return args.x + (args.index ? args.index[r] : r) * args.x_stride; }

// out[r, n] (+)= x[r, :] · weight[n, :] + bias[n] for panels of one packed matrix.
struct MatmulArgs {
    int kind;
    const uint8_t* panels;
    size_t panel_stride;  // bytes
    int outputs;          // of this matrix; the last panel may be partly padding
    int cols;
    const Act* acts;      // coded kinds
    int64_t extra;        // Acts from a group's first to its second
    const ActTile* tiles; // instead of acts,
    int64_t tile_stride;  // tiles from 16 rows to the next
    const float* x;       // float kinds
    int64_t x_stride;
    int rows;
    float* out;
    int64_t out_stride;
    const float* bias;    // or null
    int add;              // add to what out holds
};

enum KVFormat : int { KVFloat, KVHalf, KVBfloat, KVInt8, KVInt4, KVLatent8 };  // KVLatent8: see kernels/latent_bytes.h

// The constants of one layer's attention and where its cache lies. Mirrored in library.py.
struct AttendLayer {
    int32_t heads, kv_heads, head_dim, window;
    int32_t value_dim;  // head_dim; less where values are the first part of the keys (latent attention)
    float scale, softcap;
    int32_t rope_half;  // rotated pairs; 0: no rotation
    int32_t kv_format;
    const float* cos;   // (positions, rope_half)
    const float* sin;
    const float* query_norm;  // head_dim weights or null
    const float* key_norm;
    const float* key_center;  // (kv_heads, head_dim) or null: subtracted from keys that become codes
    const float* sinks;       // (heads) or null: a logit of each query head in its softmax, without a value
    float query_eps, key_eps;
    uint8_t* keys;      // block, head; within, see kernels/kv.h. Strides in bytes
    uint8_t* values;
    int64_t key_block_stride, key_head_stride, value_block_stride, value_head_stride;
    float* key_scales;  // block, head, token. Strides in elements
    float* value_scales;
    int64_t key_scale_block_stride, key_scale_head_stride, value_scale_block_stride, value_scale_head_stride;
};

// The rows of one step (see Batch in interface.py). Mirrored in library.py.
struct AttendBatch {
    int32_t rows, requests;
    const int64_t* positions;
    const int64_t* slots;
    const int32_t* tables;
    int64_t table_stride;
    const int32_t* starts;
    const int32_t* contexts;
};

constexpr int kBlock = 16;   // tokens in a KV block
constexpr int kSplit = 256;  // keys whose softmax is accumulated in one go, at multiples of this position

// Rows [row, row + rows) of one request, one KV head, splits [split, split_end).
struct AttendTask {
    const AttendLayer* layer;
    const AttendBatch* batch;
    float* q;        // (kv_heads, batch rows, heads per KV head, padded head_dim), rotated and scaled
    int request, row, rows, kv_head;
    int split, split_end;
    float* out;      // (batch rows, heads, value_dim): the finished result; or null:
    float* partial;  // (heads per KV head, 2 + padded head_dim) for this row and split: maximum, sum, weighted values
};

// The projections of latent attention for the rows of a step; strides in elements.
struct LatentRows {
    const float* q;   // (rows, heads, plain_dim + rotated part)
    int64_t q_stride;
    int plain_dim;
    const float* kv;  // (rows, latent + rotated part)
    int64_t kv_stride;
    float* lines;     // as AttendTask::q; the latent part of every line is there already
};

// The constants of attention over lists of entries. Mirrored in library.py.
struct EntriesCall {
    int32_t heads, dim;  // dim: a multiple of 16
    float scale;
    int32_t format;      // a KVFormat: floats
    const float* sinks;  // (heads)
};

struct EntriesTask {
    const EntriesCall* call;
    const void* const* entries;
    int count;
    int head, head_end;
    const float* q;  // (heads of the task, dim)
    float* out;
};

// ---- encoders: see encode.h ----------------------------------------------------------------------------------------

enum EncodeActivation : int { EncodeLinear, EncodeGelu, EncodeGeluTanh, EncodeRelu };

constexpr int kEncodeRows = 16;    // of a tile
constexpr int kEncodeInputs = 32;  // of a tile
constexpr int kEncodeTile = 512;   // numbers of 16 bits
constexpr int kEncodeQueries = 4;  // rows whose scores are made together
constexpr float kLargestHalf = 65504.f;
constexpr float kHalfWeight = 60.f;  // 32 products of a weight below it and an input below 32 fit float16

// One head of one text.
struct EncodeAttend {
    const float* qkv;  // (rows, 3 · hidden): q, k and v of every head
    int rows, hidden, head_dim, head;
    float* out;        // (rows, hidden)
    float* scratch;    // (head_dim + kEncodeQueries, rows padded to 16)
};

// out = activation(x · weightsᵀ + bias)
struct EncodeProduct {
    const uint16_t* x;  // what `split` wrote
    int rows, inputs;
    const uint16_t* weights;
    const float* scales;  // of the outputs, where `pack` made them
    int outputs;
    const float* bias;  // or null
    int activation;
    float* out;         // (rows, outputs)
};

struct EncodeKernels {
    void (*activate)(float* x, int64_t count, int activation);
    void (*add_norm)(float* x, const float* add, int cols, const float* weight, const float* shift, float eps, int row, int row_end);
    void (*attend)(const EncodeAttend&);
    // Products with a task's panels at a time; null where there are none of their own. pack: the weights as they read them
    // and a scale for each output, null for float16 without scales. split: the inputs as they read them.
    void (*pack)(const float* values, int outputs, int inputs, uint16_t* to, float* scales);
    void (*split)(const float* x, int rows, int cols, uint16_t* out, int tile);
    void (*multiply)(const EncodeProduct&, int panel, int panel_end, uint8_t* scratch);
    size_t (*scratch)(int inputs);  // bytes
    float largest;                  // weight that multiply takes; a matrix with a larger one is multiplied in float32
};

struct Kernels {
    const char* name;
    int direct_rows;  // up to so many rows read the packed panel once: memory sets the pace
    int tiled_rows;   // so many rows or more are handed over as tiles; 0: never
    bool wide_scales; // how panels are packed: see layout.h
    void (*prologue)(const PrologueArgs&, int row, int row_end);
    void (*prologue_tile)(const PrologueArgs&, int row, int row_end, int group, int group_end);  // rows of one tile
    void (*matmul)(const MatmulArgs&, int panel, int panel_end, uint8_t* scratch);
    size_t (*matmul_scratch)(int kind, int cols);  // bytes
    void (*attend_write)(const AttendLayer&, const AttendBatch&, const float* qkv, float* q, int row, int row_end);
    // next: what the same thread will do after it, or null; fetched: whether this task was the last one's next
    void (*attend)(const AttendTask&, const AttendTask* next, bool fetched, uint8_t* scratch);
    void (*attend_merge)(const AttendLayer&, int head, const float* partials, int splits, int64_t split_stride, float* out);
    size_t (*attend_scratch)(int heads_per_kv, int head_dim);  // bytes
    int (*attend_tile_rows)(int heads_per_kv, int head_dim);
    int64_t (*argmax)(const float* x, int64_t count);  // lowest index among equals; -1 if any is NaN
    void (*latent_write)(const AttendLayer&, const AttendBatch&, const LatentRows&, int row, int row_end);
    void (*scores)(const float* x, int count, int sigmoid, float* out);  // of a router's outputs; out: whole vectors
    void (*weighted_sum)(const float* x, int cols, const int32_t* rows, const float* weights, int count, float* out);
    void (*attend_entries)(const EntriesTask&, float* scratch);  // see entries.cpp
    void (*entry_scores)(const float* q, const float* weights, int heads, int dim, const float* keys, int from, int to, float* out);
    const EncodeKernels* encode;
};

constexpr int kMaxHeadDim = 256;    // of coded caches and of the heads of K and V
constexpr int kMaxEntryDim = 1088;  // of a latent with its rotated part

static inline int padded_dim(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }
