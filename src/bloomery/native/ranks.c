// What processes of one machine say to each other through memory they share: sums, gatherings, states on their way.
//
// A region has a line of counts a member, then slots. A member writes a slot, then counts on its own line; who wants to
// read waits for that count. Parts are added in the order of ranks, so every rank has the same bits. Between CPUs a
// message of a decode step is short: one thread carries it.
//
// Who waits looks again for some microseconds, then gives others its turn, then sleeps: cores are few, and other
// programs want them. Every member holds a lock on a byte of the region's file, which the system takes away when the
// process ends, however it ends: so a wait for the dead ends too.
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

#define LOOKS 2000  // before a waiting thread offers its turn
#define TURNS 200   // before it sleeps
#define DOUBT 1     // seconds of sleep before it asks whether the other is still there
#define PAGE 4096

typedef struct {
    _Alignas(64) atomic_uint done;  // messages this member has written, or read
    atomic_uint sleepers;           // who waits for more
} Line;

typedef struct {
    Line *lines;
    char *slots;
    long slot, each, bytes;  // bytes of a slot, slots of a member, bytes of it all
    int rank, size, file;
    unsigned done;
} Region;

#if defined(__linux__)

// Maps the file of a region and takes this member's lock; NULL where that cannot be. The file is the region's from now on.
Region *region_make(int file, int rank, int size, long slot, long each) {
    long lines = (size * (long)sizeof(Line) + PAGE - 1) / PAGE * PAGE, bytes = lines + size * each * slot;
    struct flock mine = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    if (fcntl(file, F_OFD_SETLK, &mine)) return NULL;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) return NULL;
    Region *region = malloc(sizeof(Region));
    if (!region) abort();
    *region = (Region){(Line *)memory, memory + lines, slot, each, bytes, rank, size, file, 0};
    return region;
}

void region_free(Region *region) {
    munmap(region->lines, region->bytes);
    close(region->file);
    free(region);
}

static bool alive(const Region *region, int member) {
    struct flock its = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = member, .l_len = 1};
    return fcntl(region->file, F_OFD_GETLK, &its) || its.l_type != F_UNLCK;
}

static long futex(atomic_uint *word, int what, unsigned value, const struct timespec *limit) {
    return syscall(SYS_futex, word, what, value, limit, NULL, 0);
}

static void count(Region *region) {
    Line *line = &region->lines[region->rank];
    atomic_store(&line->done, region->done);
    if (atomic_load(&line->sleepers)) futex(&line->done, FUTEX_WAKE, 1 << 30, NULL);
}

static inline bool reached(Line *line, unsigned wanted) {
    return (int)(atomic_load_explicit(&line->done, memory_order_acquire) - wanted) >= 0;
}

// Until a member has counted so far; false if it never will.
static bool await_count(Region *region, int member, unsigned wanted) {
    Line *line = &region->lines[member];
    for (int i = 0; i < LOOKS + TURNS; i++) {
        if (reached(line, wanted)) return true;
        if (i < LOOKS) relax();
        else sched_yield();
    }
    const struct timespec limit = {.tv_sec = DOUBT};
    while (!reached(line, wanted)) {
        if (lost()) return false;  // nobody waits for the others once one is gone
        atomic_fetch_add(&line->sleepers, 1);
        unsigned seen = atomic_load(&line->done);
        long woken = (int)(seen - wanted) >= 0 ? 0 : futex(&line->done, FUTEX_WAIT, seen, &limit);
        bool late = woken && errno == ETIMEDOUT;
        atomic_fetch_sub(&line->sleepers, 1);
        if (late && !alive(region, member) && !reached(line, wanted)) return false;
    }
    return true;
}

#else  // ranks talk through torch alone

Region *region_make(int file, int rank, int size, long slot, long each) { return NULL; }
void region_free(Region *region) { free(region); }
static void count(Region *region) { (void)region; }
static bool await_count(Region *region, int member, unsigned wanted) { return false; }

#endif

static char *slot_of(const Region *region, int member, unsigned message) {
    return region->slots + (member * region->each + message % region->each) * region->slot;
}

// Writes this member's part of the next message and waits for everybody's. Two slots a member are enough: who writes the
// message after next has seen everybody come to the next one, and so be done with this.
static bool exchange(Region *region, const void *part, long bytes) {
    memcpy(slot_of(region, region->rank, region->done), part, bytes);
    region->done++;
    count(region);
    for (int member = 0; member < region->size; member++)
        if (member != region->rank && !await_count(region, member, region->done)) {
            lose(member);
            return false;
        }
    return true;
}

// ---- sums ----------------------------------------------------------------------------------------------------------

typedef struct {
    Region *region;
    const char *x;
    char *out;
    long count;
    int half;  // bfloat16 rather than float32
} Sum;

static inline float from_short(uint16_t x) {
    union { uint32_t bits; float value; } wide = {.bits = (uint32_t)x << 16};
    return wide.value;
}

