// Recurrent mixers: causal convolutions and scans that continue from the states of sequences.
//
// A state lies in blocks of the KV cache's memory (kernels/state_cache.py). One unit of work is one
// sequence and some channels or one head of it, so threads never share a state.
#include "native.h"
#include "vectors.h"

#include <math.h>

// One part of the states of a layer: rows of `width` floats, each part from a new block on.
typedef struct {
    float *memory;
    const int64_t *blocks;  // [sequences][stride]
    long block_values, stride, first_block, rows_per_block, width;
} StatePart;

static inline float *state_row(const StatePart *part, long sequence, long row) {
    const int64_t *blocks = part->blocks + sequence * part->stride + part->first_block;
    return part->memory + blocks[row / part->rows_per_block] * part->block_values +
           row % part->rows_per_block * part->width;
}

// The new positions of a step; without `start_loc` each sequence has one.
typedef struct {
    const int64_t *start_loc, *seq_lens;
    long sequences;
} StepLayout;

static inline void find_tokens(const StepLayout *step, long sequence, long *first, long *count,
                               long *start) {
    *first = step->start_loc ? step->start_loc[sequence] : sequence;
    *count = step->start_loc ? step->start_loc[sequence + 1] - *first : 1;
    *start = step->seq_lens[sequence] - *count;
}

static inline f32x8 load_some(const float *at, long n) {
    if (n >= LANES) return load8(at);
    float values[LANES] = {0};
    memcpy(values, at, n * sizeof(float));
    return load8(values);
}

static inline void store_some(float *at, f32x8 x, long n) {
    if (n >= LANES) {
        store8(at, x);
        return;
    }
    float values[LANES];
    store8(values, x);
    memcpy(at, values, n * sizeof(float));
}

// The same, where `exact` says that all vectors are whole. It is a constant of the loops.
INLINE f32x8 load_part(const float *at, long n, bool exact) {
    return exact ? load8(at) : load_some(at, n);
}

INLINE void store_part(float *at, f32x8 x, long n, bool exact) {
    if (exact) store8(at, x);
    else store_some(at, x, n);
}

static inline f32x8 silu8(f32x8 x) { return x / (broadcast8(1.0f) + exp8(-x)); }
static inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
static inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// ---- causal convolution ------------------------------------------------------------------------

#define CONV_CHANNELS 64  // of one unit of work
#define MAX_WIDTH 8

typedef struct {
    const float *x, *before, *after;  // rows of `row` floats; factors of inputs and outputs or NULL
    const float *factors, *weight, *bias;  // [channels] or NULL, [channels][width]
    float *out;                            // [tokens][channels]
    long row, channels, width;
    int silu;
    StatePart part;
    StepLayout step;
} Convolution;

static void load_history(const Convolution *a, long sequence, long first, long count, long start,
                         float history[MAX_WIDTH][CONV_CHANNELS]) {
    memset(history, 0, sizeof(float) * MAX_WIDTH * CONV_CHANNELS);
    if (start <= 0) return;
    for (long c = 0; c < count; c++) {
        const float *row = state_row(&a->part, sequence, first + c);
        for (long j = 0; j < a->width; j++) history[j][c] = row[j];
    }
}

static void convolve(const Convolution *a, long sequence, long first, long count) {
    float history[MAX_WIDTH][CONV_CHANNELS], taps[MAX_WIDTH][CONV_CHANNELS] = {{0}};
    long token, tokens, start;
    find_tokens(&a->step, sequence, &token, &tokens, &start);
    if (!tokens) return;
    load_history(a, sequence, first, count, start, history);
    for (long c = 0; c < count; c++)
        for (long j = 0; j < a->width; j++) taps[j][c] = a->weight[(first + c) * a->width + j];
    for (long i = 0; i < tokens; i++) {
        long row = (token + i) * a->row + first, position = start + i;
        long place = (position % a->width + a->width) % a->width;
        for (long c = 0; c < count; c += LANES) {
            long n = count - c;
            f32x8 x = load_some(a->x + row + c, n);
            if (a->before) x *= load_some(a->before + row + c, n);
            if (a->factors) x *= load_some(a->factors + first + c, n);
            store8(history[place] + c, x);
            f32x8 y = a->bias ? load_some(a->bias + first + c, n) : broadcast8(0);
            for (long j = 0; j < a->width; j++) {
                long column = (place + 1 + j) % a->width;
                y += load8(taps[j] + c) * load8(history[column] + c);
            }
            if (a->silu) y = silu8(y);
            if (a->after) y *= load_some(a->after + row + c, n);
            store_some(a->out + (token + i) * a->channels + first + c, y, n);
        }
    }
    if (start + tokens <= 0) return;
    for (long c = 0; c < count; c++) {
        float *row = state_row(&a->part, sequence, first + c);
        for (long j = 0; j < a->width; j++) row[j] = history[j][c];
    }
}

