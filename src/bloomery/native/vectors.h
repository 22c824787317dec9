// Vectors of eight floats, and the functions that neural networks need on them. Products have
// vectors of 16 floats where registers hold those.
//
// The types are the vector extensions of GCC and Clang; the build flags decide whether they become
// AVX2, AVX-512 or NEON.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LANES 8
#define INLINE static inline __attribute__((always_inline))  // constants reach the loops

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef float f32x8_unaligned __attribute__((vector_size(32), aligned(4)));

static inline f32x8 load8(const float *at) { return *(const f32x8_unaligned *)at; }
static inline void store8(float *at, f32x8 x) { *(f32x8_unaligned *)at = x; }
static inline f32x8 broadcast8(float x) { return (f32x8){x, x, x, x, x, x, x, x}; }
static inline f32x8 select8(i32x8 mask, f32x8 yes, f32x8 no) {
    return (f32x8)((mask & (i32x8)yes) | (~mask & (i32x8)no));
}
static inline f32x8 max8(f32x8 a, f32x8 b) { return select8(a > b, a, b); }
static inline f32x8 abs8(f32x8 x) { return (f32x8)((i32x8)x & 0x7fffffff); }

#if defined(__aarch64__)
// NEON registers hold four floats: a vector of eight is a pair of them.
static inline f32x8 join8(float32x4_t low, float32x4_t high) {
    f32x8 x;
    memcpy(&x, &low, 16);
    memcpy((char *)&x + 16, &high, 16);
    return x;
}
static inline f32x8 from_words8(int16x8_t x) {
    return join8(vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x)));
}
#endif

// a * b + c, rounded once. In an expression, compilers fuse the two operations in some loops and
// not in others, so results would depend on which loop computes them.
static inline f32x8 fuse8(f32x8 a, f32x8 b, f32x8 c) {
#if defined(__FMA__)
    return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    float32x4_t x[2], y[2], z[2];
    memcpy(x, &a, 32);
    memcpy(y, &b, 32);
    memcpy(z, &c, 32);
    return join8(vfmaq_f32(z[0], x[0], y[0]), vfmaq_f32(z[1], x[1], y[1]));
#else
    return a * b + c;
#endif
}

// ---- as many floats as a register holds, but at least eight ------------------------------------

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define WIDE_LANES 16
typedef float WideFloats __attribute__((vector_size(64)));
static inline WideFloats broadcast_wide(float x) { return (WideFloats)_mm512_set1_ps(x); }
static inline WideFloats fuse_wide(WideFloats a, WideFloats b, WideFloats c) {
    return (WideFloats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#else
#define WIDE_LANES 8
typedef f32x8 WideFloats;
static inline WideFloats broadcast_wide(float x) { return broadcast8(x); }
static inline WideFloats fuse_wide(WideFloats a, WideFloats b, WideFloats c) {
    return fuse8(a, b, c);
}
#endif

static inline WideFloats load_wide(const float *at) {
    WideFloats x;
    memcpy(&x, at, sizeof x);
    return x;
}

static inline void store_wide(float *at, WideFloats x) { memcpy(at, &x, sizeof x); }

static inline float reduce_sum8(f32x8 x) {
    float a = (x[0] + x[4]) + (x[2] + x[6]), b = (x[1] + x[5]) + (x[3] + x[7]);
    return a + b;
}

static inline float reduce_max8(f32x8 x) {
    x = max8(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
    x = max8(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
    return x[0] > x[1] ? x[0] : x[1];
}

static inline i32x8 max_ints8(i32x8 a, i32x8 b) {
#if defined(__AVX2__)
    return (i32x8)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    i32x8 larger = a > b;
    return (a & larger) | (b & ~larger);
#endif
}

static inline int32_t reduce_max_ints8(i32x8 x) {
    x = max_ints8(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
    x = max_ints8(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
    return x[0] > x[1] ? x[0] : x[1];
}

static inline int32_t reduce_ints8(i32x8 x) {
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
    return x[0] + x[1];
}

static inline f32x8 clamp8(f32x8 x, float low, float high) {
    x = select8(x > high, broadcast8(high), x);
    return select8(x < low, broadcast8(low), x);
}

// ---- bytes -------------------------------------------------------------------------------------
// GCC converts vectors of bytes one element at a time, hence the intrinsics.

typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef int8_t s8x8 __attribute__((vector_size(8)));

static inline f32x8 load_bytes8(const void *at) {
#if defined(__AVX2__)
    return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#elif defined(__aarch64__)
    return from_words8(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(at))));
#else
    u8x8 x;
    memcpy(&x, at, 8);
    return __builtin_convertvector(__builtin_convertvector(x, i32x8), f32x8);
#endif
}

static inline f32x8 load_signed8(const void *at) {
#if defined(__AVX2__)
    return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#elif defined(__aarch64__)
    return from_words8(vmovl_s8(vld1_s8(at)));
#else
    s8x8 x;
    memcpy(&x, at, 8);
    return __builtin_convertvector(__builtin_convertvector(x, i32x8), f32x8);
#endif
}

// Stores 32 integers between -128 and 127.
static inline void store_signed32(const i32x8 x[4], void *at) {
#if defined(__AVX2__)
    __m256i left = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]);
    __m256i right = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs works in halves
    __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(left, right), order);
    _mm256_storeu_si256((__m256i *)at, bytes);
#else
    for (int i = 0; i < 4; i++) {
        s8x8 small = __builtin_convertvector(x[i], s8x8);
        memcpy((char *)at + 8 * i, &small, 8);
    }
#endif
}

// ---- half floats -------------------------------------------------------------------------------

static inline float from_half(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    union {
        uint32_t bits;
        float value;
    } x, magic = {.bits = 113u << 23};
    if (rest >= 0x7c00) x.bits = 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x0400) x.bits = (rest << 13) + (112u << 23);
    else {
        x.bits = (rest << 13) + (113u << 23);
        x.value -= magic.value;
    }
    x.bits |= sign;
    return x.value;
#endif
}

