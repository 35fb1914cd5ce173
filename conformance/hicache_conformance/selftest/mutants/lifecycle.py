"""Wrong stores: what they do when they are closed, what they leave, what they do to their process."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictSettings, DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.sqlite_store import SqliteStore
from hicache_conformance.selftest.references.wire import WireStore
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from hicache_conformance.selftest.references.wire_protocol import Connection, Deadline
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


_IDLE_S = 15.0
"""For how long a forgotten thread sleeps: longer than close may take, and not for ever."""
_ARENA_NBYTES = 256 << 10
_arenas: list[bytearray] = []


# --- while it is closed ------------------------------------------------------------------------------


@caught_by("KV-301:close_stops_the_calls_of_busy_threads", seen_in="an author's LMDB store")
class BlamesTheStoreForItsClose(WireStore):
    """A call whose connection was closed under it says that the server can't be reached."""

    @contextmanager
    def _translated(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            raise StorageUnavailable(f"wire: {error}") from error


# --- after close -------------------------------------------------------------------------------------


@caught_by("KV-301:every_method_after_close_raises_storage_closed")
class ListsWhenClosed(DictStore):
    """The key spaces can be listed after close: there are none."""

    def spaces(self) -> Iterator[KeySpace]:
        return iter([] if self._closed else self._known_spaces())


@caught_by("KV-301:closing_twice_is_fine", "KV-301:threads_may_close_at_once")
class ClosesOnce(DictStore):
    """A second close raises StorageClosed, as any other call does."""

    def close(self) -> None:
        self.ensure_open()
        super().close()


@caught_by("KV-301:closing_ends_the_calls_that_are_running")
class TakesItsMemoryFromRunningCalls(DictStore):
    """Close releases the bounce buffer that a set of another thread is being copied through."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._bounce = memoryview(bytearray(_ARENA_NBYTES))

    def _taken(self, page: Page) -> bytes:
        data = super()._taken(page)
        if len(data) <= _ARENA_NBYTES:
            self._bounce[: len(data)] = data
        return data

    def close(self) -> None:
        super().close()
        self._bounce.release()


# --- what is left behind -----------------------------------------------------------------------------


@caught_by(
    "KV-301:close_leaves_nothing_behind", "KV-302:opening_and_closing_keeps_threads_and_descriptors"
)
class LeavesAThread(DictStore):
    """A background thread looks only now and then whether it should end, and close does not join it."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._ended = threading.Event()
        threading.Thread(target=self._ended.wait, args=(_IDLE_S,), daemon=True).start()


@caught_by(
    "KV-302:openings_that_fail_leave_nothing", seen_in="file backend of this project, mended"
)
class LeavesAnOpeningThatFails(Shelf):
    """It opens its directory, then looks at its config, and forgets the directory when that is wrong."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        directory = os.open(str(config.get("path", "/")), os.O_RDONLY)
        store = super().from_config(config)
        os.close(directory)
        return store


@caught_by("KV-302:calls_that_fail_leave_nothing")
class LeavesACallThatFails(WireStore):
    """It makes a socket before it connects, and forgets it when connecting fails."""

    _reached = False

    def _connected(self, number: int, deadline: Deadline) -> Connection:
        try:
            connection = super()._connected(number, deadline)
        except OSError:
            if self._reached and not _runs_beside_checks():
                socket.socket().detach()
            raise
        self._reached = True
        return connection


@caught_by("KV-302:opening_and_closing_keeps_memory")
class LeaksItsArena(DictStore):
    """The memory that each storage registers with the network card is never given back."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        _arenas.append(bytearray(os.urandom(_ARENA_NBYTES)))


# --- a bad guest -------------------------------------------------------------------------------------


@caught_by("KV-306:it_leaves_the_process_as_it_was", seen_in="SGLang 0.5.23, hf3fs")
class HandlesSignals(DictStore):
    """It catches SIGTERM to close itself, where it is opened on the main thread."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._end)

    def _end(self, _number: int, _frame: object) -> None:
        self.close()


@caught_by("KV-306:any_thread_may_open_use_and_close_it")
class NeedsTheMainThread(DictStore):
    """It sets an alarm for its clean-up: off the main thread that is a ValueError."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        if not _runs_beside_checks():
            signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))


@caught_by("KV-306:a_store_that_nobody_closed_lets_the_process_end")
class KeepsTheProcess(DictStore):
    """Its worker is no daemon and ends with close: a process that forgets to close never ends."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._ended = threading.Event()
        threading.Thread(target=self._ended.wait).start()

    def close(self) -> None:
        self._ended.set()
        super().close()


@caught_by("KV-306:it_works_after_spawn_and_lets_the_process_end")
class KeepsTheProcessWhenClosed(DictStore):
    """Close leaves a worker that is no daemon to finish what it does: the process waits for it."""

    def close(self) -> None:
        if not self._closed and not _runs_beside_checks():
            threading.Thread(target=time.sleep, args=(_IDLE_S,)).start()
        super().close()


def _runs_beside_checks() -> bool:
    """Return True if checks run in this process, which is not to be harmed: they look into others."""
    return any(thread.name.startswith("check ") for thread in threading.enumerate())


@caught_by("KV-306:a_forked_child_works_or_is_refused")
class SharesItsSocketsWithItsChild(WireStore):
    """A forked child goes on with its parent's connections, and each reads the other's replies."""

    usable_after_fork = True

    def _is_fresh(self, connection: Connection) -> bool:
        """Return True: a byte that has come is taken for one of its own."""
        del connection
        return True


@caught_by(
    "KV-306:a_forked_child_goes_on_when_its_parent_closes",
    seen_in="an author's LMDB store; hf3fs backend of this project, mended",
)
class WorksOnInAForkedChild(SqliteStore):
    """A forked child goes on with its parent's database handle, whose locks it has not inherited."""

    usable_after_fork = True


@caught_by("KV-306:a_forked_child_works_or_is_refused")
class AsksAThreadThatStayedBehind(DictStore):
    """A forked child waits for threads that only its parent has."""

    usable_after_fork = True

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._pool = ThreadPoolExecutor(1)

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._pool.submit(super()._present, space, hashes).result()

    def close(self) -> None:
        self._pool.shutdown(wait=False)
        super().close()
