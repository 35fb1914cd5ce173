#define _GNU_SOURCE
#include "exchanges.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/socket.h>

#include "files.h"
#include "sockets.h"

enum { MAX_PIECES = 1024, STATUS_NBYTES = 12, MAX_DIGITS = 15, OVERLOADED = 429, FAULTS = 500, TURN_NBYTES = 1 << 20 };

/* What the head of a reply says about where the reply ends. */
typedef struct {
    int status;
    int64_t length; /* -1: unknown */
    int is_encoded;
} framing;

static int is_token(char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
           (c && strchr("!#$%&'*+-.^_`|~", c));
}

/* Compare with a text of lowercase letters and hyphens, ignoring case. `text` has no control characters. */
static int is_text(const char *text, size_t nbytes, const char *wanted) {
    if (nbytes != strlen(wanted))
        return 0;
    for (size_t i = 0; i < nbytes; i++)
        if ((text[i] | 0x20) != wanted[i])
            return 0;
    return 1;
}

/* Parse a number of up to 15 digits. Return -1 for anything else. */
static int64_t number_of(const char *text, size_t nbytes) {
    int64_t value = 0;
    for (size_t i = 0; i < nbytes; i++) {
        if (text[i] < '0' || text[i] > '9')
            return -1;
        value = value * 10 + (text[i] - '0');
    }
    return nbytes && nbytes <= MAX_DIGITS ? value : -1;
}

/* Return whether a header is well-formed and keeps the framing plain. */
static int take_header(const char *line, size_t nbytes, framing *found) {
    const char *colon = memchr(line, ':', nbytes);
    if (!colon || colon == line)
        return 0;
    const size_t name_nbytes = (size_t)(colon - line);
    for (size_t i = 0; i < name_nbytes; i++)
        if (!is_token(line[i]))
            return 0;
    const char *value = colon + 1, *end = line + nbytes;
    while (value < end && (*value == ' ' || *value == '\t'))
        value++;
    while (value < end && (end[-1] == ' ' || end[-1] == '\t'))
        end--;
    const size_t value_nbytes = (size_t)(end - value);
    if (is_text(line, name_nbytes, "transfer-encoding"))
        return !found->is_encoded++;
    if (is_text(line, name_nbytes, "connection"))
        return is_text(value, value_nbytes, "keep-alive");
    if (is_text(line, name_nbytes, "content-length")) {
        if (found->length >= 0 || value_nbytes > MAX_DIGITS)
            return 0;
        found->length = number_of(value, value_nbytes);
        return found->length >= 0;
    }
    return 1;
}

/* Parse a head without its blank line. Return whether it is final, well-formed and plainly framed. */
static int parse(const char *text, size_t nbytes, framing *found) {
    const char *end = text + nbytes;
    if (nbytes < STATUS_NBYTES || memcmp(text, "HTTP/1.1 ", 9))
        return 0;
    found->status = (int)number_of(text + 9, 3);
    found->length = -1;
    found->is_encoded = 0;
    if (found->status < 200 || found->status > 599 || (nbytes > STATUS_NBYTES && !strchr(" \r", text[STATUS_NBYTES])))
        return 0;
    int is_first = 1;
    for (const char *line = text; line < end; is_first = 0) {
        const char *next = memmem(line, (size_t)(end - line), "\r\n", 2);
        const char *stop = next ? next : end;
        for (const char *c = line; c < stop; c++)
            if ((unsigned char)*c < 0x20 && *c != '\t')
                return 0;
        if (!is_first && !take_header(line, (size_t)(stop - line), found))
            return 0;
        line = next ? next + 2 : end;
    }
    return 1;
}

void exchange_advance(struct iovec **iov, size_t *pieces, size_t nbytes, const char *data) {
    while (*pieces && (nbytes || !(*iov)->iov_len)) {
        const size_t step = nbytes < (*iov)->iov_len ? nbytes : (*iov)->iov_len;
        if (data && step) {
            memcpy((*iov)->iov_base, data, step);
            data += step;
        }
        nbytes -= step;
        if (step < (*iov)->iov_len) {
            (*iov)->iov_base = (char *)(*iov)->iov_base + step;
            (*iov)->iov_len -= step;
        } else {
            (*iov)++;
            (*pieces)--;
        }
    }
}

/* The result of a step. */
typedef enum { BLOCKED, AGAIN, ENDED } progress;

static progress end(exchange *one, int64_t verdict) {
    one->state->verdict = verdict;
    return ENDED;
}

