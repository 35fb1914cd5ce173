/* Feeds HTTP replies, whole and damaged, in parts of any size, to the exchanges of one connection. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include "fuzz.h"
#include "sockets.h"

enum { EXCHANGES = 4, SLOT_NBYTES = 256, STREAM_NBYTES = 1 << 14, FD = 7, UNTOUCHED = 0xEE };
enum ending { CLOSED, SILENT, BROKEN };

/* The bytes that a server sends. Each reply comes after its request. `asked` requests were sent. */
static struct {
    char data[STREAM_NBYTES];
    size_t nbytes, position;
    size_t ends[EXCHANGES]; /* of each reply, as it was before the damage */
    size_t asked;
    enum ending ending;
    int slow;
    double now_s;
} stream;

double monotonic_s(void) { return stream.now_s; }

static size_t available(void) {
    const size_t end = stream.asked >= EXCHANGES || !stream.asked ? stream.nbytes : stream.ends[stream.asked - 1];
    return end > stream.position ? end - stream.position : 0;
}

static ssize_t fuzz_recvmsg(int fd, struct msghdr *message, int flags) {
    const size_t left = available();
    EXPECT(fd == FD && flags == MSG_DONTWAIT && message->msg_iovlen && message->msg_iovlen <= 1024);
    errno = one_in(16) ? EINTR : one_in(16) || (!left && stream.ending == SILENT) ? EAGAIN : left ? 0 : EIO;
    if (errno == EINTR || errno == EAGAIN || (errno && stream.ending == BROKEN))
        return -1;
    const size_t limit = left && one_in(2) ? 1 + below(left < 16 ? left : 16) : left;
    const size_t done = scatter(message->msg_iov, message->msg_iovlen, stream.data + stream.position, limit);
    stream.position += done;
    return (ssize_t)done;
}

static ssize_t fuzz_sendmsg(int fd, const struct msghdr *message, int flags) {
    EXPECT(fd == FD && flags == (MSG_DONTWAIT | MSG_NOSIGNAL) && message->msg_iovlen == 1);
    errno = one_in(16) ? EINTR : one_in(16) ? EAGAIN : one_in(400) ? EPIPE : 0;
    if (errno)
        return -1;
    const struct iovec *piece = message->msg_iov;
    const size_t step = one_in(4) ? 1 + below(piece->iov_len) : piece->iov_len;
    stream.asked += step == piece->iov_len; /* the request is one piece, and its last byte is sent */
    return (ssize_t)step;
}

static int fuzz_poll(struct pollfd *polled, nfds_t count, int timeout_ms) {
    EXPECT(count == 1);
    if (one_in(16)) {
        errno = EINTR;
        return -1;
    }
    const size_t left = available();
    polled->revents = (short)(polled->events & POLLOUT);
    if (left || (stream.position == stream.nbytes && stream.ending != SILENT && timeout_ms))
        polled->revents |= POLLIN & polled->events;
    if (polled->revents && !(stream.slow && one_in(8)))
        return 1;
    stream.now_s += timeout_ms;
    return 0;
}

#define recvmsg(fd, message, flags) fuzz_recvmsg(fd, message, flags)
#define sendmsg(fd, message, flags) fuzz_sendmsg(fd, message, flags)
#define poll(polled, count, timeout_ms) fuzz_poll(polled, count, timeout_ms)
#include "exchanges.c"
#undef recvmsg
#undef sendmsg
#undef poll

/* --- what the server sends ---------------------------------------------------------------------------------------- */

static void append(const char *text) {
    const size_t nbytes = strlen(text);
    EXPECT(stream.nbytes + nbytes <= STREAM_NBYTES / 2);
    memcpy(stream.data + stream.nbytes, text, nbytes);
    stream.nbytes += nbytes;
}

static const char *const WORDS[] = {"\r\n",          "\r\n\r\n",          "Content-Length: 5\r\n", "content-length:0\r\n", ": ",
                                    "200",           "HTTP/1.1 ",         "HTTP/1.0 200 OK\r\n",   "1",                    "\n",
                                    "-1",            "connection: close", "9999999999999999999",   "\t",                   "100",
                                    "transfer-encoding: chunked\r\n"};

