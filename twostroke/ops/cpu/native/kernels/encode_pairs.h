// Products for encoders in 16-bit integers (AVX-512 VNNI), which multiplies twice as many numbers at a time as float32.
// A weight has 12 bits and a sign, scaled by its output's largest; an input 13 bits and a sign, scaled by the largest of
// its kPairChain neighbours in the row. Sums of kPairChain products are exact and cannot overflow; they are added up in
// float32, in the same order whatever the rows. Vectors differ from those of float32 by 1e-6 in cosine.
#pragma once

namespace {

constexpr int kPairChain = 64;
constexpr int kPairRows = 12;
constexpr float kPairWeight = 4095.f, kPairInput = 8191.f;  // their product with kPairChain is below 2^31
constexpr float kPairLeast = 1e-30f;                        // a largest input below it counts as zero

using Pair [[gnu::may_alias]] = int32_t;  // two inputs

// (panels of 16 outputs, pairs of inputs, 16 outputs, 2)
static void pair_pack(const float* values, int outputs, int inputs, uint16_t* to, float* scales) {
    for (int o = 0; o < outputs; ++o) {
        const float* const row = values + (int64_t)o * inputs;
        float most = 0.f;
        for (int k = 0; k < inputs; ++k) most = row[k] > most ? row[k] : -row[k] > most ? -row[k] : most;
        const double inverse = most > 0.f ? (double)kPairWeight / (double)most : 0.0;
        scales[o] = most / kPairWeight;
        uint16_t* const panel = to + (int64_t)(o / kLanes) * inputs * kLanes + o % kLanes * 2;
        for (int k = 0; k < inputs; ++k) {
            const double code = (double)row[k] * inverse;
            panel[(int64_t)(k / 2) * 2 * kLanes + k % 2] = (uint16_t)(int16_t)(code < 0 ? code - 0.5 : code + 0.5);
        }
    }
}

TS_INLINE int pair_chains(int inputs) { return (inputs + kPairChain - 1) / kPairChain; }

// A row: its inputs in 16 bits, and after them a float32 for each chain, what its inputs were divided by.
TS_INLINE float* pair_scales(const uint16_t* row, int inputs) { return (float*)(row + inputs); }

// cols: a multiple of 32. The largest is found among bits, where infinite ones and those that are no number are above all.
static void pair_split(const float* x, int rows, int cols, uint16_t* out, int tile) {
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
    for (int r = 0; r < kEncodeRows && tile * kEncodeRows + r < rows; ++r) {
        const int64_t row = tile * kEncodeRows + r;
        const float* const from = x + row * cols;
        uint16_t* const to = out + row * 2 * cols;
        float* const scales = pair_scales(to, cols);
        for (int k = 0; k < cols; k += kPairChain) {
            const int end = k + kPairChain < cols ? k + kPairChain : cols;
            __m512i bits = _mm512_setzero_si512();
            for (int j = k; j < end; j += kLanes) bits = _mm512_max_epi32(bits, _mm512_and_si512(_mm512_loadu_si512(from + j), no_sign));
            const int most_bits = _mm512_reduce_max_epi32(bits);
            const float most = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(most_bits)));
            const bool finite = most_bits < 0x7f800000, zero = most < kPairLeast;
            scales[k / kPairChain] = !finite ? most - most : zero ? 0.f : most / kPairInput;
            const __m512 inverse = _mm512_set1_ps(!finite || zero ? 0.f : kPairInput / most);
            for (int j = k; j < end; j += kLanes) {
                const __m512i codes = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from + j), inverse));
                _mm256_storeu_si256((__m256i*)(to + j), _mm512_cvtepi32_epi16(codes));
            }
        }
    }
}

// Written out: for the intrinsic GCC 12 copies each sum to the stack and back, which takes half of the speed.
TS_INLINE void pair_add(__m512i& sum, __m512i weights, __m512i inputs) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(inputs));
}

