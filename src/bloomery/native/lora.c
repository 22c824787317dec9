// The products of LoRA adapters. Every row has the number of its adapter's device slot, or -1, so
// one operation serves rows of different adapters. With experts, a row is a (token, choice) pair
// that also has the number of its expert.
#include "native.h"

typedef struct {
    const float *matrices;  // of slot 0 and expert 0
    long slot_stride, expert_stride;
    const int32_t *slots, *experts;  // of each token, and of each row; experts may be NULL
    long num_experts, rows_per_token;
} AdapterMatrices;

static inline long slot_of(const AdapterMatrices *a, long row) {
    return a->slots[row / a->rows_per_token];
}

// The matrices of a row, or NULL where it has no adapter or no expert.
static const float *find_matrices(const AdapterMatrices *a, long row) {
    if (slot_of(a, row) < 0) return NULL;
    const float *matrices = a->matrices + slot_of(a, row) * a->slot_stride;
    if (!a->experts) return matrices;
    if (a->experts[row] < 0 || a->experts[row] >= a->num_experts) return NULL;
    return matrices + a->experts[row] * a->expert_stride;
}

static inline float dot_floats(const float *x, const float *y, long n) {
    f32x8 total = broadcast8(0), other = broadcast8(0);
    float tail = 0;
    long k = 0;
    for (; k + 2 * LANES <= n; k += 2 * LANES) {
        total += load8(x + k) * load8(y + k);
        other += load8(x + k + LANES) * load8(y + k + LANES);
    }
    for (; k < n; k++) tail += x[k] * y[k];
    return reduce_sum8(total + other) + tail;
}

// ---- shrink: x [rows, inputs] times A [width, inputs] ------------------------------------------

typedef struct {
    AdapterMatrices a;
    const int32_t *active;  // of each slot; may be NULL
    const float *x;
    float *out;  // [rows, width]
    long rows, inputs, width;
} LoraShrink;

static void shrink_kernel(const void *arguments, const ThreadContext *ctx) {
    const LoraShrink *s = arguments;
    long first, end, total = s->rows * s->width;
    while (next_chunk(ctx, total, chunk_size(ctx, total, 4), &first, &end))
        for (long i = first; i < end; i++) {
            long row = i / s->width, j = i % s->width;
            const float *a = find_matrices(&s->a, row);
            if (s->active && !(a && s->active[slot_of(&s->a, row)])) continue;
            s->out[i] = a ? dot_floats(s->x + row * s->inputs, a + j * s->inputs, s->inputs) : 0;
        }
}

// With `active`, rows whose slot is not active stay as they are; otherwise they become 0.
void native_lora_shrink(ThreadPool *pool, const float *x, long rows, long inputs, const float *a,
                        long slot_stride, long expert_stride, const int32_t *slots,
                        const int32_t *experts, long num_experts, long rows_per_token, long width,
                        const int32_t *active, float *out) {
    LoraShrink s = {{a, slot_stride, expert_stride, slots, experts, num_experts, rows_per_token},
                    active, x, out, rows, inputs, width};
    issue(pool, shrink_kernel, &s, sizeof s, (double)rows * inputs * width / 8);
}

// ---- expand: y += B [outputs, rank] times a part of the shrunk row -----------------------------

typedef struct {
    AdapterMatrices b;
    const float *shrunk;     // [rows, parts * rank]
    const int32_t *parts;    // [outputs]: the part of the shrunk row that an output reads
    const float *bias;       // of slot 0: [outputs]; may be NULL
    float *y;                // [rows, outputs]
    long rows, width, rank, outputs, bias_stride;
} LoraExpand;

#define OUTPUTS_PER_UNIT 64

static void expand_kernel(const void *arguments, const ThreadContext *ctx) {
    const LoraExpand *e = arguments;
    long units = (e->outputs + OUTPUTS_PER_UNIT - 1) / OUTPUTS_PER_UNIT;
    long first, end, total = e->rows * units;
    while (next_chunk(ctx, total, chunk_size(ctx, total, 4), &first, &end))
        for (long i = first; i < end; i++) {
            long row = i / units, start = i % units * OUTPUTS_PER_UNIT;
            long stop = start + OUTPUTS_PER_UNIT < e->outputs ? start + OUTPUTS_PER_UNIT : e->outputs;
            const float *b = find_matrices(&e->b, row);
            if (!b) continue;
            const float *shrunk = e->shrunk + row * e->width;
            const float *bias = e->bias ? e->bias + slot_of(&e->b, row) * e->bias_stride : NULL;
            float *y = e->y + row * e->outputs;
            for (long o = start; o < stop; o++) {
                y[o] += dot_floats(shrunk + e->parts[o] * e->rank, b + o * e->rank, e->rank);
                if (bias) y[o] += bias[o];
            }
        }
}

