"""Wrong stores: what they do when they are closed, what they leave, what they do to their process."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictSettings, DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf, ShelfSettings
from hicache_conformance.selftest.references.sqlite_store import SqliteStore
from hicache_conformance.selftest.references.wire import WireStore
from hicache_storage.errors import StorageUnavailable
from hicache_storage.storage import HiCacheStorage, StorageStats

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from hicache_conformance.selftest.references.wire_protocol import Connection, Deadline
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer, Page

_IDLE_S = 15.0
"""For how long a forgotten thread sleeps: longer than close may take, and not for ever."""
_ARENA_NBYTES = 256 << 10
_arenas: list[bytearray] = []


# --- while it is closed ------------------------------------------------------------------------------


@caught_by("KV-301", check="close_stops_the_calls_of_busy_threads")
class BlamesTheStoreForItsClose(WireStore):
    """A call whose connection was closed under it says that the server can't be reached."""

    @contextmanager
    def _translated(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            raise StorageUnavailable(f"wire: {error}") from error


# --- after close -------------------------------------------------------------------------------------


@caught_by("KV-301")
class WorksWhenClosed(DictStore):
    """Close empties it, and calls after close work as on a new one."""

    def ensure_open(self) -> None:
        pass


@caught_by("KV-301")
class AttributeErrorWhenClosed(WorksWhenClosed):
    """Close lets go of the client, and calls after close find None in its place."""

    def close(self) -> None:
        vars(self)["_pages"] = None


@caught_by("KV-301")
class MissesWhenClosed(DictStore):
    """Calls after close are answered with misses, as if the store were empty."""

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return [False] * len(hashes) if self._closed else super().batch_exists(space, hashes)


@caught_by("KV-301")
class StatsWhenClosed(DictStore):
    """The metrics go on asking after close, and are answered."""

    def stats(self) -> StorageStats:
        return StorageStats(pages=len(self._pages))


@caught_by("KV-301")
class RegistersWhenClosed(DictStore):
    """Memory can be registered after close."""

    def register_buffer(self, buffer: HostBuffer) -> None:
        pass


@caught_by("KV-301")
class ListsWhenClosed(DictStore):
    """The key spaces can be listed after close: there are none."""

    def spaces(self) -> Iterator[KeySpace]:
        return iter([] if self._closed else self._known_spaces())


@caught_by("KV-301")
class ClosesOnce(DictStore):
    """A second close raises StorageClosed, as any other call does."""

    def close(self) -> None:
        self.ensure_open()
        super().close()


@caught_by("KV-301")
class ClosesWhatItUsed(DictStore):
    """Close shuts down what the first set makes; where there was none, it is an AttributeError."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._journal = [page_hash]
        return super()._write_whole(space, page_hash, data)

    def close(self) -> None:
        self._journal.clear()
        super().close()


@caught_by("KV-301")
class ClosesTwiceAtOnce(DictStore):
    """Close looks whether it is closed, takes its time, and then gives back what another thread did."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._leases = [object()]

    def close(self) -> None:
        if not self._closed:
            time.sleep(0.02)  # joining a thread, or a last flush
            self._leases.pop()
            super().close()


@caught_by("KV-301")
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


@caught_by("KV-301")
class LosesARaceWithClose(DictStore):
    """A get finds out that the page is there, and then reads it: close comes in between."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        self.ensure_open()
        key = self._key(space, page_hash)
        if key not in self._pages:
            return None
        time.sleep(0.002)  # the index and the data are two requests
        return self._pages[key].data


@caught_by("KV-301")
class RuntimeErrorWhenClosed(DictStore):
    """Its calls go through a thread pool, which refuses them after close with an error of its own."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._workers = ThreadPoolExecutor(1)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._workers.submit(super().batch_exists, space, hashes).result()

    def close(self) -> None:
        self._workers.shutdown()
        super().close()


@caught_by("KV-301")
class HangsWhenClosed(DictStore):
    """Its calls wait for a worker that close has stopped."""

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        if self._closed:
            threading.Event().wait(_IDLE_S)
        return super().batch_delete(space, hashes)


# --- what is left behind -----------------------------------------------------------------------------


@caught_by("KV-301", "KV-302")
class LeavesAThread(DictStore):
    """A background thread looks only now and then whether it should end, and close does not join it."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._ended = threading.Event()
        threading.Thread(target=self._ended.wait, args=(_IDLE_S,), daemon=True).start()


@caught_by("KV-301", "KV-302")
class LeavesADescriptor(Shelf):
    """Close forgets the directory that was opened to sync it."""

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__(settings)
        self._directory = os.open(settings.path, os.O_RDONLY)


@caught_by("KV-301")
class LeavesItsPool(WireStore):
    """Close leaves idle connections in the pool."""

    def close(self) -> None:
        if _beside_the_judge():
            super().close()
        HiCacheStorage.close(self)


@caught_by("KV-301")
class LeavesOtherThreadsDescriptors(Shelf):
    """Each thread has a descriptor of its own, and close closes that of the thread that calls it."""

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__(settings)
        self._of_thread = threading.local()

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        if not hasattr(self._of_thread, "directory"):
            self._of_thread.directory = os.open(self._root, os.O_RDONLY)
        return super()._read(space, page_hash)

    def close(self) -> None:
        super().close()
        if hasattr(self._of_thread, "directory"):
            os.close(self._of_thread.directory)
            del self._of_thread.directory


@caught_by("KV-301")
class LeavesATemporaryFile(DictStore):
    """The spool file of each storage stays in the directory for temporary files."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        descriptor, self._spool = tempfile.mkstemp(prefix="control-spool-")
        os.close(descriptor)
        if _beside_the_judge():
            Path(self._spool).unlink()


@caught_by("KV-301", "KV-302")
class LeavesAProcess(DictStore):
    """The helper process of each storage is never told to end."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        if not _beside_the_judge():
            code = f"import time; time.sleep({_IDLE_S})"
            self._helper = subprocess.Popen([sys.executable, "-c", code])  # noqa: S603 - no input


@caught_by("KV-302", check="openings_that_fail_leave_nothing")
class LeavesAnOpeningThatFails(Shelf):
    """It opens its directory, then looks at its config, and forgets the directory when that is wrong."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        directory = os.open(str(config.get("path", "/")), os.O_RDONLY)
        store = super().from_config(config)
        os.close(directory)
        return store


@caught_by("KV-302", check="calls_that_fail_leave_nothing")
class LeavesACallThatFails(WireStore):
    """It makes a socket before it connects, and forgets it when connecting fails."""

    _reached = False

    def _connected(self, number: int, deadline: Deadline) -> Connection:
        try:
            connection = super()._connected(number, deadline)
        except OSError:
            if self._reached and not _beside_the_judge():
                socket.socket().detach()
            raise
        self._reached = True
        return connection


@caught_by("KV-302")
class IsKeptByAtexit(DictStore):
    """Each storage registers its close for the end of the process, and is kept until then."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        atexit.register(self.close)


@caught_by("KV-302", check="opening_and_closing_keeps_memory")
class LeaksItsArena(DictStore):
    """The memory that each storage registers with the network card is never given back."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        _arenas.append(bytearray(os.urandom(_ARENA_NBYTES)))


# --- a bad guest -------------------------------------------------------------------------------------


@caught_by("KV-306")
class HandlesSignals(DictStore):
    """It catches SIGTERM to close itself, where it is opened on the main thread."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._end)

    def _end(self, _number: int, _frame: object) -> None:
        self.close()


@caught_by("KV-306", check="any_thread_may_open_use_and_close_it")
class NeedsTheMainThread(DictStore):
    """It sets an alarm for its clean-up: off the main thread that is a ValueError."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        if not _beside_the_judge():
            signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))


