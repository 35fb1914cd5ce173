/* Share the work of one call among several threads. Touches no Python object. */
#ifndef HICACHE_WORKERS_H
#define HICACHE_WORKERS_H

#include <stddef.h>

enum { MOST_WORKERS = 4 };

/* Call `work` on this thread and on up to `most` - 1 new ones, at most MOST_WORKERS in total. Return when all calls have
 * returned. There are fewer threads if the system refuses one, so each call must go on until nothing is left to do. */
void work_together(void *(*work)(void *), void *given, size_t most);

#endif
