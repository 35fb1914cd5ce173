#define _GNU_SOURCE
#include "slots.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "pieces.h"
#include "sockets.h"
#include "workers.h"

enum { SLOTS_A_RUN = 64, BLOCK_NBYTES = 4096 };

/* The memory that one call uses. */
typedef struct {
    uint8_t *margins;  /* lead and tail of each slot of a run */
    uint8_t *scratch;  /* if pages are revocable: all bytes of one call */
    char revoked[SLOTS_A_RUN];
    struct iovec *iov; /* all pieces of a run */
    struct iovec chunk[PIECES_A_CALL], part[PIECES_A_CALL];
} workspace;

/* How far a run has come. */
typedef struct {
    size_t slot, position; /* the slot, and the bytes of it that were moved */
    size_t skip;
    xxh3_stream stream;
} progress;

static int64_t opened_at(int directory, const char *name, int flags) {
    int fd;
    do
        fd = openat(directory, name, flags | O_CLOEXEC | O_NOFOLLOW, 0666);
    while (fd < 0 && errno == EINTR);
    return fd < 0 ? -errno : fd;
}

void slot_files_open(const char *directory, const char *const *names, size_t count, int flags, int64_t *fds) {
    const int64_t place = count ? opened_at(AT_FDCWD, directory, O_RDONLY | O_DIRECTORY) : -1;
    for (size_t i = 0; i < count; i++)
        fds[i] = place < 0 ? place : opened_at((int)place, names[i], flags);
    if (place >= 0)
        (void)close((int)place);
}

void slot_files_close(const int64_t *fds, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (fds[i] >= 0)
            (void)close((int)fds[i]);
}

static size_t slot_nbytes(const slot_batch *all) { return all->lead + all->nbytes + all->tail; }

static size_t pieces_of(const slot_batch *all, size_t slot) { return all->first[slot + 1] - all->first[slot]; }

static uint8_t *margins_of(const slot_batch *all, const workspace *space, size_t index) {
    return space->margins + index * (all->lead + all->tail);
}

static void begin_slot(const slot_batch *all, progress *at, size_t slot) {
    at->slot = slot;
    at->position = 0;
    at->skip = all->skip;
    if (all->digests)
        xxh3_begin(&at->stream);
}

/* List the pieces of a run. Return their number. */
static size_t lay_out(const slot_batch *all, workspace *space, size_t start, size_t count) {
    struct iovec *next = space->iov;
    for (size_t i = 0; i < count; i++) {
        const size_t slot = start + i, pieces = pieces_of(all, slot);
        uint8_t *lead = margins_of(all, space, i), *tail = lead + all->lead;
        if (all->writing) {
            memset(lead, 0, all->lead + all->tail);
            memcpy(lead, all->marks[slot], all->mark_nbytes);
            memcpy(tail, all->marks[slot], all->mark_nbytes);
        }
        *next++ = (struct iovec){lead, all->lead};
        memcpy(next, all->iov + all->first[slot], pieces * sizeof *next);
        next += pieces;
        *next++ = (struct iovec){tail, all->tail};
    }
    return (size_t)(next - space->iov);
}

static uint64_t *state_of(const slot_batch *all, size_t slot) {
    return all->states && all->states[slot].iov_len ? all->states[slot].iov_base : NULL;
}

static int is_revoked(const slot_batch *all, size_t slot) {
    const uint64_t *state = state_of(all, slot);
    return state && access_is_revoked(state);
}

static int is_in_page(const slot_batch *all, const progress *at) {
    return at->position >= all->lead && at->position < all->lead + all->nbytes;
}

/* Copy one piece of the slot between its memory and the scratch memory. If the page is revoked, write zeros, also for
 * the tail after it. */
static void copy_piece(const slot_batch *all, workspace *space, size_t start, const progress *at, struct iovec piece,
                       uint8_t *scratch) {
    uint64_t *state = is_in_page(all, at) ? state_of(all, at->slot) : NULL;
    char *revoked = &space->revoked[at->slot - start];
    if (!*revoked)
        *revoked = !piece_copy_by(state, &piece, scratch, all->writing);
    if (*revoked && all->writing)
        memset(scratch, 0, piece.iov_len);
}

