#include "arguments.h"

#include <stdlib.h>
#include <string.h>

#include "copies.h"
#include "files.h"
#include "module_directories.h"
#include "module_exchanges.h"
#include "module_frames.h"
#include "module_locked_files.h"
#include "module_revocables.h"
#include "module_slots.h"
#include "module_sockets.h"
#include "sockets.h"
#include "xxh3.h"

#ifndef HICACHE_SOURCES /* the checksum of the sources (_sources.py) */
#error "compile the module with _build.py"
#endif

/* Hold the pages of a copy. Return 0, or -1 with an exception. */
static int copies_hold(batch *targets, batch *sources, PyObject *target_pages, PyObject *source_pages) {
    if (batch_hold(targets, target_pages, 1))
        return -1;
    if (batch_hold(sources, source_pages, 0)) {
        batch_release(targets);
        return -1;
    }
    int fits = targets->pages == sources->pages;
    for (size_t page = 0; fits && page < targets->pages; page++)
        fits = batch_nbytes(targets, page) == batch_nbytes(sources, page);
    if (fits)
        return 0;
    batch_release(sources);
    batch_release(targets);
    PyErr_SetString(PyExc_ValueError, "targets and sources do not fit together");
    return -1;
}

/* Copy pages. Return a list of digests, or if there are `states`, a tuple of verdicts and digests. */
static PyObject *copied(PyObject *target_pages, PyObject *source_pages, PyObject *states, Py_ssize_t skip, int far) {
    PyObject *result = NULL;
    batch targets, sources, lent;
    if (copies_hold(&targets, &sources, target_pages, source_pages))
        return NULL;
    uint64_t *digests = calloc(targets.pages + 1, sizeof *digests);
    int64_t *verdicts = calloc(targets.pages + 1, sizeof *verdicts);
    const int fits = !states_hold(&lent, states, targets.pages);
    if (!digests || !verdicts) {
        PyErr_NoMemory();
    } else if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t page = 0; page < targets.pages; page++) {
            uint64_t *state = state_at(lent.iov, page);
            const struct iovec *into = targets.iov + targets.first[page], *from = sources.iov + sources.first[page];
            const int is_whole = copy_pieces(state, into, from, batch_nbytes(&targets, page),
                                             skip < 0 ? NULL : &digests[page], skip < 0 ? 0 : (size_t)skip, far);
            verdicts[page] = is_whole ? HIT : REVOKED;
            if (!is_whole)
                digests[page] = 0;
        }
        Py_END_ALLOW_THREADS
        result = states ? verdicts_and_digests(verdicts, digests, targets.pages)
                        : list_of_unsigned(digests, skip < 0 ? 0 : targets.pages);
    }
    batch_release(&lent);
    free(verdicts);
    free(digests);
    batch_release(&sources);
    batch_release(&targets);
    return result;
}

static PyObject *copy_pages(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *targets, *sources;
    Py_ssize_t skip;
    int far = 0;
    if (!PyArg_ParseTuple(arguments, "OOn|p", &targets, &sources, &skip, &far))
        return NULL;
    return copied(targets, sources, NULL, skip, far);
}

static PyObject *copy_revocable(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *targets, *sources, *states;
    Py_ssize_t skip = -1;
    int far = 0;
    if (!PyArg_ParseTuple(arguments, "OOO|np", &targets, &sources, &states, &skip, &far))
        return NULL;
    return copied(targets, sources, states, skip, far);
}

static PyObject *exists_files(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *path_list;
    unsigned long long nbytes;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "OKd", &path_list, &nbytes, &deadline_s))
        return NULL;
    texts paths;
    if (texts_hold(&paths, path_list))
        return NULL;
    PyObject *result = NULL;
    int64_t *verdicts = calloc(paths.count + 1, sizeof *verdicts);
    if (verdicts) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < paths.count; i++)
            verdicts[i] = monotonic_s() > deadline_s ? LATE : file_exists(paths.data[i], nbytes);
        Py_END_ALLOW_THREADS
        result = list_of(verdicts, paths.count);
    } else {
        PyErr_NoMemory();
    }
    free(verdicts);
    texts_release(&paths);
    return result;
}

/* The arguments that all calls about many files have. */
typedef struct {
    texts paths, names;
    batch pages;
    int64_t *verdicts;
    uint64_t *digests;
} job;

