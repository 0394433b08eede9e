// Weights into fewer bits, as weights/quantize.py defines it and bit for bit the same: sums are added in numpy's order.
#include "quantize.h"

#include "half.h"
#include "layout.h"

namespace {

constexpr float kRound = 12582912.f;  // 1.5·2^23: added and taken away again it rounds to the nearest even

float rounded_half(float x) { return half_to_float(float_to_half(x)); }

// Code -8..7 of each value, as a float; what is no number becomes -8.
inline float four_bit_code(float value, float inverse) {
    const float x = value * inverse, high = x < 7.f ? x : 7.f;
    return ((high >= -8.f ? high : -8.f) + kRound) - kRound;
}

float squared_error(const float* x, float scale) {
    const float inverse = scale == 0.f ? 0.f : 1.f / scale;
    float r[8] = {0};
    for (int from = 0; from < kGroup; from += 8)
        for (int i = 0; i < 8; ++i) {
            const float left = x[from + i] - four_bit_code(x[from + i], inverse) * scale;
            r[i] += left * left;
        }
    return ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
}

float largest(const float* x) {  // with its sign; the first of equals
    float best = x[0];
    for (int i = 1; i < kGroup; ++i)
        if (__builtin_fabsf(x[i]) > __builtin_fabsf(best)) best = x[i];
    return best;
}

void store_scale(float scale, uint8_t* out) {
    const uint16_t half = float_to_half(scale);
    out[0] = (uint8_t)half, out[1] = (uint8_t)(half >> 8);
}

}  // namespace

void quantize_eight(const float* values, int64_t count, uint8_t* out) {
    for (int64_t g = 0; g < count; ++g, values += kGroup, out += 2 + kGroup) {
        const float scale = rounded_half(__builtin_fabsf(largest(values)) / 127.f);
        const float inverse = scale == 0.f ? 0.f : 1.f / scale;
        store_scale(scale, out);
        for (int i = 0; i < kGroup; ++i) {
            const float x = values[i] * inverse, high = x < 127.f ? x : 127.f;
            out[2 + i] = (uint8_t)(int8_t)(((high >= -127.f ? high : -127.f) + kRound) - kRound);
        }
    }
}

void quantize_four(const float* values, int64_t count, const float* factors, int trials, uint8_t* out) {
    for (int64_t g = 0; g < count; ++g, values += kGroup, out += 2 + kGroup / 2) {
        const float plain = largest(values) / -8.f;
        float scale = rounded_half(plain), least = squared_error(values, scale);
        for (int t = 0; t < trials; ++t) {
            const float trial = rounded_half(plain * factors[t]), error = squared_error(values, trial);
            if (error < least) least = error, scale = trial;
        }
        const float inverse = scale == 0.f ? 0.f : 1.f / scale;
        store_scale(scale, out);
        for (int i = 0; i < kGroup / 2; ++i) {
            const int low = (int)four_bit_code(values[i], inverse) + 8;
            const int high = (int)four_bit_code(values[i + kGroup / 2], inverse) + 8;
            out[2 + i] = (uint8_t)(low | high << 4);
        }
    }
}
