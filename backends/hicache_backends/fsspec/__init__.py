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

from hicache_backends.fsspec._lookup import Lookup
from hicache_backends.fsspec._mount import Mount, protocol_name, without_secrets
from hicache_backends.fsspec._page_object import TRAILER_NBYTES, packed, unpacked
from hicache_backends.fsspec._protocols import Publishing, protocol_of
from hicache_backends.fsspec._verdicts import Judge
from hicache_storage.counters import Counters
from hicache_storage.errors import ConfigError
from hicache_storage.keys import KeySpace
from hicache_storage.per_process import PerProcess
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
    from hicache_storage.page import Page

__all__ = ["FsspecSettings", "FsspecStorage"]

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
        self._judge = Judge(self._counters, self._shown_url, settings.timeout_s)
        self._lock = threading.Lock()
        self._declare()
        self._mounts = PerProcess(self._mounted, close=Mount.close)
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

        self._only(make)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        there = self._listed(space, self._lookup.budget_s(space.id, len(hashes)))
        if there is not None:
            return [page_hash in there for page_hash in hashes]
        files, nbytes = self._mounts.get().files, _object_nbytes(space)

        async def look(page_hash: str) -> bool:
            return await files.size(_name(space, page_hash)) == nbytes

        began_s = time.monotonic()
        verdicts = self._judge.found(self._each(look, hashes))
        self._lookup.note_pages(len(hashes), time.monotonic() - began_s)
        return verdicts

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        names = [_name(space, page_hash) for page_hash in hashes]
        answers = self._each(self._mounts.get().files.read, names)
        self._judge.must_have_answered(answers)
        # Pages are filled here, by the caller's thread: work that is late touches none of them.
        return [
            answer.value is not None and self._take(answer.value, space, page_hash, page)
            for answer, page_hash, page in zip(answers, hashes, pages, strict=True)
        ]

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

        return self._judge.stored(self._each(write, objects))

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        return self._removed([_name(space, page_hash) for page_hash in hashes])

    def spaces(self) -> Iterator[KeySpace]:
        self.ensure_open()
        names = [
            f"{entry.name}/{_MANIFEST}"
            for entry in self._entries("")
            if _SPACE_NAME.fullmatch(entry.name)
        ]
        answers = self._each(self._manifest, names)
        self._judge.must_have_answered(answers)
        return iter([answer.value for answer in answers if answer.value is not None])

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        whole = [name for name, whole in self._pages(space) if whole]
        return iter([PageInfo(name, space.stored_nbytes) for name in whole])

    def clear(self, space: KeySpace) -> int:
        self.ensure_open()
        found = self._pages(space)
        removed = self._removed([_name(space, name) for name, _ in found])
        return sum(gone and whole for gone, (_, whole) in zip(removed, found, strict=True))

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
                timeout_s=self._settings.timeout_s,
            )
        except OSError as error:  # no descriptor is left
            raise self._judge.failure([error]) from error
        try:
            mount.connect()
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
        except Exception as error:
            mount.close()
            raise self._judge.failure([error]) from error
        return mount

    # --- parts ---------------------------------------------------------------------------------------

    def _each(
        self, operation: Callable[[Item], Coroutine[Any, Any, T]], items: Sequence[Item]
    ) -> list[Answer[T]]:
        return self._mounts.get().each(operation, items) if items else []

    def _only(self, operation: Callable[[None], Coroutine[Any, Any, T]]) -> T:
        """The value of one operation that must succeed."""
        (answer,) = self._each(operation, [None])
        if answer.error is not None:
            raise self._judge.failure([answer.error]) from answer.error
        return cast("T", answer.value)

    def _entries(self, directory: str) -> list[Entry]:
        return self._only(lambda _: self._mounts.get().files.entries(directory))

    def _pages(self, space: KeySpace) -> list[tuple[str, bool]]:
        """Every file that is named like a page, and whether it has a page's size."""
        return _pages_among(self._entries(space.id), space)

    def _listed(self, space: KeySpace, budget_s: float) -> set[str] | None:
        """The pages of `space`, if listing them is quicker than `budget_s`."""
        if not budget_s:
            return None
        began_s = time.monotonic()
        mount = self._mounts.get()
        answer = mount.attempt(mount.files.entries, space.id, budget_s)
        elapsed_s = time.monotonic() - began_s
        self._lookup.note_listing(space.id, elapsed_s, done=answer.error is None)
        if answer.value is None:
            return None
        return {name for name, whole in _pages_among(answer.value, space) if whole}

    async def _manifest(self, name: str) -> KeySpace | None:
        """The key space that a manifest describes; None where there is none, or it is no manifest."""
        try:
            space = KeySpace.from_manifest(json.loads(await self._mounts.get().files.read(name)))
        except (FileNotFoundError, ValueError):
            return None
        return space if name == f"{space.id}/{_MANIFEST}" else None

    def _take(self, data: bytes, space: KeySpace, page_hash: str, page: Page) -> bool:
        """Copy a page out of its object. What is never overwritten has to go if it is wrong."""
        payload = unpacked(data, space.id, page_hash)
        if payload is not None and payload.nbytes == page.nbytes:
            page.copy_from(payload)
            return True
        self._counters.add("wrong_pages")
        if self._publishing is Publishing.DIRECT:
            self._each(self._mounts.get().files.remove, [_name(space, page_hash)])
        return False

    def _removed(self, names: Sequence[str]) -> list[bool]:
        return self._judge.removed(self._each(self._mounts.get().files.remove, names))


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
