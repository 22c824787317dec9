// Attention over the paged KV cache: decode requests one query at a time, prefill chunks in tiles
// of queries.
//
// Position p of a sequence lies in slot block_table[p / block_size] * block_size + p % block_size.
// A query at position p sees keys 0 .. p, or the last `window` of them, or those of its own chunk.
// Positions that no query of a tile sees are never read. Whatever the cache holds, the products are
// of float32.
#include "kv_cache.h"

#include <math.h>
#include <stdlib.h>

#define KEYS 64        // keys that a tile of queries reads per iteration
#define LOWEST -1e30f  // finite, and lower than every score

typedef struct {
    const float *q, *slopes, *sinks;  // slopes and sinks [heads], or NULL
    const float *gate;                // [tokens, heads, gate_dim] before its activation, or NULL
    KvCache cache;
    const int64_t *spans;  // [decodes + tiles][4]: sequence, first token, first position, count
    const int64_t *block_tables;  // [sequences][width]
    const int64_t *seq_lens;      // [sequences] or NULL; if given, a decode is at seq_len - 1
    float *out;                   // [tokens, heads, dim]
    long num_decodes, num_tiles, width, block_size, window, chunk;
    int heads, kv_heads, dim, gate_dim, softplus_gate;
    float scale, softcap;
} Attention;

// The first position that a query at `position` sees.
static inline long first_visible(const Attention *a, long position) {
    long first = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
    long chunk_start = a->chunk ? position / a->chunk * a->chunk : 0;
    return first > chunk_start ? first : chunk_start;
}

static inline f32x8 gate_factors(const Attention *a, f32x8 x) {
    f32x8 one = broadcast8(1);
    if (!a->softplus_gate) return one / (one + exp8(-x));
    return max8(x, broadcast8(0)) + log8(one + exp8(-abs8(x)));
}

// Multiplies the result of one head of a token by its gate.
static void apply_gate(const Attention *a, long token, int head, float *out) {
    const float *gate = a->gate + (token * a->heads + head) * a->gate_dim;
    f32x8 factors = gate_factors(a, broadcast8(gate[0]));
    for (int d = 0; d < a->dim; d += 8) {
        if (a->gate_dim > 1) factors = gate_factors(a, load8(gate + d));
        store8(out + d, load8(out + d) * factors);
    }
}

