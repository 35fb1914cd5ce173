/* Bytes over a connected stream socket, by a deadline: no Python object is touched. */
#ifndef HICACHE_SOCKETS_H
#define HICACHE_SOCKETS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* Negative results are -errno; ETIMEDOUT after the deadline, ECONNRESET where the other side has ended the connection.
 * `iov` is used up. */

/* Send all pieces; return 0. */
int64_t socket_send(int fd, struct iovec *iov, size_t pieces, double deadline_s);

/* Receive into the pieces, in order, at least `least` bytes or all; return how many. */
int64_t socket_receive(int fd, struct iovec *iov, size_t pieces, size_t least, double deadline_s);

typedef struct {
    int fd;
    uint8_t *head;        /* HEAD_NBYTES: the beginning of the next reply */
    size_t head_nbytes;   /* how many of them have arrived */
    double deadline_s;
} bulk_reader;

enum { HEAD_NBYTES = 4, NO_BULK = 6 };

/* Read the next RESP bulk string, of `nbytes`, into the pieces. HIT; MISS for a null; WRONG where the length is another;
 * NO_BULK for any other reply, whose head is left in the reader. `more`: another reply follows, and its head may be
 * received along. */
int64_t bulk_read(bulk_reader *reader, const struct iovec *iov, size_t pieces, uint64_t nbytes, int more);

typedef struct {
    bulk_reader reader;
    struct iovec *requests;   /* one each; used up as they are sent */
    const struct iovec *iov;  /* the memory of the pages */
    const size_t *first;      /* count + 1 indices into `iov` */
    size_t count, window;     /* the requests, and how many are on their way at most */
    size_t sent;              /* how many requests are sent */
    int64_t *verdicts;        /* zeros */
} bulk_exchange;

/* Send requests, of which `window` are on their way at once, and read the reply to each by `bulk_read`, up to the first that
 * is no page and no null. Return the number of verdicts. */
size_t bulks_fetch(bulk_exchange *all);

enum { LINE_MOST = 4096 };

typedef struct {
    int fd;
    struct iovec *iov;       /* the pieces of the requests; used up */
    const size_t *first;     /* count + 1 indices into `iov` */
    const int64_t *replies;  /* the number of lines of the reply to each request */
    size_t count, window;
    double deadline_s;
    char *received;          /* allocated: what has come; the caller frees it */
    size_t nbytes;
} line_exchange;

/* Send requests, of which `window` are on their way at once, and receive as many lines as their replies have. HIT; WRONG
 * after a line that is too long or is no RESP reply of one line; -errno. */
int64_t lines_exchange(line_exchange *all);

double monotonic_s(void);

#endif
