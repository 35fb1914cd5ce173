#include "module_directories.h"

#include <stdlib.h>
#include <string.h>

#include "arguments.h"
#include "directories.h"
#include "files.h"
#include "sockets.h"

/* Hold names that can be paths. Return 0, or -1 with an exception. */
static int paths_hold(texts *all, PyObject *sequence) {
    if (texts_hold(all, sequence))
        return -1;
    if (texts_are_paths(all))
        return 0;
    PyErr_SetString(PyExc_ValueError, "a name is not a path");
    texts_release(all);
    return -1;
}

static PyObject *list_of_names(const names *found) {
    PyObject *list = PyList_New((Py_ssize_t)found->count);
    const char *name = found->text;
    for (size_t i = 0; list && i < found->count; i++) {
        PyObject *value = PyUnicode_FromString(name);
        if (!value || PyList_SetItem(list, (Py_ssize_t)i, value))
            Py_CLEAR(list);
        name += strlen(name) + 1;
    }
    return list;
}

/* Return a list of lists of names, or NULL with an exception. */
static PyObject *list_of_lists(const names *found, size_t count) {
    PyObject *lists = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; lists && i < count; i++) {
        PyObject *list = list_of_names(&found[i]);
        if (!list || PyList_SetItem(lists, (Py_ssize_t)i, list))
            Py_CLEAR(lists);
    }
    return lists;
}

PyObject *list_directories(PyObject *module, PyObject *path_list) {
    (void)module;
    texts paths;
    if (paths_hold(&paths, path_list))
        return NULL;
    PyObject *result = NULL;
    int64_t *verdicts = calloc(paths.count + 1, sizeof *verdicts);
    names *found = calloc(paths.count + 1, sizeof *found);
    if (!verdicts || !found) {
        PyErr_NoMemory();
    } else {
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < paths.count; i++)
            verdicts[i] = directory_list(paths.data[i], &found[i]);
        Py_END_ALLOW_THREADS
        PyObject *first = list_of(verdicts, paths.count);
        PyObject *second = list_of_lists(found, paths.count);
        if (first && second)
            result = PyTuple_Pack(2, first, second);
        Py_XDECREF(first);
        Py_XDECREF(second);
    }
    for (size_t i = 0; found && i < paths.count; i++)
        free(found[i].text);
    free(found);
    free(verdicts);
    texts_release(&paths);
    return result;
}

PyObject *stat_files(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *path_list, *result = NULL;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "Od", &path_list, &deadline_s))
        return NULL;
    texts paths;
    if (paths_hold(&paths, path_list))
        return NULL;
    int64_t *numbers = calloc(3 * paths.count + 1, sizeof *numbers);
    if (!numbers) {
        PyErr_NoMemory();
    } else {
        int64_t *times_ns = numbers + paths.count, *sizes = times_ns + paths.count;
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < paths.count; i++)
            numbers[i] = monotonic_s() > deadline_s ? LATE : file_stat(paths.data[i], &times_ns[i], &sizes[i]);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("(NNN)", list_of(numbers, paths.count), list_of(times_ns, paths.count),
                               list_of(sizes, paths.count));
    }
    free(numbers);
    texts_release(&paths);
    return result;
}

PyObject *modes_of(PyObject *module, PyObject *path_list) {
    (void)module;
    texts paths;
    if (paths_hold(&paths, path_list))
        return NULL;
    PyObject *result = NULL;
    int64_t *modes = calloc(paths.count + 1, sizeof *modes);
    if (!modes) {
        PyErr_NoMemory();
    } else {
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < paths.count; i++)
            modes[i] = file_mode(paths.data[i]);
        Py_END_ALLOW_THREADS
        result = list_of(modes, paths.count);
    }
    free(modes);
    texts_release(&paths);
    return result;
}