static void convolution_kernel(const void *arguments, const ThreadContext *ctx) {
    const Convolution *a = arguments;
    long spans = (a->channels + CONV_CHANNELS - 1) / CONV_CHANNELS;
    long units = spans * a->step.sequences, first, end;
    while (next_chunk(ctx, units, chunk_size(ctx, units, 4), &first, &end))
        for (long unit = first; unit < end; unit++) {
            long channel = unit % spans * CONV_CHANNELS, rest = a->channels - channel;
            convolve(a, unit / spans, channel, rest < CONV_CHANNELS ? rest : CONV_CHANNELS);
        }
}

void native_convolution(ThreadPool *pool, const float *x, const float *before, const float *after,
                        const float *factors, const float *weight, const float *bias, float *out,
                        long row, long channels, long width, int silu, float *memory,
                        const int64_t *blocks, long block_values, long stride, long first_block,
                        const int64_t *start_loc, const int64_t *seq_lens, long sequences,
                        long tokens) {
    Convolution a = {x,    before,   after, factors, weight, bias, out,
                     row,  channels, width, silu,
                     {memory, blocks, block_values, stride, first_block, block_values / width, width},
                     {start_loc, seq_lens, sequences}};
    issue(pool, convolution_kernel, &a, sizeof a, (double)tokens * channels * width / 8);
}

// ---- gated delta net ---------------------------------------------------------------------------

#define MAX_HEAD 1024  // floats of a key or a value
#define SLAB 32        // value dims that stay in registers

typedef struct {
    const float *projected, *convolved;       // rows of `row` floats, of `channels` floats
    const float *decay, *dt_bias, *norm;      // [value heads] twice; [value dim] or NULL
    float *out;                               // [tokens][value heads][value dim]
    long row, channels, key_heads, value_heads, key_dim, value_dim;
    int tiled;
    float beta_scale, eps;
    StatePart part;
    StepLayout step;
} DeltaNet;

// Copies a key or query with length `length`.
static void normalize_head(const float *x, float *y, long n, float length) {
    float total = 0;
    for (long i = 0; i < n; i++) total += x[i] * x[i];
    float factor = length / sqrtf(total + 1e-6f);
    for (long i = 0; i < n; i++) y[i] = x[i] * factor;
}

// Applies the delta rule to SLAB value dims from `first` on; returns their outputs in y.
INLINE void update_slab(const DeltaNet *a, float *const *rows, long first, const float *q,
                        const float *k, const float *v, float retained, float beta, float qk,
                        float *y, bool exact) {
    enum { VECTORS = SLAB / LANES };
    f32x8 from_k[VECTORS], from_q[VECTORS], change[VECTORS];
    long n = a->value_dim - first, vectors = n >= SLAB ? VECTORS : (n + LANES - 1) / LANES;
    for (long j = 0; j < VECTORS; j++) from_k[j] = from_q[j] = broadcast8(0);
    for (long i = 0; i < a->key_dim; i++)
        for (long j = 0; j < vectors; j++) {
            f32x8 s = load_part(rows[i] + first + j * LANES, n - j * LANES, exact);
            from_k[j] += broadcast8(k[i]) * s;
            from_q[j] += broadcast8(q[i]) * s;
        }
    for (long j = 0; j < vectors; j++) {
        f32x8 value = load_part(v + first + j * LANES, n - j * LANES, exact);
        change[j] = broadcast8(beta) * (value - broadcast8(retained) * from_k[j]);
        f32x8 result = broadcast8(retained) * from_q[j] + broadcast8(qk) * change[j];
        store_part(y + first + j * LANES, result, n - j * LANES, exact);
    }
    for (long i = 0; i < a->key_dim; i++)
        for (long j = 0; j < vectors; j++) {
            float *at = rows[i] + first + j * LANES;
            f32x8 s = broadcast8(retained) * load_part(at, n - j * LANES, exact);
            store_part(at, s + broadcast8(k[i]) * change[j], n - j * LANES, exact);
        }
}

