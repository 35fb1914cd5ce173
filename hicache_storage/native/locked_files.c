#define _GNU_SOURCE
#include "locked_files.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files.h"
#include "pieces.h"
#include "sockets.h"

static int64_t totals_add(int fd, uint64_t *added, uint64_t *removed) {
    const uint64_t most = (uint64_t)1 << 62;
    uint64_t totals[2];
    uint8_t record[sizeof totals + 1];
    const int64_t got = read_at(fd, record, sizeof record, 0);
    if (got < 0)
        return got;
    memcpy(totals, record, sizeof totals);
    if (got != sizeof totals || !totals[0] || totals[1] > totals[0] || totals[0] > most || *added > most || *removed > most)
        return WRONG;
    const int changed = *added || *removed;
    *added += totals[0];
    *removed += totals[1];
    if (*removed > *added)
        *removed = *added;
    uint64_t sums[2] = {*added, *removed};
    struct iovec whole = {sums, sizeof sums};
    const int64_t written = changed ? pieces_move(fd, &whole, 1, sizeof sums, 0, 1) : (int64_t)sizeof sums;
    if (written < 0)
        return written;
    return written == sizeof sums ? 0 : -EIO;
}

/* Lock a file. Return 0, LATE where another process has the lock for `wait_s`, or -errno. */
static int64_t file_lock(int fd, double wait_s) {
    const double until_s = monotonic_s() + wait_s;
    while (flock(fd, LOCK_EX | LOCK_NB)) {
        if (errno != EINTR && errno != EWOULDBLOCK)
            return -errno;
        if (errno == EWOULDBLOCK) {
            if (monotonic_s() > until_s)
                return LATE;
            usleep(50);
        }
    }
    return 0;
}

int64_t totals_change(int fd, double wait_s, uint64_t *added, uint64_t *removed) {
    struct stat status;
    if (fstat(fd, &status) || !status.st_nlink)
        return MISS;
    int64_t failed = file_lock(fd, wait_s);
    if (failed)
        return failed;
    failed = totals_add(fd, added, removed);
    (void)flock(fd, LOCK_UN);
    return failed ? failed : HIT;
}

/* Return the size of up to `count` whole lines at the begin of `text`. */
static size_t lines_nbytes(const char *text, size_t nbytes, uint64_t count) {
    size_t done = 0;
    for (; count; count--) {
        const size_t left = nbytes - done;
        const char *end = memchr(text + done, '\n', left < LINE_MOST_NBYTES ? left : LINE_MOST_NBYTES);
        if (!end)
            break;
        done = (size_t)(end - text) + 1;
    }
    return done;
}

static int64_t lines_take_from(int fd, line_take *wanted) {
    int64_t got = read_at(fd, wanted->header, LIST_HEADER_NBYTES, 0);
    if (got < 0)
        return got;
    struct stat status;
    if (got != LIST_HEADER_NBYTES || memcmp(wanted->header, wanted->magic, LIST_MAGIC_NBYTES))
        return WRONG;
    if (fstat(fd, &status))
        return -errno;
    uint8_t *const word = wanted->header + LIST_MAGIC_NBYTES;
    uint64_t taken;
    memcpy(&taken, word, sizeof taken);
    if (taken < LIST_HEADER_NBYTES)
        taken = LIST_HEADER_NBYTES;
    wanted->end = (uint64_t)status.st_size;
    const uint64_t left = wanted->end > taken ? wanted->end - taken : 0;
    uint64_t count = left / wanted->share_nbytes + 1;
    count = count < wanted->least ? wanted->least : count;
    count = count > wanted->most ? wanted->most : count;
    got = left ? read_at(fd, (uint8_t *)wanted->lines, (size_t)count * LINE_MOST_NBYTES, (int64_t)taken) : 0;
    if (got < 0)
        return got;
    wanted->nbytes = lines_nbytes(wanted->lines, (size_t)got, count);
    taken += wanted->nbytes;
    memcpy(word, &taken, sizeof taken);
    struct iovec whole = {word, sizeof taken};
    const int64_t written = wanted->nbytes ? pieces_move(fd, &whole, 1, sizeof taken, LIST_MAGIC_NBYTES, 1) : 0;
    return written < 0 ? written : HIT;
}

int64_t lines_take(line_take *wanted) {
    const int fd = open(wanted->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return -errno;
    struct stat status;
    int64_t verdict = fstat(fd, &status) ? -errno : S_ISREG(status.st_mode) ? 0 : -EINVAL;
    if (!verdict) {
        const int64_t failed = file_lock(fd, wanted->wait_s);
        verdict = lines_take_from(fd, wanted);
        if (!failed)
            (void)flock(fd, LOCK_UN);
    }
    (void)close(fd);
    return verdict;
}
