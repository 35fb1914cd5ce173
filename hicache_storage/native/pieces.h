/* Lists of pieces of memory: moved whole, hashed, aligned. No Python object is touched. */
#ifndef HICACHE_PIECES_H
#define HICACHE_PIECES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "xxh3.h"

enum { PIECES_A_CALL = 1024 /* the kernel takes so many */, CHUNK_NBYTES = 256 << 10 };

/* A position in a list of pieces. */
typedef struct {
    const struct iovec *piece;
    size_t left, offset;
} cursor;

/* Take up to `most` pieces of up to `limit` bytes in all off the cursor, into `taken`. Return the number of pieces. */
size_t pieces_take(cursor *at, struct iovec *taken, size_t most, size_t limit, size_t *nbytes);

/* Read or write `nbytes` in the pieces, which are used up, at `offset`. Return how many bytes were moved: fewer where the
 * file ends before. Return -errno after an error. */
int64_t pieces_move(int fd, struct iovec *iov, size_t count, size_t nbytes, int64_t offset, int writing);

/* Read up to `nbytes` at `offset`. Return how many the file had, or -errno. */
int64_t read_at(int fd, uint8_t *into, size_t nbytes, int64_t offset);

/* Hash the pieces without the first `skip` bytes, which are counted down. */
void pieces_hash(xxh3_stream *stream, const struct iovec *iov, size_t count, size_t *skip);

/* Return 1 where every address and size is a multiple of `alignment`. */
int pieces_are_aligned(const struct iovec *iov, size_t count, size_t alignment);

#endif