/* Before a chunk is written, copy its pieces to the scratch memory. */
static void gather(const slot_batch *all, workspace *space, size_t start, const progress *reached, size_t pieces) {
    progress at = {.slot = reached->slot, .position = reached->position};
    uint8_t *scratch = space->scratch;
    for (size_t i = 0; i < pieces; scratch += space->chunk[i++].iov_len) {
        copy_piece(all, space, start, &at, space->chunk[i], scratch);
        at.position += space->chunk[i].iov_len;
        if (at.position == slot_nbytes(all)) {
            at.slot++;
            at.position = 0;
        }
    }
}

static void end_slot(const slot_batch *all, const workspace *space, size_t start, const progress *at) {
    const char *mark = all->marks[at->slot];
    if (space->revoked[at->slot - start]) {
        all->verdicts[at->slot] = REVOKED;
        return;
    }
    const uint8_t *margins = margins_of(all, space, at->slot - start);
    const int whole = all->writing || (!memcmp(margins, mark, all->mark_nbytes) &&
                                       !memcmp(margins + all->lead, mark, all->mark_nbytes));
    all->verdicts[at->slot] = whole ? HIT : WRONG;
    if (all->digests)
        all->digests[at->slot] = whole ? xxh3_digest(&at->stream) : 0;
}

/* Hash the pages in the `done` bytes that were moved, and set the verdict of each complete slot. Copy bytes that were read
 * into the scratch memory to their pages. */
static void advance(const slot_batch *all, workspace *space, size_t start, progress *at, size_t done) {
    uint8_t *scratch = space->scratch;
    for (size_t i = 0; done; i++) {
        struct iovec piece = space->chunk[i];
        if (piece.iov_len > done)
            piece.iov_len = done;
        if (scratch && !all->writing)
            copy_piece(all, space, start, at, piece, scratch);
        const struct iovec moved = {scratch ? scratch : piece.iov_base, piece.iov_len};
        if (all->digests && is_in_page(all, at))
            pieces_hash(&at->stream, &moved, 1, &at->skip);
        scratch += scratch ? piece.iov_len : 0;
        done -= piece.iov_len;
        at->position += piece.iov_len;
        if (at->position == slot_nbytes(all)) {
            end_slot(all, space, start, at);
            begin_slot(all, at, at->slot + 1);
        }
    }
}

/* Move one chunk between the file and its pieces, or the scratch memory. Return how many bytes were moved, or -errno. */
static int64_t move_chunk(const slot_batch *all, workspace *space, size_t start, const progress *reached, size_t pieces,
                          size_t nbytes, int64_t offset) {
    const int fd = (int)all->fds[start];
    if (!space->scratch) {
        memcpy(space->part, space->chunk, pieces * sizeof *space->part);
        return pieces_move(fd, space->part, pieces, nbytes, offset, all->writing);
    }
    if (all->writing)
        gather(all, space, start, reached, pieces);
    struct iovec one = {space->scratch, nbytes};
    return pieces_move(fd, &one, 1, nbytes, offset, all->writing);
}

/* Move adjacent slots. Return 0 or -errno. Slots after the end of the file are WRONG, or MISS in a write. */
static int64_t move_together(const slot_batch *all, workspace *space, size_t start, size_t count) {
    cursor at = {space->iov, lay_out(all, space, start, count), 0};
    progress reached;
    begin_slot(all, &reached, start);
    memset(space->revoked, 0, sizeof space->revoked);
    int64_t offset = all->offsets[start];
    size_t nbytes;
    for (size_t pieces; (pieces = pieces_take(&at, space->chunk, PIECES_A_CALL, all->run_nbytes, &nbytes));) {
        const int64_t done = move_chunk(all, space, start, &reached, pieces, nbytes, offset);
        if (done < 0)
            return done;
        advance(all, space, start, &reached, (size_t)done);
        if ((size_t)done < nbytes || (count == 1 && space->revoked[0]))
            break;
        offset += done;
    }
    for (size_t slot = reached.slot; slot < start + count; slot++)
        all->verdicts[slot] = space->revoked[slot - start] ? REVOKED : all->writing ? MISS : WRONG;
    return 0;
}

static void move_run(const slot_batch *all, workspace *space, size_t start, size_t count) {
    int64_t failed = all->fds[start];
    if (monotonic_s() > all->deadline_s) {
        failed = LATE;
    } else if (failed >= 0) {
        failed = move_together(all, space, start, count);
        if (!failed)
            return;
        if (count > 1 && memchr(all->alone, (int)-failed, all->alone_count)) {
            for (size_t i = 0; i < count; i++)
                move_run(all, space, start + i, 1);
            return;
        }
    }
    for (size_t slot = start; slot < start + count; slot++) {
        all->verdicts[slot] = failed;
        if (all->digests)
            all->digests[slot] = 0;
    }
}

