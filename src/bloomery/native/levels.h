// The values that 4-bit codes select, as signed bytes. A weight is such a value times a scale.
#pragma once
#include <stdint.h>

// Twice the values of a 4-bit float with two bits of exponent (E2M1).
static const int8_t FP4_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// GGUF's IQ4_NL and IQ4_XS.
static const int8_t IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
// The values of NF4, quantiles of the normal distribution from -1 to 1, times 112 and rounded: of the
// factors that fit a byte this is the one that changes the values least, by 0.3 % in the mean.
static const int8_t NF4_LEVELS[16] = {-112, -78, -59, -44, -32, -21, -10, 0,
                                      9,    18,  28,  38,  49,  63,  81,  112};
