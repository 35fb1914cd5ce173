#define _GNU_SOURCE
#include "sockets.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "files.h"

enum { MAX_PIECES = 1024, LOCAL_PIECES = 64, HEADER_NBYTES = 32, STEP_NBYTES = 1 << 14 };

double monotonic_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Wait until the socket is ready. Return 0 or -errno. A signal does not lengthen the wait. */
static int await(int fd, short events, double deadline_s) {
    struct pollfd polled = {.fd = fd, .events = events};
    for (;;) {
        const double left_s = deadline_s - monotonic_s();
        if (left_s <= 0)
            return -ETIMEDOUT;
        const double left_ms = left_s * 1000 + 1;
        const int ready = poll(&polled, 1, left_ms > INT_MAX ? INT_MAX : (int)left_ms);
        if (ready > 0)
            return 0;
        if (ready < 0 && errno != EINTR)
            return -errno;
    }
}

/* Drop `nbytes` from the front of the pieces. */
static void drop(struct iovec **iov, size_t *pieces, size_t nbytes) {
    while (*pieces && nbytes >= (*iov)->iov_len) {
        nbytes -= (*iov)->iov_len;
        (*iov)++;
        (*pieces)--;
    }
    if (*pieces && nbytes) {
        (*iov)->iov_base = (uint8_t *)(*iov)->iov_base + nbytes;
        (*iov)->iov_len -= nbytes;
    }
}

int64_t socket_send(int fd, struct iovec *iov, size_t pieces, double deadline_s) {
    drop(&iov, &pieces, 0);
    while (pieces) {
        struct msghdr message = {.msg_iov = iov, .msg_iovlen = pieces < MAX_PIECES ? pieces : MAX_PIECES};
        const ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) {
            drop(&iov, &pieces, (size_t)sent);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            const int failed = await(fd, POLLOUT, deadline_s);
            if (failed)
                return failed;
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return 0;
}

/* The pieces of a list whose memory may be revocable. */
typedef struct {
    uint64_t *state; /* NULL: it is not */
    const struct iovec *begin, *end;
    int is_revoked;
} lent_pieces;

/* Receive what is there, within one access if it is for lent memory. From a revoke on, what is for that memory is lost. */
static ssize_t receive_now(int fd, struct iovec *iov, size_t pieces, lent_pieces *lent) {
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = pieces < MAX_PIECES ? pieces : MAX_PIECES};
    if (!lent || !lent->state || iov >= lent->end)
        return recvmsg(fd, &message, MSG_DONTWAIT);
    uint8_t lost[STEP_NBYTES];
    struct iovec part[PIECES_A_CHUNK];
    cursor at = {iov, pieces, 0};
    size_t nbytes;
    lent->is_revoked = lent->is_revoked || !access_begin(lent->state);
    message.msg_iov = part;
    message.msg_iovlen = pieces_take(&at, part, PIECES_A_CHUNK, lent->is_revoked ? sizeof lost : CHUNK_NBYTES, &nbytes);
    for (size_t i = 0; lent->is_revoked && i < message.msg_iovlen; i++)
        if (iov + i >= lent->begin && iov + i < lent->end)
            part[i].iov_base = lost;
    const ssize_t received = recvmsg(fd, &message, MSG_DONTWAIT);
    if (!lent->is_revoked)
        access_end(lent->state);
    return received;
}

