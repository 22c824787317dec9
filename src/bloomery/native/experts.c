// Mixture of experts around the products of gemm.c: routing, sorting by expert, and the final sum.
//
// A pair is a token with one of its experts: pair i = token * top_k + choice. An expert number
// outside of the range, as a padding row may have, selects no expert and adds nothing.
#include "native.h"

#include <math.h>
#include <stdlib.h>

// ---- routing -----------------------------------------------------------------------------------

typedef enum { SCORE_SOFTMAX, SCORE_SIGMOID, SCORE_SPARSEMIXER } ScoreKind;

typedef struct {
    const float *logits, *correction_bias, *expert_scale;  // the last two may be NULL
    int32_t *ids;
    float *weights;
    long tokens, experts, top_k, groups, top_groups, group_members;
    float logit_scale, softcap, min_normalizer, scale, threshold;  // softcap 0: none
    int score;
    bool chosen_only, normalize;
} Route;

// The first of the largest values.
static long find_best(const float *values, long count) {
    long best = 0;
    for (long i = 1; i < count; i++)
        if (values[i] > values[best]) best = i;
    return best;
}

static void softmax(float *values, long count) {
    float top = values[find_best(values, count)], total = 0;
    for (long i = 0; i < count; i++) total += values[i] = expf(values[i] - top);
    for (long i = 0; i < count; i++) values[i] /= total;
}

static void score_values(const Route *a, float *values, long count) {
    if (a->score == SCORE_SOFTMAX) softmax(values, count);
    else
        for (long i = 0; i < count; i++) values[i] = 1.0f / (1.0f + expf(-values[i]));
}

// Sets the scores outside of the best groups to -inf.
static void mask_groups(const Route *a, float *choice) {
    long size = a->experts / a->groups;
    float group_scores[a->groups];
    bool is_best[a->groups];
    for (long g = 0; g < a->groups; g++) {
        const float *group = choice + g * size;
        long first = find_best(group, size), second = -1;
        for (long i = 0; i < size; i++)
            if (i != first && (second < 0 || group[i] > group[second])) second = i;
        group_scores[g] = group[first];
        if (a->group_members == 2 && second >= 0) group_scores[g] += group[second];
        is_best[g] = false;
    }
    for (long i = 0; i < a->top_groups; i++) {
        long best = find_best(group_scores, a->groups);
        is_best[best] = true;
        group_scores[best] = -INFINITY;
    }
    for (long e = 0; e < a->experts; e++)
        if (!is_best[e / size]) choice[e] = -INFINITY;
}

// The softmax, over the logits near the best one that is left, of that logit.
static float near_weight(const Route *a, const float *logits, const float *left, long best) {
    float total = 0;
    for (long e = 0; e < a->experts; e++) {
        float magnitude = fabsf(logits[e]) > left[best] ? fabsf(logits[e]) : left[best];
        if ((left[best] - logits[e]) / magnitude <= a->threshold) total += expf(left[e] - left[best]);
    }
    return 1.0f / total;
}

static void route_token(const Route *a, long token, float *space) {
    float *logits = space, *scores = space + a->experts, *choice = space + 2 * a->experts;
    float *weights = a->weights + token * a->top_k;
    int32_t *ids = a->ids + token * a->top_k;
    for (long e = 0; e < a->experts; e++) {
        float logit = a->logits[token * a->experts + e] * a->logit_scale;
        logits[e] = a->softcap > 0 ? a->softcap * tanhf(logit / a->softcap) : logit;
    }
    memcpy(scores, logits, a->experts * sizeof(float));
    if (a->score != SCORE_SPARSEMIXER && !a->chosen_only) score_values(a, scores, a->experts);
    for (long e = 0; e < a->experts; e++)
        choice[e] = scores[e] + (a->correction_bias ? a->correction_bias[e] : 0);
    if (a->groups > 1) mask_groups(a, choice);
    float total = 0;
    for (long j = 0; j < a->top_k; j++) {
        long best = find_best(choice, a->experts);
        ids[j] = (int32_t)best;
        weights[j] = a->score == SCORE_SPARSEMIXER ? near_weight(a, logits, choice, best)
                                                   : scores[best];
        choice[best] = -INFINITY;
    }
    if (a->chosen_only) score_values(a, weights, a->top_k);
    for (long j = 0; j < a->top_k; j++) total += weights[j];
    if (total < a->min_normalizer) total = a->min_normalizer;
    for (long j = 0; j < a->top_k; j++) {
        if (a->normalize) weights[j] /= total;
        weights[j] *= a->scale * (a->expert_scale ? a->expert_scale[ids[j]] : 1.0f);
    }
}

