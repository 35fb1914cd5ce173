/* XXH3, 64 and 128 bits, seed 0, default secret: from the published specification
 * (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
 *
 * Little-endian machines only: the build refuses others. A stream takes a page in any number of pieces. */
#ifndef HICACHE_XXH3_H
#define HICACHE_XXH3_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    _Alignas(64) uint64_t acc[8];
    uint8_t pending[256]; /* input that is not accumulated yet; never empty once total > 256 */
    uint8_t tail[64];     /* the last 64 bytes that were accumulated */
    size_t pending_nbytes;
    size_t stripes; /* stripes accumulated in the current block */
    uint64_t total;
} xxh3_stream;

void xxh3_begin(xxh3_stream *stream);
void xxh3_update(xxh3_stream *stream, const void *data, size_t nbytes);
uint64_t xxh3_digest(const xxh3_stream *stream);
uint64_t xxh3_64(const void *data, size_t nbytes);

/* Write the 128-bit hash of 17 to 128 bytes in canonical order, high half first. */
void xxh3_128_short(uint8_t digest[16], const void *data, size_t nbytes);

#endif
