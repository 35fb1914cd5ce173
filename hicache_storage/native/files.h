/* Handle many files of one kind in one call. Touches no Python object. */
#ifndef HICACHE_FILES_H
#define HICACHE_FILES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "revocables.h"

enum { TRAILER_NBYTES = 64, NAME_NBYTES = 40, SEALED_NBYTES = 56 };

/* The verdict for one file. A negative number is -errno. */
enum { MISS = 0, HIT = 1, WRONG = 2, LATE = 3, UNSYNCED = 4, KEPT = 5, REVOKED = 7 };

/* HIT if there is a regular file of `nbytes`. */
int64_t file_exists(const char *path, uint64_t nbytes);

/* The type and permissions of what is there, without following links. 0 if nothing is there, or -errno. */
int64_t file_mode(const char *path);

/* HIT if there is a regular file, with its modification time and its size. */
int64_t file_stat(const char *path, int64_t *modified_ns, int64_t *nbytes);

/* HIT or UNSYNCED if the trailer after `nbytes` has this name. A hit is touched unless `touched_ns` is negative. */
int64_t file_check(const char *path, const uint8_t *name, uint64_t nbytes, int64_t touched_ns);

typedef struct {
    const char *path;
    const uint8_t *name; /* the NAME_NBYTES that the trailer begins with */
    const struct iovec *iov;
    size_t pieces;
    uint64_t nbytes;     /* of the page, without its trailer */
    int64_t touched_ns;  /* the modification time after a hit; negative: do not change it */
    int64_t interval_ns; /* nor if it is less than this old, and not far ahead */
    uint64_t *digest;    /* receives the xxh3-64 of the page without its first `skip` bytes; may be NULL */
    size_t skip;
    uint64_t *state;     /* of the page's revocable; NULL: it has none */
    int cold;            /* the trailer was not in the page cache, so the disk must read the page */
} page_read;

/* Read pages. A verdict is HIT, MISS, WRONG, REVOKED if the memory was revoked before the page was complete, LATE if the
 * page was not begun before the deadline, or -errno. From the first cold page on, several threads read, because a disk
 * needs several requests at a time. Return 0, or -1 if memory runs out. */
int files_read(page_read *pages, size_t count, double deadline_s, int64_t *verdicts);

typedef struct {
    const char *path;    /* where the page is written: a new file, or one to overwrite */
    const char *target;  /* the name that it gets when it is complete */
    const struct iovec *iov;
    size_t pieces;
    uint64_t nbytes;
    const uint8_t *trailer;
    int64_t modified_ns;
    int recycled;        /* overwrite `path`, which has a page of the same size */
    way by;
} page_write;

/* HIT if the page is stored under its name. KEPT if `path` may not be overwritten, and nothing was changed. After an
 * error, and if the memory was REVOKED too early, nothing is left at `path`. */
int64_t file_write(const page_write *wanted);

/* Take a page out of its key space: rename `path` to `target`, if it still has this time and size. KEPT if the file is
 * at `target` now. HIT if it was unlinked there, because it is not to be kept or has other names. MISS if it is gone or
 * was used again. */
int64_t file_claim(const char *path, const char *target, int64_t modified_ns, uint64_t nbytes, int keep);

#endif
