// The sampler on a CPU: logits to tokens, one row of logits a thread (kernels/sampling.py on a
// GPU).
//
// The scores of a row are its logits, changed by whatever the row asks for (adjust_scores). The
// sampled token has the highest (score - best) / temperature + Gumbel noise among the tokens that
// min_p, top_k, top_p and typical_p allow; of equals, the lowest id. With temperature 0 it is the
// highest score. The winner among all tokens is tried first. If top_p rejects it, the next candidate
// is the winner among the tokens that rank before it (higher score, or equal score and lower id).
// The noise is the function of (seed, position, token) of kernels/sampling_reference.py.
#include "native.h"

#include <math.h>
#include <stdlib.h>

#define GREEDY_BELOW 1e-5f  // a lower temperature means greedy
#define NO_TOKEN INT32_MAX
#define TGI_PRIME 15485863u

typedef uint32_t u32x8 __attribute__((vector_size(32)));

// The tables of kernels/sampling_rows.py, which explains them.
enum {PERMITTED_FLAG = 1, BIASED_FLAG = 2, BANNED_FLAG = 4, GREEN_FLAG = 8, PENALIZED_FLAG = 16,
      LOGPROBS_FLAG = 32, ADJUSTED_FLAGS = 31};
enum {PERMITTED, BIASED, BANNED, GREEN, PROMPT, OUTPUT, BAD, STOPS, NUM_BIT_SETS};
enum {TEMPERATURE, TOP_P, MIN_P, TYPICAL_P, REPETITION, FREQUENCY, PRESENCE, DELTA, NUM_FLOATS};
enum {FLAGS, TOP_K, SEED_WORDS, NUM_TOP = 4, PROMPT_LEN, FIRST_END, NUM_WORDS, NUM_GREEN, NUM_INTS};
enum {MAX_BAD_WORDS = 512, MAX_BAD_WORD_TOKENS = 4096, NUM_RECENT = 128, MAX_TOP = 128,
      MAX_COUNT = 32767};

typedef struct {
    const double *floats;
    const int32_t *ints;
    uint32_t *bits;
    const float *bias;
    int16_t *counts;
    const int32_t *bad_words, *word_tokens;
    int32_t *recent;
} SamplingRows;

typedef struct {
    const float *logits;
    const int32_t *rows;
    const int64_t *positions;
    SamplingRows state;
    int64_t *tokens;
    int32_t *reports;
    long count, vocab;
} Sample;

// The state of one row.
typedef struct {
    const double *floats;
    const int32_t *ints;
    uint32_t *bits;
    const float *bias;
    int16_t *counts;
    const int32_t *bad_words, *word_tokens;
    int32_t *recent;
    long vocab, bit_words;
    int64_t position;
} Row;

static Row get_row(const SamplingRows *s, long row, long vocab, int64_t position) {
    long bit_words = (vocab + 31) / 32;
    return (Row){s->floats + row * NUM_FLOATS,
                 s->ints + row * NUM_INTS,
                 s->bits + row * NUM_BIT_SETS * bit_words,
                 s->bias + row * vocab,
                 s->counts + row * vocab,
                 s->bad_words + row * MAX_BAD_WORDS * 3,
                 s->word_tokens + row * MAX_BAD_WORD_TOKENS,
                 s->recent + row * NUM_RECENT,
                 vocab,
                 bit_words,
                 position};
}

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

// A logit for sorting: NaN, which a model may compute, comes last.
static inline float order_of(float logit) { return isnan(logit) ? -INFINITY : logit; }

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

// ---- adjusted scores ---------------------------------------------------------------------------

