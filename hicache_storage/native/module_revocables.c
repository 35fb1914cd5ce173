#include "module_revocables.h"

#include <stdlib.h>
#include <string.h>

static int is_state(const struct iovec *one) {
    return one->iov_len == sizeof(uint64_t) && (uintptr_t)one->iov_base % sizeof(uint64_t) == 0;
}

static int misfits(void) {
    PyErr_SetString(PyExc_ValueError, "the state of a revocable must be 8 aligned bytes");
    return -1;
}

int states_hold(batch *states, PyObject *given, size_t pages) {
    memset(states, 0, sizeof *states);
    if (!given || pieces_hold(states, given, 1))
        return given ? -1 : 0;
    if (states->views && states->views != pages) {
        PyErr_SetString(PyExc_ValueError, "pages and states do not fit together");
        return -1;
    }
    for (size_t i = 0; i < states->views; i++)
        if (states->iov[i].iov_len && !is_state(&states->iov[i]))
            return misfits();
    return 0;
}

int revocables_hold(revocables *all, PyObject *states, size_t pages) {
    all->scratch = NULL;
    if (states_hold(&all->states, states, pages))
        return -1;
    if (!all->states.views)
        return 0;
    void *scratch;
    if (posix_memalign(&scratch, 4096, SCRATCH_NBYTES)) {
        PyErr_NoMemory();
        return -1;
    }
    all->scratch = scratch;
    return 0;
}

void revocables_release(revocables *all) {
    free(all->scratch);
    all->scratch = NULL;
    batch_release(&all->states);
}

/* Hold one state. Return 0, or -1 with an exception. */
static int state_hold(batch *one, PyObject *state) {
    PyObject *states = PyTuple_Pack(1, state);
    int failed = !states || pieces_hold(one, states, 1);
    Py_XDECREF(states);
    if (!failed && !is_state(&one->iov[0])) {
        batch_release(one);
        failed = misfits();
    }
    return failed ? -1 : 0;
}

PyObject *begin_access(PyObject *module, PyObject *state) {
    (void)module;
    batch one;
    if (state_hold(&one, state))
        return NULL;
    const int begun = access_begin(one.iov[0].iov_base);
    batch_release(&one);
    return PyBool_FromLong(begun);
}

static PyObject *none(void) {
    Py_INCREF(Py_None);
    return Py_None;
}

PyObject *end_access(PyObject *module, PyObject *state) {
    (void)module;
    batch one;
    if (state_hold(&one, state))
        return NULL;
    access_end(one.iov[0].iov_base);
    batch_release(&one);
    return none();
}

PyObject *revoke_access(PyObject *module, PyObject *state) {
    (void)module;
    batch one;
    if (state_hold(&one, state))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    access_revoke(one.iov[0].iov_base);
    Py_END_ALLOW_THREADS
    batch_release(&one);
    return none();
}

PyObject *digests(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *pages, *states = NULL, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "O|O", &pages, &states))
        return NULL;
    batch all;
    if (batch_hold(&all, pages, 0))
        return NULL;
    revocables lent;
    uint64_t *values = calloc(all.pages + 1, sizeof *values);
    char *hashed = calloc(all.pages + 1, sizeof *hashed);
    if (!values || !hashed)
        PyErr_NoMemory();
    else if (!revocables_hold(&lent, states, all.pages)) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < all.pages; i++)
            hashed[i] = (char)pieces_hash_by(way_to(&lent, i).state, all.iov + all.first[i],
                                             all.first[i + 1] - all.first[i], &values[i]);
        Py_END_ALLOW_THREADS
        result = list_of_unsigned(values, all.pages);
        for (size_t i = 0; result && i < all.pages; i++)
            if (!hashed[i] && PyList_SetItem(result, (Py_ssize_t)i, none()))
                Py_CLEAR(result);
    }
    if (values && hashed)
        revocables_release(&lent);
    free(hashed);
    free(values);
    batch_release(&all);
    return result;
}
