/* The module's functions for memory that may be revocable, and the states that other functions use. */
#ifndef HICACHE_MODULE_REVOCABLES_H
#define HICACHE_MODULE_REVOCABLES_H

#include "arguments.h"
#include "revocables.h"

PyObject *begin_access(PyObject *module, PyObject *state);
PyObject *end_access(PyObject *module, PyObject *state);
PyObject *revoke_access(PyObject *module, PyObject *state);
PyObject *digests(PyObject *module, PyObject *arguments);

/* The states of a batch, held for one call, and scratch memory. */
typedef struct {
    batch states;
    uint8_t *scratch; /* NULL: no page is revocable */
} revocables;

/* Hold the states of pages as `revocables_hold` does, but without scratch memory. */
int states_hold(batch *states, PyObject *given, size_t pages);

/* Hold one state for each page, or none at all. A page that is not revocable has an empty state. Return 0, or -1 with
 * an exception. */
int revocables_hold(revocables *all, PyObject *states, size_t pages);
void revocables_release(revocables *all);

static inline way way_to(const revocables *all, size_t page) {
    if (!all->scratch || !all->states.iov[page].iov_len)
        return (way){NULL, NULL};
    return (way){all->states.iov[page].iov_base, all->scratch};
}

#endif
