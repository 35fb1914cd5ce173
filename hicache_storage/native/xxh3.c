#if defined(__x86_64__)
#include "third_party/xxhash/xxh_x86dispatch.c" /* includes xxhash.h as static functions */
#define UPDATE XXH3_64bits_update_dispatch
#define HASH XXH3_64bits_dispatch
#else
#define XXH_INLINE_ALL
#define UPDATE XXH3_64bits_update
#define HASH XXH3_64bits
#endif
#include "far.h"
#include "xxh3.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the data plane is written for little-endian machines"
#endif

void xxh3_begin(xxh3_stream *stream) { XXH3_64bits_reset(stream); }

void xxh3_update(xxh3_stream *stream, const void *data, size_t nbytes) { UPDATE(stream, data, nbytes); }

void xxh3_update_far(xxh3_stream *stream, const void *data, size_t nbytes) {
    const uint8_t *at = data;
    for (; nbytes >= FAR_BLOCK_NBYTES; at += FAR_BLOCK_NBYTES, nbytes -= FAR_BLOCK_NBYTES)
        for (size_t step = 0; step < FAR_STEPS; step++) {
            far_ask(at, step);
            UPDATE(stream, at + step * FAR_STEP_NBYTES, FAR_STEP_NBYTES);
        }
    UPDATE(stream, at, nbytes);
}

uint64_t xxh3_digest(const xxh3_stream *stream) { return XXH3_64bits_digest(stream); }

uint64_t xxh3_64(const void *data, size_t nbytes) { return HASH(data, nbytes); }

void xxh3_128(uint8_t digest[16], const void *data, size_t nbytes) {
    XXH128_canonicalFromHash((XXH128_canonical_t *)digest, XXH3_128bits(data, nbytes));
}