static int is_aligned(const slot_batch *all, size_t slot) {
    if (all->states)
        return all->nbytes % all->alignment == 0;
    return pieces_are_aligned(all->iov + all->first[slot], pieces_of(all, slot), all->alignment);
}

/* Return how many slots from `start` on are adjacent and fit in one call. */
static size_t run_length(const slot_batch *all, size_t start, size_t end, size_t most) {
    size_t count = 1, pieces = pieces_of(all, start) + 2;
    for (size_t slot = start + 1; slot < end && count < most; slot++, count++) {
        pieces += pieces_of(all, slot) + 2;
        if (pieces > PIECES_A_CALL || all->fds[slot] != all->fds[start] ||
            all->offsets[slot] != all->offsets[slot - 1] + (int64_t)slot_nbytes(all) || !is_aligned(all, slot) ||
            is_revoked(all, slot))
            break;
    }
    return count;
}

/* The slots of one call. Each thread takes the next `step` of them. */
typedef struct {
    const slot_batch *all;
    size_t next, step, most, pieces; /* `most` slots in one system call, `pieces` of memory for them */
} slot_turns;

static void workspace_free(workspace *space) {
    if (space) {
        free(space->iov);
        free(space->scratch);
        free(space->margins);
        free(space);
    }
}

static workspace *workspace_of(const slot_turns *turns) {
    const slot_batch *all = turns->all;
    const size_t longest = turns->most * slot_nbytes(all);
    workspace *space = calloc(1, sizeof *space);
    void *margins = NULL, *scratch = NULL;
    int failed = !space || posix_memalign(&margins, BLOCK_NBYTES, turns->most * (all->lead + all->tail));
    if (!failed && all->states)
        failed = posix_memalign(&scratch, BLOCK_NBYTES, longest < all->run_nbytes ? longest : all->run_nbytes);
    if (space) {
        space->margins = margins;
        space->scratch = scratch;
        failed = failed || !(space->iov = calloc(turns->pieces, sizeof *space->iov));
    }
    if (!failed)
        return space;
    workspace_free(space);
    return NULL;
}

static void *move_some(void *given) {
    slot_turns *turns = given;
    const slot_batch *all = turns->all;
    workspace *space = workspace_of(turns);
    for (size_t slot; space && (slot = __atomic_fetch_add(&turns->next, turns->step, __ATOMIC_RELAXED)) < all->count;) {
        const size_t end = slot + turns->step < all->count ? slot + turns->step : all->count;
        for (size_t count; slot < end; slot += count) {
            count = 1;
            if (!is_aligned(all, slot))
                all->verdicts[slot] = -EINVAL;
            else if (is_revoked(all, slot))
                all->verdicts[slot] = REVOKED;
            else
                move_run(all, space, slot, count = run_length(all, slot, end, turns->most));
        }
    }
    workspace_free(space);
    return NULL;
}

int slots_move(const slot_batch *all) {
    const size_t fitting = all->run_nbytes / slot_nbytes(all);
    slot_turns turns = {all, 0, all->count, fitting > SLOTS_A_RUN ? SLOTS_A_RUN : fitting ? fitting : 1, PIECES_A_CALL};
    for (size_t slot = 0; slot < all->count; slot++)
        if (pieces_of(all, slot) + 2 > turns.pieces)
            turns.pieces = pieces_of(all, slot) + 2;
    if (all->together)
        turns.step = turns.most;
    work_together(move_some, &turns, turns.step ? (all->count + turns.step - 1) / turns.step : 1);
    return turns.next < all->count ? -1 : 0;
}

int64_t slot_check(int64_t fd, int64_t offset, const char *mark, size_t mark_nbytes, int64_t last_offset) {
    if (fd < 0)
        return fd;
    const int64_t places[2] = {offset, offset + last_offset};
    for (int i = 0; i < 2; i++) {
        uint8_t found[MARK_MOST_NBYTES];
        const int64_t got = read_at((int)fd, found, mark_nbytes, places[i]);
        if (got < 0)
            return got;
        if ((size_t)got < mark_nbytes || memcmp(found, mark, mark_nbytes))
            return WRONG;
    }
    return HIT;
}
