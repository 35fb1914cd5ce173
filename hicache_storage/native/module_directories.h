/* The module's functions that list directories and look at the files in them. */
#ifndef HICACHE_MODULE_DIRECTORIES_H
#define HICACHE_MODULE_DIRECTORIES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *list_directories(PyObject *module, PyObject *path_list);
PyObject *modes_of(PyObject *module, PyObject *path_list);
PyObject *stat_files(PyObject *module, PyObject *arguments);

#endif
