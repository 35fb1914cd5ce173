#include "module_frames.h"

#include <stdlib.h>
#include <string.h>

#include "arguments.h"
#include "files.h"
#include "frames.h"
#include "xxh3.h"

/* Return the text of item `index`, or NULL with an exception. The caller releases `owner`. */
static const char *text_of(PyObject *sequence, size_t index, Py_ssize_t *length, PyObject **owner) {
    *owner = PySequence_GetItem(sequence, (Py_ssize_t)index);
    return *owner ? PyUnicode_AsUTF8AndSize(*owner, length) : NULL;
}

/* Write item `index` of a sequence of page hashes to `digest` as bytes. Return how many, or 0 with an exception. */
static size_t hash_of(PyObject *hashes, size_t index, uint8_t digest[MOST_HASH_NBYTES]) {
    Py_ssize_t length;
    PyObject *owner;
    const char *text = text_of(hashes, index, &length, &owner);
    const size_t nbytes = text ? hash_bytes(digest, text, (size_t)length) : 0;
    if (text && !nbytes)
        PyErr_Format(PyExc_ValueError, "not a page hash: %R", owner);
    Py_XDECREF(owner);
    return nbytes;
}

PyObject *page_files(PyObject *module, PyObject *arguments) {
    (void)module;
    const char *directory, *prefix;
    Py_ssize_t directory_nbytes, prefix_nbytes;
    PyObject *hashes;
    if (!PyArg_ParseTuple(arguments, "y#y#O", &directory, &directory_nbytes, &prefix, &prefix_nbytes, &hashes))
        return NULL;
    const Py_ssize_t count = PySequence_Size(hashes);
    const size_t room = (size_t)directory_nbytes + 4 + 2 * MOST_HASH_NBYTES;
    char *path = count < 0 ? NULL : malloc(room + 1);
    PyObject *paths = path ? PyList_New(count) : NULL, *names = path ? PyList_New(count) : NULL;
    int failed = !paths || !names;
    if (prefix_nbytes != PREFIX_NBYTES && !failed) {
        PyErr_SetString(PyExc_ValueError, "a prefix must have 24 bytes");
        failed = 1;
    }
    uint8_t name[NAME_NBYTES], digest[MOST_HASH_NBYTES];
    if (!failed) {
        memcpy(path, directory, (size_t)directory_nbytes);
        memcpy(name, prefix, PREFIX_NBYTES);
    }
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        Py_ssize_t length;
        PyObject *owner;
        const char *text = text_of(hashes, (size_t)i, &length, &owner);
        if (text && hash_bytes(digest, text, (size_t)length)) {
            char *end = path + directory_nbytes;
            *end++ = '/';
            *end++ = text[0];
            *end++ = text[1];
            *end++ = '/';
            memcpy(end, text, (size_t)length);
            xxh3_128(name + PREFIX_NBYTES, text, (size_t)length);
            PyObject *one = PyBytes_FromStringAndSize(path, directory_nbytes + 4 + length);
            PyObject *other = PyBytes_FromStringAndSize((const char *)name, NAME_NBYTES);
            failed = !one || PyList_SetItem(paths, i, one) || !other || PyList_SetItem(names, i, other);
        } else {
            if (text)
                PyErr_Format(PyExc_ValueError, "not a page hash: %R", owner);
            failed = 1;
        }
        Py_XDECREF(owner);
    }
    PyObject *result = failed ? NULL : PyTuple_Pack(2, paths, names);
    if (!path && count >= 0)
        PyErr_NoMemory();
    Py_XDECREF(paths);
    Py_XDECREF(names);
    free(path);
    return result;
}

PyObject *page_trailers(PyObject *module, PyObject *arguments) {
    (void)module;
    const char *token;
    Py_ssize_t token_nbytes;
    PyObject *name_list, *serials;
    int synced;
    if (!PyArg_ParseTuple(arguments, "Opy#O", &name_list, &synced, &token, &token_nbytes, &serials))
        return NULL;
    texts names;
    if (texts_hold(&names, name_list))
        return NULL;
    int fits = token_nbytes == TOKEN_NBYTES && PySequence_Size(serials) == (Py_ssize_t)names.count;
    for (size_t i = 0; fits && i < names.count; i++)
        fits = names.nbytes[i] >= NAME_NBYTES;
    int64_t *numbers = NULL;
    PyObject *result = NULL;
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "names, token and serials do not fit together");
    else if ((numbers = integers_of(serials, names.count)))
        result = PyList_New((Py_ssize_t)names.count);
    for (size_t i = 0; result && i < names.count; i++) {
        uint8_t trailer[TRAILER_NBYTES];
        trailer_build(trailer, (const uint8_t *)names.data[i], synced, (const uint8_t *)token, (uint64_t)numbers[i]);
        PyObject *one = PyBytes_FromStringAndSize((const char *)trailer, TRAILER_NBYTES);
        if (!one || PyList_SetItem(result, (Py_ssize_t)i, one))
            Py_CLEAR(result);
    }
    free(numbers);
    texts_release(&names);
    return result;
}

