// Operations on rows of activations between the linear layers: norms, elementwise operations, rope
// with the KV cache update, and the inputs and outputs of a decode step.
#include "kv_cache.h"

#include <math.h>
#include <stdlib.h>

// ---- norms -------------------------------------------------------------------------------------

// Norms x[0 .. n) and writes the values from `first` up to `end` to y.
static void norm_row_part(const float *x, float *y, long n, const Norm *norm, long first,
                          long end) {
    f32x8 total = broadcast8(0);
    float mean = 0, tail = 0;
    long k;
    if (norm->kind == 2) {
        for (k = 0; k + LANES <= n; k += LANES) total += load8(x + k);
        for (; k < n; k++) tail += x[k];
        mean = (reduce_sum8(total) + tail) / (float)n;
        total = broadcast8(0);
        tail = 0;
    }
    for (k = 0; k + LANES <= n; k += LANES) {
        f32x8 v = load8(x + k) - broadcast8(mean);
        total += v * v;
    }
    for (; k < n; k++) tail += (x[k] - mean) * (x[k] - mean);
    float root = 1.0f / sqrtf((reduce_sum8(total) + tail) / (float)n + norm->eps);
    for (k = first; k + LANES <= end; k += LANES) {
        f32x8 v = (load8(x + k) - broadcast8(mean)) * broadcast8(root);
        if (norm->weight) v *= load8(norm->weight + k);
        if (norm->bias) v += load8(norm->bias + k);
        store8(y + k - first, v);
    }
    for (; k < end; k++) {
        float v = (x[k] - mean) * root;
        if (norm->weight) v *= norm->weight[k];
        if (norm->bias) v += norm->bias[k];
        y[k - first] = v;
    }
}

void norm_row(const float *x, float *y, long n, const Norm *norm) {
    norm_row_part(x, y, n, norm, 0, n);
}

typedef struct {
    const float *x;
    float *out;
    long rows, columns, groups;  // row r uses row r % groups of the weights (one for each head)
    Norm norm;
} NormRows;

static void norm_kernel(const void *arguments, const ThreadContext *ctx) {
    const NormRows *a = arguments;
    long first, end;
    while (next_chunk(ctx, a->rows, chunk_size(ctx, a->rows, 4), &first, &end))
        for (long row = first; row < end; row++) {
            Norm norm = a->norm;
            if (norm.weight) norm.weight += row % a->groups * a->columns;
            if (norm.bias) norm.bias += row % a->groups * a->columns;
            norm_row(a->x + row * a->columns, a->out + row * a->columns, a->columns, &norm);
        }
}

void native_norm(ThreadPool *pool, const float *x, long rows, long columns, int kind, float eps,
                 const float *weight, const float *bias, long groups, float *out) {
    NormRows a = {x, out, rows, columns, groups, {kind, eps, weight, bias}};
    issue(pool, norm_kernel, &a, sizeof a, (double)rows * columns / 2);
}

typedef struct {
    const float *x;
    float *out;
    long rows, x_stride, out_stride;
    long heads, columns;       // a row has `heads` neighbouring parts of `columns`, each normed
    long first, end;           // the columns of a part that are written
    long heads_with_weights;   // 1: all heads share the weights
    Norm norm;                 // kind 0: the columns are copied
} NormColumns;

static void norm_columns_kernel(const void *arguments, const ThreadContext *ctx) {
    const NormColumns *a = arguments;
    long first, end, width = a->end - a->first;
    while (next_chunk(ctx, a->rows, chunk_size(ctx, a->rows, 1), &first, &end))
        for (long row = first; row < end; row++)
            for (long head = 0; head < a->heads; head++) {
                const float *x = a->x + row * a->x_stride + head * a->columns;
                float *out = a->out + row * a->out_stride + head * width;
                if (!a->norm.kind) {
                    memcpy(out, x + a->first, sizeof(float) * (size_t)width);
                    continue;
                }
                Norm norm = a->norm;
                long weights = head % a->heads_with_weights * a->columns;
                if (norm.weight) norm.weight += weights;
                if (norm.bias) norm.bias += weights;
                norm_row_part(x, out, a->columns, &norm, a->first, a->end);
            }
}

void native_norm_columns(ThreadPool *pool, const float *x, long rows, long x_stride, long heads,
                         long columns, int kind, float eps, const float *weight, const float *bias,
                         long heads_with_weights, long first, long end, float *out,
                         long out_stride) {
    NormColumns a = {x,     out, rows, x_stride, out_stride, heads, columns,
                     first, end, heads_with_weights, {kind, eps, weight, bias}};
    issue(pool, norm_columns_kernel, &a, sizeof a, (double)rows * heads * columns / 2);
}

