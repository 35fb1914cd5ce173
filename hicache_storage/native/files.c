#define _GNU_SOURCE
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "pieces.h"
#include "sockets.h"
#include "workers.h"
#include "xxh3.h"

/* The memory of a thread that reads: a page of 1 MiB with its frame is one request for the disk. */
enum { BLOCK_NBYTES = 4096, READ_NBYTES = (1 << 20) + 2 * BLOCK_NBYTES };
enum { COLD = 100 };
/* A time that is further ahead than this cannot be true. */
static const int64_t MOST_AHEAD_NS = 300 * 1000000000LL;

int64_t file_exists(const char *path, uint64_t nbytes) {
    struct stat status;
    if (fstatat(AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW))
        return errno == ENOENT || errno == ENOTDIR ? MISS : -errno;
    return S_ISREG(status.st_mode) && (uint64_t)status.st_size == nbytes ? HIT : MISS;
}

int64_t file_mode(const char *path) {
    struct stat status;
    if (fstatat(AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW))
        return errno == ENOENT || errno == ENOTDIR ? 0 : -errno;
    return (int64_t)status.st_mode;
}

int64_t file_stat(const char *path, int64_t *modified_ns, int64_t *nbytes) {
    struct stat status;
    if (fstatat(AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW))
        return errno == ENOENT || errno == ENOTDIR ? MISS : -errno;
    if (!S_ISREG(status.st_mode))
        return MISS;
    *modified_ns = status.st_mtim.tv_sec * 1000000000LL + status.st_mtim.tv_nsec;
    *nbytes = (int64_t)status.st_size;
    return HIT;
}

static int is_named(const uint8_t *trailer, const uint8_t *name) {
    uint64_t seal;
    memcpy(&seal, trailer + SEALED_NBYTES, sizeof seal);
    return !memcmp(trailer, name, NAME_NBYTES) && __builtin_bswap64(seal) == xxh3_64(trailer, SEALED_NBYTES);
}

/* Read the page chunk by chunk. HIT, MISS if the file ends too early, or what failed. Chunks that are in the page cache go
 * straight to revocable memory, each within one access. As soon as the kernel would have to wait for others, or cannot tell,
 * the rest goes through the scratch memory. */
static int64_t read_page(int fd, const page_read *wanted, way by, int cached) {
    cursor at = {wanted->iov, wanted->pieces, 0};
    struct iovec chunk[PIECES_A_CHUNK];
    size_t nbytes;
    int64_t offset = 0;
    page_hash hash = {.skip = wanted->skip};
    xxh3_begin(&hash.stream);
    const size_t limit = way_nbytes(&by, wanted->digest ? CHUNK_NBYTES : SSIZE_MAX);
    for (size_t count; (count = pieces_take(&at, chunk, PIECES_A_CHUNK, limit, &nbytes));) {
        int64_t done = 0;
        if (by.state && cached) {
            if (!access_begin(by.state))
                return MOVE_REVOKED;
            done = read_cached(fd, chunk, count, offset);
            cached = done == (int64_t)nbytes;
            if (cached && wanted->digest)
                pieces_hash(&hash.stream, chunk, count, &hash.skip);
            access_end(by.state);
        }
        if (!by.state || !cached)
            done = pieces_read_by(&by, fd, chunk, count, nbytes, offset, wanted->digest ? &hash : NULL);
        if (done < (int64_t)nbytes)
            return done < 0 ? done : MISS;
        offset += done;
    }
    if (wanted->digest)
        *wanted->digest = xxh3_digest(&hash.stream);
    return HIT;
}

/* Hand the bytes that are in the scratch memory to the pieces, chunk by chunk. Return 0 if these are revoked. */
static int take_from(way by, cursor *at, size_t nbytes, page_hash *hash) {
    struct iovec chunk[PIECES_A_CHUNK];
    for (size_t taken; nbytes; nbytes -= taken, by.scratch += taken) {
        const size_t count = pieces_take(at, chunk, PIECES_A_CHUNK, nbytes < CHUNK_NBYTES ? nbytes : CHUNK_NBYTES, &taken);
        if (!pieces_copy_by(&by, chunk, count, 0))
            return 0;
        const struct iovec copied = {by.scratch, taken};
        if (hash)
            pieces_hash(&hash->stream, &copied, 1, &hash->skip);
    }
    return 1;
}

static size_t blocks(uint64_t nbytes) { return (size_t)(nbytes + BLOCK_NBYTES - 1) / BLOCK_NBYTES * BLOCK_NBYTES; }

