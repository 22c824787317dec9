// The memory layout of the KV cache: [2, slots, kv heads, head dim] of float32, float16 or int8.
// The scales of int8 values follow the values: float32 [2, slots, kv heads], one for each head.
#pragma once
#include "native.h"

typedef enum { CACHE_FLOAT, CACHE_HALF, CACHE_INT8 } CacheKind;

typedef struct {
    char *values;
    long value_offset;  // elements from the keys to the values
    int kv_heads, head_dim, kind;
} KvCache;

static inline long element_bytes(CacheKind kind) {
    if (kind == CACHE_FLOAT) return 4;
    return kind == CACHE_HALF ? 2 : 1;
}

// The index of the first element of one head of the key (or value) in a slot.
static inline long cache_index(const KvCache *c, long slot, int head, bool value) {
    return (slot * c->kv_heads + head) * c->head_dim + (value ? c->value_offset : 0);
}

static inline float *cache_scale(const KvCache *c, long index) {
    return (float *)(c->values + 2 * c->value_offset) + index / c->head_dim;
}

// Loads eight elements from element i on, not yet multiplied with their scale.
INLINE f32x8 load_cache8(const CacheKind kind, const char *at, long i) {
    if (kind == CACHE_FLOAT) return load8((const float *)at + i);
    if (kind == CACHE_HALF) return load_half8(at + 2 * i);
    return load_signed8(at + i);
}

// Stores one head. The head dim is a multiple of eight unless the cache is float32.
static inline void store_head(const KvCache *c, long index, const float *x) {
    char *to = c->values + index * element_bytes(c->kind);
    if (c->kind == CACHE_FLOAT) {
        memcpy(to, x, c->head_dim * sizeof(float));
    } else if (c->kind == CACHE_HALF) {
        for (int d = 0; d < c->head_dim; d += 8)
            store_half8(clamp8(load8(x + d), -65504, 65504), to + 2 * d);
    } else {
        float largest = 0;
        for (int d = 0; d < c->head_dim; d++)
            largest = fabsf(x[d]) > largest ? fabsf(x[d]) : largest;
        float scale = largest / 127 > 1e-12f ? largest / 127 : 1e-12f;
        for (int d = 0; d < c->head_dim; d++) {
            float y = rintf(x[d] / scale);
            if (y > 127) y = 127;
            if (!(y > -127)) y = -127;  // also for NaN
            to[d] = (int8_t)y;
        }
        *cache_scale(c, index) = scale;
    }
}
