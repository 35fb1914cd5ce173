/* Copies between the pieces of pages: no Python object is touched. */
#ifndef HICACHE_COPIES_H
#define HICACHE_COPIES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* Copy all pieces of `source` to those of `target`, which have as many bytes together. */
void copy_pieces(const struct iovec *target, const struct iovec *source, size_t nbytes);

/* The same; return xxh3-64 of the bytes behind the first `skip`. */
uint64_t copy_hashed(const struct iovec *target, const struct iovec *source, size_t nbytes, size_t skip);

#endif
