#pragma once
#include <stddef.h>
#include <stdint.h>

// count groups of 32 floats -> Q8_0 blocks of 34 bytes: a float16 scale and 32 signed codes.
void quantize_eight(const float* values, int64_t count, uint8_t* out);

// count groups of 32 floats -> Q4_0 blocks of 18 bytes: a float16 scale, then code i beside code i + 16. The scale is the
// best of `trials` factors of the plain one, and of the plain one itself, by squared error.
void quantize_four(const float* values, int64_t count, const float* factors, int trials, uint8_t* out);
