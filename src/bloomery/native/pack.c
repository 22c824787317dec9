// Repacks GGUF blocks and floats into the panels of gemm.c. Codes and scales keep their values and
// are interleaved. Codes of more than four bits, and entries of grids, take one byte each. Only
// Q2_K and NVFP4, whose scales fit no panel, are rounded to eight bits.
#include "gguf_blocks.h"

#include <math.h>
#include <stdlib.h>

// How a panel holds a type: see gemm.c.
typedef enum {
    SCALE_PER_BLOCK,
    SCALE_AND_OFFSET,
    SUPER_BLOCK,
    SIGNED_FACTORS,
    HALF_BLOCKS,
    ROUNDED
} Layout;

static inline Layout layout_of(Type type) {
    switch (type) {
        case Q4_1:
        case Q5_1: return SCALE_AND_OFFSET;
        case Q4_K:
        case Q5_K: return SUPER_BLOCK;
        case IQ4_XS: return SIGNED_FACTORS;
        case Q2_K:
        case NVFP4: return ROUNDED;
        case Q4_0:
        case Q8_0:
        case Q5_0:
        case IQ4_NL:
        case MXFP4:
        case NF4_BLOCK:
        case TQ1_0:
        case TQ2_0:
        case Q1_0: return SCALE_PER_BLOCK;
        default: return HALF_BLOCKS;
    }
}

// Where a block keeps the 4-bit codes of sub-block `sub` in the order of a panel: code i in the low
// and code i + 16 in the high half of a byte. -1: in another order, or as other codes.
INLINE int nibble_offset(const Type type, int sub) {
    switch (type) {
        case MXFP4: return 1;
        case Q4_0:
        case IQ4_NL:
        case NF4_BLOCK: return 2;
        case Q4_1: return 4;
        case IQ4_XS: return 8 + 16 * sub;
        default: return -1;
    }
}

static inline int packed_bits(Type type) {
    return type == Q4_K || nibble_offset(type, 0) >= 0 ? 4 : 8;
}

// The bytes of the scales of a panel, for 32 columns.
static inline long scale_bytes(Type type) {
    Layout layout = layout_of(type);
    return (layout == SCALE_AND_OFFSET ? 4 : layout == SIGNED_FACTORS ? 1 : 2) * PANEL;
}

// The bytes before each eight blocks of 32 columns.
static inline long head_bytes(Type type) {
    Layout layout = layout_of(type);
    if (layout == SUPER_BLOCK) return 4 * PANEL;
    return layout == SIGNED_FACTORS || layout == HALF_BLOCKS ? 2 * PANEL : 0;
}

static inline long packed_panel_bytes(Type type, long columns) {
    return columns / BLOCK * (packed_bits(type) * 4 * PANEL + scale_bytes(type)) +
           columns / 256 * head_bytes(type);
}

// Four bytes of a row lie together, then four of the next row.
INLINE void interleave(const uint8_t *bytes, int count, int row, uint8_t *to) {
    for (int i = 0; i < count; i += 4) memcpy(to + i * PANEL + row * 4, bytes + i, 4);
}

// Writes one row's sub-block as a panel has it: 16 bytes with code i in the low and code i + 16 in
// the high half, or 32 bytes. Returns the scale of a sub-block that was rounded.
INLINE uint16_t pack_codes(const Type type, const uint8_t *b, int sub, const int8_t *grid,
                           uint8_t *to) {
    if (nibble_offset(type, sub) >= 0) {
        memcpy(to, b + nibble_offset(type, sub), 16);
        return 0;
    }
    if (layout_of(type) == ROUNDED) {
        f32x8 values[4];
        decode_values(type, b, sub, values);
        return round_values(values, to);
    }
    if (type == Q4_K) {  // two sub-blocks share 32 bytes: one has the low, one the high halves
        const uint8_t *left = b + 16 + sub / 2 * 32, *right = left + 16;
        if (sub % 2)
            for (int i = 0; i < 16; i++) to[i] = left[i] >> 4 | (right[i] & 0xf0);
        else
            for (int i = 0; i < 16; i++) to[i] = (left[i] & 15) | right[i] << 4;
        return 0;
    }
    unpack_codes(type, b, sub, grid, to);
    return 0;
}

INLINE void pack_scales(const Type type, const uint8_t *b, int sub, int row, uint8_t *to) {
    uint16_t scale;
    switch (layout_of(type)) {
        case SCALE_PER_BLOCK:
            scale = block_scale(type, b);
            memcpy(to + 2 * row, &scale, 2);
            break;
        case SCALE_AND_OFFSET:
            memcpy(to + 2 * row, b, 2);
            memcpy(to + 2 * PANEL + 2 * row, b + 2, 2);
            break;
        case SUPER_BLOCK: scale_and_minimum(b + 4, sub, to + row, to + PANEL + row); break;
        case SIGNED_FACTORS: to[row] = (uint8_t)group_factor(type, b, sub, 0); break;
        case HALF_BLOCKS:
            to[row] = (uint8_t)group_factor(type, b, sub, 0);
            to[PANEL + row] = (uint8_t)group_factor(type, b, sub, 1);
            break;
        case ROUNDED: break;
    }
}

typedef struct {
    int type;
    const uint8_t *from;
    const int8_t *grid;
    long rows, columns, row_bytes;
    uint8_t *to;
} Pack;