// One chain of inputs from k on: sums of MR rows and one or two panels, added to those of the chains before, which wait in
// `out`: there are not enough registers for them.
template <int MR, int Panels> TS_INLINE void pair_chain(const EncodeProduct& a, int row, int panel, int k) {
    const int64_t apart = (int64_t)a.inputs * kLanes, stride = 2 * (int64_t)a.inputs;
    const int end = k + kPairChain < a.inputs ? k + kPairChain : a.inputs;
    const uint16_t* const first = a.x + row * stride;
    const uint16_t* w = a.weights + panel * apart + k * kLanes;
    const uint16_t* x[(MR + 2) / 3];  // every third row: the two after it are at one and two strides
    __m512i low[MR], high[MR];
    TS_UNROLL for (int i = 0; i < (MR + 2) / 3; ++i) x[i] = first + 3 * i * stride + k;
    TS_UNROLL for (int r = 0; r < MR; ++r) low[r] = high[r] = _mm512_setzero_si512();
    for (int j = k; j < end; j += 2, w += 2 * kLanes) {
        const __m512i one = _mm512_loadu_si512(w), two = Panels > 1 ? _mm512_loadu_si512(w + apart) : one;
        TS_UNROLL for (int r = 0; r < MR; ++r) {
            const __m512i inputs = _mm512_set1_epi32(*(const Pair*)(x[r / 3] + r % 3 * stride));
            pair_add(low[r], one, inputs);
            if (Panels > 1) pair_add(high[r], two, inputs);
        }
        TS_UNROLL for (int i = 0; i < (MR + 2) / 3; ++i) x[i] += 2;
    }
    TS_UNROLL for (int r = 0; r < MR; ++r) {
        const __m512 scale = _mm512_set1_ps(pair_scales(first + r * stride, a.inputs)[k / kPairChain]);
        float* const out = a.out + (int64_t)(row + r) * a.outputs + panel * kLanes;
        const __m512 none = _mm512_setzero_ps();
        _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(low[r]), scale, k ? _mm512_loadu_ps(out) : none));
        if (Panels > 1)
            _mm512_storeu_ps(out + kLanes, _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[r]), scale, k ? _mm512_loadu_ps(out + kLanes) : none));
    }
}

template <int MR, int Panels> static void pair_rows(const EncodeProduct& a, int row, int panel) {
    for (int k = 0; k < a.inputs; k += kPairChain) pair_chain<MR, Panels>(a, row, panel, k);
    for (int output = panel * kLanes; output < (panel + Panels) * kLanes; output += kLanes) {
        const F bias = a.bias ? load(a.bias + output) : splat(0.f), scale = load(a.scales + output);
        for (int r = 0; r < MR; ++r) {
            float* const out = a.out + (int64_t)(row + r) * a.outputs + output;
            store(out, activated(fma(load(out), scale, bias), a.activation));
        }
    }
}

// `rows` rows from `row` on: at most MR.
template <int MR, int Panels> static void pair_group(const EncodeProduct& a, int row, int rows, int panel) {
    if (rows == MR) return pair_rows<MR, Panels>(a, row, panel);
    if constexpr (MR > 1) pair_group<MR - 1, Panels>(a, row, rows, panel);
}

// Rows in groups of about the same size: the last one is not a single row.
static void pair_multiply(const EncodeProduct& a, int panel, int panel_end, uint8_t*) {
    const int groups = (a.rows + kPairRows - 1) / kPairRows;
    for (; panel < panel_end; panel += 2)
        for (int64_t g = 0; g < groups; ++g) {
            const int row = (int)(a.rows * g / groups), rows = (int)(a.rows * (g + 1) / groups) - row;
            if (panel + 1 < panel_end) pair_group<kPairRows, 2>(a, row, rows, panel);
            else pair_group<kPairRows, 1>(a, row, rows, panel);
        }
}

static size_t pair_scratch(int) { return 0; }

static const EncodeKernels kEncodePairs = {encode_activate, encode_add_norm, encode_attend, pair_pack, pair_split, pair_multiply, pair_scratch, kLargestHalf};

}  // namespace
