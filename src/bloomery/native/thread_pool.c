// The thread pool, and traces: operations recorded once and replayed with nothing between them.
//
// A waiting thread polls for a few microseconds, then sleeps: it must not take a core from the
// process that serves HTTP. The same holds between the operations of a trace.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "native.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define MAX_THREADS 64
#define POLLS 3000             // before a waiting thread sleeps
#define INLINE_WORK_NS 4000.0  // work below this costs less than waking the other threads
#define MAX_ARGUMENT_BYTES 256

typedef struct {
    Kernel *kernel;
    double work;
    _Alignas(16) char arguments[MAX_ARGUMENT_BYTES];
} Operation;

typedef struct {
    Operation *operations;
    long count, capacity;
} Trace;

typedef struct {
    ThreadPool *pool;
    int thread;
} ThreadStart;

struct ThreadPool {
    int num_threads;
    pthread_t handles[MAX_THREADS];
    ThreadStart starts[MAX_THREADS];
    char *scratch[MAX_THREADS];
    size_t scratch_bytes, shared_bytes;
    char *shared;
    pthread_mutex_t run_lock;  // held while operations run: one job at a time, memory stays put

    // the current job
    const Operation *operations;
    long count;
    _Alignas(64) atomic_uint jobs;      // counts jobs; a change starts one
    _Alignas(64) atomic_uint finished;  // counts operations that all threads have finished
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_long cursor;
    _Alignas(64) atomic_int sleepers;
    atomic_bool closing;
    atomic_int lost;
    pthread_mutex_t sleep_lock;
    pthread_cond_t changed;
};

static _Thread_local Trace *recording;  // the trace that this thread records, or NULL

static void wait_for_change(ThreadPool *pool, atomic_uint *counter, unsigned old) {
    for (int i = 0; i < POLLS; i++) {
        if (atomic_load_explicit(counter, memory_order_acquire) != old) return;
        cpu_relax();
    }
    pthread_mutex_lock(&pool->sleep_lock);
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(counter) == old) pthread_cond_wait(&pool->changed, &pool->sleep_lock);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->sleep_lock);
}

static void announce_change(ThreadPool *pool, atomic_uint *counter) {
    atomic_fetch_add(counter, 1);
    if (atomic_load(&pool->sleepers)) {
        pthread_mutex_lock(&pool->sleep_lock);
        pthread_cond_broadcast(&pool->changed);
        pthread_mutex_unlock(&pool->sleep_lock);
    }
}

static ThreadContext context_of(ThreadPool *pool, int thread, int num_threads) {
    return (ThreadContext){pool,        thread, num_threads, &pool->cursor, pool->scratch[thread],
                           pool->shared};
}

// Every thread runs all operations of the job. No thread begins an operation before all threads
// have ended the one before it.
static void run_job(ThreadPool *pool, int thread) {
    ThreadContext ctx = context_of(pool, thread, pool->num_threads);
    const Operation *operations = pool->operations;
    // Read now: the next job may be set up while this thread is still leaving its last wait.
    long count = pool->count;
    for (long i = 0; i < count; i++) {
        const Operation *operation = &operations[i];
        unsigned before = atomic_load_explicit(&pool->finished, memory_order_relaxed);
        operation->kernel(operation->arguments, &ctx);
        int arrived = atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel);
        if (arrived == pool->num_threads - 1) {
            atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
            atomic_store_explicit(&pool->cursor, 0, memory_order_relaxed);
            announce_change(pool, &pool->finished);
        } else {
            wait_for_change(pool, &pool->finished, before);
        }
    }
}

static void *thread_main(void *argument) {
    ThreadStart *start = argument;
    ThreadPool *pool = start->pool;
    unsigned last_job = 0;
    for (;;) {
        wait_for_change(pool, &pool->jobs, last_job);
        last_job = atomic_load(&pool->jobs);
        if (atomic_load(&pool->closing)) return NULL;
        run_job(pool, start->thread);
    }
}

static void run_inline(ThreadPool *pool, const Operation *operations, long count) {
    ThreadContext ctx = context_of(pool, 0, 1);
    for (long i = 0; i < count; i++) {
        operations[i].kernel(operations[i].arguments, &ctx);
        atomic_store_explicit(&pool->cursor, 0, memory_order_relaxed);
    }
}

static void run(ThreadPool *pool, const Operation *operations, long count) {
    double work = 0;
    for (long i = 0; i < count && work < INLINE_WORK_NS; i++) work += operations[i].work;
    pthread_mutex_lock(&pool->run_lock);
    if (pool->num_threads <= 1 || work < INLINE_WORK_NS) {
        run_inline(pool, operations, count);
    } else {
        pool->operations = operations;
        pool->count = count;
        announce_change(pool, &pool->jobs);
        run_job(pool, 0);
    }
    pthread_mutex_unlock(&pool->run_lock);
}

// ---- life of a pool ----------------------------------------------------------------------------

