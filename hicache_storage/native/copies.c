#include "copies.h"

#include <string.h>

#include "xxh3.h"

enum { CHUNK_NBYTES = 128 << 10 }; /* small enough to hash while it is in the L2 cache */

/* A position in a list of pieces. */
typedef struct {
    const struct iovec *piece;
    size_t offset;
} position;

static size_t left_in(position *at) {
    while (at->offset == at->piece->iov_len) {
        at->piece++;
        at->offset = 0;
    }
    return at->piece->iov_len - at->offset;
}

static uint64_t copy(const struct iovec *target, const struct iovec *source, size_t nbytes, size_t skip, int hashed) {
    position to = {target, 0}, from = {source, 0};
    xxh3_stream stream;
    if (hashed)
        xxh3_begin(&stream);
    while (nbytes) {
        size_t length = left_in(&to), other = left_in(&from);
        if (length > other)
            length = other;
        if (hashed && length > CHUNK_NBYTES)
            length = CHUNK_NBYTES;
        uint8_t *into = (uint8_t *)to.piece->iov_base + to.offset;
        memcpy(into, (const uint8_t *)from.piece->iov_base + from.offset, length);
        if (hashed) {
            const size_t less = skip < length ? skip : length;
            skip -= less;
            xxh3_update(&stream, into + less, length - less);
        }
        to.offset += length;
        from.offset += length;
        nbytes -= length;
    }
    return hashed ? xxh3_digest(&stream) : 0;
}

void copy_pieces(const struct iovec *target, const struct iovec *source, size_t nbytes) {
    (void)copy(target, source, nbytes, 0, 0);
}

uint64_t copy_hashed(const struct iovec *target, const struct iovec *source, size_t nbytes, size_t skip) {
    return copy(target, source, nbytes, skip, 1);
}
