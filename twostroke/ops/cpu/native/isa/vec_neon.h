// Sixteen lanes in four NEON registers, with the dot-product instructions of ARMv8.2 (Neoverse-N1 and later).
// Integer sums start at the bits of 1.5·2^23, so that they can be read as a float by one subtraction: converting
// instructions run on one pipe at half rate on these cores, subtraction on both.
#pragma once
#include <arm_neon.h>
#include "../half.h"

namespace {

#define TS_FOUR_GROUPS  // see prologue_four.h
#define TS_EACH TS_UNROLL for (int i = 0; i < 4; ++i)

constexpr int kRowsInt = 0;  // matmul_sdot.h and matmul_i8mm.h multiply many rows
constexpr int kRowsDirect = 2;
constexpr int kDirectRows = 4;
constexpr int kRowsFloat = 5;
constexpr int kRowsAttend = 4;
constexpr int kBlocksScored = 1;
constexpr int kChunks = 1;
constexpr int kChunksFew = 1;
constexpr int kLinesCoded = 4;
constexpr int kScoreSums = 4;
constexpr int kWeighSums = 4;
constexpr bool kWideScales = true;
constexpr int kAheadNibbles = 12288;
constexpr int kAheadBytes = 1024;
constexpr bool kByLane = true;
constexpr bool kSecondsByQuad = true;
constexpr bool kUnsignedCodes = false;
constexpr int32_t kDotStart = 0x4b400000;

struct F { float32x4_t v[4]; };
struct I { int32x4_t v[4]; };
struct W { int8x16_t v[4]; };
struct B { int8x16_t v; };
struct A { int8x16_t v; };
struct X { float32x4_t v; };

TS_INLINE F load(const float* p) { F r; TS_EACH r.v[i] = vld1q_f32(p + 4 * i); return r; }
TS_INLINE void store(float* p, F a) { TS_EACH vst1q_f32(p + 4 * i, a.v[i]); }
TS_INLINE F load_half(const uint16_t* p) {
    F r;
    TS_EACH r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    return r;
}
TS_INLINE F load_bfloat(const uint16_t* p) {
    F r;
    TS_EACH r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
    return r;
}
TS_INLINE B load_bytes(const void* p) { return {vld1q_s8((const int8_t*)p)}; }
TS_INLINE void store_bytes(void* p, B b) { vst1q_s8((int8_t*)p, b.v); }
TS_INLINE B load_nibbles(const uint8_t* p) {
    const uint8x8_t both = vld1_u8(p), low = vand_u8(both, vdup_n_u8(15)), high = vshr_n_u8(both, 4);
    return {vsubq_s8(vreinterpretq_s8_u8(vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high))), vdupq_n_s8(8))};
}
TS_INLINE F float_bytes(B b) {
    const int16x8_t low = vmovl_s8(vget_low_s8(b.v)), high = vmovl_s8(vget_high_s8(b.v));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
TS_INLINE F load_int8(const int8_t* p) { return float_bytes(load_bytes(p)); }
TS_INLINE F load_uint8(const uint8_t* p) {
    const uint8x16_t c = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(c)), high = vmovl_u8(vget_high_u8(c));
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
}
TS_INLINE void store_half(uint16_t* p, F a) {
    TS_EACH vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
TS_INLINE F splat(float x) { const float32x4_t v = vdupq_n_f32(x); return {{v, v, v, v}}; }
// From memory each time: a multiply-add overwrites what it adds to, and copying a register takes a pipe that multiplies.
TS_INLINE F addend(const float (&c)[4]) { F r; TS_EACH asm volatile("ldr %q0, %1" : "=w"(r.v[i]) : "m"(c)); return r; }
TS_INLINE F load_addend(const float* p) {
    F r;
    TS_EACH asm volatile("ldr %q0, %1" : "=w"(r.v[i]) : "m"(*(const float(*)[4])(p + 4 * i)));
    return r;
}
TS_INLINE F add(F a, F b) { TS_EACH a.v[i] = vaddq_f32(a.v[i], b.v[i]); return a; }
TS_INLINE F sub(F a, F b) { TS_EACH a.v[i] = vsubq_f32(a.v[i], b.v[i]); return a; }
TS_INLINE F mul(F a, F b) { TS_EACH a.v[i] = vmulq_f32(a.v[i], b.v[i]); return a; }
TS_INLINE F div(F a, F b) { TS_EACH a.v[i] = vdivq_f32(a.v[i], b.v[i]); return a; }
TS_INLINE F fma(F a, F b, F c) { TS_EACH c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]); return c; }
TS_INLINE F vmax(F a, F b) { TS_EACH a.v[i] = vmaxq_f32(a.v[i], b.v[i]); return a; }
TS_INLINE F vmin(F a, F b) { TS_EACH a.v[i] = vminq_f32(a.v[i], b.v[i]); return a; }
template <int H> TS_INLINE F partners(F a) {
    if (H == 1) { TS_EACH a.v[i] = vrev64q_f32(a.v[i]); return a; }
    if (H == 2) { TS_EACH a.v[i] = vextq_f32(a.v[i], a.v[i], 2); return a; }
    return H == 4 ? F{{a.v[1], a.v[0], a.v[3], a.v[2]}} : F{{a.v[2], a.v[3], a.v[0], a.v[1]}};
}
TS_INLINE uint32x4_t below(int n, int i) {  // lanes of register i that come before lane n
    const int32x4_t lane = {0, 1, 2, 3};
    return vcltq_s32(lane, vdupq_n_s32(n - 4 * i));
}
TS_INLINE F first(F a, int n) {
    TS_EACH a.v[i] = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.v[i]), below(n, i)));
    return a;
}
TS_INLINE F between(F a, int low, int high, F other) {
    TS_EACH a.v[i] = vbslq_f32(vbicq_u32(below(high, i), below(low, i)), a.v[i], other.v[i]);
    return a;
}
TS_INLINE F load_first(const float* p, int n) {
    if (n == 16) return load(p);
    float whole[16] = {0};
    for (int i = 0; i < n; ++i) whole[i] = p[i];
    return load(whole);
}
TS_INLINE void store_first(float* p, F a, int n) {
    if (n == 16) return store(p, a);
    float whole[16];
    store(whole, a);
    for (int i = 0; i < n; ++i) p[i] = whole[i];
}

