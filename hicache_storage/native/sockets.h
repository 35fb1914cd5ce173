/* Send and receive over a connected stream socket, within a deadline. Touches no Python object. */
#ifndef HICACHE_SOCKETS_H
#define HICACHE_SOCKETS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* Negative results are -errno: ETIMEDOUT after the deadline, ECONNRESET if the other side has ended the connection.
 * `iov` is used up. */

/* Send all pieces. Return 0. */
int64_t socket_send(int fd, struct iovec *iov, size_t pieces, double deadline_s);

/* Fill the pieces in order, with at least `least` bytes or completely. Return how many bytes were received. */
int64_t socket_receive(int fd, struct iovec *iov, size_t pieces, size_t least, double deadline_s);

typedef struct {
    int fd;
    uint8_t *head;        /* HEAD_NBYTES: the beginning of the next reply */
    size_t head_nbytes;   /* how many of them have arrived */
    double deadline_s;
} bulk_reader;

enum { HEAD_NBYTES = 4, NO_BULK = 6 };

/* Read the next RESP bulk string, which has `nbytes`, into the pieces. HIT; MISS for a null; WRONG if the length differs;
 * NO_BULK for any other reply, whose head stays in the reader. With `more` another reply follows, and its head may be
 * received at the same time. Unless `state` is NULL, each access receives a chunk at most. REVOKED: the whole reply was
 * received, but not all of it into the pieces. */
int64_t bulk_read(bulk_reader *reader, const struct iovec *iov, size_t pieces, uint64_t nbytes, int more, uint64_t *state);

typedef struct {
    bulk_reader reader;
    struct iovec *requests;   /* one each; used up as they are sent */
    const struct iovec *iov;  /* the memory of the pages */
    const size_t *first;      /* count + 1 indices into `iov` */
    size_t count, window;     /* the number of requests, and how many may be under way at once */
    size_t sent;              /* how many requests are sent */
    int64_t *verdicts;        /* zeros */
    const struct iovec *states; /* for `state_at` */
} bulk_exchange;

/* Send requests, at most `window` at once, and read the reply to each with `bulk_read`, until a reply is neither a page nor
 * a null. A page that is revoked when its request is due is not requested. Return the number of verdicts. */
size_t bulks_fetch(bulk_exchange *all);

enum { LINE_MOST = 4096 };

typedef struct {
    int fd;
    struct iovec *iov;       /* the pieces of the requests; used up */
    const size_t *first;     /* count + 1 indices into `iov` */
    int64_t *replies;        /* the number of lines of the reply to each request; 0 if it was skipped */
    size_t count, window;
    double deadline_s;
    char *received;          /* everything received so far, allocated; the caller frees it */
    size_t nbytes;
    const struct iovec *states; /* for `state_at`. All pieces of a request but the first and the last may be revocable */
} line_exchange;

/* Send requests, at most `window` at once, and receive all lines of their replies. A request is skipped if its memory is
 * revoked before any byte of it was sent. HIT; WRONG after a line that is too long or is not a one-line RESP reply; REVOKED
 * if a part of a request was sent when its memory was revoked: the requests before it have been answered; -errno. */
int64_t lines_exchange(line_exchange *all);

double monotonic_s(void);

#endif
