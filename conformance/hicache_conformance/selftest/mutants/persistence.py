"""Wrong stores that fail after a kill, or with a damaged page; KV-40x."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import xxhash

from hicache_conformance.scenarios.framed_store import PAGE_STORE
from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.file_a_page import Shelf, ShelfSettings
from hicache_conformance.selftest.references.streaming import StreamingShelf
from hicache_conformance.selftest.references.synced import Synced, SyncedShelf
from hicache_conformance.selftest.references.wire import WireStore
from hicache_storage.errors import CorruptPage, StorageUnavailable
from hicache_storage.storage import HiCacheStorage, PageFault, PageInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from io import FileIO
    from pathlib import Path
    from typing import BinaryIO

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


_BEHIND_S = 0.5


# --- what is lost ----------------------------------------------------------------------------------


@caught_by("KV-401:pages_survive_sigkill_of_their_writer")
class WritesAtClose(Shelf):
    """The store claims to survive crashes, but keeps its pages in memory until it is closed."""

    _dirty: dict[Path, bytes] = own(dict)

    def _replaced(self, path: Path, data: bytes) -> bool:
        self._dirty[path] = data
        return True

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._path(space, page_hash) in self._dirty or super()._has(space, page_hash)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        return self._dirty.get(self._path(space, page_hash)) or super()._read(space, page_hash)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._dirty.pop(self._path(space, page_hash), None)
        return super()._removed(space, page_hash)

    def close(self) -> None:
        for path, data in self._dirty.items():
            super()._replaced(path, data)
        self._dirty.clear()
        super().close()


@caught_by(
    "KV-401:a_page_survives_a_kill_right_after_its_verdict",
    "KV-401:an_overwritten_page_survives_a_kill",
    "KV-401:pages_survive_sigkill_of_their_writer",
    says="whose batch_set returned True",
)
class WritesSoon(WritesAtClose):
    """A set returns True when its page is in a queue, and a thread writes the page a moment later."""

    def _replaced(self, path: Path, data: bytes) -> bool:
        super()._replaced(path, data)
        write_later = partial(self._write_later, partial(Shelf._replaced, self, path, data))  # noqa: SLF001 - its own
        threading.Thread(target=write_later, daemon=True).start()
        return True

    def _write_later(self, write: Callable[[], bool]) -> None:
        time.sleep(_BEHIND_S)
        if not self._closed:
            write()


@caught_by(
    "KV-401:a_page_survives_a_kill_right_after_its_verdict",
    "KV-401:an_overwritten_page_survives_a_kill",
    says="whose batch_set returned True",
)
class LastPageInTheBuffer(Shelf):
    """The last page stays in the buffer of a file object until the next call flushes it."""

    _last: BinaryIO | None = None

    def _write_file(self, path: Path, data: bytes) -> None:
        self._flush()
        last = path.open("wb", buffering=1 << 20)
        last.write(data)
        self._last = last

    def _begin(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page] | None = None
    ) -> None:
        super()._begin(space, hashes, pages)
        self._flush()

    def close(self) -> None:
        self._flush()
        super().close()

    def _flush(self) -> None:
        if self._last is not None:
            self._last.close()


@caught_by(
    "KV-401:a_deleted_page_stays_deleted_after_a_kill",
    says="was deleted before the process that did it was killed",
)
class DeletesAtClose(Shelf):
    """Deleted pages are only marked in memory; their files go when the store is closed."""

    _gone: set[Path] = own(set)

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._path(space, page_hash) not in self._gone and super()._has(space, page_hash)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        gone = self._path(space, page_hash) in self._gone
        return None if gone else super()._read(space, page_hash)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._gone.discard(self._path(space, page_hash))
        return super()._write_whole(space, page_hash, data)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._gone.add(self._path(space, page_hash))
        return True

    def close(self) -> None:
        for path in self._gone:
            path.unlink(missing_ok=True)
        super().close()


@caught_by(
    "KV-401:a_kill_in_a_set_takes_no_other_page_with_it", says="whose batch_set returned True"
)
class TornRecordEndsTheLog(Shelf):
    """A log says which pages are there, and one record that was cut off makes all of it unreadable."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._note(f"begin {page_hash}")
        written = super()._write_whole(space, page_hash, data)
        self._note(f"end {page_hash}")
        return written

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._is_logged(page_hash) and super()._has(space, page_hash)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        return super()._read(space, page_hash) if self._is_logged(page_hash) else None

    def _note(self, record: str) -> None:
        with (self._root / "log").open("a") as log:
            log.write(f"{record}\n")

    def _is_logged(self, page_hash: str) -> bool:
        log = self._root / "log"
        records = log.read_text().split("\n") if log.exists() else []
        balanced = sum(each.startswith("begin") for each in records) * 2 == len(records) - 1
        return balanced and f"end {page_hash}" in records


