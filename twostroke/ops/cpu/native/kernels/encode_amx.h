// Products for encoders on AMX tiles of bfloat16. A float16 weight is the sum of two bfloat16 numbers exactly; an input is to
// about 16 bits. Of the four products the smallest is left out. The sums of a row are made in one order whatever the rows.
#pragma once
#include <immintrin.h>

namespace {

constexpr int kEncodeAhead = 4096;  // bytes of weights that are asked for before they are needed

TS_INLINE __m512i upper_halves(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi32((int32_t)0xffff0000)); }

// 16 floats to the nearest bfloat16, as the upper halves of 32 bits.
TS_INLINE __m512i near_bfloat(__m512 v) { return upper_halves(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(0x8000))); }

// Rows of tile `tile` as (block of 32 inputs, high and low, 16 rows, 32) bfloat16. Rows past the last are 0.
static void encode_split(const float* x, int rows, int cols, uint16_t* out, int tile) {
    const int blocks = cols / kEncodeInputs;
    uint16_t* const here = out + (size_t)tile * (size_t)blocks * 2 * kEncodeTile;
    for (int r = 0; r < kEncodeRows; ++r) {
        const int row = tile * kEncodeRows + r;
        for (int b = 0; b < blocks; ++b) {
            uint16_t* const high = here + (size_t)b * 2 * kEncodeTile + r * kEncodeInputs;
            for (int half = 0; half < 2; ++half) {
                __m512i top = _mm512_setzero_si512(), rest = top;
                if (row < rows) {
                    const __m512 v = _mm512_loadu_ps(x + (int64_t)row * cols + b * kEncodeInputs + 16 * half);
                    top = near_bfloat(v);
                    rest = near_bfloat(_mm512_sub_ps(v, _mm512_castsi512_ps(top)));
                }
                _mm256_storeu_si256((__m256i*)(high + 16 * half), _mm512_cvtepi32_epi16(_mm512_srli_epi32(top, 16)));
                _mm256_storeu_si256((__m256i*)(high + kEncodeTile + 16 * half), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rest, 16)));
            }
        }
    }
}

// A panel's weights as tiles: (block, high and low, 16 pairs, 16 outputs, 2) bfloat16.
TS_INLINE void expand_panel(const uint16_t* from, int blocks, uint16_t* to) {
    for (int b = 0; b < blocks; ++b, to += 2 * kEncodeTile)
        for (int pair = 0; pair < 16; ++pair, from += 32) {
            _mm_prefetch((const char*)from + kEncodeAhead, _MM_HINT_T0);
            const __m512i even = _mm512_castps_si512(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)));
            const __m512i odd = _mm512_castps_si512(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + 16))));
            const __m512i top_even = upper_halves(even), top_odd = upper_halves(odd);
            const __m512i rest_even = _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(even), _mm512_castsi512_ps(top_even)));
            const __m512i rest_odd = _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(odd), _mm512_castsi512_ps(top_odd)));
            _mm512_storeu_si512(to + 32 * pair, _mm512_or_si512(_mm512_srli_epi32(top_even, 16), top_odd));
            _mm512_storeu_si512(to + kEncodeTile + 32 * pair, _mm512_or_si512(_mm512_srli_epi32(rest_even, 16), upper_halves(rest_odd)));
        }
    asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
}

TS_INLINE void finish_tile(const EncodeProduct& a, const float* sums, int row, int panel) {
    const int last = a.rows - row < kEncodeRows ? a.rows - row : kEncodeRows;
    const F bias = a.bias ? load(a.bias + panel * kLanes) : splat(0.f);
    for (int r = 0; r < last; ++r)
        store(a.out + (int64_t)(row + r) * a.outputs + panel * kLanes, activated(add(load(sums + 16 * r), bias), a.activation));
}

// Tiles 0-3: sums. 4, 5: inputs of one or two tiles of rows. 6, 7: weights of one or two panels.
#define TS_PRODUCTS(two_rows, two_panels)                 \
    _tile_dpbf16ps(0, 4, 6);                              \
    if (two_panels) _tile_dpbf16ps(1, 4, 7);              \
    if (two_rows) _tile_dpbf16ps(2, 5, 6);                \
    if (two_rows && two_panels) _tile_dpbf16ps(3, 5, 7)
#define TS_INPUTS(part)                                                             \
    _tile_loadd(4, x + (2 * b + part) * kEncodeTile, 64);                           \
    if (TwoRows) _tile_loadd(5, x + apart + (2 * b + part) * kEncodeTile, 64)
#define TS_WEIGHTS(part)                                                            \
    _tile_loadd(6, w + (2 * b + part) * kEncodeTile, 64);                           \
    if (TwoPanels) _tile_loadd(7, w + apart + (2 * b + part) * kEncodeTile, 64)
