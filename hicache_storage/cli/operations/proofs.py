"""Verify that a stored page belongs to its key and is intact, by its frame and payload checksum."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.native.reference.frames import FRAME_FIELDS, FRAME_NBYTES
from hicache_storage.page import Page
from hicache_storage.page_store.frame import FramedPage, Framing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.errors import CorruptPage
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage, PageFault

_CHECKSUMMED = 1
_WORDS = frozenset({"wrong_size", "corrupt", "not_authentic", "unknown_key", "unreadable"})
"""The reasons that a `PageFault` can have."""


class Proof(enum.Enum):
    """The result of reading one page. The value is the reason in lists and in JSON."""

    OK = "ok"
    CORRUPT = "corrupt"
    WRONG_KEY = "wrong_key"
    WRONG_SIZE = "wrong_size"
    NOT_AUTHENTIC = "not_authentic"
    """The page cannot be opened with the key that it names."""
    UNKNOWN_KEY = "unknown_key"
    """The page is sealed with a key that the config does not list."""
    UNREADABLE = "unreadable"
    """The store says that the page exists, but does not return it."""
    NO_CHECKSUM = "no_checksum"
    """The frame is right, but has no checksum of the payload."""
    NO_FRAME = "no_frame"
    """The pages of this key space have no frames, so nothing can be verified."""
    GONE = "gone"
    """The page was listed, but does not exist any more."""


WRONG = frozenset({Proof.CORRUPT, Proof.WRONG_KEY, Proof.WRONG_SIZE, Proof.NOT_AUTHENTIC})
"""Results for pages that no engine can use, so it is safe to delete them."""


@dataclass(frozen=True, slots=True)
class PageProof:
    """The result for one page, with details if the page is wrong."""

    page_hash: str
    proof: Proof
    detail: str = ""
    is_read: bool = False
    """True if the store returned the page, right or wrong."""


class PageProver:
    """A reader that verifies the pages of one key space. Thread-safe."""

    def __init__(self, storage: HiCacheStorage, space: KeySpace) -> None:
        self._storage = storage
        self._space = space
        self._framing = Framing(space, checksum=True)
        storage.open_space(space)

    def read(self, hashes: Sequence[str], memory: Sequence[memoryview]) -> list[PageProof]:
        """Read each page into its memory. Return the results in the order of the hashes."""
        pages = [Page(view) for view in memory]
        for page in pages:
            page.digest_skip = self._space.frame_nbytes
        hits = self._storage.batch_get(self._space, hashes, pages)
        found = [index for index, hit in enumerate(hits) if hit]
        proofs = self._absent([hash_ for hash_, hit in zip(hashes, hits, strict=True) if not hit])
        proofs |= self._found(
            [hashes[index] for index in found],
            [memory[index] for index in found],
            [pages[index].digest for index in found],
        )
        return [proofs[page_hash] for page_hash in hashes]

    def _absent(self, hashes: Sequence[str]) -> dict[str, PageProof]:
        if not hashes:
            return {}
        there = self._storage.batch_exists(self._space, hashes)
        return {
            page_hash: PageProof(page_hash, Proof.UNREADABLE if is_there else Proof.GONE)
            for page_hash, is_there in zip(hashes, there, strict=True)
        } | {
            fault.page_hash: fault_proof(fault)
            for fault in self._storage.faults(self._space, hashes)
        }

    def _found(
        self,
        hashes: Sequence[str],
        memory: Sequence[memoryview],
        digests: Sequence[int | None],
    ) -> dict[str, PageProof]:
        if self._space.frame_nbytes < FRAME_NBYTES:
            return {
                page_hash: PageProof(page_hash, Proof.NO_FRAME, is_read=True)
                for page_hash in hashes
            }
        framed = [framed_page(self._space, view) for view in memory]
        errors = self._framing.errors(framed, hashes, digests)
        return {
            page_hash: self._proof(page_hash, framed[index], errors.get(index))
            for index, page_hash in enumerate(hashes)
        }

    def _proof(self, page_hash: str, page: FramedPage, error: CorruptPage | None) -> PageProof:
        if error is None:
            return PageProof(page_hash, Proof.OK, is_read=True)
        proof = Proof(error.reason)
        if proof is Proof.CORRUPT and self._lacks_checksum(page, page_hash):
            proof = Proof.NO_CHECKSUM
        return PageProof(page_hash, proof, error.detail, is_read=True)

    def _lacks_checksum(self, page: FramedPage, page_hash: str) -> bool:
        flags = FRAME_FIELDS.unpack_from(page.header)[2]
        is_right = not Framing(self._space, checksum=False).errors([page], [page_hash])
        return is_right and not flags & _CHECKSUMMED


def fault_proof(fault: PageFault) -> PageProof:
    """Convert the store's reason for a damaged page. An unknown reason becomes `unreadable`."""
    if fault.reason in _WORDS:
        return PageProof(fault.page_hash, Proof(fault.reason), fault.detail)
    return PageProof(fault.page_hash, Proof.UNREADABLE, f"{fault.reason}: {fault.detail}")


def framed_page(space: KeySpace, memory: memoryview) -> FramedPage:
    """Return the frame and the payload of a stored page in one piece of memory."""
    return FramedPage(memory[: space.frame_nbytes], Page(memory[space.frame_nbytes :]))