// Lane i of the result is the sum of all lanes of t[i].
INLINE f32x8 reduce_sums8(const f32x8 t[8]) {
    f32x8 u[4], v[2];
    for (int i = 0; i < 4; i++)
        u[i] = __builtin_shufflevector(t[2 * i], t[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
               __builtin_shufflevector(t[2 * i], t[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < 2; i++)
        v[i] = __builtin_shufflevector(u[2 * i], u[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(u[2 * i], u[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(v[0], v[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(v[0], v[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// The cache index of the key (or value) of a position.
static inline long index_at(const Attention *a, const int64_t *table, long position, int kv_head,
                            bool value) {
    return cache_index(&a->cache,
                       table[position / a->block_size] * a->block_size + position % a->block_size,
                       kv_head, value);
}

// Applies the softcap and the ALiBi slope.
static inline f32x8 adjust_scores(const Attention *a, f32x8 score, int head, f32x8 distance) {
    if (a->softcap > 0) score = broadcast8(a->softcap) * tanh8(score / broadcast8(a->softcap));
    if (a->slopes) score += broadcast8(a->slopes[head]) * distance;
    return score;
}

static const f32x8 STEPS = {0, 1, 2, 3, 4, 5, 6, 7};

// ---- decode: one query, of a few heads that share their keys -----------------------------------

#define SHARED_HEADS 4  // that read the keys and values of a sequence together
#define KEYS_AHEAD 32   // keys and values requested before they are read: they lie far apart

typedef struct {
    const Attention *a;
    const long *indices;  // of the keys that are seen, then the last one a few times more
    long count, position, first_position;  // keys; the position of the query, and of the first key
    int head;                              // the first of the heads
    const float *q;                        // [heads, dim]
    float *scores;                         // [heads][stride], later weights
    long stride;
} DecodeHeads;

// Writes the cache indices of the keys of positions from .. to.
static void find_keys(const Attention *a, const int64_t *table, long from, long to, int kv_head,
                      long *indices) {
    long count = 0;
    for (long block = from / a->block_size; block * a->block_size < to; block++) {
        long first = block * a->block_size, end = first + a->block_size;
        long slot = table[block] * a->block_size - first;
        for (long p = first < from ? from : first; p < end && p < to; p++)
            indices[count++] = cache_index(&a->cache, slot + p, kv_head, false);
    }
    long padded = (count + 7) / 8 * 8 + KEYS_AHEAD, last = count ? indices[count - 1] : 0;
    while (count < padded) indices[count++] = last;
}

// Requests `count` elements of a key or value from element `index` on.
INLINE void prefetch_elements(const Attention *a, long index, int count, const CacheKind kind) {
    const char *at = a->cache.values + index * element_bytes(kind);
    for (long i = 0; i < count * element_bytes(kind); i += 64) __builtin_prefetch(at + i);
}

INLINE void compute_scores(const DecodeHeads *u, const int heads, const int dim,
                           const CacheKind kind) {
    const Attention *a = u->a;
    for (long p = 0; p < u->count; p += 8) {
        f32x8 t[SHARED_HEADS][8], scale = broadcast8(a->scale);
        for (int i = 0; i < 8; i++) {
            const char *k = a->cache.values + u->indices[p + i] * element_bytes(kind);
            prefetch_elements(a, u->indices[p + i + KEYS_AHEAD], dim, kind);
            f32x8 even[SHARED_HEADS], odd[SHARED_HEADS];
            for (int h = 0; h < heads; h++) even[h] = odd[h] = broadcast8(0);
            int d = 0;
            for (; d + 16 <= dim; d += 16) {
                f32x8 left = load_cache8(kind, k, d), right = load_cache8(kind, k, d + 8);
                for (int h = 0; h < heads; h++) {
                    even[h] = fuse8(load8(u->q + h * dim + d), left, even[h]);
                    odd[h] = fuse8(load8(u->q + h * dim + d + 8), right, odd[h]);
                }
            }
            if (d < dim) {
                f32x8 rest = load_cache8(kind, k, d);
                for (int h = 0; h < heads; h++)
                    even[h] = fuse8(load8(u->q + h * dim + d), rest, even[h]);
            }
            for (int h = 0; h < heads; h++) t[h][i] = even[h] + odd[h];
            if (kind == CACHE_INT8) scale[i] *= *cache_scale(&a->cache, u->indices[p + i]);
        }
        f32x8 distance = broadcast8((float)(u->first_position + p - u->position)) + STEPS;
        for (int h = 0; h < heads; h++)
            store8(u->scores + h * u->stride + p,
                   adjust_scores(a, reduce_sums8(t[h]) * scale, u->head + h, distance));
    }
}

// Turns scores into weights that are not normalised yet; returns their sum, with that of the sink.
static float softmax(float *scores, long count, float sink) {
    f32x8 top = broadcast8(sink), total = broadcast8(0);
    for (long i = count; i % 8; i++) scores[i] = -INFINITY;
    for (long i = 0; i < count; i += 8) top = max8(top, load8(scores + i));
    f32x8 best = broadcast8(reduce_max8(top));
    for (long i = 0; i < count; i += 8) {
        f32x8 e = exp8(load8(scores + i) - best);
        store8(scores + i, e);
        total += e;
    }
    return reduce_sum8(total) + exp8(broadcast8(sink) - best)[0];
}

// Adds up values from dim `first` on, with the weights of each head: out [heads, dim].
INLINE void mix_values(const DecodeHeads *u, const float *inverse, float *out, int first,
                       const int heads, const int vectors, const CacheKind kind) {
    const Attention *a = u->a;
    f32x8 sum[SHARED_HEADS][8];
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++) sum[h][v] = broadcast8(0);
    for (long p = 0; p < u->count; p++) {
        long index = u->indices[p] + a->cache.value_offset;
        const char *value = a->cache.values + index * element_bytes(kind);
        prefetch_elements(a, u->indices[p + KEYS_AHEAD] + a->cache.value_offset + first,
                          8 * vectors, kind);
        float scale = kind == CACHE_INT8 ? *cache_scale(&a->cache, index) : 1.0f;
        f32x8 values[8];
        for (int v = 0; v < vectors; v++) values[v] = load_cache8(kind, value, first + 8 * v);
        for (int h = 0; h < heads; h++) {
            float weight = u->scores[h * u->stride + p];
            f32x8 factor = broadcast8(kind == CACHE_INT8 ? weight * scale : weight);
            for (int v = 0; v < vectors; v++) sum[h][v] = fuse8(factor, values[v], sum[h][v]);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++)
            store8(out + h * a->dim + first + 8 * v, sum[h][v] * broadcast8(inverse[h]));
}

INLINE void attend_decode_heads(const DecodeHeads *u, float *out, const int heads,
                                const CacheKind kind) {
    const Attention *a = u->a;
    // As many as registers hold sums for: AVX-512 has 32.
    const int most_vectors = WIDE_LANES == 16 ? 16 : 8;
    const int vectors = heads <= most_vectors / 8 ? 8 : heads <= most_vectors / 4 ? 4 : 2;
    float inverse[SHARED_HEADS];
    int d = 0;
    if (a->dim == 64) compute_scores(u, heads, 64, kind);
    else if (a->dim == 128) compute_scores(u, heads, 128, kind);
    else compute_scores(u, heads, a->dim, kind);
    for (int h = 0; h < heads; h++) {
        float sink = a->sinks ? a->sinks[u->head + h] : -INFINITY;
        inverse[h] = 1.0f / softmax(u->scores + h * u->stride, u->count, sink);
    }
    for (; d + 8 * vectors <= a->dim; d += 8 * vectors)
        mix_values(u, inverse, out, d, heads, vectors, kind);
    for (; d < a->dim; d += 8) mix_values(u, inverse, out, d, heads, 1, kind);
}

INLINE void attend_decode_kind(const DecodeHeads *u, float *out, int heads, const CacheKind kind) {
    switch (heads) {
        case 1: attend_decode_heads(u, out, 1, kind); break;
        case 2: attend_decode_heads(u, out, 2, kind); break;
        case 3: attend_decode_heads(u, out, 3, kind); break;
        default: attend_decode_heads(u, out, SHARED_HEADS, kind);
    }
}

// The most positions that a decode request can see, and what find_keys and softmax add.
static inline long most_keys(const Attention *a) {
    return (a->width * a->block_size + 7) / 8 * 8 + KEYS_AHEAD;
}

static size_t decode_bytes(const Attention *a) {
    return most_keys(a) * (sizeof(long) + SHARED_HEADS * sizeof(float));
}

static void attend_decode(const Attention *a, const int64_t *span, int kv_head, int head,
                          int heads, char *scratch) {
    long position = a->seq_lens ? a->seq_lens[span[0]] - 1 : span[2];
    long from = first_visible(a, position), at = (span[1] * a->heads + head) * a->dim;
    long *indices = (long *)scratch;
    find_keys(a, a->block_tables + span[0] * a->width, from, position + 1, kv_head, indices);
    DecodeHeads u = {.a = a,
                     .indices = indices,
                     .count = position + 1 - from,
                     .position = position,
                     .first_position = from,
                     .head = head,
                     .q = a->q + at,
                     .scores = (float *)(indices + most_keys(a)),
                     .stride = most_keys(a)};
    float *out = a->out + at;
    if (a->cache.kind == CACHE_FLOAT) attend_decode_kind(&u, out, heads, CACHE_FLOAT);
    else if (a->cache.kind == CACHE_HALF) attend_decode_kind(&u, out, heads, CACHE_HALF);
    else attend_decode_kind(&u, out, heads, CACHE_INT8);
    if (a->gate)
        for (int h = 0; h < heads; h++) apply_gate(a, span[1], head + h, out + h * a->dim);
}

// Into how many parts the heads of a key are divided: few, so that they share what they read, but
// enough for all threads.
static long parts_of_group(const Attention *a, int num_threads) {
    long group = a->heads / a->kv_heads, parts = (group + SHARED_HEADS - 1) / SHARED_HEADS;
    while (parts < group && a->num_decodes * a->kv_heads * parts < 2 * num_threads) parts++;
    return parts;
}

// ---- prefill: a tile of queries ----------------------------------------------------------------

// c [rows, columns] (+)= a [rows, depth] * b [depth, columns], for the columns of `registers`
// vectors. Row k of b begins at b[k] + column.
INLINE void block_product(const float *a, long a_step, const float *const *b, long depth,
                          long column, float *c, long c_step, const int rows, const int registers,
                          const bool add) {
    WideFloats sum[6][2];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < registers; i++) {
            sum[r][i] = broadcast_wide(0);
            if (add) sum[r][i] = load_wide(c + r * c_step + i * WIDE_LANES);
        }
    for (long k = 0; k < depth; k++) {
        WideFloats values[2];
        for (int i = 0; i < registers; i++) values[i] = load_wide(b[k] + column + i * WIDE_LANES);
        for (int r = 0; r < rows; r++) {
            WideFloats factor = broadcast_wide(a[r * a_step + k]);
            for (int i = 0; i < registers; i++)
                sum[r][i] = fuse_wide(factor, values[i], sum[r][i]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < registers; i++)
            store_wide(c + r * c_step + i * WIDE_LANES, sum[r][i]);
}

#define GROUP 6  // rows multiplied with a block of keys at once: as many as registers hold

INLINE void group_product_rows(const float *a, long a_step, const float *const *b, long depth,
                               float *c, long c_step, const int rows, long columns,
                               const bool add) {
    long column = 0;
    for (; column + 2 * WIDE_LANES <= columns; column += 2 * WIDE_LANES)
        block_product(a, a_step, b, depth, column, c + column, c_step, rows, 2, add);
    for (; column < columns; column += WIDE_LANES)
        block_product(a, a_step, b, depth, column, c + column, c_step, rows, 1, add);
}

// The same for up to GROUP rows and any multiple of 16 columns.
INLINE void group_product(const float *a, long a_step, const float *const *b, long depth, float *c,
                          long c_step, long rows, long columns, const bool add) {
    switch (rows) {
        case 1: group_product_rows(a, a_step, b, depth, c, c_step, 1, columns, add); break;
        case 2: group_product_rows(a, a_step, b, depth, c, c_step, 2, columns, add); break;
        case 3: group_product_rows(a, a_step, b, depth, c, c_step, 3, columns, add); break;
        case 4: group_product_rows(a, a_step, b, depth, c, c_step, 4, columns, add); break;
        case 5: group_product_rows(a, a_step, b, depth, c, c_step, 5, columns, add); break;
        default: group_product_rows(a, a_step, b, depth, c, c_step, GROUP, columns, add);
    }
}

typedef struct {
    float *q, *out;       // [rows][dim]
    float *scores;        // [GROUP][KEYS]
    float *keys;          // [dim][KEYS]
    float *values;        // [KEYS][dim]
    float *best, *total;  // [rows]: the highest score so far, the sum of weights
    const float **key_rows, **value_rows;
    long dim;  // rounded up to 16
} QueryTile;

static size_t tile_bytes(long rows, long dim) {
    dim = (dim + 15) / 16 * 16;
    return sizeof(float) * (2 * rows * dim + GROUP * KEYS + (2 * dim + 1) * KEYS + 2 * rows + 64) +
           sizeof(void *) * (dim + KEYS);
}

static QueryTile place_tile(char *scratch, long rows, long dim) {
    QueryTile t = {.dim = (dim + 15) / 16 * 16};
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

// One head of the cache as float32: in place, or converted into `space`.
static inline const float *load_head(const KvCache *c, long index, float *space) {
    const char *at = c->values + index * element_bytes(c->kind);
    if (c->kind == CACHE_FLOAT) return (const float *)at;
    f32x8 scale = broadcast8(c->kind == CACHE_INT8 ? *cache_scale(c, index) : 1);
    for (int d = 0; d < c->head_dim; d += 8)
        store8(space + d, c->kind == CACHE_HALF ? load_cache8(CACHE_HALF, at, d)
                                                : load_cache8(CACHE_INT8, at, d) * scale);
    return space;
}

// Online softmax: turns the scores of one row into weights relative to the row's best so far, and
// rescales what was summed before.
static void update_softmax(const Attention *a, QueryTile *t, long row, float *s, long position,
                           int head, long first, long from) {
    f32x8 top = broadcast8(t->best[row]), total = broadcast8(0);
    for (int i = 0; i < KEYS; i += 8) {
        f32x8 key = broadcast8((float)(first + i)) + STEPS;
        f32x8 x = adjust_scores(a, load8(s + i), head, key - broadcast8((float)position));
        x = select8((key <= broadcast8((float)position)) & (key >= broadcast8((float)from)), x,
                    broadcast8(-INFINITY));
        store8(s + i, x);
        top = max8(top, x);
    }
    float best = reduce_max8(top), factor = exp8(broadcast8(t->best[row] - best))[0];
    for (int i = 0; i < KEYS; i += 8) {
        f32x8 e = exp8(load8(s + i) - broadcast8(best));
        store8(s + i, e);
        total += e;
    }
    if (best != t->best[row])
        for (long d = 0; d < t->dim; d += 8)
            store8(t->out + row * t->dim + d,
                   load8(t->out + row * t->dim + d) * broadcast8(factor));
    t->total[row] = t->total[row] * factor + reduce_sum8(total);
    t->best[row] = best;
}

// Attends a few rows of the tile to one block of keys, of which `depth` exist.
static void attend_group(const Attention *a, const int64_t *span, int kv_head, QueryTile *t,
                         long row, long rows, long first, long depth) {
    long group_heads = a->heads / a->kv_heads, full_columns = a->dim / 16 * 16;
    float *scores = t->scores, *out = t->out + row * t->dim;
    group_product(t->q + row * t->dim, t->dim, t->key_rows, a->dim, scores, KEYS, rows, KEYS,
                  false);
    for (long r = 0; r < rows; r++) {
        long position = span[2] + (row + r) / group_heads;
        update_softmax(a, t, row + r, scores + r * KEYS, position,
                       (int)(kv_head * group_heads + (row + r) % group_heads), first,
                       first_visible(a, position));
    }
    group_product(scores, KEYS, t->value_rows, depth, out, t->dim, rows, full_columns, true);
    for (long r = 0; r < rows && full_columns < a->dim; r++)
        for (long i = 0; i < depth; i++)
            for (long d = full_columns; d < a->dim; d++)
                out[r * t->dim + d] += scores[r * KEYS + i] * t->value_rows[i][d];
}

static void attend_tile(const Attention *a, const int64_t *span, int kv_head, char *scratch) {
    const int64_t *table = a->block_tables + span[0] * a->width;
    long group_heads = a->heads / a->kv_heads, count = span[3], rows = count * group_heads,
         last = span[2] + count - 1;
    QueryTile t = place_tile(scratch, rows, a->dim);
    for (long r = 0; r < rows; r++) {
        long head = kv_head * group_heads + r % group_heads;
        const float *q = a->q + ((span[1] + r / group_heads) * a->heads + head) * a->dim;
        for (long d = 0; d < t.dim; d++) {
            t.q[r * t.dim + d] = d < a->dim ? q[d] * a->scale : 0;
            t.out[r * t.dim + d] = 0;
        }
        t.best[r] = a->sinks && a->sinks[head] > LOWEST ? a->sinks[head] : LOWEST;
        t.total[r] = a->sinks ? 1 : 0;
    }
    for (long d = 0; d < t.dim; d++) t.key_rows[d] = t.keys + d * KEYS;
    long lowest = first_visible(a, span[2]);
    for (long first = lowest / KEYS * KEYS; first <= last; first += KEYS) {
        // Keys past the end repeat the last one, and keys that no query sees the first one. Their
        // scores are masked, but a weight of zero would not hide a NaN in another one's block.
        for (long i = 0; i < KEYS; i++) {
            long position = first + i <= last ? first + i : last;
            if (position < lowest) position = lowest;
            const float *k = load_head(&a->cache, index_at(a, table, position, kv_head, false),
                                       t.values + i * t.dim);
            for (long d = 0; d < a->dim; d++) t.keys[d * KEYS + i] = k[d];
            t.value_rows[i] = load_head(&a->cache, index_at(a, table, position, kv_head, true),
                                        t.values + i * t.dim);
        }
        long depth = last - first + 1 < KEYS ? last - first + 1 : KEYS;
        for (long r = 0; r < rows; r += GROUP)
            attend_group(a, span, kv_head, &t, r, rows - r < GROUP ? rows - r : GROUP, first,
                         depth);
    }
    for (long r = 0; r < rows; r++) {
        long token = span[1] + r / group_heads;
        int head = (int)(kv_head * group_heads + r % group_heads);
        float *out = a->out + (token * a->heads + head) * a->dim;
        for (long d = 0; d < a->dim; d++) out[d] = t.out[r * t.dim + d] / t.total[r];
        if (a->gate) apply_gate(a, token, head, out);
    }
}

static void attention_kernel(const void *arguments, const ThreadContext *ctx) {
    const Attention *a = arguments;
    long group = a->heads / a->kv_heads, parts = parts_of_group(a, ctx->num_threads);
    long decodes = a->num_decodes * a->kv_heads * parts, first, end;
    long total = decodes + a->num_tiles * a->kv_heads;
    // A tile costs as much as many decodes. The last tiles run first: they have the most keys.
    while (next_chunk(ctx, total, a->num_tiles ? 1 : chunk_size(ctx, total, 4), &first, &end))
        for (long i = first; i < end; i++) {
            long j = total - 1 - i;
            if (j < decodes) {
                long part = j % parts, kv_head = j / parts % a->kv_heads;
                long head = part * group / parts, heads = (part + 1) * group / parts - head;
                attend_decode(a, a->spans + j / (parts * a->kv_heads) * 4, (int)kv_head,
                              (int)(kv_head * group + head), (int)heads, ctx->scratch);
                continue;
            }
            long tile = a->num_decodes + (j - decodes) / a->kv_heads;
            attend_tile(a, a->spans + tile * 4, (int)((j - decodes) % a->kv_heads), ctx->scratch);
        }
}

void native_attention(ThreadPool *pool, const float *q, void *cache, long value_offset,
                      int cache_kind, int heads, int kv_heads, int dim, const int64_t *spans,
                      long num_decodes, long num_tiles, long largest_tile,
                      const int64_t *block_tables, long width, long block_size,
                      const int64_t *seq_lens, float scale, float softcap, const float *slopes,
                      long window, long chunk, const float *sinks, const float *gate, int gate_dim,
                      int softplus_gate, double work, float *out) {
    Attention a = {.q = q,
                   .slopes = slopes,
                   .sinks = sinks,
                   .gate = gate,
                   .cache = {cache, value_offset, kv_heads, dim, cache_kind},
                   .spans = spans,
                   .block_tables = block_tables,
                   .seq_lens = seq_lens,
                   .out = out,
                   .num_decodes = num_decodes,
                   .num_tiles = num_tiles,
                   .width = width,
                   .block_size = block_size,
                   .window = window,
                   .chunk = chunk,
                   .heads = heads,
                   .kv_heads = kv_heads,
                   .dim = dim,
                   .gate_dim = gate_dim,
                   .softplus_gate = softplus_gate,
                   .scale = scale,
                   .softcap = softcap};
    size_t decode = decode_bytes(&a), tile = tile_bytes(largest_tile * (heads / kv_heads), dim);
    reserve_scratch(pool, decode > tile ? decode : tile);
    issue(pool, attention_kernel, &a, sizeof a, work);
}