static int is_blocked(int code) { return code == EAGAIN || code == EWOULDBLOCK; }

static int enter(const exchange *one) { return !one->revocable || access_begin(one->revocable); }

static void leave(const exchange *one) {
    if (one->revocable)
        access_end(one->revocable);
}

/* Return the pieces to move at once: as many as the kernel accepts, or those of one access, in `part`. */
static struct msghdr message_of(const exchange *one, struct iovec *iov, size_t pieces, struct iovec *part) {
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = pieces < MAX_PIECES ? pieces : MAX_PIECES};
    if (!one->revocable)
        return message;
    cursor at = {iov, pieces, 0};
    size_t nbytes;
    message.msg_iov = part;
    message.msg_iovlen = pieces_take(&at, part, PIECES_A_CHUNK, SENT_NBYTES, &nbytes);
    return message;
}

/* Send as much as the socket accepts. */
static progress send_some(int fd, exchange *one) {
    exchange_state *state = one->state;
    struct iovec part[PIECES_A_CHUNK];
    const struct msghdr message = message_of(one, one->out, one->outs, part);
    if (!enter(one))
        return end(one, REVOKED);
    const ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    leave(one);
    if (sent >= 0) {
        exchange_advance(&one->out, &one->outs, (size_t)sent, NULL);
        state->sent += sent;
        return state->sent < one->out_nbytes ? AGAIN : BLOCKED;
    }
    if (errno == EINTR)
        return AGAIN;
    if (is_blocked(errno) || errno == ENOTCONN) /* some systems report ENOTCONN while they connect */
        return BLOCKED;
    return end(one, STOPPED); /* the server may have replied already */
}

/* Return whether the reply has all bytes that its head announces. */
static int is_whole(const exchange *one, const framing *found) {
    const exchange_state *state = one->state;
    if (!one->has_reply_body || found->status == 204 || found->status == 304)
        return state->received == state->head_nbytes;
    if (found->status == 200 && one->in_nbytes)
        return state->filled == one->in_nbytes;
    return state->received == state->head_nbytes + found->length;
}

/* Return whether the caller does not have to see this head, because the length of the body fits the page or the slot. */
static int fits(const exchange *one, const framing *found) {
    const exchange_state *state = one->state;
    const int64_t behind = state->received - state->head_nbytes;
    if (!one->has_reply_body || found->status == 204 || found->status == 304)
        return !behind;
    if (found->is_encoded || found->length < 0 || behind > found->length)
        return 0;
    if (found->status == 200 && one->in_nbytes)
        return found->length == one->in_nbytes;
    return found->length <= (int64_t)one->slot_nbytes - state->head_nbytes;
}

/* Check the head as soon as it is complete, and move the bytes after it to the page. */
static progress judge(exchange *one) {
    exchange_state *state = one->state;
    framing found;
    if (!state->head_nbytes) {
        const char *blank = memmem(one->slot, (size_t)state->received, "\r\n\r\n", 4);
        if (!blank)
            return state->received < (int64_t)one->slot_nbytes ? AGAIN : end(one, STOPPED);
        const size_t nbytes = (size_t)(blank - one->slot);
        state->head_nbytes = (int64_t)nbytes + 4;
        if (!parse(one->slot, nbytes, &found) || !fits(one, &found)) {
            state->head_nbytes = 0;
            return end(one, STOPPED);
        }
        if (found.status == 200 && one->in_nbytes && one->has_reply_body) {
            if (!enter(one))
                return end(one, REVOKED);
            state->filled = state->received - state->head_nbytes;
            exchange_advance(&one->in, &one->ins, (size_t)state->filled, blank + 4);
            leave(one);
        }
    } else if (!parse(one->slot, (size_t)state->head_nbytes - 4, &found)) {
        return end(one, STOPPED); /* the caller has changed the slot */
    }
    return is_whole(one, &found) ? end(one, found.status) : AGAIN;
}

