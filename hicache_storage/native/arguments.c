#include "arguments.h"

#include <stdlib.h>
#include <string.h>

static void *array_of(size_t count, size_t nbytes) {
    void *array = calloc(count ? count : 1, nbytes);
    if (!array)
        PyErr_NoMemory();
    return array;
}

/* Grow the arrays so that `more` buffers fit in. */
static int batch_grow(batch *all, size_t *capacity, size_t more) {
    if (all->views + more <= *capacity)
        return 0;
    size_t wanted = 2 * *capacity + more;
    struct iovec *iov = realloc(all->iov, wanted * sizeof *iov);
    if (iov)
        all->iov = iov;
    Py_buffer *held = realloc(all->held, wanted * sizeof *held);
    if (held)
        all->held = held;
    if (!iov || !held) {
        PyErr_NoMemory();
        return -1;
    }
    *capacity = wanted;
    return 0;
}

static int batch_hold_page(batch *all, size_t *capacity, PyObject *page, int flags) {
    const Py_ssize_t count = PySequence_Size(page);
    if (count < 0 || batch_grow(all, capacity, (size_t)count))
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *segment = PySequence_GetItem(page, i);
        if (!segment)
            return -1;
        Py_buffer *view = &all->held[all->views];
        const int failed = PyObject_GetBuffer(segment, view, flags);
        Py_DECREF(segment);
        if (failed)
            return -1;
        all->iov[all->views].iov_base = view->buf;
        all->iov[all->views].iov_len = (size_t)view->len;
        all->views++;
    }
    return 0;
}

int batch_hold(batch *all, PyObject *pages, int writable) {
    memset(all, 0, sizeof *all);
    const Py_ssize_t count = PySequence_Size(pages);
    if (count < 0)
        return -1;
    size_t capacity = 0;
    const int flags = writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO;
    if (!(all->first = array_of((size_t)count + 1, sizeof *all->first)))
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *page = PySequence_GetItem(pages, i);
        const int failed = !page || batch_hold_page(all, &capacity, page, flags);
        Py_XDECREF(page);
        if (failed) {
            batch_release(all);
            return -1;
        }
        all->first[++all->pages] = all->views;
    }
    return 0;
}

void batch_release(batch *all) {
    while (all->views)
        PyBuffer_Release(&all->held[--all->views]);
    free(all->held);
    free(all->iov);
    free(all->first);
    memset(all, 0, sizeof *all);
}

int pieces_hold(batch *all, PyObject *pieces, int writable) {
    PyObject *one = PyTuple_Pack(1, pieces);
    const int failed = !one || batch_hold(all, one, writable);
    Py_XDECREF(one);
    return failed ? -1 : 0;
}

int texts_hold(texts *all, PyObject *sequence) {
    memset(all, 0, sizeof *all);
    all->owner = PySequence_Tuple(sequence);
    if (!all->owner)
        return -1;
    const Py_ssize_t count = PyTuple_Size(all->owner);
    all->data = array_of((size_t)count, sizeof *all->data);
    all->nbytes = array_of((size_t)count, sizeof *all->nbytes);
    if (!all->data || !all->nbytes) {
        texts_release(all);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        char *data;
        Py_ssize_t nbytes;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(all->owner, i), &data, &nbytes)) {
            texts_release(all);
            return -1;
        }
        all->data[i] = data;
        all->nbytes[i] = (size_t)nbytes;
        all->count++;
    }
    return 0;
}

int texts_are_paths(const texts *all) {
    for (size_t i = 0; i < all->count; i++)
        if (!all->nbytes[i] || strlen(all->data[i]) != all->nbytes[i])
            return 0;
    return 1;
}

void texts_release(texts *all) {
    Py_XDECREF(all->owner);
    free(all->data);
    free(all->nbytes);
    memset(all, 0, sizeof *all);
}

int64_t *integers_of(PyObject *sequence, size_t count) {
    const Py_ssize_t length = PySequence_Size(sequence);
    if (length != (Py_ssize_t)count) {
        if (length >= 0)
            PyErr_SetString(PyExc_ValueError, "the sequences of a batch do not fit together");
        return NULL;
    }
    int64_t *values = array_of(count, sizeof *values);
    for (size_t i = 0; values && i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, (Py_ssize_t)i);
        values[i] = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (values[i] == -1 && PyErr_Occurred()) {
            free(values);
            return NULL;
        }
    }
    return values;
}

PyObject *list_of(const int64_t *values, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (!value || PyList_SetItem(list, (Py_ssize_t)i, value))
            Py_CLEAR(list);
    }
    return list;
}

PyObject *list_of_unsigned(const uint64_t *values, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(values[i]);
        if (!value || PyList_SetItem(list, (Py_ssize_t)i, value))
            Py_CLEAR(list);
    }
    return list;
}

PyObject *verdicts_and_digests(const int64_t *verdicts, const uint64_t *digests, size_t count) {
    PyObject *first = list_of(verdicts, count);
    PyObject *second = list_of_unsigned(digests, count);
    PyObject *result = first && second ? PyTuple_Pack(2, first, second) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(second);
    return result;
}