static void append_reply(size_t page_nbytes) {
    static const char *const HEADS[] = {"HTTP/1.1 200 OK\r\n", "HTTP/1.1 200\r\n", "HTTP/1.1 404 Not Found\r\n",
                                        "HTTP/1.1 204 \r\n",   "HTTP/1.1 503 Slow Down\r\n"};
    static const char *const OTHERS[] = {"server: x\r\n", "Connection: keep-alive\r\n", "x-id:  7 \r\n",
                                         "connection: close\r\n", "transfer-encoding: chunked\r\n"};
    const size_t kind = below(10) < 6 ? below(2) : below(5);
    size_t nbytes = kind < 2 ? page_nbytes : kind == 3 ? 0 : below(60);
    char line[64];
    append(HEADS[kind]);
    for (size_t times = below(3); times; times--)
        append(OTHERS[one_in(8) ? below(5) : below(3)]);
    if (one_in(30)) {
        snprintf(line, sizeof line, "content-length:%zu\r\n", below(60));
        append(line);
    }
    if (kind != 3 || one_in(4)) {
        snprintf(line, sizeof line, "%s: %zu\r\n", one_in(2) ? "content-length" : "Content-Length", nbytes);
        append(line);
    }
    append("\r\n");
    EXPECT(stream.nbytes + nbytes <= STREAM_NBYTES / 2);
    fill_random((uint8_t *)stream.data + stream.nbytes, nbytes);
    stream.nbytes += nbytes;
}

static void damage(void) {
    const size_t position = below(stream.nbytes + 1), left = stream.nbytes - position;
    const char *word = WORDS[below(sizeof WORDS / sizeof *WORDS)];
    const size_t nbytes = strlen(word), gone = below(left < 40 ? left + 1 : 40);
    char *at = stream.data + position;
    switch (below(4)) {
    case 0:
        if (left)
            *at ^= (char)(1 << below(8));
        break;
    case 1:
        stream.nbytes = position;
        break;
    case 2:
        memmove(at, at + gone, left - gone);
        stream.nbytes -= gone;
        break;
    default:
        memmove(at + nbytes, at, left);
        memcpy(at, word, nbytes);
        stream.nbytes += nbytes;
    }
}

/* --- what the exchanges must find --------------------------------------------------------------------------------- */

/* Return the number of headers of that name, in small letters, and the value of the last one. */
static size_t headers(const char *head, const char *name, char *value) {
    size_t count = 0;
    for (const char *line = strstr(head, "\r\n"); line; line = strstr(line + 2, "\r\n")) {
        const size_t nbytes = strlen(name);
        if (strncasecmp(line + 2, name, nbytes) || line[2 + nbytes] != ':')
            continue;
        const char *begin = line + 2 + nbytes + 1;
        size_t length = strcspn(begin, "\r");
        for (; length && strchr(" \t", *begin); length--)
            begin++;
        while (length && strchr(" \t", begin[length - 1]))
            length--;
        if (count++ && !strcmp(name, "connection") && strcasecmp(value, "keep-alive"))
            break;
        snprintf(value, SLOT_NBYTES, "%.*s", (int)length, begin);
    }
    return count;
}