# --- what is left ------------------------------------------------------------------------------------


@caught_by(
    "KV-501:readers_see_no_torn_page_while_others_write_it",
    "KV-402:an_overwrite_killed_at_a_byte_leaves_old_or_new_bytes",
    says="bytes that were never set",
)
class OverwritesInPlace(Shelf):
    """A present page is overwritten in its own file, whose length is right all the time."""

    def _replaced(self, path: Path, data: bytes) -> bool:
        if not path.exists():
            return super()._replaced(path, data)
        with path.open("r+b") as file:
            file.write(data)
        return True


@caught_by(
    "KV-402:an_overwrite_killed_at_a_byte_leaves_old_or_new_bytes",
    "KV-402:writers_killed_at_random_leave_pages_absent_or_whole",
    says="whose batch_set returned True",
)
class TruncatesToOverwrite(Shelf):
    """A page is written directly into its file, and an overwrite first drops the old bytes."""

    def _temp_path(self, path: Path) -> Path:
        return path

    def _publish(self, temp: Path, path: Path) -> None:
        pass


@caught_by(
    "KV-402:a_writer_killed_half_way_through_a_page_leaves_it_absent_or_whole", says="all zeros"
)
class VisibleWhenPreallocated(StreamingShelf):
    """A file gets its name and its length before its bytes."""

    def _temp_path(self, path: Path) -> Path:
        return path

    def _poured(self, page: Page, file: FileIO) -> None:
        file.truncate(page.nbytes)
        super()._poured(page, file)

    def _publish(self, temp: Path, path: Path) -> None:
        pass


@caught_by("KV-402:a_writer_killed_at_a_byte_leaves_the_page_absent_or_whole", says="all zeros")
class LengthInTheIndex(TruncatesToOverwrite):
    """The index says how long a page is, and nothing checks whether its file is shorter."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._path(space, page_hash).exists()

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        return None if data is None else data.ljust(space.stored_nbytes, b"\0")


@caught_by(
    "KV-402:killed_writers_leave_nothing_that_grows",
    says=r"grows with every one that is killed \d+ files with",
    seen_in="SGLang 0.5.23, file",
)
class TempFilesForEver(Shelf):
    """If a writer is killed, the file that it had begun is never removed."""

    def _sweep(self) -> None:
        pass


@caught_by(
    "KV-402:a_writer_killed_at_a_byte_leaves_the_page_absent_or_whole", says="can't be set any more"
)
class LockOfTheDead(Shelf):
    """A lock file protects a page while it is written, and a killed writer leaves its lock file."""

    def _replaced(self, path: Path, data: bytes) -> bool:
        lock = path.with_suffix(".lock")
        try:
            lock.touch(exist_ok=False)
        except FileExistsError:
            return False
        try:
            return super()._replaced(path, data)
        finally:
            lock.unlink()


@caught_by("KV-402:an_overwrite_killed_half_way_leaves_old_or_new_bytes")
class StoreLockOfTheDead(Shelf):
    """A lock file protects the open directory, and after a kill the store can't be opened any more."""

    capabilities = replace(Shelf.capabilities, shared=False)
    _lock_path: Path | None = None

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__(settings)
        lock_path = self._root / "LOCK"
        try:
            lock_path.touch(exist_ok=False)
        except FileExistsError:
            raise StorageUnavailable(f"{self._root} is in use by another process") from None
        self._lock_path = lock_path

    def close(self) -> None:
        if self._lock_path is not None:
            self._lock_path.unlink(missing_ok=True)
        super().close()