// ---- elementwise operations --------------------------------------------------------------------

// x + number * y, x * y, x * number, x + number, tanh(x), activation(x), activation(gate) * up
typedef enum {
    ADD_SCALED,
    MULTIPLY,
    MULTIPLY_NUMBER,
    ADD_NUMBER,
    TANH,
    ACTIVATE,
    GATED_ACTIVATE
} ElementwiseOp;

typedef struct {
    const float *x, *y;
    float *out, number;
    long count, width;  // gated: a row of x is gate | up, each of this width
    int op;
    Activation activation;
} Elementwise;

static inline f32x8 apply_op(const Elementwise *a, f32x8 x, f32x8 y) {
    f32x8 number = broadcast8(a->number);
    switch ((ElementwiseOp)a->op) {
        case ADD_SCALED: return x + number * y;
        case MULTIPLY: return x * y;
        case MULTIPLY_NUMBER: return x * number;
        case ADD_NUMBER: return x + number;
        case TANH: return tanh8(x);
        case ACTIVATE: return activate8(x, &a->activation);
        default: return gate8(x, y, &a->activation);
    }
}

#define SPAN 2048  // elements that a thread takes at once

static void elementwise_kernel(const void *arguments, const ThreadContext *ctx) {
    const Elementwise *a = arguments;
    long first, end, spans = (a->count + SPAN - 1) / SPAN;
    while (next_chunk(ctx, spans, chunk_size(ctx, spans, 4), &first, &end)) {
        long stop = end * SPAN < a->count ? end * SPAN : a->count;
        for (long i = first * SPAN; i < stop;) {
            // Both operands are contiguous up to `ends`.
            long ends = a->op == GATED_ACTIVATE ? (i / a->width + 1) * a->width : stop;
            ends = ends < stop ? ends : stop;
            const float *x = a->x + i, *y = a->y ? a->y + i : x;
            if (a->op == GATED_ACTIVATE) {
                x = a->x + i / a->width * a->width * 2 + i % a->width;
                y = x + a->width;
            }
            long n = ends - i, k = 0;
            for (; k + LANES <= n; k += LANES)
                store8(a->out + i + k, apply_op(a, load8(x + k), load8(y + k)));
            if (k < n) {
                f32x8 u = broadcast8(0), v = broadcast8(0), w;
                memcpy(&u, x + k, (n - k) * sizeof(float));
                memcpy(&v, y + k, (n - k) * sizeof(float));
                w = apply_op(a, u, v);
                memcpy(a->out + i + k, &w, (n - k) * sizeof(float));
            }
            i = ends;
        }
    }
}

void native_elementwise(ThreadPool *pool, int op, const float *x, const float *y, long count,
                        long width, float number, int activation, float param0, float param1,
                        float param2, float *out) {
    Elementwise a = {x, y, out, number, count, width, op, {activation, {param0, param1, param2}}};
    issue(pool, elementwise_kernel, &a, sizeof a, (double)count / (op >= TANH ? 1 : 4));
}

typedef struct {
    char *to;
    const char *from;
    long bytes;
} Copy;

static void copy_kernel(const void *arguments, const ThreadContext *ctx) {
    const Copy *a = arguments;
    long first, end;
    while (next_chunk(ctx, a->bytes, 1 << 16, &first, &end))
        memcpy(a->to + first, a->from + first, end - first);
}

void native_copy(ThreadPool *pool, void *to, const void *from, long bytes) {
    Copy a = {to, from, bytes};
    issue(pool, copy_kernel, &a, sizeof a, bytes / 16.0);
}

typedef struct {
    const float *x;
    const int64_t *indices;
    float *out;
    long rows, width, count;
} SelectRows;

static void select_rows_kernel(const void *arguments, const ThreadContext *ctx) {
    const SelectRows *a = arguments;
    long first, end;
    while (next_chunk(ctx, a->count, chunk_size(ctx, a->count, 4), &first, &end))
        for (long i = first; i < end; i++) {
            long row = a->indices[i] < 0 || a->indices[i] >= a->rows ? 0 : a->indices[i];
            memcpy(a->out + i * a->width, a->x + row * a->width, a->width * sizeof(float));
        }
}

// x [rows, width] -> out [count, width]: the rows of these indices. An index that is no row selects
// row 0: padding has any index.
void native_select_rows(ThreadPool *pool, const float *x, long rows, long width,
                        const int64_t *indices, long count, float *out) {
    SelectRows a = {x, indices, out, rows, width, count};
    issue(pool, select_rows_kernel, &a, sizeof a, (double)count * width / 4);
}

