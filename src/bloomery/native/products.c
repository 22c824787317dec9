// Matrices in few bits times rows of activations in eight.
//
// A matrix is stored in panels of eight rows, block of 32 columns after block. Inside a block the numbers are interleaved:
// four columns of row 0, the same four of row 1, and so on, so that one vector instruction multiplies four columns of
// eight rows, and sums end up one row a lane. Activations are rounded to eight bits with a scale a block; integer sums
// of a block are exact, and blocks are added in float32 in one order, whatever the number of rows: a row's result does
// not depend on its neighbours.
//
// A value is d * q + m. Per block of eight rows:
//   numbers   4 bits: 128 bytes, byte 32 j + 4 row + i = column 4 j + i, and column 16 + 4 j + i in the high half
//             8 bits: 256 bytes, byte 32 j + 4 row + i = column 4 j + i, signed
//   scales    PLAIN   d[8] half floats; m = -8 d for numbers of 4 bits, else 0
//             LOWEST  d[8], m[8] half floats
//             SUPER   scale[8], minimum[8] unsigned bytes; d = D * scale, m = -M * minimum
//             HALVES  scale[2][8] signed bytes, one for 16 columns; d = D * scale
//   and before each eight blocks of SUPER D[8], M[8], of HALVES D[8], half floats.
#include "native.h"

#include <math.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

typedef enum { PLAIN, LOWEST, SUPER, HALVES } Scales;
typedef enum { Q4, Q4_LOWEST, Q4_SUPER, Q8, Q8_LOWEST, Q8_SUPER, Q8_HALVES, KINDS, F32 = 16 } Kind;

static inline int bits_of(Kind kind) { return kind < Q8 ? 4 : 8; }

static inline Scales scales_of(Kind kind) {
    static const Scales of[KINDS] = {PLAIN, LOWEST, SUPER, PLAIN, LOWEST, SUPER, HALVES};
    return of[kind];
}

static inline long block_bytes(Kind kind) { return bits_of(kind) * 32 + (scales_of(kind) == LOWEST ? 32 : 16); }
static inline long head_bytes(Kind kind) { return scales_of(kind) == SUPER ? 32 : scales_of(kind) == HALVES ? 16 : 0; }

static inline long panel_bytes(Kind kind, long columns) {
    return columns / BLOCK * block_bytes(kind) + columns / (8 * BLOCK) * head_bytes(kind);
}

typedef struct {
    const uint8_t *data;
    long rows;
    int kind;
} Segment;

typedef struct {
    long rows, columns, panels;
    int segments;
    Segment segment[];
} Matrix;

// `data`, `rows` and `kinds` of each segment, from top to bottom. The data must outlive the matrix.
Matrix *matrix_make(long rows, long columns, int segments, const uint8_t *const *data, const int64_t *heights,
                    const int64_t *kinds) {
    Matrix *m = malloc(sizeof(Matrix) + segments * sizeof(Segment));
    if (!m) abort();
    *m = (Matrix){rows, columns, 0, segments};
    for (int i = 0; i < segments; i++) {
        m->segment[i] = (Segment){data[i], heights[i], (int)kinds[i]};
        m->panels += (heights[i] + PANEL - 1) / PANEL;
    }
    return m;
}

void matrix_free(Matrix *m) { free(m); }

// ---- bytes ----------------------------------------------------------------------------------------------------------

typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef int8_t s8x8 __attribute__((vector_size(8)));

static inline f8 bytes8(const uint8_t *at) {
    u8x8 x;
    memcpy(&x, at, 8);
    return __builtin_convertvector(x, f8);
}

static inline f8 signed8(const uint8_t *at) {
    s8x8 x;
    memcpy(&x, at, 8);
    return __builtin_convertvector(x, f8);
}

// ---- activations ---------------------------------------------------------------------------------------------------
// Of `rows` rows: numbers [rows][columns], then scales [rows][blocks], then sums [rows][blocks], which are scale * sum of
// the block's numbers: what a minimum is multiplied with.

typedef struct {
    const int8_t *numbers;
    const float *scales, *sums;
    long columns, blocks;
} Rounded;

