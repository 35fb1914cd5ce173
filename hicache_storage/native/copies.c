#include "copies.h"

#include <string.h>

#include "far.h"
#include "revocables.h"
#include "xxh3.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum {
    HASHED_NBYTES = 128 << 10, /* small enough to hash while it is in the L2 cache */
    LINE_NBYTES = 64
};

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

/* Copy a step to whole lines of memory, around the caches: the processor then does not read them first. */
static void copy_step(uint8_t *into, const uint8_t *from) {
#if defined(__x86_64__)
    for (size_t i = 0; i < FAR_STEP_NBYTES / sizeof(__m128i); i++)
        _mm_stream_si128((__m128i *)into + i, _mm_loadu_si128((const __m128i *)from + i));
#else
    memcpy(into, from, FAR_STEP_NBYTES);
#endif
}

static void copy_near(uint8_t *into, const uint8_t *from, size_t nbytes, xxh3_stream *hashed) {
    if (hashed)
        xxh3_update(hashed, from, nbytes);
    memcpy(into, from, nbytes);
}

/* Copy and hash what is not in the caches, to where nobody reads it soon. */
static void copy_far(uint8_t *into, const uint8_t *from, size_t nbytes, xxh3_stream *hashed) {
    const size_t unaligned = -(uintptr_t)into % LINE_NBYTES, first = unaligned < nbytes ? unaligned : nbytes;
    copy_near(into, from, first, hashed);
    for (into += first, from += first, nbytes -= first; nbytes >= FAR_BLOCK_NBYTES; nbytes -= FAR_BLOCK_NBYTES) {
        const uint8_t *block = from;
        for (size_t step = 0; step < FAR_STEPS; step++) {
            far_ask(block, step);
            if (hashed)
                xxh3_update(hashed, from, FAR_STEP_NBYTES);
            copy_step(into, from);
            into += FAR_STEP_NBYTES;
            from += FAR_STEP_NBYTES;
        }
    }
    copy_near(into, from, nbytes, hashed);
}

/* Let other threads see the bytes before they learn of the page, or of the end of an access. */
static void order_far(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* Copy and hash as `copy_pieces` does. `hashed` may be NULL. */
static int copy(uint64_t *state, const struct iovec *target, const struct iovec *source, size_t nbytes,
                xxh3_stream *hashed, size_t skip, int far) {
    const size_t most = hashed && !far ? HASHED_NBYTES : state ? CHUNK_NBYTES : SIZE_MAX;
    position to = {target, 0}, from = {source, 0};
    while (nbytes) {
        size_t length = left_in(&to), other = left_in(&from);
        if (length > other)
            length = other;
        if (length > most)
            length = most;
        uint8_t *into = (uint8_t *)to.piece->iov_base + to.offset;
        const uint8_t *bytes = (const uint8_t *)from.piece->iov_base + from.offset;
        const size_t less = skip < length ? skip : length;
        skip -= less;
        if (state && !access_begin(state))
            return 0;
        if (far) {
            memcpy(into, bytes, less);
            copy_far(into + less, bytes + less, length - less, hashed);
        } else {
            memcpy(into, bytes, length);
            if (hashed)
                xxh3_update(hashed, into + less, length - less);
        }
        if (state && far)
            order_far();
        if (state)
            access_end(state);
        to.offset += length;
        from.offset += length;
        nbytes -= length;
    }
    if (far)
        order_far();
    return 1;
}

int copy_pieces(uint64_t *state, const struct iovec *target, const struct iovec *source, size_t nbytes, uint64_t *digest,
                size_t skip, int far) {
    if (!digest)
        return copy(state, target, source, nbytes, NULL, 0, far);
    xxh3_stream stream;
    xxh3_begin(&stream);
    const int copied = copy(state, target, source, nbytes, &stream, skip, far);
    *digest = xxh3_digest(&stream);
    return copied;
}
