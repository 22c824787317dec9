// Collectives between processes of one machine through shared memory: all-reduce, all-gather, and
// point-to-point channels; and the vocabulary shards of a tensor parallel embedding.
//
// A segment begins with one counter per member; slots follow. A member writes a slot, then
// increments its counter; a reader waits for that counter. Parts are added in the order of ranks,
// so all ranks get the same bits. The messages of a decode step are short, so one thread copies
// them.
//
// A waiting thread polls for some microseconds, then yields, then sleeps, because other programs
// need the cores too. Every member holds a lock on one byte of the segment's file. The system
// releases the lock when the process ends for any reason, so a wait for a dead member ends too.
#define _GNU_SOURCE
#include "native.h"

#include <stdlib.h>
#if defined(__linux__)
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#define POLLS 2000     // before a waiting thread yields
#define YIELDS 200     // before it sleeps
#define CHECK_ALIVE 1  // seconds of sleep before it checks whether the other process is alive
#define PAGE 4096

typedef struct {
    _Alignas(64) atomic_uint done;  // messages that this member has written, or read
    atomic_uint sleepers;           // processes that wait for it
} Counter;

typedef struct {
    Counter *counters;
    char *slots;
    long slot_bytes, slots_per_member, total_bytes;
    int rank, size, file;
    unsigned done;
} SharedSegment;

#if defined(__linux__)

// Maps the file of a segment and takes this member's lock; NULL on failure. On success the segment
// owns the file.
SharedSegment *shm_open_segment(int file, int rank, int size, long slot_bytes,
                                long slots_per_member) {
    long header = (size * (long)sizeof(Counter) + PAGE - 1) / PAGE * PAGE;
    long bytes = header + size * slots_per_member * slot_bytes;
    struct flock own_lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    if (fcntl(file, F_OFD_SETLK, &own_lock)) return NULL;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) return NULL;
    SharedSegment *segment = malloc(sizeof(SharedSegment));
    if (!segment) abort();
    *segment = (SharedSegment){(Counter *)memory,
                               memory + header,
                               slot_bytes,
                               slots_per_member,
                               bytes,
                               rank,
                               size,
                               file,
                               0};
    return segment;
}

void shm_close_segment(SharedSegment *segment) {
    munmap(segment->counters, segment->total_bytes);
    close(segment->file);
    free(segment);
}

static bool is_alive(const SharedSegment *segment, int member) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = member, .l_len = 1};
    return fcntl(segment->file, F_OFD_GETLK, &lock) || lock.l_type != F_UNLCK;
}

static long futex(atomic_uint *word, int what, unsigned value, const struct timespec *limit) {
    return syscall(SYS_futex, word, what, value, limit, NULL, 0);
}

static void publish_count(SharedSegment *segment) {
    Counter *counter = &segment->counters[segment->rank];
    atomic_store(&counter->done, segment->done);
    if (atomic_load(&counter->sleepers)) futex(&counter->done, FUTEX_WAKE, 1 << 30, NULL);
}

static inline bool has_reached(Counter *counter, unsigned target) {
    return (int)(atomic_load_explicit(&counter->done, memory_order_acquire) - target) >= 0;
}

// Waits until a member's counter has reached `target`; false if the member is dead.
static bool wait_for_count(ThreadPool *pool, SharedSegment *segment, int member, unsigned target) {
    Counter *counter = &segment->counters[member];
    for (int i = 0; i < POLLS + YIELDS; i++) {
        if (has_reached(counter, target)) return true;
        if (i < POLLS) cpu_relax();
        else sched_yield();
    }
    const struct timespec limit = {.tv_sec = CHECK_ALIVE};
    while (!has_reached(counter, target)) {
        if (lost_rank(pool)) return false;  // once one is dead, do not wait for the others
        atomic_fetch_add(&counter->sleepers, 1);
        unsigned done = atomic_load(&counter->done);
        long woken =
            (int)(done - target) >= 0 ? 0 : futex(&counter->done, FUTEX_WAIT, done, &limit);
        bool late = woken && errno == ETIMEDOUT;
        atomic_fetch_sub(&counter->sleepers, 1);
        if (late && !is_alive(segment, member) && !has_reached(counter, target)) return false;
    }
    return true;
}

#else  // without futexes and file locks ranks communicate through torch

SharedSegment *shm_open_segment(int file, int rank, int size, long slot_bytes,
                                long slots_per_member) {
    return NULL;
}
void shm_close_segment(SharedSegment *segment) { free(segment); }
static void publish_count(SharedSegment *segment) { (void)segment; }
static bool wait_for_count(ThreadPool *pool, SharedSegment *segment, int member, unsigned target) {
    return false;
}

