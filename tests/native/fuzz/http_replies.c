/* Feeds HTTP replies, whole and damaged, in parts of any size, to the exchanges of one connection. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include "fuzz.h"
#include "revocables.h"
#include "sockets.h"

enum { EXCHANGES = 4, SLOT_NBYTES = 256, STREAM_NBYTES = 1 << 14, FD = 7, UNTOUCHED = 0xEE, BODY = 0xB0, TAKEN = 0x77 };
enum ending { CLOSED, SILENT, BROKEN };

/* The bytes that a server sends. Each reply comes after its request. `asked` requests were sent. */
static struct {
    char data[STREAM_NBYTES];
    size_t nbytes, position;
    size_t ends[EXCHANGES]; /* of each reply, as it was before the damage */
    size_t asked, sent_nbytes, count;
    enum ending ending;
    int slow;
    double now_s;
} stream;

static const char HEAD[] = "GET / HTTP/1.1\r\n\r\n";

/* The memory of each exchange. If it is revocable, its owner may take it back while no access is in progress. */
static struct {
    uint64_t state;
    uint8_t *page, *body;
    size_t page_nbytes, body_nbytes;
    int is_revocable, is_taken;
} lent[EXCHANGES];

static void maybe_take(size_t count) {
    const size_t i = below(count);
    if (!lent[i].is_revocable || lent[i].is_taken || !one_in(8))
        return;
    EXPECT(!lent[i].state);
    access_revoke(&lent[i].state);
    lent[i].is_taken = 1;
    memset(lent[i].page, TAKEN, lent[i].page_nbytes);
    memset(lent[i].body, TAKEN, lent[i].body_nbytes);
}

static int is_within(const struct iovec *piece, const uint8_t *memory, size_t nbytes) {
    return piece->iov_len && (uint8_t *)piece->iov_base >= memory && (uint8_t *)piece->iov_base < memory + nbytes;
}

/* Check that lent memory is moved within one access. */
static void check_access(const struct msghdr *message) {
    for (size_t n = 0; n < message->msg_iovlen; n++)
        for (size_t i = 0; i < EXCHANGES; i++)
            if (lent[i].is_revocable && (is_within(message->msg_iov + n, lent[i].page, lent[i].page_nbytes) ||
                                         is_within(message->msg_iov + n, lent[i].body, lent[i].body_nbytes)))
                EXPECT(lent[i].state == 1);
}

double monotonic_s(void) { return stream.now_s; }

static size_t available(void) {
    const size_t end = stream.asked >= EXCHANGES || !stream.asked ? stream.nbytes : stream.ends[stream.asked - 1];
    return end > stream.position ? end - stream.position : 0;
}

static ssize_t fuzz_recvmsg(int fd, struct msghdr *message, int flags) {
    const size_t left = available();
    EXPECT(fd == FD && flags == MSG_DONTWAIT && message->msg_iovlen && message->msg_iovlen <= 1024);
    check_access(message);
    errno = one_in(16) ? EINTR : one_in(16) || (!left && stream.ending == SILENT) ? EAGAIN : left ? 0 : EIO;
    if (errno == EINTR || errno == EAGAIN || (errno && stream.ending == BROKEN))
        return -1;
    const size_t limit = left && one_in(2) ? 1 + below(left < 16 ? left : 16) : left;
    const size_t done = scatter(message->msg_iov, message->msg_iovlen, stream.data + stream.position, limit);
    stream.position += done;
    return (ssize_t)done;
}

static ssize_t fuzz_sendmsg(int fd, const struct msghdr *message, int flags) {
    EXPECT(fd == FD && flags == (MSG_DONTWAIT | MSG_NOSIGNAL) && message->msg_iovlen && message->msg_iovlen <= 2);
    check_access(message);
    errno = one_in(16) ? EINTR : one_in(16) ? EAGAIN : one_in(400) ? EPIPE : 0;
    if (errno)
        return -1;
    uint8_t sent[sizeof HEAD + 64];
    size_t nbytes = 0;
    for (size_t i = 0; i < message->msg_iovlen; i++) {
        memcpy(sent + nbytes, message->msg_iov[i].iov_base, message->msg_iov[i].iov_len);
        nbytes += message->msg_iov[i].iov_len;
    }
    const size_t step = one_in(4) ? 1 + below(nbytes) : nbytes;
    for (size_t i = 0; i < step; i++, stream.sent_nbytes++)
        EXPECT(sent[i] == (stream.sent_nbytes < sizeof HEAD - 1 ? (uint8_t)HEAD[stream.sent_nbytes] : BODY));
    EXPECT(stream.sent_nbytes <= sizeof HEAD - 1 + lent[stream.asked].body_nbytes);
    if (stream.sent_nbytes == sizeof HEAD - 1 + lent[stream.asked].body_nbytes) {
        stream.asked++;
        stream.sent_nbytes = 0;
    }
    return (ssize_t)step;
}

