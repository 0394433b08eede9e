// Products of several rows on AMX tiles: up to 16 rows x 16 outputs x 32 inputs in one instruction. The integer dots are
// the same, and so is every float operation after them (see matmul_codes.h): the bits equal those of every other path.
#pragma once
#include <immintrin.h>

namespace {

constexpr int kTiledFrom = 9;  // rows: fewer are multiplied faster by vectors
constexpr int kSums = 4;       // tiles of sums that are under way at a time: a power of two

// When a panel serves one tile of rows only, its groups are expanded shortly before their turn. Not just before it: a
// tile load waits until what it reads has left the store buffer.
constexpr int kLead = 4;
constexpr int kSlots = kLead + kSums;
TS_INLINE size_t most_slots(size_t groups) { return groups < kSlots ? (size_t)kSlots : groups; }

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {0};
    uint16_t bytes[16] = {0};
    uint8_t rows[16] = {0};
};

// Tiles 0-3: sums (rows x 16 int32). 4, 5: inputs (rows x 32 bytes). 6, 7: codes (8 quads x 64 bytes). Of half a group
// if halves is 2.
TS_INLINE void configure_tiles(int rows, int halves) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.bytes[i] = (uint16_t)(i == 4 || i == 5 ? kGroup / halves : 64);
        config.rows[i] = (uint8_t)(i < 6 ? rows : 8 / halves);
    }
    asm volatile("" ::"r"(&config) : "memory");  // all of it is read, more than the compiler is told
    _tile_loadconfig(&config);
}

// A group for tiles: its scales (and minimums) as floats, then, where the packed codes are nibbles, signed bytes.
template <class Source> TS_INLINE const uint8_t* expand_group(Source& source, int g, uint8_t* out) {
    F scale[2], low;
    const uint8_t* codes = source.next(g, scale, low);
    fetch<Source>(codes);
    out = store_scales<Source>(scale, low, out);
    if (Source::nibbles)
        TS_UNROLL for (int i = 0; i < 4; ++i) {
            W a, b;
            split_nibbles(codes + 64 * i, a, b);
            if (Source::table) a = looked_up(kFourBitFloats, a), b = looked_up(kFourBitFloats, b);
            if (Source::eight) {
                const __m512i eight = _mm512_set1_epi8(8);
                a.v = _mm512_sub_epi8(a.v, eight), b.v = _mm512_sub_epi8(b.v, eight);
            }
            store_codes(out + 128 * i, a);
            store_codes(out + 128 * i + 64, b);
        }
    asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
    return codes;
}

// The tile's number must be written out: it is part of the instruction.
#define TS_MULTIPLY_TILE(c, a, b)                  \
    _tile_loadd(a, inputs, kGroup);                \
    _tile_loadd(b, codes, 64);                     \
    _tile_zero(c);                                 \
    _tile_dpbssd(c, a, b);                         \
    _tile_stored(c, sums, 64)
TS_INLINE void multiply_tile(int number, const int8_t* inputs, const uint8_t* codes, int32_t* sums) {
    switch (number) {
        case 0: TS_MULTIPLY_TILE(0, 4, 6); return;
        case 1: TS_MULTIPLY_TILE(1, 5, 7); return;
        case 2: TS_MULTIPLY_TILE(2, 4, 6); return;
        default: TS_MULTIPLY_TILE(3, 5, 7);
    }
}
#undef TS_MULTIPLY_TILE

// What rows of one tile are multiplied with, in order: every group (half by half where halves have scales of their own),
// and after it the second codes of that group if one of the rows has any.
struct Step {
    const ActTile* acts;
    int32_t group, half;
};

static int64_t list_steps(const ActTile* acts, int64_t extra, int groups, int halves, Step* out) {
    Step* next = out;
    for (int g = 0; g < groups; ++g)
        for (int pass = 0; pass <= acts[g].more; ++pass)
            for (int half = 0; half < halves; ++half) *next++ = {acts + g + pass * extra, g, half};
    return next - out;
}

