/* Many files of one kind in one call: no Python object is touched. */
#ifndef HICACHE_FILES_H
#define HICACHE_FILES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "revocables.h"

enum { TRAILER_NBYTES = 64, NAME_NBYTES = 40, SEALED_NBYTES = 56 };

/* The verdict on one file; a negative number is -errno. */
enum { MISS = 0, HIT = 1, WRONG = 2, LATE = 3, UNSYNCED = 4, KEPT = 5, REVOKED = 7 };

/* HIT where a regular file of `nbytes` is there. */
int64_t file_exists(const char *path, uint64_t nbytes);

/* The type and permissions of what is there, links as links; 0 where nothing is; -errno. */
int64_t file_mode(const char *path);

/* HIT where a regular file is there, with its modification time and its size. */
int64_t file_stat(const char *path, int64_t *modified_ns, int64_t *nbytes);

/* HIT or UNSYNCED where the trailer behind `nbytes` has this name; a hit is touched where `touched_ns` is not negative. */
int64_t file_check(const char *path, const uint8_t *name, uint64_t nbytes, int64_t touched_ns);

typedef struct {
    const char *path;
    const uint8_t *name; /* the NAME_NBYTES with which the trailer begins */
    const struct iovec *iov;
    size_t pieces;
    uint64_t nbytes;     /* of the page, without its trailer */
    int64_t touched_ns;  /* the modification time after a hit; negative: leave it */
    int64_t interval_ns; /* leave it, too, where it is less than this old */
    uint64_t *digest;    /* where xxh3-64 of the page without its first `skip` bytes goes; may be NULL */
    size_t skip;
    way by;
} page_read;

/* HIT, MISS, WRONG, REVOKED where the memory was revoked before the page was whole, or -errno. */
int64_t file_read(const page_read *wanted);

typedef struct {
    const char *path;    /* where the page is written: a new file, or one to be overwritten */
    const char *target;  /* the name that it gets when it is whole */
    const struct iovec *iov;
    size_t pieces;
    uint64_t nbytes;
    const uint8_t *trailer;
    int64_t modified_ns;
    int recycled;        /* overwrite `path`, which has a page of the same size */
    way by;
} page_write;

/* HIT where the page has its name; KEPT where `path` may not be overwritten, and nothing was changed. After an error,
 * and where the memory was REVOKED before, nothing is left at `path`. */
int64_t file_write(const page_write *wanted);

/* Take a page out of its key space: rename `path`, if it still has this time and size, to `target`. KEPT where the
 * file is at `target` now; HIT where it was unlinked there, since it is not to be kept or has other names; MISS where
 * it is gone or was used again. */
int64_t file_claim(const char *path, const char *target, int64_t modified_ns, uint64_t nbytes, int keep);

#endif
