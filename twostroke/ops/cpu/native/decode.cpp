#include "decode.h"

#include <algorithm>

#include "linear.h"

namespace {

struct Rows {
    int64_t *tokens, *positions, *all;
    int32_t *starts, *contexts;
    int requests;
};

// Rows of one request stand together: the newest token, then its guesses.
bool continues(const DecodeRow& row, const DecodeRow& before) {
    return row.request == before.request && row.position == before.position + 1;
}

Rows lay_out(Context& c, const DecodeRow* given, int rows) {
    int64_t* wide = c.decode_rows.get<int64_t>(3 * (size_t)rows);
    int32_t* narrow = c.decode_lengths.get<int32_t>(2 * (size_t)rows + 1);
    Rows made{wide, wide + rows, wide + 2 * rows, narrow, narrow + rows + 1, 0};
    for (int r = 0; r < rows; ++r) {
        made.tokens[r] = given[r].token, made.positions[r] = given[r].position, made.all[r] = r;
        if (r == 0 || !continues(given[r], given[r - 1])) made.starts[made.requests++] = r;
        made.contexts[made.requests - 1] = (int32_t)given[r].position + 1;
    }
    made.starts[made.requests] = rows;
    return made;
}

bool has_rows(const DecodeGroup& group, const DecodeRow* given, int rows) {
    return std::all_of(given, given + rows, [&](const DecodeRow& row) {
        return row.request >= 0 && row.request < group.requests && row.position >= 0 && row.position / group.span < group.columns;
    });
}

int columns_of(const DecodeGroup& group, const DecodeRow* given, int rows) {
    int64_t last = 0;
    for (int r = 0; r < rows; ++r) last = std::max(last, given[r].position);
    return (int)(last / group.span) + 1;
}

// The requests' block tables, one after the other, and the slot that each row's entry is written to.
AttendBatch batch_of(const DecodeGroup& group, const DecodeRow* given, int rows, int columns, const Rows& laid, int64_t* slots,
                     int32_t* tables) {
    for (int r = 0; r < rows; ++r) {
        const int64_t position = given[r].position;
        slots[r] = (int64_t)group.tables[given[r].request * group.stride + position / group.span] * group.span + position % group.span;
    }
    for (int i = 0; i < laid.requests; ++i) {
        const int32_t* blocks = group.tables + given[laid.starts[i]].request * group.stride;
        std::copy(blocks, blocks + columns, tables + (int64_t)i * columns);
    }
    return {rows, laid.requests, laid.positions, slots, tables, columns, laid.starts, laid.contexts};
}

}  // namespace

bool decode_step(Context& c, const DecodeCall& call, const DecodeRow* given, int rows, float* logits) {
    const int groups = call.group_count;
    std::vector<int> columns;
    size_t cells = 0;
    for (int g = 0; g < groups; ++g) {
        if (!has_rows(call.groups[g], given, rows)) return false;
        columns.push_back(columns_of(call.groups[g], given, rows));
        cells += (size_t)columns.back() * (size_t)rows;
    }
    const Rows laid = lay_out(c, given, rows);
    int64_t* slots = c.decode_slots.get<int64_t>((size_t)groups * (size_t)rows);
    int32_t* tables = c.decode_tables.get<int32_t>(cells);
    std::vector<AttendBatch> batches;
    for (int g = 0; g < groups; ++g, slots += rows) {
        batches.push_back(batch_of(call.groups[g], given, rows, columns[(size_t)g], laid, slots, tables));
        tables += (int64_t)columns[(size_t)g] * rows;
    }
    std::vector<const AttendBatch*> places;
    for (const AttendBatch& batch : batches) places.push_back(&batch);

    const size_t values = (size_t)rows * (size_t)call.hidden;
    float *x = c.decode_x.get<float>(2 * values), *out = x + values;
    if (!embed(c, *call.table, laid.tokens, rows, call.scale, x)) return false;
    run_layers(c, {call.layers, call.layer_count, places.data(), x, rows, call.hidden, laid.all, rows, out});
    linear(c, *call.head, {out, call.hidden, rows, RmsNorm, call.norm.weight, call.norm.eps, logits, call.head->rows, 0});
    return true;
}
