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

double monotonic_s(void);

#endif
