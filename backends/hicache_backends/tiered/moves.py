"""Know which pages are being copied between tiers, so that a delete also reaches these copies.

A set begins a move before it stores a page in any tier, and a get before it reads from a tier below
the first. The move ends with the last copy of its pages. A removal cancels the pages in every move,
waits for copies that a tier is storing, and only then deletes the pages from the tiers. A move that
begins during a removal begins canceled, so no page returns.

All storages of the process with a tier that others may share have one `Moves`. A move and a removal
concern each other if their scopes overlap.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from hicache_storage.backend_support.fork_local import ForkLocal

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from hicache_storage.backend_support.deadline import Deadline

Scope: TypeAlias = frozenset[object]
"""The place of each tier of a storage that others may share, and an object of its own for the rest."""


class Move:
    """Pages of one key space that may be copied to other tiers. `Moves` guards every field."""

    __slots__ = ("canceled", "hashes", "is_canceled", "scope", "space_id", "users", "writing")

    def __init__(self, scope: Scope, space_id: str, hashes: Iterable[str]) -> None:
        self.scope = scope
        self.space_id = space_id
        self.hashes = frozenset(hashes)
        self.canceled = set[str]()
        self.is_canceled = False
        """True if all of the key space is removed."""
        self.users = 1
        """The call that began the move, and each copy that has not ended."""
        self.writing = Counter[str]()
        """How many tiers are storing each page now."""

    def cancel(self, hashes: frozenset[str] | None) -> None:
        if hashes is None:
            self.is_canceled = True
        else:
            self.canceled |= hashes & self.hashes

    def is_wanted(self, page_hash: str) -> bool:
        return not self.is_canceled and page_hash not in self.canceled

    def among(self, hashes: frozenset[str] | None) -> set[str]:
        """Return which of `hashes` a tier is storing now."""
        return set(self.writing) if hashes is None else {*hashes} & self.writing.keys()


class Moves:
    """The moves and the removals of one process. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._moves: set[Move] = set()
        self._removals: list[tuple[Scope, str, frozenset[str] | None]] = []

    def begin(self, scope: Scope, space_id: str, hashes: Sequence[str]) -> Move:
        """Begin a move. Call `end` when the call that began it has ended."""
        move = Move(scope, space_id, hashes)
        with self._changed:
            for removed_scope, removed_space, removed in self._removals:
                if removed_space == space_id and not scope.isdisjoint(removed_scope):
                    move.cancel(removed)
            self._moves.add(move)
        return move

    def end(self, move: Move) -> None:
        """Note that a user of the move has ended."""
        with self._changed:
            self._end(move)

    def begin_write(self, move: Move, hashes: Sequence[str]) -> list[int]:
        """Note that a tier begins to store copies. Return the indexes of those that are not canceled."""
        with self._changed:
            wanted = [n for n, page_hash in enumerate(hashes) if move.is_wanted(page_hash)]
            move.writing.update(hashes[n] for n in wanted)
            move.users += 1
            return wanted

    def end_write(self, move: Move, hashes: Sequence[str], undone: set[str]) -> list[str]:
        """Note that a tier has stored copies. If some were canceled meanwhile, return them instead.

        Delete these pages from the tier, add them to `undone`, and call `end_write` again.
        """
        with self._changed:
            canceled = [
                page_hash
                for page_hash in hashes
                if not move.is_wanted(page_hash) and page_hash not in undone
            ]
            if not canceled:
                move.writing.subtract(hashes)
                move.writing += Counter[str]()  # drops the zeros
                self._end(move)
                self._changed.notify_all()
            return canceled

    def settle(
        self, scope: Scope, space_id: str, hashes: Sequence[str], deadline: Deadline
    ) -> None:
        """Wait until no tier is storing copies of these pages, or until the deadline."""
        with self._changed:
            self._settle(scope, space_id, frozenset(hashes), deadline)

    @contextmanager
    def removal(
        self, scope: Scope, space_id: str, hashes: Sequence[str] | None, deadline: Deadline
    ) -> Generator[set[str]]:
        """Cancel pages in all moves, or with None all pages of a key space, until the block ends.

        Yield the pages that a tier is still storing at the deadline. They are removed when it has stored
        them, unless the tier fails then or is not asked.
        """
        wanted = None if hashes is None else frozenset(hashes)
        removal = (scope, space_id, wanted)
        with self._changed:
            self._removals.append(removal)
        try:
            with self._changed:
                for move in self._of(scope, space_id):
                    move.cancel(wanted)
                left = self._settle(scope, space_id, wanted, deadline)
            yield left
        finally:
            with self._changed:
                self._removals.remove(removal)

    def _settle(
        self, scope: Scope, space_id: str, wanted: frozenset[str] | None, deadline: Deadline
    ) -> set[str]:
        """Wait for tiers that store pages. Return the pages that they are storing at the deadline."""

        def writing() -> set[str]:
            return set[str]().union(*(move.among(wanted) for move in self._of(scope, space_id)))

        self._changed.wait_for(lambda: not writing(), deadline.remaining_s())
        return writing()

    def _of(self, scope: Scope, space_id: str) -> list[Move]:
        return [
            move
            for move in self._moves
            if move.space_id == space_id and not move.scope.isdisjoint(scope)
        ]

    def _end(self, move: Move) -> None:
        move.users -= 1
        if not move.users:
            self._moves.discard(move)


MOVES: ForkLocal[Moves] = ForkLocal(Moves, close=lambda _: None)
"""The moves between tiers that others may share. A forked child has its own."""
