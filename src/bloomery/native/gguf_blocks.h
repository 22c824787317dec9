// The blocks of GGUF files: where each type keeps its codes and scales. The byte layouts are those
// of llama.cpp's ggml-common.h; quant/gguf_blocks.py and quant/gguf_grids.py are the reference.
//
// A value is code * scale, with one scale for 16 or 32 columns (Q4_1, Q5_1, Q4_K, Q5_K and Q2_K
// also have an offset). The type is a constant at each call, so the compiler keeps one case.
#pragma once
#include "levels.h"
#include "native.h"

// The numbers are those of PACKED_TYPES in ops.py.
typedef enum {
    Q4_0,
    Q4_1,
    Q4_K,
    Q8_0,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q2_K,
    Q3_K,
    IQ4_NL,
    IQ4_XS,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ1_S,
    IQ1_M,
    TQ1_0,
    TQ2_0,
    Q1_0,
    MXFP4,
    NVFP4,
    NF4_BLOCK  // no type of GGUF: a float16 scale, then codes in the order of IQ4_NL
} Type;

static inline long type_bytes(Type type) {
    static const long of[] = {18,  20, 144, 34, 22, 24,  176, 210, 84, 110, 18, 136,
                              66, 74, 82,  98, 110, 50, 56,  54,  66, 18,  17, 36, 18};
    return of[type];
}

static inline int type_columns(Type type) {
    switch (type) {
        case Q4_0:
        case Q4_1:
        case Q8_0:
        case Q5_0:
        case Q5_1:
        case IQ4_NL:
        case MXFP4:
        case NF4_BLOCK: return 32;
        case NVFP4: return 64;
        case Q1_0: return 128;
        default: return 256;
    }
}

static inline uint16_t read_u16(const uint8_t *at) {
    uint16_t x;
    memcpy(&x, at, 2);
    return x;
}

static inline uint32_t read_u32(const uint8_t *at) {
    uint32_t x;
    memcpy(&x, at, 4);
    return x;
}

// ---- codes -------------------------------------------------------------------------------------

static inline int fifth_bit(const uint8_t *mask, int i) {
    return (mask[i / 8] >> (i % 8) & 1) << 4;
}

// Seven signs are stored; the eighth makes the number of negative values even.
static inline uint8_t complete_signs(uint32_t seven) {
    return (uint8_t)(seven | (uint32_t)__builtin_parity(seven) << 7);
}

// Writes eight entries of a grid with their signs; `left` and `right` are four entries each.
static inline void put_signed(const int8_t *left, const int8_t *right, uint8_t signs, uint8_t *q) {
    s8x8 x, bits = {1, 2, 4, 8, 16, 32, 64, -128};
    memcpy(&x, left, 4);
    memcpy((char *)&x + 4, right, 4);
    int8_t sign = (int8_t)signs;
    s8x8 all = {sign, sign, sign, sign, sign, sign, sign, sign};
    s8x8 negative = (s8x8)((all & bits) != 0);  // -1 where the sign is set
    x = (x ^ negative) - negative;
    memcpy(q, &x, 8);
}

// Writes eight entries of a grid of -1, 0 and 1 in eighths, moved by an eighth.
static inline void put_shifted(const int8_t *entry, int eighth, uint8_t *q) {
    s8x8 x, shift = {eighth, eighth, eighth, eighth, eighth, eighth, eighth, eighth};
    memcpy(&x, entry, 8);
    x = x * 8 + shift;
    memcpy(q, &x, 8);
}

// Writes columns 8 k .. 8 k + 7 of sub-block `sub` of a type whose codes are entries of a grid.
INLINE void unpack_grid_codes(const Type type, const uint8_t *b, int sub, int k, const int8_t *grid,
                              uint8_t *q) {
    int at = 4 * sub + k;  // of 32 groups of eight columns
    switch (type) {
        case IQ2_XXS: {
            const int8_t *entry = grid + 8 * b[2 + 8 * sub + k];
            uint32_t signs = read_u32(b + 6 + 8 * sub);
            put_signed(entry, entry + 4, complete_signs(signs >> 7 * k & 127), q);
            break;
        }
        case IQ2_XS: {
            uint16_t word = read_u16(b + 2 + 2 * at);
            const int8_t *entry = grid + 8 * (word & 511);
            put_signed(entry, entry + 4, complete_signs(word >> 9), q);
            break;
        }
        case IQ2_S: {
            const int8_t *entry = grid + 8 * (b[2 + at] | (b[66 + sub] >> 2 * k & 3) << 8);
            put_signed(entry, entry + 4, b[34 + at], q);
            break;
        }
        case IQ3_XXS: {
            uint32_t signs = read_u32(b + 66 + 4 * sub);
            put_signed(grid + 4 * b[2 + 2 * at], grid + 4 * b[3 + 2 * at],
                       complete_signs(signs >> 7 * k & 127), q);
            break;
        }
        case IQ3_S: {
            int high = b[66 + sub] >> 2 * k;
            put_signed(grid + 4 * (b[2 + 2 * at] | (high & 1) << 8),
                       grid + 4 * (b[3 + 2 * at] | (high >> 1 & 1) << 8), b[74 + at], q);
            break;
        }
        case IQ1_S: {
            uint16_t word = read_u16(b + 34 + 2 * sub);
            const int8_t *entry = grid + 8 * (b[2 + at] | (word >> 3 * k & 7) << 8);
            put_shifted(entry, word & 0x8000 ? -1 : 1, q);
            break;
        }
        case IQ1_M: {
            int nibble = b[32 + at / 2] >> (at % 2 * 4);
            put_shifted(grid + 8 * (b[at] | (nibble & 7) << 8), nibble & 8 ? -1 : 1, q);
            break;
        }
        default: break;
    }
}

