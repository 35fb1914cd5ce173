/* Run HTTP/1.1 exchanges over several connected sockets at once. Touches no Python object. */
#ifndef HICACHE_EXCHANGES_H
#define HICACHE_EXCHANGES_H

#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* How far an exchange has come. Python uses the same six numbers. */
typedef struct {
    int64_t verdict;     /* 0: unfinished; the status of a complete reply; STOPPED, STALE or -errno */
    int64_t lane;        /* the index of the connection that carries it; -1: not begun */
    int64_t sent;        /* bytes of the request */
    int64_t received;    /* bytes of the reply in its slot: the head, and what follows outside the page */
    int64_t head_nbytes; /* bytes of the head, including its blank line; 0: incomplete */
    int64_t filled;      /* bytes of the page */
} exchange_state;

/* STOPPED: the caller must continue from this state. STALE: the connection was not idle, and nothing was sent. The verdict
 * is REVOKED if the memory was revoked too early. Then end the connection, unless nothing was sent. */
enum { STOPPED = 1, STALE = 2 };

typedef struct {
    exchange_state *state;
    struct iovec *out; /* the request; used up */
    size_t outs;
    int64_t out_nbytes;
    struct iovec *in; /* the memory of a page; used up */
    size_t ins;
    int64_t in_nbytes;
    uint64_t *revocable; /* the state of `in` and of the body of the request; NULL: neither is revocable */
    int has_reply_body; /* 0: a HEAD */
    char *slot;
    size_t slot_nbytes;
} exchange;

typedef struct {
    int fd;
    exchange *current; /* NULL: the connection is idle, or stopped */
} lane;

/* Drop `nbytes` from the front of the pieces, and copy `data` there unless it is NULL. */
void exchange_advance(struct iovec **iov, size_t *pieces, size_t nbytes, const char *data);

/* Run the exchanges, as many at once as there are lanes, until each is finished or stopped, or the deadline has passed.
 * `polled` is scratch memory, one for each lane. Return 0 or -errno. */
int64_t exchanges_run(exchange *all, size_t count, lane *lanes, struct pollfd *polled, size_t lane_count,
                      double deadline_s);

#endif