TS_INLINE float32x4_t fold_to_four(F a) {
    return vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
}
TS_INLINE float sum(F a) {
    const float32x4_t q = fold_to_four(a);
    const float32x4_t n = vpaddq_f32(q, q);
    return vgetq_lane_f32(vpaddq_f32(n, n), 0);
}
TS_INLINE float peak(F a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}
TS_INLINE F sums(const F* r) {
    F s;
    TS_EACH {
        const F* q = r + 4 * i;
        const float32x4_t low = vpaddq_f32(fold_to_four(q[0]), fold_to_four(q[1]));
        const float32x4_t high = vpaddq_f32(fold_to_four(q[2]), fold_to_four(q[3]));
        s.v[i] = vpaddq_f32(low, high);
    }
    return s;
}

TS_INLINE float32x4_t peak_to_four(F a) {
    return vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3]));
}
TS_INLINE F peaks(const F* r) {
    F s;
    TS_EACH {
        const F* q = r + 4 * i;
        const float32x4_t low = vpmaxq_f32(peak_to_four(q[0]), peak_to_four(q[1]));
        const float32x4_t high = vpmaxq_f32(peak_to_four(q[2]), peak_to_four(q[3]));
        s.v[i] = vpmaxq_f32(low, high);
    }
    return s;
}

