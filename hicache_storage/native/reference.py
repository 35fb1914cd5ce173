"""The data plane in Python: the functions of the compiled module, with the same verdicts."""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from typing_extensions import Buffer

    Pieces: TypeAlias = Sequence[Buffer]

MISS, HIT, WRONG, LATE, UNSYNCED, KEPT, NO_BULK = range(7)
"""The verdict on one page. A negative number is an errno, negated."""

TRAILER_NBYTES = 64
NAME_NBYTES = 40
"""The part of a trailer that names its page. The next byte is 1 where the page was synced first."""

IOV_MAX = 1024
"""The number of buffers that the kernel takes in one call."""

_SEALED_NBYTES = 56
_HEAD_NBYTES = 4
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_T = TypeVar("_T")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_REWRITE = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def digests(pages: Sequence[Pieces]) -> list[int]:
    """Return the xxh3-64 of each page, whose bytes are those of its pieces in order."""
    return [_digest(page) for page in pages]


def exists_files(paths: Sequence[bytes], nbytes: int, deadline_s: float) -> list[int]:
    """Return HIT for each path that is a regular file of `nbytes`.

    Args:
        paths: The names of the files.
        nbytes: The size that a file must have.
        deadline_s: The time of `time.monotonic` after which the verdict on the rest is LATE.
    """
    return [_by(deadline_s, partial(_exists, path, nbytes)) for path in paths]


def check_files(
    paths: Sequence[bytes],
    names: Sequence[bytes],
    nbytes: int,
    touched_ns: int,
    deadline_s: float,
) -> list[int]:
    """Return HIT or UNSYNCED for each file whose trailer, behind `nbytes` of page, begins with its name.

    A file that has another trailer is WRONG. A hit gets the modification time `touched_ns`, unless that
    is negative.
    """
    _require(len(paths) == len(names) and all(len(name) >= NAME_NBYTES for name in names))
    return [
        _by(deadline_s, partial(_check, path, name, nbytes, touched_ns))
        for path, name in zip(paths, names, strict=True)
    ]


def read_files(
    paths: Sequence[bytes],
    names: Sequence[bytes],
    pages: Sequence[Pieces],
    nbytes: int,
    touched_ns: int,
    interval_ns: int,
    skip: int,
    deadline_s: float,
) -> tuple[list[int], list[int]]:
    """Read each page that is there whole, and prove each by its trailer.

    The trailer is read before and after the page. Equal trailers prove that no writer was at work.

    Args:
        paths: The names of the files.
        names: The first 40 bytes that the trailer of each must have.
        pages: The memory of each page, `nbytes` in all; unspecified where the verdict is not HIT.
        nbytes: The size of a page, without its trailer.
        touched_ns: The modification time of the first file after a hit, one nanosecond less for each
            that follows; negative: none.
        interval_ns: The age from which on a modification time is renewed.
        skip: The number of leading bytes that the digest of a page leaves out; negative: no digests.
        deadline_s: The time of `time.monotonic` after which the verdict on the rest is LATE.

    Returns:
        The verdicts, and the xxh3-64 of each page that was hit (0 for the others).
    """
    fits = len(paths) == len(names) == len(pages) and all(
        len(name) >= NAME_NBYTES for name in names
    )
    _require(fits and all(_nbytes(page) == nbytes for page in pages))
    verdicts: list[int] = []
    values: list[int] = []
    for index, (path, name, page) in enumerate(zip(paths, names, pages, strict=True)):
        when_ns = -1 if touched_ns < 0 else touched_ns - index
        verdict = _by(deadline_s, partial(_read, path, name, page, nbytes, when_ns, interval_ns))
        verdicts.append(verdict)
        values.append(_digest(page, skip) if verdict == HIT and skip >= 0 else 0)
    return verdicts, values


