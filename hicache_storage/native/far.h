/* Read memory that is not in the caches.
 *
 * The processor follows one page of memory at a time. So a single stream waits for memory more than it
 * must, unless it asks for the same line of the next pages, too. */
#ifndef HICACHE_FAR_H
#define HICACHE_FAR_H

#include <stddef.h>
#include <stdint.h>

enum {
    FAR_STEP_NBYTES = 1 << 10,
    FAR_PAGES = 8,
    FAR_BLOCK_NBYTES = FAR_PAGES << 12,
    FAR_STEPS = FAR_BLOCK_NBYTES / FAR_STEP_NBYTES
};

/* Before step `number` of reading a block: ask for that step's share of the next block. An address behind the memory is
 * no error. */
static inline void far_ask(const uint8_t *block, size_t number) {
    enum { LINE = 64, LINES = FAR_STEP_NBYTES / LINE / FAR_PAGES };
    const uint8_t *next = block + FAR_BLOCK_NBYTES + number * LINES * LINE;
    for (size_t page = 0; page < FAR_PAGES; page++)
        for (size_t line = 0; line < LINES; line++)
            __builtin_prefetch(next + (page << 12) + line * LINE, 0, 2);
}

#endif
