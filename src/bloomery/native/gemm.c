// Matrix products: weights of few bits times rows of activations of 15 or 8 bits, and weights of 16
// or 32 bits times float32.
//
// A matrix is stored in panels of P = PANEL rows, one block of 32 columns after the other. Inside a
// block the codes are interleaved: four columns of row 0, the same four of row 1, and so on. One
// vector instruction then multiplies four columns of P rows, and each lane sums one row.
// Activations are rounded to integers with one scale per block: to 15 bits with AVX-512, where that
// costs no time, elsewhere to 8. Integer sums of a block are exact, and blocks are added in float32
// in one order, whatever the number of rows: the result of a row does not depend on the other rows
// of the batch.
//
// A weight is d * code + m. Of each block of a panel:
//   codes    4 bits: 16 P bytes, byte 4 (P j + row) + i = column 4 j + i, and column 16 + 4 j + i
//                    in the high half
//            8 bits: 32 P bytes, byte 4 (P j + row) + i = column 4 j + i, signed
//            Codes of 4 bits are numbers, or they select one of 16 signed bytes (levels.h).
//   scales   SYMMETRIC  d[P] float16; m = -8 d for Q4, else 0
//            AFFINE     d[P], m[P] float16
//            SUPER      scale[P], minimum[P] unsigned bytes; d = D * scale, m = -M * minimum
//            SIGNED     scale[P] signed bytes; d = D * scale
//            HALF_BLOCK scale[2][P] signed bytes, one for 16 columns; d = D * scale
//   Before each eight blocks of SUPER lie D[P], M[P], of SIGNED and HALF_BLOCK D[P], all float16.
//   Q8_EIGHTHS is Q8_HALF_BLOCK with D in eighths, which float16 could not hold without loss.
//
// F32, BF16 and F16 are weights in full precision: for each column of a panel the floats of its
// rows. The activations that they multiply are not rounded.
#include "levels.h"
#include "panel_dots.h"

#include <math.h>
#include <stdlib.h>

typedef enum { SYMMETRIC, AFFINE, SUPER, SIGNED, HALF_BLOCK } Scales;
typedef enum {
    Q4,
    Q4_AFFINE,
    Q4_SUPER,
    FP4,
    NF4,
    IQ4,
    IQ4_SIGNED,
    Q8,
    Q8_AFFINE,
    Q8_SUPER,
    Q8_HALF_BLOCK,
    Q8_EIGHTHS,
    NUM_KINDS,
    F32 = 16,
    BF16,
    F16
} Kind;

static inline bool holds_floats(int kind) { return kind >= F32; }
static inline long float_bytes(Kind kind) { return kind == F32 ? 4 : 2; }

static inline int bits_of(Kind kind) { return kind < Q8 ? 4 : 8; }

static inline Scales scales_of(Kind kind) {
    static const Scales of[NUM_KINDS] = {SYMMETRIC, AFFINE, SUPER,      SYMMETRIC,
                                         SYMMETRIC, SYMMETRIC, SIGNED,  SYMMETRIC,
                                         AFFINE,    SUPER,  HALF_BLOCK, HALF_BLOCK};
    return of[kind];
}

// The values that codes select; NULL where codes are numbers.
static inline const int8_t *levels_of(Kind kind) {
    switch (kind) {
        case FP4: return FP4_LEVELS;
        case NF4: return NF4_LEVELS;
        case IQ4:
        case IQ4_SIGNED: return IQ4_LEVELS;
        default: return NULL;
    }
}

static inline long block_bytes(Kind kind) {
    long scales = scales_of(kind) == AFFINE ? 4 : scales_of(kind) == SIGNED ? 1 : 2;
    return (bits_of(kind) * 4 + scales) * PANEL;
}
static inline long super_bytes(Kind kind) {
    Scales scales = scales_of(kind);
    if (scales == SUPER) return 4 * PANEL;
    return scales == SIGNED || scales == HALF_BLOCK ? 2 * PANEL : 0;
}

// The unit of D before eight blocks.
static inline float super_unit(Kind kind) { return kind == Q8_EIGHTHS ? 0.125f : 1.0f; }