// Packs panel `p`. The type is a constant, so the compiler specialises the loops.
INLINE void pack_panel(const Type type, const Pack *a, long p) {
    const int wide = type_columns(type), code_bytes = packed_bits(type) * 4;
    const long head = head_bytes(type), scales = scale_bytes(type);
    long size = packed_panel_bytes(type, a->columns),
         height = a->rows - p * PANEL < PANEL ? a->rows - p * PANEL : PANEL;
    uint8_t *to = a->to + p * size;
    if (height < PANEL) memset(to, 0, size);
    for (long b = 0; b < a->columns / wide; b++) {
        const uint8_t *from = a->from + p * PANEL * a->row_bytes + b * type_bytes(type);
        for (long row = 0; row < height && head; row++) {
            const uint8_t *block = from + row * a->row_bytes;
            uint16_t scale = block_scale(type, block);
            memcpy(to + 2 * row, &scale, 2);
            if (layout_of(type) == SUPER_BLOCK) memcpy(to + 2 * PANEL + 2 * row, block + 2, 2);
        }
        to += head;
        for (int sub = 0; sub < wide / BLOCK; sub++, to += code_bytes * PANEL + scales)
            for (long row = 0; row < height; row++) {
                uint8_t bytes[32], *scales_at = to + code_bytes * PANEL;
                const uint8_t *block = from + row * a->row_bytes;
                uint16_t rounded_scale = pack_codes(type, block, sub, a->grid, bytes);
                interleave(bytes, code_bytes, (int)row, to);
                pack_scales(type, block, sub, (int)row, scales_at);
                if (layout_of(type) == ROUNDED) memcpy(scales_at + 2 * row, &rounded_scale, 2);
            }
    }
}

// A function for each type: inside one function, the compiler would mix their loops.
#define DEFINE_PACK(type) \
    static void pack_##type(const Pack *a, long p) { pack_panel(type, a, p); }
#define FOR_EACH_TYPE(X)                                                                       \
    X(Q4_0) X(Q4_1) X(Q4_K) X(Q8_0) X(Q5_0) X(Q5_1) X(Q5_K) X(Q6_K) X(Q2_K) X(Q3_K) X(IQ4_NL)  \
    X(IQ4_XS) X(IQ2_XXS) X(IQ2_XS) X(IQ2_S) X(IQ3_XXS) X(IQ3_S) X(IQ1_S) X(IQ1_M) X(TQ1_0)     \
    X(TQ2_0) X(Q1_0) X(MXFP4) X(NVFP4) X(NF4_BLOCK)
FOR_EACH_TYPE(DEFINE_PACK)

typedef void PackPanel(const Pack *a, long p);
#define TABLE_ENTRY(type) [type] = pack_##type,
static PackPanel *const PACK_PANEL[] = {FOR_EACH_TYPE(TABLE_ENTRY)};

static void pack_kernel(const void *arguments, const ThreadContext *ctx) {
    const Pack *a = arguments;
    PackPanel *pack = PACK_PANEL[a->type];
    long panels = (a->rows + PANEL - 1) / PANEL, first, end;
    while (next_chunk(ctx, panels, chunk_size(ctx, panels, 4), &first, &end))
        for (long p = first; p < end; p++) pack(a, p);
}

// The bytes that `native_pack` writes; 0 if the columns are not a multiple of the block.
long native_packed_bytes(int type, long rows, long columns) {
    if (columns % type_columns(type)) return 0;
    return (rows + PANEL - 1) / PANEL * packed_panel_bytes(type, columns);
}

// Packs the first `columns` of `rows` rows of blocks, which lie `row_bytes` apart. `grid` has the
// codebook of types that need one: int8 [entries][8], or [entries][4] for IQ3_XXS and IQ3_S.
void native_pack(ThreadPool *pool, int type, const uint8_t *from, const int8_t *grid, long rows,
                 long columns, long row_bytes, uint8_t *to) {
    Pack a = {type, from, grid, rows, columns, row_bytes, to};
    issue(pool, pack_kernel, &a, sizeof a, (double)rows * columns);
}

// ---- floats ------------------------------------------------------------------------------------

typedef struct {
    const char *from;
    long item_bytes, rows, columns;
    char *to;
} PackFloats;

// Packs panel `p`. The size of an item is a constant, so the compiler copies with one instruction.
INLINE void pack_float_panel(const PackFloats *a, const long item_bytes, long p) {
    const char *from = a->from + p * PANEL * a->columns * item_bytes;
    char *to = a->to + p * PANEL * a->columns * item_bytes;
    long height = a->rows - p * PANEL < PANEL ? a->rows - p * PANEL : PANEL;
    if (height < PANEL) memset(to, 0, PANEL * a->columns * item_bytes);
    for (long k = 0; k < a->columns; k++)
        for (long row = 0; row < height; row++)
            memcpy(to + (k * PANEL + row) * item_bytes, from + (row * a->columns + k) * item_bytes,
                   item_bytes);
}

static void pack_floats_kernel(const void *arguments, const ThreadContext *ctx) {
    const PackFloats *a = arguments;
    long panels = (a->rows + PANEL - 1) / PANEL, first, end;
    while (next_chunk(ctx, panels, chunk_size(ctx, panels, 4), &first, &end))
        for (long p = first; p < end; p++) {
            if (a->item_bytes == 2) pack_float_panel(a, 2, p);
            else pack_float_panel(a, 4, p);
        }
}

// Packs a matrix [rows, columns] of floats of 2 or 4 bytes into panels. The last one is filled up
// with zeros.
void native_pack_floats(ThreadPool *pool, const char *from, long item_bytes, long rows,
                        long columns, char *to) {
    PackFloats a = {from, item_bytes, rows, columns, to};
    issue(pool, pack_floats_kernel, &a, sizeof a, (double)rows * columns);
}
