#define _GNU_SOURCE
#include "module_slots.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "arguments.h"
#include "files.h"
#include "module_revocables.h"
#include "slots.h"
#include "sockets.h"

static const Py_ssize_t PART_MOST_NBYTES = (Py_ssize_t)1 << 46;

/* The files, positions and marks of slots, held for one call. */
typedef struct {
    PyObject *owner;
    const char *directory;
    texts names, marks;
    int flags;
    batch pages, states;
    int64_t *numbers, *opened, *fds, *offsets, *verdicts;
    uint64_t *digests;
} slot_job;

static void slot_job_release(slot_job *all) {
    free(all->numbers);
    free(all->opened);
    free(all->fds);
    free(all->offsets);
    free(all->verdicts);
    free(all->digests);
    batch_release(&all->states);
    batch_release(&all->pages);
    texts_release(&all->marks);
    texts_release(&all->names);
    Py_XDECREF(all->owner);
}

static int misfits(const char *what) {
    PyErr_Format(PyExc_ValueError, "%s do not fit together", what);
    return -1;
}

/* Hold the directory, names and flags of files. Return 0, or -1 with an exception. */
static int files_hold(slot_job *all, PyObject *files) {
    PyObject *names;
    if (!PyArg_ParseTuple(files, "O&Oi", PyUnicode_FSConverter, &all->owner, &names, &all->flags))
        return -1;
    all->directory = PyBytes_AsString(all->owner);
    if (texts_hold(&all->names, names))
        return -1;
    return texts_are_paths(&all->names) ? 0 : misfits("files and slots");
}

/* Hold marks of one size, at most `most_nbytes`, with the file number and the offset of each. Return 0, or -1 with an
 * exception. */
static int slot_job_hold(slot_job *all, PyObject *files, PyObject *numbers, PyObject *offsets, PyObject *marks,
                         Py_ssize_t most_nbytes) {
    memset(all, 0, sizeof *all);
    if (files_hold(all, files) || texts_hold(&all->marks, marks))
        return -1;
    const size_t count = all->marks.count, open = all->names.count;
    for (size_t i = 0; i < count; i++)
        if (!all->marks.nbytes[i] || (Py_ssize_t)all->marks.nbytes[i] > most_nbytes ||
            all->marks.nbytes[i] != all->marks.nbytes[0])
            return misfits("marks and slots");
    if (!(all->numbers = integers_of(numbers, count)) || !(all->offsets = integers_of(offsets, count)))
        return -1;
    for (size_t i = 0; i < count; i++)
        if (all->numbers[i] < 0 || (uint64_t)all->numbers[i] >= open)
            return misfits("files and slots");
    all->opened = calloc(open + 1, sizeof *all->opened);
    all->fds = calloc(count + 1, sizeof *all->fds);
    all->verdicts = calloc(count + 1, sizeof *all->verdicts);
    all->digests = calloc(count + 1, sizeof *all->digests);
    if (!all->opened || !all->fds || !all->verdicts || !all->digests) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

/* Open the files. Return 0 after the deadline: then every verdict is LATE. */
static int slot_job_open(slot_job *all, double deadline_s) {
    const int in_time = monotonic_s() <= deadline_s;
    if (in_time)
        slot_files_open(all->directory, all->names.data, all->names.count, all->flags, all->opened);
    for (size_t i = 0; i < all->marks.count; i++) {
        all->fds[i] = all->opened[all->numbers[i]];
        all->verdicts[i] = LATE;
    }
    return in_time;
}

static void slot_job_close(slot_job *all) { slot_files_close(all->opened, all->names.count); }

static void slot_job_check(slot_job *all, int64_t last_offset, double deadline_s) {
    if (!slot_job_open(all, deadline_s))
        return;
    for (size_t i = 0; i < all->marks.count && monotonic_s() <= deadline_s; i++)
        all->verdicts[i] =
            slot_check(all->fds[i], all->offsets[i], all->marks.data[i], all->marks.nbytes[i], last_offset);
    slot_job_close(all);
}

PyObject *check_slots(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *files, *numbers, *offsets, *marks, *result = NULL;
    long long last_offset;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "O!OOOLd", &PyTuple_Type, &files, &numbers, &offsets, &marks, &last_offset,
                          &deadline_s))
        return NULL;
    slot_job all;
    if (!slot_job_hold(&all, files, numbers, offsets, marks, MARK_MOST_NBYTES)) {
        Py_BEGIN_ALLOW_THREADS
        slot_job_check(&all, last_offset, deadline_s);
        Py_END_ALLOW_THREADS
        result = list_of(all.verdicts, all.marks.count);
    }
    slot_job_release(&all);
    return result;
}

