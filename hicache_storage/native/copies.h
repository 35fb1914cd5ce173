/* Copy between the pieces of pages. Touches no Python object. */
#ifndef HICACHE_COPIES_H
#define HICACHE_COPIES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* Copy all pieces of `source` to the pieces of `target`. Both have `nbytes` in total. `far`: the source is
 * not in the caches, and nobody reads the target soon. */
void copy_pieces(const struct iovec *target, const struct iovec *source, size_t nbytes, int far);

/* Do the same, a chunk in each access. Return 0 if one of the two is revoked. `state` may be NULL. */
int copy_pieces_by(uint64_t *state, const struct iovec *target, const struct iovec *source, size_t nbytes);

/* Copy as `copy_pieces` does, and return the xxh3-64 of the bytes after the first `skip`. */
uint64_t copy_hashed(const struct iovec *target, const struct iovec *source, size_t nbytes, size_t skip, int far);

#endif
