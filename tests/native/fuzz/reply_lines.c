/* Feeds lines of RESP replies, whole and damaged, in parts of any size, to the exchange of requests for lines. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include "fuzz.h"

enum { REQUESTS = 6, STREAM_NBYTES = 1 << 18, FD = 7 };
enum ending { ENDED, SILENT, BROKEN };
static const double DEADLINE_S = 1000;

static struct {
    char data[STREAM_NBYTES];
    size_t nbytes, position;
    uint8_t sent[4096];
    size_t sent_nbytes;
    enum ending ending;
    int slow;
    double now_s;
} stream;

static ssize_t fuzz_recvmsg(int fd, struct msghdr *message, int flags) {
    const size_t left = stream.nbytes - stream.position;
    EXPECT(fd == FD && flags == MSG_DONTWAIT && message->msg_iovlen == 1 && message->msg_iov->iov_len);
    errno = one_in(16) ? EINTR : one_in(16) || (!left && stream.ending == SILENT) ? EAGAIN : left ? 0 : EIO;
    if (errno == EINTR || errno == EAGAIN || (errno && stream.ending == BROKEN))
        return -1;
    const size_t limit = left && one_in(2) ? 1 + below(left < 16 ? left : 16) : left;
    const size_t step = scatter(message->msg_iov, message->msg_iovlen, stream.data + stream.position, limit);
    stream.position += step;
    return (ssize_t)step;
}

static ssize_t fuzz_sendmsg(int fd, const struct msghdr *message, int flags) {
    EXPECT(fd == FD && flags == (MSG_DONTWAIT | MSG_NOSIGNAL) && message->msg_iovlen && message->msg_iov->iov_len);
    errno = one_in(16) ? EINTR : one_in(16) ? EAGAIN : one_in(400) ? EPIPE : 0;
    if (errno)
        return -1;
    const struct iovec *piece = message->msg_iov;
    const size_t step = one_in(4) ? 1 + below(piece->iov_len) : piece->iov_len;
    EXPECT(stream.sent_nbytes + step <= sizeof stream.sent);
    memcpy(stream.sent + stream.sent_nbytes, piece->iov_base, step);
    stream.sent_nbytes += step;
    return (ssize_t)step;
}

static int fuzz_poll(struct pollfd *polled, nfds_t count, int timeout_ms) {
    EXPECT(count == 1 && timeout_ms > 0);
    if (one_in(16)) {
        errno = EINTR;
        return -1;
    }
    const int is_over = polled->events == POLLIN && stream.position == stream.nbytes && stream.ending == SILENT;
    if (!is_over && !(stream.slow && one_in(8)))
        return 1;
    stream.now_s += timeout_ms;
    return 0;
}

static int fuzz_clock_gettime(clockid_t clock, struct timespec *now) {
    (void)clock;
    *now = (struct timespec){(time_t)stream.now_s, 0};
    return 0;
}

#define recvmsg(fd, message, flags) fuzz_recvmsg(fd, message, flags)
#define sendmsg(fd, message, flags) fuzz_sendmsg(fd, message, flags)
#define poll(polled, count, timeout_ms) fuzz_poll(polled, count, timeout_ms)
#define clock_gettime(clock, now) fuzz_clock_gettime(clock, now)
#include "pieces.c"
#include "revocables.c"
#include "sockets.c"
#undef recvmsg
#undef sendmsg
#undef poll
#undef clock_gettime

static void append(const char *text, size_t nbytes) {
    EXPECT(stream.nbytes + nbytes <= STREAM_NBYTES / 2);
    memcpy(stream.data + stream.nbytes, text, nbytes);
    stream.nbytes += nbytes;
}

static void append_line(int is_long) {
    static const char *const LINES[] = {"+OK\r\n", ":1\r\n", "$-1\r\n", "-ERR no\r\n", "+OK\r\n", "*1\r\n", "\r\n", "+a\nb\r\n"};
    if (is_long && !one_in(8)) {
        const size_t nbytes = one_in(64) ? LINE_MOST - 8 + below(16) : below(LINE_MOST);
        append("-", 1);
        EXPECT(stream.nbytes + nbytes <= STREAM_NBYTES / 2);
        memset(stream.data + stream.nbytes, 'x', nbytes);
        stream.nbytes += nbytes;
        append("\r\n", 2);
        return;
    }
    const char *line = LINES[one_in(12) ? below(8) : below(5)];
    append(line, strlen(line));
}

static void damage(void) {
    const size_t position = below(stream.nbytes + 1), left = stream.nbytes - position;
    if (one_in(2))
        stream.nbytes = position;
    else if (left)
        stream.data[position] ^= (char)(1 << below(8));
}

/* Return whether `text` is some whole replies of one line, then the beginning of one. Count the whole ones. */
static int is_plain(const char *text, size_t nbytes, int64_t *lines) {
    const char *end = text + nbytes;
    for (*lines = 0; text < end; (*lines)++) {
        if (*text != '+' && *text != '-' && *text != ':' && *text != '$')
            return 0;
        const char *begin = text;
        while (text < end && *text != '\n')
            text++;
        if (text - begin > LINE_MOST)
            return 0;
        if (text == end)
            return 1;
        text++;
    }
    return 1;
}

static void run_input(void) {
    struct iovec iov[2 * REQUESTS];
    size_t first[REQUESTS + 1] = {0}, nbytes = 0;
    int64_t replies[REQUESTS], wanted = 0, lines = 0;
    const size_t text_nbytes = 2 * REQUESTS * 8;
    uint8_t *text = allocate(text_nbytes);
    const size_t count = below(REQUESTS + 1);
    const int is_long = one_in(200);
    stream.nbytes = stream.position = stream.sent_nbytes = 0;
    stream.now_s = 1;
    stream.slow = one_in(8);
    stream.ending = (enum ending)below(3);
    fill_random(text, text_nbytes);
    for (size_t i = 0; i < count; i++) {
        for (size_t piece = 0; piece < 2; piece++) {
            const size_t step = piece ? 1 + below(8) : below(8);
            iov[2 * i + piece] = (struct iovec){text + nbytes, step};
            nbytes += step;
        }
        first[i + 1] = 2 * (i + 1);
        wanted += replies[i] = 1 + (int64_t)below(3);
        for (int64_t line = 0; line < replies[i]; line++)
            append_line(is_long);
    }
    if (one_in(8))
        append_line(is_long);
    for (size_t times = one_in(2) ? 0 : 1 + below(2); times; times--)
        damage();
    line_exchange all = {FD, iov, first, replies, count, 1 + below(REQUESTS), DEADLINE_S, NULL, 0, NULL};
    const int64_t verdict = lines_exchange(&all);
    EXPECT(stream.sent_nbytes <= nbytes && !memcmp(stream.sent, text, stream.sent_nbytes));
    EXPECT(all.nbytes == stream.position && (!all.nbytes || !memcmp(all.received, stream.data, all.nbytes)));
    const int plain = is_plain(stream.data, all.nbytes, &lines);
    EXPECT(plain == (verdict != WRONG));
    if (verdict == HIT)
        EXPECT(lines >= wanted && stream.sent_nbytes == nbytes);
    else if (verdict != WRONG)
        EXPECT(verdict < 0 && (lines < wanted || stream.sent_nbytes < nbytes));
    free(all.received);
    free(text);
}
