/* Handle many slots of large files in one call. Touches no Python object.
 *
 * A slot consists of a lead, a page and a tail. Lead and tail begin with the page's mark, and zeros follow. If a slot has
 * the right mark at both places, it holds the whole page. */
#ifndef HICACHE_SLOTS_H
#define HICACHE_SLOTS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

enum { MARK_MOST_NBYTES = 256 };

typedef struct {
    size_t count;
    const int64_t *fds;           /* a negative one is the verdict for its slots */
    const int64_t *offsets;       /* where each slot begins */
    const char *const *marks;
    size_t mark_nbytes;
    size_t lead, nbytes, tail;    /* the sizes of the parts of a slot */
    const struct iovec *iov;      /* page n has the pieces first[n] .. first[n + 1] */
    const size_t *first;
    const struct iovec *states;   /* of each page's revocable, empty if it has none; NULL: no page has one */
    size_t alignment;             /* of a page's memory. Pages without it are not tried, and get -EINVAL. With `states`
                                   * only the size counts, because all bytes go through aligned scratch memory */
    size_t run_nbytes;            /* the most bytes of one system call */
    const char *alone;            /* errno numbers after which the slots of a run are moved one by one */
    size_t alone_count;
    uint64_t *digests;            /* receives the xxh3-64 of each page without its first `skip` bytes; may be NULL */
    size_t skip;
    double deadline_s;
    int writing;
    int together;                 /* several threads move slots at once, because a disk needs several requests at a time */
    int64_t *verdicts;
} slot_batch;

/* Open files of one directory, which must not be a link. For a file that cannot be opened, `fds` gets -errno. */
void slot_files_open(const char *directory, const char *const *names, size_t count, int flags, int64_t *fds);
void slot_files_close(const int64_t *fds, size_t count);

/* Read or write all slots. Adjacent slots of a file are moved together. If a page is REVOKED while it is written, its slot
 * has no second mark. Return 0, or -1 if memory runs out. */
int slots_move(const slot_batch *all);

/* HIT if the slot has the mark at both places, WRONG if not, or -errno. A negative `fd` is the verdict. */
int64_t slot_check(int64_t fd, int64_t offset, const char *mark, size_t mark_nbytes, int64_t last_offset);

#endif