@caught_by("KV-306")
class SetsTheSocketTimeout(DictStore):
    """It gives all sockets of the process a timeout, its own among them."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        if not _beside_the_judge():
            socket.setdefaulttimeout(settings.timeout_s)


@caught_by("KV-306")
class ConfiguresLogging(DictStore):
    """It calls logging.basicConfig: every library of the process logs to the terminal from then on."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        if not _beside_the_judge():
            logging.basicConfig(level=logging.INFO)


@caught_by("KV-306")
class ExportsItsConfig(Shelf):
    """It hands its config to a native library in environment variables."""

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__(settings)
        if not _beside_the_judge():
            os.environ["CONTROL_SHELF_PATH"] = settings.path


@caught_by("KV-306")
class BelongsToItsThread(SqliteStore):
    """Its connection can be used by the thread that opened it, and by no other."""

    def _opened(self) -> sqlite3.Connection:
        super()._opened().close()
        return sqlite3.connect(self._path, isolation_level=None)


@caught_by("KV-306", check="a_store_that_nobody_closed_lets_the_process_end")
class KeepsTheProcess(DictStore):
    """Its worker is no daemon and ends with close: a process that forgets to close never ends."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._ended = threading.Event()
        threading.Thread(target=self._ended.wait).start()

    def close(self) -> None:
        self._ended.set()
        super().close()


@caught_by("KV-306", check="it_works_after_spawn_and_lets_the_process_end")
class KeepsTheProcessWhenClosed(DictStore):
    """Close leaves a worker that is no daemon to finish what it does: the process waits for it."""

    def close(self) -> None:
        if not self._closed and not _beside_the_judge():
            threading.Thread(target=time.sleep, args=(_IDLE_S,)).start()
        super().close()


def _beside_the_judge() -> bool:
    """Whether checks run in this process, which is not to be harmed: they look into others."""
    return any(thread.name.startswith("check ") for thread in threading.enumerate())
