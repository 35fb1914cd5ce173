/* Feeds page files, whole, damaged and half overwritten, to the functions that check, read and write them. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fuzz.h"
#include "revocables.h"

enum { FILE_NBYTES = 1 << 20, DESCRIPTOR = 77, PIECES_MAX = 200 };
static const int64_t NOW_NS = 1700000000000000000;

/* The only file. A writer overwrites it with `next` while it is read: `written` bytes of the writer's work are done. */
static struct {
    uint8_t data[FILE_NBYTES], next[FILE_NBYTES];
    size_t nbytes, work, written;
    int64_t modified_ns;
    int is_there, is_writable, opened, renamed, failed, direct;
} file;

/* The memory of the page. If it is revocable, its owner takes it back at some moment, and knows what it held then. */
static struct {
    uint64_t state;
    int is_revocable, is_taken;
    uint8_t *bytes;
} lent;

static void gather_page(uint8_t *into);

/* --- system calls ------------------------------------------------------------------------------------------------- */

/* A call that may wait for the disk is made outside of any access. */
static void wait_for_disk(void) {
    EXPECT(lent.state == 0 || (lent.is_taken && access_is_revoked(&lent.state)));
    if (lent.is_revocable && !lent.is_taken && one_in(10)) {
        access_revoke(&lent.state);
        gather_page(lent.bytes);
        lent.is_taken = 1;
    }
}

/* Do a part of the writer's work: it spoils the trailer, then writes page and trailer. */
static void overwrite_some(void) {
    for (size_t step = file.work > file.written && one_in(2) ? below(file.work - file.written + 1) : 0; step; step--) {
        const size_t at = file.written++, page_nbytes = file.work - 2 * 64;
        if (at < 64)
            file.data[page_nbytes + at] = 0;
        else
            file.data[at - 64] = file.next[at - 64];
    }
}

/* Let a call fail now and then. Remember an error that is not an interruption. */
static int fails(int error) {
    if (one_in(16)) {
        errno = EINTR;
        return 1;
    }
    if (!one_in(400))
        return 0;
    errno = file.failed = error;
    return 1;
}

static size_t some(size_t nbytes) { return nbytes && one_in(4) ? 1 + below(nbytes) : nbytes; }

static ssize_t moved(const struct iovec *iov, int count, off_t offset) {
    const size_t left = (size_t)offset < file.nbytes ? file.nbytes - (size_t)offset : 0;
    size_t wanted = 0, done = 0;
    for (int i = 0; i < count; i++)
        wanted += iov[i].iov_len;
    wanted = some(wanted < left ? wanted : left);
    for (int i = 0; done < wanted; i++) {
        const size_t step = iov[i].iov_len < wanted - done ? iov[i].iov_len : wanted - done;
        overwrite_some();
        memcpy(iov[i].iov_base, file.data + offset + done, step);
        done += step;
    }
    return (ssize_t)done;
}

static ssize_t fuzz_preadv(int fd, const struct iovec *iov, int count, off_t offset) {
    EXPECT(fd == DESCRIPTOR && count > 0 && count <= 1024 && offset >= 0);
    wait_for_disk();
    overwrite_some();
    if (file.work && one_in(100))
        file.nbytes = below(file.nbytes + 1);
    if (fails(EIO))
        return -1;
    return moved(iov, count, offset);
}

/* Say that the bytes are not in the page cache, or that nobody can tell, or read what is there. */
static long fuzz_preadv2(int fd, const struct iovec *iov, size_t count, off_t offset) {
    EXPECT(fd == DESCRIPTOR && count > 0 && offset >= 0);
    overwrite_some();
    if (one_in(2))
        return moved(iov, (int)count, offset);
    errno = one_in(2) ? EAGAIN : one_in(2) ? EOPNOTSUPP : EINTR;
    return -1;
}

static int fuzz_fcntl(int fd, int command, int flags) {
    EXPECT(fd == DESCRIPTOR && command == F_SETFL);
    errno = EINVAL;
    if (flags & O_DIRECT && one_in(8))
        return -1;
    file.direct = flags & O_DIRECT;
    return 0;
}

static ssize_t fuzz_pwritev(int fd, const struct iovec *iov, int count, off_t offset) {
    EXPECT(fd == DESCRIPTOR && count > 0 && count <= 1024 && offset >= 0);
    wait_for_disk();
    if (fails(ENOSPC))
        return -1;
    size_t wanted = 0, done = 0;
    for (int i = 0; i < count; i++)
        wanted += iov[i].iov_len;
    wanted = some(wanted);
    EXPECT((size_t)offset + wanted <= FILE_NBYTES);
    for (int i = 0; done < wanted; i++) {
        const size_t step = iov[i].iov_len < wanted - done ? iov[i].iov_len : wanted - done;
        memcpy(file.data + offset + done, iov[i].iov_base, step);
        done += step;
    }
    file.nbytes = (size_t)offset + done > file.nbytes ? (size_t)offset + done : file.nbytes;
    return (ssize_t)done;
}