static size_t rounded_bytes(long rows, long columns) { return rows * (columns + columns / BLOCK * 2 * sizeof(float)); }

static Rounded rounded_at(const char *space, long rows, long columns) {
    long blocks = columns / BLOCK;
    const float *scales = (const float *)(space + rows * columns);
    return (Rounded){(const int8_t *)space, scales, scales + rows * blocks, columns, blocks};
}

static void round_row(const float *x, const Rounded *to, long row) {
    int8_t *numbers = (int8_t *)to->numbers + row * to->columns;
    float *scales = (float *)to->scales + row * to->blocks, *sums = (float *)to->sums + row * to->blocks;
    const f8 magic = all8(12582912.0f);  // 1.5 * 2**23: adding it rounds to the nearest whole number
    for (long b = 0; b < to->blocks; b++, x += BLOCK, numbers += BLOCK) {
        f8 v[4], top = all8(0);
        for (int i = 0; i < 4; i++) v[i] = load8(x + 8 * i), top = max8(top, abs8(v[i]));
        float scale = highest8(top) / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
        i8 total = {0};
        for (int i = 0; i < 4; i++) {
            f8 t = v[i] * all8(inverse) + magic;
            i8 q = (i8)t - 0x4B400000;
            total += q;
            s8x8 small = __builtin_convertvector(q, s8x8);
            memcpy(numbers + 8 * i, &small, 8);
        }
        int sum = 0;
        for (int i = 0; i < 8; i++) sum += total[i];
        scales[b] = scale;
        sums[b] = scale * (float)sum;
    }
}

// ---- one panel times up to TILE rows -------------------------------------------------------------------------------

#define TILE 6

#if defined(__AVX2__)
typedef __m256i Ints;  // eight sums

// The sum is made here and now: left alone, compilers put additions off until no register is free.
#define settle(x) __asm__("" : "+x"(x))

static inline Ints four_columns(const int8_t *at) {
    int32_t x;
    memcpy(&x, at, 4);
    return _mm256_set1_epi32(x);
}

// The 32 columns of a block, in 4 bits, times `count` rows: w is opened once for all of them. 16 bits hold the sums of
// products, which stay below 8 * 2 * 15 * 127.
INLINE void dots_4bit(const uint8_t *w, const int8_t *const *x, const int count, Ints *sum) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int r = 0; r < count; r++) sum[r] = _mm256_setzero_si256();
    for (int j = 0; j < 4; j++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(w + 32 * j));
        __m256i first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        for (int r = 0; r < count; r++) {
            __m256i a = four_columns(x[r] + 4 * j), b = four_columns(x[r] + 16 + 4 * j);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
            sum[r] = _mm256_dpbusd_epi32(_mm256_dpbusd_epi32(sum[r], first, a), second, b);
#else
            __m256i products = _mm256_add_epi16(_mm256_maddubs_epi16(first, a), _mm256_maddubs_epi16(second, b));
            sum[r] = _mm256_add_epi16(sum[r], products);
#endif
            settle(sum[r]);
        }
    }
#if !(defined(__AVX512VNNI__) && defined(__AVX512VL__))
    for (int r = 0; r < count; r++) sum[r] = _mm256_madd_epi16(sum[r], _mm256_set1_epi16(1));
#endif
}

// 16 columns in 8 bits times `count` rows. The instruction wants its first factor unsigned: signs move to the other.
INLINE void dots_8bit(const uint8_t *w, const int8_t *const *x, long column, const int count, Ints *sum) {
    const __m256i one = _mm256_set1_epi16(1);
    for (int r = 0; r < count; r++) sum[r] = _mm256_setzero_si256();
    for (int j = 0; j < 4; j++) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(w + 32 * j)), size = _mm256_abs_epi8(a);
        for (int r = 0; r < count; r++) {
            __m256i products = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four_columns(x[r] + column + 4 * j), a));
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(products, one));
            settle(sum[r]);
        }
    }
}

static inline f8 floats(Ints x) { return (f8)_mm256_cvtepi32_ps(x); }
static inline Ints plus(Ints a, Ints b) { return _mm256_add_epi32(a, b); }

#else  // plain loops, which a compiler turns into what its machine has
typedef i8 Ints;

