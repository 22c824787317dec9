// Eight floats at a time, in the vector types of GCC and Clang, which become AVX2, AVX-512 or NEON by the flags of the
// build; and the functions that neural networks are made of.
#pragma once
#include <math.h>
#include <stdint.h>

#define LANES 8

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
