#if defined(__x86_64__)
#include "third_party/xxhash/xxh_x86dispatch.c" /* includes xxhash.h as static functions */
#define UPDATE XXH3_64bits_update_dispatch
#define HASH XXH3_64bits_dispatch
#else
#define XXH_INLINE_ALL
#define UPDATE XXH3_64bits_update
#define HASH XXH3_64bits
#endif
#include "xxh3.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the data plane is written for little-endian machines"
#endif

void xxh3_begin(xxh3_stream *stream) { XXH3_64bits_reset(stream); }

void xxh3_update(xxh3_stream *stream, const void *data, size_t nbytes) { UPDATE(stream, data, nbytes); }

uint64_t xxh3_digest(const xxh3_stream *stream) { return XXH3_64bits_digest(stream); }

uint64_t xxh3_64(const void *data, size_t nbytes) { return HASH(data, nbytes); }

void xxh3_128(uint8_t digest[16], const void *data, size_t nbytes) {
    XXH128_canonicalFromHash((XXH128_canonical_t *)digest, XXH3_128bits(data, nbytes));
}