static inline long panel_bytes(Kind kind, long columns) {
    if (holds_floats(kind)) return PANEL * columns * float_bytes(kind);
    return columns / BLOCK * block_bytes(kind) + columns / (8 * BLOCK) * super_bytes(kind);
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

// Takes the data, heights and kinds of the segments, from top to bottom. The data must outlive the
// matrix.
Matrix *matrix_create(long rows, long columns, int segments, const uint8_t *const *data,
                      const int64_t *heights, const int64_t *kinds) {
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

// ---- activations -------------------------------------------------------------------------------
// Activations rounded to integers with one scale per block. The integers have PLANES parts of eight
// bits: high alone, or 128 * high + low. Of a block are also kept: scale * (sum of its integers),
// the factor of the offset m; and for each half -128 * (sum of its integers), which kernels add
// that take codes as unsigned bytes.

typedef struct {
    const int8_t *planes;        // [PLANES][rows][columns], high first
    const float *scales, *sums;  // [rows][blocks]
    const int32_t *offsets;      // [rows][blocks][2]
    long rows, columns, blocks;
} QuantizedRows;

static size_t quantized_bytes(long rows, long columns) {
    long block = PLANES * BLOCK + 2 * sizeof(float) + 2 * sizeof(int32_t);
    return rows * (columns / BLOCK) * block;
}

static QuantizedRows quantized_rows_at(const char *space, long rows, long columns) {
    long blocks = columns / BLOCK;
    const float *scales = (const float *)(space + PLANES * rows * columns);
    const float *sums = scales + rows * blocks;
    const int32_t *offsets = (const int32_t *)(sums + rows * blocks);
    return (QuantizedRows){(const int8_t *)space, scales, sums, offsets, rows, columns, blocks};
}

static inline const int8_t *plane_of(const QuantizedRows *x, int plane, long row) {
    return x->planes + (plane * x->rows + row) * x->columns;
}

static void quantize_row(const float *x, const QuantizedRows *to, long row) {
    const f32x8 magic = broadcast8(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
    int8_t *high = (int8_t *)plane_of(to, 0, row), *low = (int8_t *)plane_of(to, PLANES - 1, row);
    float *scales = (float *)to->scales + row * to->blocks;
    float *sums = (float *)to->sums + row * to->blocks;
    int32_t *offsets = (int32_t *)to->offsets + 2 * row * to->blocks;
    for (long b = 0; b < to->blocks; b++, x += BLOCK, high += BLOCK, low += BLOCK) {
        f32x8 v[4];
        i32x8 top = {0};  // bits: without signs, floats are ordered like integers, NaN last
        for (int i = 0; i < 4; i++) {
            v[i] = load8(x + 8 * i);
            top = max_ints8(top, (i32x8)abs8(v[i]));
        }
        int32_t largest_bits = reduce_max_ints8(top);
        float largest;
        memcpy(&largest, &largest_bits, sizeof largest);
        float scale = largest / LARGEST_ACTIVATION;
        float inverse = largest > 1e-30f ? LARGEST_ACTIVATION / largest : 0.0f;
        if (!isfinite(largest)) {  // infinity and NaN spoil the row
            scale = NAN;
            for (int i = 0; i < 4; i++) v[i] = broadcast8(0);
            inverse = 0;
        }
        i32x8 q[4], upper[4];
        for (int i = 0; i < 4; i++) {
            q[i] = (i32x8)(v[i] * broadcast8(inverse) + magic) - 0x4B400000;
            upper[i] = PLANES == 2 ? (q[i] + 64) >> 7 : q[i];
        }
        store_signed32(upper, high);
        int32_t first = reduce_ints8(q[0] + q[1]), second = reduce_ints8(q[2] + q[3]);
        if (PLANES == 2) {
            for (int i = 0; i < 4; i++) q[i] -= upper[i] << 7;
            store_signed32(q, low);
        }
        offsets[2 * b] = -128 * first;
        offsets[2 * b + 1] = -128 * second;
        scales[b] = scale;
        sums[b] = scale * (float)(first + second);
    }
}

// ---- one panel times up to TILE rows -----------------------------------------------------------

#define TILE 6
// Processors fetch less far ahead on their own.
#define PREFETCH_BYTES 4096
#define PREFETCH_ROWS 2  // of activations: a product with more takes longer than its weights

INLINE void prefetch_codes(const uint8_t *at, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch(at + PREFETCH_BYTES + i);
}

// The sums of row r of `count`, from the sums of the planes.
static inline PanelInts join_planes(const PanelInts *sum, int count, int r) {
    return PLANES == 2 ? add_ints(times_128(sum[r]), sum[count + r]) : sum[r];
}

// Multiplies a panel with `count` rows. `kind` and `count` are constants at each call, so the
// compiler specialises the loops. `levels` are those that the codes select, if they do.
INLINE void multiply_panel_rows(const uint8_t *w, const Kind kind, const int8_t *levels,
                                const QuantizedRows *x, long row, const int count,
                                WideFloats *out) {
    const Scales scales = scales_of(kind);
    const bool selects = levels_of(kind) != NULL;
    const long code_bytes = bits_of(kind) * 4 * PANEL, step = block_bytes(kind);
    const int8_t *q[PLANES * TILE];  // the high parts of all rows, then the low parts
    WideFloats sum[TILE], super = broadcast_wide(0), lowest = broadcast_wide(0);
    for (int r = 0; r < count; r++) {
        for (int plane = 0; plane < PLANES; plane++)
            q[plane * count + r] = plane_of(x, plane, row + r);
        sum[r] = broadcast_wide(0);
    }
    const float *scale = x->scales + row * x->blocks, *total = x->sums + row * x->blocks;
    const int32_t *offset = x->offsets + 2 * row * x->blocks;
    for (long b = 0; b < x->blocks; b++, w += step, offset += 2) {
        WideFloats d, m = broadcast_wide(0), d2 = broadcast_wide(0);
        if (count <= PREFETCH_ROWS) prefetch_codes(w, step);
        if (super_bytes(kind) && b % 8 == 0) {
            super = load_halfs(w) * broadcast_wide(super_unit(kind));
            if (scales == SUPER) lowest = -load_halfs(w + 2 * PANEL);
            w += super_bytes(kind);
        }
        const uint8_t *s = w + code_bytes;
        if (scales == SYMMETRIC) {
            d = load_halfs(s);
            if (kind == Q4) m = d * broadcast_wide(-8);
        } else if (scales == AFFINE) {
            d = load_halfs(s);
            m = load_halfs(s + 2 * PANEL);
        } else if (scales == SUPER) {
            d = super * load_unsigned(s);
            m = lowest * load_unsigned(s + PANEL);
        } else {
            d = super * load_signed(s);
            if (scales == HALF_BLOCK) d2 = super * load_signed(s + PANEL);
        }
        PanelInts left[PLANES * TILE], right[PLANES * TILE];
        if (bits_of(kind) == 4) {
            if (selects) dots_levels(w, levels, q, PLANES * count, left);
            else dots_4bit(w, q, PLANES * count, left);
        } else {
            dots_8bit(w, q, 0, PLANES * count, left);
            dots_8bit(w, q, 16, PLANES * count, right);
        }
        for (int r = 0; r < PLANES * count; r++) q[r] += BLOCK;
        for (int r = 0; r < count; r++) {
            const int32_t *at = offset + 2 * r * x->blocks;
            WideFloats row_scale = broadcast_wide(scale[r * x->blocks + b]);
            PanelInts first = join_planes(left, count, r);
            if (bits_of(kind) == 4) {
                if (selects) first = lower_codes(first, at[0] + at[1]);
                sum[r] = fuse_wide(d * row_scale, to_floats(first), sum[r]);
                continue;
            }
            PanelInts second = join_planes(right, count, r);
            if (scales == HALF_BLOCK) {
                first = lower_codes(first, at[0]);
                second = lower_codes(second, at[1]);
                sum[r] = fuse_wide(d * row_scale, to_floats(first), sum[r]);
                sum[r] = fuse_wide(d2 * row_scale, to_floats(second), sum[r]);
            } else {
                first = lower_codes(add_ints(first, second), at[0] + at[1]);
                sum[r] = fuse_wide(d * row_scale, to_floats(first), sum[r]);
            }
        }
        if (scales == AFFINE || scales == SUPER || kind == Q4)
            for (int r = 0; r < count; r++)
                sum[r] = fuse_wide(m, broadcast_wide(total[r * x->blocks + b]), sum[r]);
    }
    for (int r = 0; r < count; r++) out[r] = sum[r];
}

INLINE void multiply_panel_kind(const uint8_t *w, const Kind kind, const int8_t *levels,
                                const QuantizedRows *x, long row, int count, WideFloats *out) {
    switch (count) {
        case 1: multiply_panel_rows(w, kind, levels, x, row, 1, out); break;
        case 2: multiply_panel_rows(w, kind, levels, x, row, 2, out); break;
        case 3: multiply_panel_rows(w, kind, levels, x, row, 3, out); break;
        case 4: multiply_panel_rows(w, kind, levels, x, row, 4, out); break;
        case 5: multiply_panel_rows(w, kind, levels, x, row, 5, out); break;
        default: multiply_panel_rows(w, kind, levels, x, row, 6, out);
    }
}

static void multiply_panel(const uint8_t *w, Kind kind, const QuantizedRows *x, long row, int count,
                           WideFloats *out) {
    switch (kind) {
        case Q4: multiply_panel_kind(w, Q4, NULL, x, row, count, out); break;
        case Q4_AFFINE: multiply_panel_kind(w, Q4_AFFINE, NULL, x, row, count, out); break;
        case Q4_SUPER: multiply_panel_kind(w, Q4_SUPER, NULL, x, row, count, out); break;
        case FP4:  // these differ in their levels only
        case NF4:
        case IQ4: multiply_panel_kind(w, IQ4, levels_of(kind), x, row, count, out); break;
        case IQ4_SIGNED:
            multiply_panel_kind(w, IQ4_SIGNED, IQ4_LEVELS, x, row, count, out);
            break;
        case Q8: multiply_panel_kind(w, Q8, NULL, x, row, count, out); break;
        case Q8_AFFINE: multiply_panel_kind(w, Q8_AFFINE, NULL, x, row, count, out); break;
        case Q8_SUPER: multiply_panel_kind(w, Q8_SUPER, NULL, x, row, count, out); break;
        case Q8_HALF_BLOCK: multiply_panel_kind(w, Q8_HALF_BLOCK, NULL, x, row, count, out); break;
        default: multiply_panel_kind(w, Q8_EIGHTHS, NULL, x, row, count, out);
    }
}

// ---- one panel of floats times up to FLOAT_TILE rows -------------------------------------------

#define SUMS 2           // independent sums of a row: an addition takes several cycles
#define SUM_COLUMNS 1024  // after which they are added up: short sums are more exact
#if PANEL == 16
#define FLOAT_TILE 12  // rows of activations whose sums fit in the registers
#else
#define FLOAT_TILE 6
#endif
#define MAX_TILE (FLOAT_TILE > TILE ? FLOAT_TILE : TILE)

static inline WideFloats load_weights(const uint8_t *at, const Kind kind) {
    if (kind == F32) return load_wide((const float *)at);
    return kind == F16 ? load_halfs(at) : load_bfloats(at);
}

// Multiplies a panel with `count` rows. Every count adds in the same order.
INLINE void multiply_float_rows(const uint8_t *w, const Kind kind, long columns, const float *x,
                                const int count, WideFloats *out) {
    const long step = PANEL * float_bytes(kind);
    for (int r = 0; r < count; r++) out[r] = broadcast_wide(0);
    for (long first = 0; first < columns; first += SUM_COLUMNS) {
        long end = first + SUM_COLUMNS < columns ? first + SUM_COLUMNS : columns, k = first;
        WideFloats sum[FLOAT_TILE][SUMS];
        for (int r = 0; r < count; r++)
            for (int i = 0; i < SUMS; i++) sum[r][i] = broadcast_wide(0);
        for (; k + SUMS <= end; k += SUMS, w += SUMS * step) {
            if (count <= PREFETCH_ROWS) prefetch_codes(w, SUMS * step);
            for (int i = 0; i < SUMS; i++) {
                WideFloats weights = load_weights(w + i * step, kind);
                for (int r = 0; r < count; r++) {
                    WideFloats value = broadcast_wide(x[r * columns + k + i]);
                    sum[r][i] = fuse_wide(weights, value, sum[r][i]);
                }
            }
        }
        for (; k < end; k++, w += step) {
            WideFloats weights = load_weights(w, kind);
            for (int r = 0; r < count; r++)
                sum[r][0] = fuse_wide(weights, broadcast_wide(x[r * columns + k]), sum[r][0]);
        }
        for (int r = 0; r < count; r++)
            for (int i = 0; i < SUMS; i++) out[r] += sum[r][i];
    }
}

// Multiplies the rows a few at a time: as many as registers hold, then fewer and fewer. Functions
// for every number of rows would take long to compile.
INLINE void multiply_float_kind(const uint8_t *w, const Kind kind, long columns, const float *x,
                                int count, WideFloats *out) {
    while (count > 0) {
        int done = 1;
        if (count >= FLOAT_TILE) {
            multiply_float_rows(w, kind, columns, x, FLOAT_TILE, out);
            done = FLOAT_TILE;
        } else if (FLOAT_TILE > 8 && count >= 8) {
            multiply_float_rows(w, kind, columns, x, 8, out);
            done = 8;
        } else if (count >= 4) {
            multiply_float_rows(w, kind, columns, x, 4, out);
            done = 4;
        } else if (count >= 2) {
            multiply_float_rows(w, kind, columns, x, 2, out);
            done = 2;
        } else {
            multiply_float_rows(w, kind, columns, x, 1, out);
        }
        x += done * columns;
        out += done;
        count -= done;
    }
}

static void multiply_floats(const uint8_t *w, Kind kind, long columns, const float *x, int count,
                            WideFloats *out) {
    switch (kind) {
        case BF16: multiply_float_kind(w, BF16, columns, x, count, out); break;
        case F16: multiply_float_kind(w, F16, columns, x, count, out); break;
        default: multiply_float_kind(w, F32, columns, x, count, out);
    }
}

// ---- linear: norm, product, bias, then a residual or an activation -----------------------------

typedef enum { NO_EPILOGUE, RESIDUAL, ACTIVATE, GATED_ACTIVATE } Epilogue;

typedef struct {
    const Matrix *matrix;
    const float *x, *bias, *residual;
    float *out;
    long rows;
    Norm norm;
    float scale;
    int epilogue;
    Activation activation;
    bool prepared;  // the previous operation has normed and quantized the rows
} Linear;

#define ROW_CHUNK 96  // rows of activations that stay in the cache of a core while panels are read
// Up to this many values, and always for one row, every thread prepares the activations for itself,
// without a barrier.
#define MAX_REDUNDANT_VALUES 4096

static void prepare_row(const Linear *a, const char *space, long row, float *normed) {
    long columns = a->matrix->columns;
    const float *x = a->x + row * columns;
    bool dense = holds_floats(a->matrix->segment[0].kind);
    float *to = dense ? (float *)space + row * columns : normed;
    if (a->norm.kind) {
        norm_row(x, to, columns, &a->norm);
        x = to;
    } else if (dense) {
        memcpy(to, x, columns * sizeof(float));
    }
    if (!dense) {
        QuantizedRows quantized = quantized_rows_at(space, a->rows, columns);
        quantize_row(x, &quantized, row);
    }
}

static size_t prepared_bytes(const Linear *a) {
    long columns = a->matrix->columns;
    return holds_floats(a->matrix->segment[0].kind) ? a->rows * columns * sizeof(float)
                                                         : quantized_bytes(a->rows, columns);
}

static void prepare_kernel(const void *arguments, const ThreadContext *ctx) {
    const Linear *a = arguments;
    long first, end;
    while (next_chunk(ctx, a->rows, chunk_size(ctx, a->rows, 4), &first, &end))
        for (long row = first; row < end; row++)
            prepare_row(a, ctx->shared, row, (float *)ctx->scratch);
}

typedef struct {
    const Segment *segment;
    const uint8_t *data;
    long row;     // its first row in the matrix
    long height;  // its number of rows: PANEL except at the end of a segment
} PanelView;

static PanelView panel_at(const Matrix *m, long index) {
    long row = 0;
    const Segment *s = m->segment;
    while (index >= (s->rows + PANEL - 1) / PANEL) {
        index -= (s->rows + PANEL - 1) / PANEL;
        row += s->rows;
        s++;
    }
    long step = panel_bytes(s->kind, m->columns);
    long height = s->rows - index * PANEL;
    return (PanelView){s, s->data + index * step, row + index * PANEL,
                       height < PANEL ? height : PANEL};
}

// The most rows that multiply_prepared takes.
static inline int tile_of(const Matrix *m) {
    return holds_floats(m->segment[0].kind) ? FLOAT_TILE : TILE;
}

// Multiplies a panel with the prepared rows row .. row + count of `rows` in `space`.
static void multiply_prepared(const PanelView *p, long columns, const char *space, long rows,
                              long row, int count, WideFloats *out) {
    int kind = p->segment->kind;
    if (holds_floats(kind)) {
        const float *x = (const float *)space + row * columns;
        multiply_floats(p->data, kind, columns, x, count, out);
    } else {
        QuantizedRows x = quantized_rows_at(space, rows, columns);
        multiply_panel(p->data, kind, &x, row, count, out);
    }
}

static void multiply(const Linear *a, const PanelView *p, const char *space, long row, int count,
                     WideFloats *out) {
    multiply_prepared(p, a->matrix->columns, space, a->rows, row, count, out);
    if (a->bias) {
        WideFloats bias = broadcast_wide(0);
        memcpy(&bias, a->bias + p->row, p->height * sizeof(float));
        for (int r = 0; r < count; r++) out[r] += bias;
    }
}

static void apply_epilogue(const Linear *a, const PanelView *p, long row, int count,
                           const WideFloats *y) {
    for (int r = 0; r < count; r++)
        for (long first = 0; first < p->height; first += LANES) {
            long at = (row + r) * a->matrix->rows + p->row + first, height = p->height - first;
            f32x8 result = part_of(&y[r], first);
            if (a->epilogue == ACTIVATE) result = activate8(result, &a->activation);
            if (height >= LANES) {
                if (a->epilogue == RESIDUAL)
                    result = load8(a->residual + at) + broadcast8(a->scale) * result;
                store8(a->out + at, result);
                continue;
            }
            for (long i = 0; i < height; i++)
                a->out[at + i] = a->epilogue == RESIDUAL
                                     ? a->residual[at + i] + a->scale * result[i]
                                     : result[i];
        }
}

// Stores activation(gate) * up of whole panels.
static void store_gated(const WideFloats *gate, const WideFloats *up, const Activation *a,
                        float *out) {
    for (long i = 0; i < PANEL; i += LANES)
        store8(out + i, gate8(part_of(gate, i), part_of(up, i), a));
}

// Requests the beginning of the panel that a thread multiplies next.
static void prefetch_panel(const Matrix *m, long index) {
    const char *data = (const char *)panel_at(m, index).data;
    for (long i = 0; i < PREFETCH_BYTES; i += 64) __builtin_prefetch(data + i);
}

static void linear_kernel(const void *arguments, const ThreadContext *ctx) {
    const Linear *a = arguments;
    const Matrix *m = a->matrix;
    const char *space = ctx->shared;
    bool gated = a->epilogue == GATED_ACTIVATE;
    const int tile = tile_of(m);
    long panels = gated ? m->panels / 2 : m->panels, width = m->rows / 2;
    long row_chunks = (a->rows + ROW_CHUNK - 1) / ROW_CHUNK, units = panels * row_chunks;
    long first, end, next_first, next_end;
    bool more = next_shrinking_chunk(ctx, units, &first, &end);
    if (more) prefetch_panel(m, first % panels);
    if (!a->prepared) {
        space = ctx->scratch;
        for (long row = 0; row < a->rows; row++)
            prepare_row(a, space, row,
                        (float *)(ctx->scratch + (prepared_bytes(a) + 63) / 64 * 64));
    }
    for (; more; first = next_first, end = next_end) {
        bool ahead = a->rows <= PREFETCH_ROWS;  // else the threads would not end together
        if (ahead) more = next_shrinking_chunk(ctx, units, &next_first, &next_end);
        for (long unit = first; unit < end; unit++) {
            long i = unit % panels, top = unit / panels * ROW_CHUNK;
            long bottom = top + ROW_CHUNK < a->rows ? top + ROW_CHUNK : a->rows;
            PanelView left = panel_at(m, i), right = left;
            if (gated) right = panel_at(m, i + panels);
            if (ahead && more && unit == end - 1) prefetch_panel(m, next_first % panels);
            for (long row = top; row < bottom; row += tile) {
                int count = bottom - row < tile ? (int)(bottom - row) : tile;
                WideFloats y[MAX_TILE], z[MAX_TILE];
                multiply(a, &left, space, row, count, y);
                if (!gated) {
                    apply_epilogue(a, &left, row, count, y);
                    continue;
                }
                multiply(a, &right, space, row, count, z);
                for (int r = 0; r < count; r++)
                    store_gated(&y[r], &z[r], &a->activation,
                                a->out + (row + r) * width + left.row);
            }
        }
        if (!ahead) more = next_shrinking_chunk(ctx, units, &next_first, &next_end);
    }
}

// x [rows, columns] -> out [rows, matrix rows]. With a gated activation the first half of the
// matrix rows gates the second, and out has half as many columns.
void native_linear(ThreadPool *pool, const Matrix *matrix, const float *x, long rows,
                   const float *bias, int norm, float eps, const float *norm_weight,
                   const float *norm_bias, int epilogue, int activation, float param0,
                   float param1, float param2, const float *residual, float scale, float *out) {
    Linear a = {matrix,
                x,
                bias,
                residual,
                out,
                rows,
                {norm, eps, norm_weight, norm_bias},
                scale,
                epilogue,
                {activation, {param0, param1, param2}},
                false};
    double work = (double)rows * matrix->columns, product = work * matrix->rows / 32;
    a.prepared = pool_num_threads(pool) > 1 && rows > 1 && work > MAX_REDUNDANT_VALUES;
    size_t normed_bytes = matrix->columns * sizeof(float) + 64;
    if (a.prepared) {
        reserve_shared(pool, prepared_bytes(&a));
        reserve_scratch(pool, normed_bytes);
        issue_pair(pool, prepare_kernel, work, linear_kernel, product, &a, sizeof a);
    } else {
        reserve_scratch(pool, prepared_bytes(&a) + 64 + normed_bytes);
        issue(pool, linear_kernel, &a, sizeof a, product);
    }
}

// ---- experts: a linear layer whose rows choose their part of the matrix ------------------------
// The rows are pairs sorted by expert (experts.c), so that the rows of an expert lie together. The
// matrix has the experts one below the other. The parts are whole panels.

typedef struct {
    const Matrix *matrix;
    const float *x, *bias, *input_weights;  // the last two may be NULL
    const int32_t *order, *starts;
    float *out;
    long pairs, experts, top_k;
    int epilogue;  // NO_EPILOGUE: the second product, whose x is sorted and whose out is not
    Activation activation;
} ExpertLinear;

static bool is_first_product(const ExpertLinear *a) { return a->epilogue != NO_EPILOGUE; }

static size_t expert_rows_bytes(const ExpertLinear *a) {
    long columns = a->matrix->columns;
    return holds_floats(a->matrix->segment[0].kind) ? a->pairs * columns * sizeof(float)
                                                         : quantized_bytes(a->pairs, columns);
}

static void prepare_experts_kernel(const void *arguments, const ThreadContext *ctx) {
    const ExpertLinear *a = arguments;
    long first, end, columns = a->matrix->columns, count = a->starts[a->experts];
    QuantizedRows quantized = quantized_rows_at(ctx->shared, a->pairs, columns);
    while (next_chunk(ctx, count, chunk_size(ctx, count, 4), &first, &end))
        for (long row = first; row < end; row++) {
            long source = is_first_product(a) ? a->order[row] / a->top_k : row;
            const float *x = a->x + source * columns;
            if (holds_floats(a->matrix->segment[0].kind))
                memcpy((float *)ctx->shared + row * columns, x, columns * sizeof(float));
            else quantize_row(x, &quantized, row);
        }
}

// Adds the bias of a panel to its results, after multiplying those by the pairs' input weights.
static void finish_expert_rows(const ExpertLinear *a, const PanelView *p, long row, int count,
                               WideFloats *y) {
    WideFloats bias = broadcast_wide(0);
    if (a->bias) memcpy(&bias, a->bias + p->row, sizeof bias);
    for (int r = 0; r < count; r++) {
        if (a->input_weights) y[r] *= broadcast_wide(a->input_weights[a->order[row + r]]);
        y[r] += bias;
    }
}

static void expert_linear_kernel(const void *arguments, const ThreadContext *ctx) {
    const ExpertLinear *a = arguments;
    const Matrix *m = a->matrix;
    bool gated = a->epilogue == GATED_ACTIVATE;
    const int tile = tile_of(m);
    long expert_panels = m->panels / a->experts, panels = gated ? expert_panels / 2 : expert_panels;
    long width = panels * PANEL, active = a->pairs < a->experts ? a->pairs : a->experts;
    long step = chunk_size(ctx, panels * active, 6), first, end;
    if (step > panels) step = panels;
    long pieces = (panels + step - 1) / step;
    while (next_chunk(ctx, a->experts * pieces, 1, &first, &end)) {
        long expert = first / pieces, top = a->starts[expert], bottom = a->starts[expert + 1];
        long from = first % pieces * step, to = from + step < panels ? from + step : panels;
        if (top == bottom) continue;
        for (long i = from; i < to; i++) {
            PanelView left = panel_at(m, expert * expert_panels + i), right;
            if (gated) right = panel_at(m, expert * expert_panels + panels + i);
            for (long row = top; row < bottom; row += tile) {
                int count = bottom - row < tile ? (int)(bottom - row) : tile;
                WideFloats y[MAX_TILE], z[MAX_TILE];
                multiply_prepared(&left, m->columns, ctx->shared, a->pairs, row, count, y);
                finish_expert_rows(a, &left, row, count, y);
                if (gated) {
                    multiply_prepared(&right, m->columns, ctx->shared, a->pairs, row, count, z);
                    finish_expert_rows(a, &right, row, count, z);
                }
                for (int r = 0; r < count; r++) {
                    long out_row = is_first_product(a) ? row + r : a->order[row + r];
                    float *out = a->out + out_row * width + i * PANEL;
                    if (gated) {
                        store_gated(&y[r], &z[r], &a->activation, out);
                        continue;
                    }
                    for (long k = 0; k < PANEL; k += LANES) {
                        f32x8 part = part_of(&y[r], k);
                        if (is_first_product(a)) part = activate8(part, &a->activation);
                        store8(out + k, part);
                    }
                }
            }
        }
    }
}

// The first product of experts, with an activation: x [tokens, columns] -> out [sorted pairs,
// width]. The second one, without: x [sorted pairs, columns] -> out [pairs, width].
void native_expert_linear(ThreadPool *pool, const Matrix *matrix, const float *x, const float *bias,
                          const float *input_weights, const int32_t *order, const int32_t *starts,
                          long pairs, long experts, long top_k, int epilogue, int activation,
                          float param0, float param1, float param2, float *out) {
    ExpertLinear a = {matrix,
                      x,
                      bias,
                      input_weights,
                      order,
                      starts,
                      out,
                      pairs,
                      experts,
                      top_k,
                      epilogue,
                      {activation, {param0, param1, param2}}};
    double work = (double)pairs * matrix->columns;
    reserve_shared(pool, expert_rows_bytes(&a));
    issue_pair(pool, prepare_experts_kernel, work, expert_linear_kernel,
               work * (matrix->rows / experts) / 32, &a, sizeof a);
}

// ---- rows of a matrix as float32: an embedding -------------------------------------------------

static inline float half_at(const uint8_t *halfs, int index) {
    uint16_t half;
    memcpy(&half, halfs + 2 * index, sizeof half);
    return from_half(half);
}

static inline float bfloat_at(const uint8_t *bfloats, int index) {
    uint32_t bits = 0;
    memcpy((char *)&bits + 2, bfloats + 2 * index, 2);  // the upper half of a float32
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void dequantize_row(const Matrix *m, long row, float *out) {
    const Segment *s = m->segment;
    while (row >= s->rows) {
        row -= s->rows;
        s++;
    }
    const Kind kind = s->kind;
    const uint8_t *w = s->data + row / PANEL * panel_bytes(kind, m->columns);
    int lane = row % PANEL;
    if (holds_floats(kind)) {
        for (long k = 0; k < m->columns; k++, w += PANEL * float_bytes(kind)) {
            if (kind == F32) memcpy(&out[k], w + 4 * lane, 4);
            else out[k] = kind == F16 ? half_at(w, lane) : bfloat_at(w, lane);
        }
        return;
    }
    const Scales scales = scales_of(kind);
    const int8_t *levels = levels_of(kind);
    float super = 0, lowest = 0;
    for (long b = 0; b < m->columns / BLOCK; b++, w += block_bytes(kind)) {
        if (super_bytes(kind) && b % 8 == 0) {
            super = half_at(w, lane) * super_unit(kind);
            if (scales == SUPER) lowest = -half_at(w + 2 * PANEL, lane);
            w += super_bytes(kind);
        }
        const uint8_t *at = w + bits_of(kind) * 4 * PANEL;
        for (int i = 0; i < BLOCK; i++) {
            float d, minimum = 0;
            if (scales == SUPER) {
                d = super * at[lane];
                minimum = lowest * at[PANEL + lane];
            } else if (scales == SIGNED) {
                d = super * (int8_t)at[lane];
            } else if (scales == HALF_BLOCK) {
                d = super * (int8_t)at[i / 16 * PANEL + lane];
            } else {
                d = half_at(at, lane);
                if (scales == AFFINE) minimum = half_at(at + 2 * PANEL, lane);
            }
            int j = i % 16 / 4 * 4 * PANEL + lane * 4 + i % 4;
            int q;
            if (bits_of(kind) == 8) q = (int8_t)w[i / 16 * 16 * PANEL + j];
            else q = i < 16 ? w[j] & 15 : w[j] >> 4;
            if (levels) q = levels[q];
            else if (kind == Q4) q -= 8;
            *out++ = d * q + minimum;
        }
    }
}

typedef struct {
    const Matrix *matrix;
    const int64_t *ids;
    long count;
    float scale, *out;
} Gather;

static void gather_kernel(const void *arguments, const ThreadContext *ctx) {
    const Gather *a = arguments;
    long first, end, columns = a->matrix->columns;
    while (next_chunk(ctx, a->count, 1, &first, &end)) {
        float *row = a->out + first * columns;
        long id = a->ids[first] < 0 || a->ids[first] >= a->matrix->rows ? 0 : a->ids[first];
        dequantize_row(a->matrix, id, row);
        if (a->scale != 1)
            for (long i = 0; i < columns; i++) row[i] *= a->scale;
    }
}

void native_gather(ThreadPool *pool, const Matrix *matrix, const int64_t *ids, long count,
                   float scale, float *out) {
    Gather a = {matrix, ids, count, scale, out};
    issue(pool, gather_kernel, &a, sizeof a, (double)count * matrix->columns);
}

// ---- what depends on the processor for which this library was compiled -------------------------

int native_panel_rows(void) { return PANEL; }
int native_largest_activation(void) { return LARGEST_ACTIVATION; }
