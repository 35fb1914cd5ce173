"""Remove a file that does not contain the page that it is named after, so that a set can store it."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from hicache_storage import native
from hicache_storage.backend_support.filesystem import identity_of, open_own
from hicache_storage.backend_support.writer_lock import lock_file, unlock_file

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_backends.file.page_file import PageFiles
    from hicache_backends.file.process_state import ProcessState
    from hicache_storage.backend_support.deadline import Deadline

# Wait no longer than this for another healer, which may have been stopped.
_TURN_S = 1.0


def heal(process: ProcessState, files: PageFiles, page_hash: str, deadline: Deadline) -> None:
    """Remove a file that does not contain the page that it is named after.

    If several processes find the same file, they take turns by locking it. The file is checked
    again right before it is moved away, because the right page may have replaced it. If a page
    arrives in between and is moved away, it is put back, unless yet another file has taken its
    place.
    """
    path, aside = files.path(page_hash), process.writer.temp_path()
    with suppress(FileNotFoundError), _turn_at(path, deadline) as found:
        (verdict,) = files.check([page_hash], None, deadline)
        if verdict < 0:
            raise OSError(-verdict, os.strerror(-verdict))
        if verdict != native.WRONG or identity_of(path) != found:
            return
        os.rename(path, aside)
        if files.check_aside(page_hash, aside, deadline) == native.WRONG:
            process.capacity.remove(aside, files.file_nbytes, deadline)
            process.counters.add("healed")
        else:
            _give_back(process, aside, path, files.file_nbytes, deadline)


def _give_back(
    process: ProcessState, aside: str, path: str, nbytes: int, deadline: Deadline
) -> None:
    try:
        os.link(aside, path)
    except FileExistsError:
        process.capacity.remove(aside, nbytes, deadline)
    except OSError:  # this file system has no links, or another user owns the file
        os.rename(aside, path)
    else:
        os.unlink(aside)


@contextmanager
def _turn_at(path: str, deadline: Deadline) -> Generator[tuple[int, int]]:
    """Lock a file against other healers, and yield its identity."""
    fd = open_own(path, os.O_RDONLY)
    try:
        locked = lock_file(fd, min(_TURN_S, deadline.remaining_s()))
        yield identity_of(fd)
        if locked:
            unlock_file(fd)
    finally:
        os.close(fd)
