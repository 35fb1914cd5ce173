"""Copy pages between tiers, and undo the copies of pages that are deleted meanwhile."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from hicache_backends.tiered.memory import CopyMemory
from hicache_backends.tiered.moves import MOVES, Moves
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.composition.member import noting
from hicache_storage.composition.parts import place_of
from hicache_storage.page_store.admission import Admission, AdmissionSettings
from hicache_storage.settings import counted

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from contextlib import AbstractContextManager

    from hicache_backends.tiered.memory import Room
    from hicache_backends.tiered.moves import Move
    from hicache_backends.tiered.settings import TieredSettings
    from hicache_storage.composition.member import Member, PendingCall
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import HiCacheStorage

logger: logging.Logger = logging.getLogger(__name__)


class Copies(NamedTuple):
    """Copies of pages of one move, and the memory that they are in."""

    move: Move
    space: KeySpace
    hashes: Sequence[str]
    pages: Sequence[Page]
    room: Room


class Copier:
    """The copies between tiers in one process: their memory, and the moves that they belong to."""

    def __init__(
        self,
        storage: HiCacheStorage,
        settings: TieredSettings,
        lower_tiers: Sequence[Member],
        *,
        read_only: bool,
    ) -> None:
        self.timeout_s: float = settings.timeout_s
        """How long a call waits for memory, and a removal for copies under way."""
        self.memory: CopyMemory = CopyMemory(storage, settings.copy_nbytes, lower_tiers)
        shared = [
            json.dumps([each.backend, place_of(each.config)], sort_keys=True, default=str)
            for each, part in zip(settings.tiers, storage.parts().values(), strict=True)
            if part.capabilities.shared
        ]
        self._moves = MOVES.get() if shared else Moves()
        self._scope = frozenset[object]([self, *shared])
        self._read_only = read_only
        self._promotes = settings.promote != "never" and not read_only
        self._admission = Admission(AdmissionSettings(second_use=settings.promote == "second_use"))

    @contextmanager
    def moving(self, space: KeySpace, hashes: Sequence[str]) -> Generator[Move]:
        """Begin a move of pages, which removals can cancel until the block and its copies have ended."""
        move = self._moves.begin(self._scope, space.id, hashes)
        try:
            yield move
        finally:
            self._moves.end(move)

    def settle(self, space_id: str, hashes: Sequence[str]) -> None:
        """Wait for the copies of pages that are under way."""
        self._moves.settle(self._scope, space_id, hashes, Deadline(self.timeout_s))

    def removal(
        self, space_id: str, hashes: Sequence[str] | None
    ) -> AbstractContextManager[set[str]]:
        """Cancel copies while pages are removed. See `Moves.removal`."""
        return self._moves.removal(self._scope, space_id, hashes, Deadline(self.timeout_s))

    def begin_copy(
        self, member: Member, copies: Copies, deadline: Deadline
    ) -> tuple[list[int], PendingCall[list[bool]]] | None:
        """Begin to store copies in a tier. Leave out pages that were canceled.

        Return the indexes of the others and the call, or None if all were canceled.

        Raises:
            StorageUnavailable: The tier is not asked now.
            StorageTimeout: At `deadline` its other calls have all of its memory.
        """
        move, space = copies.move, copies.space
        wanted = self._moves.begin_write(move, copies.hashes)
        kept = [copies.hashes[n] for n in wanted]
        undone = set[str]()

        def end(_: object = None) -> None:
            while canceled := self._moves.end_write(move, kept, undone):
                undone.update(canceled)
                with noting([]):  # on a thread of the tier, because this one may be an engine's
                    member.begin_delete(space, canceled).future.add_done_callback(end)
                    return

        if not kept:
            end()
            return None
        try:
            pages = [copies.pages[n] for n in wanted]
            call = self.memory.lend(
                copies.room, member, lambda: member.begin_set(space, kept, pages), deadline
            )
        except BaseException:
            end()
            raise
        call.future.add_done_callback(end)
        return wanted, call

    def copy_unawaited(self, members: Sequence[Member], copies: Copies, counter: str) -> None:
        """Store copies in tiers without waiting. Count the pages as `counter`, or as skipped."""
        fits = bool(copies.hashes) and self.memory.let_go(copies.room)
        for member in members:
            with noting([]):
                if fits:
                    self.begin_copy(member, copies, Deadline(0.0))
                    member.counters.add(counter, len(copies.hashes))
                    continue
            member.counters.add(f"{counter}_skipped", len(copies.hashes))

    def heal(self, member: Member, space: KeySpace, hashes: Sequence[str]) -> None:
        """Delete wrong pages from one tier. If it refuses, they stay, and other tiers serve them."""
        logger.warning(
            "%s has %s; other tiers have them whole",
            member.label,
            counted(len(hashes), "wrong page"),
        )
        if not self._read_only:
            with noting([]):
                member.begin_delete(space, hashes).result()

    def promotes(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Decide which pages that a lower tier served are copied to the tiers above."""
        if not self._promotes:
            return [False] * len(hashes)
        return self._admission.admit(hashes, space.stored_nbytes, group=space.id)

    def close(self) -> None:
        """Free the memory of copies when they have ended."""
        self.memory.close()
