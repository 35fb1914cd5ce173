#include "batch.h"

#include <stdlib.h>
#include <string.h>

#include "exchanges.h"
#include "files.h"
#include "sockets.h"
#include "xxh3.h"

static PyObject *digests(PyObject *module, PyObject *pages) {
    (void)module;
    batch all;
    if (batch_hold(&all, pages, 0))
        return NULL;
    PyObject *result = NULL;
    uint64_t *values = calloc(all.pages + 1, sizeof *values);
    if (values) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t page = 0; page < all.pages; page++) {
            xxh3_stream stream;
            xxh3_begin(&stream);
            for (size_t i = all.first[page]; i < all.first[page + 1]; i++)
                xxh3_update(&stream, all.iov[i].iov_base, all.iov[i].iov_len);
            values[page] = xxh3_digest(&stream);
        }
        Py_END_ALLOW_THREADS
        result = list_of_unsigned(values, all.pages);
    } else {
        PyErr_NoMemory();
    }
    free(values);
    batch_release(&all);
    return result;
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

/* What the calls about many files have in common. */
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
    int fits = all->names.count == count && (!pages || all->pages.pages == count);
    for (size_t i = 0; fits && i < count; i++)
        fits = all->names.nbytes[i] >= name_nbytes && (!pages || batch_nbytes(&all->pages, i) == nbytes) &&
               strlen(all->paths.data[i]) == all->paths.nbytes[i];
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
    PyObject *paths, *names, *pages, *result = NULL;
    unsigned long long nbytes;
    long long touched_ns, interval_ns;
    Py_ssize_t skip;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "OOOKLLnd", &paths, &names, &pages, &nbytes, &touched_ns, &interval_ns, &skip,
                          &deadline_s))
        return NULL;
    job all;
    if (!job_hold(&all, paths, names, NAME_NBYTES, pages, nbytes, 1)) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < all.paths.count; i++) {
            const size_t first = all.pages.first[i];
            const page_read wanted = {all.paths.data[i],
                                      (const uint8_t *)all.names.data[i],
                                      all.pages.iov + first,
                                      all.pages.first[i + 1] - first,
                                      nbytes,
                                      touched_ns < 0 ? -1 : touched_ns - (long long)i,
                                      interval_ns,
                                      skip < 0 ? NULL : &all.digests[i],
                                      skip < 0 ? 0 : (size_t)skip};
            all.verdicts[i] = monotonic_s() > deadline_s ? LATE : file_read(&wanted);
        }
        Py_END_ALLOW_THREADS
        PyObject *verdicts = list_of(all.verdicts, all.paths.count);
        PyObject *values = list_of_unsigned(all.digests, all.paths.count);
        if (verdicts && values)
            result = PyTuple_Pack(2, verdicts, values);
        Py_XDECREF(verdicts);
        Py_XDECREF(values);
    }
    job_release(&all);
    return result;
}

static PyObject *write_files(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *paths, *targets, *trailers, *pages, *result = NULL;
    unsigned long long nbytes;
    long long modified_ns;
    Py_ssize_t recycled;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "OOOOKLnd", &paths, &targets, &trailers, &pages, &nbytes, &modified_ns, &recycled,
                          &deadline_s))
        return NULL;
    job all;
    texts names;
    if (texts_hold(&names, targets))
        return NULL;
    if (!job_hold(&all, paths, trailers, TRAILER_NBYTES, pages, nbytes, 0)) {
        if (names.count != all.paths.count) {
            PyErr_SetString(PyExc_ValueError, "there is not one target a path");
        } else {
            Py_BEGIN_ALLOW_THREADS
            for (size_t i = 0; i < all.paths.count; i++) {
                const size_t first = all.pages.first[i];
                const page_write wanted = {all.paths.data[i],
                                           names.data[i],
                                           all.pages.iov + first,
                                           all.pages.first[i + 1] - first,
                                           nbytes,
                                           (const uint8_t *)all.names.data[i],
                                           modified_ns - (long long)i,
                                           (Py_ssize_t)i < recycled};
                all.verdicts[i] = monotonic_s() > deadline_s ? LATE : file_write(&wanted);
                if (all.verdicts[i] < 0)
                    break; /* the others are MISS: the array begins with zeros */
            }
            Py_END_ALLOW_THREADS
            result = list_of(all.verdicts, all.paths.count);
        }
    }
    job_release(&all);
    texts_release(&names);
    return result;
}

