// float16 and bfloat16 <-> float32, one value at a time, rounding to nearest even as the hardware does.
// Everything here is static: translation units compiled for different instruction sets must not share inline code.
#pragma once
#include <stdint.h>
#include <string.h>

#include "inline.h"

TS_INLINE float bits_to_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

TS_INLINE uint32_t float_to_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

TS_INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    // Shifted into a float's place the exponent is 112 too small; the product is exact, subnormals included.
    const float value = bits_to_float(magnitude << 13) * bits_to_float((254u - 15u) << 23);
    return bits_to_float(float_to_bits(value) | sign);
}

TS_INLINE uint16_t float_to_half(float f) {
    const uint32_t u = float_to_bits(f);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // 65520 and above round to infinity
    if (magnitude < 0x38800000u) {  // subnormal half: let the float adder round at 2^-24
        const float shifted = bits_to_float(magnitude) + 0.5f;
        return (uint16_t)(sign | (float_to_bits(shifted) - 0x3f000000u));
    }
    const uint32_t odd = (magnitude >> 13) & 1u;
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

TS_INLINE float bfloat_to_float(uint16_t b) { return bits_to_float((uint32_t)b << 16); }

TS_INLINE uint16_t float_to_bfloat(float f) {
    const uint32_t u = float_to_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