static int fuzz_poll(struct pollfd *polled, nfds_t count, int timeout_ms) {
    EXPECT(count == 1);
    maybe_take(stream.count);
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
#include "pieces.c"
#include "revocables.c"
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
static void check_whole(const exchange *one, size_t index, size_t page_nbytes, size_t position) {
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
        EXPECT(lent[index].is_taken || !memcmp(lent[index].page, stream.data + position + state->head_nbytes, page_nbytes));
    } else {
        EXPECT(strtoll(value, NULL, 10) == state->received - state->head_nbytes && !state->filled);
    }
}

static void check(const exchange *one, size_t index, size_t page_nbytes, size_t *position) {
    const exchange_state *state = one->state;
    const uint8_t *page = lent[index].page;
    const int is_taken = lent[index].is_taken;
    const size_t head_nbytes = (size_t)state->head_nbytes, received = (size_t)state->received;
    const size_t filled = (size_t)state->filled, behind = filled ? received - head_nbytes : 0;
    EXPECT(state->sent >= 0 && state->sent <= one->out_nbytes && received <= SLOT_NBYTES && filled <= page_nbytes);
    EXPECT(head_nbytes <= received && behind <= filled);
    EXPECT(!memcmp(one->slot, stream.data + *position, received));
    EXPECT(!filled || is_taken || !memcmp(page, stream.data + *position + head_nbytes, filled));
    for (size_t i = is_taken ? 0 : filled; i < page_nbytes; i++)
        EXPECT(page[i] == (is_taken ? TAKEN : UNTOUCHED));
    EXPECT(is_taken || !lent[index].state);
    if (state->verdict >= 200)
        check_whole(one, index, page_nbytes, *position);
    else
        EXPECT(state->verdict <= STALE || (state->verdict == REVOKED && is_taken));
    if (state->lane < 0)
        EXPECT(!state->sent && !received && !state->verdict);
    *position += received + filled - behind;
}

static void run_input(void) {
    exchange all[EXCHANGES];
    exchange_state states[EXCHANGES];
    struct iovec requests[EXCHANGES][2], memory[EXCHANGES];
    const size_t count = 1 + below(EXCHANGES), page_nbytes = one_in(8) ? 0 : 1 + below(one_in(4) ? 900 : 40);
    memset(lent, 0, sizeof lent);
    stream.nbytes = stream.position = stream.asked = stream.sent_nbytes = 0;
    stream.count = count;
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
        const size_t body_nbytes = one_in(2) ? 0 : 1 + below(60);
        lent[i].page = allocate(lent[i].page_nbytes = page_nbytes);
        lent[i].body = allocate(lent[i].body_nbytes = body_nbytes);
        lent[i].is_revocable = one_in(2);
        memset(lent[i].page, UNTOUCHED, page_nbytes);
        memset(lent[i].body, BODY, body_nbytes);
        requests[i][0] = (struct iovec){(void *)HEAD, sizeof HEAD - 1};
        requests[i][1] = (struct iovec){lent[i].body, body_nbytes};
        memory[i] = (struct iovec){lent[i].page, page_nbytes};
        states[i] = (exchange_state){0, i ? -1 : 0, 0, 0, 0, 0};
        all[i] = (exchange){&states[i], requests[i], body_nbytes ? 2 : 1, (int64_t)(sizeof HEAD - 1 + body_nbytes),
                            &memory[i], page_nbytes ? 1 : 0, (int64_t)page_nbytes,
                            lent[i].is_revocable ? &lent[i].state : NULL, 1, allocate(SLOT_NBYTES), SLOT_NBYTES};
    }
    maybe_take(count);
    lane one = {FD, NULL};
    struct pollfd polled;
    EXPECT(exchanges_run(all, count, &one, &polled, 1, 1000) == 0);
    size_t position = 0;
    for (size_t i = 0; i < count; i++)
        check(&all[i], i, page_nbytes, &position);
    EXPECT(position == stream.position);
    for (size_t i = 0; i < count; i++) {
        free(lent[i].page);
        free(lent[i].body);
        free(all[i].slot);
    }
}