// The calling thread is one of the threads. The pool may have fewer threads than asked for, if the
// system refuses more.
ThreadPool *pool_create(int num_threads) {
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    if (num_threads < 1) num_threads = 1;
    void *memory = NULL;
    if (posix_memalign(&memory, 64, sizeof(ThreadPool))) abort();
    memset(memory, 0, sizeof(ThreadPool));
    ThreadPool *pool = memory;
    pthread_mutex_init(&pool->run_lock, NULL);
    pthread_mutex_init(&pool->sleep_lock, NULL);
    pthread_cond_init(&pool->changed, NULL);
    pool->num_threads = num_threads;
    reserve_scratch(pool, 1 << 16);
    for (int i = 1; i < num_threads; i++) {
        pool->starts[i] = (ThreadStart){pool, i};
        if (pthread_create(&pool->handles[i], NULL, thread_main, &pool->starts[i])) {
            pool->num_threads = i;  // safe: no job has been given out yet
            break;
        }
    }
    return pool;
}

void pool_destroy(ThreadPool *pool) {
    atomic_store(&pool->closing, true);
    announce_change(pool, &pool->jobs);
    for (int i = 1; i < pool->num_threads; i++) pthread_join(pool->handles[i], NULL);
    for (int i = 0; i < MAX_THREADS; i++) free(pool->scratch[i]);
    free(pool->shared);
    pthread_cond_destroy(&pool->changed);
    pthread_mutex_destroy(&pool->sleep_lock);
    pthread_mutex_destroy(&pool->run_lock);
    free(pool);
}

int pool_num_threads(const ThreadPool *pool) { return pool->num_threads; }
void mark_rank_lost(ThreadPool *pool, int rank) { atomic_store(&pool->lost, rank + 1); }
int lost_rank(ThreadPool *pool) { return atomic_load(&pool->lost); }

// ---- working memory ----------------------------------------------------------------------------
// Kernels look up scratch and shared memory when they run, not when they are recorded. So traces
// stay valid when the memory grows.

static char *reallocate(char *old, size_t bytes) {
    free(old);
    void *fresh = NULL;
    if (posix_memalign(&fresh, 64, (bytes + 63) / 64 * 64)) {
        fprintf(stderr, "bloomery: no memory for %zu bytes of working space\n", bytes);
        abort();
    }
    return fresh;
}

void reserve_scratch(ThreadPool *pool, size_t bytes) {
    pthread_mutex_lock(&pool->run_lock);
    if (bytes > pool->scratch_bytes) {
        for (int i = 0; i < pool->num_threads; i++)
            pool->scratch[i] = reallocate(pool->scratch[i], bytes);
        pool->scratch_bytes = bytes;
    }
    pthread_mutex_unlock(&pool->run_lock);
}

void reserve_shared(ThreadPool *pool, size_t bytes) {
    pthread_mutex_lock(&pool->run_lock);
    if (bytes > pool->shared_bytes) {
        pool->shared = reallocate(pool->shared, bytes);
        pool->shared_bytes = bytes;
    }
    pthread_mutex_unlock(&pool->run_lock);
}

// Asks for huge pages: fewer TLB misses while weights stream by. The system may ignore it.
void advise_huge_pages(void *start, long bytes) {
#if defined(MADV_HUGEPAGE)
    if (madvise(start, bytes, MADV_HUGEPAGE)) return;
#else
    (void)start, (void)bytes;
#endif
}

// ---- operations --------------------------------------------------------------------------------

static Operation make_operation(Kernel *kernel, const void *arguments, size_t size, double work) {
    Operation operation = {.kernel = kernel, .work = work};
    if (size > MAX_ARGUMENT_BYTES) abort();
    memcpy(operation.arguments, arguments, size);
    return operation;
}

static void append(Trace *trace, Operation operation) {
    if (trace->count == trace->capacity) {
        trace->capacity = trace->capacity ? 2 * trace->capacity : 256;
        Operation *larger;
        if (posix_memalign((void **)&larger, 64, trace->capacity * sizeof(Operation))) abort();
        if (trace->count) memcpy(larger, trace->operations, trace->count * sizeof(Operation));
        free(trace->operations);
        trace->operations = larger;
    }
    trace->operations[trace->count++] = operation;
}

void issue(ThreadPool *pool, Kernel *kernel, const void *arguments, size_t size, double work) {
    Operation operation = make_operation(kernel, arguments, size, work);
    if (recording) append(recording, operation);
    else run(pool, &operation, 1);
}

void issue_pair(ThreadPool *pool, Kernel *first, double first_work, Kernel *second,
                double second_work, const void *arguments, size_t size) {
    Operation pair[] = {make_operation(first, arguments, size, first_work),
                        make_operation(second, arguments, size, second_work)};
    if (recording) {
        append(recording, pair[0]);
        append(recording, pair[1]);
    } else {
        run(pool, pair, 2);
    }
}

// ---- traces ------------------------------------------------------------------------------------

void trace_begin(void) { recording = calloc(1, sizeof(Trace)); }

Trace *trace_end(void) {
    Trace *trace = recording;
    recording = NULL;
    return trace;
}

// Returns lost_rank: the results are invalid where another process did not answer.
int trace_run(ThreadPool *pool, const Trace *trace) {
    run(pool, trace->operations, trace->count);
    return lost_rank(pool);
}

long trace_length(const Trace *trace) { return trace->count; }

void trace_free(Trace *trace) {
    free(trace->operations);
    free(trace);
}
