"""`fsspec` as a HiCacheStorage: pages as files in any filesystem that fsspec supports."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from hicache_backends.fsspec.layout import (
    MANIFEST,
    WRITING,
    file_nbytes,
    manifest_name,
    pack_page,
    page_name,
    unpack_page,
)
from hicache_backends.fsspec.lookup import Lookup, pages_among
from hicache_backends.fsspec.mount import Mount
from hicache_backends.fsspec.protocols import Publishing, protocol_of
from hicache_backends.fsspec.results import MISSING, ResultMapper, is_missing, is_outage, is_timeout
from hicache_backends.fsspec.settings import FsspecSettings
from hicache_storage.backend_support.answers import answers_of
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.backend_support.manifest import (
    PAGE_HASH,
    SPACE_ID,
    decode_manifest,
    encode_manifest,
    unreadable_space,
)
from hicache_storage.backend_support.registrations import Registrations
from hicache_storage.errors import ConfigError, NoSuchStore, StorageTimeout, StorageUnavailable
from hicache_storage.settings import counted
from hicache_storage.storage import (
    Capabilities,
    Durability,
    HiCacheStorage,
    PageFault,
    PageInfo,
    Retention,
    StorageStats,
    UnreadableSpace,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from hicache_backends.fsspec.executors import Result
    from hicache_backends.fsspec.files import Entry
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

T = TypeVar("T")
Item = TypeVar("Item")

_CLEARED_AT_ONCE = 1000
_READ_AT_ONCE_NBYTES = 32 << 20
_NAMED_FOREIGN = 3
_SILENCE_LIMIT_S = 0.5
"""A store that is merely slow to list answers a short request within this time."""
_MAX_PREFIX_DIGITS = 4
"""The longest prefix of hashes that is used to split a listing."""


class FsspecStorage(HiCacheStorage):
    """A storage of pages as files in a filesystem that fsspec supports.

    It guarantees what that filesystem guarantees.
    """

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        enumerable=True,
        parallelism=32,
    )
    usable_after_fork = True

    def __init__(self, settings: FsspecSettings, *, read_only: bool = False) -> None:
        self._settings = settings
        self._read_only = read_only
        self._protocol = protocol_of(settings.protocol_name)
        self._publishing = (
            self._protocol.publishing if settings.atomic == "auto" else Publishing(settings.atomic)
        )
        self._parallelism = settings.parallelism or self._protocol.parallelism
        self._counters = Counters()
        self._registrations = Registrations()
        self._results = ResultMapper(self._counters, settings.shown_url, settings.timeout_s)
        self._lock = threading.Lock()
        self._root_was_present = False
        """True once a write has succeeded, which proves that the root exists."""
        self._declare()
        self._mounts = ForkLocal(self._new_mount, close=Mount.close)
        self._lookup = Lookup(self._mounts.get().page_guess_s)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(FsspecSettings.parse("fsspec", config))

    @classmethod
    def open_read_only(cls, config: Mapping[str, Any]) -> Self:
        """Open an existing store. Nothing is written or removed, not even files of dead writers.

        Raises:
            ConfigError: As in `from_config`, or the directory contains no key space.
        """
        storage = cls(FsspecSettings.parse("fsspec", config), read_only=True)
        try:
            storage._check_there()
        except BaseException:
            storage.close()
            raise
        return storage

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._run(lambda _: self._register(space), self._deadline())
        self._root_was_present = True

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        deadline = self._deadline()
        results = self._lookup.exists(self._mounts.get(), space, hashes, deadline)
        return self._check_root(self._results.found(results), deadline)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        names = [page_name(space.id, page_hash) for page_hash in hashes]
        deadline = self._deadline()
        results = self._each(self._mounts.get().files.read, names, deadline)
        self._results.check_any_answered(results)
        # The caller's thread fills the pages, so that a late read touches none of them.
        verdicts = [
            None
            if is_outage(result.error)
            else result.value is not None
            and self._copy(result.value, space, page_hash, page, deadline)
            for result, page_hash, page in zip(results, hashes, pages, strict=True)
        ]
        return self._check_root(answers_of(verdicts), deadline)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        files = self._mounts.get().files
        named: list[tuple[str, bytes] | None] = [
            (page_name(space.id, page_hash), pack_page(page, space.id, page_hash))
            for page_hash, page in zip(hashes, pages, strict=True)
        ]
        if self._registrations.is_due(space):
            named.append(None)

        async def write(item: tuple[str, bytes] | None) -> None:
            if item is None:  # the manifest's write does not affect the results of pages
                await self._register(space)
            elif not await files.write(*item):  # the manifest was lost, too
                await files.write(manifest_name(space.id), encode_manifest(space))

        results = self._each(write, named, self._deadline())
        verdicts = self._results.stored(results[: len(hashes)])
        self._root_was_present = self._root_was_present or True in verdicts
        return verdicts

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        return self._results.removed(self._remove(space.id, hashes, self._deadline()))

    def spaces(self) -> Iterator[KeySpace]:
        self.ensure_open()
        found = [decode_manifest(data, space_id=name) for name, data in self._manifests().items()]
        return iter([space for space in found if space is not None])

    def unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        self.ensure_open()
        found = [unreadable_space(*manifest) for manifest in self._manifests().items()]
        return iter(
            [one for one in found if one and self._entries(one.space_id, "", self._deadline())]
        )

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        nbytes = file_nbytes(space)
        whole = [page for part in self._list(space.id) for page in part if page.nbytes == nbytes]
        return iter([PageInfo(page.name, space.stored_nbytes) for page in whole])

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        self.ensure_open()
        if hashes is not None:
            return self._faults_among(space, hashes)
        listed = [page for part in self._list(space.id) for page in part]
        return iter(
            [fault for page in listed for fault in _size_fault(page.name, page.nbytes, space)]
        )

    def clear(self, space: KeySpace) -> int:
        self.ensure_open()
        return self._clear(space.id, file_nbytes(space))

    def remove_space(self, space_id: str) -> int:
        """Remove a key space.

        Files with other names stay, and so does the directory that contains them.
        """
        self.ensure_open()
        if not SPACE_ID.fullmatch(space_id):
            return 0
        removed = self._clear(space_id, None)
        if not pages_among(self._entries(space_id, "", self._deadline())):
            self._registrations.forget(space_id)
            self._remove_manifest(space_id)
        return removed

    def stats(self) -> StorageStats:
        self.ensure_open()
        return StorageStats(counters=self._counters.snapshot())

    def close(self) -> None:
        with self._lock:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            self._mounts.close()

    # --- the mount -----------------------------------------------------------------------------------

    def _declare(self) -> None:
        is_direct = self._publishing is Publishing.DIRECT
        self.narrow(
            retention=Retention.BEST_EFFORT if is_direct else Retention.UNTIL_DELETED,
            overwrites=not is_direct,
            durability=self._protocol.durability,
            shared=self._protocol.shared,
            parallelism=self._parallelism,
        )

    def _new_mount(self) -> Mount:
        """Return a new mount whose filesystem has answered."""
        shown_url = self._settings.shown_url
        try:
            mount = Mount(
                self._settings.url.get_secret_value(),
                self._settings.storage_options.get_secret_value(),
                protocol=self._protocol,
                publishing=self._publishing,
                parallelism=self._parallelism,
            )
        except OSError as error:  # no file descriptors are left
            raise self._results.failure([error]) from None
        try:
            mount.connect(self._settings.timeout_s, collect=not self._read_only)
        except FileNotFoundError:
            mount.close()
            raise ConfigError(
                f"fsspec: url: the bucket of {shown_url}does not exist: create it first"
            ) from None
        except (TypeError, ValueError, ImportError) as error:  # their text may quote the options
            mount.close()
            raise ConfigError(
                f"fsspec: storage_options: {shown_url} cannot be opened with them"
                f" ({type(error).__name__})"
            ) from None
        except Exception as error:  # noqa: BLE001 - a client library may raise anything
            mount.close()
            raise self._results.failure([error]) from None
        return mount

    # --- parts ---------------------------------------------------------------------------------------

    def _deadline(self) -> Deadline:
        return Deadline(self._settings.timeout_s)

    def _each(
        self,
        operation: Callable[[Item], Coroutine[Any, Any, T]],
        items: Sequence[Item],
        deadline: Deadline,
    ) -> list[Result[T]]:
        return self._mounts.get().each(operation, items, deadline) if items else []

    def _run(self, operation: Callable[[None], Coroutine[Any, Any, T]], deadline: Deadline) -> T:
        """Run one operation and return its value. Raise if it fails."""
        (result,) = self._each(operation, [None], deadline)
        if result.error is not None:
            raise self._results.failure([result.error])
        return cast("T", result.value)

    def _remove(
        self, space_id: str, hashes: Sequence[str], deadline: Deadline
    ) -> list[Result[None]]:
        names = [page_name(space_id, page_hash) for page_hash in hashes]
        return self._each(self._mounts.get().files.remove, names, deadline)

    def _entries(self, directory: str, prefix: str, deadline: Deadline) -> list[Entry]:
        entries = self._run(lambda _: self._mounts.get().files.entries(directory, prefix), deadline)
        self._check_root([bool(entries)], deadline)
        return entries

    def _list(self, space_id: str, prefix: str = "") -> Iterator[list[Entry]]:
        """Yield every entry that is named like a page, of any size.

        If a listing exceeds the deadline, and the filesystem supports it, split the listing by the
        first digits of the hashes. Each part has its own deadline. Do not ask a silent store for
        parts.
        """
        try:
            entries = self._entries(space_id, prefix, self._deadline())
        except StorageTimeout:
            is_unsplittable = not self._protocol.lists_by_prefix
            if is_unsplittable or len(prefix) == _MAX_PREFIX_DIGITS or self._is_silent():
                raise
            for digit in "0123456789abcdef":
                yield from self._list(space_id, prefix + digit)
        else:
            yield pages_among(entries)

    def _is_silent(self) -> bool:
        """Return True if the store does not answer even a short request."""
        deadline = Deadline(_SILENCE_LIMIT_S)
        (result,) = self._each(self._mounts.get().files.is_root_missing, [None], deadline)
        return result.error is not None and is_timeout(result.error)

    def _clear(self, space_id: str, nbytes: int | None) -> int:
        """Remove all pages. Return how many of them had `nbytes` bytes. If `nbytes` is None, count all.

        Raises:
            StorageTimeout, StorageUnavailable: Pages are left. The message says how many.
        """
        removed, errors = 0, list[Exception]()
        try:
            for part in self._list(space_id):
                for start in range(0, len(part), _CLEARED_AT_ONCE):
                    pages = part[start : start + _CLEARED_AT_ONCE]
                    removed += self._clear_step(space_id, pages, nbytes, errors)
                    if any(map(is_timeout, errors)):
                        raise self._results.failure(errors)
        except (StorageTimeout, StorageUnavailable) as error:
            raise type(error)(
                f"{error}; {counted(removed, 'page')} cleared so far: clear it again"
            ) from None
        if errors:
            reason = self._results.failure(errors)
            raise type(reason)(
                f"{reason}; {counted(removed, 'page')} cleared, {len(errors):,} left"
            )
        return removed

    def _clear_step(
        self, space_id: str, pages: Sequence[Entry], nbytes: int | None, errors: list[Exception]
    ) -> int:
        """Remove some pages within one deadline. Append the error of each page that is left.

        Return how many removed pages had `nbytes` bytes. If `nbytes` is None, count all.
        """
        results = self._remove(space_id, [page.name for page in pages], self._deadline())
        removed = self._results.removed(results)
        errors.extend(
            result.error
            for result, is_removed in zip(results, removed, strict=True)
            if result.error is not None and not is_removed
        )
        return sum(
            done and nbytes in (None, page.nbytes)
            for done, page in zip(removed, pages, strict=True)
        )

    def _remove_manifest(self, space_id: str) -> None:
        """Remove the manifest and directory of a key space, unless somebody is writing to it.

        Raises:
            StorageUnavailable: Files with other names are left in the directory.
        """
        files, name = self._mounts.get().files, manifest_name(space_id)

        async def remove(_: None) -> bytes | None:
            try:
                manifest = await files.read(name)
                await files.remove(name)
            except FileNotFoundError:
                manifest = None
            await files.remove_directory(space_id)
            return manifest

        manifest = self._run(remove, self._deadline())
        left = [entry.name for entry in self._entries(space_id, "", self._deadline())]
        if any(map(PAGE_HASH.fullmatch, left)):  # pages were written in the meantime
            if manifest is not None and MANIFEST not in left:
                self._run(lambda _: files.write(name, manifest), self._deadline())
        elif left and left != [MANIFEST]:
            shown = ", ".join(map(repr, sorted(left)[:_NAMED_FOREIGN]))
            raise StorageUnavailable(
                f"fsspec: {space_id} of {self._settings.shown_url} also holds files of other programs"
                f" ({shown}), which stay: move them"
            )

    def _check_there(self) -> None:
        names = [entry.name for entry in self._entries("", "", self._deadline())]
        if not any(name == WRITING or SPACE_ID.fullmatch(name) for name in names):
            no_store = ConfigError if names else NoSuchStore  # no store is made beside other files
            raise no_store(
                f"fsspec: url: there is no store at {self._settings.shown_url}: correct the"
                " URL; an engine creates a store when it first writes"
            )
        self._root_was_present = True

    def _check_root(self, verdicts: list[bool], deadline: Deadline) -> list[bool]:
        """Return the verdicts. If nothing was found, check that the root still exists.

        Raises:
            StorageUnavailable: The bucket or the directory is gone, so nothing is known about the pages.
        """
        if self._root_was_present and verdicts and not any(verdicts):
            # The credentials may allow access to pages but not to the bucket. Then an error proves
            # nothing.
            (missing,) = self._each(self._mounts.get().files.is_root_missing, [None], deadline)
            if missing.value:
                raise StorageUnavailable(
                    f"fsspec: {self._settings.shown_url}is gone: create it again"
                )
        return verdicts

    def _manifests(self) -> dict[str, bytes | None]:
        """Return the manifests by directory. None: there is no manifest."""
        deadline = self._deadline()
        space_ids = [
            entry.name
            for entry in self._entries("", "", deadline)
            if not entry.is_file and SPACE_ID.fullmatch(entry.name)
        ]
        results = self._each(self._read_manifest, space_ids, deadline)
        self._results.check_all_succeeded(results)
        return {space_id: result.value for space_id, result in zip(space_ids, results, strict=True)}

    async def _register(self, space: KeySpace) -> None:
        """Write the manifest, unless it is already there."""
        if decode_manifest(await self._read_manifest(space.id)) != space:
            files, name = self._mounts.get().files, manifest_name(space.id)
            if self._publishing is Publishing.DIRECT:  # such a write overwrites nothing
                with suppress(FileNotFoundError):
                    await files.remove(name)
            await files.write(name, encode_manifest(space))
        self._registrations.note(space)

    async def _read_manifest(self, space_id: str) -> bytes | None:
        """Return a manifest, or None if there is none."""
        try:
            return await self._mounts.get().files.read(manifest_name(space_id))
        except MISSING:
            return None

    def _faults_among(self, space: KeySpace, hashes: Sequence[str]) -> Iterator[PageFault]:
        most = max(1, _READ_AT_ONCE_NBYTES // file_nbytes(space))
        for start in range(0, len(hashes), most):
            part = hashes[start : start + most]
            names = [page_name(space.id, page_hash) for page_hash in part]
            results = self._each(self._mounts.get().files.read, names, self._deadline())
            self._results.check_all_succeeded(
                [one for one in results if one.error is None or not is_missing(one.error)]
            )
            for page_hash, result in zip(part, results, strict=True):
                if result.value is not None:
                    yield from _fault(page_hash, result.value, space)

    def _copy(
        self, data: bytes, space: KeySpace, page_hash: str, page: Page, deadline: Deadline
    ) -> bool:
        """Copy a page out of its file.

        If the file is wrong and no set would overwrite it, remove it.
        """
        payload = unpack_page(data, space.id, page_hash)
        if payload is not None and payload.nbytes == page.nbytes:
            page.copy_from(payload)
            return True
        self._counters.add("wrong_pages")
        if self._publishing is Publishing.DIRECT and not self._read_only:
            self._remove(space.id, [page_hash], deadline)
        return False


def _fault(page_hash: str, data: bytes, space: KeySpace) -> Iterator[PageFault]:
    """Yield what is wrong with a page's file, if anything."""
    if len(data) != file_nbytes(space):
        yield from _size_fault(page_hash, len(data), space)
    elif unpack_page(data, space.id, page_hash) is None:
        yield PageFault(page_hash, "corrupt", "its trailer does not match its bytes and its name")


def _size_fault(page_hash: str, nbytes: int, space: KeySpace) -> Iterator[PageFault]:
    if nbytes != file_nbytes(space):
        detail = f"its file is {nbytes:,} bytes long instead of {file_nbytes(space):,}"
        yield PageFault(page_hash, "wrong_size", detail)
