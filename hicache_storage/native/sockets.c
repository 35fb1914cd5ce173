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

enum { MAX_PIECES = 1024, LOCAL_PIECES = 64, HEADER_NBYTES = 32 };

double monotonic_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Wait until the socket is ready; return 0 or -errno. A signal does not prolong the wait. */
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

/* Receive as `socket_receive` does, and leave `iov` and `pieces` at the rest. */
static int64_t receive(int fd, struct iovec **iov, size_t *pieces, size_t least, double deadline_s) {
    size_t received = 0;
    drop(iov, pieces, 0);
    while (*pieces && received < least) {
        struct msghdr message = {.msg_iov = *iov, .msg_iovlen = *pieces < MAX_PIECES ? *pieces : MAX_PIECES};
        const ssize_t step = recvmsg(fd, &message, MSG_DONTWAIT);
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
    return receive(fd, &iov, &pieces, least, deadline_s);
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

/* Receive the rest of the header, the page and its end. `iov` has `pieces` pieces of the page from index 1, and room for
 * three more. */
static int64_t read_rest(bulk_reader *reader, struct iovec *iov, size_t pieces, const char *header, uint64_t nbytes,
                         int more) {
    uint8_t begun[HEADER_NBYTES], end[2];
    const size_t begun_nbytes = strlen(header) - HEAD_NBYTES, least = begun_nbytes + (size_t)nbytes + sizeof end;
    size_t count = pieces + 2;
    iov[0] = (struct iovec){begun, begun_nbytes};
    iov[pieces + 1] = (struct iovec){end, sizeof end};
    if (more)
        iov[count++] = (struct iovec){reader->head, HEAD_NBYTES};
    const int64_t first = receive(reader->fd, &iov, &count, begun_nbytes, reader->deadline_s);
    if (first < 0)
        return first;
    if (memcmp(begun, header + HEAD_NBYTES, begun_nbytes))
        return WRONG;
    const size_t left = (size_t)first < least ? least - (size_t)first : 0;
    const int64_t second = receive(reader->fd, &iov, &count, left, reader->deadline_s);
    if (second < 0)
        return second;
    reader->head_nbytes = (size_t)(first + second) - least;
    return memcmp(end, "\r\n", sizeof end) ? WRONG : HIT;
}

int64_t bulk_read(bulk_reader *reader, const struct iovec *iov, size_t pieces, uint64_t nbytes, int more) {
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
    if (pieces) /* a batch without buffers has no array of them */
        memcpy(reply + 1, iov, pieces * sizeof *iov);
    const int64_t verdict = read_rest(reader, reply, pieces, header, nbytes, more);
    if (reply != local)
        free(reply);
    return verdict;
}
