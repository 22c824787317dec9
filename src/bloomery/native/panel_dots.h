// Dot products of small integers: the codes of weights in panels times rounded activations.
//
// Each processor has its own instructions for them, and the number of rows in a panel follows from
// their width. gemm.c is written with the types and functions of this file.
#pragma once
#include "native.h"

// Parts of eight bits in a rounded activation. A second one makes the products of a prompt half as
// fast on registers of 256 bits; with 512 bits both are as fast as one was with 256.
#if PANEL == 16
#define PLANES 2
#define LARGEST_ACTIVATION (127 * 128)
#else
#define PLANES 1
#define LARGEST_ACTIVATION 127
#endif

static inline int32_t four_columns(const int8_t *at) {
    int32_t x;
    memcpy(&x, at, 4);
    return x;
}

#if PANEL == 16
// ---- AVX-512: 16 sums in a register ------------------------------------------------------------

typedef __m512i PanelInts;
#define UNSIGNED_CODES  // the first factor is unsigned: codes of eight bits are raised by 128


static inline WideFloats load_halfs(const uint8_t *at) {
    return (WideFloats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
}

static inline WideFloats load_bfloats(const uint8_t *at) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
    return (WideFloats)_mm512_slli_epi32(wide, 16);
}

static inline WideFloats load_unsigned(const uint8_t *at) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)at);
    return (WideFloats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

static inline WideFloats load_signed(const uint8_t *at) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)at);
    return (WideFloats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

INLINE void dots_4bit(const uint8_t *w, const int8_t *const *x, const int count,
                      PanelInts *sum) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int r = 0; r < count; r++) sum[r] = _mm512_setzero_si512();
    for (int j = 0; j < 4; j++) {
        __m512i both = _mm512_loadu_si512(w + 64 * j), first = _mm512_and_si512(both, low);
        __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        for (int r = 0; r < count; r++) {
            __m512i a = _mm512_set1_epi32(four_columns(x[r] + 4 * j));
            __m512i b = _mm512_set1_epi32(four_columns(x[r] + 16 + 4 * j));
            sum[r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum[r], first, a), second, b);
        }
    }
}

// Like dots_4bit, with codes that select one of 16 signed bytes, raised by 128.
INLINE void dots_levels(const uint8_t *w, const int8_t *levels, const int8_t *const *x,
                        const int count, PanelInts *sum) {
    const __m512i low = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(-128);
    const __m128i row = _mm_loadu_si128((const __m128i *)levels);
    const __m512i table = _mm512_xor_si512(_mm512_broadcast_i32x4(row), offset);
    for (int r = 0; r < count; r++) sum[r] = _mm512_setzero_si512();
    for (int j = 0; j < 4; j++) {
        __m512i both = _mm512_loadu_si512(w + 64 * j), left = _mm512_and_si512(both, low);
        __m512i right = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        __m512i first = _mm512_shuffle_epi8(table, left);
        __m512i second = _mm512_shuffle_epi8(table, right);
        for (int r = 0; r < count; r++) {
            __m512i a = _mm512_set1_epi32(four_columns(x[r] + 4 * j));
            __m512i b = _mm512_set1_epi32(four_columns(x[r] + 16 + 4 * j));
            sum[r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum[r], first, a), second, b);
        }
    }
}

INLINE void dots_8bit(const uint8_t *w, const int8_t *const *x, long column, const int count,
                      PanelInts *sum) {
    const __m512i offset = _mm512_set1_epi8(-128);
    for (int r = 0; r < count; r++) sum[r] = _mm512_setzero_si512();
    for (int j = 0; j < 4; j++) {
        __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(w + PANEL * column + 64 * j), offset);
        for (int r = 0; r < count; r++) {
            __m512i a = _mm512_set1_epi32(four_columns(x[r] + column + 4 * j));
            sum[r] = _mm512_dpbusd_epi32(sum[r], codes, a);
        }
    }
}

static inline PanelInts times_128(PanelInts x) { return _mm512_slli_epi32(x, 7); }
static inline PanelInts add_ints(PanelInts a, PanelInts b) { return _mm512_add_epi32(a, b); }
static inline PanelInts broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }
static inline WideFloats to_floats(PanelInts x) { return (WideFloats)_mm512_cvtepi32_ps(x); }