static bool leaves_token(const Row *r, bool with_words, bool with_stops) {
    const uint32_t *permitted = r->bits + PERMITTED * r->bit_words;
    const uint32_t *banned = r->bits + BANNED * r->bit_words;
    const uint32_t *stops = r->bits + STOPS * r->bit_words;
    bool has_mask = r->ints[FLAGS] & PERMITTED_FLAG;
    for (long w = 0; w < r->bit_words; w++) {
        long n = r->vocab - 32 * w;
        uint32_t left = n >= 32 ? ~0u : (1u << n) - 1;
        if (has_mask) left &= permitted[w];
        if (with_words) left &= ~banned[w];
        if (with_stops) left &= ~stops[w];
        if (left) return true;
    }
    return false;
}

static bool ends_output(const Row *r, const int32_t *word) {
    int32_t first = word[1], length = word[2];
    if (r->position - length < r->ints[PROMPT_LEN]) return false;
    for (int32_t i = 0; i < length; i++) {
        int64_t place = (r->position - length + i) % NUM_RECENT;
        if (r->recent[place] != r->word_tokens[first + i]) return false;
    }
    return true;
}

// Computes the BANNED bits. Bad words that leave no permitted token are ignored; so are stop tokens.
static void find_banned(const Row *r) {
    uint32_t *banned = r->bits + BANNED * r->bit_words;
    const uint32_t *stops = r->bits + STOPS * r->bit_words;
    memcpy(banned, r->bits + BAD * r->bit_words, r->bit_words * sizeof *banned);
    for (int32_t i = 0; i < r->ints[NUM_WORDS]; i++) {
        const int32_t *word = r->bad_words + 3 * i;
        if (ends_output(r, word)) banned[word[0] / 32] |= 1u << word[0] % 32;
    }
    if (!leaves_token(r, true, false)) memset(banned, 0, r->bit_words * sizeof *banned);
    if (r->position < r->ints[FIRST_END] && leaves_token(r, true, true))
        for (long w = 0; w < r->bit_words; w++) banned[w] |= stops[w];
}

// A Mersenne Twister: the generator of torch on a CPU.
enum {TWISTER_WORDS = 624};

typedef struct {
    uint32_t words[TWISTER_WORDS];
    int used;
} Twister;

static void seed_twister(Twister *t, uint32_t seed) {
    t->words[0] = seed;
    for (int i = 1; i < TWISTER_WORDS; i++)
        t->words[i] = 1812433253u * (t->words[i - 1] ^ t->words[i - 1] >> 30) + (uint32_t)i;
    t->used = TWISTER_WORDS;
}

static uint32_t next_random(Twister *t) {
    if (t->used == TWISTER_WORDS) {
        for (int i = 0; i < TWISTER_WORDS; i++) {
            uint32_t next = t->words[(i + 1) % TWISTER_WORDS];
            uint32_t mixed = (t->words[i] & 0x80000000u) | (next & 0x7FFFFFFFu);
            uint32_t far = t->words[(i + 397) % TWISTER_WORDS];
            t->words[i] = far ^ mixed >> 1 ^ (next & 1 ? 0x9908B0DFu : 0);
        }
        t->used = 0;
    }
    uint32_t word = t->words[t->used++];
    word ^= word >> 11;
    word ^= word << 7 & 0x9D2C5680u;
    word ^= word << 15 & 0xEFC60000u;
    return word ^ word >> 18;
}

// Computes the GREEN bits: the beginning of torch's random permutation (kernels/green_list.py).
static void find_green(const Row *r, int32_t *order) {
    uint32_t *green = r->bits + GREEN * r->bit_words;
    uint32_t previous = (uint32_t)r->recent[(r->position - 1) % NUM_RECENT];
    Twister twister;
    seed_twister(&twister, previous * TGI_PRIME);
    memset(green, 0, r->bit_words * sizeof *green);
    for (long i = 0; i < r->vocab; i++) order[i] = (int32_t)i;
    for (long i = 0; i < r->ints[NUM_GREEN]; i++) {
        long other = i;
        if (i < r->vocab - 1) other += next_random(&twister) % (uint32_t)(r->vocab - i);
        int32_t token = order[other];
        order[other] = order[i];
        green[token / 32] |= 1u << token % 32;
    }
}

