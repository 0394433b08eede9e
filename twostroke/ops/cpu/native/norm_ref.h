#pragma once
#include <stdint.h>

struct NormRef {  // weight null: no norm here. Mirrored in library.py
    const float* weight;
    float eps;
    int32_t unused;
};
