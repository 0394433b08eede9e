// Quantization of a row with NEON, four groups side by side: what is one number for each group (its peak, its scale, the
// sum of its codes) is a lane. Group by group, a core would wait for each of them: it looks ahead about one group.
#pragma once

namespace {

constexpr int kGroupsTogether = 16;  // what lies between the passes stays in the nearest cache

struct GroupLanes {
    int32x4_t peaks[kGroupsTogether];  // bits of absolute maxima
    float32x4_t squares[kGroupsTogether];
    alignas(16) float peak[kGroupsTogether], d[kGroupsTogether], inverse[kGroupsTogether];
    alignas(16) uint32_t apart[kGroupsTogether];  // see Act
};

TS_INLINE float32x4_t four_sums(const float32x4_t* v) { return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])); }
TS_INLINE int32x4_t four_sums(const int32x4_t* v) { return vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3])); }
TS_INLINE int32x4_t four_peaks(const int32x4_t* v) { return vpmaxq_s32(vpmaxq_s32(v[0], v[1]), vpmaxq_s32(v[2], v[3])); }

TS_INLINE void measure_group(F a, F b, int32x4_t& peak, float32x4_t& squares) {
    const I magnitude = isplat(0x7fffffff);
    const I m = imax(iand(bits_of(a), magnitude), iand(bits_of(b), magnitude));
    peak = vmaxq_s32(vmaxq_s32(m.v[0], m.v[1]), vmaxq_s32(m.v[2], m.v[3]));
    squares = fold_to_four(fma(b, b, mul(a, a)));
}

// The same arithmetic as codes_of and quantize_group.
TS_INLINE void scale_groups(GroupLanes& lanes, int g) {
    const float32x4_t peak = vreinterpretq_f32_s32(four_peaks(lanes.peaks + g)), most = vdupq_n_f32(127.f);
    const uint32x4_t tiny = vcltq_f32(peak, vdupq_n_f32(1e-30f));
    const float32x4_t power = vmulq_f32(vmulq_f32(vdupq_n_f32(kDominance), peak), peak);
    vst1q_f32(lanes.peak + g, peak);
    vst1q_f32(lanes.d + g, vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(vdivq_f32(peak, most)), tiny)));
    vst1q_f32(lanes.inverse + g, vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(vdivq_f32(most, peak)), tiny)));
    vst1q_u32(lanes.apart + g, vbicq_u32(vcgtq_f32(power, four_sums(lanes.squares + g)), tiny));
}

// `count` groups, at most kGroupsTogether, from `first` on.
template <bool Seconds>
static void quantize_groups(const Prologue& source, int first, int count, Act* act, int64_t stride, int64_t extra) {
    alignas(64) float x[kGroupsTogether * kGroup];
    GroupLanes lanes;
    for (int g = 0; g < count; ++g) {
        const int k = (first + g) * kGroup;
        const F a = source.at(k, 16), b = source.at(k + 16, 16);
        store(x + kGroup * g, a);
        store(x + kGroup * g + 16, b);
        measure_group(a, b, lanes.peaks[g], lanes.squares[g]);
    }
    for (int g = count; g % 4; ++g) lanes.peaks[g] = vdupq_n_s32(0), lanes.squares[g] = vdupq_n_f32(0.f);
    for (int g = 0; g < count; g += 4) scale_groups(lanes, g);

    int32x4_t sums[kGroupsTogether];
    const float32x4_t magic = vdupq_n_f32(12582912.f);
    for (int g = 0; g < count; ++g) {
        Act& out = act[g * stride];
        const F inverse = splat(lanes.inverse[g]), a = mul(load(x + kGroup * g), inverse), b = mul(load(x + kGroup * g + 16), inverse);
        I low, high;  // as round_even; the low bytes need no subtraction
        TS_UNROLL for (int i = 0; i < 4; ++i) {
            low.v[i] = vreinterpretq_s32_f32(vaddq_f32(a.v[i], magic));
            high.v[i] = vreinterpretq_s32_f32(vaddq_f32(b.v[i], magic));
        }
        const int8x16_t one = vdupq_n_s8(1), codes_a = low_bytes(low), codes_b = low_bytes(high);
        vst1q_s8(out.q, codes_a);
        vst1q_s8(out.q + 16, codes_b);
        sums[g] = vdotq_s32(vdotq_s32(vdupq_n_s32(0), codes_a, one), codes_b, one);
        out.d = lanes.d[g];
        out.more = 0;
    }
    for (int g = count; g % 4; ++g) sums[g] = vdupq_n_s32(0);
    for (int g = 0; g < count; g += 4) {
        float dsum[4];
        vst1q_f32(dsum, vmulq_f32(vld1q_f32(lanes.d + g), vcvtq_f32_s32(four_sums(sums + g))));
        for (int i = 0; i < 4 && g + i < count; ++i) act[(g + i) * stride].dsum = dsum[i];
    }
    if constexpr (!Seconds) return;
    for (int g = 0; g < count; ++g) {
        if (!lanes.apart[g]) continue;
        const F a = load(x + kGroup * g), b = load(x + kGroup * g + 16);
        quantize_apart(a, b, lanes.peak[g], ActPair{act[g * stride], act[g * stride + extra]});
    }
}

template <bool Seconds> static void quantize_row(const Prologue& source, int groups, Act* act, int64_t stride, int64_t extra) {
    for (int g = 0; g < groups; g += kGroupsTogether)
        quantize_groups<Seconds>(source, g, groups - g < kGroupsTogether ? groups - g : kGroupsTogether, act + g * stride, stride, extra);
}

}  // namespace