static inline uint16_t to_short(float x) {
    union { float value; uint32_t bits; } wide = {x};
    if (x != x) return 0x7fc0;
    return (wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16;  // to the nearest, in the middle to the even one
}

static void add_floats(const Region *region, float *out, long count) {
    memcpy(out, slot_of(region, 0, region->done - 1), count * sizeof(float));
    for (int member = 1; member < region->size; member++) {
        const float *part = (const float *)slot_of(region, member, region->done - 1);
        for (long i = 0; i < count; i++) out[i] += part[i];
    }
}

// Added in float32 and rounded once.
static void add_shorts(const Region *region, uint16_t *out, long count) {
    const char *first = slot_of(region, 0, region->done - 1);
    for (long i = 0; i < count; i++) {
        float total = 0;
        for (int member = 0; member < region->size; member++)
            total += from_short(((const uint16_t *)(first + member * region->each * region->slot))[i]);
        out[i] = to_short(total);
    }
}

static void sum_kernel(const void *arguments, const Crew *crew) {
    const Sum *a = arguments;
    Region *region = a->region;
    long wide = a->half ? 2 : 4, most = region->slot / wide;
    if (crew->thread) return;
    for (long at = 0; at < a->count; at += most) {
        long n = a->count - at < most ? a->count - at : most;
        char *out = a->out + at * wide;
        if (!exchange(region, a->x + at * wide, n * wide)) return;
        if (a->half) add_shorts(region, (uint16_t *)out, n);
        else add_floats(region, (float *)out, n);
    }
}

// x of all ranks added up; out may be x.
int native_sum(Region *region, const void *x, long count, int half, void *out) {
    Sum a = {region, x, out, count, half};
    issue(sum_kernel, &a, sizeof a, 0.3 * count);
    return lost();
}

// ---- gatherings ----------------------------------------------------------------------------------------------------

typedef struct {
    Region *region;
    const char *x;
    char *out;
    long rows, width, total;  // bytes of a rank's part of a row, of the whole row; the last part may be shorter
} Join;

static long part_of(const Join *a, int member) {
    long left = a->total - member * a->width;
    return left < a->width ? left : a->width;
}

static void join_kernel(const void *arguments, const Crew *crew) {
    const Join *a = arguments;
    Region *region = a->region;
    long most = region->slot / a->width, own = part_of(a, region->rank);
    if (crew->thread) return;
    for (long at = 0; at < a->rows; at += most) {
        long rows = a->rows - at < most ? a->rows - at : most;
        if (!exchange(region, a->x + at * own, rows * own)) return;
        for (int member = 0; member < region->size; member++) {
            const char *part = slot_of(region, member, region->done - 1);
            long width = part_of(a, member);
            for (long row = 0; row < rows; row++)
                memcpy(a->out + (at + row) * a->total + member * a->width, part + row * width, width);
        }
    }
}

// Parts of all ranks side by side: rows of `total` bytes, of which each but the last ranks have `width`.
int native_join(Region *region, const void *x, long rows, long width, long total, void *out) {
    Join a = {region, x, out, rows, width, total};
    issue(join_kernel, &a, sizeof a, 0.1 * rows * total);
    return lost();
}

// ---- from one to the other -----------------------------------------------------------------------------------------

typedef struct {
    Region *region;
    char *x;
    long bytes;
} Passed;

// Member 0 writes, member 1 reads; the writer is ahead by as many messages as there are slots, and no more.
static void send_kernel(const void *arguments, const Crew *crew) {
    const Passed *a = arguments;
    Region *region = a->region;
    if (crew->thread) return;
    for (long at = 0; at < a->bytes; at += region->slot) {
        if (!await_count(region, 1, region->done + 1 - (unsigned)region->each)) {
            lose(1);
            return;
        }
        memcpy(slot_of(region, 0, region->done), a->x + at, a->bytes - at < region->slot ? a->bytes - at : region->slot);
        region->done++;
        count(region);
    }
}

static void receive_kernel(const void *arguments, const Crew *crew) {
    const Passed *a = arguments;
    Region *region = a->region;
    if (crew->thread) return;
    for (long at = 0; at < a->bytes; at += region->slot) {
        if (!await_count(region, 0, region->done + 1)) {
            lose(0);
            return;
        }
        memcpy(a->x + at, slot_of(region, 0, region->done), a->bytes - at < region->slot ? a->bytes - at : region->slot);
        region->done++;
        count(region);
    }
}

int native_send(Region *region, const void *x, long bytes) {
    Passed a = {region, (char *)x, bytes};
    issue(send_kernel, &a, sizeof a, 0.1 * bytes);
    return lost();
}

int native_receive(Region *region, void *x, long bytes) {
    Passed a = {region, x, bytes};
    issue(receive_kernel, &a, sizeof a, 0.1 * bytes);
    return lost();
}

// ---- a rank's own words --------------------------------------------------------------------------------------------

typedef struct {
    const int64_t *ids;
    int64_t *rows;
    float *x;
    long count, columns, first, end;
} Words;

static void own_kernel(const void *arguments, const Crew *crew) {
    const Words *a = arguments;
    long from, to;
    while (take(crew, a->count, a->count, &from, &to))
        for (long i = from; i < to; i++) a->rows[i] = a->ids[i] >= a->first && a->ids[i] < a->end ? a->ids[i] - a->first : 0;
}

static void blank_kernel(const void *arguments, const Crew *crew) {
    const Words *a = arguments;
    long from, to;
    while (take(crew, a->count, 1, &from, &to))
        if (a->ids[from] < a->first || a->ids[from] >= a->end) memset(a->x + from * a->columns, 0, a->columns * sizeof(float));
}

// Rows of a table that begins with word `first`; row 0 for words it does not have.
void native_own(const int64_t *ids, long count, long first, long end, int64_t *rows) {
    Words a = {.ids = ids, .rows = rows, .count = count, .first = first, .end = end};
    issue(own_kernel, &a, sizeof a, count);
}

// Zeros in the lines of x [count, columns] whose words are not from `first` to `end`.
void native_blank(const int64_t *ids, long count, long columns, long first, long end, float *x) {
    Words a = {.ids = ids, .x = x, .count = count, .columns = columns, .first = first, .end = end};
    issue(blank_kernel, &a, sizeof a, 0.1 * count * columns);
}
