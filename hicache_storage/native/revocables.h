/* Access to memory that its owner can take back at any time. No Python object is touched.
 *
 * The state of a revocable is 8 bytes: the number of accesses in progress, and a bit that is set once it is revoked. */
#ifndef HICACHE_REVOCABLES_H
#define HICACHE_REVOCABLES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "pieces.h"

enum { SCRATCH_NBYTES = CHUNK_NBYTES + 4096 /* a chunk and a trailer */ };

/* What `pieces_move_by` returns where the memory was revoked. No errno has this number. */
#define MOVE_REVOKED INT64_MIN

/* Return 1 and count one access, or 0 once the state is revoked. An access contains no system call. */
int access_begin(uint64_t *state);
void access_end(uint64_t *state);

/* Return 1 once the state is revoked. */
int access_is_revoked(const uint64_t *state);

/* Refuse accesses from now on. Return when none is in progress. */
void access_revoke(uint64_t *state);

/* The way to the memory of one page. */
typedef struct {
    uint64_t *state;  /* NULL: the memory is not revocable, and is moved without a scratch */
    uint8_t *scratch; /* SCRATCH_NBYTES of the caller's own */
} way;

/* The most bytes of one `pieces_move_by`. */
static inline size_t way_nbytes(const way *by, size_t otherwise) { return by->state ? CHUNK_NBYTES : otherwise; }

/* Move as `pieces_move` does; `iov` is used up. Revocable memory is only copied from or to the scratch, within one access:
 * a scratch that was just read still holds the bytes afterwards. */
int64_t pieces_move_by(const way *by, int fd, struct iovec *iov, size_t count, size_t nbytes, int64_t offset, int writing);

/* Copy one piece between its memory and `scratch`, in accesses of a chunk each where `state` is not NULL. Return 0 once they
 * are revoked. */
int piece_copy_by(uint64_t *state, const struct iovec *piece, uint8_t *scratch, int writing);

/* Hash the pieces of a page, in accesses where `state` is not NULL. Return 0 once they are revoked. */
int pieces_hash_by(uint64_t *state, const struct iovec *iov, size_t count, uint64_t *digest);

#endif
