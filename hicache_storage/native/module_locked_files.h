/* The module's function that changes small files under a lock. */
#ifndef HICACHE_MODULE_LOCKED_FILES_H
#define HICACHE_MODULE_LOCKED_FILES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *change_totals(PyObject *module, PyObject *arguments);

#endif
