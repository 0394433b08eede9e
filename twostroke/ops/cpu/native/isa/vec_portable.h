// Sixteen lanes in plain C++: the meaning of every operation, and the fallback for any machine.
//
// All kernels are written over 16 logical lanes (one AVX-512 register, two of AVX2, four of NEON). Lane sums use one
// tree and products are fused everywhere, so every instruction set computes the same bits.
#pragma once
#include "../half.h"

// Arrays do not live in registers, so there is nothing to gain from melting everything together.
#undef TS_UNROLL
#undef TS_INLINE
#undef TS_MEMBER
#define TS_UNROLL
#define TS_INLINE static inline
#define TS_MEMBER inline

namespace {

#define TS_LOOP for (int i = 0; i < 16; ++i)

// What a register tile holds.
constexpr int kRowsInt = 2;      // integer products from an expanded panel: rows,
constexpr int kRowsDirect = 2;   // from a packed one, which serves
constexpr int kDirectRows = 4;   // so many rows at most: more are worth expanding it for,
constexpr int kRowsFloat = 4;    // and float products
constexpr int kRowsAttend = 4;   // attention: lines,
constexpr int kBlocksScored = 1; // blocks of 16 keys that are scored together,
constexpr int kChunks = 1;       // chunks of 16 dimensions that are weighed together,
constexpr int kChunksFew = 1;    // and where the lines are few
constexpr int kLinesCoded = 4;   // attention over a coded cache: lines,
constexpr int kScoreSums = 4;    // integer sums of q · k, each of 16 keys, and
constexpr int kWeighSums = 4;    // of weights · v, each of 16 dimensions, that are open at a time
constexpr bool kWideScales = false;  // packed panels hold scales as floats (see layout.h)
constexpr int kAheadNibbles = 6144;  // of a packed panel, what comes so many bytes after codes of 4 bits is asked for,
constexpr int kAheadBytes = 6144;    // or of 8
constexpr bool kByLane = false;  // attention multiplies with one lane of a register (attend_lanes.h)
constexpr bool kSecondsByQuad = false;
constexpr bool kUnsignedCodes = false;  // signed codes are stored as they are in the expanded panel
constexpr int32_t kDotStart = 0;        // an integer sum starts here (see to_float_dot)

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct W { int8_t v[64]; };  // 16 outputs x 4 neighbouring inputs
struct B { int8_t v[16]; };
struct A { const int8_t* p; };  // 16 neighbouring inputs of one row
struct X { const float* p; };   // 4 neighbouring inputs of one row

TS_INLINE F load(const float* p) { F r; TS_LOOP r.v[i] = p[i]; return r; }
TS_INLINE void store(float* p, F a) { TS_LOOP p[i] = a.v[i]; }
TS_INLINE F load_half(const uint16_t* p) { F r; TS_LOOP r.v[i] = half_to_float(p[i]); return r; }
TS_INLINE F load_bfloat(const uint16_t* p) { F r; TS_LOOP r.v[i] = bfloat_to_float(p[i]); return r; }
TS_INLINE F load_int8(const int8_t* p) { F r; TS_LOOP r.v[i] = (float)p[i]; return r; }
TS_INLINE B load_bytes(const void* p) { B r; memcpy(&r, p, 16); return r; }
TS_INLINE void store_bytes(void* p, B b) { memcpy(p, &b, 16); }
TS_INLINE B load_nibbles(const uint8_t* p) {  // 8 bytes: even elements in the low halves; 8 subtracted
    B r;
    TS_LOOP r.v[i] = (int8_t)(((p[i / 2] >> (i % 2 * 4)) & 15) - 8);
    return r;
}
TS_INLINE F float_bytes(B b) { F r; TS_LOOP r.v[i] = (float)b.v[i]; return r; }
TS_INLINE F load_uint8(const uint8_t* p) { F r; TS_LOOP r.v[i] = (float)p[i]; return r; }
TS_INLINE void store_half(uint16_t* p, F a) { TS_LOOP p[i] = float_to_half(a.v[i]); }
TS_INLINE F splat(float x) { F r; TS_LOOP r.v[i] = x; return r; }
TS_INLINE F addend(const float (&c)[4]) { return splat(c[0]); }  // a constant that a product is added to
TS_INLINE F add(F a, F b) { TS_LOOP a.v[i] += b.v[i]; return a; }
TS_INLINE F sub(F a, F b) { TS_LOOP a.v[i] -= b.v[i]; return a; }
TS_INLINE F mul(F a, F b) { TS_LOOP a.v[i] *= b.v[i]; return a; }
TS_INLINE F div(F a, F b) { TS_LOOP a.v[i] /= b.v[i]; return a; }
TS_INLINE F fma(F a, F b, F c) { TS_LOOP c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]); return c; }  // a·b + c
TS_INLINE F vmax(F a, F b) { TS_LOOP b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return b; }  // b where unordered
TS_INLINE F vmin(F a, F b) { TS_LOOP b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return b; }
template <int H> TS_INLINE F partners(F a) { F r; TS_LOOP r.v[i] = a.v[i ^ H]; return r; }  // lane i gets lane i ^ H
TS_INLINE F first(F a, int n) { TS_LOOP a.v[i] = i < n ? a.v[i] : 0.f; return a; }  // lanes >= n become 0
TS_INLINE F between(F a, int low, int high, F other) {                             // a in [low, high), else other
    TS_LOOP other.v[i] = i >= low && i < high ? a.v[i] : other.v[i];
    return other;
}
TS_INLINE F load_first(const float* p, int n) { F r; TS_LOOP r.v[i] = i < n ? p[i] : 0.f; return r; }
TS_INLINE void store_first(float* p, F a, int n) { for (int i = 0; i < n; ++i) p[i] = a.v[i]; }