static float penalize(const Row *r, float score, int32_t token, bool in_output) {
    float repetition = (float)r->floats[REPETITION];
    score = score > 0 ? score / repetition : score * repetition;
    if (!in_output) return score;
    float lowered = score - (float)r->floats[FREQUENCY] * r->counts[token];
    return lowered - (float)r->floats[PRESENCE];
}

// Writes the scores of a row: its logits, with everything applied that the row asks for.
// ids [vocab] is scratch memory.
static void adjust_scores(const Row *r, const float *logits, float *scores, int32_t *ids) {
    int32_t flags = r->ints[FLAGS];
    if (flags & BANNED_FLAG) find_banned(r);
    if (flags & GREEN_FLAG) find_green(r, ids);
    float delta = (float)r->floats[DELTA];
    memcpy(scores, logits, r->vocab * sizeof *scores);
    for (long w = 0; w < r->bit_words; w++) {
        const uint32_t *at = r->bits + w;
        uint32_t forbidden = flags & PERMITTED_FLAG ? ~at[PERMITTED * r->bit_words] : 0;
        uint32_t biased = flags & BIASED_FLAG ? at[BIASED * r->bit_words] : 0;
        uint32_t green = flags & GREEN_FLAG ? at[GREEN * r->bit_words] : 0;
        uint32_t output = flags & PENALIZED_FLAG ? at[OUTPUT * r->bit_words] : 0;
        uint32_t prompt = flags & PENALIZED_FLAG ? at[PROMPT * r->bit_words] : 0;
        if (flags & BANNED_FLAG) forbidden |= at[BANNED * r->bit_words];
        uint32_t changed = forbidden | biased | green | output | prompt;
        while (changed) {
            int i = __builtin_ctz(changed);
            changed &= changed - 1;
            int32_t token = (int32_t)(32 * w + i);
            if (token >= r->vocab) break;
            float score = scores[token];
            if (biased >> i & 1) score += r->bias[token];
            if (forbidden >> i & 1) score = -INFINITY;
            if (green >> i & 1) score += delta;
            if ((output | prompt) >> i & 1) score = penalize(r, score, token, output >> i & 1);
            scores[token] = score;
        }
    }
}

static void record_token(const Row *r, int32_t token) {
    int32_t flags = r->ints[FLAGS];
    if (flags & (BANNED_FLAG | GREEN_FLAG)) r->recent[r->position % NUM_RECENT] = token;
    if (!(flags & PENALIZED_FLAG)) return;
    uint32_t *word = r->bits + OUTPUT * r->bit_words + token / 32, bit = 1u << token % 32;
    int count = *word & bit ? r->counts[token] : 0;
    *word |= bit;
    r->counts[token] = (int16_t)(count < MAX_COUNT ? count + 1 : MAX_COUNT);
}

// ---- typical_p ---------------------------------------------------------------------------------

// Writes the candidates that min_p keeps to `ids`; returns how many there are.
static long list_candidates(const Candidates *c, int32_t *ids) {
    long n = 0;
    for (long i = 0; i < c->count; i++) {
        int32_t id = c->ids ? c->ids[i] : (int32_t)i;
        if (c->logits[id] > -INFINITY && scaled_logit(c, c->logits[id]) >= c->min_z) ids[n++] = id;
    }
    return n;
}

static uint32_t to_ordinal(float score) {
    union {
        float value;
        uint32_t bits;
    } x = {.value = score + 0.0f};
    return x.bits >> 31 ? ~x.bits : x.bits | 0x80000000u;
}

static double mass_above(const Candidates *c, uint32_t border) {
    double mass = 0;
    for (long i = 0; i < c->count; i++) {
        float logit = c->logits[c->ids[i]];
        if (to_ordinal(logit) > border) mass += exp((double)scaled_logit(c, logit));
    }
    return mass;
}

