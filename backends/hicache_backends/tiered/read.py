"""One get of `tiered`: tier after tier, until every page is found whole."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import compress
from typing import TYPE_CHECKING

from hicache_backends.tiered.copier import Copies
from hicache_storage.backend_support.answers import answers_of, unanswered_in
from hicache_storage.backend_support.copies import copy_revocable
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.composition.member import noting
from hicache_storage.page_store.frame import FRAME_NBYTES, are_right

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from hicache_backends.tiered.copier import Copier
    from hicache_backends.tiered.memory import Room
    from hicache_backends.tiered.moves import Move
    from hicache_storage.composition.member import Member
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


class TieredRead:
    """The state of one get.

    Attributes:
        errors: One error of each tier that did not answer.
    """

    def __init__(
        self,
        copier: Copier,
        members: Sequence[Member],
        space: KeySpace,
        hashes: Sequence[str],
        pages: Sequence[Page],
    ) -> None:
        """Prepare a get. `members` are the tiers, the fastest first."""
        self.errors: list[Exception] = []
        self._copier = copier
        self._members = members
        self._space = space
        self._hashes = hashes
        self._pages = pages
        self._missing = list(range(len(hashes)))
        self._wrong: dict[int, list[Member]] = {}
        """The tiers that have a wrong copy of a page, by its position."""
        self._unanswered: set[int] = set()
        """Pages that a tier, or a part of it, did not answer about."""

    def ask_first(self) -> None:
        """Read from the first tier into the caller's pages, in this thread."""
        first = self._members[0]
        with self._noting():
            hits = first.get(self._space, self._hashes, self._pages)
            self._unanswered |= unanswered_in(hits)
            found = list(compress(self._missing, hits))
            self._sort(first, found, self._check(found, [self._pages[n] for n in found]))

    def ask_below(self) -> None:
        """Read what is missing from the other tiers, and copy it to the tiers above."""
        if not self._missing:
            return
        with self._copier.moving(self._space, [self._hashes[n] for n in self._missing]) as move:
            for level in range(1, len(self._members)):
                with self._noting():
                    self._ask(level, move)
                if not self._missing:
                    break
        # A tier that did not answer may have these pages whole.
        self._heal([n for n in self._missing if n in self._unanswered])

    def answers(self) -> list[bool]:
        """Return the verdict on each page.

        If every tier answered, a page that is wrong in some tier and right in none is returned as it is.
        The page store counts it, and deletes it everywhere.
        """
        answers: list[bool | None] = [True] * len(self._hashes)
        for n in self._missing:
            answers[n] = None if n in self._unanswered else n in self._wrong
        return answers_of(answers)

    @contextmanager
    def _noting(self) -> Generator[None]:
        """Note the error of a tier, and that it did not answer about the pages that are missing then."""
        before = len(self.errors)
        with noting(self.errors):
            yield
        if len(self.errors) > before:
            self._unanswered.update(self._missing)

    def _ask(self, level: int, move: Move) -> None:
        """Read from one lower tier, in parts that fit in the memory of copies."""
        memory, nbytes = self._copier.memory, self._space.stored_nbytes
        most, asked = memory.most_pages(nbytes), self._missing
        for start in range(0, len(asked), most):
            part = asked[start : start + most]
            deadline = Deadline(self._copier.timeout_s)
            room = memory.take(len(part), nbytes, deadline.remaining_s())
            if room is None:
                raise memory.refusal()
            try:
                self._ask_part(level, move, part, room, deadline)
            finally:
                room.release()

    def _ask_part(
        self, level: int, move: Move, part: list[int], room: Room, deadline: Deadline
    ) -> None:
        member = self._members[level]
        for n, copy in zip(part, room.pages, strict=True):
            copy.digest, copy.digest_skip = None, self._pages[n].digest_skip
        asked = [self._hashes[n] for n in part]
        hits = self._copier.memory.lend(
            room, member, lambda: member.begin_get(self._space, asked, room.pages), deadline
        ).result()
        self._unanswered.update(part[at] for at in unanswered_in(hits))
        found, copies = list(compress(part, hits)), list(compress(room.pages, hits))
        right = self._check(found, copies)
        # The wrong ones, too: if no tier has such a page whole, the caller gets it as it is.
        copied = copy_revocable([self._pages[n] for n in found], copies)
        taken = self._sort(
            member, found, [a if b else None for a, b in zip(right, copied, strict=True)]
        )
        found, copies = list(compress(found, taken)), list(compress(copies, taken))
        self._heal(found)
        self._promote(level, move, found, copies, room)

    def _check(self, found: Sequence[int], read: Sequence[Page]) -> Sequence[bool | None]:
        if self._space.frame_nbytes < FRAME_NBYTES:
            return [True] * len(found)
        return are_right(self._space, [self._hashes[n] for n in found], read)

    def _sort(self, member: Member, found: list[int], right: Sequence[bool | None]) -> list[bool]:
        """Note which pages a tier has returned whole. Return the same."""
        taken = [one is True for one in right]
        member.counters.add("hits", taken.count(True))
        if taken.count(True) == len(self._missing):  # the usual case
            self._missing = []
            return taken
        for n, one in zip(found, right, strict=True):
            if one is False:
                self._wrong.setdefault(n, []).append(member)
                member.counters.add("wrong_pages")
        served = set(compress(found, taken))
        self._missing = [n for n in self._missing if n not in served]
        return taken

    def _heal(self, positions: Sequence[int]) -> None:
        """Delete the wrong copies of pages that another tier has, or may have."""
        by_member: dict[Member, list[str]] = {}
        for n in positions if self._wrong else ():
            for member in self._wrong.get(n, ()):
                by_member.setdefault(member, []).append(self._hashes[n])
        for member, hashes in by_member.items():
            self._copier.heal(member, self._space, hashes)

    def _promote(
        self, level: int, move: Move, positions: list[int], copies: list[Page], room: Room
    ) -> None:
        """Copy pages to the tiers above the one that served them, if a rule says so."""
        hashes = [self._hashes[n] for n in positions]
        admitted = self._copier.promotes(self._space, hashes)
        wanted = [a or n in self._wrong for n, a in zip(positions, admitted, strict=True)]
        if any(wanted):
            chosen = list(compress(hashes, wanted)), list(compress(copies, wanted))
            self._copier.copy_unawaited(
                self._members[:level], Copies(move, self._space, *chosen, room), "promoted"
            )
