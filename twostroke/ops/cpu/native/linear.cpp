#include "linear.h"

#include <sys/mman.h>

#include <algorithm>

#include "pack.h"

constexpr size_t kPage = 2u << 20;    // a large page
constexpr size_t kArena = 64u << 20;  // reserved at once, touched as it is filled

Arena::Arena(size_t bytes) : mapped_bytes_((bytes + kPage - 1) / kPage * kPage + kPage) {
    mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    next_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(mapped_) + kPage - 1) / kPage * kPage);
    end_ = static_cast<uint8_t*>(mapped_) + mapped_bytes_;
#ifdef MADV_HUGEPAGE
    madvise(next_, end_ - next_, MADV_HUGEPAGE);
#endif
}

Arena::~Arena() { munmap(mapped_, mapped_bytes_); }

uint8_t* Arena::take(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (bytes > (size_t)(end_ - next_)) return nullptr;
    uint8_t* taken = next_;
    next_ += bytes;
    return taken;
}

namespace {

constexpr int64_t kAlone = 4096;  // elements below which waking the others costs more than it saves
constexpr int kRowsApart = 192;    // rows of a task when panels alone do not feed all threads

int chunks_of(int total, int size) { return (total + size - 1) / size; }

// Memory for a whole weight, from the arena that has room or a new one.
uint8_t* take_memory(Context& c, Weight& weight, size_t bytes) {
    uint8_t* memory = c.arena ? c.arena->take(bytes) : nullptr;
    if (!memory) {
        c.arena = std::make_shared<Arena>(std::max(bytes, kArena));
        memory = c.arena->take(bytes);
    }
    weight.arena = c.arena;
    return memory;
}

void run_prologue(Context& c, const PrologueArgs& args) {
    const int rows = args.rows;
    if (rows == 1 || (int64_t)rows * args.cols <= kAlone) return c.kernels.prologue(args, 0, rows);
    const int size = std::max(1, rows / (4 * c.pool.threads()));
    auto body = [&](int i, int) { c.kernels.prologue(args, i * size, std::min(rows, (i + 1) * size)); };
    c.pool.each(chunks_of(rows, size), body);
}

// Threads share tiles of rows, or the groups of the only one.
void run_prologue_tiles(Context& c, const PrologueArgs& args) {
    const int rows = args.rows, groups = args.cols / kGroup, tiles = chunks_of(rows, kTileRows);
    const int cuts = std::min(groups, std::max(1, 2 * c.pool.threads() / tiles));
    auto body = [&](int i, int) {
        const int row = i / cuts * kTileRows, cut = i % cuts;
        c.kernels.prologue_tile(args, row, std::min(rows, row + kTileRows), groups * cut / cuts, groups * (cut + 1) / cuts);
    };
    c.pool.each(tiles * cuts, body);
}

// A task multiplies rows [row, row_end) with panels [panel, panel_end) counted over all parts.
void multiply(Context& c, const Weight& weight, const MatmulArgs& base, int panel, int panel_end, int row, int row_end, int worker) {
    int first = 0;
    for (const Part& part : weight.parts) {
        const int from = std::max(panel - first, 0), to = std::min(panel_end - first, part.panels);
        first += part.panels;
        if (from >= to) continue;
        MatmulArgs args = base;
        args.kind = part.kind;
        args.panels = part.data;
        args.panel_stride = part.panel_stride;
        args.outputs = part.rows;
        args.acts = base.acts ? base.acts + (int64_t)row * (args.cols / kGroup) : nullptr;
        args.tiles = base.tiles ? base.tiles + row / kTileRows * base.tile_stride : nullptr;
        args.x = base.x ? base.x + row * base.x_stride : nullptr;
        args.rows = row_end - row;
        args.out = base.out + row * base.out_stride + part.output;
        args.bias = base.bias ? base.bias + part.output : nullptr;
        c.kernels.matmul(args, from, to, c.scratch_of(worker));
    }
}

// Bytes of the codes of `rows` inputs.
size_t input_bytes(const Context& c, const Weight& weight, int rows, int before) {
    if (!weight.coded) return 0;
    const size_t groups = (size_t)weight.cols / kGroup, codes = has_seconds(before) ? 2 : 1;
    if (c.kernels.tiled_rows && rows >= c.kernels.tiled_rows) return (size_t)chunks_of(rows, kTileRows) * codes * groups * sizeof(ActTile);
    return codes * (size_t)rows * groups * sizeof(Act);
}

size_t scratch_bytes(const Context& c, const Weight& weight) {
    size_t bytes = 0;
    for (const Part& part : weight.parts) bytes = std::max(bytes, c.kernels.matmul_scratch(part.kind, weight.cols));
    return bytes;
}

// What the prologue and the product of these rows take. acts: input_bytes; plain: (rows, cols), where floats are multiplied
// and something comes before.
ReadyProduct make_ready(const Context& c, const Weight& weight, const LinearArgs& a, uint8_t* acts, float* plain) {
    PrologueArgs before{a.before, a.x, a.x_stride, a.rows, weight.cols, a.norm, a.eps, nullptr, nullptr, 0, nullptr, a.index};
    MatmulArgs base{};
    base.cols = weight.cols;
    base.x = a.x;
    base.x_stride = a.x_stride;
    base.rows = a.rows;
    base.out = a.out;
    base.out_stride = a.out_stride;
    base.bias = weight.bias.empty() ? nullptr : weight.bias.data();
    base.add = a.add;
    const int groups = weight.cols / kGroup, codes = has_seconds(a.before) ? 2 : 1;
    if (weight.coded && c.kernels.tiled_rows && a.rows >= c.kernels.tiled_rows) {
        base.extra = groups, base.tile_stride = codes * groups;
        base.tiles = before.tiles = reinterpret_cast<ActTile*>(acts);
    } else if (weight.coded) {
        base.extra = before.extra = (int64_t)a.rows * groups;
        base.acts = before.acts = reinterpret_cast<Act*>(acts);
    }
    if (weight.floats && a.before != Nothing) {
        base.x = before.plain = plain;
        base.x_stride = weight.cols;
    }
    return {before, base};
}

size_t ordered_size(const Weight& weight, int rows, int before) {
    return weight.order.empty() ? 0 : ((size_t)rows * (is_gate(before) ? 2 : 1) + 1) * (size_t)weight.cols;
}

// The same input with its columns in the order of the weight's. to: ordered_size floats.
LinearArgs in_order(Context& c, const Weight& weight, const LinearArgs& a, float* to) {
    if (weight.order.empty()) return a;
    const int cols = weight.cols, halves = is_gate(a.before) ? 2 : 1;
    const int32_t* const order = weight.order.data();
    auto row = [&](int r, int) {
        const float* const from = a.x + (a.index ? a.index[r] : r) * a.x_stride;
        float* const out = to + (int64_t)r * halves * cols;
        for (int h = 0; h < halves; ++h)
            for (int k = 0; k < cols; ++k) out[h * cols + k] = from[h * cols + order[k]];
    };
    if ((int64_t)a.rows * cols <= kAlone) for (int r = 0; r < a.rows; ++r) row(r, 0);
    else c.pool.each(a.rows, row);
    LinearArgs moved = a;
    moved.x = to, moved.x_stride = (int64_t)halves * cols, moved.index = nullptr;
    if (a.norm) {
        float* const norm = to + (int64_t)a.rows * halves * cols;
        for (int k = 0; k < cols; ++k) norm[k] = a.norm[order[k]];
        moved.norm = norm;
    }
    return moved;
}

// How long a group's products take, in panels of one row: up to a few rows, reading the panel does.
int64_t work_of(const RowGroup& group) { return (int64_t)group.weight->panels * std::max(group.rows, 8); }

// The prologues of c.ready; with `same` the first one serves all.
void prepare_groups(Context& c, const std::vector<RowGroup>& groups, bool same) {
    c.product_tasks.clear();
    int64_t elements = 0;
    for (int i = 0; i < (same ? 1 : (int)groups.size()); ++i) {
        elements += (int64_t)groups[i].rows * groups[i].weight->cols;
        for (int row = 0; row < groups[i].rows; row += kTileRows)
            c.product_tasks.push_back({i, row, std::min(groups[i].rows, row + kTileRows)});
    }
    auto body = [&](int i, int) {
        const ProductTask& task = c.product_tasks[i];
        const PrologueArgs& before = c.ready[task.group].before;
        if (before.acts || before.plain) c.kernels.prologue(before, task.from, task.to);
        if (before.tiles) c.kernels.prologue_tile(before, task.from, task.to, 0, before.cols / kGroup);
    };
    if (elements > kAlone) return c.pool.each((int)c.product_tasks.size(), body);
    for (int i = 0; i < (int)c.product_tasks.size(); ++i) body(i, 0);
}

}  // namespace

