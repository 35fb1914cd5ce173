#define _GNU_SOURCE
#include "revocables.h"

#include <errno.h>
#include <linux/fs.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { WAIT_NS = 20000 };
static const uint64_t REVOKED_BIT = 1ULL << 63;

int access_begin(uint64_t *state) {
    if (!(__atomic_fetch_add(state, 1, __ATOMIC_ACQ_REL) & REVOKED_BIT))
        return 1;
    access_end(state);
    return 0;
}

void access_end(uint64_t *state) { __atomic_fetch_sub(state, 1, __ATOMIC_RELEASE); }

int access_is_revoked(const uint64_t *state) { return (__atomic_load_n(state, __ATOMIC_ACQUIRE) & REVOKED_BIT) != 0; }

void access_revoke(uint64_t *state) {
    __atomic_fetch_or(state, REVOKED_BIT, __ATOMIC_ACQ_REL);
    const struct timespec moment = {0, WAIT_NS};
    while (__atomic_load_n(state, __ATOMIC_ACQUIRE) != REVOKED_BIT)
        (void)nanosleep(&moment, NULL);
}

int pieces_copy_by(const way *by, const struct iovec *iov, size_t count, int writing) {
    if (by->state && !access_begin(by->state))
        return 0;
    uint8_t *at = by->scratch;
    for (size_t i = 0; i < count; at += iov[i++].iov_len) {
        if (writing)
            memcpy(at, iov[i].iov_base, iov[i].iov_len);
        else
            memcpy(iov[i].iov_base, at, iov[i].iov_len);
    }
    if (by->state)
        access_end(by->state);
    return 1;
}

int64_t pieces_move_by(const way *by, int fd, struct iovec *iov, size_t count, size_t nbytes, int64_t offset,
                       int writing) {
    if (!by->state)
        return pieces_move(fd, iov, count, nbytes, offset, writing);
    if (writing && !pieces_copy_by(by, iov, count, 1))
        return MOVE_REVOKED;
    struct iovec one = {by->scratch, nbytes};
    const int64_t done = pieces_move(fd, &one, 1, nbytes, offset, writing);
    if (!writing && done == (int64_t)nbytes && !pieces_copy_by(by, iov, count, 0))
        return MOVE_REVOKED;
    return done;
}

/* The system call is made by its number, because glibc has `preadv2` from 2.26 on, and musl from 1.2.5. */
int64_t read_cached(int fd, const struct iovec *iov, size_t count, int64_t offset) {
    const int64_t got = syscall(SYS_preadv2, fd, iov, count, offset, 0L, RWF_NOWAIT);
    return got < 0 ? -errno : got;
}

int64_t pieces_read_by(const way *by, int fd, const struct iovec *iov, size_t count, size_t nbytes, int64_t offset,
                       page_hash *hash) {
    struct iovec part[PIECES_A_CHUNK];
    memcpy(part, iov, count * sizeof *iov);
    const int64_t done = pieces_move_by(by, fd, part, count, nbytes, offset, 0);
    const struct iovec scratch = {by->scratch, nbytes};
    if (hash && done == (int64_t)nbytes)
        pieces_hash(&hash->stream, by->state ? &scratch : iov, by->state ? 1 : count, &hash->skip);
    return done;
}

int piece_copy_by(uint64_t *state, const struct iovec *piece, uint8_t *scratch, int writing) {
    for (size_t at = 0, step; at < piece->iov_len; at += step) {
        step = piece->iov_len - at < CHUNK_NBYTES ? piece->iov_len - at : CHUNK_NBYTES;
        uint8_t *memory = (uint8_t *)piece->iov_base + at;
        if (state && !access_begin(state))
            return 0;
        memcpy(writing ? scratch + at : memory, writing ? memory : scratch + at, step);
        if (state)
            access_end(state);
    }
    return 1;
}

int pieces_hash_by(uint64_t *state, const struct iovec *iov, size_t count, uint64_t *digest) {
    cursor at = {iov, count, 0};
    struct iovec chunk[PIECES_A_CHUNK];
    size_t nbytes, taken;
    xxh3_stream stream;
    xxh3_begin(&stream);
    while ((taken = pieces_take(&at, chunk, PIECES_A_CHUNK, CHUNK_NBYTES, &nbytes))) {
        if (state && !access_begin(state))
            return 0;
        for (size_t i = 0; i < taken; i++)
            xxh3_update_far(&stream, chunk[i].iov_base, chunk[i].iov_len);
        if (state)
            access_end(state);
    }
    *digest = xxh3_digest(&stream);
    return 1;
}
