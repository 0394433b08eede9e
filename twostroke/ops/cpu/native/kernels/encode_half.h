// Products for encoders in float16 arithmetic (ARMv8.2), which multiplies twice as many numbers at a time as float32.
// A row's inputs are scaled by a power of two, so that the largest is from 16 to 32. Sums of kHalfChain products are made in
// float16 and added up in float32: their error is a few parts in ten thousand of a sum, 1e-7 in a vector's cosine. They
// cannot overflow while weights are below kHalfWeight. The order of additions is the same whatever the rows.
#pragma once
#include <arm_neon.h>

namespace {

constexpr int kHalfChain = kEncodeInputs;
constexpr int kRowsHalf = 8;
constexpr int kHalfPeak = 4;  // 2^4 is the least power of the largest input

struct H { float16x8_t v[2]; };  // 16 outputs

TS_INLINE uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

TS_INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// 4 exact floats of 4 halves; an infinite one is not told from 65,536. Converting instructions run at a quarter of the rate.
TS_INLINE float32x4_t add_halves(float32x4_t sum, int32x4_t shifted) {
    const float32x4_t small = vreinterpretq_f32_s32(vandq_s32(shifted, vdupq_n_s32((int32_t)0x8fffffff)));
    return vfmaq_f32(sum, small, vdupq_n_f32(0x1p112f));
}

TS_INLINE F add_halves(F sum, H part) {
    TS_UNROLL for (int i = 0; i < 2; ++i) {
        const int16x8_t bits = vreinterpretq_s16_f16(part.v[i]);
        sum.v[2 * i] = add_halves(sum.v[2 * i], vshll_n_s16(vget_low_s16(bits), 13));
        sum.v[2 * i + 1] = add_halves(sum.v[2 * i + 1], vshll_high_n_s16(bits, 13));
    }
    return sum;
}

// A tile's rows: (16 rows, inputs) float16, and after them 16 float32, what each row was divided by.
TS_INLINE const float* half_scales(const uint16_t* tile, int inputs) { return (const float*)(tile + (int64_t)kEncodeRows * inputs); }

static void half_split(const float* x, int rows, int cols, uint16_t* out, int tile) {
    uint16_t* const here = out + (int64_t)tile * 2 * kEncodeRows * cols;
    float* const scales = (float*)(here + (int64_t)kEncodeRows * cols);
    for (int r = 0; r < kEncodeRows && tile * kEncodeRows + r < rows; ++r) {
        const float* const from = x + (int64_t)(tile * kEncodeRows + r) * cols;
        F most = splat(0.f);
        for (int k = 0; k < cols; k += kLanes) {
            const F v = load(from + k);
            most = vmax(most, vmax(v, sub(splat(0.f), v)));
        }
        const uint32_t exponent = float_bits(peak(most)) >> 23;  // 255: infinite, or not a number
        const uint32_t divide = exponent < 32 ? 32 - kHalfPeak : exponent - kHalfPeak;
        scales[r] = float_of_bits((exponent == 255 ? 255u : divide) << 23 | (exponent == 255));
        const F inverse = splat(float_of_bits((254 - divide) << 23));
        for (int k = 0; k < cols; k += kLanes) store_half(here + (int64_t)r * cols + k, mul(load(from + k), inverse));
    }
}

// Written out: the compiler would copy an input to a register of the lower sixteen for each product.
template <int Lane> TS_INLINE void half_fma(float16x8_t& acc, float16x8_t w, float16x8_t x) {
    asm("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(acc) : "w"(w), "x"(x), "i"(Lane));
}

template <int MR, int Lane> TS_INLINE void half_input(H (&acc)[MR], const float16x8_t (&x)[MR], const uint16_t* w) {
    const float16x8_t low = vreinterpretq_f16_u16(vld1q_u16(w)), high = vreinterpretq_f16_u16(vld1q_u16(w + 8));
    TS_UNROLL for (int r = 0; r < MR; ++r) half_fma<Lane>(acc[r].v[0], low, x[r]);
    TS_UNROLL for (int r = 0; r < MR; ++r) half_fma<Lane>(acc[r].v[1], high, x[r]);
}

template <int MR> static void half_rows(const EncodeProduct& a, const uint16_t* w, int row, int output) {
    const uint16_t* x[MR];
    F sum[MR];
    float scale[MR];
    TS_UNROLL for (int r = 0; r < MR; ++r) {
        const uint16_t* const tile = a.x + (int64_t)((row + r) / kEncodeRows) * 2 * kEncodeRows * a.inputs;
        x[r] = tile + (int64_t)((row + r) % kEncodeRows) * a.inputs;
        scale[r] = half_scales(tile, a.inputs)[(row + r) % kEncodeRows];
        sum[r] = splat(0.f);
    }
    for (int k = 0; k < a.inputs; k += kHalfChain) {
        H acc[MR];
        TS_UNROLL for (int r = 0; r < MR; ++r) acc[r].v[0] = acc[r].v[1] = vdupq_n_f16(0);
        for (int j = k; j < k + kHalfChain; j += 8, w += 8 * kLanes) {
            float16x8_t eight[MR];
            TS_UNROLL for (int r = 0; r < MR; ++r) eight[r] = vreinterpretq_f16_u16(vld1q_u16(x[r] + j));
            half_input<MR, 0>(acc, eight, w);
            half_input<MR, 1>(acc, eight, w + kLanes);
            half_input<MR, 2>(acc, eight, w + 2 * kLanes);
            half_input<MR, 3>(acc, eight, w + 3 * kLanes);
            half_input<MR, 4>(acc, eight, w + 4 * kLanes);
            half_input<MR, 5>(acc, eight, w + 5 * kLanes);
            half_input<MR, 6>(acc, eight, w + 6 * kLanes);
            half_input<MR, 7>(acc, eight, w + 7 * kLanes);
        }
        TS_UNROLL for (int r = 0; r < MR; ++r) sum[r] = add_halves(sum[r], acc[r]);
    }
    const F bias = a.bias ? load(a.bias + output) : splat(0.f);
    TS_UNROLL for (int r = 0; r < MR; ++r)
        store(a.out + (int64_t)(row + r) * a.outputs + output, activated(fma(sum[r], splat(scale[r]), bias), a.activation));
}

// `rows` rows from `row` on: at most MR.
template <int MR> static void half_group(const EncodeProduct& a, const uint16_t* panel, int row, int rows, int output) {
    if (rows == MR) return half_rows<MR>(a, panel, row, output);
    if constexpr (MR > 1) half_group<MR - 1>(a, panel, row, rows, output);
}

// Rows in groups of about the same size: the last one is not a single row.
static void half_multiply(const EncodeProduct& a, int panel, int panel_end, uint8_t*) {
    const int groups = (a.rows + kRowsHalf - 1) / kRowsHalf;
    for (; panel < panel_end; ++panel)
        for (int64_t g = 0; g < groups; ++g) {
            const int row = (int)(a.rows * g / groups), end = (int)(a.rows * (g + 1) / groups);
            half_group<kRowsHalf>(a, a.weights + (int64_t)panel * a.inputs * kLanes, row, end - row, panel * kLanes);
        }
}

static size_t half_scratch(int) { return 0; }

static const EncodeKernels kEncodeHalf = {encode_activate, encode_add_norm, encode_attend, nullptr, half_split, half_multiply, half_scratch, kHalfWeight};

}  // namespace
