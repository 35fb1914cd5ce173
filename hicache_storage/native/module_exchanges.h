/* The module's function that sends requests over several connections. */
#ifndef HICACHE_MODULE_EXCHANGES_H
#define HICACHE_MODULE_EXCHANGES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *run_exchanges(PyObject *module, PyObject *arguments);

#endif
