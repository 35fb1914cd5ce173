#include "module_sockets.h"

#include <stdlib.h>
#include <string.h>

#include "arguments.h"
#include "files.h"
#include "module_revocables.h"
#include "sockets.h"

/* Receive the replies to requests into pages. Return a tuple for Python, or NULL with an exception. */
static PyObject *bulks_of(bulk_exchange *all) {
    size_t done;
    Py_BEGIN_ALLOW_THREADS
    done = bulks_fetch(all);
    Py_END_ALLOW_THREADS
    PyObject *list = list_of(all->verdicts, done);
    if (!list)
        return NULL;
    return Py_BuildValue("(Nny#)", list, (Py_ssize_t)all->sent, (const char *)all->reader.head,
                         (Py_ssize_t)all->reader.head_nbytes);
}

PyObject *fetch_bulks(PyObject *module, PyObject *arguments) {
    (void)module;
    int fd;
    const char *begun;
    Py_ssize_t sent, begun_nbytes, window;
    PyObject *requests, *pages, *states = NULL, *result = NULL;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "iOny#Ond|O", &fd, &requests, &sent, &begun, &begun_nbytes, &pages, &window,
                          &deadline_s, &states))
        return NULL;
    batch targets, sources, lent;
    if (batch_hold(&targets, pages, 1))
        return NULL;
    if (pieces_hold(&sources, requests, 0)) {
        batch_release(&targets);
        return NULL;
    }
    const int fits = !states_hold(&lent, states, targets.pages);
    uint8_t head[HEAD_NBYTES];
    int64_t *verdicts = calloc(targets.pages + 1, sizeof *verdicts);
    if (!fits) {
        /* there is an exception */
    } else if (begun_nbytes > HEAD_NBYTES || window < 1 || sent < 0 || sources.views != targets.pages ||
        (size_t)sent > targets.pages || (begun_nbytes && !sent)) {
        PyErr_SetString(PyExc_ValueError, "requests, pages and window do not fit together");
    } else if (!verdicts) {
        PyErr_NoMemory();
    } else {
        memcpy(head, begun, (size_t)begun_nbytes);
        bulk_exchange all = {{fd, head, (size_t)begun_nbytes, deadline_s},
                             sources.iov,
                             targets.iov,
                             targets.first,
                             targets.pages,
                             (size_t)window,
                             (size_t)sent,
                             verdicts,
                             lent.iov};
        result = bulks_of(&all);
    }
    free(verdicts);
    batch_release(&lent);
    batch_release(&sources);
    batch_release(&targets);
    return result;
}

/* Return the positions of the requests that were skipped as a new list, or NULL with an exception. */
static PyObject *skipped_of(const line_exchange *all, size_t count) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < count; i++) {
        if (all->replies[i])
            continue;
        PyObject *position = PyLong_FromSize_t(i);
        if (!position || PyList_Append(list, position))
            Py_CLEAR(list);
        Py_XDECREF(position);
    }
    return list;
}

PyObject *exchange_lines(PyObject *module, PyObject *arguments) {
    (void)module;
    int fd;
    Py_ssize_t window;
    PyObject *requests, *replies, *states = NULL, *result = NULL;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "iOOnd|O", &fd, &requests, &replies, &window, &deadline_s, &states))
        return NULL;
    batch pieces, lent;
    if (batch_hold(&pieces, requests, 0))
        return NULL;
    const int fits_states = !states_hold(&lent, states, pieces.pages);
    int64_t *lines = fits_states ? integers_of(replies, pieces.pages) : NULL;
    int fits = lines && window >= 1;
    for (size_t i = 0; fits && i < pieces.pages; i++)
        fits = lines[i] >= 1 && lines[i] <= LINE_MOST &&
               (!state_at(lent.iov, i) || pieces.first[i + 1] - pieces.first[i] >= 2);
    if (fits) {
        line_exchange all = {fd,   pieces.iov, pieces.first, lines, pieces.pages, (size_t)window, deadline_s,
                             NULL, 0,          lent.iov};
        int64_t verdict;
        Py_BEGIN_ALLOW_THREADS
        verdict = lines_exchange(&all);
        Py_END_ALLOW_THREADS
        PyObject *skipped = skipped_of(&all, pieces.pages);
        if (skipped)
            result = Py_BuildValue("(Ly#N)", (long long)verdict, all.received ? all.received : "",
                                   (Py_ssize_t)all.nbytes, skipped);
        free(all.received);
    } else if (lines) {
        PyErr_SetString(PyExc_ValueError, "requests, replies and window do not fit together");
    }
    free(lines);
    batch_release(&lent);
    batch_release(&pieces);
    return result;
}