def write_files(
    paths: Sequence[bytes],
    targets: Sequence[bytes],
    trailers: Sequence[bytes],
    pages: Sequence[Pieces],
    nbytes: int,
    modified_ns: int,
    recycled: int,
    deadline_s: float,
) -> list[int]:
    """Write each page and its trailer to its path, then rename the path to its target.

    Args:
        paths: The files to write. The first `recycled` of them are pages that are overwritten in
            place; the others are new.
        targets: The name that each file gets when it is whole.
        trailers: The 64 bytes behind each page.
        pages: The bytes of each page, `nbytes` in all.
        nbytes: The size of a page, without its trailer.
        modified_ns: The modification time of the first file, one nanosecond less for each that follows.
        recycled: The number of paths that are overwritten.
        deadline_s: The time of `time.monotonic` after which the verdict on the rest is LATE.

    Returns:
        HIT where the page has its name. KEPT where a file may not be overwritten; the file is as it was.
        After an errno, nothing is left at the path. An errno ends the batch: the verdict on the rest is
        MISS, and their files are as they were.
    """
    _require(len(paths) == len(targets) == len(trailers) == len(pages))
    _require(all(len(trailer) >= TRAILER_NBYTES for trailer in trailers))
    _require(all(_nbytes(page) == nbytes for page in pages))
    verdicts = [MISS] * len(paths)
    for index, (path, target, trailer, page) in enumerate(
        zip(paths, targets, trailers, pages, strict=True)
    ):
        pieces = [*page, trailer[:TRAILER_NBYTES]]
        when_ns = modified_ns - index
        write = partial(_write, path, target, pieces, nbytes, when_ns, recycled=index < recycled)
        verdicts[index] = _by(deadline_s, write)
        if verdicts[index] < 0:
            break
    return verdicts


def send_pieces(fd: int, pieces: Pieces, deadline_s: float) -> int:
    """Send all pieces over a connected socket. Return 0 or a negated errno.

    ETIMEDOUT stands for the deadline.
    """
    try:
        with borrowed(fd) as connection:
            todo = rest_after([memoryview(piece) for piece in pieces], 0)
            while todo:
                sent = _when(
                    connection,
                    select.POLLOUT,
                    deadline_s,
                    partial(connection.sendmsg, todo[:IOV_MAX], (), _SEND_FLAGS),
                )
                todo = rest_after(todo, sent)
    except OSError as error:
        return -(error.errno or 0)
    return 0


def receive_pieces(fd: int, pieces: Pieces, least: int, deadline_s: float) -> int:
    """Receive into the pieces, in order, at least `least` bytes or all that they can hold.

    Return the number of bytes or a negated errno. ETIMEDOUT stands for the deadline, ECONNRESET for a
    connection that the other side has ended.
    """
    try:
        with borrowed(fd) as connection:
            return _receive(connection, [memoryview(piece) for piece in pieces], least, deadline_s)
    except OSError as error:
        return -(error.errno or 0)


def receive_bulks(
    fd: int,
    head: bytes,
    pages: Sequence[Pieces],
    more: bool,
    deadline_s: float,
) -> tuple[list[int], bytes]:
    """Receive one RESP bulk string a page into the pages, up to the first reply that is none.

    Args:
        fd: A connected socket.
        head: The bytes of the first reply that have arrived: 4 at most.
        pages: The memory of each page. The bulk string of a page has as many bytes as its pieces.
        more: True where another reply follows the last page's.
        deadline_s: The time of `time.monotonic` after which the verdict is -ETIMEDOUT.

    Returns:
        The verdicts, and the bytes of the next reply that have arrived. A verdict is HIT, or MISS for a
        null. The last one may be WRONG (another length, or a damaged end), NO_BULK (another kind of
        reply, whose head is returned), or a negated errno.
    """
    if len(head) > _HEAD_NBYTES:
        raise ValueError("a head has at most 4 bytes")
    verdicts: list[int] = []
    with borrowed(fd) as connection:
        for index, page in enumerate(pages):
            follows = more or index + 1 < len(pages)
            try:
                verdict, head = _receive_bulk(connection, head, page, follows, deadline_s)
            except OSError as error:
                verdict, head = -(error.errno or 0), b""
            verdicts.append(verdict)
            if verdict not in (HIT, MISS):
                break
    return verdicts, head


