"""Copy key spaces from one store to another.

A page that the target has already is skipped without being read. So if a copy was killed, the next
one continues where it ended, without a file that records the progress. Each page is verified between
its read and its write.

The size of a page's frame depends on the alignment that its store needs. If the target's alignment is
different, the same payload gets a frame of the target's size. The target's key space then differs
only in `frame_nbytes`, and is the one that an engine on the target uses.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hicache_storage.cli.operations.batches import (
    PageMemory,
    batches,
    pages_per_batch,
    run_batches,
    threads_for,
)
from hicache_storage.cli.operations.proofs import (
    PageProof,
    PageProver,
    Proof,
    fault_proof,
    framed_page,
)
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.native.reference.frames import FRAME_NBYTES
from hicache_storage.page import Page
from hicache_storage.page_store.frame import Framing, frame_nbytes
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from hicache_storage.cli.operations.rate_limit import RateLimit
    from hicache_storage.cli.progress import Meter
    from hicache_storage.storage import UnreadableSpace

T = TypeVar("T")

_TRIES = 4
_FIRST_DELAY_S = 0.5
_MOST_REFUSED = 1024
"""The number of refused pages in a row after which the copy gives up. Fewer refusals do not mean that
the target is full: a page may be too large, or the target may be full only for a moment."""


class Confirmed(NamedTuple):
    """Pages that a target should have at the end."""

    target: HiCacheStorage
    space: KeySpace
    hashes: bytes
    """All in one object, which is small."""


@dataclass(slots=True)
class Copied:
    """The pages of a copy, counted by what happened to them."""

    copied: int = 0
    skipped: int = 0
    """Pages that the target had already."""
    refused: int = 0
    """Pages that the target refused, because it is full."""
    nbytes: int = 0
    not_proved: Counter[Proof] = field(default_factory=Counter[Proof])
    """Pages that were not copied, by reason."""
    unframed_spaces: list[KeySpace] = field(default_factory=list[KeySpace])
    """Key spaces whose pages have no frames, so none of them can be verified."""
    unreadable: Sequence[UnreadableSpace] = ()
    """Key spaces of the source in which no page can be read."""
    lost: int | None = None
    """Pages that the target confirmed, but does not have after the last write. None: not looked up."""
    removed: int = 0
    """Pages that were removed from a stripe in which they did not belong."""
    left: int = 0
    """Pages that could not be removed from it. They are in their own stripe, too."""
    needed: Counter[str] = field(default_factory=Counter[str])
    """The bytes that the target, as "", or its parts have to take. Only a trial counts them."""
    elapsed_s: float = 0.0
    refused_in_a_row: int = 0
    """Pages that the target has refused since it last accepted a page."""
    confirmed: list[Confirmed] = field(default_factory=list[Confirmed])
    """Each batch that is copied or skipped, without its refused pages."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def is_whole(self) -> bool:
        """True if the target has every page that the source still has."""
        wrong = sum(self.not_proved.values()) - self.not_proved[Proof.GONE]
        failed = wrong or self.refused or self.lost or self.left
        return not (failed or self.unframed_spaces or self.unreadable)

    @property
    def is_given_up(self) -> bool:
        """True if the target has refused so many pages in a row that it must be full."""
        return self.refused_in_a_row >= _MOST_REFUSED

    def note(self, *, skipped: int = 0, copied: int = 0, refused: int = 0, nbytes: int = 0) -> None:
        """Add pages. Thread-safe."""
        with self.lock:
            self.skipped += skipped
            self.copied += copied
            self.refused += refused
            self.nbytes += nbytes
            self.refused_in_a_row = 0 if copied else self.refused_in_a_row + refused

    def note_confirmed(
        self, target: HiCacheStorage, space: KeySpace, hashes: Iterable[str]
    ) -> None:
        """Remember pages that a target should have at the end. Thread-safe."""
        with self.lock:
            self.confirmed.append(Confirmed(target, space, " ".join(hashes).encode()))

    def note_removed(self, gone: Sequence[bool]) -> None:
        """Add pages that should leave a stripe. Thread-safe."""
        with self.lock:
            self.removed += gone.count(True)
            self.left += gone.count(False)

    def note_needed(self, part: str, nbytes: int) -> None:
        """Add bytes that a part has to take. Thread-safe."""
        with self.lock:
            self.needed[part] += nbytes

    def look_up(self) -> None:
        """Count the confirmed pages that a target has lost, as a target evicts that is too small."""
        lost = 0
        for target, space, hashes in self.confirmed:
            there = target.batch_exists(space, hashes.decode().split())
            lost += there.count(False)
        self.lost = lost

    def note_proofs(self, proofs: Iterable[PageProof]) -> None:
        """Add the pages that are not right. Thread-safe."""
        with self.lock:
            self.not_proved.update(page.proof for page in proofs if page.proof is not Proof.OK)

    def as_json(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "copied_pages": self.copied,
            "skipped_pages": self.skipped,
            "refused_pages": self.refused,
            "removed_pages": self.removed,
            "left_pages": self.left,
            "lost_pages": self.lost,
            "not_proved_pages": {proof.value: n for proof, n in self.not_proved.items()},
            "unframed_spaces": [space.id for space in self.unframed_spaces],
            "unreadable_spaces": [asdict(one) for one in self.unreadable],
            "copied_nbytes": self.nbytes,
            "elapsed_s": self.elapsed_s,
        }


