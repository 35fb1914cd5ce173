/* Move, hash and check lists of pieces of memory. Touches no Python object. */
#ifndef HICACHE_PIECES_H
#define HICACHE_PIECES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "xxh3.h"

enum {
    PIECES_A_CALL = 1024 /* the kernel accepts no more */,
    PIECES_A_CHUNK = 64,
    CHUNK_NBYTES = 256 << 10,
    SENT_NBYTES = CHUNK_NBYTES + (16 << 10) /* a chunk of whole pages, and what their requests have around them */
};

/* A position in a list of pieces. */
typedef struct {
    const struct iovec *piece;
    size_t left, offset;
} cursor;

/* Take at most `most` pieces with at most `limit` bytes in total from the cursor into `taken`. Return their number. */
size_t pieces_take(cursor *at, struct iovec *taken, size_t most, size_t limit, size_t *nbytes);

/* Read `nbytes` at `offset` into the pieces, or write them from there. The pieces are used up. Return how many bytes were
 * moved, which is fewer if the file ends too early, or -errno. */
int64_t pieces_move(int fd, struct iovec *iov, size_t count, size_t nbytes, int64_t offset, int writing);

/* Read at most `nbytes` at `offset`. Return how many the file had, or -errno. */
int64_t read_at(int fd, uint8_t *into, size_t nbytes, int64_t offset);

/* Hash the pieces without the first `skip` bytes. Counts `skip` down. */
void pieces_hash(xxh3_stream *stream, const struct iovec *iov, size_t count, size_t *skip);

/* Return 1 if every address and size is a multiple of `alignment`. */
int pieces_are_aligned(const struct iovec *iov, size_t count, size_t alignment);

#endif