Weight* pack_weight(Context& c, int parts, const int32_t* formats, const int32_t* rows, const uint8_t* const* data, int cols,
                    const float* bias) {
    auto weight = std::make_unique<Weight>();
    weight->cols = cols;
    for (int i = 0; i < parts; ++i) {
        Part part{kind_of(formats[i]), rows[i], chunks_of(rows[i], kLanes), weight->rows, nullptr, 0};
        part.panel_stride = panel_bytes(part.kind, cols, c.kernels.wide_scales);
        (is_float(part.kind) ? weight->floats : weight->coded) = true;
        weight->rows += part.rows;
        weight->panels += part.panels;
        weight->bytes += part.panels * part.panel_stride;
        weight->parts.push_back(part);
    }
    uint8_t* const memory = take_memory(c, *weight, weight->bytes + 64 * (size_t)parts);
    if (bias) weight->bias.assign(bias, bias + weight->rows);
    size_t offset = 0;
    for (int i = 0; i < parts; ++i) {
        Part& part = weight->parts[i];
        part.data = memory + offset;
        offset += (part.panels * part.panel_stride + 63) / 64 * 64;
        const int size = std::max(1, part.panels / (8 * c.pool.threads()));
        auto body = [&](int t, int) {
            const int end = std::min(part.panels, (t + 1) * size);
            pack_panels(formats[i], c.kernels.wide_scales, data[i], part.rows, cols, t * size, end, part.data);
        };
        c.pool.each(chunks_of(part.panels, size), body);
    }
    return weight.release();
}