// Rounds to the nearest, ties to even; values beyond 65,504 become infinite.
static inline uint16_t to_half(float value) {
    union {
        float value;
        uint32_t bits;
    } x = {value}, least = {.bits = 126u << 23};
    uint32_t sign = x.bits >> 16 & 0x8000, rest = x.bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (rest < 113u << 23) {  // subnormal: the addition rounds it
        x.bits = rest;
        x.value += least.value;
        return (uint16_t)(sign | (x.bits - least.bits));
    }
    return (uint16_t)(sign | (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13);
}

static inline f32x8 load_half8(const void *at) {
#if defined(__F16C__)
    return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#elif defined(__aarch64__)
    float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(at));
    return join8(vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h));
#else
    uint16_t h[8];
    memcpy(h, at, 16);
    f32x8 x;
    for (int i = 0; i < 8; i++) x[i] = from_half(h[i]);
    return x;
#endif
}

// A 16-bit brain float is the upper half of a float.
static inline f32x8 load_bfloat8(const void *at) {
#if defined(__AVX2__)
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
    return (f32x8)_mm256_slli_epi32(wide, 16);
#elif defined(__aarch64__)
    uint16x8_t h = vld1q_u16(at);
    return join8(vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
                 vreinterpretq_f32_u32(vshll_high_n_u16(h, 16)));
#else
    uint16_t h[8];
    memcpy(h, at, 16);
    i32x8 bits;
    for (int i = 0; i < 8; i++) bits[i] = (int32_t)((uint32_t)h[i] << 16);
    return (f32x8)bits;
#endif
}