static void run_delta_head(const DeltaNet *a, long sequence, long head) {
    float *rows[MAX_HEAD], q[MAX_HEAD], k[MAX_HEAD], y[MAX_HEAD];
    long token, tokens, start, keys = a->key_heads * a->key_dim;
    long values = a->value_heads * a->value_dim;
    find_tokens(&a->step, sequence, &token, &tokens, &start);
    long key_head = a->tiled ? head % a->key_heads : head / (a->value_heads / a->key_heads);
    for (long i = 0; i < a->key_dim; i++) {
        rows[i] = state_row(&a->part, sequence, head * a->key_dim + i);
        if (tokens && start <= 0) memset(rows[i], 0, a->value_dim * sizeof(float));
    }
    for (long t = token; t < token + tokens; t++) {
        const float *gates = a->projected + t * a->row + a->channels;
        const float *heads = gates + values;
        const float *convolved = a->convolved + t * a->channels;
        const float *v = convolved + 2 * keys + head * a->value_dim;
        float *out = a->out + t * values + head * a->value_dim, total = 0, qk = 0;
        normalize_head(convolved + key_head * a->key_dim, q, a->key_dim,
                       1.0f / sqrtf((float)a->key_dim));
        normalize_head(convolved + keys + key_head * a->key_dim, k, a->key_dim, 1.0f);
        for (long i = 0; i < a->key_dim; i++) qk += q[i] * k[i];
        float beta = a->beta_scale * sigmoid(heads[head]);
        float step = softplus(heads[a->value_heads + head] + a->dt_bias[head]);
        float retained = expf(a->decay[head] * step);
        for (long first = 0; first < a->value_dim; first += SLAB) {
            if (a->value_dim % LANES)
                update_slab(a, rows, first, q, k, v, retained, beta, qk, y, false);
            else update_slab(a, rows, first, q, k, v, retained, beta, qk, y, true);
        }
        for (long i = 0; i < a->value_dim; i++) total += y[i] * y[i];
        f32x8 factor = broadcast8(1.0f / sqrtf(total / (float)a->value_dim + a->eps));
        for (long i = 0; i < a->value_dim; i += LANES) {
            long n = a->value_dim - i;
            f32x8 normed = load_some(y + i, n) * factor;
            if (a->norm) normed *= load_some(a->norm + i, n);
            f32x8 gate = silu8(load_some(gates + head * a->value_dim + i, n));
            store_some(out + i, normed * gate, n);
        }
    }
}

static void delta_net_kernel(const void *arguments, const ThreadContext *ctx) {
    const DeltaNet *a = arguments;
    long units = a->step.sequences * a->value_heads, first, end;
    while (next_chunk(ctx, units, chunk_size(ctx, units, 4), &first, &end))
        for (long unit = first; unit < end; unit++)
            run_delta_head(a, unit / a->value_heads, unit % a->value_heads);
}

void native_delta_net(ThreadPool *pool, const float *projected, const float *convolved,
                      const float *decay, const float *dt_bias, const float *norm, float *out,
                      long row, long channels, long key_heads, long value_heads, long key_dim,
                      long value_dim, int tiled, float beta_scale, float eps, float *memory,
                      const int64_t *blocks, long block_values, long stride, long first_block,
                      const int64_t *start_loc, const int64_t *seq_lens, long sequences,
                      long tokens) {
    DeltaNet a = {projected, convolved, decay, dt_bias, norm, out,
                  row, channels, key_heads, value_heads, key_dim, value_dim,
                  tiled, beta_scale, eps,
                  {memory, blocks, block_values, stride, first_block, block_values / value_dim,
                   value_dim},
                  {start_loc, seq_lens, sequences}};
    double values = (double)tokens * value_heads * key_dim * value_dim;
    issue(pool, delta_net_kernel, &a, sizeof a, values / 4);
}

// ---- Mamba-2 -----------------------------------------------------------------------------------

typedef struct {
    const float *projected, *convolved;      // rows of `row` floats; of x | B | C
    const float *decay, *dt_bias, *skip;     // [heads]
    float *out;                              // [tokens][heads][head dim]
    long row, dt_column, heads, head_dim, state_size, groups;
    float dt_scale, dt_least, dt_most;
    StatePart part;
    StepLayout step;
} Mamba2;