void linear(Context& c, const Weight& weight, const LinearArgs& given) {
    const LinearArgs a = in_order(c, weight, given, c.ordered.get<float>(ordered_size(weight, given.rows, given.before)));
    const bool plain = weight.floats && a.before != Nothing;
    const ReadyProduct ready = make_ready(c, weight, a, c.acts.get<uint8_t>(input_bytes(c, weight, a.rows, a.before)),
                                          plain ? c.plain.get<float>((size_t)a.rows * weight.cols) : nullptr);
    const PrologueArgs& before = ready.before;
    const MatmulArgs& base = ready.product;
    if (before.acts || before.plain) run_prologue(c, before);
    if (before.tiles) run_prologue_tiles(c, before);
    c.reserve_scratch(scratch_bytes(c, weight));
    const int threads = c.pool.threads();
    const int apart = a.rows >= 2 * kRowsApart && weight.panels < 8 * threads ? kRowsApart : a.rows;
    const bool streams = a.rows <= c.kernels.direct_rows;  // memory sets the pace: every thread reads a stretch of its own
    const int chunks = std::min(weight.panels, (base.tiles ? 4 : streams ? 12 : 24) * threads);  // small tasks end together; tiles want long runs
    auto body = [&](int i, int worker) {
        const int row = i / chunks * apart, chunk = i % chunks;
        const int panel = (int)((int64_t)weight.panels * chunk / chunks), end = (int)((int64_t)weight.panels * (chunk + 1) / chunks);
        multiply(c, weight, base, panel, end, row, std::min(a.rows, row + apart), worker);
    };
    c.pool.each(chunks * chunks_of(a.rows, apart), body, !base.tiles && apart == a.rows);
}