// Some panels against one tile of rows, or one panel against some tiles, in order.
struct TileJobs {
    int count;
    const uint8_t* packed;  // the first panel
    int64_t packed_step;    // to the panel of the next job: 0 if there is only one
    const Step* steps;      // of the first job
    const int64_t* counts;
    int64_t steps_step;     // to the steps of the next job: 0 if there is only one tile
    int row, rows, output;  // of the first job; rows: of each
    uint8_t* expanded;
    int slots;              // groups that `expanded` holds at a time: a power of two
};

// Up to MR rows x 16 outputs a job. The products of the coming steps, those of the next job included, are under way while
// the sums of one are scaled.
template <int K, int MR> class TileRun {
public:
    using Source = Reader<K>;

    // expanded: how many groups are already
    TS_MEMBER TileRun(const MatmulArgs& args, const TileJobs& jobs, int64_t expanded)
        : args_(args), jobs_(jobs), groups_(args.cols / kGroup), steps_(jobs.steps), left_(jobs.counts[0]), expanded_(expanded),
          total_(jobs.packed_step ? (int64_t)jobs.count * groups_ : groups_), packed_(jobs.packed), source_{jobs.packed} {}

    TS_MEMBER void run() {
        for (int i = 0; i < kSums - 1; ++i) start();
        const Step* steps = jobs_.steps;
        int64_t base = 0;
        int row = jobs_.row, output = jobs_.output;
        for (int job = 0; job < jobs_.count; ++job) {
            F acc[MR];
            TS_UNROLL for (int r = 0; r < MR; ++r) acc[r] = splat(0.f);
            const int64_t count = jobs_.counts[jobs_.steps_step ? job : 0];
            for (int64_t i = 0; i < count; ++i) {
                start();
                finish(steps[i], base, acc);
            }
            TS_UNROLL for (int r = 0; r < MR; ++r)
                if (r < jobs_.rows) emit(args_, row + r, output, acc[r]);
            steps += jobs_.steps_step;
            if (jobs_.packed_step) base += groups_, output += kLanes;
            else row += kTileRows;
        }
    }

private:
    const MatmulArgs& args_;
    const TileJobs& jobs_;
    int groups_;
    // the job whose products are started
    int job_ = 0;
    const Step* steps_;
    int64_t left_, base_ = 0;
    // groups are counted on from panel to panel
    int64_t expanded_, total_;
    const uint8_t* packed_;
    Source source_;
    int group_ = 0;
    unsigned started_ = 0, finished_ = 0;
    alignas(64) int32_t sums_[kSums][16 * kTileRows];

    TS_MEMBER uint8_t* slot(int64_t g) const { return jobs_.expanded + (size_t)(g & (jobs_.slots - 1)) * Expanded<Source>::group; }

    TS_MEMBER void expand_next() {
        if (group_ == groups_) {
            group_ = 0, packed_ += jobs_.packed_step;
            source_ = Source{packed_};
        }
        expand_group(source_, group_, slot(expanded_));
        ++group_, ++expanded_;
    }

    TS_MEMBER bool next_job() {
        if (job_ + 1 >= jobs_.count) return false;
        ++job_;
        steps_ = jobs_.steps + job_ * jobs_.steps_step;
        left_ = jobs_.counts[jobs_.steps_step ? job_ : 0];
        if (jobs_.packed_step) base_ += groups_;
        return true;
    }

    TS_MEMBER void start() {
        if (left_ == 0 && !next_job()) return;
        --left_;
        const Step step = *steps_++;
        const int64_t g = base_ + step.group;
        while (expanded_ < total_ && expanded_ <= g + kLead) expand_next();
        const uint8_t* codes = Source::nibbles ? slot(g) + Expanded<Source>::scales
                                               : jobs_.packed + job_ * jobs_.packed_step + group_offset(K, (size_t)step.group, false) + group_scales(K, false);
        const unsigned number = started_++ % kSums;
        multiply_tile((int)number, step.acts->q[0] + 16 * step.half, codes + 256 * step.half, sums_[number]);
    }

    TS_MEMBER void finish(const Step& step, int64_t base, F* acc) {
        const int32_t* sums = sums_[finished_++ % kSums];
        const float* const scales_of = (const float*)slot(base + step.group);
        const F scale = load(scales_of + 16 * step.half), low = Source::minimum ? load(scales_of + 16) : F{};
        TS_UNROLL for (int r = 0; r < MR; ++r) {
            const F dot = {_mm512_cvtepi32_ps(_mm512_load_si512(sums + 16 * r))};
            acc[r] = fma(mul(dot, scale), splat(step.acts->d[r]), acc[r]);
            if (Source::minimum) acc[r] = fma(low, splat(step.acts->dsum[r]), acc[r]);
        }
    }
};

