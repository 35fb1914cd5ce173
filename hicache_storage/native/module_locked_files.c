#include "module_locked_files.h"

#include <stdlib.h>
#include <string.h>

#include "files.h"
#include "locked_files.h"

PyObject *change_totals(PyObject *module, PyObject *arguments) {
    (void)module;
    int fd;
    unsigned long long more, less;
    double wait_s;
    if (!PyArg_ParseTuple(arguments, "iKKd", &fd, &more, &less, &wait_s))
        return NULL;
    uint64_t added = more, removed = less;
    int64_t verdict;
    Py_BEGIN_ALLOW_THREADS
    verdict = totals_change(fd, wait_s, &added, &removed);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(LKK)", (long long)verdict, (unsigned long long)added, (unsigned long long)removed);
}

PyObject *take_lines(PyObject *module, PyObject *arguments) {
    (void)module;
    line_take wanted;
    memset(&wanted, 0, sizeof wanted);
    PyObject *path;
    const char *magic;
    Py_ssize_t magic_nbytes;
    unsigned long long share_nbytes, least, most;
    if (!PyArg_ParseTuple(arguments, "O&y#KKKd", PyUnicode_FSConverter, &path, &magic, &magic_nbytes, &share_nbytes,
                          &least, &most, &wanted.wait_s))
        return NULL;
    PyObject *result = NULL;
    if (magic_nbytes != LIST_MAGIC_NBYTES || !share_nbytes || !most || most > LINES_MOST) {
        PyErr_SetString(PyExc_ValueError, "magic, share and bounds do not fit together");
    } else if (!(wanted.lines = malloc((size_t)most * LINE_MOST_NBYTES))) {
        PyErr_NoMemory();
    } else {
        wanted.path = PyBytes_AsString(path);
        wanted.magic = (const uint8_t *)magic;
        wanted.share_nbytes = share_nbytes;
        wanted.least = least;
        wanted.most = most;
        int64_t verdict;
        Py_BEGIN_ALLOW_THREADS
        verdict = lines_take(&wanted);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("(Ly#Ky#)", (long long)verdict, (const char *)wanted.header,
                               (Py_ssize_t)LIST_HEADER_NBYTES, (unsigned long long)wanted.end, wanted.lines,
                               (Py_ssize_t)wanted.nbytes);
    }
    free(wanted.lines);
    Py_DECREF(path);
    return result;
}