INLINE void run_mamba_head(const Mamba2 *a, long sequence, long head, bool exact) {
    long token, tokens, start, inner = a->heads * a->head_dim;
    long channels = inner + 2 * a->groups * a->state_size;
    long group = head / (a->heads / a->groups);
    find_tokens(&a->step, sequence, &token, &tokens, &start);
    for (long t = token; t < token + tokens; t++) {
        const float *convolved = a->convolved + t * channels;
        const float *x = convolved + head * a->head_dim;
        const float *b = convolved + inner + group * a->state_size;
        const float *c = b + a->groups * a->state_size;
        float *out = a->out + t * inner + head * a->head_dim;
        float raw = a->projected[t * a->row + a->dt_column + head];
        float dt = softplus(raw * a->dt_scale + a->dt_bias[head]);
        dt = dt < a->dt_least ? a->dt_least : dt > a->dt_most ? a->dt_most : dt;
        f32x8 retained = broadcast8(expf(dt * a->decay[head]));
        for (long i = 0; i < a->head_dim; i++) {
            float *row = state_row(&a->part, sequence, head * a->head_dim + i);
            if (t == token && start <= 0) memset(row, 0, a->state_size * sizeof(float));
            f32x8 total = broadcast8(0), input = broadcast8(dt * x[i]);
            for (long j = 0; j < a->state_size; j += LANES) {
                long n = a->state_size - j;
                f32x8 s = retained * load_part(row + j, n, exact) +
                          input * load_part(b + j, n, exact);
                store_part(row + j, s, n, exact);
                total += s * load_part(c + j, n, exact);
            }
            out[i] = reduce_sum8(total) + a->skip[head] * x[i];
        }
    }
}

static void mamba2_kernel(const void *arguments, const ThreadContext *ctx) {
    const Mamba2 *a = arguments;
    long units = a->step.sequences * a->heads, first, end;
    while (next_chunk(ctx, units, chunk_size(ctx, units, 4), &first, &end))
        for (long unit = first; unit < end; unit++) {
            if (a->state_size % LANES) run_mamba_head(a, unit / a->heads, unit % a->heads, false);
            else run_mamba_head(a, unit / a->heads, unit % a->heads, true);
        }
}

void native_mamba2(ThreadPool *pool, const float *projected, const float *convolved,
                   const float *decay, const float *dt_bias, const float *skip, float *out,
                   long row, long dt_column, long heads, long head_dim, long state_size,
                   long groups, float dt_scale, float dt_least, float dt_most, float *memory,
                   const int64_t *blocks, long block_values, long stride, long first_block,
                   const int64_t *start_loc, const int64_t *seq_lens, long sequences, long tokens) {
    Mamba2 a = {projected, convolved, decay, dt_bias, skip, out,
                row, dt_column, heads, head_dim, state_size, groups,
                dt_scale, dt_least, dt_most,
                {memory, blocks, block_values, stride, first_block, block_values / state_size,
                 state_size},
                {start_loc, seq_lens, sequences}};
    double values = (double)tokens * heads * head_dim * state_size;
    issue(pool, mamba2_kernel, &a, sizeof a, values / 4);
}

typedef struct {
    const float *y, *gate, *weight;  // [tokens][inner], rows of `row` floats, [inner] or NULL
    float *out;
    long tokens, row, parts, size;  // a part of `size` values has a norm of its own
    float gate_scale, eps;
    int normed, gate_last;
} GateNorm;

static void gate_norm_kernel(const void *arguments, const ThreadContext *ctx) {
    const GateNorm *a = arguments;
    long units = a->tokens * a->parts, first, end;
    while (next_chunk(ctx, units, chunk_size(ctx, units, 4), &first, &end))
        for (long unit = first; unit < end; unit++) {
            long token = unit / a->parts, part = unit % a->parts * a->size;
            const float *y = a->y + unit * a->size, *gate = a->gate + token * a->row + part;
            float *out = a->out + unit * a->size;
            f32x8 total = broadcast8(0), scale = broadcast8(a->gate_scale);
            for (long i = 0; i < a->size; i += LANES) {
                long n = a->size - i;
                f32x8 v = load_some(y + i, n);
                if (!a->gate_last) v *= silu8(scale * load_some(gate + i, n));
                store_some(out + i, v, n);
                total += v * v;
            }
            float mean = reduce_sum8(total) / (float)a->size;
            f32x8 factor = broadcast8(a->normed ? 1.0f / sqrtf(mean + a->eps) : 1.0f);
            for (long i = 0; i < a->size; i += LANES) {
                long n = a->size - i;
                f32x8 v = load_some(out + i, n) * factor;
                if (a->weight) v *= load_some(a->weight + part + i, n);
                if (a->gate_last) v *= silu8(scale * load_some(gate + i, n));
                store_some(out + i, v, n);
            }
        }
}

