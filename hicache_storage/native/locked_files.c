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

/* Lock a file. Return 0, LATE if another process holds the lock for `wait_s`, or -errno. */
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