#if defined(__ARM_FEATURE_DOTPROD)
static inline Ints dot_four(Ints sum, const int8_t *w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(four));
    int32_t *at = (int32_t *)&sum;
    vst1q_s32(at, vdotq_s32(vld1q_s32(at), vld1q_s8(w), b));
    vst1q_s32(at + 4, vdotq_s32(vld1q_s32(at + 4), vld1q_s8(w + 16), b));
    return sum;
}
#else
static inline Ints dot_four(Ints sum, const int8_t *w, const int8_t *x) {
    for (int row = 0; row < 8; row++)
        for (int i = 0; i < 4; i++) sum[row] += w[4 * row + i] * x[i];
    return sum;
}
#endif

INLINE void dots_4bit(const uint8_t *w, const int8_t *const *x, const int count, Ints *sum) {
    for (int r = 0; r < count; r++) sum[r] = (Ints){0};
    for (int j = 0; j < 4; j++) {
        int8_t first[32], second[32];
        for (int i = 0; i < 32; i++) first[i] = w[32 * j + i] & 15, second[i] = w[32 * j + i] >> 4;
        for (int r = 0; r < count; r++)
            sum[r] = dot_four(dot_four(sum[r], first, x[r] + 4 * j), second, x[r] + 16 + 4 * j);
    }
}

INLINE void dots_8bit(const uint8_t *w, const int8_t *const *x, long column, const int count, Ints *sum) {
    for (int r = 0; r < count; r++) {
        sum[r] = (Ints){0};
        for (int j = 0; j < 4; j++) sum[r] = dot_four(sum[r], (const int8_t *)w + 32 * j, x[r] + column + 4 * j);
    }
}

static inline f8 floats(Ints x) { return __builtin_convertvector(x, f8); }
static inline Ints plus(Ints a, Ints b) { return a + b; }
#endif

// `kind` and `count` are constants where this is called: each pair becomes a function of its own.
INLINE void panel_rows(const uint8_t *w, const Kind kind, const Rounded *x, long row, const int count, f8 *out) {
    const Scales scales = scales_of(kind);
    const long numbers = bits_of(kind) * 32, step = block_bytes(kind);
    const int8_t *q[TILE];
    f8 sum[TILE], super = all8(0), lowest = all8(0);
    for (int r = 0; r < count; r++) q[r] = x->numbers + (row + r) * x->columns, sum[r] = all8(0);
    const float *scale = x->scales + row * x->blocks, *total = x->sums + row * x->blocks;
    for (long b = 0; b < x->blocks; b++, w += step) {
        f8 d, m = all8(0), d2 = all8(0);
        if ((scales == SUPER || scales == HALVES) && b % 8 == 0) {
            super = halves8(w);
            if (scales == SUPER) lowest = -halves8(w + 16);
            w += head_bytes(kind);
        }
        const uint8_t *s = w + numbers;
        if (scales == PLAIN) d = halves8(s), m = d * all8(-8);
        else if (scales == LOWEST) d = halves8(s), m = halves8(s + 16);
        else if (scales == SUPER) d = super * bytes8(s), m = lowest * bytes8(s + 8);
        else d = super * signed8(s), d2 = super * signed8(s + 8);
        Ints low[TILE], high[TILE];
        if (bits_of(kind) == 4) {
            dots_4bit(w, q, count, low);
        } else {
            dots_8bit(w, q, 0, count, low);
            dots_8bit(w + 128, q, 16, count, high);
        }
        for (int r = 0; r < count; r++, q[r - 1] += BLOCK) {
            f8 one = all8(scale[r * x->blocks + b]);
            if (scales == HALVES) sum[r] += (d * one) * floats(low[r]) + (d2 * one) * floats(high[r]);
            else sum[r] += (d * one) * floats(bits_of(kind) == 4 ? low[r] : plus(low[r], high[r]));
        }
        if (scales == LOWEST || scales == SUPER || kind == Q4)
            for (int r = 0; r < count; r++) sum[r] += m * all8(total[r * x->blocks + b]);
    }
    for (int r = 0; r < count; r++) out[r] = sum[r];
}

