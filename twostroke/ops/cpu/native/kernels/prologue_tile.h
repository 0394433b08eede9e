// As prologue.h, with the codes of 16 rows side by side (see ActTile).
#pragma once

namespace {

struct TileRow {
    ActTile &first, &second;
    int row;

    TS_MEMBER void write(const Codes& codes, ActTile& out) {
        store_int8(out.q[row], codes.a);
        store_int8(out.q[row] + 16, codes.b);
        out.d[row] = codes.d;
        out.dsum[row] = codes.d * (float)isum(iadd(codes.a, codes.b));
    }
    TS_MEMBER void put_first(const Codes& codes) { write(codes, first); }
    TS_MEMBER void put_second(const Codes& codes, int) {
        write(codes, second);
        first.more = 1;
    }
    TS_MEMBER void put_no_second() { second.d[row] = second.dsum[row] = 0.f; }  // whatever its codes are
};

// Groups [group, group_end) of rows [row, row_end), which one tile holds: threads share groups, not rows, so that none
// of them writes a cache line of another.
static void prologue_tile(const PrologueArgs& args, int row, int row_end, int group, int group_end) {
    const int groups = args.cols / kGroup;
    const bool seconds = has_seconds(args.before);
    ActTile* const tiles = args.tiles + (int64_t)(row / kTileRows) * groups * (seconds ? 2 : 1);
    float scale[kTileRows];
    for (int r = row; r < row_end; ++r)
        scale[r - row] = args.before == RmsNorm ? inverse_rms(row_of(args, r), args.cols, args.eps) : 0.f;
    for (int g = group; g < group_end; ++g) {
        ActTile &first = tiles[g], &second = tiles[seconds ? groups + g : g];
        first.more = 0;
        for (int r = row; r < row_end; ++r) {
            const Prologue source{args, row_of(args, r), scale[r - row]};
            const F a = source.at(g * kGroup, 16), b = source.at(g * kGroup + 16, 16);
            if (seconds) quantize_group<true>(a, b, TileRow{first, second, r - row});
            else quantize_group<false>(a, b, TileRow{first, second, r - row});
        }
        for (int r = row_end - row; r < kTileRows; ++r) first.d[r] = first.dsum[r] = second.d[r] = second.dsum[r] = 0.f;
    }
}

}  // namespace
