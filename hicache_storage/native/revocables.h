/* Access memory that its owner can take back at any time. Touches no Python object.
 *
 * The state of a revocable is 8 bytes: the number of accesses in progress, and a bit that is set when it is revoked. */
#ifndef HICACHE_REVOCABLES_H
#define HICACHE_REVOCABLES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "pieces.h"

enum { SCRATCH_NBYTES = CHUNK_NBYTES + 4096 /* a chunk and a trailer */ };

/* What `pieces_move_by` returns if the memory was revoked. No errno has this number. */
#define MOVE_REVOKED INT64_MIN

/* Count one access and return 1, or return 0 if the state is revoked. During an access, make no system call that can wait
 * for a device. */
int access_begin(uint64_t *state);
void access_end(uint64_t *state);

/* Return 1 if the state is revoked. */
int access_is_revoked(const uint64_t *state);

/* Refuse accesses from now on. Return when none is in progress any more. */
void access_revoke(uint64_t *state);

/* Return the state of a page. NULL: its memory is not revocable. `states`: one for each page, or NULL. */
static inline uint64_t *state_at(const struct iovec *states, size_t page) {
    return states && states[page].iov_len ? states[page].iov_base : NULL;
}

/* How to access the memory of one page. */
typedef struct {
    uint64_t *state;  /* NULL: the memory is not revocable, and is moved without scratch memory */
    uint8_t *scratch; /* SCRATCH_NBYTES that belong to the caller */
} way;

/* The digest of a page that is being read. */
typedef struct {
    xxh3_stream stream;
    size_t skip; /* how many bytes are left that it leaves out */
} page_hash;

/* The most bytes of one `pieces_move_by`. */
static inline size_t way_nbytes(const way *by, size_t otherwise) { return by->state ? CHUNK_NBYTES : otherwise; }

/* Copy a chunk between its pieces and the scratch memory, within one access if it is revocable. Return 0 if it is
 * revoked. */
int pieces_copy_by(const way *by, const struct iovec *iov, size_t count, int writing);

/* Read at most `nbytes` at `offset` as far as they are in the page cache. Return their number, -EAGAIN if the disk must be
 * read first, or another error if the file system cannot tell. */
int64_t read_cached(int fd, const struct iovec *iov, size_t count, int64_t offset);

/* Move as `pieces_move` does. `iov` is used up. Revocable memory is only copied from or to the scratch memory, within one
 * access, so bytes that were just read are still in the scratch memory afterwards. */
int64_t pieces_move_by(const way *by, int fd, struct iovec *iov, size_t count, size_t nbytes, int64_t offset, int writing);

/* Read a chunk as `pieces_move_by` does, and hash it while it is in the processor's cache. */
int64_t pieces_read_by(const way *by, int fd, const struct iovec *iov, size_t count, size_t nbytes, int64_t offset,
                       page_hash *hash);

/* Copy one piece between its memory and `scratch`. Unless `state` is NULL, each access copies a chunk. Return 0 if the
 * memory is revoked. */
int piece_copy_by(uint64_t *state, const struct iovec *piece, uint8_t *scratch, int writing);

/* Hash the pieces of a page, within accesses unless `state` is NULL. Return 0 if the memory is revoked. */
int pieces_hash_by(uint64_t *state, const struct iovec *iov, size_t count, uint64_t *digest);

#endif