/* Check a reply that was found whole, whose first byte is at `position` of the stream. */
static void check_whole(const exchange *one, const uint8_t *page, size_t page_nbytes, size_t position) {
    const exchange_state *state = one->state;
    char head[SLOT_NBYTES + 1];
    EXPECT(state->head_nbytes >= 16 && state->head_nbytes <= state->received);
    memcpy(head, one->slot, (size_t)state->head_nbytes);
    head[state->head_nbytes] = 0;
    EXPECT(strlen(head) == (size_t)state->head_nbytes && !strcmp(head + state->head_nbytes - 4, "\r\n\r\n"));
    EXPECT(strstr(head, "\r\n\r\n") == head + state->head_nbytes - 4);
    EXPECT(!memcmp(head, "HTTP/1.1 ", 9) && strtol(head + 9, NULL, 10) == state->verdict);
    char value[SLOT_NBYTES];
    EXPECT(!headers(head, "connection", value) || !strcasecmp(value, "keep-alive"));
    if (state->verdict == 204 || state->verdict == 304) {
        EXPECT(state->received == state->head_nbytes);
        return;
    }
    EXPECT(!headers(head, "transfer-encoding", value));
    EXPECT(headers(head, "content-length", value) == 1 && *value && strspn(value, "0123456789") == strlen(value));
    if (state->verdict == 200 && page_nbytes) {
        EXPECT(strtoull(value, NULL, 10) == page_nbytes && (size_t)state->filled == page_nbytes);
        EXPECT(!memcmp(page, stream.data + position + state->head_nbytes, page_nbytes));
    } else {
        EXPECT(strtoll(value, NULL, 10) == state->received - state->head_nbytes && !state->filled);
    }
}

static void check(const exchange *one, const uint8_t *page, size_t page_nbytes, size_t *position) {
    const exchange_state *state = one->state;
    const size_t head_nbytes = (size_t)state->head_nbytes, received = (size_t)state->received;
    const size_t filled = (size_t)state->filled, behind = filled ? received - head_nbytes : 0;
    EXPECT(state->sent >= 0 && state->sent <= one->out_nbytes && received <= SLOT_NBYTES && filled <= page_nbytes);
    EXPECT(head_nbytes <= received && behind <= filled);
    EXPECT(!memcmp(one->slot, stream.data + *position, received));
    EXPECT(!filled || !memcmp(page, stream.data + *position + head_nbytes, filled));
    for (size_t i = filled; i < page_nbytes; i++)
        EXPECT(page[i] == UNTOUCHED);
    if (state->verdict >= 200)
        check_whole(one, page, page_nbytes, *position);
    else
        EXPECT(state->verdict <= STALE);
    if (state->lane < 0)
        EXPECT(!state->sent && !received && !state->verdict);
    *position += received + filled - behind;
}

static void run_input(void) {
    exchange all[EXCHANGES];
    exchange_state states[EXCHANGES];
    struct iovec requests[EXCHANGES], memory[EXCHANGES];
    const size_t count = 1 + below(EXCHANGES), page_nbytes = one_in(8) ? 0 : 1 + below(one_in(4) ? 900 : 40);
    char text[] = "GET / HTTP/1.1\r\n\r\n";
    stream.nbytes = stream.position = stream.asked = 0;
    stream.now_s = 1;
    stream.slow = one_in(8);
    stream.ending = (enum ending)below(3);
    for (size_t i = 0; i < EXCHANGES; i++) {
        if (i < count)
            append_reply(page_nbytes);
        stream.ends[i] = stream.nbytes;
    }
    for (size_t times = one_in(3) ? 0 : 1 + below(3); times; times--)
        damage();
    for (size_t i = 0; i < count; i++) {
        requests[i] = (struct iovec){text, sizeof text - 1};
        memory[i] = (struct iovec){allocate(page_nbytes), page_nbytes};
        memset(memory[i].iov_base, UNTOUCHED, page_nbytes);
        states[i] = (exchange_state){0, i ? -1 : 0, 0, 0, 0, 0};
        all[i] = (exchange){&states[i], &requests[i], 1, sizeof text - 1, &memory[i], page_nbytes ? 1 : 0,
                            (int64_t)page_nbytes, 1, allocate(SLOT_NBYTES), SLOT_NBYTES};
    }
    uint8_t *pages[EXCHANGES];
    for (size_t i = 0; i < count; i++)
        pages[i] = memory[i].iov_base;
    lane one = {FD, NULL};
    struct pollfd polled;
    EXPECT(exchanges_run(all, count, &one, &polled, 1, 1000) == 0);
    size_t position = 0;
    for (size_t i = 0; i < count; i++)
        check(&all[i], pages[i], page_nbytes, &position);
    EXPECT(position == stream.position);
    for (size_t i = 0; i < count; i++) {
        free(pages[i]);
        free(all[i].slot);
    }
}