static void job_release(job *all) {
    free(all->verdicts);
    free(all->digests);
    batch_release(&all->pages);
    texts_release(&all->names);
    texts_release(&all->paths);
}

/* Hold paths, names (or trailers) of `name_nbytes` each, and pages of `nbytes` each. Return 0, or -1 with an exception. */
static int job_hold(job *all, PyObject *paths, PyObject *names, size_t name_nbytes, PyObject *pages,
                    unsigned long long nbytes, int writable) {
    memset(all, 0, sizeof *all);
    if (texts_hold(&all->paths, paths) || texts_hold(&all->names, names))
        return -1;
    if (pages && batch_hold(&all->pages, pages, writable))
        return -1;
    const size_t count = all->paths.count;
    int fits = all->names.count == count && (!pages || all->pages.pages == count) && texts_are_paths(&all->paths);
    for (size_t i = 0; fits && i < count; i++)
        fits = all->names.nbytes[i] >= name_nbytes && (!pages || batch_nbytes(&all->pages, i) == nbytes);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "paths, names and pages do not fit together");
        return -1;
    }
    all->verdicts = calloc(count + 1, sizeof *all->verdicts);
    all->digests = calloc(count + 1, sizeof *all->digests);
    if (!all->verdicts || !all->digests) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *check_files(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *paths, *names, *result = NULL;
    unsigned long long nbytes;
    long long touched_ns;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "OOKLd", &paths, &names, &nbytes, &touched_ns, &deadline_s))
        return NULL;
    job all;
    if (!job_hold(&all, paths, names, NAME_NBYTES, NULL, nbytes, 0)) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < all.paths.count; i++)
            all.verdicts[i] = monotonic_s() > deadline_s ? LATE
                                                   : file_check(all.paths.data[i], (const uint8_t *)all.names.data[i],
                                                                nbytes, touched_ns);
        Py_END_ALLOW_THREADS
        result = list_of(all.verdicts, all.paths.count);
    }
    job_release(&all);
    return result;
}

static PyObject *read_files(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *paths, *names, *pages, *states = NULL, *result = NULL;
    unsigned long long nbytes;
    long long touched_ns, interval_ns;
    Py_ssize_t skip;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "OOOKLLnd|O", &paths, &names, &pages, &nbytes, &touched_ns, &interval_ns, &skip,
                          &deadline_s, &states))
        return NULL;
    job all;
    batch lent = {0};
    page_read *wanted = NULL;
    if (!job_hold(&all, paths, names, NAME_NBYTES, pages, nbytes, 1) && !states_hold(&lent, states, all.paths.count)) {
        int failed = !(wanted = calloc(all.paths.count + 1, sizeof *wanted));
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; !failed && i < all.paths.count; i++) {
            const size_t first = all.pages.first[i];
            wanted[i] = (page_read){all.paths.data[i],
                                    (const uint8_t *)all.names.data[i],
                                    all.pages.iov + first,
                                    all.pages.first[i + 1] - first,
                                    nbytes,
                                    touched_ns < 0 ? -1 : touched_ns - (long long)i,
                                    interval_ns,
                                    skip < 0 ? NULL : &all.digests[i],
                                    skip < 0 ? 0 : (size_t)skip,
                                    state_at(lent.iov, i),
                                    0};
        }
        failed = failed || files_read(wanted, all.paths.count, deadline_s, all.verdicts);
        Py_END_ALLOW_THREADS
        if (failed)
            PyErr_NoMemory();
        else
            result = verdicts_and_digests(all.verdicts, all.digests, all.paths.count);
    }
    free(wanted);
    batch_release(&lent);
    job_release(&all);
    return result;
}