static ssize_t fuzz_pread(int fd, void *into, size_t nbytes, off_t offset) {
    EXPECT(file.direct && !((uintptr_t)into % 4096 || nbytes % 4096 || offset % 4096));
    if (one_in(100)) {
        errno = EINVAL;
        return -1;
    }
    return fuzz_preadv(fd, &(struct iovec){into, nbytes}, 1, offset);
}

__attribute__((unused)) static ssize_t fuzz_pwrite(int fd, const void *from, size_t nbytes, off_t offset) {
    return fuzz_pwritev(fd, &(struct iovec){(void *)from, nbytes}, 1, offset);
}

static int fuzz_open(const char *path, int flags) {
    EXPECT(!strcmp(path, "path") && flags & O_CLOEXEC);
    if (fails(EACCES))
        return -1;
    if (flags & O_CREAT ? file.is_there : !file.is_there) {
        errno = flags & O_CREAT ? EEXIST : ENOENT;
        return -1;
    }
    file.is_there = 1;
    file.direct = 0;
    file.opened++;
    return DESCRIPTOR;
}

static int fuzz_close(int fd) {
    EXPECT(fd == DESCRIPTOR && file.opened-- == 1);
    return 0;
}

static int fuzz_futimens(int fd, const struct timespec times[2]) {
    EXPECT(fd == DESCRIPTOR && times[1].tv_nsec >= 0 && times[1].tv_nsec < 1000000000);
    file.modified_ns = times[1].tv_sec * 1000000000LL + times[1].tv_nsec;
    return 0;
}

static int fuzz_fstat(int fd, struct stat *status) {
    EXPECT(fd == DESCRIPTOR);
    status->st_mtim = (struct timespec){file.modified_ns / 1000000000, file.modified_ns % 1000000000};
    return 0;
}

static int fuzz_rename(const char *path, const char *target) {
    EXPECT(!strcmp(path, "path") && !strcmp(target, "target") && file.is_there && !file.opened);
    if (one_in(400)) {
        errno = file.failed = EIO;
        return -1;
    }
    file.renamed = 1;
    return 0;
}

static int fuzz_unlink(const char *path) {
    EXPECT(!strcmp(path, "path"));
    file.is_there = 0;
    return 0;
}

#define open(path, flags, mode) ((void)(mode), fuzz_open(path, flags))
#define close(fd) fuzz_close(fd)
#define pread(fd, into, nbytes, offset) fuzz_pread(fd, into, nbytes, offset)
#define preadv(fd, iov, count, offset) fuzz_preadv(fd, iov, count, offset)
#define pwrite(fd, from, nbytes, offset) fuzz_pwrite(fd, from, nbytes, offset)
#define pwritev(fd, iov, count, offset) fuzz_pwritev(fd, iov, count, offset)
#define syscall(number, fd, iov, count, offset, high, flags) fuzz_preadv2(fd, iov, count, offset)
#define fcntl(fd, command, flags) fuzz_fcntl(fd, command, flags)
#define fstat(fd, status) fuzz_fstat(fd, status)
#define futimens(fd, times) fuzz_futimens(fd, times)
#define rename(path, target) fuzz_rename(path, target)
#define unlink(path) fuzz_unlink(path)
#include "pieces.c"
#include "revocables.c"
#include "workers.c"
#include "files.c"

double monotonic_s(void) { return 0; }

/* --- pages -------------------------------------------------------------------------------------------------------- */

typedef struct {
    size_t nbytes, pieces;
    struct iovec iov[PIECES_MAX];
} page;

static page held;
static _Alignas(BLOCK_NBYTES) uint8_t scratch[READ_NBYTES];

static void hold_page(void) {
    const int is_large = one_in(10000);
    held.nbytes = is_large ? below(700000) : below(one_in(4) ? 1000 : 60);
    held.pieces = one_in(50) ? below(PIECES_MAX) : below(4);
    if (!held.pieces)
        held.nbytes = 0;
    for (size_t i = 0, left = held.nbytes; i < held.pieces; i++) {
        const size_t nbytes = i + 1 == held.pieces ? left : below(left + 1) / (held.pieces > 4 ? 16 : 1);
        held.iov[i] = (struct iovec){allocate(nbytes), nbytes};
        fill_random(held.iov[i].iov_base, nbytes);
        left -= nbytes;
    }
}

