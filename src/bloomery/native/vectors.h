// Eight floats at a time, in the vector types of GCC and Clang, which become AVX2, AVX-512 or NEON by the flags of the
// build; and the functions that neural networks are made of.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#define LANES 8
#define INLINE static inline __attribute__((always_inline))  // so that constants reach the loops

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef float f8u __attribute__((vector_size(32), aligned(4)));

static inline f8 load8(const float *at) { return *(const f8u *)at; }
static inline void store8(float *at, f8 x) { *(f8u *)at = x; }
static inline f8 all8(float x) { return (f8){x, x, x, x, x, x, x, x}; }
static inline f8 choose8(i8 mask, f8 yes, f8 no) { return (f8)((mask & (i8)yes) | (~mask & (i8)no)); }
static inline f8 max8(f8 a, f8 b) { return choose8(a > b, a, b); }
static inline f8 abs8(f8 x) { return (f8)((i8)x & 0x7fffffff); }

static inline float sum8(f8 x) {
    float a = (x[0] + x[4]) + (x[2] + x[6]), b = (x[1] + x[5]) + (x[3] + x[7]);
    return a + b;
}

static inline float highest8(f8 x) {
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}

static inline f8 between(f8 x, float low, float high) {
    x = choose8(x > high, all8(high), x);
    return choose8(x < low, all8(low), x);
}

// ---- half floats ---------------------------------------------------------------------------------------------------

static inline float from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    union { uint32_t bits; float value; } x, magic = {.bits = 113u << 23};
    if (rest >= 0x7c00) x.bits = 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x0400) x.bits = (rest << 13) + (112u << 23);
    else { x.bits = (rest << 13) + (113u << 23); x.value -= magic.value; }
    x.bits |= sign;
    return x.value;
}

// To the nearest, of two as near the even one; beyond 65,504 infinite.
static inline uint16_t to_half(float value) {
    union { float value; uint32_t bits; } x = {value}, least = {.bits = 126u << 23};
    uint32_t sign = x.bits >> 16 & 0x8000, rest = x.bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (rest < 113u << 23) {  // few digits: an addition rounds them
        x.bits = rest, x.value += least.value;
        return (uint16_t)(sign | (x.bits - least.bits));
    }
    return (uint16_t)(sign | (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13);
}

static inline f8 halves8(const void *at) {
#if defined(__F16C__)
    return (f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#else
    uint16_t h[8];
    memcpy(h, at, 16);
    f8 x;
    for (int i = 0; i < 8; i++) x[i] = from_half(h[i]);
    return x;
#endif
}

static inline void to_halves8(f8 x, void *at) {
#if defined(__F16C__)
    _mm_storeu_si128((__m128i *)at, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    uint16_t h[8];
    for (int i = 0; i < 8; i++) h[i] = to_half(x[i]);
    memcpy(at, h, 16);
#endif
}

// ---- functions -----------------------------------------------------------------------------------------------------

// exp within 2 units in the last place; 0 below -87.3, which is what a masked score needs.
static inline f8 exp8(f8 x) {
    f8 bounded = between(x, -87.3f, 88.7f);
    f8 shifted = bounded * all8(1.44269504f) + all8(12582912.0f);
    i8 power = ((i8)shifted - 0x4B400000) << 23;
    f8 n = shifted - all8(12582912.0f);
    f8 r = bounded - n * all8(0.693145752f) - n * all8(1.42860677e-6f);
    f8 p = all8(1.9875691500e-4f);
    p = p * r + all8(1.3981999507e-3f);
    p = p * r + all8(8.3334519073e-3f);
    p = p * r + all8(4.1665795894e-2f);
    p = p * r + all8(1.6666665459e-1f);
    p = p * r + all8(5.0000001201e-1f);
    p = p * r * r + r + all8(1.0f);
    f8 y = (f8)((i8)p + power);
    return choose8(x < all8(-87.3f), all8(0), y);
}

static inline f8 log8(f8 x) {
    i8 bits = (i8)x - 0x3f3504f3;  // splits at sqrt(1/2)
    f8 e = __builtin_convertvector(bits >> 23, f8);
    f8 m = (f8)((bits & 0x7fffff) + 0x3f3504f3) - all8(1.0f);
    f8 z = m * m;
    f8 p = all8(7.0376836292e-2f);
    p = p * m + all8(-1.1514610310e-1f);
    p = p * m + all8(1.1676998740e-1f);
    p = p * m + all8(-1.2420140846e-1f);
    p = p * m + all8(1.4249322787e-1f);
    p = p * m + all8(-1.6668057665e-1f);
    p = p * m + all8(2.0000714765e-1f);
    p = p * m + all8(-2.4999993993e-1f);
    p = p * m + all8(3.3333331174e-1f);
    return e * all8(0.693147181f) + (m + z * m * p - all8(0.5f) * z);
}

static inline f8 tanh8(f8 x) {
    f8 e = exp8(between(x, -10, 10) * all8(2.0f));
    f8 wide = (e - all8(1.0f)) / (e + all8(1.0f));
    f8 z = x * x;  // where e - 1 would cancel
    f8 near = x * (all8(1.0f) + z * (all8(-0.333333333f) + z * (all8(0.133333333f) + z * all8(-0.0539682540f))));
    return choose8(abs8(x) < all8(0.25f), near, wide);
}

static inline f8 erf8(f8 x) {
    f8 y;
    for (int i = 0; i < LANES; i++) y[i] = erff(x[i]);
    return y;
}

typedef enum { SILU, GELU, GELU_TANH, RELU } Activation;

static inline f8 activated8(f8 x, Activation kind) {
    switch (kind) {
        case SILU: return x / (all8(1.0f) + exp8(-x));
        case GELU: return all8(0.5f) * x * (all8(1.0f) + erf8(x * all8(0.707106781f)));
        case GELU_TANH: return x / (all8(1.0f) + exp8(all8(-1.59576912f) * x * (all8(1.0f) + all8(0.044715f) * x * x)));
        default: return choose8(x > all8(0), x, all8(0));
    }
}