#else
// ---- eight rows: scales as everywhere ----------------------------------------------------------

static inline WideFloats load_halfs(const uint8_t *at) { return load_half8(at); }
static inline WideFloats load_bfloats(const uint8_t *at) { return load_bfloat8(at); }
static inline WideFloats load_unsigned(const uint8_t *at) { return load_bytes8(at); }
static inline WideFloats load_signed(const uint8_t *at) { return load_signed8(at); }

#if defined(__AVX2__)
// ---- AVX2 --------------------------------------------------------------------------------------

typedef __m256i PanelInts;  // eight sums

#if defined(__AVXVNNI__)
#define dot_bytes(sum, codes, x) _mm256_dpbusd_avx_epi32(sum, codes, x)
#endif

// Computes the sum now: otherwise compilers delay the additions until registers run out.
#define force_now(x) __asm__("" : "+x"(x))

static inline __m256i broadcast_columns(const int8_t *at) {
    return _mm256_set1_epi32(four_columns(at));
}

// Multiplies the 32 columns of a 4-bit block with `count` rows; the codes are unpacked once for all
// rows. Without VNNI the sums of products stay below 8 * 2 * 15 * 127, so they fit in 16 bits.
INLINE void dots_4bit(const uint8_t *w, const int8_t *const *x, const int count,
                      PanelInts *sum) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int r = 0; r < count; r++) sum[r] = _mm256_setzero_si256();
    for (int j = 0; j < 4; j++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(w + 32 * j));
        __m256i first = _mm256_and_si256(both, low);
        __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        for (int r = 0; r < count; r++) {
            __m256i a = broadcast_columns(x[r] + 4 * j), b = broadcast_columns(x[r] + 16 + 4 * j);
#if defined(dot_bytes)
            sum[r] = dot_bytes(dot_bytes(sum[r], first, a), second, b);
#else
            __m256i products =
                _mm256_add_epi16(_mm256_maddubs_epi16(first, a), _mm256_maddubs_epi16(second, b));
            sum[r] = _mm256_add_epi16(sum[r], products);
#endif
            force_now(sum[r]);
        }
    }
#if !defined(dot_bytes)
    for (int r = 0; r < count; r++) sum[r] = _mm256_madd_epi16(sum[r], _mm256_set1_epi16(1));
#endif
}

// Adds products of signed codes with x. The instructions take an unsigned first factor: with VNNI the
// codes are raised by 128, without it their signs move to the second factor.
#if defined(dot_bytes)
#define UNSIGNED_CODES
static inline __m256i raise_codes(__m256i codes) {
    return _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
}
static inline __m256i dot_codes(__m256i sum, __m256i raised, __m256i x) {
    return dot_bytes(sum, raised, x);
}
#else
static inline __m256i raise_codes(__m256i codes) { return codes; }
static inline __m256i dot_codes(__m256i sum, __m256i codes, __m256i x) {
    __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}
#endif

// Like dots_4bit, with codes that select one of 16 signed bytes.
INLINE void dots_levels(const uint8_t *w, const int8_t *levels, const int8_t *const *x,
                        const int count, PanelInts *sum) {
    const __m256i low = _mm256_set1_epi8(15);
    const __m128i row = _mm_loadu_si128((const __m128i *)levels);
    const __m256i table = raise_codes(_mm256_broadcastsi128_si256(row));
    for (int r = 0; r < count; r++) sum[r] = _mm256_setzero_si256();
    for (int j = 0; j < 4; j++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(w + 32 * j));
        __m256i left = _mm256_and_si256(both, low);
        __m256i right = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        __m256i first = _mm256_shuffle_epi8(table, left);
        __m256i second = _mm256_shuffle_epi8(table, right);
        for (int r = 0; r < count; r++) {
            sum[r] = dot_codes(sum[r], first, broadcast_columns(x[r] + 4 * j));
            sum[r] = dot_codes(sum[r], second, broadcast_columns(x[r] + 16 + 4 * j));
            force_now(sum[r]);
        }
    }
}

// Multiplies 16 columns of 8 bits with `count` rows.
INLINE void dots_8bit(const uint8_t *w, const int8_t *const *x, long column, const int count,
                      PanelInts *sum) {
    for (int r = 0; r < count; r++) sum[r] = _mm256_setzero_si256();
    for (int j = 0; j < 4; j++) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(w + PANEL * column + 32 * j));
        __m256i codes = raise_codes(a);
        for (int r = 0; r < count; r++) {
            sum[r] = dot_codes(sum[r], codes, broadcast_columns(x[r] + column + 4 * j));
            force_now(sum[r]);
        }
    }
}

