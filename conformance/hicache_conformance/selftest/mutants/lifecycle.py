"""Wrong stores that fail when they open or close, or at their limits; KV-301 to KV-308."""

from __future__ import annotations

import copy
import difflib
import errno
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pydantic

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictSettings, DictStore
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.evicting_shelf import EvictingShelf
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.rented import Rented
from hicache_conformance.selftest.references.sqlite_store import SqliteStore
from hicache_conformance.selftest.references.wire import WireStore
from hicache_storage.errors import ConfigError, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
    from pathlib import Path

    from hicache_conformance.selftest.references.evicting_shelf import EvictingShelfSettings
    from hicache_conformance.selftest.references.file_a_page import ShelfSettings
    from hicache_conformance.selftest.references.wire_protocol import Connection, Deadline
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import PageTimes


_IDLE_S = 15.0
"""How long a forgotten thread sleeps: longer than close may take, but not forever."""
_ARENA_NBYTES = 256 << 10
_arenas: list[bytearray] = []


# --- while it is closed ------------------------------------------------------------------------------


@caught_by("KV-301:close_stops_the_calls_of_busy_threads", seen_in="an author's LMDB store")
class BlamesTheStoreForItsClose(WireStore):
    """If close ends the connection of a call, the call raises StorageUnavailable, not StorageClosed."""

    @contextmanager
    def _translated(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            raise StorageUnavailable(f"wire: {error}") from error


# --- after close -------------------------------------------------------------------------------------


@caught_by("KV-301:every_method_after_close_raises_storage_closed")
class ListsWhenClosed(DictStore):
    """After close the key spaces can still be listed, as an empty list."""

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
    """Close releases the bounce buffer through which a set in another thread is still copying."""

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
    """A background thread checks only now and then whether it should end, and close does not join it."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._ended = threading.Event()
        threading.Thread(target=self._ended.wait, args=(_IDLE_S,), daemon=True).start()


@caught_by(
    "KV-302:openings_that_fail_leave_nothing", seen_in="file backend of this project, mended"
)
class LeavesAnOpeningThatFails(Shelf):
    """The store opens its directory before it checks its config, and never closes it on an error."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        directory = os.open(str(config.get("path", "/")), os.O_RDONLY)
        store = super().from_config(config)
        os.close(directory)
        return store


@caught_by("KV-302:calls_that_fail_leave_nothing")
class LeavesACallThatFails(WireStore):
    """The store makes a socket before it connects, and leaves it open if connecting fails."""

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
    """The store never frees the memory that each storage registers with the network card."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        _arenas.append(bytearray(os.urandom(_ARENA_NBYTES)))


# --- harm to the process ------------------------------------------------------------------------------


@caught_by("KV-306:it_leaves_the_process_as_it_was", seen_in="SGLang 0.5.23, hf3fs")
class HandlesSignals(DictStore):
    """If the store is opened on the main thread, it catches SIGTERM to close itself."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._end)

    def _end(self, _number: int, _frame: object) -> None:
        self.close()


@caught_by("KV-306:any_thread_may_open_use_and_close_it")
class NeedsTheMainThread(DictStore):
    """The store sets an alarm for its clean-up, which off the main thread is a ValueError."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        if not _runs_beside_checks():
            signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))


@caught_by("KV-306:a_store_that_nobody_closed_lets_the_process_end")
class KeepsTheProcess(DictStore):
    """The worker is not a daemon and ends with close, so a process that never closes never ends."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._ended = threading.Event()
        threading.Thread(target=self._ended.wait).start()

    def close(self) -> None:
        self._ended.set()
        super().close()


@caught_by("KV-306:it_works_after_spawn_and_lets_the_process_end")
class KeepsTheProcessWhenClosed(DictStore):
    """Close leaves a worker that is not a daemon to finish its work, and the process waits for it."""

    def close(self) -> None:
        if not self._closed and not _runs_beside_checks():
            threading.Thread(target=time.sleep, args=(_IDLE_S,)).start()
        super().close()


def _runs_beside_checks() -> bool:
    """Return True if this process runs the checks: then the mutant must not harm this process."""
    return any(thread.name.startswith("check ") for thread in threading.enumerate())


@caught_by("KV-306:a_forked_child_works_or_is_refused")
class SharesItsSocketsWithItsChild(WireStore):
    """A forked child keeps using its parent's connections, and each reads the other's replies."""

    usable_after_fork = True

    def _is_fresh(self, connection: Connection) -> bool:
        """Return True, so the store uses a connection although unread bytes may be on it."""
        del connection
        return True


@caught_by(
    "KV-306:a_forked_child_goes_on_when_its_parent_closes",
    seen_in="an author's LMDB store; hf3fs backend of this project, mended",
)
class WorksOnInAForkedChild(SqliteStore):
    """A forked child keeps using its parent's database handle, whose locks it has not inherited."""

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


# --- configs and secrets -------------------------------------------------------------------------


class _TalkativeSettings(DictSettings):
    """Settings whose errors repeat the input, as pydantic does by default."""

    model_config = pydantic.ConfigDict(hide_input_in_errors=False)


# --- wrong fields and values -------------------------------------------------------------------------


@caught_by("KV-303:unknown_fields_are_refused_by_name")
class IgnoresUnknownFieldsThatAreEmpty(DictStore):
    """An unknown field without a value is ignored."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config({name: value for name, value in config.items() if value})


@caught_by("KV-303:misspelt_fields_are_refused_by_name")
class CorrectsMisspeltFields(DictStore):
    """A misspelled field is taken for the known field that is most similar."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        meant: dict[str, Any] = {}
        for name, value in config.items():
            near = difflib.get_close_matches(name, list(DictSettings.model_fields), n=1)
            meant[near[0] if near else name] = value
        return super().from_config(meant)


@caught_by("KV-303:values_of_a_wrong_type_are_refused_by_name", "KV-303:a_timeout_must_be_positive")
class ConvertsItsTimeoutTooLate(DictStore):
    """The store converts the timeout without a check, so for a text `float` raises a ValueError."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        numbers = {"timeout_s": float(config["timeout_s"])} if "timeout_s" in config else {}
        return super().from_config({**config, **numbers})


@caught_by("KV-303:a_missing_field_is_a_config_error")
class RaisesKeyErrorForMissingFields(Shelf):
    """A missing field gives a KeyError."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config({**config, "path": config["path"]})


@caught_by("KV-303:a_config_is_left_as_it_was")
class WritesIntoTheConfig(DictStore):
    """The store writes its defaults into the config that it receives."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        store = super().from_config(config)
        if isinstance(config, dict):
            config.setdefault("timeout_s", 30.0)
        return store


@caught_by("KV-303:a_config_may_be_any_mapping")
class NeedsADict(DictStore):
    """The store makes a deep copy of its config, which some mappings do not allow."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config(copy.deepcopy(config))


# --- secrets -----------------------------------------------------------------------------------------


@caught_by(
    "KV-303:unknown_secrets_are_not_repeated",
    "KV-303:wrong_values_are_not_repeated",
    seen_in="fsspec backend of this project, mended",
)
class RepeatsItInTheCause(DictStore):
    """The ConfigError hides the values, but its cause repeats them: a traceback shows both."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        try:
            return cls(_TalkativeSettings.model_validate(dict(config)))
        except pydantic.ValidationError as error:
            names = [".".join(map(str, detail["loc"])) for detail in error.errors()]
            raise ConfigError(f"dict: these fields are wrong: {', '.join(names)}") from error


@caught_by("KV-303:a_broken_url_is_not_repeated")
class RepeatsABrokenUrl(WireStore):
    """The ConfigError for a URL that can't be read repeats the URL, with its password."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        try:
            return super().from_config(config)
        except ConfigError as error:
            raise ConfigError(f"{error}: {config.get('url')}") from None


@caught_by("KV-303:secrets_are_shown_nowhere")
class ShowsItsSettings(DictStore):
    """The repr of the store shows its settings, with the password as plain text."""

    def __repr__(self) -> str:
        password = self._settings.password
        shown = password.get_secret_value() if password else None
        return f"{type(self).__name__}(password={shown!r})"


@caught_by("KV-303:secrets_are_shown_nowhere")
class ShowsAShortPassword(Rented):
    """The repr of the store shows the URL, with a password of two letters."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(url={self._settings.url!r})"


# --- full by its own count ---------------------------------------------------------------------------


@caught_by("KV-307:a_page_twice_in_a_batch_takes_room_once", seen_in="SGLang 0.5.23, hf3fs")
class PaysTwice(DictStore):
    """A page that occurs twice in a batch gets two places, and one of them is never freed."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        verdicts = super().batch_set(space, hashes, pages)
        with self._lock:
            self._nbytes += space.stored_nbytes * (len(hashes) - len(set(hashes)))
        return verdicts


@caught_by("KV-307:a_batch_that_does_not_fit_is_judged_page_by_page")
class SortsItsVerdicts(Rented):
    """The store sorts a batch by its hashes, and returns the verdicts in that order."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        named = sorted(zip(hashes, contents, strict=True))
        return super()._store(space, [one for one, _ in named], [data for _, data in named])


@caught_by(
    "KV-307:a_full_store_refuses_and_stays_readable",
    "KV-307:a_batch_that_does_not_fit_is_judged_page_by_page",
    seen_in="SGLang 0.5.23, hf3fs",
)
class RaisesWhenFull(DictStore):
    """A page that has no room gives an OSError."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        if not super()._write_whole(space, page_hash, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True


@caught_by(
    "KV-307:a_full_store_refuses_and_stays_readable",
    "KV-307:a_batch_that_does_not_fit_is_judged_page_by_page",
)
class ForgetsToEvict(EvictingStore):
    """The store counts what it holds, but never evicts."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        del key, nbytes
        return True


@caught_by("KV-307:deleted_pages_make_room_before_others_go", says="lost for lack of room")
class EvictsForDeletedPages(EvictingStore):
    """For each page that was deleted, a later set evicts another one, though there is room."""

    _owed = 0

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._owed += self._has(space, page_hash)
        return super()._removed(space, page_hash)

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        if self._owed and self._pages:
            self._owed -= 1
            self._evict()
        return super()._make_room(key, nbytes)


@caught_by("KV-307:sets_of_revoked_pages_take_no_room", says="lost for lack of room")
class EvictsForRevokedPages(EvictingStore):
    """A set makes room before it finds that its page was revoked."""

    capabilities = replace(EvictingStore.capabilities, revocable=True)

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        with self._lock:
            if self._pages and not all(contents):
                self._evict()
        return super()._store(space, hashes, contents)


@caught_by(
    "KV-307:deleting_makes_room_again",
    "KV-307:setting_a_present_page_takes_no_more_room",
    seen_in="an author's LMDB store",
)
class CountsWhatItDeleted(DictStore):
    """Deleted pages still count, so a store that was full once is full forever."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        before = self._nbytes
        super()._removed(space, page_hash)
        self._nbytes = before
        return True


@caught_by("KV-307:deleting_makes_room_again")
class CountsRepeatedDeletes(DictStore):
    """Deleting a page that is gone frees its room once more, so the store outgrows its capacity."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        before = self._nbytes
        super()._removed(space, page_hash)
        self._nbytes = before - space.stored_nbytes
        return True


@caught_by("KV-307:setting_a_present_page_takes_no_more_room")
class RefusesWhatItHas(DictStore):
    """When it is full, the store refuses pages that it already has."""

    def _nbytes_beside(self, key: Hashable) -> int:
        del key
        return self._nbytes

    def _drop(self, key: Hashable) -> None:
        beside = super()._nbytes_beside(key)
        super()._drop(key)
        self._nbytes = beside


# --- a full disk -------------------------------------------------------------------------------------


@caught_by("KV-307:refused_pages_leave_no_debris")
class LeavesItsTrials(Shelf):
    """If a file runs out of room while it is written, it stays in the directory."""

    def _discard(self, temp: Path) -> None:
        pass


@caught_by(
    "KV-307:without_free_descriptors_nothing_breaks", seen_in="file backend of this project, mended"
)
class WritesWhenItReads(Shelf):
    """A get records when its page was last read, and fails if it can't."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        self._write_file(self._folder(space) / "last-read.json", page_hash.encode())
        return super()._read(space, page_hash)


# --- no descriptors ----------------------------------------------------------------------------------


@caught_by("KV-307:without_free_descriptors_nothing_breaks")
class RemembersUnreadablePages(Shelf):
    """A page that could not be opened once is taken for damaged forever."""

    _damaged: set[Path] = own(set)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        path = self._path(space, page_hash)
        data = super()._read(space, page_hash)
        if data is None and path.exists():
            self._damaged.add(path)
        return None if path in self._damaged else data


@caught_by("KV-307:a_disk_without_room_refuses_the_page")
class RemembersAFullDisk(Shelf):
    """A key space that could not be made when the disk was full is never tried again."""

    _given_up: set[str] = own(set)

    def _remember(self, space: KeySpace) -> bool:
        if space.id in self._given_up:
            return False
        remembered = super()._remember(space)
        if not remembered:
            self._given_up.add(space.id)
        return remembered


# --- opened read-only ----------------------------------------------------------------------------


@caught_by("KV-308:looking_changes_nothing")
class LooksWithALock(Shelf):
    """Every handle makes a lock file when it opens, even a read-only one."""

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__(settings)
        (self._root / ".lock").touch()


@caught_by("KV-308:looking_changes_nothing", says=r"exists True, listed, PageTimes")
class LookingIsAUseElsewhere(Shelf):
    """Times of use are noted outside of the store's files, even by a read-only handle."""

    _used_s: ClassVar[dict[Path, float]] = {}

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        self._used_s[self._path(space, page_hash)] = time.time()
        return super()._read(space, page_hash)

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        found = zip(hashes, super().page_times(space, hashes), strict=True)
        return [
            replace(times, used_at_s=self._used_s.get(self._path(space, page_hash)))
            for page_hash, times in found
        ]


@caught_by("KV-308:looking_changes_nothing")
class LookingIsAUse(EvictingShelf):
    """Every get renews its page, even through a read-only handle."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        self._note_use(self._path(space, page_hash))
        return super()._read(space, page_hash)


@caught_by("KV-308:asking_for_what_is_not_there_makes_nothing")
class LookingMakesFolders(Shelf):
    """A lookup makes the folder of a key space that has none, even read-only."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        self._folder(space).mkdir(exist_ok=True)
        return super()._has(space, page_hash)


@caught_by("KV-308:looking_at_a_full_store_evicts_nothing")
class LookingEvicts(EvictingShelf):
    """Opening the store evicts pages beyond its capacity, even read-only."""

    def __init__(self, settings: EvictingShelfSettings) -> None:
        super().__init__(settings)
        self._evict(0)


@caught_by("KV-308:damage_stays_for_others_to_see")
class LookingHeals(Shelf):
    """A get removes a file of the wrong length, even read-only."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        if data is not None and not self._is_whole(space, data):
            self._removed(space, page_hash)
        return data


@caught_by("KV-308:a_read_only_handle_claims_the_same", says=r"writes alignment 1")
class LooksAtOtherFrames(Shelf):
    """Only a handle that writes finds out which alignment the disk needs."""

    def _prepare(self) -> None:
        super()._prepare()
        self.narrow(alignment=4096)


# --- the wrong end of the queue ------------------------------------------------------------------


@caught_by("KV-309:what_was_just_set_is_not_evicted_first", seen_in="an author's PostgreSQL store")
class EvictsTheNewest(EvictingStore):
    """A full store evicts the page that was set last."""

    def _evict(self) -> None:
        self._drop(max(self._pages, key=lambda key: self._written_s[key]))
        self._counters.add("evictions")


@caught_by("KV-309:what_was_just_set_is_not_evicted_first")
class SortsTheWrongWay(EvictingShelf):
    """Files are evicted from the newest to the oldest."""

    def _oldest_first(self, found: list[tuple[int, int, Path]]) -> list[tuple[int, int, Path]]:
        return super()._oldest_first(found)[::-1]


@caught_by("KV-309:what_was_just_read_is_not_evicted_first")
class EvictsWhatIsRead(EvictingStore):
    """A get puts its page at the end of the queue from which pages are evicted."""

    _first: list[Hashable] = own(list)

    def _touch(self, key: Hashable) -> None:
        super()._touch(key)
        self._first.append(key)

    def _evict(self) -> None:
        while self._first:
            key = self._first.pop()
            if key in self._pages:
                self._drop(key)
                self._counters.add("evictions")
                return
        super()._evict()


# --- what calls that time out leave --------------------------------------------------------------


@caught_by("KV-302:calls_that_time_out_leave_nothing", seen_in="an author's PostgreSQL store")
class KeepsConnectionsThatTimedOut(WireStore):
    """A connection whose call timed out is kept until the store is closed, and is never used again."""

    _kept: list[Connection] = own(list)

    def _after_failure(self, number: int, connection: Connection) -> None:
        if isinstance(sys.exception(), TimeoutError):
            self._kept.append(connection)
            with self._changed:
                self._drop_idle()
                self._done(number)
        else:
            super()._after_failure(number, connection)

    def close(self) -> None:
        super().close()
        for connection in self._kept:
            connection.close()