# --- one file ------------------------------------------------------------------------------------


def _exists(path: bytes, nbytes: int) -> int:
    try:
        status = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return MISS
    return HIT if stat.S_ISREG(status.st_mode) and status.st_size == nbytes else MISS


def _check(path: bytes, name: bytes, nbytes: int, touched_ns: int) -> int:
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return MISS
    try:
        trailer = os.pread(fd, TRAILER_NBYTES + 1, nbytes)
        if not _is_named(trailer, name):
            return WRONG
        if touched_ns >= 0:
            _touch(fd, touched_ns, 0)
        return HIT if trailer[NAME_NBYTES] else UNSYNCED
    finally:
        os.close(fd)


def _read(
    path: bytes, name: bytes, page: Pieces, nbytes: int, touched_ns: int, interval_ns: int
) -> int:
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return MISS
    try:
        before = os.pread(fd, TRAILER_NBYTES + 1, nbytes)
        if not _is_named(before, name):
            return WRONG
        after = bytearray(TRAILER_NBYTES)
        wanted = nbytes + TRAILER_NBYTES
        if move_all(os.preadv, fd, [*page, after], wanted) != wanted or bytes(after) != before:
            return MISS
        if touched_ns >= 0:
            _touch(fd, touched_ns, interval_ns)
        return HIT
    finally:
        os.close(fd)


def _write(
    path: bytes, target: bytes, pieces: Pieces, nbytes: int, modified_ns: int, *, recycled: bool
) -> int:
    try:
        fd = os.open(path, _REWRITE if recycled else _CREATE, 0o666)
    except OSError:
        if recycled:
            return KEPT
        raise
    try:
        try:
            if recycled and not _spoil(fd, nbytes):
                return KEPT
            move_all(os.pwritev, fd, pieces, nbytes + TRAILER_NBYTES)
            os.utime(fd, ns=(modified_ns, modified_ns))
        finally:
            os.close(fd)
        os.rename(path, target)
    except OSError:
        with suppress(OSError):
            os.unlink(path)
        raise
    return HIT


def _spoil(fd: int, nbytes: int) -> bool:
    """Overwrite the trailer, so that a reader that is under way finds another one afterwards.

    Return False, and change nothing, where the file holds no page of this size, or one that was synced.
    """
    old = os.pread(fd, TRAILER_NBYTES + 1, nbytes)
    if len(old) != TRAILER_NBYTES or old[NAME_NBYTES]:
        return False
    os.pwrite(fd, bytes(TRAILER_NBYTES), nbytes)
    return True


def _touch(fd: int, touched_ns: int, interval_ns: int) -> None:
    """Set the modification time. A file whose time cannot be set keeps the one it has."""
    with suppress(OSError):
        if interval_ns and touched_ns - os.fstat(fd).st_mtime_ns < interval_ns:
            return
        os.utime(fd, ns=(touched_ns, touched_ns))


# --- one connection ------------------------------------------------------------------------------


@contextmanager
def borrowed(fd: int) -> Generator[socket.socket]:
    """Yield a socket object for `fd`, which stays open."""
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


def _when(connection: socket.socket, event: int, deadline_s: float, call: Callable[[], _T]) -> _T:
    """Return the result of a non-blocking call. Wait until the socket is ready, by the deadline."""
    while True:
        try:
            return call()
        except BlockingIOError:
            left_s = deadline_s - time.monotonic()
            poll = select.poll()
            poll.register(connection, event)
            if left_s <= 0 or not poll.poll(left_s * 1000 + 1):
                raise TimeoutError(errno.ETIMEDOUT, "the deadline has passed") from None