def copy(
    source: HiCacheStorage,
    target: HiCacheStorage,
    spaces: Sequence[KeySpace],
    meter: Meter,
    limit: RateLimit,
    *,
    result: Copied | None = None,
    is_trial: bool = False,
) -> Copied:
    """Copy the pages of `spaces` that the target does not have. Count them in `result`.

    With `is_trial`, count the pages that would be copied, but read and write none of them. Pages that
    only a read shows to be wrong are then counted as copied.

    `result` counts what the stores confirmed, even if the copy raises. A page whose write got no answer
    is not counted, although the target may have stored it. The next copy finds it there.

    Raises:
        StorageUnavailable, StorageTimeout: A store did not answer, not even when the call was repeated.
        UnsupportedOperation: The target does not accept pages of this size.
    """
    result = Copied() if result is None else result
    if meter.wants_total:
        meter.begin(sum(info.nbytes for space in spaces for info in source.scan(space)))
    copies = (
        SpaceCopy(source, target, space, limit, result, is_trial=is_trial)
        for space in framed_among(spaces, result)
    )
    run_copies(copies, meter, result, is_trial=is_trial)
    return result


def framed_among(spaces: Iterable[KeySpace], result: Copied) -> Iterator[KeySpace]:
    """Yield the key spaces whose pages can be verified. Count the others in `result`."""
    for space in spaces:
        if space.frame_nbytes >= FRAME_NBYTES:
            yield space
        elif space not in result.unframed_spaces:
            result.unframed_spaces.append(space)


def run_copies(
    copies: Iterable[SpaceCopy], meter: Meter, result: Copied, *, is_trial: bool
) -> None:
    """Run copies of key spaces, one after the other, and look at the end whether the pages are there."""
    began_s = time.monotonic()
    try:
        for one in copies:
            with closing(one.run()) as parts:
                for pages in parts:
                    meter.advance(pages, pages * one.space.stored_nbytes)
                    if result.is_given_up:
                        return
    finally:
        result.elapsed_s = time.monotonic() - began_s
        if not is_trial and not isinstance(sys.exception(), KeyboardInterrupt):
            with suppress(StorageUnavailable, StorageTimeout):  # then it stays None
                result.look_up()


def target_space(space: KeySpace, target: HiCacheStorage) -> KeySpace:
    """Return the key space that an engine on `target` uses for the pages of `space`."""
    return replace(space, frame_nbytes=frame_nbytes(target.capabilities.alignment))