// rows[i] lane j <-> rows[j] lane i, in 4x4 pieces.
TS_INLINE void transpose(F* rows) {
    F t[16];
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) {
            const float32x4_t a = rows[4 * i].v[j], b = rows[4 * i + 1].v[j], c = rows[4 * i + 2].v[j], d = rows[4 * i + 3].v[j];
            const float64x2_t ab = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), cd = vreinterpretq_f64_f32(vtrn1q_f32(c, d));
            const float64x2_t ba = vreinterpretq_f64_f32(vtrn2q_f32(a, b)), dc = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
            t[4 * j].v[i] = vreinterpretq_f32_f64(vtrn1q_f64(ab, cd));
            t[4 * j + 1].v[i] = vreinterpretq_f32_f64(vtrn1q_f64(ba, dc));
            t[4 * j + 2].v[i] = vreinterpretq_f32_f64(vtrn2q_f64(ab, cd));
            t[4 * j + 3].v[i] = vreinterpretq_f32_f64(vtrn2q_f64(ba, dc));
        }
    for (int i = 0; i < 16; ++i) rows[i] = t[i];
}

TS_INLINE I isplat(int32_t x) { const int32x4_t v = vdupq_n_s32(x); return {{v, v, v, v}}; }
TS_INLINE I bits_of(F a) { I r; TS_EACH r.v[i] = vreinterpretq_s32_f32(a.v[i]); return r; }
TS_INLINE F as_float(I a) { F r; TS_EACH r.v[i] = vreinterpretq_f32_s32(a.v[i]); return r; }
// Sums that wrap: in C++ only unsigned numbers may.
TS_INLINE int32x4_t wrapped_sum(int32x4_t a, int32x4_t b) {
    return vreinterpretq_s32_u32(vaddq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b)));
}
TS_INLINE I iadd(I a, I b) { TS_EACH a.v[i] = wrapped_sum(a.v[i], b.v[i]); return a; }
TS_INLINE I iand(I a, I b) { TS_EACH a.v[i] = vandq_s32(a.v[i], b.v[i]); return a; }
TS_INLINE I imax(I a, I b) { TS_EACH a.v[i] = vmaxq_s32(a.v[i], b.v[i]); return a; }
TS_INLINE I shift_left_23(I a) { TS_EACH a.v[i] = vshlq_n_s32(a.v[i], 23); return a; }
TS_INLINE int32_t isum(I a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
TS_INLINE int32_t ipeak(I a) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3])));
}
// For numbers below 2^22: added to 1.5·2^23 they are rounded, and the bits are an integer. The conversion is one pipe's.
TS_INLINE I round_even(F a) {
    I r;
    TS_EACH r.v[i] = wrapped_sum(vreinterpretq_s32_f32(vaddq_f32(a.v[i], vdupq_n_f32(12582912.f))), vdupq_n_s32(-0x4b400000));
    return r;
}
TS_INLINE int16x8_t low_halves(int32x4_t a, int32x4_t b) { return vuzp1q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)); }
TS_INLINE void store_fourth_bytes(uint8_t* p, const int8_t* codes) {
    for (int i = 0; i < 16; ++i) p[4 * i] = (uint8_t)codes[i];
}
TS_INLINE int8x16_t low_bytes(I a) {
    const int16x8_t low = low_halves(a.v[0], a.v[1]), high = low_halves(a.v[2], a.v[3]);
    return vuzp1q_s8(vreinterpretq_s8_s16(low), vreinterpretq_s8_s16(high));
}
TS_INLINE void store_int8(int8_t* p, I a) { vst1q_s8(p, low_bytes(a)); }  // numbers that fit
TS_INLINE void store_low_bytes(int8_t* p, I a) {
    store_int8(p, a);
}

