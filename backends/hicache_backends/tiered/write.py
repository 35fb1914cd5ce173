"""One set of `tiered`: through all tiers, or into the first one with copies for the others."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from hicache_backends.tiered.copier import Copies
from hicache_storage.backend_support.copies import copy_revocable
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.composition.member import noting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from hicache_backends.tiered.copier import Copier
    from hicache_backends.tiered.memory import Room
    from hicache_backends.tiered.moves import Move
    from hicache_storage.composition.member import Member, PendingCall
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


class _Begun(NamedTuple):
    """The set of a lower tier that a caller waits for."""

    member: Member
    positions: list[int]
    call: PendingCall[list[bool]]


class TieredWrite:
    """The state of one set, of at most as many pages as the memory of copies takes at once.

    Attributes:
        errors: One error of each tier that did not answer.
        stored: Whether some tier has stored each page.
    """

    def __init__(
        self,
        copier: Copier,
        members: Sequence[Member],
        space: KeySpace,
        hashes: Sequence[str],
        pages: Sequence[Page],
    ) -> None:
        """Prepare a set. `members` are the tiers, the fastest first."""
        self.errors: list[Exception] = []
        self.stored: list[bool] = [False] * len(hashes)
        self._copier = copier
        self._first, *self._lower = members
        self._space = space
        self._hashes = hashes
        self._pages = pages
        self._unknown: list[tuple[Member, list[int], Future[list[bool]] | None]] = []
        """Sets without an answer. They may still store their pages."""

    def set_through(self, move: Move) -> None:
        """Store the pages in all tiers at the same time, and wait for each until its deadline."""
        every = list(range(len(self._hashes)))
        begun = self._begin_below(move, every)
        self._set_first(every)
        self._wait(begun)

    def set_back(self, move: Move) -> None:
        """Store the pages in the first tier, and copy them to the others later.

        A page that the first tier does not take is stored in the others now.
        """
        every = list(range(len(self._hashes)))
        self._set_first(every)
        room, copied = self._take_copies([n for n in every if self.stored[n]], timeout_s=0.0)
        if room is None:
            for member in self._lower:
                member.counters.add("writeback_skipped", len(copied))
        else:
            copies = self._copies_of(move, copied, room)
            try:
                self._copier.copy_unawaited(self._lower, copies, "writeback")
            finally:
                room.release()
        self._wait(self._begin_below(move, [n for n in every if not self.stored[n]]))

    def doubt_the_refused(self) -> None:
        """Hide the pages that are reported as refused from tiers that may still store them."""
        for member, positions, write in self._unknown:
            hidden = [self._hashes[n] for n in positions if not self.stored[n]]
            if hidden:
                member.doubt(self._space, hidden, write)

    def _set_first(self, every: list[int]) -> None:
        self._unknown.append((self._first, every, None))
        with noting(self.errors):
            self._note(every, self._first.set(self._space, self._hashes, self._pages))
            self._unknown.pop()

    def _begin_below(self, move: Move, wanted: Sequence[int]) -> list[_Begun]:
        """Begin to store pages in the lower tiers, from copies."""
        if not wanted:
            return []
        deadline = Deadline(self._copier.timeout_s)
        room, copied = self._take_copies(wanted, deadline.remaining_s())
        if room is None:
            self.errors += [self._copier.memory.refusal()] * len(self._lower)
            return []
        begun: list[_Begun] = []
        copies = self._copies_of(move, copied, room)
        try:
            for member in self._lower:
                with noting(self.errors):
                    copy = self._copier.begin_copy(member, copies, deadline)
                    if copy is not None:
                        begun.append(_Begun(member, [copied[n] for n in copy[0]], copy[1]))
        finally:
            room.release()
        return begun

    def _wait(self, begun: Sequence[_Begun]) -> None:
        for member, positions, call in begun:
            self._unknown.append((member, positions, call.future))
            with noting(self.errors):
                self._note(positions, call.result())
                self._unknown.pop()

    def _note(self, positions: Sequence[int], stored: Sequence[bool]) -> None:
        for n, is_stored in zip(positions, stored, strict=True):
            self.stored[n] = self.stored[n] or is_stored

    def _take_copies(
        self, positions: Sequence[int], timeout_s: float
    ) -> tuple[Room | None, Sequence[int]]:
        """Copy pages, without those that are revoked. Return the copies and their positions."""
        if not positions:
            return None, []
        room = self._copier.memory.take(len(positions), self._space.stored_nbytes, timeout_s)
        if room is None:
            return None, positions
        try:
            copied = copy_revocable(room.pages, [self._pages[n] for n in positions])
        except BaseException:
            room.release()
            raise
        if not all(copied):
            room.pages = list(compress(room.pages, copied))
            positions = list(compress(positions, copied))
        return room, positions

    def _copies_of(self, move: Move, positions: Sequence[int], room: Room) -> Copies:
        hashes = [self._hashes[n] for n in positions]
        return Copies(move, self._space, hashes, room.pages, room)
