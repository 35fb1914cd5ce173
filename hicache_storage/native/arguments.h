/* Hold the arguments of a call until it ends: buffers of pages, texts, integers. Everything here needs the GIL. */
#ifndef HICACHE_ARGUMENTS_H
#define HICACHE_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <sys/uio.h>

typedef struct {
    size_t pages;
    size_t views;
    size_t *first; /* pages + 1 indices into `iov`: page n has first[n] .. first[n + 1] */
    struct iovec *iov;
    Py_buffer *held;
} batch;

/* Hold every buffer of `pages`, a sequence of sequences of buffers. Return 0, or -1 with an exception. */
int batch_hold(batch *all, PyObject *pages, int writable);
void batch_release(batch *all);

/* Hold one list of buffers as a batch of one page. Return 0, or -1 with an exception. */
int pieces_hold(batch *all, PyObject *pieces, int writable);

static inline size_t batch_nbytes(const batch *all, size_t page) {
    size_t nbytes = 0;
    for (size_t i = all->first[page]; i < all->first[page + 1]; i++)
        nbytes += all->iov[i].iov_len;
    return nbytes;
}

/* The bytes objects of a sequence, held for one call. */
typedef struct {
    size_t count;
    PyObject *owner;
    const char **data;
    size_t *nbytes;
} texts;

int texts_hold(texts *all, PyObject *sequence);
void texts_release(texts *all);

/* Return 1 if every text can be a path: none is empty or has a zero byte. */
int texts_are_paths(const texts *all);

/* Return the integers of a sequence, which must have `count`, or NULL with an exception. The caller frees them. */
int64_t *integers_of(PyObject *sequence, size_t count);

/* Return a list of integers, or NULL with an exception. */
PyObject *list_of(const int64_t *values, size_t count);
PyObject *list_of_unsigned(const uint64_t *values, size_t count);

/* Return a tuple of a list of verdicts and a list of digests, or NULL with an exception. */
PyObject *verdicts_and_digests(const int64_t *verdicts, const uint64_t *digests, size_t count);

#endif
