// What the native kernels share: the thread team, and how an operation is issued.
//
// Float code is written once, with vectors.h. Only products of small integers name instructions (products.c), and keep
// plain loops beside them.
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

#if defined(__x86_64__)
#define relax() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define relax() __asm__ volatile("yield")
#else
#define relax() ((void)0)
#endif

#define BLOCK 32  // columns that share a scale, in weights and in activations
#define PANEL 8   // rows of a matrix that are stored interleaved

// ---- the team ------------------------------------------------------------------------------------------------------
// One team a process, for a machine has its cores but once. An operation runs on all threads of the team, and begins when
// the one before has ended; while the issuing thread records a program, it is written down instead.

typedef struct {
    int thread;   // of `threads`
    int threads;
    atomic_long *cursor;
    char *scratch;       // this thread's own
    const char *common;  // what the operation before left for this one
} Crew;

typedef void Kernel(const void *arguments, const Crew *crew);

// Runs or records. `work` is a guess in nanoseconds of one thread: little work does not wake the others.
void issue(Kernel *kernel, const void *arguments, size_t size, double work);
// Two on the same arguments, the second of what the first left in the common space: nobody else's comes between.
void issue_pair(Kernel *first, double first_work, Kernel *second, double second_work, const void *arguments, size_t size);
void common_space(size_t bytes);   // makes the space that one operation may fill for the next at least so large
void scratch_space(size_t bytes);  // the same for every thread's own
int team_size(void);

// Another process that operations wait for is gone: they go on at once, with nothing.
void lose(int member);
int lost(void);  // its number plus one; 0 while all are there

// The next `chunk` of `total` units that nobody has taken, as a first unit; false when there is none left.
static inline bool take(const Crew *crew, long total, long chunk, long *first, long *end) {
    *first = atomic_fetch_add_explicit(crew->cursor, chunk, memory_order_relaxed);
    *end = *first + chunk < total ? *first + chunk : total;
    return *first < total;
}

// Units a thread should take at once, so that each comes back a few times.
static inline long share(const Crew *crew, long total, int turns) {
    long chunk = total / ((long)crew->threads * turns);
    return chunk < 1 ? 1 : chunk;
}

// ---- norms, used on their own and before a product -----------------------------------------------------------------

typedef struct {
    int kind;  // 0 none, 1 rms, 2 layer
    float eps;
    const float *weight, *bias;  // may be NULL
} Norm;

void norm_row(const float *x, float *y, long n, const Norm *norm);