/* Receive as `socket_receive` does. Afterwards `iov` and `pieces` are what is left to fill. `lent` may be NULL. */
static int64_t receive(int fd, struct iovec **iov, size_t *pieces, size_t least, double deadline_s, lent_pieces *lent) {
    size_t received = 0;
    drop(iov, pieces, 0);
    while (*pieces && received < least) {
        const ssize_t step = receive_now(fd, *iov, *pieces, lent);
        if (step > 0) {
            received += (size_t)step;
            drop(iov, pieces, (size_t)step);
        } else if (!step) {
            return -ECONNRESET;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            const int failed = await(fd, POLLIN, deadline_s);
            if (failed)
                return failed;
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return (int64_t)received;
}

int64_t socket_receive(int fd, struct iovec *iov, size_t pieces, size_t least, double deadline_s) {
    return receive(fd, &iov, &pieces, least, deadline_s, NULL);
}

static int64_t read_null(bulk_reader *reader, int more) {
    uint8_t end;
    struct iovec pieces[2] = {{&end, 1}, {reader->head, HEAD_NBYTES}};
    const int64_t received = socket_receive(reader->fd, pieces, more ? 2 : 1, 1, reader->deadline_s);
    if (received < 0)
        return received;
    reader->head_nbytes = (size_t)received - 1;
    return end == '\n' ? MISS : WRONG;
}

/* Receive the rest of the header, the page and its end. `iov` holds the page's `pieces` pieces from index 1 on, and has
 * room for three more. */
static int64_t read_rest(bulk_reader *reader, struct iovec *iov, size_t pieces, const char *header, uint64_t nbytes,
                         int more, uint64_t *state) {
    lent_pieces lent = {state, iov + 1, iov + 1 + pieces, 0};
    uint8_t begun[HEADER_NBYTES], end[2];
    const size_t begun_nbytes = strlen(header) - HEAD_NBYTES, least = begun_nbytes + (size_t)nbytes + sizeof end;
    size_t count = pieces + 2;
    iov[0] = (struct iovec){begun, begun_nbytes};
    iov[pieces + 1] = (struct iovec){end, sizeof end};
    if (more)
        iov[count++] = (struct iovec){reader->head, HEAD_NBYTES};
    const int64_t first = receive(reader->fd, &iov, &count, begun_nbytes, reader->deadline_s, &lent);
    if (first < 0)
        return first;
    if (memcmp(begun, header + HEAD_NBYTES, begun_nbytes))
        return WRONG;
    const size_t left = (size_t)first < least ? least - (size_t)first : 0;
    const int64_t second = receive(reader->fd, &iov, &count, left, reader->deadline_s, &lent);
    if (second < 0)
        return second;
    reader->head_nbytes = (size_t)(first + second) - least;
    const int64_t verdict = memcmp(end, "\r\n", sizeof end) ? WRONG : HIT;
    return verdict == HIT && lent.is_revoked ? REVOKED : verdict;
}

int64_t bulk_read(bulk_reader *reader, const struct iovec *iov, size_t pieces, uint64_t nbytes, int more, uint64_t *state) {
    struct iovec head = {reader->head + reader->head_nbytes, HEAD_NBYTES - reader->head_nbytes};
    const int64_t received = socket_receive(reader->fd, &head, 1, head.iov_len, reader->deadline_s);
    if (received < 0)
        return received;
    reader->head_nbytes = HEAD_NBYTES;
    if (!memcmp(reader->head, "$-1\r", HEAD_NBYTES))
        return read_null(reader, more);
    char header[HEADER_NBYTES];
    snprintf(header, sizeof header, "$%llu\r\n", (unsigned long long)nbytes);
    if (memcmp(reader->head, header, HEAD_NBYTES))
        return reader->head[0] == '$' ? WRONG : NO_BULK;
    struct iovec local[LOCAL_PIECES + 3];
    struct iovec *reply = pieces <= LOCAL_PIECES ? local : malloc((pieces + 3) * sizeof *reply);
    if (!reply)
        return -ENOMEM;
    if (pieces) /* a batch without buffers has no array for them */
        memcpy(reply + 1, iov, pieces * sizeof *iov);
    const int64_t verdict = read_rest(reader, reply, pieces, header, nbytes, more, state);
    if (reply != local)
        free(reply);
    return verdict;
}

static uint64_t nbytes_of(const struct iovec *iov, size_t pieces) {
    uint64_t nbytes = 0;
    for (size_t i = 0; i < pieces; i++)
        nbytes += iov[i].iov_len;
    return nbytes;
}

/* Return the end of the requests to send after `done` replies. It grows when half of the window has been answered. */
static size_t window_end(size_t done, size_t sent, size_t count, size_t window) {
    if (sent == count || sent - done > window / 2)
        return sent;
    const size_t end = count - done > window ? done + window : count;
    return end > sent ? end : sent;
}

static int is_revoked_at(const struct iovec *states, size_t page) {
    const uint64_t *state = state_at(states, page);
    return state && access_is_revoked(state);
}

size_t bulks_fetch(bulk_exchange *all) {
    size_t done = 0;
    for (int64_t verdict = HIT; done < all->count && (verdict == HIT || verdict == MISS || verdict == REVOKED); done++) {
        const size_t most = window_end(done, all->sent, all->count, all->window);
        size_t end = all->sent;
        while (end < most && !is_revoked_at(all->states, end))
            end++;
        int64_t failed = 0;
        if (end > all->sent)
            failed = socket_send(all->reader.fd, all->requests + all->sent, end - all->sent, all->reader.deadline_s);
        all->sent = end;
        const size_t pieces = all->first[done + 1] - all->first[done];
        const struct iovec *page = all->iov + all->first[done];
        if (failed) {
            verdict = failed;
        } else if (done == end) { /* revoked, and no request is under way */
            verdict = REVOKED;
            all->sent++;
        } else {
            verdict = bulk_read(&all->reader, page, pieces, nbytes_of(page, pieces), done + 1 < end,
                                state_at(all->states, done));
        }
        all->verdicts[done] = verdict;
    }
    return done;
}

/* Make room for one more step. Return 0 or -ENOMEM. */
static int line_room(line_exchange *all, size_t *capacity) {
    if (all->nbytes + STEP_NBYTES <= *capacity)
        return 0;
    char *grown = realloc(all->received, 2 * *capacity + STEP_NBYTES);
    if (!grown)
        return -ENOMEM;
    all->received = grown;
    *capacity = 2 * *capacity + STEP_NBYTES;
    return 0;
}

/* Count the complete lines from `*start` on. Move `*start` after them. Return -1 if the next line is too long or not a
 * reply. */
static int64_t lines_count(const line_exchange *all, size_t *start) {
    int64_t lines = 0;
    while (*start < all->nbytes) {
        const char *begin = all->received + *start;
        const size_t left = all->nbytes - *start;
        if (!memchr("+-:$", *begin, 4))
            return -1;
        const char *end = memchr(begin, '\n', left);
        if ((end ? (size_t)(end - begin) : left) > LINE_MOST)
            return -1;
        if (!end)
            break;
        *start += (size_t)(end - begin) + 1;
        lines++;
    }
    return lines;
}

static void move_on(cursor *at, size_t nbytes) {
    while (at->left && nbytes >= at->piece->iov_len - at->offset) {
        nbytes -= at->piece->iov_len - at->offset;
        at->piece++;
        at->left--;
        at->offset = 0;
    }
    at->offset += nbytes;
}

/* Send the requests from `sent` to `end`, within accesses where they are revocable. Return 0, REVOKED, which makes the
 * request that was begun the end of all requests, or -errno. */
static int64_t lent_send(line_exchange *all, size_t sent, size_t end) {
    cursor at = {all->iov + all->first[sent], all->first[end] - all->first[sent], 0};
    size_t run = sent; /* the requests before it have the state of `sent` */
    for (move_on(&at, 0); at.left;) {
        while (at.piece >= all->iov + all->first[sent + 1])
            sent++;
        const struct iovec *begin = all->iov + all->first[sent], *last = all->iov + all->first[sent + 1] - 1;
        uint64_t *state = at.piece < last ? state_at(all->states, sent) : NULL;
        if (state && !access_begin(state)) {
            if (at.piece > begin || at.offset) {
                all->count = sent;
                return REVOKED;
            }
            all->replies[sent] = 0;
            at.left -= (size_t)(last + 1 - begin);
            at.piece = last + 1;
            continue;
        }
        for (run = run > sent ? run : sent + 1; run < end && state && state_at(all->states, run) == state;)
            run++;
        struct iovec part[PIECES_A_CHUNK];
        cursor next = {at.piece, (size_t)(all->iov + all->first[state ? run : sent + 1] - at.piece), at.offset};
        size_t nbytes;
        struct msghdr message = {.msg_iov = part};
        message.msg_iovlen = pieces_take(&next, part, PIECES_A_CHUNK, SENT_NBYTES, &nbytes);
        const ssize_t step = sendmsg(all->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (state)
            access_end(state);
        int failed = 0;
        if (step >= 0)
            move_on(&at, (size_t)step);
        else if (errno == EAGAIN || errno == EWOULDBLOCK)
            failed = await(all->fd, POLLOUT, all->deadline_s);
        else if (errno != EINTR)
            failed = -errno;
        if (failed)
            return failed;
    }
    return 0;
}

int64_t lines_exchange(line_exchange *all) {
    size_t capacity = 0, start = 0, done = 0, sent = 0;
    int64_t come = 0; /* lines of the first incomplete reply */
    int64_t verdict = HIT;
    while (done < all->count) {
        const size_t end = window_end(done, sent, all->count, all->window);
        const size_t pieces = all->first[end] - all->first[sent];
        int64_t got = 0;
        if (sent < end)
            got = all->states ? lent_send(all, sent, end)
                              : socket_send(all->fd, all->iov + all->first[sent], pieces, all->deadline_s);
        if (got == REVOKED)
            verdict = REVOKED;
        sent = end < all->count ? end : all->count;
        if (got < 0 || (got = line_room(all, &capacity)) < 0)
            return got;
        struct iovec step = {all->received + all->nbytes, STEP_NBYTES};
        got = done < sent && come < all->replies[done] ? socket_receive(all->fd, &step, 1, 1, all->deadline_s) : 0;
        if (got < 0)
            return got;
        all->nbytes += (size_t)got;
        const int64_t lines = lines_count(all, &start);
        if (lines < 0)
            return WRONG;
        for (come += lines; done < sent && come >= all->replies[done]; done++)
            come -= all->replies[done];
    }
    return verdict;
}
