// Threads that wait for operations, and programs: operations written down once and replayed with nothing between them.
//
// A waiting thread looks again for a few microseconds, then sleeps: it must not take a core from the process that
// serves HTTP. The same holds between the operations of a program.
#define _GNU_SOURCE
#include "native.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define MOST_THREADS 64
#define LOOKS 3000      // before a waiting thread sleeps
#define ALONE 4000.0    // nanoseconds of work that do not pay for waking others
#define ROOM 256        // bytes of an operation's arguments

typedef struct {
    Kernel *kernel;
    double work;
    _Alignas(16) char arguments[ROOM];
} Operation;

typedef struct {
    Operation *operations;
    long count, room;
} Program;

static struct {
    int threads;
    pthread_t handles[MOST_THREADS];
    char *scratch[MOST_THREADS];
    size_t scratch_size, common_size;
    char *common;
    pthread_mutex_t turn;  // held while operations run: one job at a time, and no space is moved under it

    // the job at hand
    const Operation *operations;
    long count;
    _Alignas(64) atomic_uint jobs;      // counts jobs; a change starts one
    _Alignas(64) atomic_uint finished;  // counts operations finished by all
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_long cursor;
    _Alignas(64) atomic_int sleepers;
    atomic_bool closing;
    atomic_int lost;
    pthread_mutex_t lock;
    pthread_cond_t news;
} team = {.turn = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .news = PTHREAD_COND_INITIALIZER};

static _Thread_local Program *recording;  // what this thread is writing down

static void await_change(atomic_uint *word, unsigned old) {
    for (int i = 0; i < LOOKS; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != old) return;
        relax();
    }
    pthread_mutex_lock(&team.lock);
    atomic_fetch_add(&team.sleepers, 1);
    while (atomic_load(word) == old) pthread_cond_wait(&team.news, &team.lock);
    atomic_fetch_sub(&team.sleepers, 1);
    pthread_mutex_unlock(&team.lock);
}

static void announce(atomic_uint *word) {
    atomic_fetch_add(word, 1);
    if (atomic_load(&team.sleepers)) {
        pthread_mutex_lock(&team.lock);
        pthread_cond_broadcast(&team.news);
        pthread_mutex_unlock(&team.lock);
    }
}

static Crew crew_of(int thread, int threads) {
    return (Crew){thread, threads, &team.cursor, team.scratch[thread], team.common};
}

// Every thread goes through all operations; nobody begins one before everybody has ended the last.
static void work_through(int thread) {
    Crew crew = crew_of(thread, team.threads);
    const Operation *operations = team.operations;
    long count = team.count;  // read now: the next job may be set up while this thread is still leaving its last wait
    for (long i = 0; i < count; i++) {
        const Operation *operation = &operations[i];
        unsigned before = atomic_load_explicit(&team.finished, memory_order_relaxed);
        operation->kernel(operation->arguments, &crew);
        if (atomic_fetch_add_explicit(&team.arrived, 1, memory_order_acq_rel) == team.threads - 1) {
            atomic_store_explicit(&team.arrived, 0, memory_order_relaxed);
            atomic_store_explicit(&team.cursor, 0, memory_order_relaxed);
            announce(&team.finished);
        } else {
            await_change(&team.finished, before);
        }
    }
}

static void *member(void *number) {
    int thread = (int)(intptr_t)number;
    unsigned seen = 0;
    for (;;) {
        await_change(&team.jobs, seen);
        seen = atomic_load(&team.jobs);
        if (atomic_load(&team.closing)) return NULL;
        work_through(thread);
    }
}

static void work_alone(const Operation *operations, long count) {
    Crew crew = crew_of(0, 1);
    for (long i = 0; i < count; i++) {
        operations[i].kernel(operations[i].arguments, &crew);
        atomic_store_explicit(&team.cursor, 0, memory_order_relaxed);
    }
}

static void run(const Operation *operations, long count) {
    double work = 0;
    for (long i = 0; i < count && work < ALONE; i++) work += operations[i].work;
    pthread_mutex_lock(&team.turn);
    if (team.threads <= 1 || work < ALONE) {
        work_alone(operations, count);
    } else {
        team.operations = operations;
        team.count = count;
        announce(&team.jobs);
        work_through(0);
    }
    pthread_mutex_unlock(&team.turn);
}

