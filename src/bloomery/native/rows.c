// What happens to rows of activations between products: norms, activations, additions, positions, tokens.
#include "cache.h"

#include <math.h>
#include <stdlib.h>

// ---- norms ---------------------------------------------------------------------------------------------------------

void norm_row(const float *x, float *y, long n, const Norm *norm) {
    f8 total = all8(0);
    float mean = 0, tail = 0;
    long k;
    if (norm->kind == 2) {
        for (k = 0; k + LANES <= n; k += LANES) total += load8(x + k);
        for (; k < n; k++) tail += x[k];
        mean = (sum8(total) + tail) / (float)n, total = all8(0), tail = 0;
    }
    for (k = 0; k + LANES <= n; k += LANES) {
        f8 v = load8(x + k) - all8(mean);
        total += v * v;
    }
    for (; k < n; k++) tail += (x[k] - mean) * (x[k] - mean);
    float root = 1.0f / sqrtf((sum8(total) + tail) / (float)n + norm->eps);
    for (k = 0; k + LANES <= n; k += LANES) {
        f8 v = (load8(x + k) - all8(mean)) * all8(root);
        if (norm->weight) v *= load8(norm->weight + k);
        if (norm->bias) v += load8(norm->bias + k);
        store8(y + k, v);
    }
    for (; k < n; k++) {
        float v = (x[k] - mean) * root;
        if (norm->weight) v *= norm->weight[k];
        if (norm->bias) v += norm->bias[k];
        y[k] = v;
    }
}

typedef struct {
    const float *x;
    float *out;
    long rows, columns, groups;  // `groups` rows of weights, taken in turn: each head its own
    Norm norm;
} NormRows;

static void norm_kernel(const void *arguments, const Crew *crew) {
    const NormRows *a = arguments;
    long first, end;
    while (take(crew, a->rows, share(crew, a->rows, 4), &first, &end))
        for (long row = first; row < end; row++) {
            Norm norm = a->norm;
            if (norm.weight) norm.weight += row % a->groups * a->columns;
            if (norm.bias) norm.bias += row % a->groups * a->columns;
            norm_row(a->x + row * a->columns, a->out + row * a->columns, a->columns, &norm);
        }
}

void native_norm(const float *x, long rows, long columns, int kind, float eps, const float *weight, const float *bias,
                 long groups, float *out) {
    NormRows a = {x, out, rows, columns, groups, {kind, eps, weight, bias}};
    issue(norm_kernel, &a, sizeof a, (double)rows * columns / 2);
}

// ---- element by element --------------------------------------------------------------------------------------------

typedef enum { ADD_SCALED, MULTIPLY, TIMES_NUMBER, PLUS_NUMBER, TANH, ACTIVATED, GATED } Rule;

typedef struct {
    const float *x, *y;
    float *out, number;
    long count, width;  // GATED: `width` of each row's first half, gating the second
    int rule, activation;
} Elements;

static inline f8 ruled(const Elements *a, f8 x, f8 y) {
    f8 number = all8(a->number);
    switch ((Rule)a->rule) {
        case ADD_SCALED: return x + number * y;
        case MULTIPLY: return x * y;
        case TIMES_NUMBER: return x * number;
        case PLUS_NUMBER: return x + number;
        case TANH: return tanh8(x);
        case ACTIVATED: return activated8(x, a->activation);
        default: return activated8(x, a->activation) * y;
    }
}

#define STRETCH 2048

static void elements_kernel(const void *arguments, const Crew *crew) {
    const Elements *a = arguments;
    long first, end, stretches = (a->count + STRETCH - 1) / STRETCH;
    while (take(crew, stretches, share(crew, stretches, 4), &first, &end)) {
        long stop = end * STRETCH < a->count ? end * STRETCH : a->count;
        for (long i = first * STRETCH; i < stop;) {
            // as far as both operands run on
            long ends = a->rule == GATED ? (i / a->width + 1) * a->width : stop;
            ends = ends < stop ? ends : stop;
            const float *x = a->x + i, *y = a->y ? a->y + i : x;
            if (a->rule == GATED) x = a->x + i / a->width * a->width * 2 + i % a->width, y = x + a->width;
            long n = ends - i, k = 0;
            for (; k + LANES <= n; k += LANES) store8(a->out + i + k, ruled(a, load8(x + k), load8(y + k)));
            if (k < n) {
                f8 u = all8(0), v = all8(0), w;
                memcpy(&u, x + k, (n - k) * sizeof(float)), memcpy(&v, y + k, (n - k) * sizeof(float));
                w = ruled(a, u, v);
                memcpy(a->out + i + k, &w, (n - k) * sizeof(float));
            }
            i = ends;
        }
    }
}

void native_elements(int rule, const float *x, const float *y, long count, long width, float number, int activation,
                     float *out) {
    Elements a = {x, y, out, number, count, width, rule, activation};
    issue(elements_kernel, &a, sizeof a, (double)count / (rule >= TANH ? 1 : 4));
}

typedef struct {
    char *to;
    const char *from;
    long bytes;
} Copy;

static void copy_kernel(const void *arguments, const Crew *crew) {
    const Copy *a = arguments;
    long first, end;
    while (take(crew, a->bytes, 1 << 16, &first, &end)) memcpy(a->to + first, a->from + first, end - first);
}

void native_copy(void *to, const void *from, long bytes) {
    Copy a = {to, from, bytes};
    issue(copy_kernel, &a, sizeof a, bytes / 16.0);
}

typedef struct {
    const int64_t *x;
    int64_t *out;
    long count, by;
} Shift;

