"""The storage of `fsspec`: pages as files of any filesystem that fsspec has."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from hicache_backends.fsspec.layout import (
    manifest_name,
    pack_page,
    page_name,
    unpack_page,
)
from hicache_backends.fsspec.lookup import Lookup, pages_among
from hicache_backends.fsspec.mount import Mount
from hicache_backends.fsspec.protocols import Publishing, protocol_of
from hicache_backends.fsspec.results import ResultMapper, is_timeout
from hicache_backends.fsspec.settings import FsspecSettings
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.backend_support.manifest import SPACE_ID, decode_manifest, encode_manifest
from hicache_storage.errors import ConfigError, StorageTimeout, StorageUnavailable
from hicache_storage.storage import (
    Capabilities,
    Durability,
    HiCacheStorage,
    PageInfo,
    Retention,
    StorageStats,
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
_SILENCE_LIMIT_S = 0.5
"""The time in which a store that is only slow to list answers a short request."""
_MAX_PREFIX_DIGITS = 4
"""The longest prefix of hashes by which a listing is split."""


class FsspecStorage(HiCacheStorage):
    """Pages as files of a filesystem that fsspec has. Its guarantees are those of the filesystem."""

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        enumerable=True,
        parallelism=32,
    )
    usable_after_fork = True

    def __init__(self, settings: FsspecSettings) -> None:
        self._settings = settings
        self._protocol = protocol_of(settings.protocol_name)
        self._publishing = (
            self._protocol.publishing if settings.atomic == "auto" else Publishing(settings.atomic)
        )
        self._parallelism = settings.parallelism or self._protocol.parallelism
        self._counters = Counters()
        self._results = ResultMapper(self._counters, settings.shown_url, settings.timeout_s)
        self._lock = threading.Lock()
        self._root_was_present = False
        """True once a write has succeeded, so that the root exists."""
        self._declare()
        self._mounts = ForkLocal(self._new_mount, close=Mount.close)
        self._lookup = Lookup(self._mounts.get().page_guess_s)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(FsspecSettings.parse("fsspec", config))

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        files = self._mounts.get().files

        async def write_manifest(_: None) -> None:
            if await self._read_manifest(space.id) == space:
                return
            name = manifest_name(space.id)
            if self._publishing is Publishing.DIRECT:  # it overwrites nothing
                with suppress(FileNotFoundError):
                    await files.remove(name)
            await files.write(name, encode_manifest(space))

        self._run(write_manifest, self._deadline())
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
        names = [page_name(space, page_hash) for page_hash in hashes]
        deadline = self._deadline()
        results = self._each(self._mounts.get().files.read, names, deadline)
        self._results.check_any_answered(results)
        # The caller's thread fills the pages, so that a late read touches none of them.
        verdicts = [
            result.value is not None and self._copy(result.value, space, page_hash, page, deadline)
            for result, page_hash, page in zip(results, hashes, pages, strict=True)
        ]
        return self._check_root(verdicts, deadline)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        files = self._mounts.get().files
        named = [
            (page_name(space, page_hash), pack_page(page, space.id, page_hash))
            for page_hash, page in zip(hashes, pages, strict=True)
        ]

        async def write(item: tuple[str, bytes]) -> None:
            await files.write(*item)

        verdicts = self._results.stored(self._each(write, named, self._deadline()))
        self._root_was_present = self._root_was_present or True in verdicts
        return verdicts

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        return self._results.removed(self._remove(space, hashes, self._deadline()))

    def spaces(self) -> Iterator[KeySpace]:
        self.ensure_open()
        deadline = self._deadline()
        names = [entry.name for entry in self._entries("", "", deadline)]
        space_ids = [name for name in names if SPACE_ID.fullmatch(name)]
        results = self._each(self._read_manifest, space_ids, deadline)
        self._results.check_all_succeeded(results)
        return iter([result.value for result in results if result.value is not None])

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        names = [name for part in self._list(space) for name, is_whole in part if is_whole]
        return iter([PageInfo(name, space.stored_nbytes) for name in names])

    def clear(self, space: KeySpace) -> int:
        self.ensure_open()
        removed, errors = 0, list[Exception]()
        try:
            for part in self._list(space):
                for start in range(0, len(part), _CLEARED_AT_ONCE):
                    removed += self._clear(space, part[start : start + _CLEARED_AT_ONCE], errors)
                    if any(map(is_timeout, errors)):
                        raise self._results.failure(errors)
        except (StorageTimeout, StorageUnavailable) as error:
            raise type(error)(f"{error}; {removed} pages were cleared: call it again") from None
        if errors:
            reason = self._results.failure(errors)
            raise type(reason)(f"{reason}; {len(errors)} pages are left, {removed} were cleared")
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
        except OSError as error:  # no descriptor is left
            raise self._results.failure([error]) from None
        try:
            mount.connect(self._settings.timeout_s)
        except FileNotFoundError:
            mount.close()
            raise ConfigError(f"fsspec: url: {shown_url} is in no bucket: make it first") from None
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
        """Return the deadline of a call that begins now."""
        return Deadline(self._settings.timeout_s)

    def _each(
        self,
        operation: Callable[[Item], Coroutine[Any, Any, T]],
        items: Sequence[Item],
        deadline: Deadline,
    ) -> list[Result[T]]:
        return self._mounts.get().each(operation, items, deadline) if items else []

    def _run(self, operation: Callable[[None], Coroutine[Any, Any, T]], deadline: Deadline) -> T:
        """Return the value of one operation. Raise if it fails."""
        (result,) = self._each(operation, [None], deadline)
        if result.error is not None:
            raise self._results.failure([result.error])
        return cast("T", result.value)

    def _remove(
        self, space: KeySpace, hashes: Sequence[str], deadline: Deadline
    ) -> list[Result[None]]:
        names = [page_name(space, page_hash) for page_hash in hashes]
        return self._each(self._mounts.get().files.remove, names, deadline)

    def _entries(self, directory: str, prefix: str, deadline: Deadline) -> list[Entry]:
        entries = self._run(lambda _: self._mounts.get().files.entries(directory, prefix), deadline)
        self._check_root([bool(entries)], deadline)
        return entries

    def _list(self, space: KeySpace, prefix: str = "") -> Iterator[list[tuple[str, bool]]]:
        """Yield every file that is named like a page, with True if it has the size of a page.

        A listing that exceeds the deadline is split by the first digits of the hashes, if the filesystem
        supports that. Each part has a deadline of its own. A silent store is not asked for parts.
        """
        try:
            entries = self._entries(space.id, prefix, self._deadline())
        except StorageTimeout:
            is_unsplittable = not self._protocol.lists_by_prefix
            if is_unsplittable or len(prefix) == _MAX_PREFIX_DIGITS or self._is_silent():
                raise
            for digit in "0123456789abcdef":
                yield from self._list(space, prefix + digit)
        else:
            yield pages_among(entries, space)

    def _is_silent(self) -> bool:
        """Return True if the store does not answer a short request either."""
        deadline = Deadline(_SILENCE_LIMIT_S)
        (result,) = self._each(self._mounts.get().files.is_root_missing, [None], deadline)
        return result.error is not None and is_timeout(result.error)

    def _clear(
        self, space: KeySpace, found: Sequence[tuple[str, bool]], errors: list[Exception]
    ) -> int:
        """Remove some pages within one deadline. Append the error of each page that is left.

        Return the number of removed pages, without damaged ones.
        """
        results = self._remove(space, [name for name, _ in found], self._deadline())
        removed = self._results.removed(results)
        errors.extend(
            result.error
            for result, is_removed in zip(results, removed, strict=True)
            if result.error is not None and not is_removed
        )
        return sum(done and is_whole for done, (_, is_whole) in zip(removed, found, strict=True))

    def _check_root(self, verdicts: list[bool], deadline: Deadline) -> list[bool]:
        """Return the verdicts. If nothing was found, check that the root still exists.

        Raises:
            StorageUnavailable: The bucket or the directory is gone, so nothing is known of the pages.
        """
        if self._root_was_present and verdicts and not any(verdicts):
            # The credentials may allow pages but not the bucket itself. Such an error is no answer.
            (missing,) = self._each(self._mounts.get().files.is_root_missing, [None], deadline)
            if missing.value:
                raise StorageUnavailable(
                    f"fsspec: {self._settings.shown_url} is gone: make it again"
                )
        return verdicts

    async def _read_manifest(self, space_id: str) -> KeySpace | None:
        """Return the key space that a manifest describes, or None if there is no valid manifest."""
        try:
            data = await self._mounts.get().files.read(manifest_name(space_id))
        except FileNotFoundError:
            return None
        return decode_manifest(data, space_id=space_id)

    def _copy(
        self, data: bytes, space: KeySpace, page_hash: str, page: Page, deadline: Deadline
    ) -> bool:
        """Copy a page out of its file. Remove a wrong file that no set would overwrite."""
        payload = unpack_page(data, space.id, page_hash)
        if payload is not None and payload.nbytes == page.nbytes:
            page.copy_from(payload)
            return True
        self._counters.add("wrong_pages")
        if self._publishing is Publishing.DIRECT:
            self._remove(space, [page_hash], deadline)
        return False
