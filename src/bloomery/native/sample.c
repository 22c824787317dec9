// The sampler on a CPU: logits to tokens, one row of logits a thread (kernels/sampling.py on a
// GPU).
//
// The sampled token has the highest (logit - best) / temperature + Gumbel noise among the tokens
// that min_p, top_k and top_p allow; of equals, the lowest id. With temperature 0 it is the highest
// logit. The winner among all tokens is tried first. If top_p rejects it, the next candidate is the
// winner among the tokens that rank before it (higher logit, or equal logit and lower id). The
// noise is the function of (seed, position, token) of kernels/sampling_reference.py.
#include "native.h"

#include <math.h>
#include <stdlib.h>

#define GREEDY_BELOW 1e-5f  // a lower temperature means greedy
#define NO_TOKEN INT32_MAX

typedef uint32_t u32x8 __attribute__((vector_size(32)));

typedef struct {
    const float *logits;
    const int32_t *rows;
    const int64_t *positions, *top_k;
    const double *params;  // of a row: temperature, top_p, min_p, then values not read here
    const int32_t *seeds;  // of a row: two seed words
    int64_t *tokens;
    long count, vocab, stride;  // stride: params of a row
} Sample;

typedef struct {
    const float *logits;
    const int32_t *ids;  // the candidate tokens, ascending; NULL: all
    long count;
    float best, temperature;  // best: the highest logit
    float min_z;              // min_p: tokens with a lower z are left out
    uint32_t key[2];
} Candidates;

static uint32_t hash(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

static inline f32x8 gumbel8(u32x8 token, const uint32_t key[2]) {
    u32x8 x = token * 0x9E3779B9u + key[0];
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15 ^ key[1]) * 0x846CA68Bu;
    x = (x ^ x >> 16) & 0x7FFFFFFFu;
    f32x8 v = (__builtin_convertvector((i32x8)x, f32x8) + broadcast8(0.5f)) *
              broadcast8((float)((1 - 0x1p-24) * 0x1p-31));
    f32x8 u = broadcast8(1.0f) - v;
    return -log8(-log8(u) - ((broadcast8(1.0f) - u) - v) / u);
}

// The scaled logit z: 0 for the best token, below 0 for all others.
static inline float scaled_logit(const Candidates *c, float logit) {
    return (logit - c->best) / c->temperature;
}

// Loads eight candidates from the i-th on: their ids and z. Past the end z is -inf.
static inline u32x8 load_candidates8(const Candidates *c, long i, f32x8 *z) {
    static const u32x8 steps = {0, 1, 2, 3, 4, 5, 6, 7};
    u32x8 id = (uint32_t)i + steps;
    f32x8 s = broadcast8(-INFINITY);
    long n = c->count - i < 8 ? c->count - i : 8;
    if (c->ids) {
        id = steps * 0;
        for (long j = 0; j < n; j++) {
            id[j] = (uint32_t)c->ids[i + j];
            s[j] = c->logits[c->ids[i + j]];
        }
    } else if (n == 8) s = load8(c->logits + i);
    else memcpy(&s, c->logits + i, n * sizeof(float));
    f32x8 scaled = (s - broadcast8(c->best)) / broadcast8(c->temperature);
    i32x8 allowed = (scaled >= broadcast8(c->min_z)) & (s > broadcast8(-INFINITY));
    *z = select8(allowed, scaled, broadcast8(-INFINITY));
    return id;
}

static int32_t find_winner(const Candidates *c) {
    float best = -INFINITY;
    int32_t winner = NO_TOKEN;
    for (long i = 0; i < c->count; i += 8) {
        f32x8 z;
        u32x8 id = load_candidates8(c, i, &z);
        if (reduce_max8(z) + 22.3f < best) continue;  // the noise is at most 22.2
        f32x8 noisy = z + gumbel8(id, c->key);
        for (int j = 0; j < 8; j++)
            if (noisy[j] > best ||
                (noisy[j] == best && noisy[j] > -INFINITY && (int32_t)id[j] < winner)) {
                best = noisy[j];
                winner = (int32_t)id[j];
            }
    }
    return winner;
}

static double sum_exp(const Candidates *c) {
    double mass = 0;
    for (long i = 0; i < c->count; i += 8) {
        f32x8 z;
        load_candidates8(c, i, &z);
        mass += (double)reduce_sum8(exp8(z));
    }
    return mass;
}

