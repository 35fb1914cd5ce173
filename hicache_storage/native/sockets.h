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
 * received at the same time. */
int64_t bulk_read(bulk_reader *reader, const struct iovec *iov, size_t pieces, uint64_t nbytes, int more);

typedef struct {
    bulk_reader reader;
    struct iovec *requests;   /* one each; used up as they are sent */
    const struct iovec *iov;  /* the memory of the pages */
    const size_t *first;      /* count + 1 indices into `iov` */
    size_t count, window;     /* the number of requests, and how many may be under way at once */
    size_t sent;              /* how many requests are sent */
    int64_t *verdicts;        /* zeros */
} bulk_exchange;

/* Send requests, at most `window` at once, and read the reply to each with `bulk_read`, until a reply is neither a page nor
 * a null. Return the number of verdicts. */
size_t bulks_fetch(bulk_exchange *all);

enum { LINE_MOST = 4096 };

typedef struct {
    int fd;
    struct iovec *iov;       /* the pieces of the requests; used up */
    const size_t *first;     /* count + 1 indices into `iov` */
    const int64_t *replies;  /* the number of lines of the reply to each request */
    size_t count, window;
    double deadline_s;
    char *received;          /* everything received so far, allocated; the caller frees it */
    size_t nbytes;
} line_exchange;

/* Send requests, at most `window` at once, and receive all lines of their replies. HIT; WRONG after a line that is too long
 * or is not a one-line RESP reply; -errno. */
int64_t lines_exchange(line_exchange *all);

double monotonic_s(void);

#endif
