// Scales of an expanded group where an integer sum starts at the bits of magic = 1.5·2^23, so that its bits are those of
// the float magic + dot:
//     fma(magic + dot, scale, -magic · scale) = dot · scale, rounded once,
// the product that matmul_codes.h defines, without a conversion.
#pragma once

namespace {

constexpr float kMagic = 12582912.f;
static_assert(kDotStart == 0x4b400000, "the bits of kMagic");

// For each group: scales, the same times -magic, minimums, then codes. In bytes.
template <class Source> struct MagicGroup {
    static constexpr int addends = 64 * Source::halves, minimum = 2 * addends;
    static constexpr int codes = minimum + (Source::minimum ? 64 : 0), bytes = codes + 512;
};

template <class Source> TS_INLINE void store_magic_scales(const F* scale, F low, uint8_t* out) {
    using Group = MagicGroup<Source>;
    TS_UNROLL for (int half = 0; half < Source::halves; ++half) {
        store((float*)(out + 64 * half), scale[half]);
        store((float*)(out + Group::addends + 64 * half), mul(scale[half], splat(-kMagic)));
    }
    if (Source::minimum) store((float*)(out + Group::minimum), low);
}

}  // namespace