static void shift_kernel(const void *arguments, const Crew *crew) {
    const Shift *a = arguments;
    long first, end;
    while (take(crew, a->count, a->count, &first, &end))
        for (long i = first; i < end; i++) a->out[i] = a->x[i] + a->by;
}

void native_shift(const int64_t *x, long count, long by, int64_t *out) {
    Shift a = {x, out, count, by};
    issue(shift_kernel, &a, sizeof a, count);
}

// ---- queries and keys turned by their position, keys and values into their places -----------------------------------

typedef struct {
    const float *qkv, *cos, *sin, *q_weight, *k_weight;
    const int64_t *positions, *slots;
    float *q;
    Cache cache;
    long tokens;
    int heads, kv_heads, dim, turned, norm;
    float eps, clip;
    bool interleaved, each;  // each: every head has its own row of norm weights
} Turn;

static inline void turn_pair(float *u, float *v, float cos, float sin) {
    float x = *u, y = *v;
    *u = x * cos - y * sin;
    *v = x * sin + y * cos;
}

static void turn_head(const Turn *a, long token, int head, float *own) {
    int dim = a->dim, turned = a->turned, half = turned / 2;
    const float *x = a->qkv + (token * (a->heads + 2 * a->kv_heads) + head) * dim;
    if (a->clip > 0)
        for (int d = 0; d < dim; d++) own[d] = x[d] > a->clip ? a->clip : x[d] < -a->clip ? -a->clip : x[d];
    else
        memcpy(own, x, dim * sizeof(float));
    if (head < a->heads + a->kv_heads) {
        if (a->norm) {
            const float *weight = head < a->heads ? a->q_weight : a->k_weight;
            if (weight && a->each) weight += (head < a->heads ? head : head - a->heads) * dim;
            Norm norm = {a->norm, a->eps, weight, NULL};
            norm_row(own, own, dim, &norm);
        }
        if (turned) {
            long row = a->positions ? a->positions[token] : token;
            const float *cos = a->cos + row * half, *sin = a->sin + row * half;
            if (a->interleaved)
                for (int d = 0; d < half; d++) turn_pair(own + 2 * d, own + 2 * d + 1, cos[d], sin[d]);
            else
                for (int d = 0; d < half; d++) turn_pair(own + d, own + d + half, cos[d], sin[d]);
        }
    }
}

static void turn_kernel(const void *arguments, const Crew *crew) {
    const Turn *a = arguments;
    long lines = a->heads + 2 * a->kv_heads, first, end;
    while (take(crew, a->tokens * lines, share(crew, a->tokens * lines, 2), &first, &end))
        for (long i = first; i < end; i++) {
            long token = i / lines;
            int head = (int)(i % lines), key = head - a->heads;
            if (key < 0) {
                turn_head(a, token, head, a->q + (token * a->heads + head) * a->dim);
                continue;
            }
            float own[a->dim];
            turn_head(a, token, head, own);
            keep(&a->cache, place_of(&a->cache, a->slots[token], key % a->kv_heads, key >= a->kv_heads), own);
        }
}

void native_turn(const float *qkv, long tokens, int heads, int kv_heads, int dim, const float *cos, const float *sin,
                 int turned, const int64_t *positions, int interleaved, int norm, const float *q_weight,
                 const float *k_weight, int each, float eps, float clip, const int64_t *slots, float *q, void *cache,
                 long half, int kept) {
    Turn a = {qkv, cos, sin, q_weight, k_weight, positions, slots, q, {cache, half, kv_heads, dim, kept}, tokens, heads,
              kv_heads, dim, turned, norm, eps, clip, interleaved, each};
    issue(turn_kernel, &a, sizeof a, (double)tokens * (heads + 2 * kv_heads) * dim);
}

// ---- the two ends of a step that feeds itself ----------------------------------------------------------------------

typedef struct {
    const int32_t *lines;
    const int64_t *last, *positions, *tables;
    int64_t *ids, *at, *slots, *ends, *blocks;
    long count, width, size;
} Fetch;

static void fetch_kernel(const void *arguments, const Crew *crew) {
    const Fetch *a = arguments;
    long first, end;
    while (take(crew, a->count, a->count, &first, &end))
        for (long i = first; i < end; i++) {
            long row = a->lines[i], at = a->positions[row];
            const int64_t *table = a->tables + row * a->width;
            a->ids[i] = a->last[row], a->at[i] = at, a->ends[i] = at + 1;
            a->slots[i] = table[at / a->size] * a->size + at % a->size;
            memcpy(a->blocks + i * a->width, table, (at / a->size + 1) * sizeof(int64_t));
        }
}

void native_fetch(const int32_t *lines, long count, const int64_t *last, const int64_t *positions, const int64_t *tables,
                  long width, long size, int64_t *ids, int64_t *at, int64_t *slots, int64_t *ends, int64_t *blocks) {
    Fetch a = {lines, last, positions, tables, ids, at, slots, ends, blocks, count, width, size};
    issue(fetch_kernel, &a, sizeof a, 10.0 * count);
}

typedef struct {
    const int32_t *lines;
    const int64_t *tokens;
    int64_t *last, *positions;
    long count, nobody;
} Advance;

static void advance_kernel(const void *arguments, const Crew *crew) {
    const Advance *a = arguments;
    long first, end;
    while (take(crew, a->count, a->count, &first, &end))
        for (long i = first; i < end; i++)
            if (a->lines[i] != a->nobody) a->last[a->lines[i]] = a->tokens[i], a->positions[a->lines[i]]++;
}

void native_advance(const int32_t *lines, long count, const int64_t *tokens, int64_t *last, int64_t *positions, long nobody) {
    Advance a = {lines, tokens, last, positions, count, nobody};
    issue(advance_kernel, &a, sizeof a, 10.0 * count);
}
