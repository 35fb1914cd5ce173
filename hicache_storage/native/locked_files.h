/* Change small files under a lock that processes share. Touches no Python object. */
#ifndef HICACHE_LOCKED_FILES_H
#define HICACHE_LOCKED_FILES_H

#include <stddef.h>
#include <stdint.h>

/* Add to the two counters of a ledger under its lock, and return their new values. MISS if the file has lost its name,
 * WRONG if it holds no counters, LATE if another process holds the lock for `wait_s`. */
int64_t totals_change(int fd, double wait_s, uint64_t *added, uint64_t *removed);

#endif
