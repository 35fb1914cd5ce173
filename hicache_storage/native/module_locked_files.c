#include "module_locked_files.h"

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