// Keeps the likeliest candidates while those before hold less than the limit; returns how many. The
// lowest kept score is searched bit by bit. Of the candidates with that score the first are kept.
static long keep_top_p(const Candidates *c, double limit, int32_t *ids) {
    uint32_t border = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1)
        if (mass_above(c, border | (bit - 1)) >= limit) border |= bit;
    double mass = mass_above(c, border);
    long n = 0;
    for (long i = 0; i < c->count; i++) {
        float logit = c->logits[c->ids[i]];
        uint32_t ordinal = to_ordinal(logit);
        if (ordinal > border) ids[n++] = c->ids[i];
        if (ordinal == border && mass < limit) {
            ids[n++] = c->ids[i];
            mass += exp((double)scaled_logit(c, logit));
        }
    }
    return n;
}

// The winner among the candidates that typical_p keeps. As with top_p, the winner among all is
// tried first, then the winner among those before it. The order is the distance of the surprise
// from the entropy, and likelier first among equals.
static int32_t find_typical_winner(Candidates *c, double typical_p, int32_t *ids) {
    double total = 0, weighted = 0;
    for (long i = 0; i < c->count; i++) {
        double z = scaled_logit(c, c->logits[c->ids[i]]), mass = exp(z);
        total += mass;
        weighted += mass * z;
    }
    double center = weighted / total;
    for (;;) {
        int32_t winner = find_winner(c);
        if (winner == NO_TOKEN) return winner;
        double distance = fabs(center - scaled_logit(c, c->logits[winner])), mass = 0;
        long n = 0;
        for (long i = 0; i < c->count; i++) {
            int32_t id = c->ids[i];
            double z = scaled_logit(c, c->logits[id]), own = fabs(center - z);
            if (own < distance || (own == distance && ranks_before(c->logits, id, winner))) {
                mass += exp(z);
                ids[n++] = id;  // in place: the list only shrinks
            }
        }
        if (mass < typical_p * total) return winner;
        c->count = n;
    }
}

// ---- sampling ----------------------------------------------------------------------------------