def _receive(
    connection: socket.socket, views: list[memoryview], least: int, deadline_s: float
) -> int:
    received = 0
    todo = rest_after(views, 0)
    while todo and received < least:
        call = partial(connection.recvmsg_into, todo[:IOV_MAX], 0, socket.MSG_DONTWAIT)
        step = _when(connection, select.POLLIN, deadline_s, call)[0]
        if not step:
            raise ConnectionResetError(errno.ECONNRESET, "the other side has ended the connection")
        received += step
        todo = rest_after(todo, step)
    return received


def _receive_bulk(
    connection: socket.socket, head: bytes, page: Pieces, more: bool, deadline_s: float
) -> tuple[int, bytes]:
    """Return the verdict on one reply, and the bytes of the next reply that have arrived."""
    begun = memoryview(bytearray(_HEAD_NBYTES))
    begun[: len(head)] = head
    _receive(connection, [begun[len(head) :]], _HEAD_NBYTES - len(head), deadline_s)
    following = [memoryview(bytearray(_HEAD_NBYTES))] if more else []
    header = b"$%d\r\n" % _nbytes(page)
    if bytes(begun) == b"$-1\r":
        rest, expected, views = 1, b"\n", [memoryview(bytearray(1))]
        found = views
    elif bytes(begun) == header[:_HEAD_NBYTES]:
        tail, end = memoryview(bytearray(len(header) - _HEAD_NBYTES)), memoryview(bytearray(2))
        views = [tail, *(memoryview(piece) for piece in page), end]
        _receive(connection, [tail], len(tail), deadline_s)
        if bytes(tail) != header[_HEAD_NBYTES:]:
            return WRONG, b""
        views, found = views[1:], [end]
        rest, expected = _nbytes(page) + 2, b"\r\n"
    else:
        return (WRONG if bytes(begun[:1]) == b"$" else NO_BULK), bytes(begun)
    received = _receive(connection, [*views, *following], rest, deadline_s)
    verdict = MISS if expected == b"\n" else HIT
    next_head = bytes(following[0][: received - rest]) if following else b""
    return (verdict if bytes(found[0]) == expected else WRONG), next_head


# --- pieces --------------------------------------------------------------------------------------


def _is_named(trailer: bytes, name: bytes) -> bool:
    return (
        len(trailer) == TRAILER_NBYTES
        and trailer[:NAME_NBYTES] == name[:NAME_NBYTES]
        and trailer[_SEALED_NBYTES:] == xxhash.xxh3_64_digest(trailer[:_SEALED_NBYTES])
    )


def move_all(
    call: Callable[[int, Any, int], int], fd: int, pieces: Pieces, nbytes: int, offset: int = 0
) -> int:
    """Move `nbytes` between a file and memory, and return how many bytes were moved.

    Args:
        call: os.preadv, os.pwritev, or a function with their arguments. One call may stop early: the
            kernel takes 1024 buffers and 2 GiB at a time, and a signal interrupts it.
        fd: The open file.
        pieces: Memory to fill or to write.
        nbytes: The sum of the sizes of `pieces`.
        offset: The place in the file.

    Returns:
        `nbytes`, or fewer when the file ends before.
    """
    done = call(fd, pieces[:IOV_MAX], offset)
    if done in (0, nbytes):
        return done
    todo = rest_after([memoryview(piece) for piece in pieces], done)
    while todo:
        step = call(fd, todo[:IOV_MAX], offset + done)
        if not step:
            break
        done += step
        todo = rest_after(todo, step)
    return done


def rest_after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return `views` without their first `nbytes`."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return []


def _digest(page: Pieces, skip: int = 0) -> int:
    state = xxhash.xxh3_64()
    for piece in rest_after([memoryview(piece) for piece in page], skip):
        state.update(piece)
    return state.intdigest()


def _nbytes(pieces: Iterable[Buffer]) -> int:
    return sum(memoryview(piece).nbytes for piece in pieces)


def _by(deadline_s: float, call: Callable[[], int]) -> int:
    """Return the verdict of `call`, LATE after the deadline, or a negated errno."""
    if time.monotonic() > deadline_s:
        return LATE
    try:
        return call()
    except OSError as error:
        return -(error.errno or 0)


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError("paths, names and pages do not fit together")