class SpaceCopy:
    """The copy of one key space."""

    def __init__(
        self,
        source: HiCacheStorage,
        target: HiCacheStorage,
        space: KeySpace,
        limit: RateLimit,
        result: Copied,
        *,
        is_trial: bool = False,
        stays_framed: bool = False,
    ) -> None:
        """Prepare the copy. With `stays_framed`, pages keep their frames and their key space."""
        self.space: KeySpace = space
        self._source = source
        self._target = target
        self._target_space = space if stays_framed else target_space(space, target)
        self._limit = limit
        self._result = result
        self._is_trial = is_trial
        pages = pages_per_batch(space, source, target)
        self._pages = pages
        alignment = max(source.capabilities.alignment, target.capabilities.alignment)
        self._memory = PageMemory(space, pages, alignment)
        self._target_memory = PageMemory(self._target_space, pages, target.capabilities.alignment)
        self._prover = PageProver(source, space)
        self._framing = Framing(self._target_space, checksum=True)
        if is_trial:
            HiCacheStorage.open_space(target, self._target_space)  # it checks the size of pages
        else:
            target.open_space(self._target_space)

    def run(self) -> Generator[int, None, None]:
        """Copy the key space. Yield the number of pages in each batch."""
        self._result.note_proofs(fault_proof(fault) for fault in self._source.faults(self.space))
        hashes = (info.page_hash for info in self._source.scan(self.space))
        return run_batches(
            self._move,
            batches(hashes, self._pages),
            threads_for(self._source, self._target),
            stop=self._limit.stop,
        )

    def _move(self, hashes: list[str]) -> int:
        there = self._retried(lambda: self._target.batch_exists(self._target_space, hashes))
        found = [*compress(hashes, there)]
        todo = [
            page_hash for page_hash, is_there in zip(hashes, there, strict=True) if not is_there
        ]
        self._result.note(skipped=len(found))
        if self._is_trial:
            self._plan(todo)
            return len(hashes)
        if found:
            self._skip(found)
        if todo:
            memory = self._memory.views(len(todo))
            self._write(self._read(self._prover, todo, memory), memory)
        return len(hashes)

    def _plan(self, hashes: Sequence[str]) -> None:
        """Count pages that the target lacks."""
        nbytes = len(hashes) * self._target_space.stored_nbytes
        self._result.note(copied=len(hashes), nbytes=nbytes)
        self._result.note_needed("", nbytes)

    def _skip(self, hashes: Sequence[str]) -> None:
        """Leave out pages that the target has."""
        self._confirm(hashes)

    def _confirm(self, hashes: Sequence[str]) -> None:
        """Note pages that the target has."""
        self._result.note_confirmed(self._target, self._target_space, hashes)

    def _read(
        self, prover: PageProver, hashes: Sequence[str], memory: Sequence[memoryview]
    ) -> list[PageProof]:
        self._limit.wait(len(hashes) * self.space.stored_nbytes)
        proofs = self._retried(lambda: prover.read(hashes, memory))
        self._result.note_proofs(proofs)
        return proofs

    def _write(self, proofs: Sequence[PageProof], memory: Sequence[memoryview]) -> None:
        right = [index for index, page in enumerate(proofs) if page.proof is Proof.OK]
        if not right:
            return
        hashes = [proofs[index].page_hash for index in right]
        stored = self._reframed(hashes, [memory[index] for index in right])
        pages = [Page(view) for view in stored]
        taken = self._retried(lambda: self._target.batch_set(self._target_space, hashes, pages))
        copied = taken.count(True)
        self._result.note(
            copied=copied,
            refused=taken.count(False),
            nbytes=copied * self._target_space.stored_nbytes,
        )
        self._confirm([*compress(hashes, taken)])

    def _reframed(self, hashes: Sequence[str], memory: Sequence[memoryview]) -> list[memoryview]:
        """Return pages with the target's frames. Pages whose frame stays the same are not copied."""
        if self._target_space == self.space:
            return list(memory)
        views = self._target_memory.views(len(memory))
        for view, stored in zip(views, memory, strict=True):
            view[self._target_space.frame_nbytes :] = stored[self.space.frame_nbytes :]
        self._framing.write([framed_page(self._target_space, view) for view in views], hashes)
        return views

    def _retried(self, call: Callable[[], T]) -> T:
        """Return the result of a call. Repeat the call if a store does not answer."""
        for attempt in range(1, _TRIES):
            try:
                return call()
            except (StorageUnavailable, StorageTimeout):
                if self._limit.stopped.wait(_FIRST_DELAY_S * 2 ** (attempt - 1)):
                    raise
        return call()