/* Move slots. Return 0, or -1 with an exception. */
static int slot_job_move(slot_job *all, slot_batch *slots) {
    const size_t count = all->marks.count;
    int fits = all->pages.pages == count && slots->alignment > 0 && slots->run_nbytes > 0 &&
               slots->run_nbytes % slots->alignment == 0;
    for (size_t i = 0; fits && i < count; i++)
        fits = batch_nbytes(&all->pages, i) == slots->nbytes;
    if (!fits)
        return misfits("pages and slots");
    slots->count = count;
    slots->fds = all->fds;
    slots->offsets = all->offsets;
    slots->marks = all->marks.data;
    slots->mark_nbytes = count ? all->marks.nbytes[0] : 0;
    slots->iov = all->pages.iov;
    slots->first = all->pages.first;
    slots->states = all->states.views ? all->states.iov : NULL;
    slots->verdicts = all->verdicts;
    slots->together = (all->flags & O_DIRECT) != 0;
    int failed = 0;
    Py_BEGIN_ALLOW_THREADS
    if (slot_job_open(all, slots->deadline_s)) {
        failed = slots_move(slots);
        slot_job_close(all);
    }
    Py_END_ALLOW_THREADS
    if (failed)
        PyErr_NoMemory();
    return failed;
}

/* Parse the sizes of the parts of a slot. Return the size of the largest mark, or -1 with an exception. */
static Py_ssize_t shape_of(PyObject *shape, slot_batch *slots) {
    Py_ssize_t lead, nbytes, tail;
    if (!PyArg_ParseTuple(shape, "nnn", &lead, &nbytes, &tail))
        return -1;
    if (lead <= 0 || nbytes < 0 || tail <= 0 || lead > PART_MOST_NBYTES || nbytes > PART_MOST_NBYTES ||
        tail > PART_MOST_NBYTES) {
        PyErr_SetString(PyExc_ValueError, "the parts of a slot do not fit together");
        return -1;
    }
    slots->lead = (size_t)lead;
    slots->nbytes = (size_t)nbytes;
    slots->tail = (size_t)tail;
    const Py_ssize_t most = lead < tail ? lead : tail;
    return most < MARK_MOST_NBYTES ? most : MARK_MOST_NBYTES;
}

PyObject *read_slots(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *files, *numbers, *offsets, *pages, *marks, *shape, *states = NULL, *result = NULL;
    slot_batch slots = {0};
    Py_ssize_t alignment, run_nbytes, skip, alone_count;
    if (!PyArg_ParseTuple(arguments, "O!OOOOO!nny#nd|O", &PyTuple_Type, &files, &numbers, &offsets, &pages, &marks, &PyTuple_Type,
                          &shape, &alignment, &run_nbytes, &slots.alone, &alone_count, &skip, &slots.deadline_s,
                          &states))
        return NULL;
    const Py_ssize_t most_nbytes = shape_of(shape, &slots);
    if (most_nbytes < 0)
        return NULL;
    slots.alignment = alignment < 0 ? 0 : (size_t)alignment;
    slots.run_nbytes = run_nbytes < 0 ? 0 : (size_t)run_nbytes;
    slots.alone_count = (size_t)alone_count;
    slot_job all;
    if (!slot_job_hold(&all, files, numbers, offsets, marks, most_nbytes) && !batch_hold(&all.pages, pages, 1) &&
        !states_hold(&all.states, states, all.pages.pages)) {
        slots.digests = skip < 0 ? NULL : all.digests;
        slots.skip = skip < 0 ? 0 : (size_t)skip;
        if (!slot_job_move(&all, &slots))
            result = verdicts_and_digests(all.verdicts, all.digests, all.marks.count);
    }
    slot_job_release(&all);
    return result;
}

PyObject *write_slots(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *files, *numbers, *offsets, *pages, *marks, *shape, *states = NULL, *result = NULL;
    slot_batch slots = {.writing = 1};
    Py_ssize_t alignment, run_nbytes, alone_count;
    if (!PyArg_ParseTuple(arguments, "O!OOOOO!nny#d|O", &PyTuple_Type, &files, &numbers, &offsets, &pages, &marks, &PyTuple_Type,
                          &shape, &alignment, &run_nbytes, &slots.alone, &alone_count, &slots.deadline_s, &states))
        return NULL;
    const Py_ssize_t most_nbytes = shape_of(shape, &slots);
    if (most_nbytes < 0)
        return NULL;
    slots.alignment = alignment < 0 ? 0 : (size_t)alignment;
    slots.run_nbytes = run_nbytes < 0 ? 0 : (size_t)run_nbytes;
    slots.alone_count = (size_t)alone_count;
    slot_job all;
    if (!slot_job_hold(&all, files, numbers, offsets, marks, most_nbytes) && !batch_hold(&all.pages, pages, 0) &&
        !states_hold(&all.states, states, all.pages.pages) && !slot_job_move(&all, &slots))
        result = list_of(all.verdicts, all.marks.count);
    slot_job_release(&all);
    return result;
}