INLINE void panel_of_kind(const uint8_t *w, const Kind kind, const Rounded *x, long row, int count, f8 *out) {
    switch (count) {
        case 1: panel_rows(w, kind, x, row, 1, out); break;
        case 2: panel_rows(w, kind, x, row, 2, out); break;
        case 3: panel_rows(w, kind, x, row, 3, out); break;
        case 4: panel_rows(w, kind, x, row, 4, out); break;
        case 5: panel_rows(w, kind, x, row, 5, out); break;
        default: panel_rows(w, kind, x, row, 6, out);
    }
}

static void panel(const uint8_t *w, Kind kind, const Rounded *x, long row, int count, f8 *out) {
    switch (kind) {
        case Q4: panel_of_kind(w, Q4, x, row, count, out); break;
        case Q4_LOWEST: panel_of_kind(w, Q4_LOWEST, x, row, count, out); break;
        case Q4_SUPER: panel_of_kind(w, Q4_SUPER, x, row, count, out); break;
        case Q8: panel_of_kind(w, Q8, x, row, count, out); break;
        case Q8_LOWEST: panel_of_kind(w, Q8_LOWEST, x, row, count, out); break;
        case Q8_SUPER: panel_of_kind(w, Q8_SUPER, x, row, count, out); break;
        default: panel_of_kind(w, Q8_HALVES, x, row, count, out);
    }
}

// ---- full precision ------------------------------------------------------------------------------------------------

// Four rows of weights times up to three rows of activations, both float32: what a CPU reads of a dense matrix once.
INLINE void dense_rows(const float *w, long columns, const int height, const float *x, const int count, float out[3][4]) {
    f8 sum[3][4];
    for (int r = 0; r < count; r++)
        for (int o = 0; o < height; o++) sum[r][o] = all8(0);
    long k = 0;
    for (; k + LANES <= columns; k += LANES) {
        f8 v[4];
        for (int o = 0; o < height; o++) v[o] = load8(w + o * columns + k);
        for (int r = 0; r < count; r++) {
            f8 u = load8(x + r * columns + k);
            for (int o = 0; o < height; o++) sum[r][o] += u * v[o];
        }
    }
    for (int r = 0; r < count; r++)
        for (int o = 0; o < height; o++) {
            float total = sum8(sum[r][o]);
            for (long j = k; j < columns; j++) total += w[o * columns + j] * x[r * columns + j];
            out[r][o] = total;
        }
}

// Eight rows of weights (fewer at the end) times up to TILE rows, as `panel` gives it.
static void dense_panel(const float *w, long columns, long height, const float *x, int count, f8 *out) {
    for (int r = 0; r < count; r += 3) {
        int rows = count - r < 3 ? count - r : 3;
        for (long o = 0; o < height; o += 4) {
            float part[3][4] = {{0}};
            const float *at = w + o * columns, *from = x + r * columns;
            if (height - o < 4)
                for (long i = 0; i < height - o; i++)
                    for (int j = 0; j < rows; j++) {
                        float one[3][4];
                        dense_rows(at + i * columns, columns, 1, from + j * columns, 1, one);
                        part[j][i] = one[0][0];
                    }
            else if (rows == 1) dense_rows(at, columns, 4, from, 1, part);
            else if (rows == 2) dense_rows(at, columns, 4, from, 2, part);
            else dense_rows(at, columns, 4, from, 3, part);
            for (int j = 0; j < rows; j++)
                for (int i = 0; i < 4; i++) out[r + j][o + i] = part[j][i];
        }
    }
}

// ---- linear: norm, product, bias, then a residual, or an activation ------------------------------------------------

typedef enum { NOTHING, ADD, ACTIVATE, GATE } After;

typedef struct {
    const Matrix *matrix;
    const float *x, *bias, *residual;
    float *out;
    long rows;
    Norm norm;
    float scale;
    int after, activation;
    bool prepared;  // rows were normed and rounded by the operation before
} Linear;

#define ROW_CHUNK 96       // rows of activations that stay in a core's cache while panels go by
#define REDUNDANT 4096     // values that every thread prepares for itself rather than wait for another