// Writes `count` base-3 digits, minus 1: digit `digit` of each byte. A byte is a fraction of 256;
// times a power of 3, modulo 256, it begins with the next digit.
static inline void unpack_digits(const uint8_t *bytes, int digit, int count, uint8_t *q) {
    static const uint8_t power[5] = {1, 3, 9, 27, 81};
    for (int i = 0; i < count; i++) q[i] = ((uint8_t)(bytes[i] * power[digit]) * 3 >> 8) - 1;
}

// TQ1_0: 32 bytes with five digits each, 16 with five, four with four.
static inline void unpack_ternary(const uint8_t *b, int sub, uint8_t *q) {
    if (sub < 5) {
        unpack_digits(b, sub, 32, q);
    } else if (sub < 7) {
        unpack_digits(b + 32, 2 * (sub - 5), 16, q);
        unpack_digits(b + 32, 2 * (sub - 5) + 1, 16, q + 16);
    } else {
        unpack_digits(b + 32, 4, 16, q);
        for (int digit = 0; digit < 4; digit++) unpack_digits(b + 48, digit, 4, q + 16 + 4 * digit);
    }
}

// Separates 16 bytes into their low halves, then their high halves.
static inline void split_nibbles(const uint8_t *nibbles, uint8_t *q) {
    for (int i = 0; i < 16; i++) q[i] = nibbles[i] & 15;
    for (int i = 0; i < 16; i++) q[16 + i] = nibbles[i] >> 4;
}

// Writes the 32 codes of sub-block `sub` as bytes: 0 .. 31 for Q5_1 and Q5_K, 0 .. 3 for
// Q2_K, else signed. Types of four bits are packed without it.
INLINE void unpack_codes(const Type type, const uint8_t *b, int sub, const int8_t *grid,
                         uint8_t *q) {
    if (type >= IQ2_XXS && type <= IQ1_M) {
        for (int k = 0; k < 4; k++) unpack_grid_codes(type, b, sub, k, grid, q + 8 * k);
        return;
    }
    if (type == TQ1_0) {
        unpack_ternary(b, sub, q);
        return;
    }
    if (type == Q1_0) {  // a set bit means 1
        static const int8_t ones[4] = {1, 1, 1, 1};
        for (int k = 0; k < 4; k++) put_signed(ones, ones, ~b[2 + 4 * sub + k], q + 8 * k);
        return;
    }
    uint8_t four[32] = {0};
    if (type == Q5_0) split_nibbles(b + 6, four);
    if (type == Q5_1) split_nibbles(b + 8, four);
    for (int i = 0; i < 32; i++) {
        // Two bits a column: the four sub-blocks of 128 columns share 32 bytes.
        int pair = sub / 4 * 32 + i, shift = sub % 4 * 2;
        switch (type) {
            case Q5_0: q[i] = (four[i] | fifth_bit(b + 2, i)) - 16; break;
            case Q5_1: q[i] = four[i] | fifth_bit(b + 4, i); break;
            case Q8_0: q[i] = b[2 + i]; break;
            case Q5_K:
                q[i] = (b[48 + sub / 2 * 32 + i] >> (sub % 2 * 4) & 15) | (b[16 + i] >> sub & 1)
                                                                              << 4;
                break;
            case Q6_K: {
                // two halves of 128 codes: 64 bytes of low bits, 32 of high bits; four parts of 32
                int half = sub / 4, part = sub % 4;
                int low = b[half * 64 + part % 2 * 32 + i] >> (part / 2 * 4) & 15;
                int high = b[128 + half * 32 + i] >> (2 * part) & 3;
                q[i] = (low | high << 4) - 32;
                break;
            }
            case Q2_K: q[i] = b[16 + pair] >> shift & 3; break;
            case Q3_K: q[i] = ((b[32 + pair] >> shift & 3) | (b[i] >> sub & 1) << 2) - 4; break;
            case TQ2_0: q[i] = (b[pair] >> shift & 3) - 1; break;
            case NVFP4: {
                const uint8_t *group = b + 4 + 16 * sub + i / 16 * 8;
                q[i] = FP4_LEVELS[group[i % 8] >> (i % 16 / 8 * 4) & 15];
                break;
            }
            default: break;
        }
    }
}

// ---- scales ------------------------------------------------------------------------------------

