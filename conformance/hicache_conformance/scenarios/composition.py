"""A composition of stores that the check controls, and what it must answer whatever they do."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

from hicache_conformance.scenarios.attempts import Caller, make_attempt
from hicache_conformance.scenarios.fault_path import GRACE_S, RECOVERY_LIMIT_S
from hicache_conformance.scenarios.setup import fitting
from hicache_conformance.tools.composition.members import LIMIT_S, Member
from hicache_conformance.tools.content.memory import is_overwritten, overwrite
from hicache_conformance.tools.processes.machine import is_at_rest
from hicache_conformance.tools.processes.resources import wait_until
from hicache_storage.backend_support.revocable import AtomicRevocable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.run.outcomes import Violation
    from hicache_conformance.scenarios.attempts import Attempt
    from hicache_storage.page import Page

PAGES = 24
"""So many pages that each member of a composition that spreads them has some."""
_NAMES = ("a", "b", "c")
_NBYTES = 1024
_SINGLES = 4
_WATCHED_CALLS = 4
_QUIET_S = 0.02
_SETTLED_WITHIN_S = 5.0
_LIMITS = ("timeout_s", "lookup_timeout_s")
_UNUSED_LIMIT_S = 60.0


class Composition:
    """A fresh composition of three members, open for one key space."""

    def __init__(self, case: Case, *, have_limits: bool = True, nbytes: int = _NBYTES) -> None:
        """Open it.

        Members that `have_limits` end their own calls in time, as `bounded` stores do. Then the limits
        of the composition are so long that none ends because a machine is slow.
        """
        place = case.new_scratch().path
        self.case = case
        self.members = [Member(f"{place}/{n}", n, has_limit=have_limits) for n in _NAMES]
        case.compose([member.config for member in self.members])
        timeout_s = float(case.config.get("timeout_s", 0.0))
        limits = {name: float(case.config[name]) for name in case.config if name in _LIMITS}
        if have_limits:
            case.reconfigure(**dict.fromkeys(limits, _UNUSED_LIMIT_S))
        else:
            case.hurries(min(limits.values(), default=LIMIT_S))
        self.probe = case.open()
        self.space = case.space(fitting(case, nbytes))
        self.caller = Caller(self.probe, self.space, timeout_s + LIMIT_S + GRACE_S)
        self.probe.open_space(self.space)
        self._taken_back: deque[list[Page]] = deque(maxlen=_WATCHED_CALLS)

    def settle(self) -> None:
        """Wait until the members have been quiet for a moment, because copies may be under way.

        A thread that is about to begin a copy may wait for a processor.
        """
        wait_until(
            lambda: all(one.is_quiet(_QUIET_S) for one in self.members) and is_at_rest(),
            _SETTLED_WITHIN_S,
        )

    def is_copying(self) -> bool:
        """Return True if a member is storing pages now."""
        return any(one.is_running("batch_set") for one in self.members)

    def mend(self) -> None:
        """Let every member work again."""
        for member in self.members:
            member.mend()

    # --- pages ------------------------------------------------------------------------------------

    def new_pages(self, count: int = PAGES) -> dict[str, bytes]:
        """Return pages that were never set."""
        return self.case.contents(self.space, self.case.hashes(count))

    def stored(self, count: int = PAGES) -> dict[str, bytes]:
        """Set new pages, each of which must be taken, and wait for their copies."""
        pages = self.new_pages(count)
        self.case.must_set(self.probe, self.space, pages)
        self.settle()
        return pages

    def holders(self, page_hash: str, *, but: Member | None = None) -> list[Member]:
        """Return the members that have a page, without one of them."""
        return [one for one in self.members if one is not but and one.has(self.space, page_hash)]

    def whole_elsewhere(self, pages: Mapping[str, bytes], but: Member | None) -> set[str]:
        """Return the pages that a member other than this one has whole."""
        return {
            page_hash
            for page_hash, data in pages.items()
            for one in self.members
            if one is not but and one.read(self.space, page_hash) == data
        }

    # --- calls ------------------------------------------------------------------------------------

    def exists(self, hashes: Sequence[str]) -> Attempt:
        return self._judged(lambda: self.caller.exists(hashes))

    def get(self, hashes: Sequence[str]) -> Attempt:
        return self._judged(lambda: self.caller.get(hashes))

    def put(self, pages: Mapping[str, bytes]) -> Attempt:
        self.settle()  # so that no member answers an earlier call meanwhile
        return self._judged(lambda: self.caller.set(pages))

    def delete(self, hashes: Sequence[str]) -> Attempt:
        self.settle()  # so that no member answers an earlier call meanwhile
        return self._judged(lambda: self.caller.delete(hashes))

    def lent(self, operation: str, pages: Mapping[str, bytes]) -> Attempt:
        """Make a `batch_get` or `batch_set` whose pages are revoked and used again once it returns.

        The answer is a list of bool. `must_keep_off` finds bytes that are written afterwards.
        """
        revocable = AtomicRevocable()
        memory = self.probe.memory(self.space, len(pages)).filled_with(list(pages.values()))
        for page in memory.pages:
            page.revocable = revocable
        self.case.trace.stored[self.space].update(pages)
        call = getattr(self.probe.storage, operation)
        try:
            return make_attempt(
                self.probe,
                operation,
                lambda: call(self.space, list(pages), memory.pages),
                limit_s=self.caller.limit_s,
            )
        finally:
            revocable.revoke()
            overwrite(memory.pages)
            self._taken_back.append(memory.pages)

    def must_keep_off(self) -> None:
        """Assert that no call has written to pages that `lent` has taken back."""
        self.settle()
        if not all(map(is_overwritten, chain.from_iterable(self._taken_back))):
            raise self.violation(
                "a call wrote into a page that it had lent to a member, after it was revoked",
                "no byte of it changes once `revoke` has returned",
                "bytes of the next user of the memory were overwritten",
            )

    def _judged(self, call: Callable[[], Attempt]) -> Attempt:
        """Make a call. It may raise only what the contract names, and only if no member answered."""
        before = [one.answered.copy() for one in self.members]
        attempt = call()
        if attempt.error is None:
            return attempt
        if not attempt.failed_by_contract:
            raise self.violation(
                f"{attempt.operation} raised an error that the contract does not name",
                "an answer, StorageUnavailable or StorageTimeout",
                attempt.text,
            )
        answered = [
            one.name
            for one, earlier in zip(self.members, before, strict=True)
            if one.answered[attempt.operation] > earlier[attempt.operation]
        ]
        if answered:
            raise self.violation(
                f"{attempt.operation} raised although a member had answered",
                "an answer: a member that failed costs its own pages only",
                f"{attempt.text}, and member {answered[0]!r} had answered",
            )
        return attempt

    # --- assertions -------------------------------------------------------------------------------

    def must_serve(self, pages: Mapping[str, bytes], *, but: Member | None = None) -> int:
        """Assert that all pages of members other than `but` are hits, in one call and one by one.

        Return how many those are. The other pages may be misses.
        """
        there = self.whole_elsewhere(pages, but)
        for part in [list(pages), *([one] for one in list(pages)[:_SINGLES])]:
            self._must_hit(self.get(part), part, pages, there)
            self._must_hit(self.exists(part), part, pages, there)
        return len(there)

    def must_hide(self, hashes: Sequence[str], why: str) -> None:
        """Assert that pages are misses. A call that no member answers shows nothing."""
        for attempt in (self.exists(hashes), self.get(hashes)) if hashes else ():
            for page_hash, seen in zip(hashes, attempt.answer or (), strict=False):
                if seen not in (None, False):
                    raise self.violation(
                        f"{attempt.operation} shows a page {why}",
                        "a miss",
                        f"a hit for {page_hash[:8]}",
                        page_hash,
                    )

    def must_be_gone(self, hashes: Sequence[str], why: str) -> None:
        """Assert that no member has the pages, also after all copies have ended."""
        self.settle()
        for page_hash in hashes:
            for one in self.holders(page_hash):
                raise self.violation(
                    f"a member has a page {why}",
                    "no member has it, now and later",
                    f"member {one.name!r} has {page_hash[:8]}",
                    page_hash,
                )
        self.must_hide(hashes, why)

    def must_recover(self, pages: Mapping[str, bytes]) -> None:
        """Assert that all pages that any member has are hits, and that sets are taken, before long."""
        there = self.whole_elsewhere(pages, None)

        def is_back() -> bool:
            read = self.get(list(pages)).answer or ()
            hits = {one for one, data in zip(pages, read, strict=False) if data is not None}
            return there <= hits and all(self.put(self.new_pages()).answer or [False])

        if not wait_until(is_back, RECOVERY_LIMIT_S):
            raise self.violation(
                "a member that is back is not used again",
                f"its pages are hits, and sets are taken, within {RECOVERY_LIMIT_S:g} s",
                f"{len(there)} pages are there, and some are misses, or sets are refused",
            )
        self.must_serve(pages)

    def violation(
        self, message: str, expected: str = "", got: str = "", page_hash: str = ""
    ) -> Violation:
        """Return a violation with the last calls, or with those of one page."""
        sequence = self.case.trace.sequence(*([page_hash[:8]] if page_hash else []))
        return self.probe.violation(message, expected=expected, got=got, sequence=sequence)

    def _must_hit(
        self, attempt: Attempt, part: Sequence[str], pages: Mapping[str, bytes], there: set[str]
    ) -> None:
        answers: list[bytes | bool | None] = attempt.answer or [None] * len(part)
        for page_hash, answer in zip(part, answers, strict=True):
            if isinstance(answer, bytes) and answer != pages[page_hash]:
                raise self.case.wrong_bytes(
                    self.probe, self.space, page_hash, answer, [pages[page_hash]]
                )
            if page_hash in there and answer in (None, False):
                raise self.violation(
                    f"{attempt.operation} misses a page that a working member has",
                    "a hit",
                    f"{page_hash[:8]}: {attempt.text if attempt.error else 'a miss'}",
                    page_hash,
                )


@contextmanager
def composed(
    case: Case, *, have_limits: bool = True, nbytes: int = _NBYTES
) -> Generator[Composition]:
    """Open a fresh composition, and close it after its members work again."""
    composition = Composition(case, have_limits=have_limits, nbytes=nbytes)
    try:
        yield composition
    finally:
        composition.mend()
    attempt = composition.caller.close()
    if attempt.error is not None:
        raise composition.violation("close raised an error", "None", attempt.text)