void team_stop(void) {
    if (team.threads > 1) {
        atomic_store(&team.closing, true);
        announce(&team.jobs);
        for (int i = 1; i < team.threads; i++) pthread_join(team.handles[i], NULL);
    }
    team.threads = 0;
}

// Returns how many threads there are, which may be fewer than wanted. The caller is one of them.
int team_start(int threads) {
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads < 1) threads = 1;
    if (threads == team.threads) return threads;
    team_stop();
    atomic_store(&team.jobs, 0);
    atomic_store(&team.closing, false);
    team.threads = threads;
    scratch_space(1 << 16);
    for (int i = 1; i < threads; i++) {
        if (pthread_create(&team.handles[i], NULL, member, (void *)(intptr_t)i)) {
            team.threads = i;  // nobody has been given work yet
            break;
        }
    }
    return team.threads;
}

int team_size(void) { return team.threads; }
void lose(int member) { atomic_store(&team.lost, member + 1); }
int lost(void) { return atomic_load(&team.lost); }

static char *grown(char *old, size_t bytes) {
    free(old);
    void *fresh = NULL;
    if (posix_memalign(&fresh, 64, (bytes + 63) / 64 * 64)) {
        fprintf(stderr, "bloomery: no memory for %zu bytes of working space\n", bytes);
        abort();
    }
    return fresh;
}

// Both are looked up when an operation runs, never when it is written down: growing them leaves programs valid.
void scratch_space(size_t bytes) {
    pthread_mutex_lock(&team.turn);
    if (bytes < team.scratch_size) bytes = team.scratch_size;
    for (int i = 0; i < team.threads; i++)
        if (bytes > team.scratch_size || !team.scratch[i]) team.scratch[i] = grown(team.scratch[i], bytes);
    team.scratch_size = bytes;
    pthread_mutex_unlock(&team.turn);
}

void common_space(size_t bytes) {
    pthread_mutex_lock(&team.turn);
    if (bytes > team.common_size) {
        team.common = grown(team.common, bytes);
        team.common_size = bytes;
    }
    pthread_mutex_unlock(&team.turn);
}

static Operation operation_of(Kernel *kernel, const void *arguments, size_t size, double work) {
    Operation operation = {.kernel = kernel, .work = work};
    if (size > ROOM) abort();
    memcpy(operation.arguments, arguments, size);
    return operation;
}

static void write_down(Program *program, Operation operation) {
    if (program->count == program->room) {
        program->room = program->room ? 2 * program->room : 256;
        Operation *more;
        if (posix_memalign((void **)&more, 64, program->room * sizeof(Operation))) abort();
        if (program->count) memcpy(more, program->operations, program->count * sizeof(Operation));
        free(program->operations);
        program->operations = more;
    }
    program->operations[program->count++] = operation;
}

void issue(Kernel *kernel, const void *arguments, size_t size, double work) {
    Operation operation = operation_of(kernel, arguments, size, work);
    if (recording) write_down(recording, operation);
    else run(&operation, 1);
}

void issue_pair(Kernel *first, double first_work, Kernel *second, double second_work, const void *arguments, size_t size) {
    Operation pair[] = {operation_of(first, arguments, size, first_work), operation_of(second, arguments, size, second_work)};
    if (recording) write_down(recording, pair[0]), write_down(recording, pair[1]);
    else run(pair, 2);
}

// Asks for large pages: fewer look-ups of addresses while weights stream by. A wish, no more.
void large_pages(void *start, long bytes) {
#if defined(MADV_HUGEPAGE)
    if (madvise(start, bytes, MADV_HUGEPAGE)) return;
#else
    (void)start, (void)bytes;
#endif
}

// ---- programs ------------------------------------------------------------------------------------------------------

void record_begin(void) { recording = calloc(1, sizeof(Program)); }

Program *record_end(void) {
    Program *program = recording;
    recording = NULL;
    return program;
}

// Gives what `lost` says: results mean nothing where another process did not answer.
int program_run(const Program *program) {
    run(program->operations, program->count);
    return lost();
}

long program_length(const Program *program) { return program->count; }

void program_free(Program *program) {
    free(program->operations);
    free(program);
}
