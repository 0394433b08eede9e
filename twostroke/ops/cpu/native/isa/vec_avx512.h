// Sixteen lanes in one AVX-512 register. vpdpbusd multiplies unsigned by signed bytes, so signed codes are read with
// 128 added and the sum starts at -128 · (sum of the inputs).
#pragma once
#include <immintrin.h>
#include "../half.h"

namespace {

constexpr int kRowsInt = 8;
constexpr int kRowsDirect = 8;
constexpr int kDirectRows = 12;
constexpr int kRowsFloat = 16;
constexpr int kRowsAttend = 6;
constexpr int kBlocksScored = 2;
constexpr int kChunks = 2;
constexpr int kChunksFew = 4;
constexpr int kLinesCoded = 6;
constexpr int kScoreSums = 12;
constexpr int kWeighSums = 24;
constexpr bool kWideScales = false;
constexpr int kAheadNibbles = 6144;
constexpr int kAheadBytes = 6144;
constexpr bool kByLane = false;
constexpr bool kSecondsByQuad = false;
constexpr bool kUnsignedCodes = true;
constexpr int32_t kDotStart = 0;

struct F { __m512 v; };
struct I { __m512i v; };
struct W { __m512i v; };
struct B { __m128i v; };
struct A { const int8_t* p; };
using Quads [[gnu::may_alias]] = int32_t;
struct X { const float* p; };

TS_INLINE __mmask16 lanes(int n) { return (__mmask16)((1u << n) - 1u); }

TS_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
TS_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
TS_INLINE F load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
TS_INLINE F load_bfloat(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
TS_INLINE B load_bytes(const void* p) { return {_mm_loadu_si128((const __m128i*)p)}; }
TS_INLINE void store_bytes(void* p, B b) { _mm_storeu_si128((__m128i*)p, b.v); }
TS_INLINE B load_nibbles(const uint8_t* p) {
    const __m128i both = _mm_loadl_epi64((const __m128i*)p), mask = _mm_set1_epi8(15);
    const __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(both, mask), _mm_and_si128(_mm_srli_epi16(both, 4), mask));
    return {_mm_sub_epi8(codes, _mm_set1_epi8(8))};
}
TS_INLINE F float_bytes(B b) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b.v))}; }
TS_INLINE F load_int8(const int8_t* p) { return float_bytes(load_bytes(p)); }
TS_INLINE F load_uint8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
TS_INLINE void store_half(uint16_t* p, F a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
TS_INLINE F splat(float x) { return {_mm512_set1_ps(x)}; }
TS_INLINE F addend(const float (&c)[4]) { return splat(c[0]); }
TS_INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
TS_INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
TS_INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
TS_INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
TS_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TS_INLINE F vmax(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
TS_INLINE F vmin(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
template <int H> TS_INLINE F partners(F a) {
    if (H == 1) return {_mm512_permute_ps(a.v, 0xb1)};
    if (H == 2) return {_mm512_permute_ps(a.v, 0x4e)};
    return {_mm512_shuffle_f32x4(a.v, a.v, H == 4 ? 0xb1 : 0x4e)};
}
TS_INLINE F first(F a, int n) { return {_mm512_maskz_mov_ps(lanes(n), a.v)}; }
TS_INLINE F between(F a, int low, int high, F other) {
    return {_mm512_mask_mov_ps(other.v, (__mmask16)(lanes(high) & ~lanes(low)), a.v)};
}
TS_INLINE F load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(lanes(n), p)}; }
TS_INLINE void store_first(float* p, F a, int n) { _mm512_mask_storeu_ps(p, lanes(n), a.v); }

TS_INLINE float sum(F a) {
    const __m256 e = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    const __m128 n = _mm_hadd_ps(q, q);
    return _mm_cvtss_f32(_mm_add_ss(n, _mm_movehdup_ps(n)));
}
TS_INLINE float peak(F a) { return _mm512_reduce_max_ps(a.v); }

// Lane t of the result is sum(rows[t]); the same additions, sixteen at a time.
TS_INLINE __m512 fold_quarters(const F* r) {  // rows 0, 4, 8, 12 after r: four lanes left of each
    const __m512 x = r[0].v, y = r[4].v, z = r[8].v, w = r[12].v;
    const __m512 xy = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    const __m512 zw = _mm512_add_ps(_mm512_shuffle_f32x4(z, w, 0x44), _mm512_shuffle_f32x4(z, w, 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(xy, zw, 0x88), _mm512_shuffle_f32x4(xy, zw, 0xdd));
}
TS_INLINE __m512 fold_neighbours(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
TS_INLINE F sums(const F* r) {
    const __m512 low = fold_neighbours(fold_quarters(r), fold_quarters(r + 1));
    const __m512 high = fold_neighbours(fold_quarters(r + 2), fold_quarters(r + 3));
    return {fold_neighbours(low, high)};
}

// Lane t of the result is peak(rows[t]).
TS_INLINE __m512 peak_quarters(const F* r) {
    const __m512 x = r[0].v, y = r[4].v, z = r[8].v, w = r[12].v;
    const __m512 xy = _mm512_max_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    const __m512 zw = _mm512_max_ps(_mm512_shuffle_f32x4(z, w, 0x44), _mm512_shuffle_f32x4(z, w, 0xee));
    return _mm512_max_ps(_mm512_shuffle_f32x4(xy, zw, 0x88), _mm512_shuffle_f32x4(xy, zw, 0xdd));
}
TS_INLINE __m512 peak_neighbours(__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
TS_INLINE F peaks(const F* r) {
    const __m512 low = peak_neighbours(peak_quarters(r), peak_quarters(r + 1));
    const __m512 high = peak_neighbours(peak_quarters(r + 2), peak_quarters(r + 3));
    return {peak_neighbours(low, high)};
}

// rows[i] lane j <-> rows[j] lane i: 4x4 within 128-bit parts, then the parts themselves.
TS_INLINE void transpose(F* rows) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 4) {
        const __m512 a = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v), b = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
        const __m512 c = _mm512_unpacklo_ps(rows[i + 2].v, rows[i + 3].v), d = _mm512_unpackhi_ps(rows[i + 2].v, rows[i + 3].v);
        t[i] = _mm512_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
        t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
        t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512 a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
        const __m512 c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
        rows[i].v = _mm512_shuffle_f32x4(a, c, 0x88);
        rows[i + 8].v = _mm512_shuffle_f32x4(a, c, 0xdd);
        rows[i + 4].v = _mm512_shuffle_f32x4(b, d, 0x88);
        rows[i + 12].v = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
}

TS_INLINE I isplat(int32_t x) { return {_mm512_set1_epi32(x)}; }
TS_INLINE I bits_of(F a) { return {_mm512_castps_si512(a.v)}; }
TS_INLINE F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
TS_INLINE I iadd(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
TS_INLINE I iand(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
TS_INLINE I imax(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
TS_INLINE I shift_left_23(I a) { return {_mm512_slli_epi32(a.v, 23)}; }
TS_INLINE int32_t isum(I a) { return _mm512_reduce_add_epi32(a.v); }
TS_INLINE int32_t ipeak(I a) { return _mm512_reduce_max_epi32(a.v); }
TS_INLINE I round_even(F a) { return {_mm512_cvtps_epi32(a.v)}; }
TS_INLINE void store_low_bytes(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
TS_INLINE void store_fourth_bytes(uint8_t* p, const int8_t* codes) {
    _mm512_mask_storeu_epi8(p, 0x1111111111111111, _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes)));
}
TS_INLINE void store_int8(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a.v)); }

TS_INLINE W load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
TS_INLINE void split_nibbles(const uint8_t* p, W& low, W& high) {
    const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
    low.v = _mm512_and_si512(both, mask);
    high.v = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}
TS_INLINE W looked_up(const int8_t* table, W w) {  // of 16 bytes
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), w.v)};
}
TS_INLINE void store_codes(uint8_t* p, W w) { _mm512_storeu_si512(p, w.v); }
TS_INLINE W interleave(B a, B b, B c, B d) {
    const __m128i ab = _mm_unpacklo_epi8(a.v, b.v), cd = _mm_unpacklo_epi8(c.v, d.v);
    const __m128i ba = _mm_unpackhi_epi8(a.v, b.v), dc = _mm_unpackhi_epi8(c.v, d.v);
    const __m256i low = _mm256_set_m128i(_mm_unpackhi_epi16(ab, cd), _mm_unpacklo_epi16(ab, cd));
    const __m256i high = _mm256_set_m128i(_mm_unpackhi_epi16(ba, dc), _mm_unpacklo_epi16(ba, dc));
    return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
}
TS_INLINE W to_unsigned(W w) { return {_mm512_xor_si512(w.v, _mm512_set1_epi8((char)0x80))}; }
TS_INLINE A load_inputs(const int8_t* p) { return {p}; }
template <int Quad, bool Small> TS_INLINE I dot4(I acc, W w, A a) {
    // By the intrinsic, gcc 12 reads the inputs with an instruction of its own.
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(w.v), "m"(*(const Quads*)(a.p + 4 * Quad)));
    return acc;
}
TS_INLINE __m512i four_inputs(const int8_t* p) { return _mm512_set1_epi32(*(const Quads*)p); }
template <int Quad> TS_INLINE I dot4_keys(I acc, W w, A a) { return {_mm512_dpbusd_epi32(acc.v, w.v, four_inputs(a.p + 4 * Quad))}; }
// Weights are not negative: they take the unsigned side.
template <int Quad> TS_INLINE I dot4_weights(I acc, W w, A a) { return {_mm512_dpbusd_epi32(acc.v, four_inputs(a.p + 4 * Quad), w.v)}; }
TS_INLINE F to_float_dot(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
TS_INLINE X load_x4(const float* p) { return {p}; }
template <int J> TS_INLINE F mul_lane(F w, X x) { return mul(w, splat(x.p[J])); }
template <int J> TS_INLINE F fma_lane(F w, X x, F acc) { return fma(w, splat(x.p[J]), acc); }

}  // namespace