// Reads the 6-bit scale and minimum of one of eight sub-blocks from their twelve bytes.
static inline void scale_and_minimum(const uint8_t *s, int sub, uint8_t *scale, uint8_t *minimum) {
    if (sub < 4) {
        *scale = s[sub] & 63;
        *minimum = s[sub + 4] & 63;
    } else {
        *scale = (s[sub + 4] & 15) | (s[sub - 4] >> 6 << 4);
        *minimum = (s[sub + 4] >> 4) | (s[sub] >> 6 << 4);
    }
}

// The float16 scale of a whole block.
INLINE uint16_t block_scale(const Type type, const uint8_t *b) {
    switch (type) {
        case Q6_K: return read_u16(b + 208);
        case Q2_K: return read_u16(b + 80);
        case Q3_K: return read_u16(b + 108);
        case TQ1_0: return read_u16(b + 52);
        case TQ2_0: return read_u16(b + 64);
        case IQ1_M:  // four bits in each of four words
            return (uint16_t)(b[49] >> 4 | b[51] >> 4 << 4 | b[53] >> 4 << 8 | b[55] >> 4 << 12);
        case MXFP4: return to_half(ldexpf(1.0f, b[0] - 128));
        default: return read_u16(b);
    }
}

// The signed integer by which the scale of the block is multiplied, for 16 columns: half 0 or 1 of
// sub-block `sub`. Types whose factor has eighths return eight times the factor.
INLINE int group_factor(const Type type, const uint8_t *b, int sub, int half) {
    int group = 2 * sub + half;
    switch (type) {
        case Q6_K: return (int8_t)b[192 + group];
        case Q3_K: {
            int low = b[96 + group % 8] >> (group / 8 * 4) & 15;
            int high = b[104 + group % 4] >> (group / 4 * 2) & 3;
            return (low | high << 4) - 32;
        }
        case IQ4_XS: {
            int low = b[4 + sub / 2] >> (sub % 2 * 4) & 15;
            int high = read_u16(b + 2) >> 2 * sub & 3;
            return (low | high << 4) - 32;
        }
        case IQ2_XXS: return 2 * (int)(read_u32(b + 6 + 8 * sub) >> 28) + 1;
        case IQ2_XS: return 2 * (b[66 + sub] >> (4 * half) & 15) + 1;
        case IQ2_S: return 2 * (b[74 + sub] >> (4 * half) & 15) + 1;
        case IQ3_XXS: return 4 * (int)(read_u32(b + 66 + 4 * sub) >> 28) + 2;
        case IQ3_S: return 2 * (b[106 + sub / 2] >> (sub % 2 * 4) & 15) + 1;
        case IQ1_S: return 2 * (read_u16(b + 34 + 2 * sub) >> 12 & 7) + 1;
        case IQ1_M: return 2 * (read_u16(b + 48 + group / 4 * 2) >> (group % 4 * 3) & 7) + 1;
        default: return 1;
    }
}

// An unsigned float of eight bits, four of them exponent, halved: the levels of FP4 are doubled.
static inline float half_of_ue4m3(uint8_t x) {
    int exponent = x >> 3 & 15, mantissa = x & 7;
    if (x == 0x7f) return 0;
    if (!exponent) return (float)mantissa / 1024;
    return (float)((8 + mantissa) << exponent) / 2048;
}

// ---- types that are rounded --------------------------------------------------------------------

// The 32 values of a sub-block of Q2_K or NVFP4, whose scales no panel layout can hold.
INLINE void decode_values(const Type type, const uint8_t *b, int sub, f32x8 *x) {
    uint8_t q[32];
    unpack_codes(type, b, sub, NULL, q);
    for (int half = 0; half < 2; half++) {
        float scale, offset = 0;
        if (type == Q2_K) {
            uint8_t group = b[2 * sub + half];
            scale = from_half(read_u16(b + 80)) * (group & 15);
            offset = from_half(read_u16(b + 82)) * (group >> 4);
        } else {
            scale = half_of_ue4m3(b[2 * sub + half]);
        }
        for (int i = 2 * half; i < 2 * half + 2; i++)
            x[i] = load_signed8(q + 8 * i) * broadcast8(scale) - broadcast8(offset);
    }
}

// Rounds 32 values to eight bits; returns the float16 scale. The largest value is 127 steps.
static inline uint16_t round_values(const f32x8 *x, uint8_t *q) {
    const f32x8 magic = broadcast8(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
    f32x8 top = broadcast8(0);
    for (int i = 0; i < 4; i++) top = max8(top, abs8(x[i]));
    uint16_t scale = to_half(reduce_max8(top) / 127);
    float step = from_half(scale), inverse = step > 0 ? 1 / step : 0;
    i32x8 steps[4];
    for (int i = 0; i < 4; i++) {
        f32x8 shifted = clamp8(x[i] * broadcast8(inverse), -127, 127) + magic;
        steps[i] = (i32x8)shifted - 0x4B400000;
    }
    store_signed32(steps, q);
    return scale;
}