// Lane sums: (l, l+8), (l, l+4), neighbours, neighbours.
TS_INLINE float sum(F a) {
    float e[8], q[4];
    for (int i = 0; i < 8; ++i) e[i] = a.v[i] + a.v[i + 8];
    for (int i = 0; i < 4; ++i) q[i] = e[i] + e[i + 4];
    return (q[0] + q[1]) + (q[2] + q[3]);
}
TS_INLINE float peak(F a) { float m = a.v[0]; TS_LOOP m = a.v[i] > m ? a.v[i] : m; return m; }
// Lane t of the result is sum(rows[t]).
TS_INLINE F sums(const F* rows) { F r; TS_LOOP r.v[i] = sum(rows[i]); return r; }
TS_INLINE F peaks(const F* rows) { F r; TS_LOOP r.v[i] = peak(rows[i]); return r; }  // the same with peak

// rows[i] lane j <-> rows[j] lane i
TS_INLINE void transpose(F* rows) {
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < i; ++j) {
            const float x = rows[i].v[j];
            rows[i].v[j] = rows[j].v[i];
            rows[j].v[i] = x;
        }
}

TS_INLINE I isplat(int32_t x) { I r; TS_LOOP r.v[i] = x; return r; }
TS_INLINE I bits_of(F a) { I r; memcpy(&r, &a, 64); return r; }
TS_INLINE F as_float(I a) { F r; memcpy(&r, &a, 64); return r; }
TS_INLINE I iadd(I a, I b) { TS_LOOP a.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]); return a; }
TS_INLINE I iand(I a, I b) { TS_LOOP a.v[i] &= b.v[i]; return a; }
TS_INLINE I imax(I a, I b) { TS_LOOP a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
TS_INLINE I shift_left_23(I a) { TS_LOOP a.v[i] = (int32_t)((uint32_t)a.v[i] << 23); return a; }
TS_INLINE int32_t isum(I a) { int32_t s = 0; TS_LOOP s += a.v[i]; return s; }
TS_INLINE int32_t ipeak(I a) { int32_t m = a.v[0]; TS_LOOP m = a.v[i] > m ? a.v[i] : m; return m; }
TS_INLINE I round_even(F a) {  // |a| < 2^22; anything where a is not finite
    I r;
    TS_LOOP r.v[i] = (int32_t)(float_to_bits(a.v[i] + 12582912.f) - 0x4b400000u);
    return r;
}
TS_INLINE void store_low_bytes(int8_t* p, I a) { TS_LOOP p[i] = (int8_t)(uint8_t)((uint32_t)a.v[i] & 255u); }
TS_INLINE void store_fourth_bytes(uint8_t* p, const int8_t* codes) { TS_LOOP p[4 * i] = (uint8_t)codes[i]; }  // the bytes between stay
TS_INLINE void store_int8(int8_t* p, I a) { TS_LOOP p[i] = (int8_t)a.v[i]; }  // lanes within int8

TS_INLINE W load_codes(const uint8_t* p) { W w; memcpy(&w, p, 64); return w; }
TS_INLINE void split_nibbles(const uint8_t* p, W& low, W& high) {
    for (int i = 0; i < 64; ++i) { low.v[i] = (int8_t)(p[i] & 15); high.v[i] = (int8_t)(p[i] >> 4); }
}
TS_INLINE W looked_up(const int8_t* table, W w) {  // of 16 bytes
    for (int i = 0; i < 64; ++i) w.v[i] = table[w.v[i]];
    return w;
}
TS_INLINE void store_codes(uint8_t* p, W w) { memcpy(p, &w, 64); }
TS_INLINE W interleave(B a, B b, B c, B d) {  // element i of all four side by side
    W w;
    TS_LOOP { w.v[4 * i] = a.v[i], w.v[4 * i + 1] = b.v[i], w.v[4 * i + 2] = c.v[i], w.v[4 * i + 3] = d.v[i]; }
    return w;
}
TS_INLINE W to_unsigned(W w) { return w; }
TS_INLINE A load_inputs(const int8_t* p) { return {p}; }
template <int Quad, bool Small> TS_INLINE I dot4(I acc, W w, A a) {
    const int8_t* q = a.p + 4 * Quad;
    TS_LOOP {
        const int8_t* c = w.v + 4 * i;
        acc.v[i] += c[0] * q[0] + c[1] * q[1] + c[2] * q[2] + c[3] * q[3];
    }
    return acc;
}
// The same for attention: several blocks of keys share an input, and weights (inputs of dot4_weights) are 0 to 127.
template <int Quad> TS_INLINE I dot4_keys(I acc, W w, A a) { return dot4<Quad, false>(acc, w, a); }
template <int Quad> TS_INLINE I dot4_weights(I acc, W w, A a) { return dot4<Quad, false>(acc, w, a); }
TS_INLINE F to_float_dot(I a) { F r; TS_LOOP r.v[i] = (float)a.v[i]; return r; }
TS_INLINE X load_x4(const float* p) { return {p}; }
template <int J> TS_INLINE F mul_lane(F w, X x) { return mul(w, splat(x.p[J])); }
template <int J> TS_INLINE F fma_lane(F w, X x, F acc) { return fma(w, splat(x.p[J]), acc); }

#undef TS_LOOP

}  // namespace