/* Read the page as `read_page` does, but around the page cache. -EINVAL if that is refused, or stops early. */
static int64_t read_around(int fd, const page_read *wanted, way by) {
    if (fcntl(fd, F_SETFL, O_DIRECT))
        return -errno;
    cursor at = {wanted->iov, wanted->pieces, 0};
    page_hash hash = {.skip = wanted->skip};
    xxh3_begin(&hash.stream);
    const uint64_t requests = wanted->nbytes / READ_NBYTES + 1, step = blocks(wanted->nbytes / requests + 1);
    int64_t verdict = HIT;
    for (uint64_t offset = 0; verdict == HIT && offset < wanted->nbytes; offset += step) {
        const size_t nbytes = (size_t)(wanted->nbytes - offset < step ? wanted->nbytes - offset : step);
        ssize_t got;
        do
            got = pread(fd, by.scratch, blocks(nbytes), (off_t)offset);
        while (got < 0 && errno == EINTR);
        if (got < (ssize_t)nbytes)
            verdict = got < 0 ? -errno : -EINVAL;
        else if (!take_from(by, &at, nbytes, wanted->digest ? &hash : NULL))
            verdict = MOVE_REVOKED;
    }
    if (wanted->digest)
        *wanted->digest = xxh3_digest(&hash.stream);
    (void)fcntl(fd, F_SETFL, 0);
    return verdict;
}

static void touch(int fd, int64_t touched_ns, int64_t interval_ns) {
    struct stat status;
    if (interval_ns && !fstat(fd, &status)) {
        const int64_t age_ns = touched_ns - (status.st_mtim.tv_sec * 1000000000LL + status.st_mtim.tv_nsec);
        if (age_ns < interval_ns && age_ns >= -MOST_AHEAD_NS)
            return;
    }
    const struct timespec time = {touched_ns / 1000000000, touched_ns % 1000000000};
    const struct timespec times[2] = {time, time};
    if (futimens(fd, times) && errno == EPERM)
        (void)!futimens(fd, NULL); /* who may write a file, but does not own it, may only set the time of now */
}

static int open_again(const char *path, int flags, mode_t mode) {
    int fd;
    do
        fd = open(path, flags | O_CLOEXEC, mode);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* Read a page. COLD, and nothing is read, if it is cold and that is not known yet. */
static int64_t file_read(page_read *wanted, double deadline_s, uint8_t *scratch) {
    if (monotonic_s() > deadline_s)
        return LATE;
    const int fd = open_again(wanted->path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0);
    if (fd < 0)
        return errno == ENOENT ? MISS : -errno;
    uint8_t before[TRAILER_NBYTES + 1], after[TRAILER_NBYTES];
    const struct iovec look = {before, sizeof before};
    const int64_t seen = wanted->cold ? -EAGAIN : read_cached(fd, &look, 1, (int64_t)wanted->nbytes);
    if (seen == -EAGAIN && !wanted->cold) {
        wanted->cold = 1;
        close(fd);
        return COLD;
    }
    const way by = {wanted->state, scratch};
    const size_t had = seen > 0 ? (size_t)seen : 0; /* the file may go on, outside the page cache */
    int64_t got = read_at(fd, before + had, sizeof before - had, (int64_t)(wanted->nbytes + had));
    got = got < 0 ? got : got + (int64_t)had;
    int64_t verdict = got < 0 ? got : WRONG;
    if (got == TRAILER_NBYTES && is_named(before, wanted->name)) {
        verdict = wanted->cold ? read_around(fd, wanted, by) : -EINVAL;
        if (verdict == -EINVAL)
            verdict = read_page(fd, wanted, by, seen >= 0);
    }
    if (verdict == HIT) {
        got = read_at(fd, after, sizeof after, (int64_t)wanted->nbytes);
        if (got != TRAILER_NBYTES || memcmp(before, after, TRAILER_NBYTES))
            verdict = got < 0 ? got : MISS;
        else if (wanted->touched_ns >= 0)
            touch(fd, wanted->touched_ns, wanted->interval_ns);
    }
    close(fd);
    return verdict == MOVE_REVOKED ? REVOKED : verdict;
}

/* The pages of one call. Each thread takes the next one. */
typedef struct {
    page_read *pages;
    size_t count, next;
    double deadline_s;
    int64_t *verdicts;
} page_reads;

static uint8_t *scratch_of(void) {
    void *scratch;
    return posix_memalign(&scratch, BLOCK_NBYTES, READ_NBYTES) ? NULL : scratch;
}

static void *read_rest(void *given) {
    page_reads *all = given;
    uint8_t *scratch = scratch_of();
    for (size_t i; scratch && (i = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED)) < all->count;)
        do
            all->verdicts[i] = file_read(&all->pages[i], all->deadline_s, scratch);
        while (all->verdicts[i] == COLD);
    free(scratch);
    return NULL;
}

