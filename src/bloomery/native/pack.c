// GGUF's blocks into the panels of products.c: the same numbers and scales, interleaved. Values stay exactly what they
// were; types of five and six bits take a byte a number.
#include "native.h"

#include <stdlib.h>

typedef enum { Q4_0, Q4_1, Q4_K, Q8_0, Q5_0, Q5_1, Q5_K, Q6_K } Type;

static long type_bytes(Type type) {
    static const long of[] = {18, 20, 144, 34, 22, 24, 176, 210};
    return of[type];
}

static int type_columns(Type type) { return type == Q4_K || type == Q5_K || type == Q6_K ? 256 : 32; }

// The six-bit scale and minimum of one of eight sub-blocks, from the twelve bytes that hold all.
static void scale_and_minimum(const uint8_t *s, int sub, uint8_t *scale, uint8_t *minimum) {
    if (sub < 4) {
        *scale = s[sub] & 63;
        *minimum = s[sub + 4] & 63;
    } else {
        *scale = (s[sub + 4] & 15) | (s[sub - 4] >> 6 << 4);
        *minimum = (s[sub + 4] >> 4) | (s[sub] >> 6 << 4);
    }
}

static int fifth_bit(const uint8_t *mask, int i) { return (mask[i / 8] >> (i % 8) & 1) << 4; }

// 32 numbers of sub-block `sub` as bytes: unsigned below 16 for types of four bits, else signed or below 32.
static void numbers_of(Type type, const uint8_t *b, int sub, uint8_t *q) {
    for (int i = 0; i < 32; i++) {
        const uint8_t *nibbles = b + (type == Q4_0 ? 2 : type == Q4_1 ? 4 : type == Q5_0 ? 6 : 8);
        int four = 0;
        if (type == Q4_0 || type == Q4_1 || type == Q5_0 || type == Q5_1)
            four = i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4;
        switch (type) {
            case Q4_0: case Q4_1: q[i] = four; break;
            case Q5_0: q[i] = (four | fifth_bit(b + 2, i)) - 16; break;
            case Q5_1: q[i] = four | fifth_bit(b + 4, i); break;
            case Q8_0: q[i] = b[2 + i]; break;
            case Q4_K: q[i] = b[16 + sub / 2 * 32 + i] >> (sub % 2 * 4) & 15; break;
            case Q5_K: q[i] = (b[48 + sub / 2 * 32 + i] >> (sub % 2 * 4) & 15) | (b[16 + i] >> sub & 1) << 4; break;
            case Q6_K: {
                // two halves of 128: 64 low bytes, 32 high bytes; four stretches of 32
                int half = sub / 4, part = sub % 4;
                int low = b[half * 64 + part % 2 * 32 + i] >> (part / 2 * 4) & 15;
                int high = b[128 + half * 32 + i] >> (2 * part) & 3;
                q[i] = (low | high << 4) - 32;
            }
        }
    }
}

static void interleave(const uint8_t q[8][32], int bits, uint8_t *to) {
    for (int i = 0; i < 16; i++)
        for (int row = 0; row < 8; row++) {
            uint8_t *at = to + i / 4 * 32 + row * 4 + i % 4;
            if (bits == 4) *at = q[row][i] | q[row][i + 16] << 4;
            else at[0] = q[row][i], at[128] = q[row][i + 16];
        }
}

static void scales_to(Type type, const uint8_t *b, int sub, int row, uint8_t *to) {
    switch (type) {
        case Q4_0: case Q8_0: case Q5_0: memcpy(to + 2 * row, b, 2); break;
        case Q4_1: case Q5_1: memcpy(to + 2 * row, b, 2), memcpy(to + 16 + 2 * row, b + 2, 2); break;
        case Q4_K: case Q5_K: scale_and_minimum(b + 4, sub, to + row, to + 8 + row); break;
        case Q6_K: to[row] = b[192 + 2 * sub], to[8 + row] = b[192 + 2 * sub + 1];
    }
}

typedef struct {
    int type;
    const uint8_t *from;
    long rows, columns, row_bytes;
    uint8_t *to;
} Pack;

static long packed_panel(Type type, long columns) {
    long bits = type <= Q4_K ? 4 : 8, head = type == Q4_K || type == Q5_K ? 32 : type == Q6_K ? 16 : 0;
    long scales = type == Q4_1 || type == Q5_1 ? 32 : 16;
    return columns / BLOCK * (bits * 32 + scales) + columns / 256 * head;
}

static void pack_kernel(const void *arguments, const Crew *crew) {
    const Pack *a = arguments;
    long panels = (a->rows + PANEL - 1) / PANEL, first, end;
    int wide = type_columns(a->type), subs = wide / BLOCK, bits = a->type <= Q4_K ? 4 : 8;
    long head = packed_panel(a->type, 256) - packed_panel(a->type, 32) * 8;
    long scales = a->type == Q4_1 || a->type == Q5_1 ? 32 : 16;
    while (take(crew, panels, share(crew, panels, 4), &first, &end))
        for (long p = first; p < end; p++) {
            uint8_t *to = a->to + p * packed_panel(a->type, a->columns);
            memset(to, 0, packed_panel(a->type, a->columns));
            long height = a->rows - p * PANEL < PANEL ? a->rows - p * PANEL : PANEL;
            for (long b = 0; b < a->columns / wide; b++) {
                const uint8_t *from = a->from + p * PANEL * a->row_bytes + b * type_bytes(a->type);
                for (long row = 0; row < height && wide == 256; row++) {
                    const uint8_t *block = from + row * a->row_bytes;
                    memcpy(to + 2 * row, block + (a->type == Q6_K ? 208 : 0), 2);
                    if (a->type != Q6_K) memcpy(to + 16 + 2 * row, block + 2, 2);
                }
                to += wide == 256 ? head : 0;
                for (int sub = 0; sub < subs; sub++, to += bits * 32 + scales) {
                    uint8_t q[8][32] = {{0}};
                    for (long row = 0; row < height; row++) {
                        numbers_of(a->type, from + row * a->row_bytes, sub, q[row]);
                        scales_to(a->type, from + row * a->row_bytes, sub, row, to + bits * 32);
                    }
                    interleave(q, bits, to);
                }
            }
        }
}

// Bytes that `native_pack` writes; 0 where the columns are not whole blocks.
long native_packed_bytes(int type, long rows, long columns) {
    if (columns % type_columns(type)) return 0;
    return (rows + PANEL - 1) / PANEL * packed_panel(type, columns);
}

// from: `rows` rows of blocks, `row_bytes` apart, the first `columns` of each wanted.
void native_pack(int type, const uint8_t *from, long rows, long columns, long row_bytes, uint8_t *to) {
    Pack a = {type, from, rows, columns, row_bytes, to};
    issue(pack_kernel, &a, sizeof a, (double)rows * columns);
}