void native_lora_expand(ThreadPool *pool, const float *shrunk, long rows, long width,
                        const float *b, long slot_stride, long expert_stride,
                        const int32_t *slots, const int32_t *experts, long num_experts,
                        long rows_per_token, long rank, long outputs, const int32_t *parts, const float *bias, long bias_stride,
                        float *y) {
    LoraExpand e = {{b, slot_stride, expert_stride, slots, experts, num_experts, rows_per_token},
                    shrunk, parts, bias, y, rows, width, rank, outputs, bias_stride};
    issue(pool, expand_kernel, &e, sizeof e, (double)rows * outputs * rank / 8);
}

// ---- rows of tables ----------------------------------------------------------------------------

typedef struct {
    AdapterMatrices tables;  // [vocabulary, width]
    const int32_t *active;   // of each slot; may be NULL
    const int64_t *ids;
    float *out;  // [rows, width]
    long rows, width, first_id, end_id;
} LoraLookup;

static void lookup_kernel(const void *arguments, const ThreadContext *ctx) {
    const LoraLookup *l = arguments;
    long first, end;
    while (next_chunk(ctx, l->rows, chunk_size(ctx, l->rows, 4), &first, &end))
        for (long row = first; row < end; row++) {
            const float *table = find_matrices(&l->tables, row);
            float *out = l->out + row * l->width;
            if (l->active && !(table && l->active[slot_of(&l->tables, row)])) continue;
            bool inside = l->ids[row] >= l->first_id && l->ids[row] < l->end_id;
            if (table && inside)
                memcpy(out, table + (l->ids[row] - l->first_id) * l->width,
                       l->width * sizeof(float));
            else
                memset(out, 0, l->width * sizeof(float));
        }
}

// Looks up token ids in the table of each row's slot. The table has the ids from first_id to end_id;
// others become 0. With `active`, rows whose slot is not active stay as they are.
void native_lora_lookup(ThreadPool *pool, const int64_t *ids, long rows, const float *tables,
                        long slot_stride, const int32_t *slots, const int32_t *active,
                        long first_id, long end_id, long width, float *out) {
    LoraLookup l = {{tables, slot_stride, 0, slots, NULL, 0, 1}, active, ids, out, rows, width,
                    first_id, end_id};
    issue(pool, lookup_kernel, &l, sizeof l, (double)rows * width / 2);
}

// ---- the inputs of (token, choice) pairs -------------------------------------------------------

typedef struct {
    const float *x, *weights;  // weights may be NULL
    const int32_t *order;      // may be NULL
    float *out;
    long pairs, pairs_per_row, width;
} PairInputs;

static void pair_inputs_kernel(const void *arguments, const ThreadContext *ctx) {
    const PairInputs *p = arguments;
    long first, end;
    while (next_chunk(ctx, p->pairs, chunk_size(ctx, p->pairs, 4), &first, &end))
        for (long i = first; i < end; i++) {
            long pair = p->order ? p->order[i] : i;
            const float *x = p->x + pair / p->pairs_per_row * p->width;
            float *out = p->out + i * p->width, weight = p->weights ? p->weights[pair] : 1;
            for (long k = 0; k < p->width; k++) out[k] = weight * x[k];
        }
}

// x [rows, width] -> the row of each pair, times its weight: in the order of the pairs, or in
// `order`.
void native_pair_inputs(ThreadPool *pool, const float *x, const int32_t *order, long pairs,
                        long pairs_per_row, long width, const float *weights, float *out) {
    PairInputs p = {x, weights, order, out, pairs, pairs_per_row, width};
    issue(pool, pair_inputs_kernel, &p, sizeof p, (double)pairs * width / 4);
}