static inline PanelInts times_128(PanelInts x) { return _mm256_slli_epi32(x, 7); }
static inline PanelInts add_ints(PanelInts a, PanelInts b) { return _mm256_add_epi32(a, b); }
static inline PanelInts broadcast_int(int32_t x) { return _mm256_set1_epi32(x); }
static inline WideFloats to_floats(PanelInts x) { return (WideFloats)_mm256_cvtepi32_ps(x); }

#elif defined(__aarch64__)
// ---- NEON --------------------------------------------------------------------------------------

typedef struct {
    int32x4_t low, high;  // rows 0 .. 3 and 4 .. 7
} PanelInts;

// Adds the products of four columns of four rows (16 bytes, row by row) with four columns of x,
// which `x` repeats for each row.
static inline int32x4_t dot_columns(int32x4_t sum, int8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sum, w, x);
#else
    int16x8_t left = vmull_s8(vget_low_s8(w), vget_low_s8(x)), right = vmull_high_s8(w, x);
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(left), vpaddlq_s16(right)));
#endif
}

static inline int8x16_t broadcast_columns(const int8_t *at) {
    return vreinterpretq_s8_s32(vdupq_n_s32(four_columns(at)));
}

INLINE void dots_4bit(const uint8_t *w, const int8_t *const *x, const int count,
                      PanelInts *sum) {
    const uint8x16_t nibble = vdupq_n_u8(15);
    for (int r = 0; r < count; r++) sum[r] = (PanelInts){vdupq_n_s32(0), vdupq_n_s32(0)};
    for (int j = 0; j < 4; j++) {
        uint8x16_t low = vld1q_u8(w + 32 * j), high = vld1q_u8(w + 32 * j + 16);
        int8x16_t first_low = vreinterpretq_s8_u8(vandq_u8(low, nibble)),
                  first_high = vreinterpretq_s8_u8(vandq_u8(high, nibble)),
                  second_low = vreinterpretq_s8_u8(vshrq_n_u8(low, 4)),
                  second_high = vreinterpretq_s8_u8(vshrq_n_u8(high, 4));
        for (int r = 0; r < count; r++) {
            int8x16_t a = broadcast_columns(x[r] + 4 * j), b = broadcast_columns(x[r] + 16 + 4 * j);
            sum[r].low = dot_columns(dot_columns(sum[r].low, first_low, a), second_low, b);
            sum[r].high = dot_columns(dot_columns(sum[r].high, first_high, a), second_high, b);
        }
    }
}

// Like dots_4bit, with codes that select one of 16 signed bytes.
INLINE void dots_levels(const uint8_t *w, const int8_t *levels, const int8_t *const *x,
                        const int count, PanelInts *sum) {
    const uint8x16_t nibble = vdupq_n_u8(15);
    const int8x16_t table = vld1q_s8(levels);
    for (int r = 0; r < count; r++) sum[r] = (PanelInts){vdupq_n_s32(0), vdupq_n_s32(0)};
    for (int j = 0; j < 4; j++) {
        uint8x16_t low = vld1q_u8(w + 32 * j), high = vld1q_u8(w + 32 * j + 16);
        int8x16_t first_low = vqtbl1q_s8(table, vandq_u8(low, nibble)),
                  first_high = vqtbl1q_s8(table, vandq_u8(high, nibble)),
                  second_low = vqtbl1q_s8(table, vshrq_n_u8(low, 4)),
                  second_high = vqtbl1q_s8(table, vshrq_n_u8(high, 4));
        for (int r = 0; r < count; r++) {
            int8x16_t a = broadcast_columns(x[r] + 4 * j), b = broadcast_columns(x[r] + 16 + 4 * j);
            sum[r].low = dot_columns(dot_columns(sum[r].low, first_low, a), second_low, b);
            sum[r].high = dot_columns(dot_columns(sum[r].high, first_high, a), second_high, b);
        }
    }
}

