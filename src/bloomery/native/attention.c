// Attention over the paged cache: one query at a time where sequences go on by one position, tiles of queries
// where they bring many.
//
// Position p of a sequence lies in slot table[p / size] * size + p % size. A query at position p sees keys 0 .. p, or the
// last `window` of them. Whatever keys and values are kept in, they are multiplied as float32.
#include "cache.h"

#include <math.h>
#include <stdlib.h>

#define KEYS 64   // taken together by a tile of queries
#define LOW -1e30f

typedef struct {
    const float *q, *slopes;  // slopes [heads], or NULL
    Cache cache;
    const int64_t *items;             // [singles + tiles][4]: sequence, first token, first position, count
    const int64_t *tables;            // [sequences][width]
    const int64_t *ends;              // [sequences]: where given, a single's position is its sequence's end less one
    float *out;                       // [tokens, heads, dim]
    long singles, tiles, width, size, window;
    int heads, kv_heads, dim;
    float scale, softcap;
} Attend;

// Lane i is the sum of t[i].
INLINE f8 sums8(const f8 t[8]) {
    f8 u[4], v[2];
    for (int i = 0; i < 4; i++)
        u[i] = __builtin_shufflevector(t[2 * i], t[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
               __builtin_shufflevector(t[2 * i], t[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < 2; i++)
        v[i] = __builtin_shufflevector(u[2 * i], u[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(u[2 * i], u[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(v[0], v[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(v[0], v[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// Where the key of a position is, or its value.
static inline long place_at(const Attend *a, const int64_t *table, long position, int kv_head, bool value) {
    return place_of(&a->cache, table[position / a->size] * a->size + position % a->size, kv_head, value);
}

static inline f8 adjusted(const Attend *a, f8 score, int head, f8 distance) {
    if (a->softcap > 0) score = all8(a->softcap) * tanh8(score / all8(a->softcap));
    if (a->slopes) score += all8(a->slopes[head]) * distance;
    return score;
}

static const f8 STEPS = {0, 1, 2, 3, 4, 5, 6, 7};

// ---- one query -----------------------------------------------------------------------------------------------------

INLINE void scores_of(const Attend *a, const int64_t *table, long from, long to, int head, const float *q, long position,
                      float *scores, const int dim, const Kept kind) {
    int kv_head = head / (a->heads / a->kv_heads);
    for (long p = from; p < to; p += 8) {
        f8 t[8], scale = all8(a->scale);
        for (int i = 0; i < 8; i++) {
            long place = place_at(a, table, p + i < to ? p + i : to - 1, kv_head, false);
            const char *k = a->cache.numbers + place * width_of(kind);
            f8 even = load8(q) * kept8(kind, k, 0), odd = all8(0);
            int d = 8;
            for (; d + 16 <= dim; d += 16)
                even += load8(q + d + 8) * kept8(kind, k, d + 8), odd += load8(q + d) * kept8(kind, k, d);
            if (d < dim) odd += load8(q + d) * kept8(kind, k, d);
            t[i] = even + odd;
            if (kind == BYTES) scale[i] *= *scale_of(&a->cache, place);
        }
        f8 distance = all8((float)(p - position)) + STEPS;
        store8(scores + (p - from), adjusted(a, sums8(t) * scale, head, distance));
    }
}

static float softmax(float *scores, long count) {
    f8 top = all8(-INFINITY), total = all8(0);
    for (long i = count; i % 8; i++) scores[i] = -INFINITY;
    for (long i = 0; i < count; i += 8) top = max8(top, load8(scores + i));
    f8 best = all8(highest8(top));
    for (long i = 0; i < count; i += 8) {
        f8 e = exp8(load8(scores + i) - best);
        store8(scores + i, e);
        total += e;
    }
    return sum8(total);
}

INLINE void mixed_values(const Attend *a, const int64_t *table, long from, long to, int kv_head, const float *weights,
                         float inverse, float *out, int first, const int vectors, const Kept kind) {
    f8 sum[8];
    for (int v = 0; v < vectors; v++) sum[v] = all8(0);
    for (long p = from; p < to; p++) {
        long place = place_at(a, table, p, kv_head, true);
        const char *value = a->cache.numbers + place * width_of(kind);
        f8 weight = all8(kind == BYTES ? weights[p - from] * *scale_of(&a->cache, place) : weights[p - from]);
        for (int v = 0; v < vectors; v++) sum[v] += weight * kept8(kind, value, first + 8 * v);
    }
    for (int v = 0; v < vectors; v++) store8(out + first + 8 * v, sum[v] * all8(inverse));
}

INLINE void attend_kept(const Attend *a, const int64_t *item, int head, char *scratch, const Kept kind) {
    const int64_t *table = a->tables + item[0] * a->width;
    long position = a->ends ? a->ends[item[0]] - 1 : item[2], to = position + 1;
    long from = a->window && to > a->window ? to - a->window : 0;
    long at = (item[1] * a->heads + head) * a->dim;
    int kv_head = head / (a->heads / a->kv_heads), d = 0;
    float *scores = (float *)scratch;
    if (a->dim == 64) scores_of(a, table, from, to, head, a->q + at, position, scores, 64, kind);
    else if (a->dim == 128) scores_of(a, table, from, to, head, a->q + at, position, scores, 128, kind);
    else scores_of(a, table, from, to, head, a->q + at, position, scores, a->dim, kind);
    float inverse = 1.0f / softmax(scores, to - from);
    for (; d + 64 <= a->dim; d += 64) mixed_values(a, table, from, to, kv_head, scores, inverse, a->out + at, d, 8, kind);
    for (; d < a->dim; d += 8) mixed_values(a, table, from, to, kv_head, scores, inverse, a->out + at, d, 1, kind);
}

static void attend_one(const Attend *a, const int64_t *item, int head, char *scratch) {
    if (a->cache.kind == FLOATS) attend_kept(a, item, head, scratch, FLOATS);
    else if (a->cache.kind == HALVES) attend_kept(a, item, head, scratch, HALVES);
    else attend_kept(a, item, head, scratch, BYTES);
}

// ---- a tile of queries ---------------------------------------------------------------------------------------------

// c [rows, 16] (+)= a [rows, depth] * b [depth, 16], where row k of b begins at b[k] + column.
INLINE void block_product(const float *a, long a_step, const float *const *b, long depth, long column, float *c,
                          long c_step, const int rows, const bool add) {
    f8 sum[6][2];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) sum[r][i] = add ? load8(c + r * c_step + 8 * i) : all8(0);
    for (long k = 0; k < depth; k++) {
        f8 left = load8(b[k] + column), right = load8(b[k] + column + 8);
        for (int r = 0; r < rows; r++) {
            f8 x = all8(a[r * a_step + k]);
            sum[r][0] += x * left;
            sum[r][1] += x * right;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) store8(c + r * c_step + 8 * i, sum[r][i]);
}

#define GROUP 6  // rows that go through a block of keys together: what registers hold

INLINE void group_product(const float *a, long a_step, const float *const *b, long depth, float *c, long c_step, long rows,
                          long columns, const bool add) {
    for (long column = 0; column < columns; column += 16) {
        float *to = c + column;
        switch (rows) {
            case 1: block_product(a, a_step, b, depth, column, to, c_step, 1, add); break;
            case 2: block_product(a, a_step, b, depth, column, to, c_step, 2, add); break;
            case 3: block_product(a, a_step, b, depth, column, to, c_step, 3, add); break;
            case 4: block_product(a, a_step, b, depth, column, to, c_step, 4, add); break;
            case 5: block_product(a, a_step, b, depth, column, to, c_step, 5, add); break;
            default: block_product(a, a_step, b, depth, column, to, c_step, GROUP, add);
        }
    }
}

typedef struct {
    float *q, *out, *scores, *keys, *values, *best, *total;  // rows [dim] twice, GROUP [KEYS], [dim][KEYS], [KEYS][dim] ..
    const float **key_rows, **value_rows;
    long dim;  // rounded up to 16
} Tile;

static size_t tile_bytes(long rows, long dim) {
    dim = (dim + 15) / 16 * 16;
    return sizeof(float) * (2 * rows * dim + GROUP * KEYS + (2 * dim + 1) * KEYS + 2 * rows + 64) + sizeof(void *) * (dim + KEYS);
}

static Tile tile_in(char *scratch, long rows, long dim) {
    Tile t = {.dim = (dim + 15) / 16 * 16};
    t.key_rows = (const float **)scratch;
    t.value_rows = t.key_rows + t.dim;
    t.q = (float *)(t.value_rows + KEYS);
    t.out = t.q + rows * t.dim;
    t.scores = t.out + rows * t.dim;
    t.keys = t.scores + GROUP * KEYS;
    t.values = t.keys + t.dim * KEYS;
    t.best = t.values + t.dim * KEYS;
    t.total = t.best + rows;
    return t;
}

// A head as floats: where it is, or written out to `space`.
static inline const float *opened(const Cache *c, long place, float *space) {
    const char *at = c->numbers + place * width_of(c->kind);
    if (c->kind == FLOATS) return (const float *)at;
    f8 scale = all8(c->kind == BYTES ? *scale_of(c, place) : 1);
    for (int d = 0; d < c->dim; d += 8)
        store8(space + d, c->kind == HALVES ? kept8(HALVES, at, d) : kept8(BYTES, at, d) * scale);
    return space;
}

// Scores of one row become weights relative to the row's best so far; what was summed before is scaled to match.
static void weigh(const Attend *a, Tile *t, long row, float *s, long position, int head, long first, long from) {
    f8 top = all8(t->best[row]), total = all8(0);
    for (int i = 0; i < KEYS; i += 8) {
        f8 key = all8((float)(first + i)) + STEPS;
        f8 x = adjusted(a, load8(s + i), head, key - all8((float)position));
        x = choose8((key <= all8((float)position)) & (key >= all8((float)from)), x, all8(-INFINITY));
        store8(s + i, x);
        top = max8(top, x);
    }
    float best = highest8(top), factor = exp8(all8(t->best[row] - best))[0];
    for (int i = 0; i < KEYS; i += 8) {
        f8 e = exp8(load8(s + i) - all8(best));
        store8(s + i, e);
        total += e;
    }
    if (best != t->best[row])
        for (long d = 0; d < t->dim; d += 8) store8(t->out + row * t->dim + d, load8(t->out + row * t->dim + d) * all8(factor));
    t->total[row] = t->total[row] * factor + sum8(total);
    t->best[row] = best;
}

// A few rows of the tile over one block of keys, of which `deep` are there.
static void attend_group(const Attend *a, const int64_t *item, int kv_head, Tile *t, long row, long rows, long first,
                         long deep) {
    long share = a->heads / a->kv_heads, whole = a->dim / 16 * 16;
    float *scores = t->scores, *out = t->out + row * t->dim;
    group_product(t->q + row * t->dim, t->dim, t->key_rows, a->dim, scores, KEYS, rows, KEYS, false);
    for (long r = 0; r < rows; r++) {
        long position = item[2] + (row + r) / share;
        long from = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
        weigh(a, t, row + r, scores + r * KEYS, position, (int)(kv_head * share + (row + r) % share), first, from);
    }
    group_product(scores, KEYS, t->value_rows, deep, out, t->dim, rows, whole, true);
    for (long r = 0; r < rows && whole < a->dim; r++)
        for (long i = 0; i < deep; i++)
            for (long d = whole; d < a->dim; d++) out[r * t->dim + d] += scores[r * KEYS + i] * t->value_rows[i][d];
}

static void attend_tile(const Attend *a, const int64_t *item, int kv_head, char *scratch) {
    const int64_t *table = a->tables + item[0] * a->width;
    long share = a->heads / a->kv_heads, count = item[3], rows = count * share, last = item[2] + count - 1;
    Tile t = tile_in(scratch, rows, a->dim);
    for (long r = 0; r < rows; r++) {
        const float *q = a->q + ((item[1] + r / share) * a->heads + kv_head * share + r % share) * a->dim;
        for (long d = 0; d < t.dim; d++) t.q[r * t.dim + d] = d < a->dim ? q[d] * a->scale : 0, t.out[r * t.dim + d] = 0;
        t.best[r] = LOW, t.total[r] = 0;
    }
    for (long d = 0; d < t.dim; d++) t.key_rows[d] = t.keys + d * KEYS;
    long lowest = a->window && item[2] + 1 > a->window ? item[2] + 1 - a->window : 0;
    for (long first = lowest / KEYS * KEYS; first <= last; first += KEYS) {
        for (long i = 0; i < KEYS; i++) {  // keys past the end repeat the last: their scores are masked
            long position = first + i <= last ? first + i : last;
            const float *k = opened(&a->cache, place_at(a, table, position, kv_head, false), t.values + i * t.dim);
            for (long d = 0; d < a->dim; d++) t.keys[d * KEYS + i] = k[d];
            t.value_rows[i] = opened(&a->cache, place_at(a, table, position, kv_head, true), t.values + i * t.dim);
        }
        long deep = last - first + 1 < KEYS ? last - first + 1 : KEYS;
        for (long r = 0; r < rows; r += GROUP) attend_group(a, item, kv_head, &t, r, rows - r < GROUP ? rows - r : GROUP, first, deep);
    }
    for (long r = 0; r < rows; r++) {
        float *out = a->out + ((item[1] + r / share) * a->heads + kv_head * share + r % share) * a->dim;
        for (long d = 0; d < a->dim; d++) out[d] = t.out[r * t.dim + d] / t.total[r];
    }
}

static void attend_kernel(const void *arguments, const Crew *crew) {
    const Attend *a = arguments;
    long single = a->singles * a->heads, total = single + a->tiles * a->kv_heads, first, end;
    // A tile is worth many single queries: late tiles are taken first, for they see the most keys.
    while (take(crew, total, a->tiles ? 1 : share(crew, total, 4), &first, &end))
        for (long i = first; i < end; i++) {
            long j = total - 1 - i;
            if (j < single) attend_one(a, a->items + j / a->heads * 4, (int)(j % a->heads), crew->scratch);
            else attend_tile(a, a->items + (a->singles + (j - single) / a->kv_heads) * 4, (int)((j - single) % a->kv_heads), crew->scratch);
        }
}

void native_attend(const float *q, void *cache, long half, int kept, int heads, int kv_heads, int dim, const int64_t *items,
                   long singles, long tiles, long largest, const int64_t *tables, long width, long size,
                   const int64_t *ends, float scale, float softcap, const float *slopes, long window, double work,
                   float *out) {
    Attend a = {q, slopes, {cache, half, kv_heads, dim, kept}, items, tables, ends, out, singles, tiles, width, size,
                window, heads, kv_heads, dim, scale, softcap};
    size_t scores = (width * size + 16) * sizeof(float), tile = tile_bytes(largest * (heads / kv_heads), dim);
    scratch_space(scores > tile ? scores : tile);
    issue(attend_kernel, &a, sizeof a, work);
}
