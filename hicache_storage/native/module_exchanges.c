#include "module_exchanges.h"

#include <stdlib.h>
#include <string.h>

#include "arguments.h"
#include "exchanges.h"
#include "module_revocables.h"

/* Everything that `run_exchanges` holds during a call. */
typedef struct {
    batch requests, pages, lent;
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
    batch_release(&job->lent);
    batch_release(&job->pages);
    batch_release(&job->requests);
}

static int exchange_job_hold(exchange_job *job, PyObject *fds, PyObject *requests, PyObject *pages, PyObject *slots,
                             PyObject *states, PyObject *revocables) {
    memset(job, 0, sizeof *job);
    if (batch_hold(&job->requests, requests, 0) || batch_hold(&job->pages, pages, 1) ||
        PyObject_GetBuffer(slots, &job->slots, PyBUF_CONTIG) || PyObject_GetBuffer(states, &job->states, PyBUF_CONTIG) ||
        states_hold(&job->lent, revocables, job->pages.pages))
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

/* Return the size of a page, and in `iov` its pieces after the first `done` bytes. -1 if it is shorter than that. */
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
    one->revocable = state_at(job->lent.iov, index);
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

PyObject *run_exchanges(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *fds, *requests, *pages, *slots, *states, *lent = NULL;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "OOOOOd|O", &fds, &requests, &pages, &slots, &states, &deadline_s, &lent))
        return NULL;
    exchange_job job;
    PyObject *result = NULL;
    if (!exchange_job_hold(&job, fds, requests, pages, slots, states, lent)) {
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
