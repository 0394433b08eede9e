// exp and the gated activations over 16 lanes: the same bits in every lane and on every instruction set.
#pragma once

namespace {

#define TS_FOUR(x) {x, x, x, x}
alignas(64) static const float kExp[6][4] = {TS_FOUR(12582912.f),      TS_FOUR(1.3981999507e-3f), TS_FOUR(8.3334519073e-3f),
                                             TS_FOUR(4.1665795894e-2f), TS_FOUR(1.6666665459e-1f), TS_FOUR(5.0000001201e-1f)};
#undef TS_FOUR

// e^x to about 1 ulp, x at most 88. Below -87 the argument is clamped; NaN stays NaN.
TS_INLINE F vexp_below(F x) {
    x = vmax(splat(-87.f), x);
    const F shifted = fma(x, splat(1.44269504088896341f), addend(kExp[0]));  // 1.5·2^23 + round(x / ln 2)
    const F n = sub(shifted, splat(12582912.f));
    F r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts: the first product is exact
    r = fma(n, splat(2.12194440e-4f), r);
    F y = splat(1.9875691500e-4f);
    y = fma(y, r, addend(kExp[1]));
    y = fma(y, r, addend(kExp[2]));
    y = fma(y, r, addend(kExp[3]));
    y = fma(y, r, addend(kExp[4]));
    y = fma(y, r, addend(kExp[5]));
    y = add(fma(y, mul(r, r), r), splat(1.f));
    return as_float(iadd(bits_of(y), shift_left_23(bits_of(shifted))));  // n added to the exponent
}

TS_INLINE F vexp(F x) { return vexp_below(vmin(splat(88.f), x)); }  // the same for any x

TS_INLINE F silu(F x) { return div(x, add(splat(1.f), vexp(sub(splat(0.f), x)))); }

// x/2 · (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2/π) · (x + 0.044715 x³)
TS_INLINE F gelu_tanh(F x) {
    const F inner = fma(mul(mul(x, x), x), splat(0.044715f), x);
    return div(x, add(splat(1.f), vexp(mul(inner, splat(-1.5957691216057308f)))));
}

// gpt-oss: gate at most 7, up between -7 and 7. NaN stays NaN
TS_INLINE F swiglu_oai(F gate, F up) {
    gate = vmin(splat(7.f), gate);
    up = vmax(splat(-7.f), vmin(splat(7.f), up));
    return mul(div(gate, add(splat(1.f), vexp(mul(gate, splat(-1.702f))))), add(up, splat(1.f)));
}

// DeepSeek V4: gate at most 10, up between -10 and 10. NaN stays NaN
TS_INLINE F swiglu_ten(F gate, F up) {
    return mul(silu(vmin(splat(10.f), gate)), vmax(splat(-10.f), vmin(splat(10.f), up)));
}

// limit · tanh(x / limit)
TS_INLINE F softcap(F x, float limit) {
    const F e = vexp(mul(x, splat(2.f / limit)));
    return mul(splat(limit), sub(splat(1.f), div(splat(2.f), add(e, splat(1.f)))));
}

}  // namespace
