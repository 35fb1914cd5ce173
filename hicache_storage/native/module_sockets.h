/* The module's functions that exchange pages over one connected socket. */
#ifndef HICACHE_MODULE_SOCKETS_H
#define HICACHE_MODULE_SOCKETS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *exchange_lines(PyObject *module, PyObject *arguments);
PyObject *fetch_bulks(PyObject *module, PyObject *arguments);

#endif
