"""`fsspec`: pages as files of any filesystem that fsspec has, with the guarantees that this one has.

What is known of each is in `_protocols`, the trust in what is read in `_page_object`.
"""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

from pydantic import Secret, field_validator

from hicache_backends.fsspec.errors import says_late
from hicache_backends.fsspec.lookup import Lookup
from hicache_backends.fsspec.mount import Mount, protocol_name, without_secrets
from hicache_backends.fsspec.page_object import TRAILER_NBYTES, packed, unpacked
from hicache_backends.fsspec.protocols import Publishing, protocol_of
from hicache_backends.fsspec.results import ResultMapper
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.errors import ConfigError, StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.settings import Field, PositiveSeconds, SecretStr, Settings
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

    from hicache_backends.fsspec.executors import Answer
    from hicache_backends.fsspec.files import Entry
    from hicache_storage.page import Page

__all__ = ["FsspecSettings", "FsspecStorage"]

T = TypeVar("T")
Item = TypeVar("Item")

_MANIFEST = "manifest.json"
_SPACE_NAME = re.compile(r"[0-9a-f]{32}")
_CLEARED_AT_ONCE = 1000
_GLANCE_S = 0.5
"""Within which a store that is merely slow to list answers a short question."""
_MOST_CUTS = 4
"""Digits of a hash that one piece of a listing has in common at most."""
_PAGE_NAME = re.compile(r"[0-9a-f]{32,128}")


class FsspecSettings(Settings):
    """The config of `fsspec`."""

    url: SecretStr = Field(min_length=1)
    """A directory, as fsspec names it: `s3://bucket/kv`. Everything that shares it shares its pages."""
    storage_options: Secret[dict[str, Any]] = Field(default=Secret({}))
    """What fsspec hands to the filesystem: keys, endpoints, ... Never shown."""
    atomic: Literal["auto", "put", "rename", "none"] = "auto"
    """How a page is published; "auto": as this filesystem is known to be able to."""
    parallelism: int | None = Field(default=None, ge=1, le=256)
    """Concurrent requests; None: what suits the filesystem."""
    timeout_s: PositiveSeconds = 30.0
    """The deadline of a call, everything included."""

    @field_validator("url")
    @classmethod
    def _one_filesystem(cls, url: SecretStr) -> SecretStr:
        protocol_name(url.get_secret_value())
        return url


