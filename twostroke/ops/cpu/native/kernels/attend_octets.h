// Attention over coded caches with ARM's int8 matrix instructions: 2 lines x 2 keys x 8 dimensions (or 2 dimensions x 8 keys) in
// one, twice the work of a dot product. The integer dots are the same and so is every float operation after them: the bits
// equal those of VectorCodes.
#pragma once

namespace {

constexpr int kOctetLines = 4;  // in a tile: two pairs, 16 registers of sums

// Two quads of 16 keys (or dimensions) as 8 pairs of them, [2][8 neighbours of what is summed over].
TS_INLINE void join_quads(const uint8_t* first, const uint8_t* second, int8_t* out) {
    const W a = load_codes(first), b = load_codes(second);
    TS_UNROLL for (int i = 0; i < 4; ++i) {
        const int32x4_t x = vreinterpretq_s32_s8(a.v[i]), y = vreinterpretq_s32_s8(b.v[i]);
        vst1q_s8(out + 32 * i, vreinterpretq_s8_s32(vzip1q_s32(x, y)));
        vst1q_s8(out + 32 * i + 16, vreinterpretq_s8_s32(vzip2q_s32(x, y)));
    }
}

// The panels of a step for matrix instructions: keys as [4 blocks][padded / 8][8 pairs of keys][2][8 dimensions], values as
// [8 octets of keys][padded / 16][8 pairs of dimensions][2][8 keys]. They lie behind the panels in the tile's scratch.
struct Octets {
    int8_t *keys, *values;
    int padded;

    explicit Octets(const CodedStep& step)
        : keys((int8_t*)step.tile.keys + kStep * step.tile.padded), values((int8_t*)step.tile.block + kStep * step.tile.padded), padded(step.tile.padded) {
        for (int b = step.from / kBlock; b * kBlock < step.to; ++b) {
            for (int d = 0; d < padded; d += 8) join_quads(step.panels.keys[b] + 16 * d, step.panels.keys[b] + 16 * d + 64, keys_of(b) + 16 * d);
            for (int half = 0; half < 2; ++half)
                for (int d = 0; d < padded; d += 16) {
                    const uint8_t* part = step.panels.values[b] + 8 * half * padded + 4 * d;
                    join_quads(part, part + 4 * padded, values_of(b) + 8 * half * padded + 8 * d);
                }
        }
    }
    TS_MEMBER int8_t* keys_of(int b) const { return keys + b * kBlock * padded; }
    TS_MEMBER int8_t* values_of(int b) const { return values + b * kBlock * padded; }
};

struct OctetSums {
    int32x4_t pair[2][8];  // of two lines with two keys each: [line 0, line 0, line 1, line 1]

    TS_MEMBER OctetSums() {
        TS_UNROLL for (int p = 0; p < 2; ++p)
            TS_UNROLL for (int i = 0; i < 8; ++i) pair[p][i] = vdupq_n_s32(kDotStart);
    }

    // 16 inputs of four lines, `stride` bytes apart, with two octets, `next` bytes apart.
    TS_MEMBER void add(const int8_t* lines, int stride, const int8_t* octets, int next) {
        int8x16_t inputs[2][2];
        TS_UNROLL for (int p = 0; p < 2; ++p) {
            const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(lines + 2 * p * stride));
            const int64x2_t b = vreinterpretq_s64_s8(vld1q_s8(lines + (2 * p + 1) * stride));
            inputs[p][0] = vreinterpretq_s8_s64(vtrn1q_s64(a, b));
            inputs[p][1] = vreinterpretq_s8_s64(vtrn2q_s64(a, b));
        }
        TS_UNROLL for (int half = 0; half < 2; ++half)
            TS_UNROLL for (int i = 0; i < 8; ++i) {
                const int8x16_t codes = vld1q_s8(octets + next * half + 16 * i);
                TS_UNROLL for (int p = 0; p < 2; ++p) pair[p][i] = vmmlaq_s32(pair[p][i], inputs[p][half], codes);
            }
    }

    TS_MEMBER F line(int which) const {
        I dot;
        TS_UNROLL for (int i = 0; i < 4; ++i) {
            const int64x2_t a = vreinterpretq_s64_s32(pair[which / 2][2 * i]), b = vreinterpretq_s64_s32(pair[which / 2][2 * i + 1]);
            dot.v[i] = vreinterpretq_s32_s64(which % 2 ? vtrn2q_s64(a, b) : vtrn1q_s64(a, b));
        }
        return to_float_dot(dot);
    }
};

struct OctetCodes : VectorCodes {
    TS_MEMBER static void score(const CodedStep& step, const Octets& octets, const Lines& s, float* q, int from, int to) {
        for (int line = 0; line < s.count; line += kOctetLines, q += kOctetLines * s.padded)
            for (int b = from / kBlock; b * kBlock < to; ++b) {
                OctetSums sums;
                for (int d = 0; d < s.padded; d += 16)
                    sums.add((const int8_t*)q + d, s.padded * (int)sizeof(float), octets.keys_of(b) + 16 * d, 128);
                const F key_scales = load(step.blocks.key_scales[b]);
                TS_UNROLL for (int i = 0; i < kOctetLines; ++i)
                    store(s.scores + kStep * (line + i) + kBlock * b, mul(sums.line(i), mul(key_scales, splat(query_scale(q + i * s.padded, s.padded)))));
            }
    }

    TS_MEMBER static void weigh(const Octets& octets, const Lines& s, int from, int to) {
        for (int line = 0; line < s.count; line += kOctetLines)
            for (int d = 0; d < s.padded; d += 16) {
                OctetSums sums;
                for (int b = from / kBlock; b * kBlock < to; ++b)
                    sums.add(s.codes + kStep * line + kBlock * b, kStep, octets.values_of(b) + 8 * d, 8 * s.padded);
                TS_UNROLL for (int i = 0; i < kOctetLines; ++i) {
                    float* const into = s.values + (line + i) * s.padded + d;
                    store(into, fma(sums.line(i), splat(s.steps[line + i]), mul(load(into), splat(s.rescale[line + i]))));
                }
            }
    }

    // Lines [line, end) of the tile: as many as fill tiles, and the rest with dot products. Few lines are all of them rest.
    template <bool Fetch> static void attend(const CodedStep& step, int line, int end) {
        if (Fetch || end - line < kOctetLines) return VectorCodes::attend<Fetch>(step, line, end);
        const Octets octets(step);
        const int whole = end - (end - line) % kOctetLines;
        for (; line < whole; line += kLinesTogether) {
            const Lines s = lines_from(step.tile, line, whole - line < kLinesTogether ? whole - line : kLinesTogether);
            const SeenKeys seen = seen_keys(step.task, line, s.count, step.start);
            score(step, octets, s, queries_of(step.task, line, s.padded), seen.from, seen.to);
            soften_chunk(step, s, seen);
            weigh(octets, s, seen.from, seen.to);
        }
        VectorCodes::attend<Fetch>(step, whole, end);
    }
};

}  // namespace
