// Declarations shared by all native CPU kernels: the thread pool, and how an operation is issued.
//
// Float code is written once, with the vector types of vectors.h. Only the products of small
// integers (panel_dots.h), conversions and a few functions of vectors.h use intrinsics, with plain
// loops as their portable form.
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

#if defined(__x86_64__)
#define cpu_relax() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define cpu_relax() __asm__ volatile("yield")
#else
#define cpu_relax() ((void)0)
#endif

#define BLOCK 32  // columns with one scale, in weights and in activations
#define PANEL WIDE_LANES  // rows of a matrix that are stored interleaved

// ---- thread pool -------------------------------------------------------------------------------
// An operation runs on all threads of its pool and begins when the operation before it has ended.
// While the calling thread records a trace, an operation is appended to the trace and not run.

typedef struct ThreadPool ThreadPool;

typedef struct {
    ThreadPool *pool;
    int thread;  // 0 .. num_threads - 1; the calling thread is number 0
    int num_threads;
    atomic_long *cursor;
    char *scratch;       // memory of this thread alone
    const char *shared;  // memory that the first operation of a pair fills for the second
} ThreadContext;

typedef void Kernel(const void *arguments, const ThreadContext *ctx);

// Runs or records an operation. `work` estimates its cost in nanoseconds of one thread: a cheap
// operation does not wake the other threads.
void issue(ThreadPool *pool, Kernel *kernel, const void *arguments, size_t size, double work);
// Issues two operations on the same arguments. The second reads what the first left in the shared
// memory; no other operation runs between them.
void issue_pair(ThreadPool *pool, Kernel *first, double first_work, Kernel *second,
                double second_work, const void *arguments, size_t size);
void reserve_shared(ThreadPool *pool, size_t bytes);   // grows the shared memory if needed
void reserve_scratch(ThreadPool *pool, size_t bytes);  // grows the scratch memory of every thread
int pool_num_threads(const ThreadPool *pool);

// Marks another process, on which operations wait, as dead. Waiting operations then return at once.
void mark_rank_lost(ThreadPool *pool, int rank);
int lost_rank(ThreadPool *pool);  // the dead rank plus one; 0 while all are alive

// Takes the next `chunk` of `total` units as [first, end); false when none are left.
static inline bool next_chunk(const ThreadContext *ctx, long total, long chunk, long *first,
                              long *end) {
    *first = atomic_fetch_add_explicit(ctx->cursor, chunk, memory_order_relaxed);
    *end = *first + chunk < total ? *first + chunk : total;
    return *first < total;
}

// The chunk with which each thread takes about `rounds` chunks: this balances uneven units.
static inline long chunk_size(const ThreadContext *ctx, long total, int rounds) {
    long chunk = total / ((long)ctx->num_threads * rounds);
    return chunk < 1 ? 1 : chunk;
}

// Like next_chunk, with chunks that become smaller towards the end: threads go through long
// stretches of memory, and end together. Each thread takes about one chunk of every size.
static inline bool next_shrinking_chunk(const ThreadContext *ctx, long total, long *first,
                                        long *end) {
    long chunk = atomic_fetch_add_explicit(ctx->cursor, 1, memory_order_relaxed), start = 0;
    long size = total / (2L * ctx->num_threads);
    for (; size > 1 && chunk >= ctx->num_threads; chunk -= ctx->num_threads) {
        start += size * ctx->num_threads;
        size = (total - start) / (2L * ctx->num_threads);
    }
    if (size < 1) size = 1;
    *first = start + chunk * size;
    *end = *first + size;
    return *first < total;
}

// ---- norms, on their own and as the prologue of a linear layer ---------------------------------

typedef struct {
    int kind;  // 0 none, 1 RMS norm, 2 layer norm
    float eps;
    const float *weight, *bias;  // may be NULL
} Norm;

void norm_row(const float *x, float *y, long n, const Norm *norm);