static void prepare_row(const Linear *a, const char *space, long row, float *line) {
    long columns = a->matrix->columns;
    const float *x = a->x + row * columns;
    bool dense = a->matrix->segment[0].kind == F32;
    float *to = dense ? (float *)space + row * columns : line;
    if (a->norm.kind) norm_row(x, to, columns, &a->norm), x = to;
    else if (dense) memcpy(to, x, columns * sizeof(float));
    if (!dense) {
        Rounded rounded = rounded_at(space, a->rows, columns);
        round_row(x, &rounded, row);
    }
}

static size_t prepared_bytes(const Linear *a) {
    long columns = a->matrix->columns;
    return a->matrix->segment[0].kind == F32 ? a->rows * columns * sizeof(float) : rounded_bytes(a->rows, columns);
}

static void prepare_kernel(const void *arguments, const Crew *crew) {
    const Linear *a = arguments;
    long first, end;
    while (take(crew, a->rows, share(crew, a->rows, 4), &first, &end))
        for (long row = first; row < end; row++) prepare_row(a, crew->common, row, (float *)crew->scratch);
}

typedef struct {
    const Segment *segment;
    const uint8_t *data;
    long row;     // of the whole matrix
    long height;  // rows it has, 8 but at a segment's end
} Panel;

static Panel panel_at(const Matrix *m, long index) {
    long row = 0;
    const Segment *s = m->segment;
    while (index >= (s->rows + PANEL - 1) / PANEL) index -= (s->rows + PANEL - 1) / PANEL, row += s->rows, s++;
    long step = s->kind == F32 ? PANEL * m->columns * (long)sizeof(float) : panel_bytes(s->kind, m->columns);
    long height = s->rows - index * PANEL;
    return (Panel){s, s->data + index * step, row + index * PANEL, height < PANEL ? height : PANEL};
}

static void multiply(const Linear *a, const Panel *p, const char *space, long row, int count, f8 *out) {
    long columns = a->matrix->columns;
    if (p->segment->kind == F32) {
        dense_panel((const float *)p->data, columns, p->height, (const float *)space + row * columns, count, out);
    } else {
        Rounded x = rounded_at(space, a->rows, columns);
        panel(p->data, p->segment->kind, &x, row, count, out);
    }
    if (a->bias) {
        f8 bias = all8(0);
        memcpy(&bias, a->bias + p->row, p->height * sizeof(float));
        for (int r = 0; r < count; r++) out[r] += bias;
    }
}

static void finish(const Linear *a, const Panel *p, long row, int count, const f8 *y) {
    for (int r = 0; r < count; r++) {
        long at = (row + r) * a->matrix->rows + p->row;
        f8 result = y[r];
        if (a->after == ACTIVATE) result = activated8(result, a->activation);
        if (p->height == PANEL) {
            if (a->after == ADD) result = load8(a->residual + at) + all8(a->scale) * result;
            store8(a->out + at, result);
        } else {
            for (long i = 0; i < p->height; i++)
                a->out[at + i] = a->after == ADD ? a->residual[at + i] + a->scale * result[i] : result[i];
        }
    }
}

static void linear_kernel(const void *arguments, const Crew *crew) {
    const Linear *a = arguments;
    const Matrix *m = a->matrix;
    const char *space = crew->common;
    if (!a->prepared) {
        space = crew->scratch;
        for (long row = 0; row < a->rows; row++)
            prepare_row(a, space, row, (float *)(crew->scratch + (prepared_bytes(a) + 63) / 64 * 64));
    }
    long panels = a->after == GATE ? m->panels / 2 : m->panels, width = m->rows / 2;
    long chunks = (a->rows + ROW_CHUNK - 1) / ROW_CHUNK, first, end;
    long step = share(crew, panels, chunks > 1 ? 2 : 6);
    long pieces = (panels + step - 1) / step;
    while (take(crew, pieces * chunks, 1, &first, &end)) {
        long from = first % pieces * step, to = from + step < panels ? from + step : panels;
        long top = first / pieces * ROW_CHUNK, bottom = top + ROW_CHUNK < a->rows ? top + ROW_CHUNK : a->rows;
        for (long i = from; i < to; i++) {
            Panel left = panel_at(m, i), right;
            if (a->after == GATE) right = panel_at(m, i + panels);
            for (long row = top; row < bottom; row += TILE) {
                int count = bottom - row < TILE ? (int)(bottom - row) : TILE;
                f8 y[TILE], z[TILE];
                multiply(a, &left, space, row, count, y);
                if (a->after != GATE) {
                    finish(a, &left, row, count, y);
                    continue;
                }
                multiply(a, &right, space, row, count, z);
                for (int r = 0; r < count; r++)
                    store8(a->out + (row + r) * width + left.row, activated8(y[r], a->activation) * z[r]);
            }
        }
    }
}