static int32_t choose_token(const Row *r, const float *scores, int32_t *ids) {
    float temperature = (float)r->floats[TEMPERATURE], min_z = logf((float)r->floats[MIN_P]);
    double top_p = r->floats[TOP_P], typical_p = r->floats[TYPICAL_P];
    int32_t top = argmax(scores, r->vocab), top_k = r->ints[TOP_K];
    Candidates c = {scores, NULL, r->vocab, scores[top], temperature, min_z, {0, 0}};
    if (temperature < GREEDY_BELOW || !(c.best > -INFINITY)) return top;
    for (int i = 0; i < 2; i++)
        c.key[i] = hash((uint32_t)r->ints[SEED_WORDS + i] ^ (uint32_t)r->position);
    if (top_k > 0 && top_k < r->vocab) {
        select_top_k(scores, r->vocab, top_k, ids);
        c.ids = ids;
        c.count = top_k;
    }
    double mass_limit = top_p < 1 ? top_p * sum_exp(&c) : INFINITY;
    if (typical_p < 1) {
        c.count = list_candidates(&c, ids);
        c.ids = ids;
        if (top_p < 1) c.count = keep_top_p(&c, mass_limit, ids);
        int32_t winner = find_typical_winner(&c, typical_p, ids);
        return winner == NO_TOKEN ? top : winner;
    }
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

// Writes the rank and log-probability of a token and the likeliest tokens, under the logits.
static void write_report(const float *logits, long vocab, int32_t token, long num_top, int32_t *ids,
                         int32_t *report) {
    Candidates all = {logits, NULL, vocab, logits[argmax(logits, vocab)], 1.0f, -INFINITY, {0, 0}};
    float log_sum_exp = (float)(all.best + log(sum_exp(&all))), own = logits[token];
    long num_before = 0;
    for (long i = 0; i < vocab; i++) num_before += logits[i] > own;
    for (long i = 0; i < token; i++) num_before += logits[i] == own;
    float logprob = own - log_sum_exp;
    report[0] = (int32_t)num_before + 1;
    memcpy(report + 1, &logprob, sizeof logprob);
    if (num_top > vocab) num_top = vocab;
    if (num_top) select_top_k(logits, vocab, num_top, ids);
    for (long i = 0; i < num_top; i++) {
        long place = 0;  // every token has a place of its own, also among logits that are no numbers
        float value = order_of(logits[ids[i]]);
        for (long j = 0; j < num_top; j++) {
            float other = order_of(logits[ids[j]]);
            place += other > value || (other == value && j < i);
        }
        logprob = logits[ids[i]] - log_sum_exp;
        report[2 + place] = ids[i];
        memcpy(report + 2 + MAX_TOP + place, &logprob, sizeof logprob);
    }
}

static void sample_kernel(const void *arguments, const ThreadContext *ctx) {
    const Sample *a = arguments;
    float *adjusted = (float *)ctx->scratch;
    int32_t *ids = (int32_t *)(adjusted + a->vocab);
    long first, end;
    while (next_chunk(ctx, a->count, 1, &first, &end)) {
        const float *logits = a->logits + first * a->vocab, *scores = logits;
        Row row = get_row(&a->state, a->rows[first], a->vocab, a->positions[first]);
        if (row.ints[FLAGS] & ADJUSTED_FLAGS) {
            adjust_scores(&row, logits, adjusted, ids);
            scores = adjusted;
        }
        int32_t token = choose_token(&row, scores, ids);
        a->tokens[first] = token;
        if (row.ints[FLAGS] & LOGPROBS_FLAG)
            write_report(logits, a->vocab, token, row.ints[NUM_TOP], ids,
                         a->reports + first * (2 + 2 * MAX_TOP));
        record_token(&row, token);
    }
}

typedef struct {
    const float *logits;
    const int64_t *tokens;
    int32_t *reports;
    long count, vocab, num_top;
} Scoring;

static void score_kernel(const void *arguments, const ThreadContext *ctx) {
    const Scoring *a = arguments;
    long first, end;
    while (next_chunk(ctx, a->count, 1, &first, &end))
        write_report(a->logits + first * a->vocab, a->vocab, (int32_t)a->tokens[first], a->num_top,
                     (int32_t *)ctx->scratch, a->reports + first * (2 + 2 * MAX_TOP));
}

// Reports the log-probabilities of tokens [count] under logits [count, vocab].
void native_score(ThreadPool *pool, const float *logits, long count, long vocab,
                  const int64_t *tokens, long num_top, int32_t *reports) {
    Scoring a = {logits, tokens, reports, count, vocab, num_top};
    reserve_scratch(pool, vocab * sizeof(int32_t));
    issue(pool, score_kernel, &a, sizeof a, count * vocab / 2.0);
}

// logits [count, vocab]; rows [count]: where the state of each is; positions [count] of the tokens.
// Writes tokens [count] and, for rows that ask for them, reports; updates the state.
void native_sample(ThreadPool *pool, const float *logits, long count, long vocab,
                   const int32_t *rows, const int64_t *positions, const double *floats,
                   const int32_t *ints, uint32_t *bits, const float *bias, int16_t *counts,
                   const int32_t *bad_words, const int32_t *word_tokens, int32_t *recent,
                   int64_t *tokens, int32_t *reports) {
    SamplingRows state = {floats, ints, bits, bias, counts, bad_words, word_tokens, recent};
    Sample a = {logits, rows, positions, state, tokens, reports, count, vocab};
    reserve_scratch(pool, vocab * (sizeof(float) + sizeof(int32_t)));
    issue(pool, sample_kernel, &a, sizeof a, count * vocab / 4.0);
}
