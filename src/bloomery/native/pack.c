// Repacks GGUF blocks into the panels of gemm.c: the same codes and scales, interleaved. The values
// do not change; codes of five and six bits take one byte each.
#include "native.h"

#include <stdlib.h>

typedef enum { Q4_0, Q4_1, Q4_K, Q8_0, Q5_0, Q5_1, Q5_K, Q6_K } Type;

static inline long type_bytes(Type type) {
    static const long of[] = {18, 20, 144, 34, 22, 24, 176, 210};
    return of[type];
}

static inline int type_columns(Type type) {
    return type == Q4_K || type == Q5_K || type == Q6_K ? 256 : 32;
}

// Reads the 6-bit scale and minimum of one of eight sub-blocks from their twelve bytes.
static inline void scale_and_minimum(const uint8_t *s, int sub, uint8_t *scale, uint8_t *minimum) {
    if (sub < 4) {
        *scale = s[sub] & 63;
        *minimum = s[sub + 4] & 63;
    } else {
        *scale = (s[sub + 4] & 15) | (s[sub - 4] >> 6 << 4);
        *minimum = (s[sub + 4] >> 4) | (s[sub] >> 6 << 4);
    }
}

static inline int fifth_bit(const uint8_t *mask, int i) {
    return (mask[i / 8] >> (i % 8) & 1) << 4;
}

// Writes the 32 codes of sub-block `sub` as bytes: 0 .. 15 for 4-bit types, else signed or 0 .. 31.
INLINE void unpack_codes(const Type type, const uint8_t *b, int sub, uint8_t *q) {
    for (int i = 0; i < 32; i++) {
        int four = 0;
        if (type == Q5_0 || type == Q5_1) {
            const uint8_t *nibbles = b + (type == Q5_0 ? 6 : 8);
            four = i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4;
        }
        switch (type) {
            case Q5_0: q[i] = (four | fifth_bit(b + 2, i)) - 16; break;
            case Q5_1: q[i] = four | fifth_bit(b + 4, i); break;
            case Q8_0: q[i] = b[2 + i]; break;
            case Q4_K: q[i] = b[16 + sub / 2 * 32 + i] >> (sub % 2 * 4) & 15; break;
            case Q5_K:
                q[i] = (b[48 + sub / 2 * 32 + i] >> (sub % 2 * 4) & 15) | (b[16 + i] >> sub & 1)
                                                                              << 4;
                break;
            case Q6_K: {
                // two halves of 128 codes: 64 bytes of low bits, 32 of high bits; four parts of 32
                int half = sub / 4, part = sub % 4;
                int low = b[half * 64 + part % 2 * 32 + i] >> (part / 2 * 4) & 15;
                int high = b[128 + half * 32 + i] >> (2 * part) & 3;
                q[i] = (low | high << 4) - 32;
                break;
            }
            default: break;
        }
    }
}

// Writes one row's sub-block as a panel has it: 16 bytes with code i in the low and code i + 16 in
// the high half, or 32 bytes.
INLINE void pack_codes(const Type type, const uint8_t *b, int sub, uint8_t *to) {
    if (type == Q4_0 || type == Q4_1) {  // the order of the file
        memcpy(to, b + (type == Q4_0 ? 2 : 4), 16);
        return;
    }
    uint8_t q[32];
    unpack_codes(type, b, sub, q);
    for (int i = 0; i < 16; i++)
        if (type == Q4_K) {
            to[i] = q[i] | q[i + 16] << 4;
        } else {
            to[i] = q[i];
            to[i + 16] = q[i + 16];
        }
}

// Four bytes of a row lie together, then four of the next row.
INLINE void interleave(const uint8_t *bytes, int count, int row, uint8_t *to) {
    for (int i = 0; i < count; i += 4) memcpy(to + i * PANEL + row * 4, bytes + i, 4);
}