@caught_by(
    "KV-402:a_writer_killed_while_it_opens_leaves_a_store_that_opens",
    says="can't be opened after a process",
)
class HalfAFormatFile(Shelf):
    """The format file is written in place, and a half-written one keeps the store from opening."""

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__(settings)
        path = self._root / "store.json"
        if not path.exists():
            path.write_text(json.dumps({"format": 1, "made_by": type(self).__name__}))
        self._format: dict[str, Any] = json.loads(path.read_text())


@caught_by(
    "KV-402:a_connection_cut_in_a_set_leaves_the_page_absent_or_whole",
    says="bytes that were never set",
)
class UploadsInParts(WireStore):
    """A page goes to the server in two parts, and has its final name from the first part on."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        halves = [data[: len(data) // 2].ljust(len(data), b"\0") for data in contents]
        super()._store(space, hashes, halves)
        return super()._store(space, hashes, contents)


@caught_by("KV-402:killed_readers_leave_nothing_that_grows", seen_in="an author's LMDB store")
class WaitsForDeadReaders(Shelf):
    """A page deleted during a listing is kept until that ends, and a killed reader never ends it."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        return self._marked(super().scan(space))

    def _marked(self, infos: Iterator[PageInfo]) -> Iterator[PageInfo]:
        marker = self._root / f".reader-{os.getpid()}-{secrets.token_hex(4)}"
        marker.touch()
        try:
            yield from infos
        finally:
            marker.unlink(missing_ok=True)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        if not any(self._root.glob(".reader-*")):
            for kept in self._root.glob(".kept-*"):
                kept.unlink(missing_ok=True)
            return super()._removed(space, page_hash)
        with suppress(FileNotFoundError):
            self._path(space, page_hash).rename(self._root / f".kept-{secrets.token_hex(8)}")
        return True


# --- pages that were damaged at rest -------------------------------------------------------------


_SEAL_NBYTES = 8


@caught_by(
    "KV-403:a_damaged_object_is_a_miss",
    "KV-403:an_extended_object_is_a_miss",
    says="extended by a byte",
    seen_in="SGLang 0.5.23, file; LMCache 0.5.6, fs",
)
class ServesLonger(Shelf):
    """If an object is longer than a page, its first bytes are read as the page."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        path = self._path(space, page_hash)
        return path.exists() and path.stat().st_size >= space.stored_nbytes

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        return None if data is None else data[: space.stored_nbytes]


@caught_by(
    "KV-404:a_flipped_bit_is_no_hit_without_the_page_store",
    seen_in="SGLang 0.5.23, file; LMCache 0.5.6, fs",
)
class ServesRot(Shelf):
    """Neither the store nor the layer above it finds a flipped bit."""

    absent: ClassVar[Mapping[str, str]] = {PAGE_STORE: "its engine puts no checksum around pages"}


@caught_by(
    "KV-403:a_damaged_object_heals_when_it_is_set_after_a_miss",
    "KV-403:a_damaged_object_heals_when_it_is_set_unseen",
    says="cut by its last byte",
    seen_in="SGLang 0.5.23, file; LMCache 0.5.6, fs",
)
class NeverHeals(Shelf):
    """A set does nothing if a file with the page's name exists, whatever its length."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        path = self._path(space, page_hash)
        return path.exists() or super()._write_whole(space, page_hash, data)


