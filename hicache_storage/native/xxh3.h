/* XXH3 with 64 and 128 bits: xxhash's own code, with the widest vectors that the processor has.
 *
 * Only for little-endian machines. The build refuses others. */
#ifndef HICACHE_XXH3_H
#define HICACHE_XXH3_H

#include <stddef.h>
#include <stdint.h>

#define XXH_STATIC_LINKING_ONLY /* a stream lies on the stack */
#include "third_party/xxhash/xxhash.h"

typedef XXH3_state_t xxh3_stream;

/* A stream hashes a page that arrives in any number of pieces. */
void xxh3_begin(xxh3_stream *stream);
void xxh3_update(xxh3_stream *stream, const void *data, size_t nbytes);
void xxh3_update_far(xxh3_stream *stream, const void *data, size_t nbytes); /* of memory that is not in the caches */
uint64_t xxh3_digest(const xxh3_stream *stream);
uint64_t xxh3_64(const void *data, size_t nbytes);

/* Write the 128-bit hash in canonical order, high half first. */
void xxh3_128(uint8_t digest[16], const void *data, size_t nbytes);

#endif
