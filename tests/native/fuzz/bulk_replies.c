/* Feeds RESP replies, whole and damaged, in parts of any size, to the reader of bulk strings. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "fuzz.h"
#include "revocables.h"

enum { PAGES = 6, STREAM_NBYTES = 1 << 18, UNTOUCHED = 0xEE, TAKEN = 0x77 };
enum ending { ENDED, SILENT, BROKEN };
static const double DEADLINE_S = 1000;

/* The bytes that a server sends. `position` is that of the next byte that the reader receives. */
static struct {
    uint8_t data[STREAM_NBYTES];
    size_t nbytes, position;
    enum ending ending;
    int slow; /* the deadline can pass while bytes are on their way */
    int real; /* a connected socket that has the bytes, or -1 */
    double now_s;
} stream;

typedef struct {
    size_t nbytes, pieces;
    struct iovec *iov;
} page;

/* The page that is being read. If it is revocable, its owner may take it back while no access is in progress. */
static struct {
    uint64_t state;
    const page *held;
    int is_revocable, is_taken;
} lent;

static void fill(const page *held, int byte) {
    for (size_t i = 0; i < held->pieces; i++)
        memset(held->iov[i].iov_base, byte, held->iov[i].iov_len);
}

static void maybe_take(void) {
    if (!lent.is_revocable || lent.is_taken || !one_in(4))
        return;
    access_revoke(&lent.state);
    lent.is_taken = 1;
    fill(lent.held, TAKEN);
}

static ssize_t fuzz_recvmsg(int fd, struct msghdr *message, int flags) {
    if (stream.real >= 0)
        return recvmsg(fd, message, flags);
    const size_t left = stream.nbytes - stream.position;
    EXPECT(message->msg_iovlen && message->msg_iovlen <= 1024 && message->msg_iov[0].iov_len);
    errno = one_in(16) ? EINTR : one_in(16) || (!left && stream.ending == SILENT) ? EAGAIN : left ? 0 : EIO;
    if (errno == EINTR || errno == EAGAIN || (errno && stream.ending == BROKEN))
        return -1;
    const size_t limit = left && one_in(2) ? 1 + below(left < 16 ? left : 16) : left;
    const size_t done = scatter(message->msg_iov, message->msg_iovlen, stream.data + stream.position, limit);
    stream.position += done;
    return (ssize_t)done;
}