typedef struct {
    const int64_t *x;
    int64_t *out;
    long count, number;
} AddInteger;

static void add_integer_kernel(const void *arguments, const ThreadContext *ctx) {
    const AddInteger *a = arguments;
    long first, end;
    while (next_chunk(ctx, a->count, a->count, &first, &end))
        for (long i = first; i < end; i++) a->out[i] = a->x[i] + a->number;
}

void native_add_integer(ThreadPool *pool, const int64_t *x, long count, long number, int64_t *out) {
    AddInteger a = {x, out, count, number};
    issue(pool, add_integer_kernel, &a, sizeof a, count);
}

// ---- rope on q and k, k and v into the KV cache ------------------------------------------------

// A row of qkv is q | k | v | gate. If keys are values, it has no v.
typedef struct {
    const float *qkv, *cos, *sin, *q_weight, *k_weight, *v_weight;
    const float *query_scales;  // factors of q, rows as those of cos; or NULL
    const int64_t *positions, *slot_mapping;
    float *q, *gate;
    KvCache cache;
    long tokens, width, gate_width;
    int heads, kv_heads, head_dim, rope_dim, norm, v_norm;
    float eps, v_eps, clip;
    bool interleaved, per_head;  // per_head: every head has its own row of norm weights
    bool norm_after_rope, keys_as_values;
} RopeCache;

static inline void rotate_pair(float *u, float *v, float cos, float sin) {
    float x = *u, y = *v;
    *u = x * cos - y * sin;
    *v = x * sin + y * cos;
}

static void norm_head(const RopeCache *a, int head, float *x) {
    const float *weight = head < a->heads ? a->q_weight : a->k_weight;
    if (weight && a->per_head) weight += (head < a->heads ? head : head - a->heads) * a->head_dim;
    Norm norm = {a->norm, a->eps, weight, NULL};
    norm_row(x, x, a->head_dim, &norm);
}

static void rotate_head(const RopeCache *a, long row, float *x) {
    int half = a->rope_dim / 2;
    const float *cos = a->cos + row * half, *sin = a->sin + row * half;
    if (a->interleaved)
        for (int d = 0; d < half; d++) rotate_pair(x + 2 * d, x + 2 * d + 1, cos[d], sin[d]);
    else
        for (int d = 0; d < half; d++) rotate_pair(x + d, x + d + half, cos[d], sin[d]);
}

static void transform_head(const RopeCache *a, long token, int head, float *head_out) {
    int dim = a->head_dim;
    bool is_value = head >= a->heads + a->kv_heads;
    int source_head = is_value && a->keys_as_values ? head - a->kv_heads : head;
    const float *x = a->qkv + token * a->width + source_head * dim;
    if (a->clip > 0)
        for (int d = 0; d < dim; d++) {
            float clipped = x[d] > a->clip ? a->clip : x[d];
            head_out[d] = clipped < -a->clip ? -a->clip : clipped;
        }
    else memcpy(head_out, x, dim * sizeof(float));
    if (is_value) {
        Norm norm = {a->v_norm, a->v_eps, a->v_weight, NULL};
        if (a->v_norm) norm_row(head_out, head_out, dim, &norm);
        return;
    }
    long row = a->positions ? a->positions[token] : token;
    if (a->norm && !a->norm_after_rope) norm_head(a, head, head_out);
    if (a->rope_dim) rotate_head(a, row, head_out);
    if (a->norm && a->norm_after_rope) norm_head(a, head, head_out);
    if (a->query_scales && head < a->heads)
        for (int d = 0; d < dim; d++) head_out[d] *= a->query_scales[row];
}

static void rope_cache_kernel(const void *arguments, const ThreadContext *ctx) {
    const RopeCache *a = arguments;
    long heads = a->heads + 2 * a->kv_heads, items = heads + (a->gate ? 1 : 0), first, end;
    while (next_chunk(ctx, a->tokens * items, chunk_size(ctx, a->tokens * items, 2), &first, &end))
        for (long i = first; i < end; i++) {
            long token = i / items;
            int head = (int)(i % items), key = head - a->heads;
            if (head == heads) {
                memcpy(a->gate + token * a->gate_width,
                       a->qkv + (token + 1) * a->width - a->gate_width,
                       a->gate_width * sizeof(float));
                continue;
            }
            if (key < 0) {
                transform_head(a, token, head, a->q + (token * a->heads + head) * a->head_dim);
                continue;
            }
            float transformed[a->head_dim];
            transform_head(a, token, head, transformed);
            long index = cache_index(&a->cache, a->slot_mapping[token], key % a->kv_heads,
                                     key >= a->kv_heads);
            store_head(&a->cache, index, transformed);
        }
}

