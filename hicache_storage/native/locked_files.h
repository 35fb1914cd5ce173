/* Small files that processes change under a lock: no Python object is touched. */
#ifndef HICACHE_LOCKED_FILES_H
#define HICACHE_LOCKED_FILES_H

#include <stddef.h>
#include <stdint.h>

/* Add to the two counters of a ledger under its lock, and return what they are then. MISS where the file has lost its
 * name, WRONG where it holds no counters, LATE where another process has the lock for `wait_s`. */
int64_t totals_change(int fd, double wait_s, uint64_t *added, uint64_t *removed);

#endif
