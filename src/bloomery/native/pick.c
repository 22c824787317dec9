// From logits to tokens: what kernels/pick does on a GPU, one line a thread.
//
// A line's token is the highest of (score - best) / temperature + Gumbel noise among those that min_p, top_k and top_p
// keep, the lowest id among equals; a cold line's is its highest score. The winner among all is tried first. If top_p does
// not keep it, the next candidate is the winner among those that come before it, in the order score, then lowest id.
// Noise is the function of (seed, position, token) that kernels/noise spells out.
#include "native.h"

#include <math.h>
#include <stdlib.h>

#define COLDEST 1e-5f
#define NO_TOKEN INT32_MAX

typedef uint32_t u32x8 __attribute__((vector_size(32)));

typedef struct {
    const float *logits;
    const int32_t *rows;
    const int64_t *positions, *top_k;
    const double *numbers;  // of a row: temperature, top_p, min_p, and more that is not read
    const int32_t *seeds;   // of a row: two words
    int64_t *tokens;
    long lines, vocab, stride;  // stride: numbers of a row
} Pick;

typedef struct {
    const float *scores;
    const int32_t *ids;  // of the tokens to choose from, ascending; NULL: all
    long count;
    float best, heat, floor;  // highest score of the line; tokens with z below the floor are out
    uint32_t key[2];
} Choice;

static uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

static inline f8 gumbel8(u32x8 token, const uint32_t key[2]) {
    u32x8 x = token * 0x9E3779B9u + key[0];
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15 ^ key[1]) * 0x846CA68Bu;
    x = (x ^ x >> 16) & 0x7FFFFFFFu;
    f8 v = (__builtin_convertvector((i8)x, f8) + all8(0.5f)) * all8((float)((1 - 0x1p-24) * 0x1p-31));
    f8 u = all8(1.0f) - v;
    return -log8(-log8(u) - ((all8(1.0f) - u) - v) / u);
}

static inline float relative(const Choice *c, float score) { return (score - c->best) / c->heat; }

// Eight of the tokens to choose from, beginning at place i: their ids and z; past the end z is -inf.
static inline u32x8 eight(const Choice *c, long i, f8 *z) {
    static const u32x8 steps = {0, 1, 2, 3, 4, 5, 6, 7};
    u32x8 id = (uint32_t)i + steps;
    f8 s = all8(-INFINITY);
    long n = c->count - i < 8 ? c->count - i : 8;
    if (c->ids) {
        id = steps * 0;
        for (long j = 0; j < n; j++) id[j] = (uint32_t)c->ids[i + j], s[j] = c->scores[c->ids[i + j]];
    } else if (n == 8) s = load8(c->scores + i);
    else memcpy(&s, c->scores + i, n * sizeof(float));
    f8 relative = (s - all8(c->best)) / all8(c->heat);
    *z = choose8((relative >= all8(c->floor)) & (s > all8(-INFINITY)), relative, all8(-INFINITY));
    return id;
}

static int32_t winner_of(const Choice *c) {
    float best = -INFINITY;
    int32_t winner = NO_TOKEN;
    for (long i = 0; i < c->count; i += 8) {
        f8 z;
        u32x8 id = eight(c, i, &z);
        if (highest8(z) + 22.3f < best) continue;  // no noise is larger
        f8 noisy = z + gumbel8(id, c->key);
        for (int j = 0; j < 8; j++)
            if (noisy[j] > best || (noisy[j] == best && noisy[j] > -INFINITY && (int32_t)id[j] < winner))
                best = noisy[j], winner = (int32_t)id[j];
    }
    return winner;
}

static double mass_of(const Choice *c) {
    double mass = 0;
    for (long i = 0; i < c->count; i += 8) {
        f8 z;
        eight(c, i, &z);
        mass += (double)sum8(exp8(z));
    }
    return mass;
}

static inline bool comes_before(const float *scores, int32_t a, int32_t b) {
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
}

