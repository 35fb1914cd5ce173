/* Directories that are listed in one call: no Python object is touched. */
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

/* Add the regular files of a directory that have the name of a page: 32 to 128 digits, in lowercase hex. HIT; MISS where
 * there is no directory, or a link in its place; -errno, and then some names may have been added. */
int64_t directory_list(const char *path, names *found);

#endif