void linear_groups(Context& c, const std::vector<RowGroup>& groups, const LinearArgs& a, bool same) {
    const int cols = groups[0].weight->cols, threads = c.pool.threads();
    size_t bytes = 0, scratch = 0, ordered = 0;
    bool plain = false, streams = true;
    for (const RowGroup& g : groups) same &= g.weight->order.empty();
    int64_t work = 0;
    for (const RowGroup& g : groups) {
        const size_t own = input_bytes(c, *g.weight, g.rows, a.before);
        bytes = same ? std::max(bytes, own) : bytes + own;
        scratch = std::max(scratch, scratch_bytes(c, *g.weight));
        plain |= g.weight->floats && a.before != Nothing;
        ordered += ordered_size(*g.weight, g.rows, a.before);
        streams &= g.rows <= c.kernels.direct_rows;
        work += work_of(g);
    }
    uint8_t* acts = c.acts.get<uint8_t>(bytes);
    float* moved = c.ordered.get<float>(ordered);
    float* const floats = plain ? c.plain.get<float>((size_t)a.rows * (size_t)cols) : nullptr;
    c.reserve_scratch(scratch);
    c.ready.clear();
    for (const RowGroup& g : groups) {
        const int first = same ? 0 : g.first;
        const LinearArgs own{a.index ? a.x : a.x + first * a.x_stride, a.x_stride, g.rows, a.before, a.norm, a.eps,
                             a.out + g.first * a.out_stride, a.out_stride, a.add, a.index ? a.index + first : nullptr};
        c.ready.push_back(make_ready(c, *g.weight, in_order(c, *g.weight, own, moved), acts,
                                     floats ? floats + (int64_t)first * cols : nullptr));
        moved += ordered_size(*g.weight, g.rows, a.before);
        if (!same) acts += input_bytes(c, *g.weight, g.rows, a.before);
    }
    prepare_groups(c, groups, same);
    c.product_tasks.clear();
    for (int i = 0; i < (int)groups.size(); ++i) {
        const int panels = groups[i].weight->panels;
        const int cuts = (int)std::min<int64_t>(panels, std::max<int64_t>(1, work_of(groups[i]) * (streams ? 12 : 16) * threads / work));
        for (int k = 0; k < cuts; ++k)
            c.product_tasks.push_back({i, (int)((int64_t)panels * k / cuts), (int)((int64_t)panels * (k + 1) / cuts)});
    }
    auto body = [&](int i, int worker) {
        const ProductTask& task = c.product_tasks[i];
        const RowGroup& group = groups[task.group];
        multiply(c, *group.weight, c.ready[task.group].product, task.from, task.to, 0, group.rows, worker);
    };
    c.pool.each((int)c.product_tasks.size(), body, streams);
}

void norm_rows(Context& c, const PrologueArgs& args) { run_prologue(c, args); }

bool embed(Context& c, const Weight& table, const int64_t* tokens, int count, float scale, float* out) {
    c.pool.rouse();  // a step begins: its layers are the next call
    for (int i = 0; i < count; ++i)
        if (tokens[i] < 0 || tokens[i] >= table.rows) return false;
    auto body = [&](int i, int) {
        const Part* part = &table.parts[0];
        while (tokens[i] >= part->output + part->rows) ++part;
        float* row = out + (int64_t)i * table.cols;
        unpack_row(part->kind, c.kernels.wide_scales, part->data, (int)tokens[i] - part->output, table.cols, row);
        if (!table.order.empty()) {
            const std::vector<float> stored(row, row + table.cols);
            for (int k = 0; k < table.cols; ++k) row[table.order[k]] = stored[k];
        }
        if (scale != 1.f)
            for (int k = 0; k < table.cols; ++k) row[k] *= scale;
    };
    if (count <= 4)
        for (int i = 0; i < count; ++i) body(i, 0);
    else
        c.pool.each(count, body);
    return true;
}