@caught_by("KV-403:a_damaged_object_heals_when_it_is_set_unseen", says="cut by its last byte")
class HealsWhatItRead(NeverHeals):
    """A get removes a damaged file that it finds, but a set without a get before changes nothing."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        if data is not None and len(data) != space.stored_nbytes:
            self._removed(space, page_hash)
        return data


@caught_by(
    "KV-403:a_removed_object_heals_when_it_is_set_unseen",
    "KV-502:a_page_deleted_elsewhere_can_be_set_again",
    seen_in="SGLang 0.5.23, file with its metadata cache",
)
class KnowsWhatItSet(Shelf):
    """A handle remembers pages that it has set, and does not write them a second time."""

    _written: set[Path] = own(set)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        path = self._path(space, page_hash)
        if path not in self._written and super()._write_whole(space, page_hash, data):
            self._written.add(path)
        return path in self._written

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._written.discard(self._path(space, page_hash))
        return super()._removed(space, page_hash)


@caught_by(
    "KV-403:a_damaged_object_is_a_miss",
    "KV-403:an_extended_object_is_a_miss",
    seen_in="SGLang 0.5.23, file",
)
class CopiesUnchecked(Shelf):
    """The length of what was read is not checked, so copying it into the page fails."""

    def _is_whole(self, space: KeySpace, data: bytes | None) -> bool:  # noqa: ARG002 - the fault
        return data is not None

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is not None:
            page.copy_from(data)
        return data is not None


@caught_by("KV-403:the_page_store_heals_a_damaged_object", says="makes the whole call fail")
class CorruptIsAnError(Shelf):
    """A damaged page makes the whole call raise `CorruptPage`."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        if data is not None and len(data) != space.stored_nbytes:
            raise CorruptPage("wrong_size", f"page {page_hash} has {len(data)} bytes")
        return data


@caught_by("KV-403:damaged_objects_do_not_break_listings", says="scan raised CorruptPage")
class ListingStumbles(Shelf):
    """A scan ends with an error at the first object that is not as long as a page."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        found = super()._names(space)
        for info in found:
            if info.nbytes != space.stored_nbytes:
                raise CorruptPage("wrong_size", f"page {info.page_hash} has {info.nbytes} bytes")
        return found


@caught_by("KV-403:a_damaged_object_is_listed_as_a_page_or_as_a_fault", says="scan lists a page")
class ListsItsFaults(Shelf):
    """A scan lists every object as a page, though `faults` knows that some have a wrong length."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        return (PageInfo(one.page_hash, space.stored_nbytes) for one in self._names(space))

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        for info in self._names(space):
            if info.nbytes != space.stored_nbytes and info.page_hash in (hashes or info.page_hash):
                yield PageFault(info.page_hash, "wrong_size")


@caught_by("KV-403:a_set_beside_the_healing_of_its_page_stays", says="is False for a page")
class HealsWithoutASecondLook(Shelf):
    """A get that has read a damaged object removes whatever is under its name a moment later."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        if data is not None and len(data) != space.stored_nbytes:
            time.sleep(0.001)
            self._removed(space, page_hash)
        return data


@caught_by("KV-403:clear_counts_a_damaged_object_only_if_it_was_listed", says="counts a page")
class ClearCountsDamage(Shelf):
    """Clear counts all objects that it removes, though a scan lists the whole ones."""

    def clear(self, space: KeySpace) -> int:
        found = self._names(space)
        super().clear(space)
        return len(found)


@caught_by("KV-403:a_fault_behind_many_hashes_is_found", says="not as the last of many hashes")
class FaultsOfTheFirstThousand(Shelf):
    """`faults` looks at no more than a thousand of the hashes that it is given."""

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        for page_hash in (hashes or [])[:1000]:
            if self._path(space, page_hash).exists() and not self._has(space, page_hash):
                yield PageFault(page_hash, "wrong_size")


@caught_by(
    "KV-403:a_damaged_object_goes_with_its_key_space",
    "KV-103:a_key_space_whose_manifest_is_damaged_can_be_removed",
    says="remove_space leaves",
)
class RemovesWholePages(Shelf):
    """`remove_space` removes the pages that a scan lists, and damaged ones stay for good."""

    def remove_space(self, space_id: str) -> int:
        found = [space for space in self._known_spaces() if space.id == space_id]
        return sum(HiCacheStorage.clear(self, space) for space in found)


@caught_by("KV-404:a_flipped_bit_is_a_miss_and_heals", says="not healed by the next save")
class DeleteOnlyHides(Shelf):
    """A delete only marks the page, and a set removes the mark without writing the page."""

    _hidden: set[Path] = own(set)

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._path(space, page_hash) not in self._hidden and super()._has(space, page_hash)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        hidden = self._path(space, page_hash) in self._hidden
        return None if hidden else super()._read(space, page_hash)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._hidden.discard(self._path(space, page_hash))
        return super()._has(space, page_hash) or super()._write_whole(space, page_hash, data)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._hidden.add(self._path(space, page_hash))
        return True


class _Sealed(Shelf):
    """A store of files, each of which ends with a checksum."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        path = self._path(space, page_hash)
        return path.exists() and path.stat().st_size == space.stored_nbytes + _SEAL_NBYTES

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        return None if data is None else self._opened(data)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return super()._write_whole(space, page_hash, data + self._seal(data))

    def _seal(self, data: bytes) -> bytes:
        return xxhash.xxh3_64_digest(data)

    def _opened(self, data: bytes) -> bytes:
        raise NotImplementedError