/* Set the checksum in `fields` from item `index`. Return 0, or -1 with an exception. */
static int checksum_of(PyObject *checksums, size_t index, frame_fields *fields) {
    PyObject *value = PySequence_GetItem(checksums, (Py_ssize_t)index);
    fields->checksum = value ? PyLong_AsUnsignedLongLong(value) : 0;
    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

/* Hold headers of at least 128 bytes each, and parse the arguments of both functions about frames. */
static int frames_hold(batch *all, frame_fields *fields, PyObject *arguments, PyObject **hashes, PyObject **checksums,
                       int writable) {
    PyObject *headers;
    const char *space_id;
    Py_ssize_t space_id_nbytes;
    unsigned long long payload_nbytes;
    if (!PyArg_ParseTuple(arguments, "OOy#KO", &headers, hashes, &space_id, &space_id_nbytes, &payload_nbytes, checksums))
        return -1;
    if (pieces_hold(all, headers, writable))
        return -1;
    int fits = space_id_nbytes == SPACE_ID_NBYTES && PySequence_Size(*hashes) == (Py_ssize_t)all->views &&
               (*checksums == Py_None || PySequence_Size(*checksums) == (Py_ssize_t)all->views);
    for (size_t i = 0; fits && i < all->views; i++)
        fits = all->iov[i].iov_len >= FRAME_NBYTES;
    if (!fits) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "headers, hashes and checksums do not fit together");
        batch_release(all);
        return -1;
    }
    *fields = (frame_fields){(const uint8_t *)space_id, payload_nbytes, 0, *checksums != Py_None};
    return 0;
}

PyObject *write_frames(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *hashes, *checksums;
    frame_fields fields;
    batch all;
    if (frames_hold(&all, &fields, arguments, &hashes, &checksums, 1))
        return NULL;
    int failed = 0;
    for (size_t i = 0; !failed && i < all.views; i++) {
        uint8_t digest[MOST_HASH_NBYTES];
        const size_t nbytes = hash_of(hashes, i, digest);
        failed = !nbytes || (checksums != Py_None && checksum_of(checksums, i, &fields));
        if (!failed) {
            frame_build(all.iov[i].iov_base, &fields, digest, nbytes);
            memset((uint8_t *)all.iov[i].iov_base + FRAME_NBYTES, 0, all.iov[i].iov_len - FRAME_NBYTES);
        }
    }
    batch_release(&all);
    if (failed)
        return NULL;
    Py_INCREF(Py_None);
    return Py_None;
}

static int is_zero(const uint8_t *bytes, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i++)
        if (bytes[i])
            return 0;
    return 1;
}

PyObject *check_frames(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *hashes, *checksums, *result = NULL;
    frame_fields fields;
    batch all;
    if (frames_hold(&all, &fields, arguments, &hashes, &checksums, 0))
        return NULL;
    int64_t *verdicts = calloc(all.views + 1, sizeof *verdicts);
    int failed = !verdicts;
    if (failed)
        PyErr_NoMemory();
    for (size_t i = 0; !failed && i < all.views; i++) {
        const uint8_t *header = all.iov[i].iov_base;
        uint8_t digest[MOST_HASH_NBYTES], frame[FRAME_NBYTES];
        const size_t nbytes = hash_of(hashes, i, digest);
        if (checksums == Py_None)
            frame_take(header, &fields);
        failed = !nbytes || (checksums != Py_None && checksum_of(checksums, i, &fields));
        if (failed)
            break;
        frame_build(frame, &fields, digest, nbytes);
        const int same = !memcmp(frame, header, FRAME_NBYTES) &&
                         is_zero(header + FRAME_NBYTES, all.iov[i].iov_len - FRAME_NBYTES);
        verdicts[i] = same ? HIT : WRONG;
    }
    if (!failed)
        result = list_of(verdicts, all.views);
    free(verdicts);
    batch_release(&all);
    return result;
}
