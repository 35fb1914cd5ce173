/* List the page files of a directory. Touches no Python object. */
#ifndef HICACHE_DIRECTORIES_H
#define HICACHE_DIRECTORIES_H

#include <stddef.h>
#include <stdint.h>

enum { PAGE_HASH_LEAST_DIGITS = 32, PAGE_HASH_MOST_DIGITS = 128 };

/* Names, each with a zero byte at its end. The caller frees `text`. */
typedef struct {
    char *text;
    size_t nbytes, capacity, count;
} names;

/* Add the regular files of a directory whose names are page hashes: 32 to 128 lowercase hex digits. Return HIT, or MISS if
 * there is no directory, or a link in its place. After -errno, some names may have been added. */
int64_t directory_list(const char *path, names *found);

#endif