static void gather_page(uint8_t *into) {
    for (size_t i = 0; i < held.pieces; into += held.iov[i++].iov_len)
        memcpy(into, held.iov[i].iov_base, held.iov[i].iov_len);
}

/* In half of the cases, the page's memory can be taken back. */
static void lend_page(void) {
    lent.state = 0;
    lent.is_taken = 0;
    lent.is_revocable = one_in(2);
    lent.bytes = allocate(held.nbytes);
}

static void free_page(void) {
    for (size_t i = 0; i < held.pieces; i++)
        free(held.iov[i].iov_base);
}

static int holds(const uint8_t *bytes) {
    for (size_t i = 0; i < held.pieces; bytes += held.iov[i++].iov_len)
        if (held.iov[i].iov_len && memcmp(held.iov[i].iov_base, bytes, held.iov[i].iov_len))
            return 0;
    return 1;
}

static void seal(uint8_t *trailer) {
    const uint64_t digest = xxh3_64(trailer, SEALED_NBYTES);
    for (int i = 0; i < 8; i++)
        trailer[SEALED_NBYTES + i] = (uint8_t)(digest >> (56 - 8 * i));
}

static void make_trailer(uint8_t *trailer, const uint8_t *name, int synced) {
    memcpy(trailer, name, NAME_NBYTES);
    trailer[NAME_NBYTES] = (uint8_t)synced;
    fill_random(trailer + NAME_NBYTES + 1, SEALED_NBYTES - NAME_NBYTES - 1);
    seal(trailer);
}

static int is_of(const uint8_t *trailer, const uint8_t *name) {
    uint8_t sealed[TRAILER_NBYTES];
    memcpy(sealed, trailer, TRAILER_NBYTES);
    seal(sealed);
    return !memcmp(trailer, name, NAME_NBYTES) && !memcmp(trailer, sealed, TRAILER_NBYTES);
}

static void damage(void) {
    const size_t size = file.nbytes, at = size ? below(size) : 0;
    uint8_t *trailer = file.data + held.nbytes;
    switch (below(8)) {
    case 0:
        file.data[at] ^= (uint8_t)(1 << below(8));
        break;
    case 1:
        trailer[below(TRAILER_NBYTES)] ^= (uint8_t)(1 << below(8));
        break;
    case 2:
        file.nbytes = at;
        break;
    case 3:
        file.nbytes = size - below(size < 3 ? size + 1 : 3);
        break;
    case 4:
        file.nbytes += 1 + below(200);
        break;
    case 5:
        memset(trailer, 0, TRAILER_NBYTES);
        break;
    case 6: /* the name of another page */
        trailer[below(NAME_NBYTES)]++;
        seal(trailer);
        break;
    default:
        memmove(file.data, file.data + at, size - at);
        file.nbytes = size - at;
    }
}

/* Make the file that is found, for the page of this name. */
static void make_file(const uint8_t *name) {
    uint8_t *trailer = file.data + held.nbytes;
    file.nbytes = held.nbytes + TRAILER_NBYTES;
    file.is_there = !one_in(50);
    file.opened = file.renamed = file.failed = 0;
    file.work = file.written = 0;
    file.modified_ns = NOW_NS;
    fill_random(file.data, file.nbytes + 256);
    make_trailer(trailer, name, one_in(2) ? 0 : one_in(4) ? (int)below(256) : 1);
    for (size_t times = one_in(3) ? 0 : 1 + below(2); times; times--)
        damage();
}

/* --- what must come of it ----------------------------------------------------------------------------------------- */

/* Return the verdict on the file as it is. */
static int64_t verdict_of(const uint8_t *name) {
    const uint8_t *trailer = file.data + held.nbytes;
    if (!file.is_there)
        return MISS;
    if (file.nbytes != held.nbytes + TRAILER_NBYTES || !is_of(trailer, name))
        return WRONG;
    return trailer[NAME_NBYTES] ? HIT : UNSYNCED;
}

static void run_check(const uint8_t *name) {
    const int64_t touched_ns = one_in(2) ? NOW_NS + 5 : -1, expected = verdict_of(name);
    const int64_t verdict = file_check("path", name, held.nbytes, touched_ns);
    EXPECT(verdict == (file.failed ? -file.failed : expected));
    const int is_touched = touched_ns >= 0 && (verdict == HIT || verdict == UNSYNCED);
    EXPECT(file.modified_ns == (is_touched ? touched_ns : NOW_NS) && !file.opened);
}

static uint64_t digest_of(const uint8_t *bytes, size_t skip) {
    return skip < held.nbytes ? xxh3_64(bytes + skip, held.nbytes - skip) : xxh3_64("", 0);
}