INLINE void dots_8bit(const uint8_t *w, const int8_t *const *x, long column, const int count,
                      PanelInts *sum) {
    const int8_t *codes = (const int8_t *)w + PANEL * column;
    for (int r = 0; r < count; r++) sum[r] = (PanelInts){vdupq_n_s32(0), vdupq_n_s32(0)};
    for (int j = 0; j < 4; j++) {
        int8x16_t low = vld1q_s8(codes + 32 * j), high = vld1q_s8(codes + 32 * j + 16);
        for (int r = 0; r < count; r++) {
            int8x16_t a = broadcast_columns(x[r] + column + 4 * j);
            sum[r].low = dot_columns(sum[r].low, low, a);
            sum[r].high = dot_columns(sum[r].high, high, a);
        }
    }
}

static inline PanelInts broadcast_int(int32_t x) {
    return (PanelInts){vdupq_n_s32(x), vdupq_n_s32(x)};
}
static inline PanelInts times_128(PanelInts x) {
    return (PanelInts){vshlq_n_s32(x.low, 7), vshlq_n_s32(x.high, 7)};
}
static inline PanelInts add_ints(PanelInts a, PanelInts b) {
    return (PanelInts){vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)};
}
static inline WideFloats to_floats(PanelInts x) {
    return join8(vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high));
}

#else
// ---- portable loops, which the compiler vectorizes ---------------------------------------------

typedef i32x8 PanelInts;

static inline PanelInts dot_four(PanelInts sum, const int8_t *w, const int8_t *x) {
    for (int row = 0; row < 8; row++)
        for (int i = 0; i < 4; i++) sum[row] += w[4 * row + i] * x[i];
    return sum;
}

INLINE void dots_4bit(const uint8_t *w, const int8_t *const *x, const int count,
                      PanelInts *sum) {
    for (int r = 0; r < count; r++) sum[r] = (PanelInts){0};
    for (int j = 0; j < 4; j++) {
        int8_t first[32], second[32];
        for (int i = 0; i < 32; i++) {
            first[i] = w[32 * j + i] & 15;
            second[i] = w[32 * j + i] >> 4;
        }
        for (int r = 0; r < count; r++)
            sum[r] = dot_four(dot_four(sum[r], first, x[r] + 4 * j), second, x[r] + 16 + 4 * j);
    }
}

// Like dots_4bit, with codes that select one of 16 signed bytes.
INLINE void dots_levels(const uint8_t *w, const int8_t *levels, const int8_t *const *x,
                        const int count, PanelInts *sum) {
    for (int r = 0; r < count; r++) sum[r] = (PanelInts){0};
    for (int j = 0; j < 4; j++) {
        int8_t first[32], second[32];
        for (int i = 0; i < 32; i++) {
            first[i] = levels[w[32 * j + i] & 15];
            second[i] = levels[w[32 * j + i] >> 4];
        }
        for (int r = 0; r < count; r++)
            sum[r] = dot_four(dot_four(sum[r], first, x[r] + 4 * j), second, x[r] + 16 + 4 * j);
    }
}

INLINE void dots_8bit(const uint8_t *w, const int8_t *const *x, long column, const int count,
                      PanelInts *sum) {
    const int8_t *codes = (const int8_t *)w + PANEL * column;
    for (int r = 0; r < count; r++) {
        sum[r] = (PanelInts){0};
        for (int j = 0; j < 4; j++)
            sum[r] = dot_four(sum[r], codes + 32 * j, x[r] + column + 4 * j);
    }
}

static inline PanelInts times_128(PanelInts x) { return x << 7; }
static inline PanelInts add_ints(PanelInts a, PanelInts b) { return a + b; }
static inline PanelInts broadcast_int(int32_t x) { return (PanelInts){x, x, x, x, x, x, x, x}; }
static inline WideFloats to_floats(PanelInts x) { return __builtin_convertvector(x, f32x8); }
#endif
#endif

// Undoes the raising of signed codes in a sum of products.
static inline PanelInts lower_codes(PanelInts x, int32_t offset) {
#if defined(UNSIGNED_CODES)
    return add_ints(x, broadcast_int(offset));
#else
    (void)offset;
    return x;
#endif
}

// Eight of the values, from `first` on.
static inline f32x8 part_of(const WideFloats *x, long first) {
    f32x8 part;
    memcpy(&part, (const float *)x + first, sizeof part);
    return part;
}