static int fuzz_poll(struct pollfd *polled, nfds_t count, int timeout_ms) {
    if (stream.real >= 0)
        return poll(polled, count, timeout_ms);
    EXPECT(count == 1 && polled->events == POLLIN && timeout_ms > 0);
    maybe_take();
    if (one_in(16)) {
        errno = EINTR;
        return -1;
    }
    const int is_over = stream.position == stream.nbytes && stream.ending == SILENT;
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
#define poll(polled, count, timeout_ms) fuzz_poll(polled, count, timeout_ms)
#define clock_gettime(clock, now) fuzz_clock_gettime(clock, now)
#include "pieces.c"
#include "revocables.c"
#include "sockets.c"
#undef recvmsg
#undef poll
#undef clock_gettime

static page make_page(void) {
    const int is_large = one_in(5000);
    page made = {is_large ? below(20000) : below(one_in(4) ? 300 : 40), is_large ? below(1200) : below(4), NULL};
    if (!made.pieces)
        made.nbytes = 0;
    if (made.pieces)
        made.iov = allocate(made.pieces * sizeof *made.iov);
    for (size_t i = 0, left = made.nbytes; i < made.pieces; i++) {
        const size_t nbytes = i + 1 == made.pieces ? left : below(left + 1);
        made.iov[i] = (struct iovec){allocate(nbytes), nbytes};
        left -= nbytes;
    }
    fill(&made, UNTOUCHED);
    return made;
}

static void free_page(page *old) {
    for (size_t i = 0; i < old->pieces; i++)
        free(old->iov[i].iov_base);
    free(old->iov);
}

static int holds(const page *held, const uint8_t *bytes) {
    for (size_t i = 0; i < held->pieces; bytes += held->iov[i++].iov_len)
        if (memcmp(held->iov[i].iov_base, bytes, held->iov[i].iov_len))
            return 0;
    return 1;
}

static int is_filled(const page *held, int byte) {
    for (size_t i = 0; i < held->pieces; i++)
        for (size_t n = 0; n < held->iov[i].iov_len; n++)
            if (((const uint8_t *)held->iov[i].iov_base)[n] != byte)
                return 0;
    return 1;
}

/* --- what the server sends ---------------------------------------------------------------------------------------- */

static const char *const WORDS[] = {"$-1\r\n", "$", "\r\n", "$0\r\n", "-1", "*-1\r\n", "\r", "\n", "$18446744073709551615\r\n",
                                    "99999999999999999999999999999999", "$-2\r\n", "$+5\r\n", "$007\r\n", ":1\r\n"};

static void append(const void *bytes, size_t nbytes) {
    EXPECT(stream.nbytes + nbytes <= STREAM_NBYTES / 2);
    memcpy(stream.data + stream.nbytes, bytes, nbytes);
    stream.nbytes += nbytes;
}

static void append_word(const char *word) { append(word, strlen(word)); }

static void append_bulk(size_t nbytes) {
    char header[32];
    snprintf(header, sizeof header, "$%zu\r\n", nbytes);
    append_word(header);
    EXPECT(stream.nbytes + nbytes <= STREAM_NBYTES / 2);
    fill_random(stream.data + stream.nbytes, nbytes);
    stream.nbytes += nbytes;
    append_word("\r\n");
}

static void append_reply(size_t nbytes) {
    static const char *const OTHERS[] = {"-ERR no\r\n",  ":12345\r\n", "+OK\r\n",       "*-1\r\n", "*1\r\n$1\r\na\r\n",
                                         "$-1\r\n$-1\r\n", "$-10\r\n",   "$-2\r\n", "$00000003\r\nabc\r\n", "$"};
    const size_t kind = below(20);
    if (kind < 15)
        append_bulk(nbytes);
    else if (kind < 18)
        append_word("$-1\r\n");
    else if (kind < 19)
        append_bulk(one_in(2) ? nbytes + 1 + below(3) : nbytes - below(nbytes + 1));
    else
        append_word(OTHERS[below(sizeof OTHERS / sizeof *OTHERS)]);
}

/* Replace `gone` bytes at `position` by others. */
static void splice(size_t position, size_t gone, const void *bytes, size_t nbytes) {
    uint8_t *at = stream.data + position;
    memmove(at + nbytes, at + gone, stream.nbytes - position - gone);
    memcpy(at, bytes, nbytes);
    stream.nbytes += nbytes - gone;
}

static void damage(void) {
    const size_t position = below(stream.nbytes + 1), left = stream.nbytes - position;
    const size_t length = left ? below(left < 64 ? left + 1 : 64) : 0;
    uint8_t copied[64];
    memcpy(copied, stream.data + position, length);
    const char *word = WORDS[below(sizeof WORDS / sizeof *WORDS)];
    switch (below(6)) {
    case 0:
        if (left)
            stream.data[position] ^= (uint8_t)(1 << below(8));
        break;
    case 1:
        stream.nbytes = position;
        break;
    case 2:
        splice(position, length, "", 0);
        break;
    case 3:
        splice(position, 0, copied, length);
        break;
    case 4:
        splice(position, 0, word, strlen(word));
        break;
    default:
        splice(position, strlen(word) < left ? strlen(word) : left, word, strlen(word));
    }
}

/* --- what the reader must find ------------------------------------------------------------------------------------ */

/* Return the verdict on the reply at `*position`, and move `*position` past a reply that was accepted. */
static int64_t verdict_of(size_t nbytes, size_t *position, int64_t ended) {
    const uint8_t *reply = stream.data + *position;
    const size_t left = stream.nbytes - *position;
    char header[32];
    const size_t header_nbytes = (size_t)snprintf(header, sizeof header, "$%zu\r\n", nbytes);
    if (left < 4)
        return ended;
    if (!memcmp(reply, "$-1\r", 4)) {
        *position += 5;
        return left < 5 ? ended : reply[4] == '\n' ? MISS : WRONG;
    }
    if (memcmp(reply, header, 4))
        return reply[0] == '$' ? WRONG : NO_BULK;
    if (left < header_nbytes)
        return ended;
    if (memcmp(reply, header, header_nbytes))
        return WRONG;
    const size_t whole = header_nbytes + nbytes + 2;
    if (left < whole)
        return ended;
    *position += whole;
    return memcmp(reply + whole - 2, "\r\n", 2) ? WRONG : HIT;
}

/* Check one verdict and its page. `position` is that of the page's reply. Return the position after the reply. */
static size_t check_verdict(int64_t verdict, const page *held, size_t position, const bulk_reader *reader) {
    static const int64_t ENDINGS[] = {-ECONNRESET, -ETIMEDOUT, -EIO};
    size_t next = position;
    const int64_t expected = verdict_of(held->nbytes, &next, ENDINGS[stream.ending]);
    EXPECT(verdict == expected || (stream.slow && verdict == -ETIMEDOUT) ||
           (verdict == REVOKED && expected == HIT && lent.is_taken));
    EXPECT(!lent.state || lent.is_taken);
    EXPECT(reader->head_nbytes <= HEAD_NBYTES);
    if (lent.is_taken)
        EXPECT(is_filled(held, TAKEN));
    else if (verdict == HIT)
        EXPECT(holds(held, stream.data + next - 2 - held->nbytes));
    else if (verdict == MISS || verdict == NO_BULK)
        EXPECT(is_filled(held, UNTOUCHED));
    if (verdict == HIT || verdict == REVOKED || verdict == MISS || verdict == NO_BULK)
        EXPECT(!memcmp(reader->head, stream.data + next, reader->head_nbytes));
    return next;
}

/* Put the bytes into a real socket, whose other side then ends the connection. */
static void open_real(void) {
    int pair[2];
    const size_t left = stream.nbytes - stream.position;
    EXPECT(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    EXPECT(write(pair[1], stream.data + stream.position, left) == (ssize_t)left);
    EXPECT(!close(pair[1]));
    stream.real = pair[0];
}

/* Close the real socket. The bytes that it still has were not received. */
static void close_real(void) {
    uint8_t rest[4096];
    stream.position = stream.nbytes;
    for (ssize_t got; (got = read(stream.real, rest, sizeof rest)) > 0;)
        stream.position -= (size_t)got;
    EXPECT(!close(stream.real));
}

static void receive_all(page *pages, size_t count, int more) {
    uint8_t *head = allocate(HEAD_NBYTES);
    const size_t begun = below((stream.nbytes < HEAD_NBYTES ? stream.nbytes : HEAD_NBYTES) + 1);
    memcpy(head, stream.data, begun);
    stream.position = begun;
    stream.real = -1;
    if (stream.ending == ENDED && !stream.slow && stream.nbytes < 4096 && one_in(1000))
        open_real();
    bulk_reader reader = {stream.real, head, begun, DEADLINE_S};
    int64_t verdict = HIT;
    size_t done = 0, position = 0;
    for (; done < count && (verdict == HIT || verdict == MISS || verdict == REVOKED); done++) {
        const page *held = pages + done;
        lent.held = held;
        lent.state = 0;
        lent.is_revocable = one_in(2);
        lent.is_taken = 0;
        if (stream.real < 0)
            maybe_take();
        verdict = bulk_read(&reader, held->iov, held->pieces, held->nbytes, more || done + 1 < count,
                            lent.is_revocable ? &lent.state : NULL);
        position = check_verdict(verdict, held, position, &reader);
    }
    for (size_t i = done; i < count; i++)
        EXPECT(is_filled(pages + i, UNTOUCHED));
    if (stream.real >= 0)
        close_real();
    if (verdict == HIT || verdict == REVOKED || verdict == MISS || verdict == NO_BULK)
        EXPECT(stream.position == position + reader.head_nbytes);
    if (!more && (verdict == HIT || verdict == REVOKED || verdict == MISS))
        EXPECT(!reader.head_nbytes);
    free(head);
}

static void run_input(void) {
    page pages[PAGES];
    const size_t count = 1 + below(PAGES);
    const int more = one_in(2);
    stream.nbytes = 0;
    stream.now_s = 1;
    stream.slow = one_in(8);
    stream.ending = one_in(2) ? ENDED : (enum ending)below(3);
    for (size_t i = 0; i < count; i++) {
        pages[i] = make_page();
        append_reply(pages[i].nbytes);
    }
    if (more && one_in(2))
        append_word(WORDS[below(sizeof WORDS / sizeof *WORDS)]);
    for (size_t times = one_in(3) ? 0 : 1 + below(3); times; times--)
        damage();
    receive_all(pages, count, more);
    for (size_t i = 0; i < count; i++)
        free_page(pages + i);
}
