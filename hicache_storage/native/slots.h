/* Many slots of large files in one call: no Python object is touched.
 *
 * A slot has a lead, a page and a tail, one behind the other. Lead and tail begin with the mark of the page; zeros
 * follow. A slot with the right mark at both places holds the whole page. */
#ifndef HICACHE_SLOTS_H
#define HICACHE_SLOTS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

enum { MARK_MOST_NBYTES = 256 };

typedef struct {
    size_t count;
    const int64_t *fds;           /* a negative one is the verdict on its slots */
    const int64_t *offsets;       /* where each slot begins */
    const char *const *marks;
    size_t mark_nbytes;
    size_t lead, nbytes, tail;    /* the sizes of the parts of a slot */
    const struct iovec *iov;      /* page n has the pieces first[n] .. first[n + 1] */
    const size_t *first;
    const struct iovec *states;   /* of each page's revocable, empty where it has none; NULL: no page has one */
    size_t alignment;             /* of the memory of a page: another page is not tried, and gets -EINVAL. With `states`
                                   * only of its size: all bytes go through an aligned scratch */
    size_t run_nbytes;            /* the most bytes of one system call */
    const char *alone;            /* errno numbers after which the slots of a run are moved one by one */
    size_t alone_count;
    uint64_t *digests;            /* where xxh3-64 of each page without its first `skip` bytes goes; may be NULL */
    size_t skip;
    double deadline_s;
    int writing;
    int64_t *verdicts;
} slot_batch;

/* Open files of one directory, which is no link. In the place of a file that cannot be opened is -errno. */
void slot_files_open(const char *directory, const char *const *names, size_t count, int flags, int64_t *fds);
void slot_files_close(const int64_t *fds, size_t count);

/* Read or write all slots. Neighbours of one file are moved together. The slot of a page that is REVOKED while it is
 * written has no second mark. Return 0, or -1 without memory. */
int slots_move(const slot_batch *all);

/* HIT where the slot has the mark at both places, WRONG where it has not, or -errno. A negative `fd` is the verdict. */
int64_t slot_check(int64_t fd, int64_t offset, const char *mark, size_t mark_nbytes, int64_t last_offset);

#endif
