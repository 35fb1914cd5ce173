#define _GNU_SOURCE
#include "pieces.h"

#include <errno.h>
#include <unistd.h>

size_t pieces_take(cursor *at, struct iovec *taken, size_t most, size_t limit, size_t *nbytes) {
    size_t count = 0;
    *nbytes = 0;
    while (at->left && count < most && *nbytes < limit) {
        size_t length = at->piece->iov_len - at->offset;
        if (length > limit - *nbytes)
            length = limit - *nbytes;
        taken[count].iov_base = (uint8_t *)at->piece->iov_base + at->offset;
        taken[count++].iov_len = length;
        *nbytes += length;
        at->offset += length;
        if (at->offset == at->piece->iov_len) {
            at->piece++;
            at->left--;
            at->offset = 0;
        }
    }
    return count;
}

int64_t pieces_move(int fd, struct iovec *iov, size_t count, size_t nbytes, int64_t offset, int writing) {
    size_t done = 0;
    while (done < nbytes) {
        const int64_t at = offset + (int64_t)done;
        const ssize_t step = writing ? pwritev(fd, iov, (int)count, at) : preadv(fd, iov, (int)count, at);
        if (step < 0 && errno == EINTR)
            continue;
        if (step < 0)
            return -errno;
        if (!step)
            break;
        done += (size_t)step;
        size_t gone = (size_t)step;
        while (count && gone >= iov->iov_len) {
            gone -= iov->iov_len;
            iov++;
            count--;
        }
        if (count) {
            iov->iov_base = (uint8_t *)iov->iov_base + gone;
            iov->iov_len -= gone;
        }
    }
    return (int64_t)done;
}

int64_t read_at(int fd, uint8_t *into, size_t nbytes, int64_t offset) {
    struct iovec one = {into, nbytes};
    return pieces_move(fd, &one, 1, nbytes, offset, 0);
}

void pieces_hash(xxh3_stream *stream, const struct iovec *iov, size_t count, size_t *skip) {
    for (size_t i = 0; i < count; i++) {
        const size_t less = *skip < iov[i].iov_len ? *skip : iov[i].iov_len;
        *skip -= less;
        xxh3_update(stream, (const uint8_t *)iov[i].iov_base + less, iov[i].iov_len - less);
    }
}

int pieces_are_aligned(const struct iovec *iov, size_t count, size_t alignment) {
    for (size_t i = 0; i < count; i++)
        if (iov[i].iov_len && ((uintptr_t)iov[i].iov_base % alignment || iov[i].iov_len % alignment))
            return 0;
    return 1;
}