// x [rows, columns] -> out [rows, matrix rows], or half of them where the first half gates the second.
void native_linear(const Matrix *matrix, const float *x, long rows, const float *bias, int norm, float eps,
                   const float *norm_weight, const float *norm_bias, int after, int activation, const float *residual,
                   float scale, float *out) {
    Linear a = {matrix, x, bias, residual, out, rows, {norm, eps, norm_weight, norm_bias}, scale, after, activation, false};
    double work = (double)rows * matrix->columns, product = work * matrix->rows / 32;
    a.prepared = team_size() > 1 && work > REDUNDANT;
    size_t line = matrix->columns * sizeof(float) + 64;
    if (a.prepared) {
        common_space(prepared_bytes(&a));
        scratch_space(line);
        issue_pair(prepare_kernel, work, linear_kernel, product, &a, sizeof a);
    } else {
        scratch_space(prepared_bytes(&a) + 64 + line);
        issue(linear_kernel, &a, sizeof a, product);
    }
}

// ---- rows of a matrix as values: an embedding ----------------------------------------------------------------------

static void values_of(const Matrix *m, long row, float *out) {
    const Segment *s = m->segment;
    while (row >= s->rows) row -= s->rows, s++;
    if (s->kind == F32) {
        memcpy(out, (const float *)s->data + row * m->columns, m->columns * sizeof(float));
        return;
    }
    const Kind kind = s->kind;
    const Scales scales = scales_of(kind);
    const uint8_t *w = s->data + row / PANEL * panel_bytes(kind, m->columns);
    int lane = row % PANEL;
    float super = 0, lowest = 0;
    for (long b = 0; b < m->columns / BLOCK; b++, w += block_bytes(kind)) {
        if (head_bytes(kind) && b % 8 == 0) {
            super = halves8(w)[lane];
            if (scales == SUPER) lowest = -halves8(w + 16)[lane];
            w += head_bytes(kind);
        }
        const uint8_t *at = w + bits_of(kind) * 32;
        for (int i = 0; i < BLOCK; i++) {
            float d, least = 0;
            if (scales == SUPER) d = super * at[lane], least = lowest * at[8 + lane];
            else if (scales == HALVES) d = super * (int8_t)at[i / 16 * 8 + lane];
            else d = halves8(at)[lane], least = scales == LOWEST ? halves8(at + 16)[lane] : 0;
            int j = i % 16 / 4 * 32 + lane * 4 + i % 4;
            int q = bits_of(kind) == 4 ? (i < 16 ? w[j] & 15 : w[j] >> 4) : (int8_t)w[i / 16 * 128 + j];
            *out++ = scales == LOWEST || scales == SUPER ? d * q + least : bits_of(kind) == 4 ? d * (q - 8) : d * q;
        }
    }
}

typedef struct {
    const Matrix *matrix;
    const int64_t *ids;
    long count;
    float scale, *out;
} Gather;

static void gather_kernel(const void *arguments, const Crew *crew) {
    const Gather *a = arguments;
    long first, end, columns = a->matrix->columns;
    while (take(crew, a->count, 1, &first, &end)) {
        float *row = a->out + first * columns;
        long id = a->ids[first] < 0 || a->ids[first] >= a->matrix->rows ? 0 : a->ids[first];
        values_of(a->matrix, id, row);
        if (a->scale != 1)
            for (long i = 0; i < columns; i++) row[i] *= a->scale;
    }
}

void native_gather(const Matrix *matrix, const int64_t *ids, long count, float scale, float *out) {
    Gather a = {matrix, ids, count, scale, out};
    issue(gather_kernel, &a, sizeof a, (double)count * matrix->columns);
}