static inline void store_half8(f32x8 x, void *at) {
#if defined(__F16C__)
    _mm_storeu_si128((__m128i *)at, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    float32x4_t parts[2];
    memcpy(parts, &x, 32);
    float16x8_t h = vcvt_high_f16_f32(vcvt_f16_f32(parts[0]), parts[1]);
    vst1q_u16(at, vreinterpretq_u16_f16(h));
#else
    uint16_t h[8];
    for (int i = 0; i < 8; i++) h[i] = to_half(x[i]);
    memcpy(at, h, 16);
#endif
}

// ---- functions ---------------------------------------------------------------------------------

// exp within 2 units in the last place; 0 below -87.3, as masked scores need.
static inline f32x8 exp8(f32x8 x) {
    f32x8 bounded = clamp8(x, -87.3f, 88.7f);
    f32x8 shifted = bounded * broadcast8(1.44269504f) + broadcast8(12582912.0f);
    i32x8 power = ((i32x8)shifted - 0x4B400000) << 23;
    f32x8 n = shifted - broadcast8(12582912.0f);
    f32x8 r = bounded - n * broadcast8(0.693145752f) - n * broadcast8(1.42860677e-6f);
    f32x8 p = broadcast8(1.9875691500e-4f);
    p = p * r + broadcast8(1.3981999507e-3f);
    p = p * r + broadcast8(8.3334519073e-3f);
    p = p * r + broadcast8(4.1665795894e-2f);
    p = p * r + broadcast8(1.6666665459e-1f);
    p = p * r + broadcast8(5.0000001201e-1f);
    p = p * r * r + r + broadcast8(1.0f);
    f32x8 y = (f32x8)((i32x8)p + power);
    return select8(x < broadcast8(-87.3f), broadcast8(0), y);
}

static inline f32x8 log8(f32x8 x) {
    i32x8 bits = (i32x8)x - 0x3f3504f3;  // splits at sqrt(1/2)
    f32x8 e = __builtin_convertvector(bits >> 23, f32x8);
    f32x8 m = (f32x8)((bits & 0x7fffff) + 0x3f3504f3) - broadcast8(1.0f);
    f32x8 z = m * m;
    f32x8 p = broadcast8(7.0376836292e-2f);
    p = p * m + broadcast8(-1.1514610310e-1f);
    p = p * m + broadcast8(1.1676998740e-1f);
    p = p * m + broadcast8(-1.2420140846e-1f);
    p = p * m + broadcast8(1.4249322787e-1f);
    p = p * m + broadcast8(-1.6668057665e-1f);
    p = p * m + broadcast8(2.0000714765e-1f);
    p = p * m + broadcast8(-2.4999993993e-1f);
    p = p * m + broadcast8(3.3333331174e-1f);
    return e * broadcast8(0.693147181f) + (m + z * m * p - broadcast8(0.5f) * z);
}

static inline f32x8 tanh8(f32x8 x) {
    f32x8 e = exp8(clamp8(x, -10, 10) * broadcast8(2.0f));
    f32x8 wide = (e - broadcast8(1.0f)) / (e + broadcast8(1.0f));
    f32x8 z = x * x;  // near zero e - 1 would cancel: use the series
    f32x8 series = x * (broadcast8(1.0f) +
                        z * (broadcast8(-0.333333333f) +
                             z * (broadcast8(0.133333333f) + z * broadcast8(-0.0539682540f))));
    return select8(abs8(x) < broadcast8(0.25f), series, wide);
}

static inline f32x8 erf8(f32x8 x) {
    f32x8 y;
    for (int i = 0; i < LANES; i++) y[i] = erff(x[i]);
    return y;
}

// exp(x) - 1 - x for negative x. Near zero the difference would cancel: use the series.
static inline f32x8 exp_minus_line8(f32x8 x) {
    f32x8 series = broadcast8(1.0f / 24) + x * (broadcast8(1.0f / 120) + x * broadcast8(1.0f / 720));
    series = x * x * (broadcast8(0.5f) + x * (broadcast8(1.0f / 6) + x * series));
    f32x8 direct = exp8(select8(x > broadcast8(0), broadcast8(0), x)) - broadcast8(1.0f) - x;
    return select8(x > broadcast8(-0.25f), series, direct);
}

typedef enum { SILU, GELU, GELU_TANH, RELU, RELU2, XIELU, CLAMPED_SWIGLU } ActivationKind;

// An activation and its parameters (see kernels/activation.py).
typedef struct {
    int kind;
    float params[3];
} Activation;

static inline f32x8 activate8(f32x8 x, const Activation *a) {
    f32x8 positive = select8(x > broadcast8(0), x, broadcast8(0));
    switch ((ActivationKind)a->kind) {
        case SILU: return x / (broadcast8(1.0f) + exp8(-x));
        case GELU:
            return broadcast8(0.5f) * x * (broadcast8(1.0f) + erf8(x * broadcast8(0.707106781f)));
        case GELU_TANH:
            return x /
                   (broadcast8(1.0f) + exp8(broadcast8(-1.59576912f) * x *
                                            (broadcast8(1.0f) + broadcast8(0.044715f) * x * x)));
        case RELU2: return positive * positive;
        case XIELU: {
            f32x8 quadratic = broadcast8(a->params[0]) * x * x;
            f32x8 exponential = broadcast8(a->params[1]) * exp_minus_line8(x);
            return select8(x > broadcast8(0), quadratic, exponential) +
                   broadcast8(a->params[2]) * x;
        }
        default: return positive;
    }
}

// activation(gate) * up
static inline f32x8 gate8(f32x8 gate, f32x8 up, const Activation *a) {
    if (a->kind != CLAMPED_SWIGLU) return activate8(gate, a) * up;
    f32x8 limit = broadcast8(a->params[0]);
    gate = select8(gate > limit, limit, gate);
    up = clamp8(up, -a->params[0], a->params[0]);
    return gate / (broadcast8(1.0f) + exp8(broadcast8(-a->params[1]) * gate)) *
           (up + broadcast8(a->params[2]));
}