static inline bool ranks_before(const float *logits, int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

// Writes the candidates that rank before a token to `ids`; returns how many there are.
static long keep_before(const Candidates *c, int32_t token, int32_t *ids) {
    long n = 0;
    float border = c->logits[token];
    for (long i = 0; i < c->count; i++) {
        int32_t id = c->ids ? c->ids[i] : (int32_t)i;
        if (c->logits[id] >= border && ranks_before(c->logits, id, token) &&
            scaled_logit(c, c->logits[id]) >= c->min_z)
            ids[n++] = id;
    }
    return n;
}

static void sift_down(const float *logits, int32_t *heap, long n, long i) {
    for (;;) {
        long child = 2 * i + 1;
        if (child >= n) return;
        if (child + 1 < n && ranks_before(logits, heap[child], heap[child + 1])) child++;
        if (!ranks_before(logits, heap[i], heap[child])) return;
        int32_t swapped = heap[i];
        heap[i] = heap[child];
        heap[child] = swapped;
        i = child;
    }
}

static int compare_ids(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

// Writes the k highest-ranking tokens to `ids`, ascending by id. A heap holds them; its top is the
// lowest-ranking one.
static void select_top_k(const float *logits, long vocab, long k, int32_t *ids) {
    for (long i = 0; i < k; i++) ids[i] = (int32_t)i;
    for (long i = k / 2; i-- > 0;) sift_down(logits, ids, k, i);
    for (long i = k; i < vocab; i++)
        if (logits[i] > logits[ids[0]]) {
            ids[0] = (int32_t)i;
            sift_down(logits, ids, k, 0);
        }
    qsort(ids, k, sizeof *ids, compare_ids);
}

static int32_t argmax(const float *logits, long vocab) {
    f32x8 top = broadcast8(-INFINITY);
    long i = 0;
    for (; i + 8 <= vocab; i += 8) top = max8(load8(logits + i), top);
    float best = reduce_max8(top);
    for (; i < vocab; i++) best = logits[i] > best ? logits[i] : best;
    for (i = 0; i < vocab; i++)
        if (logits[i] == best) return (int32_t)i;
    return 0;
}

static int32_t sample_row(const Sample *a, long index, int32_t *ids) {
    const float *logits = a->logits + index * a->vocab;
    long row = a->rows[index];
    const double *params = a->params + row * a->stride;
    float temperature = (float)params[0], min_z = logf((float)params[2]);
    double top_p = params[1];
    int32_t top = argmax(logits, a->vocab);
    Candidates c = {logits, NULL, a->vocab, logits[top], temperature, min_z, {0, 0}};
    if (temperature < GREEDY_BELOW || !(c.best > -INFINITY)) return top;
    for (int i = 0; i < 2; i++)
        c.key[i] = hash((uint32_t)a->seeds[2 * row + i] ^ (uint32_t)a->positions[index]);
    if (a->top_k[row] > 0 && a->top_k[row] < a->vocab) {
        select_top_k(logits, a->vocab, a->top_k[row], ids);
        c.ids = ids;
        c.count = a->top_k[row];
    }
    double mass_limit = top_p < 1 ? top_p * sum_exp(&c) : INFINITY;
    for (;;) {
        int32_t winner = find_winner(&c);
        if (winner == NO_TOKEN) return top;
        if (mass_limit == INFINITY) return winner;
        Candidates before = c;
        before.ids = ids;
        before.count = keep_before(&c, winner, ids);  // in place: the list only shrinks
        if (!before.count || sum_exp(&before) < mass_limit) return winner;
        c = before;
    }
}

static void sample_kernel(const void *arguments, const ThreadContext *ctx) {
    const Sample *a = arguments;
    long first, end;
    while (next_chunk(ctx, a->count, 1, &first, &end))
        a->tokens[first] = sample_row(a, first, (int32_t *)ctx->scratch);
}

typedef struct {
    float *logits;
    const int32_t *words;  // [count, num_words], one bit a token
    const int64_t *slots;  // the row of logits of each mask
    long count, vocab, num_words;
} TokenMask;

static void mask_kernel(const void *arguments, const ThreadContext *ctx) {
    const TokenMask *a = arguments;
    long first, end;
    while (next_chunk(ctx, a->count, 1, &first, &end)) {
        const int32_t *words = a->words + first * a->num_words;
        float *logits = a->logits + a->slots[first] * a->vocab;
        for (long w = 0; w < a->num_words; w++) {
            uint32_t forbidden = ~(uint32_t)words[w];
            if (!forbidden) continue;
            long n = a->vocab - 32 * w < 32 ? a->vocab - 32 * w : 32;
            for (long i = 0; i < n; i++)
                if (forbidden >> i & 1) logits[32 * w + i] = -INFINITY;
        }
    }
}

// Sets the logits of tokens whose bit is 0 to -inf, in the rows `slots` of logits [n, vocab].
void native_mask_logits(ThreadPool *pool, float *logits, long vocab, const int32_t *words,
                        long num_words, const int64_t *slots, long count) {
    TokenMask a = {logits, words, slots, count, vocab, num_words};
    issue(pool, mask_kernel, &a, sizeof a, count * vocab / 8.0);
}

// logits [count, vocab]; rows [count]: where the params of each are; positions [count] of the
// tokens.
void native_sample(ThreadPool *pool, const float *logits, long count, long vocab,
                   const int32_t *rows, const int64_t *positions, const double *params, long stride,
                   const int64_t *top_k, const int32_t *seeds, int64_t *tokens) {
    Sample a = {logits, rows, positions, top_k, params, seeds, tokens, count, vocab, stride};
    reserve_scratch(pool, vocab * sizeof(int32_t));
    issue(pool, sample_kernel, &a, sizeof a, count * vocab / 4.0);
}