static void run_read(const uint8_t *name) {
    const int64_t found = verdict_of(name), expected = found == UNSYNCED ? HIT : found;
    const int64_t touched_ns = one_in(2) ? NOW_NS + 5 : -1, interval_ns = one_in(2) ? 6 : 0;
    uint8_t *before = allocate(held.nbytes + 1);
    uint64_t digest = 0;
    const size_t skip = below(80);
    const int is_late = one_in(50);
    page_read wanted = {"path", name, held.iov, held.pieces, held.nbytes, touched_ns, interval_ns, one_in(2) ? &digest : NULL,
                        skip, lent.is_revocable ? &lent.state : NULL, 0};
    memcpy(before, file.data, held.nbytes);
    if (expected == HIT && one_in(3)) { /* a writer works at the same time */
        uint8_t other[NAME_NBYTES];
        memcpy(other, name, NAME_NBYTES);
        other[NAME_NBYTES - 1] += (uint8_t)below(2);
        fill_random(file.next, held.nbytes);
        make_trailer(file.next + held.nbytes, other, 0);
        file.work = held.nbytes + 2 * TRAILER_NBYTES;
    }
    int64_t verdict = file_read(&wanted, is_late ? -1 : 1, scratch);
    if (verdict == COLD)
        verdict = file_read(&wanted, 1, scratch);
    if (lent.is_taken)
        EXPECT(holds(lent.bytes));
    if (is_late)
        EXPECT(verdict == LATE);
    else if (file.failed)
        EXPECT(verdict == -file.failed);
    else if (verdict == REVOKED)
        EXPECT(lent.is_taken && (file.work || expected == HIT));
    else if (file.work)
        EXPECT(verdict == HIT || verdict == MISS || verdict == WRONG);
    else
        EXPECT(verdict == expected);
    if (verdict == HIT) {
        const int is_new = file.work && !holds(before);
        const uint8_t *bytes = is_new ? file.next : before;
        EXPECT(holds(bytes) && (!is_new || !memcmp(file.next + held.nbytes, name, NAME_NBYTES)));
        EXPECT(!wanted.digest || digest == digest_of(bytes, skip));
    }
    const int is_touched = verdict == HIT && touched_ns >= 0 && !interval_ns;
    EXPECT(file.modified_ns == (is_touched ? touched_ns : NOW_NS) && !file.opened);
    free(before);
}

static void run_write(const uint8_t *name) {
    const int recycled = one_in(2), was_there = file.is_there;
    const int is_kept = recycled && (!was_there || file.nbytes != held.nbytes + TRAILER_NBYTES ||
                                     file.data[held.nbytes + NAME_NBYTES]);
    if (!recycled)
        file.nbytes = file.is_there ? file.nbytes : 0;
    uint8_t *trailer = allocate(TRAILER_NBYTES);
    make_trailer(trailer, name, (int)below(2));
    const page_write wanted = {"path", "target", held.iov, held.pieces, held.nbytes, trailer, NOW_NS + 7, recycled,
                               {lent.is_revocable ? &lent.state : NULL, scratch}};
    const int64_t verdict = file_write(&wanted);
    if (recycled && file.failed == EACCES)
        EXPECT(verdict == KEPT);
    else if (file.failed)
        EXPECT(verdict == -file.failed && (file.failed == EACCES || !file.is_there) && !file.renamed);
    else if (!recycled && was_there)
        EXPECT(verdict == -EEXIST && file.modified_ns == NOW_NS);
    else if (verdict == REVOKED)
        EXPECT(lent.is_taken && !is_kept && !file.is_there && !file.renamed);
    else
        EXPECT(verdict == (is_kept ? KEPT : HIT));
    if (verdict == KEPT)
        EXPECT(file.is_there == was_there && file.modified_ns == NOW_NS && !file.renamed);
    if (verdict == HIT) {
        EXPECT(file.renamed && file.is_there && file.modified_ns == NOW_NS + 7);
        EXPECT(file.nbytes == held.nbytes + TRAILER_NBYTES && holds(file.data));
        EXPECT(!memcmp(file.data + held.nbytes, trailer, TRAILER_NBYTES));
    }
    EXPECT(!file.opened);
    free(trailer);
}

static void run_input(void) {
    uint8_t *name = allocate(NAME_NBYTES);
    fill_random(name, NAME_NBYTES);
    hold_page();
    lend_page();
    make_file(name);
    const size_t kind = below(4);
    if (kind == 0)
        run_check(name);
    else if (kind == 1)
        run_write(name);
    else
        run_read(name);
    free_page();
    free(lent.bytes);
    free(name);
}
