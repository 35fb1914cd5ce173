"""Read and verify the pages of key spaces, and delete the wrong pages."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage.cli.operations.batches import (
    PageMemory,
    batches,
    pages_per_batch,
    run_batches,
    threads_for,
)
from hicache_storage.cli.operations.proofs import (
    WRONG,
    PageProof,
    PageProver,
    Proof,
    fault_proof,
)
from hicache_storage.composition.parts import misplaced, striped_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from hicache_storage.cli.progress import Meter
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage, PageInfo, UnreadableSpace


@dataclass(frozen=True, slots=True)
class Finding:
    """A page that is not right."""

    space: KeySpace
    page: PageProof


@dataclass(slots=True)
class Verification:
    """The results of reading and verifying the pages so far."""

    proofs: Counter[Proof] = field(default_factory=Counter[Proof])
    findings: list[Finding] = field(default_factory=list[Finding])
    """Pages that are wrong, or that cannot be read or verified."""
    misplaced: Counter[str] = field(default_factory=Counter[str])
    """Pages that belong in another stripe, by the name of the stripe that has them. Engines do not find
    them there, so they are not among `proofs`."""
    nbytes: int = 0
    elapsed_s: float = 0.0
    is_done: bool = False
    """True if the run has read all pages that it had to read."""
    deleted: int = 0
    unreadable: Sequence[UnreadableSpace] = ()
    """Key spaces in which no page can be read."""

    def add(self, space: KeySpace, proofs: Sequence[PageProof]) -> None:
        """Add the results for pages of one key space."""
        for page in proofs:
            self.proofs[page.proof] += 1
            if page.proof is not Proof.GONE:
                self.nbytes += space.stored_nbytes
                if page.proof is not Proof.OK:
                    self.findings.append(Finding(space, page))

    @property
    def pages(self) -> int:
        """How many pages were read."""
        return sum(self.proofs.values())

    @property
    def is_clean(self) -> bool:
        """True if every existing page was verified as right, and is in its place."""
        return not (self.findings or self.misplaced or self.unreadable)

    def as_json(self) -> dict[str, Any]:
        """Return the figures, and each finding."""
        return {
            "pages": self.pages,
            "nbytes": self.nbytes,
            "elapsed_s": self.elapsed_s,
            "proofs": {proof.value: self.proofs[proof] for proof in Proof},
            "misplaced": dict(self.misplaced),
            "is_done": self.is_done,
            "deleted": self.deleted,
            "unreadable_spaces": [asdict(one) for one in self.unreadable],
            "findings": [
                {
                    "space": finding.space.id,
                    "hash": finding.page.page_hash,
                    "reason": finding.page.proof.value,
                    "detail": finding.page.detail,
                }
                for finding in self.findings
            ],
        }


def verify(
    storage: HiCacheStorage,
    spaces: Sequence[KeySpace],
    meter: Meter,
    *,
    result: Verification | None = None,
    share: float = 1.0,
    chance: Callable[[], float] = random.random,
) -> Verification:
    """Read and verify a random share of the pages, and list all pages with a wrong length.

    `result` has what was found so far, even if this call is interrupted.
    """
    result = result or Verification()
    if meter.wants_total:
        nbytes = sum(info.nbytes for space in spaces for info in storage.scan(space))
        meter.begin(int(nbytes * share))
    began_s = time.monotonic()
    try:
        for space in spaces:
            verify_space(storage, space, meter, result, share=share, chance=chance)
        result.is_done = True
    finally:
        result.elapsed_s = time.monotonic() - began_s
    return result


def verify_space(
    storage: HiCacheStorage,
    space: KeySpace,
    meter: Meter,
    result: Verification,
    *,
    share: float = 1.0,
    chance: Callable[[], float] = random.random,
) -> None:
    """Read and verify pages of one key space, and count misplaced ones. Add them to `result`."""
    result.add(space, [fault_proof(fault) for fault in storage.faults(space)])
    elsewhere: set[bytes] = set()
    for name, striped in striped_parts(storage).items():
        for own in striped.parts():
            for info in misplaced(striped, own, space):
                result.misplaced[f"{name}/{own}".lstrip("/")] += 1
                elsewhere.add(info.page_hash.encode())
    with closing(_proofs(storage, space, share, chance)) as parts:
        for proofs in parts:
            meter.advance(len(proofs), len(proofs) * space.stored_nbytes)
            result.add(
                space,
                [
                    page
                    for page in proofs
                    if not (page.proof is Proof.GONE and page.page_hash.encode() in elsewhere)
                ],
            )


def delete_wrong(
    look: HiCacheStorage,
    storage: HiCacheStorage,
    findings: Sequence[Finding],
    result: Verification,
) -> None:
    """Delete the wrong pages among `findings` from `storage`. Count them in `result`, page by page.

    Each page is read again first, because an engine may have replaced it. The read uses `look`, whose
    reads change nothing. A page that the store does not return, or that cannot be verified, stays.
    """
    for finding in findings:
        if finding.page.proof not in WRONG:
            continue
        space, page_hash = finding.space, finding.page.page_hash
        storage.open_space(space)
        memory = PageMemory(space, 1, look.capabilities.alignment)
        prover = PageProver(look, space)
        (again,) = prover.read([page_hash], memory.views(1))
        if again.proof not in WRONG:
            continue
        try:
            is_deleted = storage.batch_delete(space, [page_hash]) == [True]
        except BaseException:  # it may be gone all the same
            (again,) = prover.read([page_hash], memory.views(1))
            result.deleted += again.proof is Proof.GONE
            raise
        result.deleted += is_deleted


def _proofs(
    storage: HiCacheStorage, space: KeySpace, share: float, chance: Callable[[], float]
) -> Generator[list[PageProof], None, None]:
    """Yield the results for the chosen pages of a key space, one batch at a time."""
    pages = pages_per_batch(space, storage)
    memory = PageMemory(space, pages, storage.capabilities.alignment)
    prover = PageProver(storage, space)
    chosen = _chosen(storage.scan(space), share, chance)
    return run_batches(
        lambda hashes: prover.read(hashes, memory.views(len(hashes))),
        batches(chosen, pages),
        threads_for(storage),
    )


def _chosen(
    pages: Iterable[PageInfo], share: float, chance: Callable[[], float]
) -> Generator[str, None, None]:
    """Yield a random share of the pages, but at least one, because a check of none would pass."""
    lowest, spare = math.inf, None
    for info in pages:
        drawn = chance() if share < 1 else 0.0
        if drawn < share:
            yield info.page_hash
        if drawn < lowest:
            lowest, spare = drawn, info.page_hash
    if spare is not None and lowest >= share:
        yield spare