static void route_kernel(const void *arguments, const ThreadContext *ctx) {
    const Route *a = arguments;
    long first, end;
    while (next_chunk(ctx, a->tokens, chunk_size(ctx, a->tokens, 4), &first, &end))
        for (long token = first; token < end; token++) route_token(a, token, (float *)ctx->scratch);
}

// logits [tokens, experts] -> ids and weights [tokens, top_k]; see RouterSpec.
void native_route(ThreadPool *pool, const float *logits, long tokens, long experts, long top_k,
                  int score, int chosen_only, const float *correction_bias, float logit_scale,
                  float softcap, long groups, long top_groups, long group_members, int normalize,
                  float min_normalizer, float scale, const float *expert_scale, float threshold,
                  int32_t *ids, float *weights) {
    Route a = {logits,         correction_bias, expert_scale, ids,           weights,
               tokens,         experts,         top_k,        groups,        top_groups,
               group_members,  logit_scale,     softcap,      min_normalizer, scale,
               threshold,      score,           chosen_only,  normalize};
    reserve_scratch(pool, 3 * experts * sizeof(float));
    issue(pool, route_kernel, &a, sizeof a, 10.0 * tokens * experts);
}

// ---- sorting -----------------------------------------------------------------------------------

typedef struct {
    const int32_t *ids;
    int32_t *order, *starts;
    long pairs, experts;
} SortPairs;

static void sort_kernel(const void *arguments, const ThreadContext *ctx) {
    const SortPairs *a = arguments;
    long first, end;
    while (next_chunk(ctx, 1, 1, &first, &end)) {
        memset(a->starts, 0, (a->experts + 1) * sizeof(int32_t));
        for (long i = 0; i < a->pairs; i++)
            if (a->ids[i] >= 0 && a->ids[i] < a->experts) a->starts[a->ids[i] + 1]++;
        for (long e = 0; e < a->experts; e++) a->starts[e + 1] += a->starts[e];
        // Filling the places moves every start to the end of its expert, and then back.
        for (long i = 0; i < a->pairs; i++)
            if (a->ids[i] >= 0 && a->ids[i] < a->experts)
                a->order[a->starts[a->ids[i]]++] = (int32_t)i;
        for (long e = a->experts; e > 0; e--) a->starts[e] = a->starts[e - 1];
        a->starts[0] = 0;
    }
}

// Sorts pairs by expert: `order` has the pairs, those of expert e from starts[e] to starts[e + 1].
void native_sort_pairs(ThreadPool *pool, const int32_t *ids, long pairs, long experts,
                       int32_t *order, int32_t *starts) {
    SortPairs a = {ids, order, starts, pairs, experts};
    issue(pool, sort_kernel, &a, sizeof a, 4.0 * pairs + experts);
}

// ---- the sum of a token's experts --------------------------------------------------------------

typedef struct {
    const float *y, *weights, *shared, *gate;  // all but y may be NULL
    const int32_t *ids;
    float *out;
    long tokens, experts, top_k, width;
} SumExperts;

static void sum_kernel(const void *arguments, const ThreadContext *ctx) {
    const SumExperts *a = arguments;
    long first, end;
    while (next_chunk(ctx, a->tokens, chunk_size(ctx, a->tokens, 4), &first, &end))
        for (long token = first; token < end; token++) {
            float *out = a->out + token * a->width;
            memset(out, 0, a->width * sizeof(float));
            for (long j = 0; j < a->top_k; j++) {
                long pair = token * a->top_k + j;
                if (a->ids[pair] < 0 || a->ids[pair] >= a->experts) continue;
                const float *y = a->y + pair * a->width;
                float weight = a->weights ? a->weights[pair] : 1.0f;
                for (long i = 0; i < a->width; i++) out[i] += weight * y[i];
            }
            if (!a->shared) continue;
            const float *shared = a->shared + token * a->width;
            float gate = a->gate ? 1.0f / (1.0f + expf(-a->gate[token])) : 1.0f;
            for (long i = 0; i < a->width; i++) out[i] += gate * shared[i];
        }
}

// y [tokens, top_k, width] -> the weighted sum, plus sigmoid(gate) * shared: [tokens, width].
void native_sum_experts(ThreadPool *pool, const float *y, const int32_t *ids, const float *weights,
                        long tokens, long experts, long top_k, long width, const float *shared,
                        const float *gate, float *out) {
    SumExperts a = {y, weights, shared, gate, ids, out, tokens, experts, top_k, width};
    issue(pool, sum_kernel, &a, sizeof a, (double)tokens * top_k * width / 4);
}
