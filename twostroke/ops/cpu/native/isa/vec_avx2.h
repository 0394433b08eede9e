// Sixteen lanes in two AVX2 registers (with FMA and F16C). vpmaddubsw multiplies unsigned by signed bytes and adds
// pairs into 16 bits: small codes (below 32) go in as they are, signed ones as |code| times the input with its sign.
#pragma once
#include <immintrin.h>
#include "../half.h"

namespace {

constexpr int kRowsInt = 2;
constexpr int kRowsDirect = 2;
constexpr int kDirectRows = 4;
constexpr int kRowsFloat = 6;
constexpr int kRowsAttend = 4;
constexpr int kBlocksScored = 1;
constexpr int kChunks = 1;
constexpr int kChunksFew = 2;
constexpr int kLinesCoded = 4;
constexpr int kScoreSums = 4;
constexpr int kWeighSums = 4;
constexpr bool kWideScales = false;
constexpr int kAheadNibbles = 6144;
constexpr int kAheadBytes = 6144;
constexpr bool kByLane = false;
constexpr bool kSecondsByQuad = false;
constexpr bool kUnsignedCodes = false;
constexpr int32_t kDotStart = 0;

struct F { __m256 a, b; };  // lanes 0-7 and 8-15
struct I { __m256i a, b; };
struct W { __m256i a, b; };
struct B { __m128i v; };
struct A { const int8_t* p; };
struct X { const float* p; };

TS_INLINE __m256i lane_mask(int n) {  // the first n of 8 lanes
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

TS_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TS_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
TS_INLINE F load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
TS_INLINE __m256 widen_bfloat(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
TS_INLINE F load_bfloat(const uint16_t* p) { return {widen_bfloat(p), widen_bfloat(p + 8)}; }
TS_INLINE B load_bytes(const void* p) { return {_mm_loadu_si128((const __m128i*)p)}; }
TS_INLINE void store_bytes(void* p, B b) { _mm_storeu_si128((__m128i*)p, b.v); }
TS_INLINE B load_nibbles(const uint8_t* p) {
    const __m128i both = _mm_loadl_epi64((const __m128i*)p), mask = _mm_set1_epi8(15);
    const __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(both, mask), _mm_and_si128(_mm_srli_epi16(both, 4), mask));
    return {_mm_sub_epi8(codes, _mm_set1_epi8(8))};
}
TS_INLINE F float_bytes(B b) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b.v)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(b.v, b.v)))};
}
TS_INLINE F load_int8(const int8_t* p) { return float_bytes(load_bytes(p)); }
TS_INLINE F load_uint8(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
TS_INLINE void store_half(uint16_t* p, F x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
TS_INLINE F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TS_INLINE F addend(const float (&c)[4]) { return splat(c[0]); }
TS_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
TS_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
TS_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
TS_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
TS_INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
TS_INLINE F vmax(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
TS_INLINE F vmin(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
template <int H> TS_INLINE F partners(F x) {
    if (H == 1) return {_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)};
    if (H == 2) return {_mm256_permute_ps(x.a, 0x4e), _mm256_permute_ps(x.b, 0x4e)};
    if (H == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    return {x.b, x.a};
}
TS_INLINE F first(F x, int n) {
    return {_mm256_and_ps(x.a, _mm256_castsi256_ps(lane_mask(n))),
            _mm256_and_ps(x.b, _mm256_castsi256_ps(lane_mask(n - 8)))};
}
TS_INLINE F between(F x, int low, int high, F other) {
    const __m256i ma = _mm256_andnot_si256(lane_mask(low), lane_mask(high));
    const __m256i mb = _mm256_andnot_si256(lane_mask(low - 8), lane_mask(high - 8));
    return {_mm256_blendv_ps(other.a, x.a, _mm256_castsi256_ps(ma)),
            _mm256_blendv_ps(other.b, x.b, _mm256_castsi256_ps(mb))};
}
TS_INLINE F load_first(const float* p, int n) {
    const __m256 a = _mm256_maskload_ps(p, lane_mask(n));
    return {a, n > 8 ? _mm256_maskload_ps(p + 8, lane_mask(n - 8)) : _mm256_setzero_ps()};
}
TS_INLINE void store_first(float* p, F x, int n) {
    _mm256_maskstore_ps(p, lane_mask(n), x.a);
    if (n > 8) _mm256_maskstore_ps(p + 8, lane_mask(n - 8), x.b);
}

TS_INLINE __m128 fold_to_four(F x) {
    const __m256 e = _mm256_add_ps(x.a, x.b);
    return _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
}
TS_INLINE float sum(F x) {
    const __m128 q = fold_to_four(x);
    const __m128 n = _mm_hadd_ps(q, q);
    return _mm_cvtss_f32(_mm_add_ss(n, _mm_movehdup_ps(n)));
}
TS_INLINE float peak(F x) {
    const __m256 e = _mm256_max_ps(x.a, x.b);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
TS_INLINE __m128 sums_of_four(const F* r) {
    const __m128 low = _mm_hadd_ps(fold_to_four(r[0]), fold_to_four(r[1]));
    const __m128 high = _mm_hadd_ps(fold_to_four(r[2]), fold_to_four(r[3]));
    return _mm_hadd_ps(low, high);
}
TS_INLINE F sums(const F* r) {
    return {_mm256_set_m128(sums_of_four(r + 4), sums_of_four(r)),
            _mm256_set_m128(sums_of_four(r + 12), sums_of_four(r + 8))};
}

TS_INLINE __m128 peak_to_four(F x) {
    const __m256 e = _mm256_max_ps(x.a, x.b);
    return _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
}
TS_INLINE __m128 peak_neighbours(__m128 a, __m128 b) { return _mm_max_ps(_mm_shuffle_ps(a, b, 0x88), _mm_shuffle_ps(a, b, 0xdd)); }
TS_INLINE __m128 peaks_of_four(const F* r) {
    return peak_neighbours(peak_neighbours(peak_to_four(r[0]), peak_to_four(r[1])), peak_neighbours(peak_to_four(r[2]), peak_to_four(r[3])));
}
TS_INLINE F peaks(const F* r) {
    return {_mm256_set_m128(peaks_of_four(r + 4), peaks_of_four(r)), _mm256_set_m128(peaks_of_four(r + 12), peaks_of_four(r + 8))};
}

TS_INLINE void transpose8(__m256* r) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 4) {
        const __m256 a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
        const __m256 c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = _mm256_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
        t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
        t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
}
// rows[i] lane j <-> rows[j] lane i
TS_INLINE void transpose(F* rows) {
    __m256 quarter[4][8];  // rows 0-7 and 8-15, lanes 0-7 and 8-15
    for (int i = 0; i < 8; ++i) {
        quarter[0][i] = rows[i].a, quarter[1][i] = rows[i].b;
        quarter[2][i] = rows[i + 8].a, quarter[3][i] = rows[i + 8].b;
    }
    for (int q = 0; q < 4; ++q) transpose8(quarter[q]);
    for (int i = 0; i < 8; ++i) {
        rows[i] = {quarter[0][i], quarter[2][i]};
        rows[i + 8] = {quarter[1][i], quarter[3][i]};
    }
}

TS_INLINE I isplat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
TS_INLINE I bits_of(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
TS_INLINE F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
TS_INLINE I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
TS_INLINE I iand(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
TS_INLINE I imax(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
TS_INLINE I shift_left_23(I x) { return {_mm256_slli_epi32(x.a, 23), _mm256_slli_epi32(x.b, 23)}; }
TS_INLINE int32_t isum(I x) {
    const __m256i e = _mm256_add_epi32(x.a, x.b);
    __m128i q = _mm_add_epi32(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1));
    q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
TS_INLINE int32_t ipeak(I x) {
    const __m256i e = _mm256_max_epi32(x.a, x.b);
    __m128i q = _mm_max_epi32(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1));
    q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
TS_INLINE I round_even(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
TS_INLINE void store_low_bytes(int8_t* p, I x) {
    const __m256i mask = _mm256_set1_epi32(255);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
TS_INLINE void store_fourth_bytes(uint8_t* p, const int8_t* codes) {
    for (int i = 0; i < 16; ++i) p[4 * i] = (uint8_t)codes[i];
}
TS_INLINE void store_int8(int8_t* p, I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i*)p, bytes);
}

TS_INLINE W load_codes(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
TS_INLINE void split_nibbles(const uint8_t* p, W& low, W& high) {
    const W both = load_codes(p);
    const __m256i mask = _mm256_set1_epi8(15);
    low = {_mm256_and_si256(both.a, mask), _mm256_and_si256(both.b, mask)};
    high = {_mm256_and_si256(_mm256_srli_epi16(both.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(both.b, 4), mask)};
}
TS_INLINE W looked_up(const int8_t* table, W w) {  // of 16 bytes
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(both, w.a), _mm256_shuffle_epi8(both, w.b)};
}
TS_INLINE void store_codes(uint8_t* p, W w) {
    _mm256_storeu_si256((__m256i*)p, w.a);
    _mm256_storeu_si256((__m256i*)(p + 32), w.b);
}
TS_INLINE W interleave(B a, B b, B c, B d) {
    const __m128i ab = _mm_unpacklo_epi8(a.v, b.v), cd = _mm_unpacklo_epi8(c.v, d.v);
    const __m128i ba = _mm_unpackhi_epi8(a.v, b.v), dc = _mm_unpackhi_epi8(c.v, d.v);
    const __m256i low = _mm256_set_m128i(_mm_unpackhi_epi16(ab, cd), _mm_unpacklo_epi16(ab, cd));
    const __m256i high = _mm256_set_m128i(_mm_unpackhi_epi16(ba, dc), _mm_unpacklo_epi16(ba, dc));
    return {low, high};
}
TS_INLINE W to_unsigned(W w) { return w; }
TS_INLINE A load_inputs(const int8_t* p) { return {p}; }
template <bool Small> TS_INLINE __m256i dot_half(__m256i acc, __m256i w, __m256i q) {
    const __m256i pairs = Small ? _mm256_maddubs_epi16(w, q)
                                : _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
template <int Quad, bool Small> TS_INLINE I dot4(I acc, W w, A a) {
    int32_t four;
    memcpy(&four, a.p + 4 * Quad, 4);
    const __m256i q = _mm256_set1_epi32(four);
    return {dot_half<Small>(acc.a, w.a, q), dot_half<Small>(acc.b, w.b, q)};
}
template <int Quad> TS_INLINE I dot4_keys(I acc, W w, A a) { return dot4<Quad, false>(acc, w, a); }
// Weights are 0 to 127 and values within ±127: pairs of products fit 16 bits.
template <int Quad> TS_INLINE I dot4_weights(I acc, W w, A a) {
    int32_t four;
    memcpy(&four, a.p + 4 * Quad, 4);
    const __m256i p = _mm256_set1_epi32(four);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(p, w.a), _mm256_set1_epi16(1))),
            _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(p, w.b), _mm256_set1_epi16(1)))};
}
TS_INLINE F to_float_dot(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
TS_INLINE X load_x4(const float* p) { return {p}; }
template <int J> TS_INLINE F mul_lane(F w, X x) { return mul(w, splat(x.p[J])); }
template <int J> TS_INLINE F fma_lane(F w, X x, F acc) { return fma(w, splat(x.p[J]), acc); }

}  // namespace
