/* Copy between the pieces of pages. Touches no Python object. */
#ifndef HICACHE_COPIES_H
#define HICACHE_COPIES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* Copy all pieces of `source` to the pieces of `target`. Both have `nbytes` in total. Unless `state` is NULL, each access
 * copies a chunk at most. `digest` receives the xxh3-64 of the bytes after the first `skip`, and may be NULL. `far`: the
 * source is not in the caches, and nobody reads the target soon. Return 0 if the memory is revoked. */
int copy_pieces(uint64_t *state, const struct iovec *target, const struct iovec *source, size_t nbytes, uint64_t *digest,
                size_t skip, int far);

#endif