@caught_by(
    "KV-404:a_flipped_bit_in_what_the_store_adds_does_no_harm", says="makes the whole call fail"
)
class SealUnread(_Sealed):
    """The seal of a page is never checked, but one that can't be decoded makes the call fail."""

    def _opened(self, data: bytes) -> bytes:
        data[-_SEAL_NBYTES:].decode("ascii", errors="strict")
        return data[:-_SEAL_NBYTES]

    def _seal(self, data: bytes) -> bytes:
        return xxhash.xxh32_hexdigest(data).encode()


# --- what a power cut takes ----------------------------------------------------------------------


@caught_by("KV-405:synced_pages_survive_a_power_cut", seen_in="an author's PostgreSQL store")
class SyncsLater(Synced):
    """A set returns before its pages are on disk (synchronous_commit = off). A later call syncs them."""

    _unsynced: set[KeySpace] = own(set)

    def _sync(self, space: KeySpace) -> None:
        self._unsynced.add(space)

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        while self._unsynced:
            super()._sync(self._unsynced.pop())
        return super()._present(space, hashes)


@caught_by("KV-405:synced_pages_survive_a_power_cut")
class SyncsLargePagesOnly(Synced):
    """Small pages stay in a buffer, because syncing each of them would be slow."""

    def _sync(self, space: KeySpace) -> None:
        if space.stored_nbytes >= 4096:
            super()._sync(space)


@caught_by("KV-405:synced_pages_survive_a_power_cut")
class SyncsNoNames(SyncedShelf):
    """The bytes of a page are synced, but not the directory that has its name."""

    def _sync_names(self, directory: Path) -> None:
        del directory


@caught_by("KV-405:synced_pages_survive_a_power_cut")
class SyncsNoBytes(SyncedShelf):
    """The directory is synced, but not the bytes of the page: its file is empty after a power cut."""

    def _sync_file(self, path: Path) -> None:
        if path.parent == self._root:
            super()._sync_file(path)


# --- exists of what is damaged -------------------------------------------------------------------


@caught_by(
    "KV-403:exists_agrees_with_a_get_that_missed_a_damaged_object",
    says="after batch_get has missed it",
    seen_in="an author's PostgreSQL store",
)
class ExistsWithoutALength(Shelf):
    """Exists asks only if there is a file, whatever its length."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._path(space, page_hash).exists()


@caught_by("KV-403:exists_agrees_with_a_get_that_missed_a_damaged_object")
class ExistsFromAnIndex(Shelf):
    """A handle answers exists from what it has set and read, and a get that misses changes nothing."""

    _seen: set[Path] = own(set)

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        path = self._path(space, page_hash)
        if super()._has(space, page_hash):
            self._seen.add(path)
        return path in self._seen

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._seen.add(self._path(space, page_hash))
        return super()._write_whole(space, page_hash, data)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._seen.discard(self._path(space, page_hash))
        return super()._removed(space, page_hash)
