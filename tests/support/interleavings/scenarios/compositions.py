"""Composed stores whose members are slow or fail: which pages may be there, and how long calls take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from hicache_backends.memory import MemoryStorage
from hicache_backends.striped import StripedSettings, StripedStorage
from hicache_backends.tiered import TieredSettings, TieredStorage
from pages import hash_of, space

from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.composition.storage import ComposedStorage
from hicache_storage.errors import HiCacheError
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.page_store.frame import FRAME_NBYTES, FramedPage, Framing, are_right
from interleavings.scenario import Scenario
from interleavings.scenarios.storage import (
    FAILS,
    LATE,
    LINGERS,
    REFUSES,
    SLOW,
    WORKS,
    ExploredStorage,
    content,
)

_NBYTES = 64
_SPACE = replace(space(pool="kv", page_nbytes=_NBYTES), frame_nbytes=FRAME_NBYTES)
_HASHES = [hash_of(number) for number in range(3)]
_FRAMING = Framing(_SPACE, checksum=True)
_TIMEOUT_S = 2.0
_EPSILON_S = 0.001
_LIMITS = {"timeout_s": _TIMEOUT_S, "lookup_timeout_s": _TIMEOUT_S}
_STRIDE = 192
"""The bytes of a stored page in aligned memory."""
_CALM: dict[str, tuple[str, ...]] = {}
_HUNG_WRITES = {"set": (WORKS, SLOW), "delete": (WORKS, LINGERS)}
_HUNG_DELETES = {"delete": (WORKS, SLOW)}
_ROUGH = {
    "exists": (WORKS, WORKS, SLOW, FAILS),
    "get": (WORKS, WORKS, WORKS, SLOW, FAILS),
    "set": (WORKS, WORKS, WORKS, SLOW, LINGERS, FAILS, LATE, REFUSES),
    "delete": (WORKS, WORKS, WORKS, SLOW, LINGERS, FAILS, LATE, REFUSES),
}


@dataclass(slots=True, eq=False)
class _Set:
    """A call that stores one page, from its begin to its end."""

    ended: int | None = None
    refused: bool = False


class _Ledger:
    """Which pages may be there: each page whose set no removal has followed."""

    def __init__(self) -> None:
        self.sets: dict[str, list[_Set]] = {each: [] for each in _HASHES}
        """The sets of each page, without those that ended before a removal that has succeeded."""
        self._every: dict[str, list[_Set]] = {each: [] for each in _HASHES}
        self._now = 0

    def tick(self) -> int:
        """Return the number of a moment."""
        self._now += 1
        return self._now

    def begin_set(self, page_hash: str) -> _Set:
        begun = _Set()
        self.sets[page_hash].append(begun)
        self._every[page_hash].append(begun)
        return begun

    def end_set(self, begun: _Set, *, refused: bool) -> None:
        begun.ended, begun.refused = self.tick(), refused

    def removed(self, page_hash: str, began: int) -> None:
        """Note that a removal has succeeded, which began at the moment `began`."""
        self.sets[page_hash] = self.since(page_hash, began)

    def since(self, page_hash: str, began: int) -> list[_Set]:
        """Return the sets of a page that may have stored it since a moment."""
        return [one for one in self.sets[page_hash] if one.ended is None or one.ended > began]

    @contextmanager
    def reading(self, hashes: Sequence[str]) -> Generator[Callable[[str], bool]]:
        """Yield a function that returns whether a page may have been there during the block so far."""
        accepted = {each for each in hashes if any(not one.refused for one in self.sets[each])}
        counts = {each: len(self._every[each]) for each in hashes}
        yield lambda each: each in accepted or len(self._every[each]) > counts[each]


class _Member(ExploredStorage):
    """A member of a composition."""

    def __init__(self, scenario: ComposedScenario, *, revocable: bool, waits: bool) -> None:
        super().__init__(
            scenario,
            behaviours=scenario.pick(scenario.behaviours),
            revocable=revocable,
            parallelism=scenario.pick(scenario.parallelisms),
        )
        self.deleted: dict[str, int] = dict.fromkeys(_HASHES, 0)
        """The moment of the last delete of each page that has succeeded."""
        self._composed = scenario
        self._waits = waits

    @property
    def pages(self) -> dict[str, memoryview]:
        assert isinstance(self.inner, MemoryStorage)
        return self.inner._spaces.get(_SPACE, {})

    def flip(self, page_hash: str) -> None:
        """Flip a bit of a page, if it is there."""
        stored = self.pages.get(page_hash)
        if stored is not None:
            self._composed.damaged.add(page_hash)
            stored[-1] ^= 1

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        gone = super().batch_delete(space, hashes)
        for page_hash, is_gone in zip(hashes, gone, strict=True):
            if is_gone:
                self.deleted[page_hash] = self._composed.ledger.tick()
        return gone

    def clear(self, space: KeySpace) -> int:
        self._composed.scheduler.point("storage: clear")
        if self._composed.pick(self.behaviours.get("delete", (WORKS,))) == SLOW:
            self._sleep()
        removed = super().clear(space)
        self._composed.scheduler.point("storage: clear ends")
        return removed

    def _sleep(self) -> None:
        slow_s = self._composed.pick(self._composed.slow_s)
        if self._waits:
            self._composed.slept_s[self._composed.scheduler.current.number] += slow_s
        time.sleep(slow_s)


class ComposedScenario(Scenario):
    """Calls of several threads on a composition, which another thread may close.

    A page whose set was refused is never found. After a delete that returned True, or a clear that
    returned, no member has the page until it is set again. A hit has the right bytes. A call ends at the
    deadlines of the members that it can leave behind.
    """

    time_passes = False
    behaviours: tuple[Mapping[str, Sequence[str]], ...] = (
        _CALM,
        _HUNG_WRITES,
        _HUNG_DELETES,
        _ROUGH,
    )
    """What the calls of one member may do."""
    slow_s: tuple[float, ...] = (1.0, 3.0, 80.0)
    """How long slow calls take: less than a deadline, more, or more than any call may."""
    cooldown_s: float = 5.0
    """How long a member that failed is not asked."""
    pauses_s: tuple[float, ...] = (0.0, 5.0)
    """How long a thread waits before its next call."""
    counts: tuple[int, ...] = (1, 1, 2, 3)
    """How many pages a call has."""
    parallelisms: tuple[int, ...] = (1, 2)
    """How many calls a member runs at once."""
    revocable = False
    """True if calls may be left behind with their pages."""
    storage: ComposedStorage
    members: list[_Member]

    def set_up(self) -> None:
        self.ledger = _Ledger()
        self.slept_s: defaultdict[int, float] = defaultdict(float)
        """How long the members have let threads wait that cannot leave them behind, by task."""
        self.damaged: set[str] = set()
        self.closed = False
        self.calls = self.pick(
            (
                (self._set, self._delete, self._get, self._exists),
                (self._set, self._delete, self._get, self._clear),
                (self._set, self._delete),
                (self._set, self._get, self._get, self._delete),
                (self._set, self._delete, self._get, self._get, self._damage, self._damage),
            )
        )
        self.compose()
        self.storage.open_space(_SPACE)

    def compose(self) -> None:
        """Make `members` and `storage`."""
        raise NotImplementedError

    def limit_s(self, operation: str, hashes: Sequence[str]) -> float | None:
        """Return how long a call may take, besides the members that it cannot leave behind."""
        raise NotImplementedError

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {
            "first": self._use,
            "second": self._use,
            "third": self._use,
            "closer": self._close,
        }

    def check(self) -> None:
        for member in self.members:
            for page_hash in member.pages:
                assert self.ledger.sets[page_hash], "a page has returned after its removal"

    def finish(self) -> None:
        if self.pick((False, True)):
            self.closed = True
            self.storage.close()
        self.scheduler.settle()
        if not self.closed:
            self.check_settled()
            for member in self.members:
                member.behaviours = _CALM
            time.sleep(self.cooldown_s)
            self._get(_HASHES)
            gone = self._delete(_HASHES)
            self.require(all(gone), "pages cannot be deleted although every member works")
            self.require(not any(member.pages for member in self.members), "pages are left")
            self.storage.close()
            self.scheduler.settle()
        self.check_closed()

    def check_settled(self) -> None:
        """Check what must hold when no call runs any more."""

    def check_closed(self) -> None:
        """Check what must hold when everything has ended."""

    # --- the threads ---------------------------------------------------------------------------------

    def _use(self) -> None:
        for _ in range(3):
            start = self.pick((0, 0, 1))
            hashes = _HASHES[start : start + self.pick(self.counts)]
            with suppress(HiCacheError):
                self.pick(self.calls)(hashes)
            time.sleep(self.pick(self.pauses_s))

    def _close(self) -> None:
        if self.pick((False, False, False, True)):
            time.sleep(self.pick((0.0, 1.0, _TIMEOUT_S)))
            self.closed = True
            self.storage.close()

    @contextmanager
    def _timed(self, operation: str, hashes: Sequence[str]) -> Generator[None]:
        slept_s = self.slept_s[self.scheduler.current.number]
        began_s = time.monotonic()
        try:
            yield
        finally:
            slept_s = self.slept_s[self.scheduler.current.number] - slept_s
            took_s = time.monotonic() - began_s - slept_s
            limit_s = self.limit_s(operation, hashes)
            self.require(
                limit_s is None or took_s <= limit_s + _EPSILON_S,
                f"a {operation} of {len(hashes)} pages took {took_s:.3f} s of {limit_s} s",
            )

    def _set(self, hashes: Sequence[str]) -> None:
        pages = [self._page_of(each) for each in hashes]
        begun = [self.ledger.begin_set(each) for each in hashes]
        refused = [False] * len(hashes)
        try:
            with self._timed("set", hashes):
                stored = self.storage.batch_set(_SPACE, hashes, pages)
            refused = [not one for one in stored]
        finally:
            for one, is_refused in zip(begun, refused, strict=True):
                self.ledger.end_set(one, refused=is_refused)
            if self.pick((False, True)):
                _revoke(pages)

    def _get(self, hashes: Sequence[str]) -> None:
        pages = [self._page_of(None) for _ in hashes]
        with self.ledger.reading(hashes) as may_be_there:
            try:
                with self._timed("get", hashes):
                    hits = self.storage.batch_get(_SPACE, hashes, pages)
            finally:
                _revoke(pages)
            for page_hash, page, hit in zip(hashes, pages, hits, strict=True):
                if not hit:
                    continue
                self.require(may_be_there(page_hash), "a page was read that is not there")
                right = page.tobytes()[FRAME_NBYTES:] == content("kv", _NBYTES, page_hash)
                plain = Page(bytearray(page.tobytes()))
                plain.digest_skip = FRAME_NBYTES
                detectable = are_right(_SPACE, [page_hash], [plain]) == [False]
                self.require(
                    right or (page_hash in self.damaged and detectable),
                    "a page that was read has other bytes",
                )

    def _exists(self, hashes: Sequence[str]) -> None:
        with self.ledger.reading(hashes) as may_be_there:
            with self._timed("exists", hashes):
                found = self.storage.batch_exists(_SPACE, hashes)
            for page_hash, is_found in zip(hashes, found, strict=True):
                self.require(
                    not is_found or may_be_there(page_hash), "a page exists that is not there"
                )

    def _delete(self, hashes: Sequence[str]) -> list[bool]:
        began = self.ledger.tick()
        with self._timed("delete", hashes):
            gone = self.storage.batch_delete(_SPACE, hashes)
        for page_hash, is_gone in zip(hashes, gone, strict=True):
            if is_gone:
                self.ledger.removed(page_hash, began)
            else:
                self.gave_up(page_hash, began)
        return gone

    def gave_up(self, page_hash: str, began: int) -> None:
        """Note that a delete has returned False."""

    def _clear(self, _: Sequence[str]) -> None:
        began = self.ledger.tick()
        self.storage.clear(_SPACE)
        for page_hash in _HASHES:
            self.ledger.removed(page_hash, began)

    def _damage(self, hashes: Sequence[str]) -> None:
        """Flip a bit of a page in one member."""
        self.pick(self.members).flip(hashes[0])

    def _page_of(self, page_hash: str | None) -> Page:
        return _page_of(page_hash, AtomicRevocable() if self.revocable else None)


class TiersScenario(ComposedScenario):
    """Removals and closes beside sets, write-backs and promotions of two or three tiers.

    If a delete reached every tier and gave up, because a copy was under way, the copy is undone, unless
    the tier is not asked then. The memory of copies is bounded, and free at the end.
    """

    name = "tiers"

    def compose(self) -> None:
        count = self.pick((2, 2, 3))
        self.members = [_Member(self, revocable=False, waits=not level) for level in range(count)]
        self.levels = count - 1
        copied_pages = self.pick((4, 8))
        self.part_pages = copied_pages // 4
        settings = TieredSettings.parse(
            "tiered",
            {
                "tiers": [{"name": f"t{n}", "backend": "memory"} for n in range(count)],
                "write": self.pick(("through", "back")),
                "promote": self.pick(("always", "always", "never")),
                "copy_nbytes": copied_pages * _STRIDE,
                "breaker_cooldown_s": self.cooldown_s,
                **_LIMITS,
            },
        )
        names = [each.name for each in settings.tiers]
        tiered = TieredStorage(dict(zip(names, self.members, strict=True)), settings)
        self.storage = tiered
        self.copier = tiered._copiers.get()
        for member in self.members[self.pick((0, 1, count)) :]:
            for page_hash in _HASHES:
                self.ledger.end_set(self.ledger.begin_set(page_hash), refused=False)
                member.inner.batch_set(_SPACE, [page_hash], [_page_of(page_hash)])
                if self.pick((False, False, False, True)):
                    member.flip(page_hash)
        self.expired: list[tuple[str, _Set]] = []
        """The sets before a delete that reached every tier and gave up."""

    def limit_s(self, operation: str, hashes: Sequence[str]) -> float:
        parts = -(-len(hashes) // self.part_pages)
        return {
            "exists": self.levels * _TIMEOUT_S,
            "get": self.levels * parts * 3 * _TIMEOUT_S,  # for memory, pages and wrong copies
            "set": parts * 2 * _TIMEOUT_S,
            "delete": (1 + self.levels) * _TIMEOUT_S,
        }[operation]

    def check(self) -> None:
        memory = self.copier.memory
        limit_nbytes = memory._used.limit_nbytes or 0
        assert 0 <= memory.used_nbytes <= limit_nbytes, "copies exceed their memory"
        for limit in (memory._unawaited, *memory._of_tiers.values()):
            assert limit.nbytes >= 0, "a share of the memory was freed twice"
        super().check()

    def gave_up(self, page_hash: str, began: int) -> None:
        if all(member.deleted[page_hash] > began for member in self.members):
            kept = self.ledger.since(page_hash, began)
            self.expired += [
                (page_hash, one) for one in self.ledger.sets[page_hash] if one not in kept
            ]

    def check_settled(self) -> None:
        self._check_free()
        failed = any(member.failed["delete"] for member in self.members) or any(
            member.counters.snapshot().get("refused_calls") for member in self.storage._members
        )
        for page_hash in () if failed else _HASHES:
            expired = [one for name, one in self.expired if name == page_hash]
            alive = [one for one in self.ledger.sets[page_hash] if one not in expired]
            is_there = any(page_hash in member.pages for member in self.members)
            self.require(alive or not is_there, "a copy is not undone after a delete gave up")

    def check_closed(self) -> None:
        self._check_free()

    def _check_free(self) -> None:
        memory = self.copier.memory
        self.require(not memory.used_nbytes, f"{memory.used_nbytes} bytes of copies are in use")
        self.require(not memory._unawaited.nbytes, "memory of copies nobody waits for is in use")
        shares = sum(share.nbytes for share in memory._of_tiers.values())
        self.require(not shares, f"{shares} bytes of the tiers' shares are in use")
        self.require(not self.copier._moves._moves, "a move has not ended")
        self.require(not self.copier._moves._removals, "a removal has not ended")


class StripesScenario(ComposedScenario):
    """Removals and closes beside writes that a stripe has not answered.

    A page whose write was given up stays hidden, whenever that write ends.
    """

    name = "stripes"
    behaviours = (_HUNG_WRITES, _HUNG_WRITES, _HUNG_WRITES, _ROUGH)
    cooldown_s = 0.5
    pauses_s = (0.0, 0.5, 1.5)
    parallelisms = (2,)
    counts = (2, 2, 3)

    def compose(self) -> None:
        self.revocable = self.pick((True, True, True, False))
        self.members = [_Member(self, revocable=True, waits=True) for _ in "ab"]
        stripes = [{"name": name, "backend": "memory"} for name in "ab"]
        config = {"stripes": stripes, "breaker_cooldown_s": self.cooldown_s, **_LIMITS}
        settings = StripedSettings.parse("striped", config)
        striped = StripedStorage(dict(zip("ab", self.members, strict=True)), settings)
        self.storage = striped

    def limit_s(self, operation: str, hashes: Sequence[str]) -> float | None:
        return _TIMEOUT_S if self.revocable or operation in ("exists", "delete") else None


def _page_of(page_hash: str | None, revocable: AtomicRevocable | None = None) -> Page:
    """Return a page with its frame and the content of a hash, or a blank one to read into."""
    payload = bytes(_NBYTES) if page_hash is None else content("kv", _NBYTES, page_hash)
    framed = FramedPage(memoryview(bytearray(FRAME_NBYTES)), Page(bytearray(payload)))
    if page_hash is not None:
        _FRAMING.write([framed], [page_hash])
    framed.stored.revocable = revocable
    framed.stored.digest_skip = FRAME_NBYTES if page_hash is None else None
    return framed.stored


def _revoke(pages: Sequence[Page]) -> None:
    """Take memory back that members may still use."""
    for page in pages:
        if page.revocable is not None:
            page.revocable.revoke()