/* Hold one list of buffers as a batch of one page. */
static int pieces_hold(batch *all, PyObject *pieces, int writable) {
    PyObject *one = PyTuple_Pack(1, pieces);
    const int failed = !one || batch_hold(all, one, writable);
    Py_XDECREF(one);
    return failed ? -1 : 0;
}

static PyObject *send_pieces(PyObject *module, PyObject *arguments) {
    (void)module;
    int fd;
    PyObject *pieces;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "iOd", &fd, &pieces, &deadline_s))
        return NULL;
    batch all;
    if (pieces_hold(&all, pieces, 0))
        return NULL;
    int64_t result;
    Py_BEGIN_ALLOW_THREADS
    result = socket_send(fd, all.iov, all.views, deadline_s);
    Py_END_ALLOW_THREADS
    batch_release(&all);
    return PyLong_FromLongLong(result);
}

static PyObject *receive_pieces(PyObject *module, PyObject *arguments) {
    (void)module;
    int fd;
    PyObject *pieces;
    Py_ssize_t least;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "iOnd", &fd, &pieces, &least, &deadline_s))
        return NULL;
    batch all;
    if (pieces_hold(&all, pieces, 1))
        return NULL;
    int64_t result;
    Py_BEGIN_ALLOW_THREADS
    result = socket_receive(fd, all.iov, all.views, least < 0 ? 0 : (size_t)least, deadline_s);
    Py_END_ALLOW_THREADS
    batch_release(&all);
    return PyLong_FromLongLong(result);
}

static PyObject *receive_bulks(PyObject *module, PyObject *arguments) {
    (void)module;
    int fd, more;
    const char *begun;
    Py_ssize_t begun_nbytes;
    PyObject *pages, *result = NULL;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "iy#Opd", &fd, &begun, &begun_nbytes, &pages, &more, &deadline_s))
        return NULL;
    if (begun_nbytes > HEAD_NBYTES) {
        PyErr_SetString(PyExc_ValueError, "a head has at most 4 bytes");
        return NULL;
    }
    batch all;
    if (batch_hold(&all, pages, 1))
        return NULL;
    uint8_t head[HEAD_NBYTES];
    memcpy(head, begun, (size_t)begun_nbytes);
    bulk_reader reader = {fd, head, (size_t)begun_nbytes, deadline_s};
    int64_t *verdicts = calloc(all.pages + 1, sizeof *verdicts);
    if (verdicts) {
        size_t done = 0;
        Py_BEGIN_ALLOW_THREADS
        for (int64_t verdict = HIT; done < all.pages && (verdict == HIT || verdict == MISS); done++) {
            const size_t first = all.first[done], count = all.first[done + 1] - first;
            verdict = verdicts[done] = bulk_read(&reader, all.iov + first, count, batch_nbytes(&all, done),
                                                 more || done + 1 < all.pages);
        }
        Py_END_ALLOW_THREADS
        PyObject *list = list_of(verdicts, done);
        if (list)
            result = Py_BuildValue("(Ny#)", list, (const char *)head, (Py_ssize_t)reader.head_nbytes);
    } else {
        PyErr_NoMemory();
    }
    free(verdicts);
    batch_release(&all);
    return result;
}

/* What `run_exchanges` holds for one call. */
typedef struct {
    batch requests, pages;
    Py_buffer slots, states;
    exchange *all;
    lane *lanes;
    struct pollfd *polled;
    size_t lane_count;
} exchange_job;

static void exchange_job_release(exchange_job *job) {
    free(job->all);
    free(job->lanes);
    free(job->polled);
    if (job->states.obj)
        PyBuffer_Release(&job->states);
    if (job->slots.obj)
        PyBuffer_Release(&job->slots);
    batch_release(&job->pages);
    batch_release(&job->requests);
}