#endif

static char *slot_of(const SharedSegment *segment, int member, unsigned message) {
    return segment->slots +
           (member * segment->slots_per_member + message % segment->slots_per_member) *
               segment->slot_bytes;
}

// Writes this member's part of the next message and waits for the parts of all members. Two slots a
// member are enough: a member that writes message n + 2 has seen all members reach message n + 1,
// so they are done with message n.
static bool exchange(const ThreadContext *ctx, SharedSegment *segment, const void *part,
                     long bytes) {
    memcpy(slot_of(segment, segment->rank, segment->done), part, bytes);
    segment->done++;
    publish_count(segment);
    for (int member = 0; member < segment->size; member++)
        if (member != segment->rank && !wait_for_count(ctx->pool, segment, member, segment->done)) {
            mark_rank_lost(ctx->pool, member);
            return false;
        }
    return true;
}

// ---- all-reduce --------------------------------------------------------------------------------

typedef struct {
    SharedSegment *segment;
    const char *x;
    char *out;
    long count;
    int bfloat16;  // else float32
} AllReduce;

static inline float from_bfloat16(uint16_t x) {
    union {
        uint32_t bits;
        float value;
    } wide = {.bits = (uint32_t)x << 16};
    return wide.value;
}

static inline uint16_t to_bfloat16(float x) {
    union {
        float value;
        uint32_t bits;
    } wide = {x};
    if (x != x) return 0x7fc0;
    return (wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16;  // to the nearest, ties to even
}

static void add_floats(const SharedSegment *segment, float *out, long count) {
    memcpy(out, slot_of(segment, 0, segment->done - 1), count * sizeof(float));
    for (int member = 1; member < segment->size; member++) {
        const float *part = (const float *)slot_of(segment, member, segment->done - 1);
        for (long i = 0; i < count; i++) out[i] += part[i];
    }
}

// Adds in float32 and rounds once.
static void add_bfloat16(const SharedSegment *segment, uint16_t *out, long count) {
    const char *first = slot_of(segment, 0, segment->done - 1);
    for (long i = 0; i < count; i++) {
        float total = 0;
        for (int member = 0; member < segment->size; member++)
            total += from_bfloat16(((const uint16_t *)(first + member * segment->slots_per_member *
                                                                   segment->slot_bytes))[i]);
        out[i] = to_bfloat16(total);
    }
}

static void all_reduce_kernel(const void *arguments, const ThreadContext *ctx) {
    const AllReduce *a = arguments;
    SharedSegment *segment = a->segment;
    long width = a->bfloat16 ? 2 : 4, max_count = segment->slot_bytes / width;
    if (ctx->thread) return;
    for (long at = 0; at < a->count; at += max_count) {
        long n = a->count - at < max_count ? a->count - at : max_count;
        char *out = a->out + at * width;
        if (!exchange(ctx, segment, a->x + at * width, n * width)) return;
        if (a->bfloat16) add_bfloat16(segment, (uint16_t *)out, n);
        else add_floats(segment, (float *)out, n);
    }
}

// Adds x over all ranks; out may be x. Returns lost_rank.
int native_all_reduce(ThreadPool *pool, SharedSegment *segment, const void *x, long count,
                      int bfloat16, void *out) {
    AllReduce a = {segment, x, out, count, bfloat16};
    issue(pool, all_reduce_kernel, &a, sizeof a, 0.3 * count);
    return lost_rank(pool);
}

// ---- all-gather --------------------------------------------------------------------------------

typedef struct {
    SharedSegment *segment;
    const char *x;
    char *out;
    long rows;
    long width, total;  // bytes of one rank's part of a row (the last may be shorter), of a row
} AllGather;

static long part_bytes(const AllGather *a, int member) {
    long left = a->total - member * a->width;
    return left < a->width ? left : a->width;
}

static void all_gather_kernel(const void *arguments, const ThreadContext *ctx) {
    const AllGather *a = arguments;
    SharedSegment *segment = a->segment;
    long max_rows = segment->slot_bytes / a->width, own = part_bytes(a, segment->rank);
    if (ctx->thread) return;
    for (long at = 0; at < a->rows; at += max_rows) {
        long rows = a->rows - at < max_rows ? a->rows - at : max_rows;
        if (!exchange(ctx, segment, a->x + at * own, rows * own)) return;
        for (int member = 0; member < segment->size; member++) {
            const char *part = slot_of(segment, member, segment->done - 1);
            long width = part_bytes(a, member);
            for (long row = 0; row < rows; row++)
                memcpy(a->out + (at + row) * a->total + member * a->width, part + row * width,
                       width);
        }
    }
}

// Puts the parts of all ranks side by side: rows of `total` bytes, of which each rank has `width`
// (the last ranks may have less). Returns lost_rank.
int native_all_gather(ThreadPool *pool, SharedSegment *segment, const void *x, long rows,
                      long width, long total, void *out) {
    AllGather a = {segment, x, out, rows, width, total};
    issue(pool, all_gather_kernel, &a, sizeof a, 0.1 * rows * total);
    return lost_rank(pool);
}

// ---- point-to-point channels -------------------------------------------------------------------

typedef struct {
    SharedSegment *segment;
    char *x;
    long bytes;
} ChannelMessage;

// Member 0 writes and member 1 reads. The writer is at most as many messages ahead as there are
// slots.
static void send_kernel(const void *arguments, const ThreadContext *ctx) {
    const ChannelMessage *a = arguments;
    SharedSegment *segment = a->segment;
    if (ctx->thread) return;
    for (long at = 0; at < a->bytes; at += segment->slot_bytes) {
        if (!wait_for_count(ctx->pool, segment, 1,
                            segment->done + 1 - (unsigned)segment->slots_per_member)) {
            mark_rank_lost(ctx->pool, 1);
            return;
        }
        memcpy(slot_of(segment, 0, segment->done), a->x + at,
               a->bytes - at < segment->slot_bytes ? a->bytes - at : segment->slot_bytes);
        segment->done++;
        publish_count(segment);
    }
}

static void receive_kernel(const void *arguments, const ThreadContext *ctx) {
    const ChannelMessage *a = arguments;
    SharedSegment *segment = a->segment;
    if (ctx->thread) return;
    for (long at = 0; at < a->bytes; at += segment->slot_bytes) {
        if (!wait_for_count(ctx->pool, segment, 0, segment->done + 1)) {
            mark_rank_lost(ctx->pool, 0);
            return;
        }
        memcpy(a->x + at, slot_of(segment, 0, segment->done),
               a->bytes - at < segment->slot_bytes ? a->bytes - at : segment->slot_bytes);
        segment->done++;
        publish_count(segment);
    }
}

int native_send(ThreadPool *pool, SharedSegment *segment, const void *x, long bytes) {
    ChannelMessage a = {segment, (char *)x, bytes};
    issue(pool, send_kernel, &a, sizeof a, 0.1 * bytes);
    return lost_rank(pool);
}

int native_receive(ThreadPool *pool, SharedSegment *segment, void *x, long bytes) {
    ChannelMessage a = {segment, x, bytes};
    issue(pool, receive_kernel, &a, sizeof a, 0.1 * bytes);
    return lost_rank(pool);
}

// ---- vocabulary shards -------------------------------------------------------------------------

typedef struct {
    const int64_t *ids;
    int64_t *rows;
    float *x;
    long count, columns, first, end;
} VocabShard;

static void local_vocab_rows_kernel(const void *arguments, const ThreadContext *ctx) {
    const VocabShard *a = arguments;
    long from, to;
    while (next_chunk(ctx, a->count, a->count, &from, &to))
        for (long i = from; i < to; i++)
            a->rows[i] = a->ids[i] >= a->first && a->ids[i] < a->end ? a->ids[i] - a->first : 0;
}

static void zero_foreign_rows_kernel(const void *arguments, const ThreadContext *ctx) {
    const VocabShard *a = arguments;
    long from, to;
    while (next_chunk(ctx, a->count, 1, &from, &to))
        if (a->ids[from] < a->first || a->ids[from] >= a->end)
            memset(a->x + from * a->columns, 0, a->columns * sizeof(float));
}

// The rows of tokens in a table that begins with token `first`; row 0 for tokens it does not have.
void native_local_vocab_rows(ThreadPool *pool, const int64_t *ids, long count, long first, long end,
                             int64_t *rows) {
    VocabShard a = {.ids = ids, .rows = rows, .count = count, .first = first, .end = end};
    issue(pool, local_vocab_rows_kernel, &a, sizeof a, count);
}

// Zeros the rows of x [count, columns] whose tokens are not in [first, end).
void native_zero_foreign_rows(ThreadPool *pool, const int64_t *ids, long count, long columns,
                              long first, long end, float *x) {
    VocabShard a = {
        .ids = ids, .x = x, .count = count, .columns = columns, .first = first, .end = end};
    issue(pool, zero_foreign_rows_kernel, &a, sizeof a, 0.1 * count * columns);
}