TS_INLINE W load_codes(const uint8_t* p) { W w; TS_EACH w.v[i] = vld1q_s8((const int8_t*)p + 16 * i); return w; }
TS_INLINE void split_nibbles(const uint8_t* p, W& low, W& high) {
    TS_EACH {
        const uint8x16_t both = vld1q_u8(p + 16 * i);
        low.v[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
        high.v[i] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
    }
}
TS_INLINE void split_signed(const uint8_t* p, W& low, W& high) {  // 16 times the value of each nibble
    TS_EACH {
        const uint8x16_t both = vld1q_u8(p + 16 * i);
        low.v[i] = vreinterpretq_s8_u8(vshlq_n_u8(both, 4));
        high.v[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(0xf0)));
    }
}
TS_INLINE W looked_up(const int8_t* table, W w) {  // of 16 bytes
    W out;
    TS_EACH out.v[i] = vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s8(w.v[i]));
    return out;
}
TS_INLINE void store_codes(uint8_t* p, W w) { TS_EACH vst1q_s8((int8_t*)p + 16 * i, w.v[i]); }
TS_INLINE W interleave(B a, B b, B c, B d) {
    const int16x8_t ab = vreinterpretq_s16_s8(vzip1q_s8(a.v, b.v)), ba = vreinterpretq_s16_s8(vzip2q_s8(a.v, b.v));
    const int16x8_t cd = vreinterpretq_s16_s8(vzip1q_s8(c.v, d.v)), dc = vreinterpretq_s16_s8(vzip2q_s8(c.v, d.v));
    return {{vreinterpretq_s8_s16(vzip1q_s16(ab, cd)), vreinterpretq_s8_s16(vzip2q_s16(ab, cd)),
             vreinterpretq_s8_s16(vzip1q_s16(ba, dc)), vreinterpretq_s8_s16(vzip2q_s16(ba, dc))}};
}
TS_INLINE W to_unsigned(W w) { return w; }
TS_INLINE A load_inputs(const int8_t* p) { return {vld1q_s8(p)}; }
template <int Quad, bool Small> TS_INLINE I dot4(I acc, W w, A a) {
    TS_EACH acc.v[i] = vdotq_laneq_s32(acc.v[i], w.v[i], a.v, Quad);
    return acc;
}
// In this order: compilers reorder dot products until sums must be copied, and a copy takes a pipe that multiplies.
template <int Quad> TS_INLINE I dot4_keys(I acc, W w, A a) {
    asm volatile("sdot %0.4s, %4.16b, %8.4b[%9]\n sdot %1.4s, %5.16b, %8.4b[%9]\n"
                 "sdot %2.4s, %6.16b, %8.4b[%9]\n sdot %3.4s, %7.16b, %8.4b[%9]"
                 : "+w"(acc.v[0]), "+w"(acc.v[1]), "+w"(acc.v[2]), "+w"(acc.v[3])
                 : "w"(w.v[0]), "w"(w.v[1]), "w"(w.v[2]), "w"(w.v[3]), "w"(a.v), "i"(Quad));
    return acc;
}
template <int Quad> TS_INLINE I dot4_weights(I acc, W w, A a) { return dot4_keys<Quad>(acc, w, a); }
TS_INLINE F to_float_dot(I a) {
    F r;
    TS_EACH r.v[i] = vsubq_f32(vreinterpretq_f32_s32(a.v[i]), vdupq_n_f32(12582912.f));
    return r;
}
TS_INLINE X load_x4(const float* p) { return {vld1q_f32(p)}; }
TS_INLINE void store(float* p, X a) { vst1q_f32(p, a.v); }
TS_INLINE X add(X a, X b) { return {vaddq_f32(a.v, b.v)}; }
TS_INLINE void settle(X& a) { asm("" : "+w"(a.v)); }  // computed here: compilers postpone additions and keep both terms
template <int J> TS_INLINE float32x4_t fmla_lane(float32x4_t acc, float32x4_t w, float32x4_t x) {
    asm("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(acc) : "w"(w), "w"(x), "i"(J));
    return acc;
}
template <int J> TS_INLINE X mul_lane(X w, X x) { return {vmulq_laneq_f32(w.v, x.v, J)}; }
template <int J> TS_INLINE X fma_lane(X w, X x, X acc) { return {fmla_lane<J>(acc.v, w.v, x.v)}; }
template <int J> TS_INLINE F fma_lane(F w, X x, F acc) {
    TS_EACH acc.v[i] = fmla_lane<J>(acc.v[i], w.v[i], x.v);
    return acc;
}

#undef TS_EACH

}  // namespace