static PyObject *write_files(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *paths, *targets, *trailers, *pages, *states = NULL, *result = NULL;
    unsigned long long nbytes;
    long long modified_ns;
    Py_ssize_t recycled;
    double deadline_s;
    Py_buffer stop;
    if (!PyArg_ParseTuple(arguments, "OOOOKLndy*|O", &paths, &targets, &trailers, &pages, &nbytes, &modified_ns,
                          &recycled, &deadline_s, &stop, &states))
        return NULL;
    const volatile uint8_t *stopped = stop.len ? stop.buf : NULL;
    job all;
    revocables lent = {0};
    texts names;
    if (texts_hold(&names, targets)) {
        PyBuffer_Release(&stop);
        return NULL;
    }
    if (!job_hold(&all, paths, trailers, TRAILER_NBYTES, pages, nbytes, 0) &&
        !revocables_hold(&lent, states, all.paths.count)) {
        if (names.count != all.paths.count || !texts_are_paths(&names)) {
            PyErr_SetString(PyExc_ValueError, "each path needs one target");
        } else {
            Py_BEGIN_ALLOW_THREADS
            for (size_t i = 0; i < all.paths.count && !(stopped && *stopped); i++) {
                const size_t first = all.pages.first[i];
                const page_write wanted = {all.paths.data[i],
                                           names.data[i],
                                           all.pages.iov + first,
                                           all.pages.first[i + 1] - first,
                                           nbytes,
                                           (const uint8_t *)all.names.data[i],
                                           modified_ns - (long long)i,
                                           (Py_ssize_t)i < recycled,
                                           way_to(&lent, i)};
                all.verdicts[i] = monotonic_s() > deadline_s ? LATE : file_write(&wanted);
                if (all.verdicts[i] < 0)
                    break; /* the others stay MISS, because the array begins as zeros */
            }
            Py_END_ALLOW_THREADS
            result = list_of(all.verdicts, all.paths.count);
        }
    }
    revocables_release(&lent);
    job_release(&all);
    texts_release(&names);
    PyBuffer_Release(&stop);
    return result;
}

static PyObject *claim_files(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *paths, *targets, *times_ns, *sizes, *result = NULL;
    unsigned long long kept_nbytes;
    Py_ssize_t most_kept;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "OOOOKnd", &paths, &targets, &times_ns, &sizes, &kept_nbytes, &most_kept,
                          &deadline_s))
        return NULL;
    job all;
    int64_t *modified_ns = NULL, *nbytes = NULL;
    if (job_hold(&all, paths, targets, 1, NULL, 0, 0))
        ;
    else if (!texts_are_paths(&all.names))
        PyErr_SetString(PyExc_ValueError, "a target is not a path");
    else if ((modified_ns = integers_of(times_ns, all.paths.count)) && (nbytes = integers_of(sizes, all.paths.count))) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < all.paths.count; i++) {
            const int keep = most_kept > 0 && (uint64_t)nbytes[i] == kept_nbytes;
            all.verdicts[i] = monotonic_s() > deadline_s ? LATE
                                                         : file_claim(all.paths.data[i], all.names.data[i],
                                                                      modified_ns[i], (uint64_t)nbytes[i], keep);
            most_kept -= all.verdicts[i] == KEPT;
        }
        Py_END_ALLOW_THREADS
        result = list_of(all.verdicts, all.paths.count);
    }
    free(modified_ns);
    free(nbytes);
    job_release(&all);
    return result;
}

static PyMethodDef methods[] = {
    {"begin_access", begin_access, METH_O, NULL},
    {"change_totals", change_totals, METH_VARARGS, NULL},
    {"check_files", check_files, METH_VARARGS, NULL},
    {"check_frames", check_frames, METH_VARARGS, NULL},
    {"check_slots", check_slots, METH_VARARGS, NULL},
    {"claim_files", claim_files, METH_VARARGS, NULL},
    {"copy_pages", copy_pages, METH_VARARGS, NULL},
    {"copy_revocable", copy_revocable, METH_VARARGS, NULL},
    {"digests", digests, METH_VARARGS, NULL},
    {"end_access", end_access, METH_O, NULL},
    {"exchange_lines", exchange_lines, METH_VARARGS, NULL},
    {"exists_files", exists_files, METH_VARARGS, NULL},
    {"fetch_bulks", fetch_bulks, METH_VARARGS, NULL},
    {"list_directories", list_directories, METH_O, NULL},
    {"modes_of", modes_of, METH_O, NULL},
    {"page_files", page_files, METH_VARARGS, NULL},
    {"page_trailers", page_trailers, METH_VARARGS, NULL},
    {"read_files", read_files, METH_VARARGS, NULL},
    {"read_slots", read_slots, METH_VARARGS, NULL},
    {"revoke_access", revoke_access, METH_O, NULL},
    {"run_exchanges", run_exchanges, METH_VARARGS, NULL},
    {"stat_files", stat_files, METH_VARARGS, NULL},
    {"write_files", write_files, METH_VARARGS, NULL},
    {"write_frames", write_frames, METH_VARARGS, NULL},
    {"write_slots", write_slots, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int add_sources(PyObject *module) { return PyModule_AddStringConstant(module, "SOURCES", HICACHE_SOURCES); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_sources}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