template <int K, int MR> static void run_tiles(const MatmulArgs& args, const TileJobs& jobs, int64_t expanded) {
    TileRun<K, MR>(args, jobs, expanded).run();
}

template <int K> static void run_tiles_of(const MatmulArgs& args, const TileJobs& jobs, int64_t expanded) {
    if (jobs.rows <= 4) run_tiles<K, 4>(args, jobs, expanded);
    else if (jobs.rows <= 8) run_tiles<K, 8>(args, jobs, expanded);
    else if (jobs.rows <= 12) run_tiles<K, 12>(args, jobs, expanded);
    else run_tiles<K, 16>(args, jobs, expanded);
}

template <int K> static void tile_matmul(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    using Source = Reader<K>;
    const int groups = args.cols / kGroup;
    const int64_t most = 2 * Source::halves * (int64_t)groups;  // steps of a tile
    Step* const steps = (Step*)(scratch + most_slots((size_t)groups) * Expanded<Source>::group);
    int64_t counts[kRowBlock / kTileRows];
    configure_tiles(args.rows < kTileRows ? args.rows : kTileRows, Source::halves);
    for (int block = 0; block < args.rows; block += kRowBlock) {
        const int rows = args.rows - block < kRowBlock ? args.rows - block : kRowBlock;
        const int whole = rows / kTileRows, rest = rows % kTileRows, tiles = whole + (rest > 0);
        for (int i = 0; i < tiles; ++i)
            counts[i] = list_steps(args.tiles + (block / kTileRows + i) * args.tile_stride, args.extra, groups, Source::halves,
                                   steps + i * most);
        const uint8_t* packed = args.panels + panel * args.panel_stride;
        if (tiles == 1) {
            run_tiles_of<K>(args, {panel_end - panel, packed, (int64_t)args.panel_stride, steps, counts, 0, block, rows, panel * kLanes, scratch, kSlots}, 0);
            continue;
        }
        for (int p = panel; p < panel_end; ++p, packed += args.panel_stride) {
            run_tiles<K, 16>(args, {whole, packed, 0, steps, counts, most, block, kTileRows, p * kLanes, scratch, 1 << 30}, 0);
            if (rest) run_tiles_of<K>(args, {1, packed, 0, steps + whole * most, counts + whole, most, block + whole * kTileRows, rest, p * kLanes, scratch, 1 << 30}, groups);
        }
    }
    _tile_release();
}

static size_t tiles_scratch(int kind, int cols) {
    if (is_float(kind)) return matmul_scratch(kind, cols);
    const size_t groups = (size_t)cols / kGroup;
    return most_slots(groups) * (512 + 256) + kRowBlock / kTileRows * 2 * (kind == Codes8S ? 2 : 1) * groups * sizeof(Step);
}

static void matmul_tiles(const MatmulArgs& args, int panel, int panel_end, uint8_t* scratch) {
    if (args.tiles) switch (args.kind) {
            case Codes8: return tile_matmul<Codes8>(args, panel, panel_end, scratch);
            case Codes4: return tile_matmul<Codes4>(args, panel, panel_end, scratch);
            case Codes4M: return tile_matmul<Codes4M>(args, panel, panel_end, scratch);
            case Codes8M: return tile_matmul<Codes8M>(args, panel, panel_end, scratch);
            case Codes4X: return tile_matmul<Codes4X>(args, panel, panel_end, scratch);
            case Codes4K: return tile_matmul<Codes4K>(args, panel, panel_end, scratch);
            case Codes8K: return tile_matmul<Codes8K>(args, panel, panel_end, scratch);
            case Codes8S: return tile_matmul<Codes8S>(args, panel, panel_end, scratch);
        }
    matmul(args, panel, panel_end, scratch);
}

}  // namespace