template <bool TwoRows, bool TwoPanels>
static void encode_tiles(const EncodeProduct& a, const uint16_t* w, int tile, int panel) {
    const int64_t blocks = a.inputs / kEncodeInputs, apart = 2 * blocks * kEncodeTile;
    const uint16_t* x = a.x + tile * apart;
    alignas(64) float sums[4][16 * kEncodeRows];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t b = 0; b < blocks; ++b) {
        TS_INPUTS(0);
        TS_WEIGHTS(1);
        TS_PRODUCTS(TwoRows, TwoPanels);
        TS_WEIGHTS(0);
        TS_PRODUCTS(TwoRows, TwoPanels);
        TS_INPUTS(1);
        TS_PRODUCTS(TwoRows, TwoPanels);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    asm volatile("" ::: "memory");
    for (int r = 0; r <= TwoRows; ++r)
        for (int p = 0; p <= TwoPanels; ++p) finish_tile(a, sums[2 * r + p], (tile + r) * kEncodeRows, panel + p);
}
#undef TS_WEIGHTS
#undef TS_INPUTS
#undef TS_PRODUCTS

// One tile of rows with up to four panels: their sums do not wait for each other. Tiles 0-3: sums. 4, 5: inputs, high and
// low. 6, 7: weights. The order of additions is that of encode_tiles.
#define TS_PANEL(c, t)                                                                      \
    if (Panels > c) {                                                                       \
        _tile_loadd(t, w + c * apart + (2 * b + 1) * kEncodeTile, 64);                      \
        _tile_dpbf16ps(c, 4, t);                                                            \
    }
#define TS_PANEL_HIGH(c, t)                                                                 \
    if (Panels > c) {                                                                       \
        _tile_loadd(t, w + c * apart + 2 * b * kEncodeTile, 64);                            \
        _tile_dpbf16ps(c, 4, t);                                                            \
        _tile_dpbf16ps(c, 5, t);                                                            \
    }
template <int Panels> static void encode_few(const EncodeProduct& a, const uint16_t* w, int tile, int panel) {
    const int64_t blocks = a.inputs / kEncodeInputs, apart = 2 * blocks * kEncodeTile;
    const uint16_t* x = a.x + tile * apart;
    alignas(64) float sums[4][16 * kEncodeRows];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t b = 0; b < blocks; ++b) {
        _tile_loadd(4, x + 2 * b * kEncodeTile, 64);
        _tile_loadd(5, x + (2 * b + 1) * kEncodeTile, 64);
        TS_PANEL(0, 6)
        TS_PANEL(1, 7)
        TS_PANEL(2, 6)
        TS_PANEL(3, 7)
        TS_PANEL_HIGH(0, 6)
        TS_PANEL_HIGH(1, 7)
        TS_PANEL_HIGH(2, 6)
        TS_PANEL_HIGH(3, 7)
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    asm volatile("" ::: "memory");
    for (int p = 0; p < Panels; ++p) finish_tile(a, sums[p], tile * kEncodeRows, panel + p);
}
#undef TS_PANEL_HIGH
#undef TS_PANEL

// Panels [panel, panel_end): at most two of them, four where there is one tile of rows.
static void encode_multiply(const EncodeProduct& a, int panel, int panel_end, uint8_t* scratch) {
    const int blocks = a.inputs / kEncodeInputs, tiles = (a.rows + kEncodeRows - 1) / kEncodeRows;
    uint16_t* const expanded = (uint16_t*)scratch;
    const bool two = panel_end - panel == 2;
    for (int p = panel; p < panel_end; ++p)
        expand_panel(a.weights + (size_t)p * (size_t)blocks * kEncodeTile, blocks, expanded + (size_t)(p - panel) * (size_t)blocks * 2 * kEncodeTile);
    TileConfig config;
    for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = 16;
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
    if (tiles == 1) {
        switch (panel_end - panel) {
            case 1: encode_few<1>(a, expanded, 0, panel); break;
            case 2: encode_few<2>(a, expanded, 0, panel); break;
            case 3: encode_few<3>(a, expanded, 0, panel); break;
            default: encode_few<4>(a, expanded, 0, panel);
        }
        _tile_release();
        return;
    }
    int tile = 0;
    for (; tile + 2 <= tiles; tile += 2) two ? encode_tiles<true, true>(a, expanded, tile, panel) : encode_tiles<true, false>(a, expanded, tile, panel);
    if (tile < tiles) two ? encode_tiles<false, true>(a, expanded, tile, panel) : encode_tiles<false, false>(a, expanded, tile, panel);
    _tile_release();
}

static size_t encode_scratch(int inputs) { return 4 * sizeof(uint16_t) * 2 * kEncodeTile * (size_t)(inputs / kEncodeInputs); }

static const EncodeKernels kEncodeTiles = {encode_activate, encode_add_norm, encode_attend, nullptr, encode_split, encode_multiply, encode_scratch, kLargestHalf};

}  // namespace
