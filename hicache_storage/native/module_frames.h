/* The module's functions that make and check headers, trailers and paths of pages. */
#ifndef HICACHE_MODULE_FRAMES_H
#define HICACHE_MODULE_FRAMES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *check_frames(PyObject *module, PyObject *arguments);
PyObject *page_files(PyObject *module, PyObject *arguments);
PyObject *page_trailers(PyObject *module, PyObject *arguments);
PyObject *write_frames(PyObject *module, PyObject *arguments);

#endif
