"""Stores in memory for a composition. A check stops, fills, hangs, wipes and damages them.

A check holds a `Member`. The composition opens it by the config of the member, as a `MemberStorage` of
the backend `dynamic`, in the process of the check.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakValueDictionary

from hicache_conformance.tools.processes.gates import Gate
from hicache_storage.errors import ConfigError, StorageTimeout, StorageUnavailable
from hicache_storage.settings import Settings
from hicache_storage.storage import Capabilities, HiCacheStorage, PageInfo, Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

READS = ("batch_exists", "batch_get", "spaces", "scan")
WRITES = ("open_space", "batch_set", "batch_delete", "clear", "remove_space")
LIMIT_S = 0.2
"""The time limit of a member that has one."""
_ENDLESS_S = 60.0
"""How long a call of a member without a time limit hangs at most, so that no thread stays forever."""
_PARALLELISM = 4


class Trouble(enum.Enum):
    """What is wrong with a member."""

    DOWN = "is down"
    """Its calls raise StorageUnavailable."""
    HUNG = "hangs"
    """Its calls raise StorageTimeout after its time limit. Without one they wait until it is mended."""
    FULL = "is full"
    """Its sets are False."""
    READ_ONLY = "is read-only"
    """Its sets and its clears raise, and its deletes are False."""


class Phase(enum.Enum):
    """When a call of a member fails or is held."""

    BEFORE = "before it has taken effect"
    AFTER = "after it has taken effect"


class _Fault(NamedTuple):
    trouble: Trouble
    phase: Phase
    operations: Sequence[str]


class Member:
    """The pages of one member, which all handles share, and what is wrong with it. Thread-safe."""

    def __init__(self, place: str, name: str, *, has_limit: bool = True) -> None:
        """Make an empty store. `place` is unique to it.

        A member that `has_limit` claims `bounded`. Each of them claims `revocable`.
        """
        self.name = name
        self.place = place
        self.has_limit = has_limit
        self.answered: Counter[str] = Counter()
        """How many calls of each operation have returned."""
        self.served: set[str] = set()
        """The hashes of the pages that gets have returned."""
        self._pages: dict[KeySpace, dict[str, bytes]] = {}
        self._late: list[tuple[KeySpace, dict[str, bytes]]] = []
        self._fault: _Fault | None = None
        self._gates: dict[tuple[str, Phase], Gate] = {}
        self._running = Counter[str]()
        self.hanging = 0
        """How many calls hang now."""
        self._moved_s = time.monotonic()
        self._changed = threading.Condition()
        _MEMBERS[place] = self

    @property
    def config(self) -> dict[str, Any]:
        """The member in the config of a composition."""
        dynamic = {"module_path": __name__, "class_name": MemberStorage.__name__}
        fields = {"backend_name": self.name, **dynamic, "place": self.place}
        return {"name": self.name, "backend": "dynamic", "config": fields}

    # --- what a check does ------------------------------------------------------------------------

    def fail(
        self,
        trouble: Trouble,
        *,
        phase: Phase = Phase.BEFORE,
        operations: Sequence[str] = READS + WRITES,
    ) -> None:
        """Let calls of these operations fail from now on."""
        with self._changed:
            self._fault = _Fault(trouble, phase, operations)

    def mend(self) -> None:
        """Let calls work again, and let hung ones go on."""
        with self._changed:
            self._fault = None
            self._changed.notify_all()

    def land(self) -> None:
        """Store the pages of sets that hung before they took effect, and were given up at the limit."""
        with self._changed:
            for space, pages in self._late:
                self._pages.setdefault(space, {}).update(pages)
            self._late.clear()

    @contextmanager
    def holding(self, operation: str, phase: Phase) -> Generator[Gate]:
        """Hold calls of an operation until the gate is opened, at the latest at the end of the block."""
        gate = Gate()
        with self._changed:
            self._gates[operation, phase] = gate
        try:
            yield gate
        finally:
            with self._changed:
                self._gates.pop((operation, phase), None)
            gate.open()

    def wipe(self) -> None:
        """Lose all pages."""
        with self._changed:
            self._pages.clear()

    def damage(self, space: KeySpace, page_hash: str) -> None:
        """Flip a bit of the last byte of a page."""
        with self._changed:
            data = self._pages[space][page_hash]
            self._pages[space][page_hash] = data[:-1] + bytes([data[-1] ^ 1])

    def read(self, space: KeySpace, page_hash: str) -> bytes | None:
        """Return the bytes of a page, whatever is wrong with the member."""
        with self._changed:
            return self._pages.get(space, {}).get(page_hash)

    def has(self, space: KeySpace, page_hash: str) -> bool:
        """Return True if the member has the page, whatever is wrong with it."""
        return self.read(space, page_hash) is not None

    def is_quiet(self, for_s: float) -> bool:
        """Return True if no call has begun or ended for this time, and none runs that does not hang."""
        with self._changed:
            return (
                self._running.total() == self.hanging and time.monotonic() - self._moved_s >= for_s
            )

    def is_running(self, operation: str) -> bool:
        """Return True if a call of the operation has begun and not ended."""
        return self._running[operation] > 0

    # --- what a handle does -----------------------------------------------------------------------

    @contextmanager
    def call(self, operation: str) -> Generator[None]:
        """Count a call, and let it fail or wait before its effect (the block) or after it."""
        self._move(operation, 1)
        try:
            self._suffer(operation, Phase.BEFORE)
            yield
            self._suffer(operation, Phase.AFTER)
            with self._changed:
                self.answered[operation] += 1
        finally:
            self._move(operation, -1)

    def exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return [self.has(space, page_hash) for page_hash in hashes]

    def get(self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        hits = [
            _filled(page, self.read(space, page_hash))
            for page_hash, page in zip(hashes, pages, strict=True)
        ]
        with self._changed:
            self.served.update(one for one, hit in zip(hashes, hits, strict=True) if hit)
        return hits

    def put(self, space: KeySpace, pages: Mapping[str, bytes | None]) -> list[bool]:
        """Store pages that are not None, unless the member is full."""
        with self._changed:
            if self._trouble_of("batch_set") is Trouble.FULL:
                return [False] * len(pages)
            stored = {one: data for one, data in pages.items() if data is not None}
            if stored:
                self._pages.setdefault(space, {}).update(stored)
        return [data is not None for data in pages.values()]

    def put_late(self, space: KeySpace, pages: Mapping[str, bytes | None]) -> None:
        """Keep the pages of a set that hangs for `land`."""
        with self._changed:
            if self.has_limit and self._trouble_of("batch_set") is Trouble.HUNG:
                self._late.append((space, {h: data for h, data in pages.items() if data}))

    def drop(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        with self._changed:
            if self._trouble_of("batch_delete") is Trouble.READ_ONLY:
                return [False] * len(hashes)
            for page_hash in hashes:
                self._pages.get(space, {}).pop(page_hash, None)
            if not self._pages.get(space):
                self._pages.pop(space, None)
        return [True] * len(hashes)

    def drop_spaces(self, wanted: Callable[[KeySpace], bool]) -> int:
        with self._changed:
            dropped = [self._pages.pop(space) for space in list(self._pages) if wanted(space)]
        return sum(map(len, dropped))

    def known_spaces(self) -> list[KeySpace]:
        with self._changed:
            return list(self._pages)

    def infos(self, space: KeySpace) -> list[PageInfo]:
        with self._changed:
            return [PageInfo(one, len(data)) for one, data in self._pages.get(space, {}).items()]

    # --- parts ------------------------------------------------------------------------------------

    def _trouble_of(self, operation: str) -> Trouble | None:
        fault = self._fault
        return fault.trouble if fault is not None and operation in fault.operations else None

    def _suffer(self, operation: str, phase: Phase) -> None:
        with self._changed:
            gate = self._gates.get((operation, phase))
            fault = self._fault
        if gate is not None:
            gate.hold()
        if fault is None or fault.phase is not phase or operation not in fault.operations:
            return
        if fault.trouble is Trouble.DOWN:
            raise StorageUnavailable(f"{self.name}: it is down")
        if fault.trouble is Trouble.READ_ONLY and operation in {
            "batch_set",
            "clear",
            "remove_space",
        }:
            raise StorageUnavailable(f"{self.name}: it is read-only")
        if fault.trouble is Trouble.HUNG:
            self._hang(fault)

    def _hang(self, fault: _Fault) -> None:
        limit_s = LIMIT_S if self.has_limit else _ENDLESS_S
        with self._changed:
            self.hanging += 1
            mended = self._changed.wait_for(lambda: self._fault is not fault, limit_s)
            self.hanging -= 1
            self._moved_s = time.monotonic()
        if self.has_limit or not mended:
            raise StorageTimeout(f"{self.name}: no answer within {limit_s:g} s")

    def _move(self, operation: str, step: int) -> None:
        with self._changed:
            self._running[operation] += step
            self._moved_s = time.monotonic()


_MEMBERS: WeakValueDictionary[str, Member] = WeakValueDictionary()


class MemberSettings(Settings):
    """The config of a member."""

    place: str


class MemberStorage(HiCacheStorage):
    """A handle on a member."""

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        enumerable=True,
        parallelism=_PARALLELISM,
        bounded=True,
        revocable=True,
    )

    def __init__(self, member: Member) -> None:
        self._member = member
        self.narrow(bounded=member.has_limit)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        member = _MEMBERS.get(MemberSettings.parse("member", config).place)
        if member is None:
            raise ConfigError("member: place: its check has ended, or is in another process")
        return cls(member)

    def open_space(self, space: KeySpace) -> None:
        with self._call("open_space"):
            super().open_space(space)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        with self._call("batch_exists"):
            return self._member.exists(space, hashes)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        with self._call("batch_get"):
            return self._member.get(space, hashes, pages)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        given = {one: _bytes_of(page) for one, page in zip(hashes, pages, strict=True)}
        self._member.put_late(space, given)
        with self._call("batch_set"):
            stored = dict(zip(given, self._member.put(space, given), strict=True))
            return [stored[page_hash] for page_hash in hashes]

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        with self._call("batch_delete"):
            return self._member.drop(space, hashes)

    def spaces(self) -> Iterator[KeySpace]:
        with self._call("spaces"):
            return iter(self._member.known_spaces())

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        with self._call("scan"):
            return iter(self._member.infos(space))

    def clear(self, space: KeySpace) -> int:
        with self._call("clear"):
            return self._member.drop_spaces(lambda one: one == space)

    def remove_space(self, space_id: str) -> int:
        with self._call("remove_space"):
            return self._member.drop_spaces(lambda one: one.id == space_id)

    @contextmanager
    def _call(self, operation: str) -> Generator[None]:
        self.ensure_open()
        with self._member.call(operation):
            yield


def _filled(page: Page, data: bytes | None) -> bool:
    """Copy `data` into a page. Return False if the page is revoked, or there is none of its length."""
    if data is None or len(data) != page.nbytes:
        return False
    if page.revocable is None:
        page.copy_from(data)
        return True
    if not page.revocable.enter():
        return False
    try:
        page.copy_from(data)
    finally:
        page.revocable.leave()
    return True


def _bytes_of(page: Page) -> bytes | None:
    """Return the bytes of a page, or None if it is revoked."""
    if page.revocable is None:
        return page.tobytes()
    if not page.revocable.enter():
        return None
    try:
        return page.tobytes()
    finally:
        page.revocable.leave()