int files_read(page_read *pages, size_t count, double deadline_s, int64_t *verdicts) {
    page_reads all = {pages, count, 0, deadline_s, verdicts};
    uint8_t *scratch = scratch_of();
    while (scratch && all.next < count && (verdicts[all.next] = file_read(&pages[all.next], deadline_s, scratch)) != COLD)
        all.next++;
    free(scratch);
    if (scratch && all.next < count)
        work_together(read_rest, &all, count - all.next);
    return all.next < count ? -1 : 0;
}

int64_t file_check(const char *path, const uint8_t *name, uint64_t nbytes, int64_t touched_ns) {
    const int fd = open_again(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0);
    if (fd < 0)
        return errno == ENOENT ? MISS : -errno;
    uint8_t trailer[TRAILER_NBYTES + 1];
    int64_t verdict = read_at(fd, trailer, sizeof trailer, (int64_t)nbytes);
    if (verdict >= 0) {
        if (verdict != TRAILER_NBYTES || !is_named(trailer, name))
            verdict = WRONG;
        else
            verdict = trailer[NAME_NBYTES] ? HIT : UNSYNCED;
    }
    if (touched_ns >= 0 && (verdict == HIT || verdict == UNSYNCED))
        touch(fd, touched_ns, 0);
    close(fd);
    return verdict;
}

static int64_t write_page(int fd, const page_write *wanted) {
    cursor at = {wanted->iov, wanted->pieces, 0};
    struct iovec chunk[PIECES_A_CHUNK + 1];
    size_t nbytes;
    int64_t offset = 0;
    const size_t limit = way_nbytes(&wanted->by, SSIZE_MAX);
    do { /* once even for an empty page, which still gets its trailer */
        size_t count = pieces_take(&at, chunk, PIECES_A_CHUNK, limit, &nbytes);
        if (!at.left) { /* the trailer goes with the last pieces, in one call */
            chunk[count].iov_base = (void *)wanted->trailer;
            chunk[count++].iov_len = TRAILER_NBYTES;
            nbytes += TRAILER_NBYTES;
        }
        const int64_t done = pieces_move_by(&wanted->by, fd, chunk, count, nbytes, offset, 1);
        if (done < (int64_t)nbytes)
            return done < 0 ? done : -EIO;
        offset += done;
    } while (at.left);
    const struct timespec time = {wanted->modified_ns / 1000000000, wanted->modified_ns % 1000000000};
    const struct timespec times[2] = {time, time};
    return futimens(fd, times) ? -errno : 0;
}

/* Overwrite the old trailer, so that a reader that has begun the page finds a different one afterwards. */
static int64_t spoil(int fd, const page_write *wanted) {
    uint8_t spoiled[TRAILER_NBYTES] = {0};
    uint8_t old[TRAILER_NBYTES + 1];
    const int64_t got = read_at(fd, old, sizeof old, (int64_t)wanted->nbytes);
    if (got < 0)
        return got;
    if (got != TRAILER_NBYTES || old[NAME_NBYTES])
        return KEPT;
    struct iovec one = {spoiled, sizeof spoiled};
    const int64_t done = pieces_move(fd, &one, 1, sizeof spoiled, (int64_t)wanted->nbytes, 1);
    return done < 0 ? done : 0;
}

int64_t file_write(const page_write *wanted) {
    const int flags = wanted->recycled ? O_RDWR | O_NOFOLLOW : O_WRONLY | O_CREAT | O_EXCL;
    const int fd = open_again(wanted->path, flags, 0666);
    if (fd < 0)
        return wanted->recycled ? KEPT : -errno;
    int64_t failed = wanted->recycled ? spoil(fd, wanted) : 0;
    if (failed == KEPT) {
        close(fd);
        return KEPT;
    }
    if (!failed)
        failed = write_page(fd, wanted);
    if (close(fd) && !failed && errno != EINTR) /* NFS reports a full disk here */
        failed = -errno;
    if (!failed && rename(wanted->path, wanted->target))
        failed = -errno;
    if (failed)
        unlink(wanted->path);
    if (failed == MOVE_REVOKED)
        return REVOKED;
    return failed ? failed : HIT;
}

int64_t file_claim(const char *path, const char *target, int64_t modified_ns, uint64_t nbytes, int keep) {
    struct stat status;
    if (fstatat(AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW))
        return errno == ENOENT ? MISS : -errno;
    if (status.st_mtim.tv_sec * 1000000000LL + status.st_mtim.tv_nsec != modified_ns || (uint64_t)status.st_size != nbytes)
        return MISS;
    if (rename(path, target))
        return errno == ENOENT ? MISS : -errno;
    if (keep && status.st_nlink == 1)
        return KEPT;
    (void)unlink(target);
    return HIT;
}
