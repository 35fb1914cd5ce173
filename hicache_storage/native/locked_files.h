/* Small files that processes change under a lock: no Python object is touched. */
#ifndef HICACHE_LOCKED_FILES_H
#define HICACHE_LOCKED_FILES_H

#include <stddef.h>
#include <stdint.h>

enum { LIST_HEADER_NBYTES = 32, LIST_MAGIC_NBYTES = 8, LINE_MOST_NBYTES = 256, LINES_MOST = 1 << 16 };

/* Add to the two counters of a ledger under its lock, and return what they are then. MISS where the file has lost its
 * name, WRONG where it holds no counters, LATE where another process has the lock for `wait_s`. */
int64_t totals_change(int fd, double wait_s, uint64_t *added, uint64_t *removed);

typedef struct {
    const char *path;
    const uint8_t *magic;  /* the LIST_MAGIC_NBYTES with which the list begins */
    uint64_t least, most;  /* the bounds of the number of lines; `most` is at least 1 */
    uint64_t share_nbytes; /* between them, a line for so many bytes that are left */
    double wait_s;
    uint8_t header[LIST_HEADER_NBYTES]; /* as it is afterwards */
    uint64_t end;                       /* the size of the file */
    char *lines;                        /* room for `most` lines of LINE_MOST_NBYTES */
    size_t nbytes;                      /* of the lines that were taken */
} line_take;

/* Take whole lines from a list, and move the offset of the first one left, the word behind the magic. HIT, with no line
 * where none is left or the next one is too long; WRONG where the file is no list; -errno. A lock that another process
 * holds for `wait_s` is not waited for. */
int64_t lines_take(line_take *wanted);

#endif