void native_rope_cache(ThreadPool *pool, const float *qkv, long tokens, long width, int heads,
                       int kv_heads, int head_dim, const float *cos, const float *sin, int rope_dim,
                       const int64_t *positions, int interleaved, int norm, const float *q_weight,
                       const float *k_weight, int per_head, float eps, int norm_after_rope,
                       int v_norm, const float *v_weight, float v_eps, int keys_as_values,
                       const float *query_scales, float clip, const int64_t *slot_mapping, float *q,
                       float *gate, long gate_width, void *cache, long value_offset,
                       int cache_kind) {
    RopeCache a = {.qkv = qkv,
                   .cos = cos,
                   .sin = sin,
                   .q_weight = q_weight,
                   .k_weight = k_weight,
                   .v_weight = v_weight,
                   .query_scales = query_scales,
                   .positions = positions,
                   .slot_mapping = slot_mapping,
                   .q = q,
                   .gate = gate,
                   .cache = {cache, value_offset, kv_heads, head_dim, cache_kind},
                   .tokens = tokens,
                   .width = width,
                   .gate_width = gate_width,
                   .heads = heads,
                   .kv_heads = kv_heads,
                   .head_dim = head_dim,
                   .rope_dim = rope_dim,
                   .norm = norm,
                   .v_norm = v_norm,
                   .eps = eps,
                   .v_eps = v_eps,
                   .clip = clip,
                   .interleaved = interleaved,
                   .per_head = per_head,
                   .norm_after_rope = norm_after_rope,
                   .keys_as_values = keys_as_values};
    issue(pool, rope_cache_kernel, &a, sizeof a, (double)tokens * width);
}

// ---- decode steps: the inputs of the next position, and the sampled tokens ---------------------

typedef struct {
    const int32_t *rows;
    const int64_t *last_tokens, *positions, *block_tables;
    int64_t *ids, *positions_out, *seq_lens;
    int64_t *slot_mapping, *blocks;  // [tables][count], [tables][count][width]
    long count, num_tables, num_rows, width, block_size;
} DecodeInputs;

static void decode_inputs_kernel(const void *arguments, const ThreadContext *ctx) {
    const DecodeInputs *a = arguments;
    long first, end;
    while (next_chunk(ctx, a->count, a->count, &first, &end))
        for (long i = first; i < end; i++) {
            long row = a->rows[i], position = a->positions[row];
            long block = position / a->block_size;
            a->ids[i] = a->last_tokens[row];
            a->positions_out[i] = position;
            a->seq_lens[i] = position + 1;
            for (long t = 0; t < a->num_tables; t++) {
                const int64_t *table = a->block_tables + (t * a->num_rows + row) * a->width;
                long at = t * a->count + i;
                a->slot_mapping[at] = table[block] * a->block_size + position % a->block_size;
                memcpy(a->blocks + at * a->width, table, (block + 1) * sizeof(int64_t));
            }
        }
}

void native_decode_inputs(ThreadPool *pool, const int32_t *rows, long count,
                          const int64_t *last_tokens, const int64_t *positions,
                          const int64_t *block_tables, long num_tables, long num_rows, long width,
                          long block_size, int64_t *ids, int64_t *positions_out, int64_t *seq_lens,
                          int64_t *slot_mapping, int64_t *blocks) {
    DecodeInputs a = {rows,     last_tokens, positions,    block_tables, ids,   positions_out,
                      seq_lens, slot_mapping, blocks,      count,        num_tables,
                      num_rows, width,        block_size};
    issue(pool, decode_inputs_kernel, &a, sizeof a, 10.0 * count * num_tables);
}

typedef struct {
    const int32_t *rows;
    const int64_t *tokens;
    int64_t *last_tokens, *positions;
    long count, padding_row;
} AdvanceRows;

static void advance_kernel(const void *arguments, const ThreadContext *ctx) {
    const AdvanceRows *a = arguments;
    long first, end;
    while (next_chunk(ctx, a->count, a->count, &first, &end))
        for (long i = first; i < end; i++) {
            long row = a->rows[i];
            if (row == a->padding_row) continue;
            a->last_tokens[row] = a->tokens[i];
            a->positions[row]++;
        }
}

void native_advance(ThreadPool *pool, const int32_t *rows, long count, const int64_t *tokens,
                    int64_t *last_tokens, int64_t *positions, long padding_row) {
    AdvanceRows a = {rows, tokens, last_tokens, positions, count, padding_row};
    issue(pool, advance_kernel, &a, sizeof a, 10.0 * count);
}
