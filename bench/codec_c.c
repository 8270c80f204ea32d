/* The loops of tierkv/codec/kernels.py in C, for comparison: groups of values with max(abs(x)) / 127 as their scale,
 * rounding to nearest by the same fused addition of 1.5 * 2^23. bench/codec.py builds it with -O3 -march=native and
 * checks that both write the same bytes before it times anything. Only finite values in the usual range; whole
 * groups. */
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

#define CODEC(TYPE, BITS, MASK, SCALE, SCALE_BITS, GROUP)                                                             \
    void encode_##TYPE##_##GROUP(const BITS *restrict x, SCALE_BITS *restrict scales, int8_t *restrict codes,         \
                                 ptrdiff_t n) {                                                                       \
        for (ptrdiff_t g = 0; g < n / GROUP; g++) {                                                                   \
            const BITS *restrict in = x + g * GROUP;                                                                  \
            int8_t *restrict out = codes + g * GROUP;                                                                 \
            BITS top = 0;                                                                                             \
            for (int i = 0; i < GROUP; i++) {                                                                         \
                BITS magnitude = in[i] & MASK;                                                                        \
                top = magnitude > top ? magnitude : top;                                                              \
            }                                                                                                         \
            scales[g] = NARROW_##SCALE(WIDEN_##TYPE(top) / 127.0f);                                                   \
            float inverse = 1.0f / WIDEN_##SCALE(scales[g]);                                                          \
            for (int i = 0; i < GROUP; i++)                                                                           \
                out[i] = (int8_t)as_bits(fmaf(WIDEN_##TYPE(in[i]), inverse, 12582912.0f));                            \
        }                                                                                                             \
    }                                                                                                                 \
    void decode_##TYPE##_##GROUP(const int8_t *restrict codes, const SCALE_BITS *restrict scales, BITS *restrict x,   \
                                 ptrdiff_t n) {                                                                       \
        for (ptrdiff_t g = 0; g < n / GROUP; g++) {                                                                   \
            const int8_t *restrict in = codes + g * GROUP;                                                            \
            BITS *restrict out = x + g * GROUP;                                                                       \
            float scale = WIDEN_##SCALE(scales[g]);                                                                   \
            for (int i = 0; i < GROUP; i++) out[i] = NARROW_##TYPE((float)in[i] * scale);                             \
        }                                                                                                             \
    }

CODEC(bf16, uint16_t, 0x7fff, bf16, uint16_t, 64)
CODEC(bf16, uint16_t, 0x7fff, f32, uint32_t, 256)
CODEC(f32, uint32_t, 0x7fffffff, bf16, uint16_t, 64)
CODEC(f32, uint32_t, 0x7fffffff, f32, uint32_t, 256)
