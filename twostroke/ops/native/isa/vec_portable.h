// Sixteen lanes in plain C++: the meaning of every operation, and the fallback for any machine.
//
// All kernels are written over 16 logical lanes (one AVX-512 register, two of AVX2, four of NEON). Lane sums use one
// tree and products are fused everywhere, so every instruction set computes the same bits.
#pragma once
#include "../half.h"

namespace {

#define TS_LOOP for (int i = 0; i < 16; ++i)

constexpr int kRowsInt = 2;     // rows of a register tile: integer products,
constexpr int kRowsFloat = 4;   // float products,
constexpr int kRowsAttend = 4;  // and attention
constexpr bool kUnsignedCodes = false;  // signed codes are stored as they are in the expanded panel
constexpr int32_t kDotStart = 0;        // an integer sum starts here (see to_float_dot)

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct W { int8_t v[64]; };  // 16 outputs x 4 neighbouring inputs
struct A { const int8_t* p; };  // 16 neighbouring inputs of one row
struct X { const float* p; };   // 4 neighbouring inputs of one row

static inline F load(const float* p) { F r; TS_LOOP r.v[i] = p[i]; return r; }
static inline void store(float* p, F a) { TS_LOOP p[i] = a.v[i]; }
static inline F load_half(const uint16_t* p) { F r; TS_LOOP r.v[i] = half_to_float(p[i]); return r; }
static inline F load_bfloat(const uint16_t* p) { F r; TS_LOOP r.v[i] = bfloat_to_float(p[i]); return r; }
static inline F load_int8(const int8_t* p) { F r; TS_LOOP r.v[i] = (float)p[i]; return r; }
static inline F load_uint8(const uint8_t* p) { F r; TS_LOOP r.v[i] = (float)p[i]; return r; }
static inline void store_half(uint16_t* p, F a) { TS_LOOP p[i] = float_to_half(a.v[i]); }
static inline F splat(float x) { F r; TS_LOOP r.v[i] = x; return r; }
static inline F add(F a, F b) { TS_LOOP a.v[i] += b.v[i]; return a; }
static inline F sub(F a, F b) { TS_LOOP a.v[i] -= b.v[i]; return a; }
static inline F mul(F a, F b) { TS_LOOP a.v[i] *= b.v[i]; return a; }
static inline F div(F a, F b) { TS_LOOP a.v[i] /= b.v[i]; return a; }
static inline F fma(F a, F b, F c) { TS_LOOP c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]); return c; }  // a·b + c
static inline F vmax(F a, F b) { TS_LOOP b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return b; }  // b where unordered
static inline F vmin(F a, F b) { TS_LOOP b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return b; }
static inline F first(F a, int n) { TS_LOOP a.v[i] = i < n ? a.v[i] : 0.f; return a; }  // lanes >= n become 0
static inline F between(F a, int low, int high, F other) {                             // a in [low, high), else other
    TS_LOOP other.v[i] = i >= low && i < high ? a.v[i] : other.v[i];
    return other;
}
static inline F load_first(const float* p, int n) { F r; TS_LOOP r.v[i] = i < n ? p[i] : 0.f; return r; }
static inline void store_first(float* p, F a, int n) { for (int i = 0; i < n; ++i) p[i] = a.v[i]; }

// Lane sums: (l, l+8), (l, l+4), neighbours, neighbours.
static inline float sum(F a) {
    float e[8], q[4];
    for (int i = 0; i < 8; ++i) e[i] = a.v[i] + a.v[i + 8];
    for (int i = 0; i < 4; ++i) q[i] = e[i] + e[i + 4];
    return (q[0] + q[1]) + (q[2] + q[3]);
}
static inline float peak(F a) { float m = a.v[0]; TS_LOOP m = a.v[i] > m ? a.v[i] : m; return m; }
// Lane t of the result is sum(rows[t]).
static inline F sums(const F* rows) { F r; TS_LOOP r.v[i] = sum(rows[i]); return r; }

// rows[i] lane j <-> rows[j] lane i
static inline void transpose(F* rows) {
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < i; ++j) {
            const float x = rows[i].v[j];
            rows[i].v[j] = rows[j].v[i];
            rows[j].v[i] = x;
        }
}

static inline I isplat(int32_t x) { I r; TS_LOOP r.v[i] = x; return r; }
static inline I bits_of(F a) { I r; memcpy(&r, &a, 64); return r; }
static inline F as_float(I a) { F r; memcpy(&r, &a, 64); return r; }
static inline I iadd(I a, I b) { TS_LOOP a.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]); return a; }
static inline I iand(I a, I b) { TS_LOOP a.v[i] &= b.v[i]; return a; }
static inline I imax(I a, I b) { TS_LOOP a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline I shift_left_23(I a) { TS_LOOP a.v[i] = (int32_t)((uint32_t)a.v[i] << 23); return a; }
static inline int32_t isum(I a) { int32_t s = 0; TS_LOOP s += a.v[i]; return s; }
static inline int32_t ipeak(I a) { int32_t m = a.v[0]; TS_LOOP m = a.v[i] > m ? a.v[i] : m; return m; }
static inline I round_even(F a) {  // |a| < 2^22; anything where a is not finite
    I r;
    TS_LOOP r.v[i] = (int32_t)(float_to_bits(a.v[i] + 12582912.f) - 0x4b400000u);
    return r;
}
static inline void store_int8(int8_t* p, I a) { TS_LOOP p[i] = (int8_t)a.v[i]; }  // lanes within int8

static inline W load_codes(const uint8_t* p) { W w; memcpy(&w, p, 64); return w; }
static inline void split_nibbles(const uint8_t* p, W& low, W& high) {
    for (int i = 0; i < 64; ++i) { low.v[i] = (int8_t)(p[i] & 15); high.v[i] = (int8_t)(p[i] >> 4); }
}
static inline void store_codes(uint8_t* p, W w) { memcpy(p, &w, 64); }
static inline W to_unsigned(W w) { return w; }
static inline A load_inputs(const int8_t* p) { return {p}; }
template <int Quad, bool Small> static inline I dot4(I acc, W w, A a) {
    const int8_t* q = a.p + 4 * Quad;
    TS_LOOP {
        const int8_t* c = w.v + 4 * i;
        acc.v[i] += c[0] * q[0] + c[1] * q[1] + c[2] * q[2] + c[3] * q[3];
    }
    return acc;
}
static inline F to_float_dot(I a) { F r; TS_LOOP r.v[i] = (float)a.v[i]; return r; }
static inline X load_x4(const float* p) { return {p}; }
template <int J> static inline F fma_lane(F w, X x, F acc) { return fma(w, splat(x.p[J]), acc); }

#undef TS_LOOP

}  // namespace