INLINE void pack_scales(const Type type, const uint8_t *b, int sub, int row, uint8_t *to) {
    switch (type) {
        case Q4_0:
        case Q8_0:
        case Q5_0: memcpy(to + 2 * row, b, 2); break;
        case Q4_1:
        case Q5_1:
            memcpy(to + 2 * row, b, 2);
            memcpy(to + 16 + 2 * row, b + 2, 2);
            break;
        case Q4_K:
        case Q5_K: scale_and_minimum(b + 4, sub, to + row, to + 8 + row); break;
        case Q6_K:
            to[row] = b[192 + 2 * sub];
            to[8 + row] = b[192 + 2 * sub + 1];
    }
}

typedef struct {
    int type;
    const uint8_t *from;
    long rows, columns, row_bytes;
    uint8_t *to;
} Pack;

static inline long packed_panel_bytes(Type type, long columns) {
    long bits = type <= Q4_K ? 4 : 8;
    long head = 0;
    if (type == Q4_K || type == Q5_K) head = 32;
    if (type == Q6_K) head = 16;
    long scales = type == Q4_1 || type == Q5_1 ? 32 : 16;
    return columns / BLOCK * (bits * 32 + scales) + columns / 256 * head;
}

// Packs panel `p`. The type is a constant, so the compiler specialises the loops.
INLINE void pack_panel(const Type type, const Pack *a, long p) {
    const int wide = type_columns(type), bits = type <= Q4_K ? 4 : 8;
    const long head = packed_panel_bytes(type, 256) - packed_panel_bytes(type, 32) * 8;
    const long scales = type == Q4_1 || type == Q5_1 ? 32 : 16;
    long size = packed_panel_bytes(type, a->columns),
         height = a->rows - p * PANEL < PANEL ? a->rows - p * PANEL : PANEL;
    uint8_t *to = a->to + p * size;
    if (height < PANEL) memset(to, 0, size);
    for (long b = 0; b < a->columns / wide; b++) {
        const uint8_t *from = a->from + p * PANEL * a->row_bytes + b * type_bytes(type);
        for (long row = 0; row < height && wide == 256; row++) {
            const uint8_t *block = from + row * a->row_bytes;
            memcpy(to + 2 * row, block + (type == Q6_K ? 208 : 0), 2);
            if (type != Q6_K) memcpy(to + 16 + 2 * row, block + 2, 2);
        }
        to += wide == 256 ? head : 0;
        for (int sub = 0; sub < wide / BLOCK; sub++, to += bits * 32 + scales)
            for (long row = 0; row < height; row++) {
                uint8_t bytes[32];
                pack_codes(type, from + row * a->row_bytes, sub, bytes);
                interleave(bytes, bits * 4, (int)row, to);
                pack_scales(type, from + row * a->row_bytes, sub, (int)row, to + bits * 32);
            }
    }
}

static void pack_kernel(const void *arguments, const ThreadContext *ctx) {
    const Pack *a = arguments;
    long panels = (a->rows + PANEL - 1) / PANEL, first, end;
    while (next_chunk(ctx, panels, chunk_size(ctx, panels, 4), &first, &end))
        for (long p = first; p < end; p++) switch ((Type)a->type) {
                case Q4_0: pack_panel(Q4_0, a, p); break;
                case Q4_1: pack_panel(Q4_1, a, p); break;
                case Q4_K: pack_panel(Q4_K, a, p); break;
                case Q8_0: pack_panel(Q8_0, a, p); break;
                case Q5_0: pack_panel(Q5_0, a, p); break;
                case Q5_1: pack_panel(Q5_1, a, p); break;
                case Q5_K: pack_panel(Q5_K, a, p); break;
                case Q6_K: pack_panel(Q6_K, a, p); break;
            }
}

// The bytes that `native_pack` writes; 0 if the columns are not a multiple of the block.
long native_packed_bytes(int type, long rows, long columns) {
    if (columns % type_columns(type)) return 0;
    return (rows + PANEL - 1) / PANEL * packed_panel_bytes(type, columns);
}

// Packs the first `columns` of `rows` rows of blocks, which lie `row_bytes` apart.
void native_pack(ThreadPool *pool, int type, const uint8_t *from, long rows, long columns,
                 long row_bytes, uint8_t *to) {
    Pack a = {type, from, rows, columns, row_bytes, to};
    issue(pool, pack_kernel, &a, sizeof a, (double)rows * columns);
}