class FsspecStorage(HiCacheStorage):
    """Pages as files of a filesystem that fsspec has. What it promises is the filesystem's."""

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        enumerable=True,
        parallelism=32,
    )
    usable_after_fork = True

    def __init__(self, settings: FsspecSettings) -> None:
        url = settings.url.get_secret_value()
        self._settings = settings
        self._shown_url = without_secrets(url)
        self._protocol = protocol_of(protocol_name(url))
        self._publishing = (
            self._protocol.publishing if settings.atomic == "auto" else Publishing(settings.atomic)
        )
        self._parallelism = settings.parallelism or self._protocol.parallelism
        self._counters = Counters()
        self._judge = ResultMapper(self._counters, self._shown_url, settings.timeout_s)
        self._lock = threading.Lock()
        self._has_stored = False
        """The place is there, as somebody has seen."""
        self._declare()
        self._mounts = ForkLocal(self._mounted, close=Mount.close)
        self._lookup = Lookup(self._mounts.get().page_guess_s)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(FsspecSettings.parse("fsspec", config))

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        name, files = f"{space.id}/{_MANIFEST}", self._mounts.get().files

        async def make(_: None) -> None:
            if await self._manifest(name) == space:
                return
            if self._publishing is Publishing.DIRECT:  # which overwrites nothing
                with suppress(FileNotFoundError):
                    await files.remove(name)
            await files.write(name, json.dumps(space.manifest()).encode())

        self._only(make, self._deadline())
        self._has_stored = True

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        deadline = self._deadline()
        there = self._listed(space, self._lookup.budget_s(space.id, len(hashes)), deadline)
        if there is not None:
            return self._unless_gone([page_hash in there for page_hash in hashes], deadline)
        files, nbytes = self._mounts.get().files, _object_nbytes(space)

        async def look(page_hash: str) -> bool:
            return await files.size(_name(space, page_hash)) == nbytes

        began_s = time.monotonic()
        verdicts = self._judge.found(self._each(look, hashes, deadline))
        self._lookup.note_pages(len(hashes), time.monotonic() - began_s)
        return self._unless_gone(verdicts, deadline)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        names = [_name(space, page_hash) for page_hash in hashes]
        deadline = self._deadline()
        answers = self._each(self._mounts.get().files.read, names, deadline)
        self._judge.must_have_answered(answers)
        # Pages are filled here, by the caller's thread: work that is late touches none of them.
        verdicts = [
            answer.value is not None and self._take(answer.value, space, page_hash, page, deadline)
            for answer, page_hash, page in zip(answers, hashes, pages, strict=True)
        ]
        return self._unless_gone(verdicts, deadline)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        files = self._mounts.get().files
        objects = [
            (_name(space, page_hash), packed(page, space.id, page_hash))
            for page_hash, page in zip(hashes, pages, strict=True)
        ]

        async def write(item: tuple[str, bytes]) -> None:
            await files.write(*item)

        verdicts = self._judge.stored(self._each(write, objects, self._deadline()))
        self._has_stored = self._has_stored or True in verdicts
        return verdicts

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        names = [_name(space, page_hash) for page_hash in hashes]
        answers = self._each(self._mounts.get().files.remove, names, self._deadline())
        return self._judge.removed(answers)

    def spaces(self) -> Iterator[KeySpace]:
        self.ensure_open()
        deadline = self._deadline()
        names = [
            f"{entry.name}/{_MANIFEST}"
            for entry in self._entries("", "", deadline)
            if _SPACE_NAME.fullmatch(entry.name)
        ]
        answers = self._each(self._manifest, names, deadline)
        self._judge.must_all_have_answered(answers)
        return iter([answer.value for answer in answers if answer.value is not None])

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        whole = [name for found in self._parts(space) for name, whole in found if whole]
        return iter([PageInfo(name, space.stored_nbytes) for name in whole])

    def clear(self, space: KeySpace) -> int:
        self.ensure_open()
        removed, kept = 0, list[Exception]()
        try:
            for found in self._parts(space):
                for step in _steps(found):
                    removed += self._cleared(space, step, kept)
                    if any(says_late(error) for error in kept):
                        raise self._judge.failure(kept)
        except (StorageTimeout, StorageUnavailable) as error:
            raise type(error)(f"{error}; {removed} pages were cleared: call it again") from None
        if kept:
            reason = self._judge.failure(kept)
            raise type(reason)(f"{reason}; {len(kept)} pages are left, {removed} were cleared")
        return removed

    def stats(self) -> StorageStats:
        self.ensure_open()
        return StorageStats(counters=self._counters.snapshot())

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._mounts.close()

    # --- the mount -----------------------------------------------------------------------------------

    def _declare(self) -> None:
        direct = self._publishing is Publishing.DIRECT
        self.narrow(
            retention=Retention.BEST_EFFORT if direct else Retention.UNTIL_DELETED,
            overwrites=not direct,
            durability=self._protocol.durability,
            shared=self._protocol.shared,
            parallelism=self._parallelism,
        )

    def _mounted(self) -> Mount:
        """A new mount, whose filesystem has answered."""
        try:
            mount = Mount(
                self._settings.url.get_secret_value(),
                self._settings.storage_options.get_secret_value(),
                protocol=self._protocol,
                publishing=self._publishing,
                parallelism=self._parallelism,
            )
        except OSError as error:  # no descriptor is left
            raise self._judge.failure([error]) from None
        try:
            mount.connect(self._settings.timeout_s)
        except FileNotFoundError:
            mount.close()
            raise ConfigError(
                f"fsspec: url: {self._shown_url} is in no bucket: make it first"
            ) from None
        except (TypeError, ValueError, ImportError) as error:  # their text may quote the options
            mount.close()
            raise ConfigError(
                f"fsspec: storage_options: {self._shown_url} cannot be opened with them"
                f" ({type(error).__name__})"
            ) from None
        except Exception as error:  # noqa: BLE001 - fifty libraries, whose text may hold a secret
            mount.close()
            raise self._judge.failure([error]) from None
        return mount

    # --- parts ---------------------------------------------------------------------------------------

    def _deadline(self) -> Deadline:
        """The deadline of a call that begins now."""
        return Deadline(self._settings.timeout_s)

    def _each(
        self,
        operation: Callable[[Item], Coroutine[Any, Any, T]],
        items: Sequence[Item],
        deadline: Deadline,
    ) -> list[Answer[T]]:
        return self._mounts.get().each(operation, items, deadline) if items else []

    def _only(self, operation: Callable[[None], Coroutine[Any, Any, T]], deadline: Deadline) -> T:
        """The value of one operation that must succeed."""
        (answer,) = self._each(operation, [None], deadline)
        if answer.error is not None:
            raise self._judge.failure([answer.error])
        return cast("T", answer.value)

    def _entries(self, directory: str, prefix: str, deadline: Deadline) -> list[Entry]:
        found = self._only(lambda _: self._mounts.get().files.entries(directory, prefix), deadline)
        self._unless_gone([bool(found)], deadline)
        return found

    def _parts(self, space: KeySpace, prefix: str = "") -> Iterator[list[tuple[str, bool]]]:
        """Every file that is named like a page, and whether it has a page's size.

        A listing that takes longer than a call may is cut by the first digits of the hashes, where the
        filesystem can: each piece is a call of its own. A store that is silent is not asked for pieces.
        """
        try:
            entries = self._entries(space.id, prefix, self._deadline())
        except StorageTimeout:
            if not self._protocol.lists_by_prefix or len(prefix) == _MOST_CUTS or self._is_silent():
                raise
            for digit in "0123456789abcdef":
                yield from self._parts(space, prefix + digit)
        else:
            yield _pages_among(entries, space)

    def _is_silent(self) -> bool:
        """Whether the store does not even answer a short question."""
        (answer,) = self._each(self._mounts.get().files.is_gone, [None], Deadline(_GLANCE_S))
        return answer.error is not None and says_late(answer.error)

    def _cleared(
        self, space: KeySpace, step: Sequence[tuple[str, bool]], kept: list[Exception]
    ) -> int:
        """Remove some pages, which is a call of its own; add to `kept` why the others are left."""
        names = [_name(space, name) for name, _ in step]
        answers = self._each(self._mounts.get().files.remove, names, self._deadline())
        gone = self._judge.removed(answers)
        kept.extend(
            answer.error
            for answer, is_gone in zip(answers, gone, strict=True)
            if answer.error is not None and not is_gone
        )
        return sum(is_gone and whole for is_gone, (_, whole) in zip(gone, step, strict=True))

    def _unless_gone(self, verdicts: list[bool], deadline: Deadline) -> list[bool]:
        """Return the verdicts. Where nothing at all is there that was, see that the place still is.

        Raises:
            StorageUnavailable: The bucket or the directory is gone: that is no answer for a page.
        """
        if self._has_stored and verdicts and not any(verdicts):
            # Who may read and list pages may not be let to ask for the place: that is no answer.
            (gone,) = self._each(self._mounts.get().files.is_gone, [None], deadline)
            if gone.value:
                raise StorageUnavailable(f"fsspec: {self._shown_url} is gone: make it again")
        return verdicts

    def _listed(self, space: KeySpace, budget_s: float, deadline: Deadline) -> set[str] | None:
        """The pages of `space`, if listing them is quicker than `budget_s`."""
        if not budget_s:
            return None
        began_s = time.monotonic()
        mount = self._mounts.get()
        answer = mount.attempt(mount.files.entries, space.id, budget_s, deadline)
        elapsed_s = time.monotonic() - began_s
        self._lookup.note_listing(space.id, elapsed_s, done=answer.error is None)
        if answer.value is None:
            return None
        return {name for name, whole in _pages_among(answer.value, space) if whole}

    async def _manifest(self, name: str) -> KeySpace | None:
        """The key space that a manifest describes; None where there is none, or it is no manifest."""
        try:
            space = KeySpace.from_manifest(json.loads(await self._mounts.get().files.read(name)))
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        return space if name == f"{space.id}/{_MANIFEST}" else None

    def _take(
        self, data: bytes, space: KeySpace, page_hash: str, page: Page, deadline: Deadline
    ) -> bool:
        """Copy a page out of its object. What is never overwritten has to go if it is wrong."""
        payload = unpacked(data, space.id, page_hash)
        if payload is not None and payload.nbytes == page.nbytes:
            page.copy_from(payload)
            return True
        self._counters.add("wrong_pages")
        if self._publishing is Publishing.DIRECT:
            self._each(self._mounts.get().files.remove, [_name(space, page_hash)], deadline)
        return False


def _steps(pages: list[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """So many pages as `timeout_s` is enough for."""
    for start in range(0, len(pages), _CLEARED_AT_ONCE):
        yield pages[start : start + _CLEARED_AT_ONCE]


def _pages_among(entries: Sequence[Entry], space: KeySpace) -> list[tuple[str, bool]]:
    nbytes = _object_nbytes(space)
    return [
        (entry.name, entry.nbytes == nbytes)
        for entry in entries
        if _PAGE_NAME.fullmatch(entry.name)
    ]


def _name(space: KeySpace, page_hash: str) -> str:
    return f"{space.id}/{page_hash}"


def _object_nbytes(space: KeySpace) -> int:
    return space.stored_nbytes + TRAILER_NBYTES
