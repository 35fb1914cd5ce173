"""Move pages that lie on a wrong stripe to the one that they belong in.

A page is read from the wrong stripe, verified, and written to its own. It is removed from the wrong one
only after its own stripe has said that it has the page. If its own stripe had it before, that copy is
read and verified first. So a rebalance that is killed loses nothing, and the next one goes on there.
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

from hicache_storage.backend_support.wrapper import WrapperStorage
from hicache_storage.cli.operations.copying import Copied, SpaceCopy, framed_among, run_copies
from hicache_storage.cli.operations.proofs import PageProver, Proof
from hicache_storage.composition.parts import misplaced, striped_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_storage.cli.operations.rate_limit import RateLimit
    from hicache_storage.cli.progress import Meter
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage, PageFault, PageInfo


def rebalance(
    source: HiCacheStorage,
    target: HiCacheStorage,
    spaces: Sequence[KeySpace],
    meter: Meter,
    limit: RateLimit,
    *,
    result: Copied,
    is_trial: bool = False,
) -> Copied:
    """Move the misplaced pages of `spaces`. Count them in `result`, as `copying.copy` does.

    `source` and `target` are the same store. `source` is read, and `target` is changed.
    """
    moves = _moves(source, target, spaces, limit, result, is_trial=is_trial)
    if meter.wants_total:
        meter.begin(
            sum(
                info.nbytes
                for striped in striped_parts(source).values()
                for part in striped.parts()
                for space in spaces
                for info in misplaced(striped, part, space)
            )
        )
    run_copies(moves, meter, result, is_trial=is_trial)
    return result


def _moves(
    source: HiCacheStorage,
    target: HiCacheStorage,
    spaces: Sequence[KeySpace],
    limit: RateLimit,
    result: Copied,
    *,
    is_trial: bool,
) -> Iterator[SpaceMove]:
    """Yield a move for each stripe and key space with misplaced pages, those of inner stripes first."""
    changed = striped_parts(target)
    for name, striped in striped_parts(source).items():
        for part in striped.parts():
            for space in framed_among(spaces, result):
                if any(True for _ in misplaced(striped, part, space)):
                    yield SpaceMove(
                        _Misplaced(striped, part),
                        changed[name],
                        space,
                        limit,
                        result,
                        is_trial=is_trial,
                        name=name,
                    )


class _Misplaced(WrapperStorage):
    """A stripe as if it had no pages but those that belong in other stripes."""

    def __init__(self, striped: HiCacheStorage, part: str) -> None:
        super().__init__(striped.parts()[part])
        self.striped: HiCacheStorage = striped
        self.part: str = part

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        return misplaced(self.striped, self.part, space)

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        for fault in self.inner.faults(space, hashes):
            (places,) = self.striped.page_parts(space, [fault.page_hash])
            if self.part not in places:
                yield fault


class SpaceMove(SpaceCopy):
    """The move of the misplaced pages of one key space from one stripe to the others."""

    def __init__(
        self,
        source: _Misplaced,
        target: HiCacheStorage,
        space: KeySpace,
        limit: RateLimit,
        result: Copied,
        *,
        is_trial: bool,
        name: str,
    ) -> None:
        """Prepare the move. `name` is that of `target` in the whole store."""
        super().__init__(source, target, space, limit, result, is_trial=is_trial, stays_framed=True)
        self._name = name
        self._former = target.parts()[source.part]
        self._own_prover = PageProver(source.striped, space)

    def _plan(self, hashes: Sequence[str]) -> None:
        self._result.note(copied=len(hashes), nbytes=len(hashes) * self.space.stored_nbytes)
        for places in self._target.page_parts(self.space, hashes):
            for part in places:
                name = f"{self._name}/{part}".lstrip("/")
                self._result.note_needed(name, self.space.stored_nbytes)

    def _skip(self, hashes: Sequence[str]) -> None:
        """Remove pages whose copy in their own stripe is right."""
        proofs = self._read(self._own_prover, hashes, self._memory.views(len(hashes)))
        self._remove([page.page_hash for page in proofs if page.proof is Proof.OK])

    def _confirm(self, hashes: Sequence[str]) -> None:
        """Remove pages that their own stripe has taken."""
        there = self._retried(lambda: self._target.batch_exists(self.space, hashes))
        self._remove([*compress(hashes, there)])

    def _remove(self, hashes: Sequence[str]) -> None:
        super()._confirm(hashes)
        self._result.note_removed(
            self._retried(lambda: self._former.batch_delete(self.space, hashes))
        )