/* Receive what is there: into the page if the head has been checked, otherwise into the slot. */
static progress receive_some(int fd, exchange *one) {
    exchange_state *state = one->state;
    const int in_page = state->filled < one->in_nbytes && state->head_nbytes && one->has_reply_body &&
                        !memcmp(one->slot, "HTTP/1.1 200", STATUS_NBYTES);
    struct iovec rest = {one->slot + state->received, one->slot_nbytes - (size_t)state->received};
    struct msghdr message = {.msg_iov = &rest, .msg_iovlen = 1};
    struct iovec part[PIECES_A_CHUNK];
    if (in_page)
        message = message_of(one, one->in, one->ins, part);
    else if (!rest.iov_len)
        return end(one, STOPPED);
    if (in_page && !enter(one))
        return end(one, REVOKED);
    const ssize_t step = recvmsg(fd, &message, MSG_DONTWAIT);
    if (in_page)
        leave(one);
    if (!step)
        return end(one, STOPPED);
    if (step < 0)
        return errno == EINTR ? AGAIN : is_blocked(errno) ? BLOCKED : end(one, -errno);
    if (!in_page) {
        state->received += step;
        return judge(one);
    }
    state->filled += step;
    exchange_advance(&one->in, &one->ins, (size_t)step, NULL);
    return state->filled == one->in_nbytes ? judge(one) : AGAIN;
}

/* Continue a lane's exchange after poll's events. */
static progress move(lane *one, short events) {
    exchange *current = one->current;
    exchange_state *state = current->state;
    if (state->sent < current->out_nbytes) {
        if (events & ~POLLOUT) /* a reply to an unfinished request, or the end of the connection */
            return end(current, STOPPED);
        const int64_t limit = state->sent + TURN_NBYTES;
        progress done = AGAIN;
        while (done == AGAIN && state->sent < limit)
            done = send_some(one->fd, current);
        return done;
    }
    const int64_t limit = state->filled + TURN_NBYTES;
    progress done = AGAIN;
    while (done == AGAIN && state->filled < limit)
        done = receive_some(one->fd, current);
    return done;
}

/* Return whether nothing has arrived on a connection since its last reply. */
static int is_idle(int fd) {
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    int ready;
    do
        ready = poll(&polled, 1, 0);
    while (ready < 0 && errno == EINTR);
    return !ready;
}

/* The exchanges that have not begun. */
typedef struct {
    exchange *next, *end;
} queue;

/* Begin the next exchange if the connection is idle. */
static void begin_next(lane *one, queue *left) {
    one->current = NULL;
    while (left->next < left->end && (left->next->state->lane >= 0 || left->next->state->verdict))
        left->next++;
    if (left->next == left->end || !is_idle(one->fd))
        return;
    one->current = left->next++;
}

/* Continue a lane. After a reply that is not a sign of overload, go on to its next exchange. */
static void turn(lane *one, size_t index, queue *left, short events) {
    while (one->current) {
        if (move(one, events) != ENDED)
            return;
        const int64_t status = one->current->state->verdict;
        one->current = NULL;
        if (status >= 200 && status < FAULTS && status != OVERLOADED)
            begin_next(one, left);
        if (one->current)
            one->current->state->lane = (int64_t)index;
        events = POLLOUT;
    }
}

static size_t set_events(const lane *lanes, struct pollfd *polled, size_t count) {
    size_t active = 0;
    for (size_t i = 0; i < count; i++) {
        const exchange *current = lanes[i].current;
        polled[i].fd = current ? lanes[i].fd : -1; /* poll skips negative descriptors */
        polled[i].events = current && current->state->sent < current->out_nbytes ? POLLIN | POLLOUT : POLLIN;
        polled[i].revents = 0;
        active += current != NULL;
    }
    return active;
}

int64_t exchanges_run(exchange *all, size_t count, lane *lanes, struct pollfd *polled, size_t lane_count,
                      double deadline_s) {
    queue left = {all, all + count};
    for (size_t i = 0; i < count; i++) {
        exchange *one = &all[i];
        if (one->state->lane < 0 || one->state->verdict)
            continue;
        if (!one->state->sent && !is_idle(lanes[one->state->lane].fd))
            one->state->verdict = STALE;
        else
            lanes[one->state->lane].current = one;
    }
    for (size_t i = 0; i < lane_count; i++)
        if (lanes[i].current && !lanes[i].current->state->sent)
            turn(&lanes[i], i, &left, POLLOUT);
    while (set_events(lanes, polled, lane_count)) {
        const double left_ms = (deadline_s - monotonic_s()) * 1000;
        if (left_ms <= 0)
            return 0;
        const int ready = poll(polled, (nfds_t)lane_count, left_ms >= INT_MAX ? INT_MAX : (int)left_ms + 1);
        if (ready < 0 && errno != EINTR)
            return -errno;
        for (size_t i = 0; ready > 0 && i < lane_count; i++)
            if (polled[i].revents)
                turn(&lanes[i], i, &left, polled[i].revents);
    }
    return 0;
}
