/* The loops of tierkv/codec/kernels.py in C, for comparison: groups of values whose peak is code -128, or the largest of
 * the other sign 127 where that needs the larger scale, with rounding to nearest by the same fused addition of
 * 1.5 * 2^23. bench/codec.py builds it with -O3 -march=native and checks that both write the same bytes before it times
 * anything. Only finite values in the usual range; whole groups. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline float as_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline uint32_t as_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
static inline uint16_t to_bf16(float value) {
    uint32_t bits = as_bits(value);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define WIDEN_bf16(bits) as_float((uint32_t)(bits) << 16)
#define WIDEN_f32(bits) as_float(bits)
#define NARROW_bf16(value) to_bf16(value)
#define NARROW_f32(value) as_bits(value)

#define CODEC(TYPE, BITS, SIGNED, SIGN, SCALE, SCALE_BITS, SCALE_SIGN, GROUP)                                          \
    void encode_##TYPE##_##GROUP(const BITS *restrict x, SCALE_BITS *restrict scales, int8_t *restrict codes,          \
                                 ptrdiff_t n) {                                                                        \
        for (ptrdiff_t g = 0; g < n / GROUP; g++) {                                                                    \
            const BITS *restrict in = x + g * GROUP;                                                                   \
            int8_t *restrict out = codes + g * GROUP;                                                                  \
            SIGNED above = (SIGNED)SIGN;                                                                               \
            BITS below = 0;                                                                                            \
            for (int i = 0; i < GROUP; i++) {                                                                          \
                above = (SIGNED)in[i] > above ? (SIGNED)in[i] : above;                                                 \
                below = in[i] > below ? in[i] : below;                                                                 \
            }                                                                                                          \
            BITS positive = above > 0 ? (BITS)above : 0;                                                               \
            BITS negative = below & SIGN ? below ^ SIGN : 0;                                                           \
            float top = WIDEN_##TYPE(positive > negative ? positive : negative) * (1 / 128.0f);                        \
            float other = WIDEN_##TYPE(positive < negative ? positive : negative) / 127.0f;                            \
            scales[g] = NARROW_##SCALE(other > top ? other : top) | (positive >= negative ? SCALE_SIGN : 0);           \
            float inverse = 1.0f / WIDEN_##SCALE(scales[g]);                                                           \
            for (int i = 0; i < GROUP; i++)                                                                            \
                out[i] = (int8_t)as_bits(fmaf(WIDEN_##TYPE(in[i]), inverse, 12582912.0f));                             \
        }                                                                                                              \
    }                                                                                                                  \
    void decode_##TYPE##_##GROUP(const int8_t *restrict codes, const SCALE_BITS *restrict scales, BITS *restrict x,    \
                                 ptrdiff_t n) {                                                                        \
        for (ptrdiff_t g = 0; g < n / GROUP; g++) {                                                                    \
            const int8_t *restrict in = codes + g * GROUP;                                                             \
            BITS *restrict out = x + g * GROUP;                                                                        \
            float scale = WIDEN_##SCALE(scales[g]);                                                                    \
            for (int i = 0; i < GROUP; i++) out[i] = NARROW_##TYPE(fmaf((float)in[i], scale, 0.0f));                   \
        }                                                                                                              \
    }

CODEC(bf16, uint16_t, int16_t, 0x8000, bf16, uint16_t, 0x8000, 64)
CODEC(bf16, uint16_t, int16_t, 0x8000, f32, uint32_t, 0x80000000, 256)
CODEC(f32, uint32_t, int32_t, 0x80000000, bf16, uint16_t, 0x8000, 64)
CODEC(f32, uint32_t, int32_t, 0x80000000, f32, uint32_t, 0x80000000, 256)