static int exchange_job_hold(exchange_job *job, PyObject *fds, PyObject *requests, PyObject *pages, PyObject *slots,
                             PyObject *states) {
    memset(job, 0, sizeof *job);
    if (batch_hold(&job->requests, requests, 0) || batch_hold(&job->pages, pages, 1) ||
        PyObject_GetBuffer(slots, &job->slots, PyBUF_CONTIG) || PyObject_GetBuffer(states, &job->states, PyBUF_CONTIG))
        return -1;
    const Py_ssize_t lane_count = PySequence_Size(fds);
    if (lane_count < 0)
        return -1;
    job->lane_count = (size_t)lane_count;
    job->all = calloc(job->requests.pages + 1, sizeof *job->all);
    job->lanes = calloc(job->lane_count + 1, sizeof *job->lanes);
    job->polled = calloc(job->lane_count + 1, sizeof *job->polled);
    if (!job->all || !job->lanes || !job->polled) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < lane_count; i++) {
        PyObject *fd = PySequence_GetItem(fds, i);
        job->lanes[i].fd = fd ? (int)PyLong_AsLong(fd) : -1;
        Py_XDECREF(fd);
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

/* Return the pieces of a page behind its first `done` bytes, and their sum; -1 where there are not as many. */
static int64_t rest_of(const batch *all, size_t page, int64_t done, struct iovec **iov, size_t *pieces) {
    const size_t nbytes = batch_nbytes(all, page);
    *iov = all->iov + all->first[page];
    *pieces = all->first[page + 1] - all->first[page];
    if (done < 0 || nbytes > INT64_MAX || (uint64_t)done > nbytes)
        return -1;
    exchange_advance(iov, pieces, (size_t)done, NULL);
    return (int64_t)nbytes;
}

static int exchange_fits(exchange_job *job, size_t index, size_t slot_nbytes) {
    static const char head_method[] = "HEAD ";
    exchange *one = &job->all[index];
    const struct iovec *request = job->requests.iov + job->requests.first[index];
    if (job->requests.first[index] == job->requests.first[index + 1])
        return 0;
    one->has_reply_body = request->iov_len < 5 || memcmp(request->iov_base, head_method, 5);
    one->state = (exchange_state *)job->states.buf + index;
    one->slot = (char *)job->slots.buf + index * slot_nbytes;
    one->slot_nbytes = slot_nbytes;
    one->out_nbytes = rest_of(&job->requests, index, one->state->sent, &one->out, &one->outs);
    one->in_nbytes = rest_of(&job->pages, index, one->state->filled, &one->in, &one->ins);
    const exchange_state *state = one->state;
    if (one->out_nbytes < 1 || one->in_nbytes < 0 || state->received < 0 || state->received > (int64_t)slot_nbytes ||
        state->head_nbytes < 0 || state->head_nbytes > state->received || (state->head_nbytes && state->head_nbytes < 4))
        return 0;
    if (state->lane < 0)
        return !state->sent && !state->received && !state->filled;
    if (state->lane >= (int64_t)job->lane_count)
        return 0;
    lane *carrier = &job->lanes[state->lane];
    const int is_first = !carrier->current;
    carrier->current = one;
    return is_first;
}

/* Return whether all lengths fit together. */
static int exchange_job_fits(exchange_job *job) {
    const size_t count = job->requests.pages;
    if (job->pages.pages != count || (size_t)job->states.len != count * sizeof(exchange_state))
        return 0;
    if (!count)
        return 1;
    if ((uintptr_t)job->states.buf % sizeof(int64_t) || !job->slots.len || (size_t)job->slots.len % count)
        return 0;
    for (size_t i = 0; i < count; i++)
        if (!exchange_fits(job, i, (size_t)job->slots.len / count))
            return 0;
    for (size_t i = 0; i < job->lane_count; i++)
        job->lanes[i].current = NULL;
    return 1;
}

static PyObject *run_exchanges(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *fds, *requests, *pages, *slots, *states;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "OOOOOd", &fds, &requests, &pages, &slots, &states, &deadline_s))
        return NULL;
    exchange_job job;
    PyObject *result = NULL;
    if (!exchange_job_hold(&job, fds, requests, pages, slots, states)) {
        if (exchange_job_fits(&job)) {
            int64_t failed;
            Py_BEGIN_ALLOW_THREADS
            failed = exchanges_run(job.all, job.requests.pages, job.lanes, job.polled, job.lane_count, deadline_s);
            Py_END_ALLOW_THREADS
            result = PyLong_FromLongLong(failed);
        } else {
            PyErr_SetString(PyExc_ValueError, "requests, pages, slots and states do not fit together");
        }
    }
    exchange_job_release(&job);
    return result;
}

static PyMethodDef methods[] = {
    {"check_files", check_files, METH_VARARGS, NULL},
    {"digests", digests, METH_O, NULL},
    {"exists_files", exists_files, METH_VARARGS, NULL},
    {"read_files", read_files, METH_VARARGS, NULL},
    {"receive_bulks", receive_bulks, METH_VARARGS, NULL},
    {"receive_pieces", receive_pieces, METH_VARARGS, NULL},
    {"run_exchanges", run_exchanges, METH_VARARGS, NULL},
    {"send_pieces", send_pieces, METH_VARARGS, NULL},
    {"write_files", write_files, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
