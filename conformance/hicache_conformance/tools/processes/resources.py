"""The resources of a process: threads, descriptors, children and memory, and limits on them.

The counts show what a store leaves behind. They come from /proc, so they work on Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import resource
import stat
import struct
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

_POLL_S = 0.02
_LEAST_POLLS = 5
_CAPABILITIES = struct.pack("=Ii", 0x20080522, 0)
"""The header of capget(2) and capset(2): version 3, this thread."""
_SETS = struct.Struct("=6I")
"""Two halves of the effective, the permitted and the inheritable set."""
_CAP_DAC_OVERRIDE = 1 << 1


@dataclass(frozen=True, slots=True)
class ProcessResources:
    """The resources of this process at one moment, by names that can be compared."""

    threads: Counter[str]
    descriptors: Counter[str]
    processes: Counter[str]

    @classmethod
    def current(cls) -> Self:
        """Collect garbage, then count the resources."""
        gc.collect()
        return cls(
            Counter(_thread_names()), Counter(_descriptor_targets()), Counter(_process_names())
        )

    def added_since(self, earlier: Self) -> list[str]:
        """Return the resources that are new since `earlier`, of each kind that has grown in number."""
        found: list[str] = []
        for kind, now, then in (
            ("thread", self.threads, earlier.threads),
            ("descriptor", self.descriptors, earlier.descriptors),
            ("child process", self.processes, earlier.processes),
        ):
            if now.total() > then.total():
                found += [f"{kind} {words}" for words in (now - then).elements()]
        return found


def remaining_after(earlier: ProcessResources, limit_s: float) -> list[str]:
    """Return the resources that are new since `earlier` and were not released within `limit_s`."""
    held: list[str] = []

    def nothing_is_left() -> bool:
        held[:] = ProcessResources.current().added_since(earlier)
        return not held

    wait_until(nothing_is_left, limit_s)
    return held


def wait_until(fact: Callable[[], bool], limit_s: float) -> bool:
    """Return whether `fact` became true in time.

    It is looked at some times in any case, because a process that was paused may find its time over.
    """
    deadline_s = time.monotonic() + limit_s
    polls = 0
    while not fact():
        polls += 1
        if time.monotonic() > deadline_s and polls > _LEAST_POLLS:
            return False
        time.sleep(_POLL_S)
    return True


def resident_nbytes() -> int:
    """Return the resident memory of this process, after the allocator has returned free memory."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def file_size_limit(nbytes: int) -> Generator[None, None, None]:
    """Make writes beyond `nbytes` of a file fail with EFBIG, because Python ignores SIGXFSZ."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def unwritable(directories: Iterable[Path]) -> Generator[None, None, None]:
    """Let this thread, and threads that it starts, neither make nor remove files in `directories`.

    Root may write everywhere, so this thread gives up that right meanwhile.
    """
    modes = {each: stat.S_IMODE(each.stat().st_mode) for each in directories}
    libc, held = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(_SETS.size)
    libc.capget(_CAPABILITIES, held)
    effective, *rest = _SETS.unpack(held.raw)
    try:
        for each, mode in modes.items():
            each.chmod(mode & ~0o222)
        libc.capset(_CAPABILITIES, _SETS.pack(effective & ~_CAP_DAC_OVERRIDE, *rest))
        yield
    finally:
        libc.capset(_CAPABILITIES, held)
        for each, mode in modes.items():
            with suppress(FileNotFoundError):
                each.chmod(mode)


@contextmanager
def no_free_descriptors() -> Generator[None, None, None]:
    """Use up all descriptors, so that the process can open none of any kind."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208 - names only
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _thread_names() -> Iterator[str]:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - names only
        yield names.get(int(task)) or _command(f"/proc/self/task/{task}/comm")


def _descriptor_targets() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only
        try:
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 - the text of a link
        except OSError:
            continue  # The listing itself used this descriptor.
        yield re.sub(r":\[\d+\]$", "", target)


def _process_names() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - names only
        try:
            children = Path(f"/proc/self/task/{task}/children").read_text("ascii").split()
        except OSError:
            continue  # The thread has ended.
        for child in children:
            yield _command(f"/proc/{child}/comm")


def _command(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return "that has just ended"