// Those of the choice that come before a token, into `ids`.
static long those_before(const Choice *c, int32_t token, int32_t *ids) {
    long n = 0;
    float border = c->scores[token];
    for (long i = 0; i < c->count; i++) {
        int32_t id = c->ids ? c->ids[i] : (int32_t)i;
        if (c->scores[id] >= border && comes_before(c->scores, id, token) && relative(c, c->scores[id]) >= c->floor)
            ids[n++] = id;
    }
    return n;
}

static void sink(const float *scores, int32_t *heap, long n, long i) {
    for (;;) {
        long child = 2 * i + 1;
        if (child >= n) return;
        if (child + 1 < n && comes_before(scores, heap[child], heap[child + 1])) child++;
        if (!comes_before(scores, heap[i], heap[child])) return;
        int32_t held = heap[i];
        heap[i] = heap[child], heap[child] = held, i = child;
    }
}

static int ascending(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

// The k best of all, ascending by id: a heap whose top is the last of them.
static void best_of(const float *scores, long vocab, long k, int32_t *ids) {
    for (long i = 0; i < k; i++) ids[i] = (int32_t)i;
    for (long i = k / 2; i-- > 0;) sink(scores, ids, k, i);
    for (long i = k; i < vocab; i++)
        if (scores[i] > scores[ids[0]]) ids[0] = (int32_t)i, sink(scores, ids, k, 0);
    qsort(ids, k, sizeof *ids, ascending);
}

static int32_t highest_of(const float *scores, long vocab) {
    f8 top = all8(-INFINITY);
    long i = 0;
    for (; i + 8 <= vocab; i += 8) top = max8(load8(scores + i), top);
    float best = highest8(top);
    for (; i < vocab; i++) best = scores[i] > best ? scores[i] : best;
    for (i = 0; i < vocab; i++)
        if (scores[i] == best) return (int32_t)i;
    return 0;
}

static int32_t pick_line(const Pick *a, long line, int32_t *ids) {
    const float *scores = a->logits + line * a->vocab;
    long row = a->rows[line];
    const double *numbers = a->numbers + row * a->stride;
    int32_t top = highest_of(scores, a->vocab);
    Choice c = {scores, NULL, a->vocab, scores[top], (float)numbers[0], logf((float)numbers[2]), {0, 0}};
    if (c.heat < COLDEST || !(c.best > -INFINITY)) return top;
    for (int i = 0; i < 2; i++) c.key[i] = mixed((uint32_t)a->seeds[2 * row + i] ^ (uint32_t)a->positions[line]);
    if (a->top_k[row] > 0 && a->top_k[row] < a->vocab) {
        best_of(scores, a->vocab, a->top_k[row], ids);
        c.ids = ids, c.count = a->top_k[row];
    }
    double enough = numbers[1] < 1 ? numbers[1] * mass_of(&c) : INFINITY;
    for (;;) {
        int32_t winner = winner_of(&c);
        if (winner == NO_TOKEN) return top;
        if (enough == INFINITY) return winner;
        Choice before = c;
        before.ids = ids, before.count = those_before(&c, winner, ids);  // in place: never more than were there
        if (!before.count || mass_of(&before) < enough) return winner;
        c = before;
    }
}

static void pick_kernel(const void *arguments, const Crew *crew) {
    const Pick *a = arguments;
    long first, end;
    while (take(crew, a->lines, 1, &first, &end)) a->tokens[first] = pick_line(a, first, (int32_t *)crew->scratch);
}

// logits [lines, vocab]; of each line its row and the position of its token.
void native_pick(const float *logits, long lines, long vocab, const int32_t *rows, const int64_t *positions,
                 const double *numbers, long stride, const int64_t *top_k, const int32_t *seeds, int64_t *tokens) {
    Pick a = {logits, rows, positions, top_k, numbers, seeds, tokens, lines, vocab, stride};
    scratch_space(vocab * sizeof(int32_t));
    issue(pick_kernel, &a, sizeof a, lines * vocab / 4.0);
}
