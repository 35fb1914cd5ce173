"""`fsspec`: pages as files of any filesystem that fsspec has, with the guarantees that this one has.

What is known of each is in `_protocols`; the trust in what is read is in `_page_object`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

from pydantic import Secret, field_validator

from hicache_backends.fsspec._errors import failure, says_full, says_late, says_missing
from hicache_backends.fsspec._lookup import Lookup
from hicache_backends.fsspec._mount import Mount, protocol_name, without_secrets
from hicache_backends.fsspec._page_object import TRAILER_NBYTES, packed, unpacked
from hicache_backends.fsspec._protocols import Publishing, protocol_of
from hicache_storage.counters import Counters
from hicache_storage.errors import ConfigError
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

    from hicache_backends.fsspec._files import Entry
    from hicache_backends.fsspec._lanes import Answer
    from hicache_storage.errors import HiCacheError
    from hicache_storage.page import Page

__all__ = ["FsspecSettings", "FsspecStorage"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item")

_MANIFEST = "manifest.json"
_SPACE_NAME = re.compile(r"[0-9a-f]{32}")
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
        parallelism=16,
    )

    def __init__(self, settings: FsspecSettings) -> None:
        self._settings = settings
        self._url = settings.url.get_secret_value()
        self._shown_url = without_secrets(self._url)
        self._protocol = protocol_of(protocol_name(self._url))
        self._publishing = (
            self._protocol.publishing if settings.atomic == "auto" else Publishing(settings.atomic)
        )
        self._counters = Counters()
        self._lookup = Lookup()
        self._lock = threading.Lock()
        self._forked: list[Mount] = []
        self._parallelism = settings.parallelism or self._protocol.parallelism
        self._declare()
        self._mount_now = self._mounted()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(FsspecSettings.parse("fsspec", config))

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        name = f"{space.id}/{_MANIFEST}"

        async def make(_: None) -> None:
            if await self._manifest(name) != space:
                await self._mount().files.write(name, json.dumps(space.manifest()).encode())

        self._only(make)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        began_s = time.monotonic()
        if self._lookup.prefers_listing(space.id, len(hashes)):
            try:
                there = {page_hash for page_hash, whole in self._pages(space) if whole}
            finally:
                self._lookup.note_listing(space.id, time.monotonic() - began_s)
            return [page_hash in there for page_hash in hashes]
        files, nbytes = self._mount().files, _object_nbytes(space)

        async def look(page_hash: str) -> bool:
            return await files.size(f"{space.id}/{page_hash}") == nbytes

        verdicts = self._read_verdicts(self._each(look, hashes))
        if hashes:
            self._lookup.note_pages(len(hashes), time.monotonic() - began_s)
        return verdicts

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        files = self._mount().files

        async def read(page_hash: str) -> bytes:
            return await files.read(f"{space.id}/{page_hash}")

        answers = self._each(read, hashes)
        self._raise_unless_answered(answers)
        return [
            answer.value is not None and self._take(answer.value, space, page_hash, page)
            for answer, page_hash, page in zip(answers, hashes, pages, strict=True)
        ]

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        files = self._mount().files
        objects = [
            (f"{space.id}/{page_hash}", packed(page, space.id, page_hash))
            for page_hash, page in zip(hashes, pages, strict=True)
        ]

        async def write(item: tuple[str, bytes]) -> bool:
            await files.write(*item)
            return True

        return self._write_verdicts(self._each(write, objects))

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        return self._removed([f"{space.id}/{page_hash}" for page_hash in hashes])

    def spaces(self) -> Iterator[KeySpace]:
        self.ensure_open()
        names = [
            f"{entry.name}/{_MANIFEST}"
            for entry in self._entries("")
            if _SPACE_NAME.fullmatch(entry.name)
        ]
        found = self._each(self._manifest, names)
        self._raise_unless_answered(found)
        return iter([answer.value for answer in found if answer.value is not None])

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        return iter(
            [PageInfo(name, space.stored_nbytes) for name, whole in self._pages(space) if whole]
        )

    def clear(self, space: KeySpace) -> int:
        self.ensure_open()
        found = self._pages(space)
        removed = self._removed([f"{space.id}/{name}" for name, _ in found])
        return sum(gone and whole for gone, (_, whole) in zip(removed, found, strict=True))

    def stats(self) -> StorageStats:
        self.ensure_open()
        return StorageStats(counters=self._counters.snapshot())

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed and self._mount_now.pid == os.getpid():
            self._mount_now.close()

    # --- parts ---------------------------------------------------------------------------------------

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
        mount = Mount(
            self._url,
            self._settings.storage_options.get_secret_value(),
            protocol=self._protocol,
            publishing=self._publishing,
            parallelism=self._parallelism,
            timeout_s=self._settings.timeout_s,
        )
        (answer,) = mount.each(mount.files.sweep, [None])
        if answer.error is not None:
            mount.close()
            raise self._not_opened(answer.error) from answer.error
        return mount

    def _mount(self) -> Mount:
        """This process's mount: a forked child makes its own, and leaves its parent's alone."""
        if self._mount_now.pid != os.getpid():
            with self._lock:
                if self._mount_now.pid != os.getpid():
                    self._forked.append(self._mount_now)
                    self._mount_now = self._mounted()
        return self._mount_now

    def _each(
        self, operation: Callable[[Item], Coroutine[Any, Any, T]], items: Sequence[Item]
    ) -> list[Answer[T]]:
        return self._mount().each(operation, items) if items else []

    def _only(self, operation: Callable[[None], Coroutine[Any, Any, T]]) -> T:
        """The value of one operation that must succeed."""
        (answer,) = self._each(operation, [None])
        if answer.error is not None:
            raise self._failure([answer.error]) from answer.error
        return cast("T", answer.value)

    def _entries(self, directory: str) -> list[Entry]:
        return self._only(lambda _: self._mount().files.entries(directory))

    def _pages(self, space: KeySpace) -> list[tuple[str, bool]]:
        """Every file that is named like a page, and whether it has a page's size."""
        nbytes = _object_nbytes(space)
        return [
            (entry.name, entry.nbytes == nbytes)
            for entry in self._entries(space.id)
            if _PAGE_NAME.fullmatch(entry.name)
        ]

    async def _manifest(self, name: str) -> KeySpace | None:
        """The key space that a manifest describes; None where there is none, or it is no manifest."""
        try:
            space = KeySpace.from_manifest(json.loads(await self._mount().files.read(name)))
        except (FileNotFoundError, ValueError):
            return None
        return space if name.startswith(f"{space.id}/") else None

    def _take(self, data: bytes, space: KeySpace, page_hash: str, page: Page) -> bool:
        """Copy a page out of its object. What is never overwritten has to go if it is wrong."""
        payload = unpacked(data, space.id, page_hash)
        if payload is not None and payload.nbytes == page.nbytes:
            page.copy_from(payload)
            return True
        self._counters.add("wrong_pages")
        if self._publishing is Publishing.DIRECT:
            self._each(self._mount().files.remove, [f"{space.id}/{page_hash}"])
        return False

    def _removed(self, names: Sequence[str]) -> list[bool]:
        files = self._mount().files

        async def remove(name: str) -> bool:
            await files.remove(name)
            return True

        return self._read_verdicts(self._each(remove, names), missing=True)

    # --- verdicts ------------------------------------------------------------------------------------

    def _read_verdicts(
        self, answers: Sequence[Answer[bool]], *, missing: bool = False
    ) -> list[bool]:
        """One verdict a page, `missing` for those that are not there; a failure is a counted False.

        Raises:
            StorageTimeout, StorageUnavailable: No page was answered.
        """
        self._raise_unless_answered(answers)
        return [_verdict(answer, missing=missing) for answer in answers]

    def _write_verdicts(self, answers: Sequence[Answer[bool]]) -> list[bool]:
        """One verdict a page: False is for those that surely will not show.

        Raises:
            StorageTimeout, StorageUnavailable: A page failed, and may be there or may not.
        """
        failed = self._counted(answers)
        if failed:
            raise self._failure(failed) from failed[0]
        self._counters.add("refused_no_space", sum(answer.error is not None for answer in answers))
        return [answer.value is True for answer in answers]

    def _raise_unless_answered(self, answers: Sequence[Answer[Any]]) -> None:
        failed = self._counted(answers)
        if failed and len(failed) == len(answers):
            raise self._failure(failed) from failed[0]

    def _counted(self, answers: Sequence[Answer[Any]]) -> list[Exception]:
        """The errors that say something of the store, not of a page."""
        errors = [answer.error for answer in answers if answer.error is not None]
        failed = [error for error in errors if not (says_missing(error) or says_full(error))]
        late = sum(map(says_late, failed))
        self._counters.add("timeouts", late)
        self._counters.add("io_errors", len(failed) - late)
        return failed

    def _failure(self, errors: Sequence[Exception]) -> HiCacheError:
        return failure(errors, self._shown_url, self._settings.timeout_s)

    def _not_opened(self, error: Exception) -> HiCacheError:
        if isinstance(error, (TypeError, ValueError, ImportError)):
            return ConfigError(
                f"fsspec: storage_options: the filesystem of {self._shown_url} does not take them"
                f" ({type(error).__name__})"
            )
        return self._failure([error])


def _verdict(answer: Answer[bool], *, missing: bool) -> bool:
    if answer.error is None:
        return answer.value is True
    return missing and says_missing(answer.error)


def _object_nbytes(space: KeySpace) -> int:
    return space.stored_nbytes + TRAILER_NBYTES