void native_gate_norm(ThreadPool *pool, const float *y, const float *gate, const float *weight,
                      float *out, long tokens, long row, long parts, long size, float gate_scale,
                      float eps, int normed, int gate_last) {
    GateNorm a = {y,    gate, weight,     out, tokens, row,
                  parts, size, gate_scale, eps, normed, gate_last};
    issue(pool, gate_norm_kernel, &a, sizeof a, (double)tokens * parts * size);
}

// ---- Mamba-1 -----------------------------------------------------------------------------------

#define SCAN_CHANNELS 16  // of one unit of work

typedef struct {
    const float *x, *dt;         // [tokens][inner]; dt before softplus
    const float *b, *c;          // [tokens][state size]
    const float *gate;           // rows of `row` floats
    const float *decay, *skip;   // [inner][state size], [inner]
    float *out;                  // [tokens][inner]
    long inner, state_size, row;
    StatePart part;
    StepLayout step;
} SelectiveScan;

static void scan_channel(const SelectiveScan *a, long sequence, long channel) {
    long token, tokens, start, size = a->state_size;
    find_tokens(&a->step, sequence, &token, &tokens, &start);
    float *state = state_row(&a->part, sequence, channel);
    if (tokens && start <= 0) memset(state, 0, size * sizeof(float));
    for (long t = token; t < token + tokens; t++) {
        float x = a->x[t * a->inner + channel], dt = softplus(a->dt[t * a->inner + channel]);
        float gate = a->gate[t * a->row + channel];
        f32x8 total = broadcast8(0), step = broadcast8(dt), input = broadcast8(dt * x);
        for (long j = 0; j < size; j += LANES) {
            long n = size - j;
            f32x8 retained = exp8(step * load_some(a->decay + channel * size + j, n));
            f32x8 s = retained * load_some(state + j, n) + input * load_some(a->b + t * size + j, n);
            store_some(state + j, s, n);
            total += s * load_some(a->c + t * size + j, n);
        }
        float y = reduce_sum8(total) + a->skip[channel] * x;
        a->out[t * a->inner + channel] = y * gate * sigmoid(gate);
    }
}

static void selective_scan_kernel(const void *arguments, const ThreadContext *ctx) {
    const SelectiveScan *a = arguments;
    long spans = (a->inner + SCAN_CHANNELS - 1) / SCAN_CHANNELS;
    long units = spans * a->step.sequences, first, end;
    while (next_chunk(ctx, units, chunk_size(ctx, units, 4), &first, &end))
        for (long unit = first; unit < end; unit++) {
            long channel = unit % spans * SCAN_CHANNELS, last = channel + SCAN_CHANNELS;
            for (; channel < last && channel < a->inner; channel++)
                scan_channel(a, unit / spans, channel);
        }
}

void native_selective_scan(ThreadPool *pool, const float *x, const float *dt, const float *b,
                           const float *c, const float *gate, const float *decay,
                           const float *skip, float *out, long inner, long state_size, long row,
                           float *memory, const int64_t *blocks, long block_values, long stride,
                           long first_block, const int64_t *start_loc, const int64_t *seq_lens,
                           long sequences, long tokens) {
    SelectiveScan a = {x, dt, b, c, gate, decay, skip, out, inner, state_size, row,
                       {memory, blocks, block_values, stride, first_block,
                        block_values / state_size, state_size},
                       {start_loc, seq_lens, sequences}};
    issue(pool, selective_scan_kernel, &a, sizeof a, (double)tokens * inner * state_size);
}

// ---- decode steps: the blocks of each batch slot's state -----------------------------------------

typedef struct {
    const int32_t *rows;
    const int64_t *blocks;  // [tables][all rows][width]
    int64_t *out;           // [tables][count][width]
    long count, tables, num_rows, width;
} GatherStates;

static void gather_states_kernel(const void *arguments, const ThreadContext *ctx) {
    const GatherStates *a = arguments;
    long first, end;
    while (next_chunk(ctx, a->count, a->count, &first, &end))
        for (long i = first; i < end; i++)
            for (long t = 0; t < a->tables; t++)
                memcpy(a->out + (t * a->count + i) * a->width,
                       a->blocks + (t * a->num_rows + a->rows[i]) * a->width,
                       a->width * sizeof(int64_t));
}

void native_gather_states(ThreadPool *pool, const int32_t *rows, long count, const int64_t *blocks,
                          long tables, long num_rows, long width, int64_t *out) {
    GatherStates a = {rows, blocks, out, count, tables, num_rows, width};
    issue(pool, gather_states_kernel, &a, sizeof a, 10.0 * count * tables);
}
