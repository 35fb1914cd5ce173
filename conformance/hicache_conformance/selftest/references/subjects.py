"""The right stores as subjects, which the kit must pass. Mutants derive from these stores."""

from __future__ import annotations

import atexit
import sqlite3
from contextlib import closing, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.subject import Scratch, Subject
from hicache_conformance.selftest.references.blobs import Blobs
from hicache_conformance.selftest.references.compositions import StripedSubject, TieredSubject
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.evicting_shelf import EvictingShelf
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.first_wins import FirstWins
from hicache_conformance.selftest.references.narrow import (
    FewBytes,
    OneByOne,
    ShelfOfPairs,
    TinyPages,
)
from hicache_conformance.selftest.references.rented import Rented
from hicache_conformance.selftest.references.slow import SlowStore
from hicache_conformance.selftest.references.sqlite_store import SqliteStore
from hicache_conformance.selftest.references.synced import Synced, SyncedShelf
from hicache_conformance.selftest.references.wire import WireServer, WireStore
from hicache_conformance.tools.observation.synced_files import SyncedFiles

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage


class _Unconfigured(Subject):
    """The subject of a store that needs no config, and whose pages are lost with its object."""

    def config(self, scratch: Scratch) -> Mapping[str, Any]:  # noqa: ARG002 - there are no fields
        return {}


class DictSubject(_Unconfigured):
    storage_class = DictStore


class EvictingSubject(_Unconfigured):
    storage_class = EvictingStore


class SlowSubject(_Unconfigured):
    storage_class = SlowStore


class FirstWinsSubject(_Unconfigured):
    storage_class = FirstWins


class BlobsSubject(_Unconfigured):
    storage_class = Blobs


class ShelfSubject(Subject):
    """The subject of the store of files, with the back doors `peek` and `tamper`."""

    storage_class: ClassVar[type[HiCacheStorage]] = Shelf
    _root: Path | None = None

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        self._root = scratch.path
        return {"path": str(scratch.path)}

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        path = self._file(space, page_hash)
        return path.read_bytes() if path.exists() else None

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        path = self._file(space, page_hash)
        if data is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(data)

    def _file(self, space: KeySpace, page_hash: str) -> Path:
        assert self._root is not None
        return self._root / space.id / page_hash


class EvictingShelfSubject(ShelfSubject):
    storage_class = EvictingShelf


class SqliteSubject(Subject):
    storage_class = SqliteStore

    _path: Path | None = None

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        self._path = scratch.path / "pages.sqlite"
        return {"path": str(self._path)}

    @contextmanager
    def stall(self) -> Generator[None, None, None]:
        assert self._path is not None
        with closing(sqlite3.connect(self._path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")


class WireSubject(Subject):
    """The subject of the store behind a server, which all tests share except those that stop it."""

    storage_class = WireStore
    _own: WireServer | None = None

    def config(self, scratch: Scratch) -> Mapping[str, Any]:  # noqa: ARG002 - key spaces differ
        host, port = (self._own or _shared_server()).address
        return {"url": f"wire://{host}:{port}"}

    @contextmanager
    def server(self) -> Generator[WireServer, None, None]:
        with WireServer() as self._own:
            yield self._own


class RentedSubject(WireSubject):
    """The subject of `Rented`. Its password is so short that the kit does not look for it everywhere."""

    storage_class = Rented

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        host, port = (self._own or _shared_server()).address
        return {"url": f"wire://kv:kv@{host}:{port}", "prefix": scratch.prefix}


class SyncedSubject(WireSubject):
    """The subject of `Synced`, with a server whose power can be cut."""

    storage_class = Synced

    def cut_power(self) -> None:
        (self._own or _shared_server()).cut_power()


class SyncedShelfSubject(ShelfSubject):
    storage_class = SyncedShelf

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        self._root = scratch.path / "root"  # what is synced is copied next to it
        return {"path": str(self._root)}

    def cut_power(self) -> None:
        assert self._root is not None
        SyncedFiles(self._root).restore()


class OneByOneSubject(WireSubject):
    storage_class = OneByOne


class ShelfOfPairsSubject(ShelfSubject):
    storage_class = ShelfOfPairs


class FewBytesSubject(ShelfSubject):
    storage_class = FewBytes


class TinyPagesSubject(_Unconfigured):
    storage_class = TinyPages


@cache
def _shared_server() -> WireServer:
    """Start one server for all tests of this process."""
    server = WireServer()
    server.start()
    atexit.register(server.close)
    return server


REFERENCES: tuple[type[Subject], ...] = (
    DictSubject,
    EvictingShelfSubject,
    ShelfSubject,
    SqliteSubject,
    WireSubject,
    EvictingSubject,
    SlowSubject,
    FirstWinsSubject,
    BlobsSubject,
    TieredSubject,
    StripedSubject,
)
"""The stores that mutants derive from."""

_NARROW: tuple[type[Subject], ...] = (
    RentedSubject,
    SyncedSubject,
    SyncedShelfSubject,
    OneByOneSubject,
    ShelfOfPairsSubject,
    FewBytesSubject,
    TinyPagesSubject,
)


def must_pass() -> tuple[type[Subject], ...]:
    """Return right stores of different kinds. No rule may fail them."""
    return REFERENCES + _NARROW


def must_come_to() -> tuple[tuple[type[Subject], str, Outcome], ...]:
    """Return subjects and rules whose outcomes are known in advance, each with its outcome."""
    return (
        (DictSubject, "KV-401", Outcome.NOT_DECLARED),
        (DictSubject, "KV-502", Outcome.NOT_DECLARED),
        (DictSubject, "KV-504", Outcome.NOT_DECLARED),
        (SlowSubject, "KV-103", Outcome.NOT_DECLARED),
        (SlowSubject, "KV-104", Outcome.NOT_DECLARED),
        (DictSubject, "KV-304", Outcome.NOT_VERIFIED),
        (DictSubject, "KV-305", Outcome.NOT_VERIFIED),
        (DictSubject, "KV-403", Outcome.NOT_VERIFIED),
        (DictSubject, "KV-404", Outcome.NOT_VERIFIED),
        (RentedSubject, "KV-303", Outcome.PASSED),
        (RentedSubject, "KV-307", Outcome.PASSED),
        (OneByOneSubject, "KV-306", Outcome.PASSED),
    )


def subject_of(storage_class: type[HiCacheStorage]) -> type[Subject]:
    """Return a subject for a store that derives from a reference store."""
    for reference in (*_NARROW, *REFERENCES):
        if issubclass(storage_class, reference.storage_class):
            absent = getattr(storage_class, "absent", {})
            fields = {"storage_class": storage_class, "absent": absent, "__module__": __name__}
            return type(f"{storage_class.__name__}Subject", (reference,), fields)
    raise TypeError(
        f"{storage_class.__name__} does not derive from a reference store: give its subject"
    )
