/* The module's functions that move slots. */
#ifndef HICACHE_MODULE_SLOTS_H
#define HICACHE_MODULE_SLOTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *check_slots(PyObject *module, PyObject *arguments);
PyObject *read_slots(PyObject *module, PyObject *arguments);
PyObject *write_slots(PyObject *module, PyObject *arguments);

#endif
