/* Lists of old pages, whole and damaged, to the function that takes lines from them under a lock. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fuzz.h"

enum { FILE_NBYTES = 1 << 13, DESCRIPTOR = 77 };
static const char MAGIC[] = "HiVictim";

static struct {
    uint8_t data[FILE_NBYTES], before[FILE_NBYTES];
    size_t nbytes;
    int opened, locked, has_locks, failed;
} file;

static double now_s;

double monotonic_s(void) { return now_s += 0.001; }

static int fails(void) {
    if (one_in(16)) {
        errno = EINTR;
        return 1;
    }
    if (!one_in(200))
        return 0;
    errno = EIO;
    file.failed = 1;
    return 1;
}

static int fuzz_open(const char *path, int flags) {
    EXPECT(path && flags == (O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    file.opened = 1;
    return DESCRIPTOR;
}

static int fuzz_close(int fd) {
    EXPECT(fd == DESCRIPTOR && file.opened && !file.locked);
    file.opened = 0;
    return 0;
}

static int fuzz_fstat(int fd, struct stat *status) {
    EXPECT(fd == DESCRIPTOR && file.opened);
    memset(status, 0, sizeof *status);
    status->st_mode = S_IFREG;
    status->st_nlink = 1;
    status->st_size = (off_t)file.nbytes;
    return 0;
}

static int fuzz_flock(int fd, int operation) {
    EXPECT(fd == DESCRIPTOR && file.opened);
    if (operation == LOCK_UN) {
        EXPECT(file.locked);
        file.locked = 0;
        return 0;
    }
    errno = one_in(4) ? EINTR : !file.has_locks ? ENOLCK : one_in(4) ? EWOULDBLOCK : 0;
    if (errno)
        return -1;
    file.locked = 1;
    return 0;
}

static size_t some(size_t nbytes) { return nbytes && one_in(4) ? 1 + below(nbytes) : nbytes; }

static ssize_t moved(const struct iovec *iov, int count, off_t offset, int writing) {
    EXPECT(count > 0 && offset >= 0);
    if (fails())
        return -1;
    size_t wanted = 0, done = 0;
    for (int i = 0; i < count; i++)
        wanted += iov[i].iov_len;
    const size_t left = (size_t)offset < file.nbytes ? file.nbytes - (size_t)offset : 0;
    const size_t limit = some(wanted < left ? wanted : left);
    for (int i = 0; i < count && done < limit; i++) {
        const size_t step = iov[i].iov_len < limit - done ? iov[i].iov_len : limit - done;
        uint8_t *at = file.data + offset + done;
        memcpy(writing ? at : iov[i].iov_base, writing ? iov[i].iov_base : at, step);
        done += step;
    }
    return (ssize_t)done;
}

static ssize_t fuzz_preadv(int fd, const struct iovec *iov, int count, off_t offset) {
    EXPECT(fd == DESCRIPTOR && file.opened);
    return moved(iov, count, offset, 0);
}

static ssize_t fuzz_pwritev(int fd, const struct iovec *iov, int count, off_t offset) {
    EXPECT(fd == DESCRIPTOR && file.opened);
    return moved(iov, count, offset, 1);
}

#define open(path, flags) fuzz_open(path, flags)
#define close(fd) fuzz_close(fd)
#define fstat(fd, status) fuzz_fstat(fd, status)
#define flock(fd, operation) fuzz_flock(fd, operation)
#define preadv(fd, iov, count, offset) fuzz_preadv(fd, iov, count, offset)
#define pwritev(fd, iov, count, offset) fuzz_pwritev(fd, iov, count, offset)
#define usleep(us) (now_s += 1e-6 * (us))
#include "pieces.c"
#include "locked_files.c"

static void append_line(void) {
    const size_t nbytes = one_in(40) ? 250 + below(12) : below(40);
    for (size_t i = 0; i < nbytes; i++)
        file.data[file.nbytes + i] = (uint8_t)('!' + below(90));
    file.nbytes += nbytes;
    file.data[file.nbytes++] = '\n';
}

static void make_list(void) {
    uint64_t taken = one_in(4) ? random64() : below(300);
    memcpy(file.data, one_in(16) ? "HiOthers" : MAGIC, 8);
    memcpy(file.data + 8, &taken, sizeof taken);
    fill_random(file.data + 16, 16);
    file.nbytes = 32;
    for (size_t lines = below(16); lines; lines--)
        append_line();
    if (one_in(4))
        file.nbytes = below(file.nbytes + 1);
    if (file.nbytes && one_in(4))
        file.data[below(file.nbytes)] ^= (uint8_t)(1 << below(8));
}

static void check_taken(const line_take *wanted) {
    uint64_t before, after;
    memcpy(&before, file.before + 8, sizeof before);
    memcpy(&after, wanted->header + 8, sizeof after);
    before = before < 32 ? 32 : before;
    EXPECT(wanted->end == file.nbytes && after == before + wanted->nbytes);
    size_t lines = 0, length = 0;
    for (size_t i = 0; i < wanted->nbytes; i++) {
        EXPECT(wanted->lines[i] == (char)file.before[before + i] && ++length <= LINE_MOST_NBYTES);
        if (wanted->lines[i] == '\n') {
            lines++;
            length = 0;
        }
    }
    const uint64_t left = file.nbytes > before ? file.nbytes - before : 0;
    uint64_t count = left / wanted->share_nbytes + 1;
    count = count < wanted->least ? wanted->least : count;
    count = count > wanted->most ? wanted->most : count;
    EXPECT(!length && lines <= count);
    if (lines < count && left > wanted->nbytes) { /* the next line must be too long, or not whole */
        const uint64_t rest = left - wanted->nbytes;
        EXPECT(!memchr(file.before + after, '\n', rest < LINE_MOST_NBYTES ? rest : LINE_MOST_NBYTES));
    }
    if (wanted->nbytes)
        EXPECT(!memcmp(file.data + 8, &after, sizeof after));
}

static void run_input(void) {
    make_list();
    memcpy(file.before, file.data, sizeof file.data);
    file.opened = file.locked = file.failed = 0;
    file.has_locks = !one_in(8);
    line_take wanted = {.path = "list", .magic = (const uint8_t *)MAGIC, .least = below(6), .most = 1 + below(12),
                        .share_nbytes = 1 + below(300), .wait_s = one_in(2) ? 0 : 1};
    wanted.lines = allocate((size_t)wanted.most * LINE_MOST_NBYTES);
    memset(wanted.lines, '\n', (size_t)wanted.most * LINE_MOST_NBYTES);
    const int64_t verdict = lines_take(&wanted);
    EXPECT(!file.opened && !file.locked && verdict != MISS && verdict != LATE);
    const int is_list = file.nbytes >= 32 && !memcmp(file.before, MAGIC, 8);
    if (verdict == HIT)
        check_taken(&wanted);
    else if (verdict == WRONG)
        EXPECT(!is_list);
    else
        EXPECT(verdict == -EIO && file.failed);
    if (verdict != HIT && !file.failed)
        EXPECT(!memcmp(file.data, file.before, sizeof file.data));
    for (size_t i = 0; i < sizeof file.data; i++)
        EXPECT(file.data[i] == file.before[i] || (i >= 8 && i < 16));
    free(wanted.lines);
}
