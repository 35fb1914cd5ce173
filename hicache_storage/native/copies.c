#include "copies.h"

#include <string.h>

#include "revocables.h"
#include "xxh3.h"

enum { HASHED_NBYTES = 128 << 10 }; /* small enough to hash while it is in the L2 cache */

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

/* Copy everything, in accesses of a chunk each unless `state` is NULL. Return 0 if the memory is revoked. */
static int copy(uint64_t *state, const struct iovec *target, const struct iovec *source, size_t nbytes,
                xxh3_stream *hashed, size_t skip) {
    const size_t most = hashed ? HASHED_NBYTES : state ? CHUNK_NBYTES : SIZE_MAX;
    position to = {target, 0}, from = {source, 0};
    while (nbytes) {
        size_t length = left_in(&to), other = left_in(&from);
        if (length > other)
            length = other;
        if (length > most)
            length = most;
        uint8_t *into = (uint8_t *)to.piece->iov_base + to.offset;
        if (state && !access_begin(state))
            return 0;
        memcpy(into, (const uint8_t *)from.piece->iov_base + from.offset, length);
        if (state)
            access_end(state);
        if (hashed) {
            const size_t less = skip < length ? skip : length;
            skip -= less;
            xxh3_update(hashed, into + less, length - less);
        }
        to.offset += length;
        from.offset += length;
        nbytes -= length;
    }
    return 1;
}

void copy_pieces(const struct iovec *target, const struct iovec *source, size_t nbytes) {
    (void)copy(NULL, target, source, nbytes, NULL, 0);
}

int copy_pieces_by(uint64_t *state, const struct iovec *target, const struct iovec *source, size_t nbytes) {
    return copy(state, target, source, nbytes, NULL, 0);
}

uint64_t copy_hashed(const struct iovec *target, const struct iovec *source, size_t nbytes, size_t skip) {
    xxh3_stream stream;
    xxh3_begin(&stream);
    (void)copy(NULL, target, source, nbytes, &stream, skip);
    return xxh3_digest(&stream);
}
