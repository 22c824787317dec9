// Keys and values as they are kept: a cache is [2, slots, kv heads, dim] of floats, half floats or bytes. Behind bytes lie
// their scales, float32 [2, slots, kv heads]: what a head's numbers are multiplied with.
#pragma once
#include "native.h"

typedef enum { FLOATS, HALVES, BYTES } Kept;

typedef struct {
    char *numbers;
    long half;  // numbers from keys to values
    int kv_heads, dim, kind;
} Cache;

static inline long width_of(Kept kind) { return kind == FLOATS ? 4 : kind == HALVES ? 2 : 1; }
static inline long place_of(const Cache *c, long slot, int head, bool value) {
    return (slot * c->kv_heads + head) * c->dim + (value ? c->half : 0);
}
static inline float *scale_of(const Cache *c, long place) {
    return (float *)(c->numbers + 2 * c->half) + place / c->dim;
}

// Eight numbers from place i on, before their scale.
INLINE f8 kept8(const Kept kind, const char *at, long i) {
    if (kind == FLOATS) return load8((const float *)at + i);
    if (kind == HALVES) return halves8(at + 2 * i);
    typedef int8_t s8x8 __attribute__((vector_size(8)));
    s8x8 x;
    memcpy(&x, at + i, 8);
    return __builtin_convertvector(__builtin_convertvector(x, i8), f8);
}

// A head into its place; dim is a multiple of eight unless floats are kept.
static inline void keep(const Cache *c, long place, const float *x) {
    char *to = c->numbers + place * width_of(c->kind);
    if (c->kind == FLOATS) {
        memcpy(to, x, c->dim * sizeof(float));
    } else if (c->kind == HALVES) {
        for (int d = 0; d < c->dim; d += 8) to_halves8(between(load8(x + d), -65504, 65504), to + 2 * d);
    } else {
        float top = 0;
        for (int d = 0; d < c->dim; d++) top = fabsf(x[d]) > top ? fabsf(x[d]) : top;
        float scale = top / 127 > 1e-12f ? top / 127 : 1e-12f;
        for (int d = 0; d < c->dim; d++) {
            float y = rintf(x[d] / scale);
            to[d] = (int8_t)(y > 127 ? 127 : y > -127 ? y : -127);  // what is no number becomes the least
        }
        *scale_of(c, place) = scale;
    }
}
