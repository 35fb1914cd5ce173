"""Wrong stores: what they do to batches; KV-202 to KV-204."""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


# --- KV-202 --------------------------------------------------------------------------------------


@caught_by("KV-202")
class MovesUpAfterAMiss(DictStore):
    """A missing page moves its successors into the memory before theirs (seen in a file backend)."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes)
        there = [data for data in found if data is not None]
        return [*there, *[None] * (len(found) - len(there))]


@caught_by("KV-202")
class OneMissFailsAll(DictStore):
    """A get with a missing page is False for every page."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes)
        return [None] * len(found) if None in found else found


@caught_by("KV-202")
class ReadsToTheFirstMiss(DictStore):
    """A get reads up to the first missing page, and is False for all that follow."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes)
        count = found.index(None) if None in found else len(found)
        return [*found[:count], *[None] * (len(found) - count)]


@caught_by("KV-202")
class SearchesForThePrefix(DictStore):
    """Exists looks for the first missing page by halving, as if no page came after a missing one."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        count = bisect(range(len(hashes)), 0, key=lambda place: not self._has(space, hashes[place]))
        return [place < count for place in range(len(hashes))]


@caught_by("KV-202")
class LooksAtTheLast(DictStore):
    """If the last page of a batch is there, exists takes all before it for there."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        found = super()._present(space, hashes)
        return [True] * len(found) if found and found[-1] else found


@caught_by("KV-202")
class BindsLate(DictStore):
    """The writers of a batch are made in a loop, and all write the bytes of its last page."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        return super()._store(space, hashes, [contents[-1]] * len(contents) if contents else [])


@caught_by("KV-202")
class PairsAbsentWithAll(DictStore):
    """Of a set, the hashes that are absent are paired with the pages from the first one on."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        absent = [page_hash for page_hash in hashes if not self._has(space, page_hash)]
        super()._store(space, absent, contents[: len(absent)])
        return [True] * len(hashes)


@caught_by("KV-202")
class SkipsAfterAPresentPage(DictStore):
    """A set ends at the first page that is there, as if all after it were there too."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        present = [*super()._present(space, hashes), True]
        count = present.index(True)
        stored = super()._store(space, hashes[:count], contents[:count])
        return [*stored, *[True] * (len(hashes) - count)]


@caught_by("KV-202")
class SkipsIfTheLastIsPresent(DictStore):
    """A set whose last page is there does nothing, as if all before it were there too."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        if hashes and self._has(space, hashes[-1]):
            return [True] * len(hashes)
        return super()._store(space, hashes, contents)


@caught_by("KV-202")
class DeletesToTheFirstAbsent(DictStore):
    """A delete ends at the first page that is not there, and is True for all."""

    def _remove(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        present = [*super()._present(space, hashes), False]
        super()._remove(space, hashes[: present.index(False)])
        return [True] * len(hashes)


@caught_by("KV-202")
class DamageStopsTheBatch(Shelf):
    """A file of the wrong length ends the get: all pages after it are False."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes)
        for place, page_hash in enumerate(hashes):
            damaged = found[place] is None and self._path(space, page_hash).exists()
            if damaged:
                return [*found[:place], *[None] * (len(found) - place)]
        return found


# --- KV-203 --------------------------------------------------------------------------------------


@caught_by("KV-203")
class FillsTheLastOfEqualPages(DictStore):
    """Of equal hashes in a get only the last page is filled, and the verdict is True for all."""

    def _filled_last(self, page: Page, data: bytes | None, *, is_last: bool) -> bool:
        return self._filled(page, data) if is_last else data is not None

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._begin(space, hashes, pages)
        last = {page_hash: place for place, page_hash in enumerate(hashes)}
        found = enumerate(zip(hashes, pages, self._contents(space, hashes), strict=True))
        return [
            self._filled_last(page, data, is_last=last[page_hash] == place)
            for place, (page_hash, page, data) in found
        ]


@caught_by("KV-203")
class AnswersEqualHashesOnce(DictStore):
    """Exists gives one verdict for all equal hashes of a batch."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return super()._present(space, list(dict.fromkeys(hashes)))


@caught_by("KV-203")
class SetsEqualHashesOnce(DictStore):
    """Of equal hashes in a set the second is refused."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        stored = super()._store(space, hashes, contents)
        return [
            taken and page_hash not in hashes[:place]
            for place, (page_hash, taken) in enumerate(zip(hashes, stored, strict=True))
        ]


@caught_by("KV-203")
class PairsDifferentWithAll(DictStore):
    """Of a set, the different hashes are paired with the pages from the first one on."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        different = list(dict.fromkeys(hashes))
        super()._store(space, different, contents[: len(different)])
        return [True] * len(hashes)


@caught_by("KV-203")
class MixesEqualHashes(DictStore):
    """Of equal hashes in a set, each writes a part of the page."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        half = space.stored_nbytes // 2
        mixed: dict[str, bytes] = {}
        for page_hash, data in zip(hashes, contents, strict=True):
            mixed[page_hash] = mixed.get(page_hash, data)[:half] + data[half:]
        return super()._store(space, hashes, [mixed[page_hash] for page_hash in hashes])


@caught_by("KV-203")
class DeletesEqualHashesOnce(DictStore):
    """Of equal hashes in a delete the second is False: it was gone already."""

    def _remove(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        super()._remove(space, hashes)
        return [page_hash not in hashes[:place] for place, page_hash in enumerate(hashes)]


# --- KV-204 --------------------------------------------------------------------------------------


@caught_by("KV-204")
class SetsThe128First(DictStore):
    """Of a set only the first 128 pages are stored, and the verdict is True for all."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        stored = super()._store(space, hashes[:128], contents[:128])
        return [*stored, *[True] * (len(hashes) - len(stored))]


@caught_by("KV-204")
class LosesAFullLastPiece(DictStore):
    """Sets are cut into pieces of 100; a last piece that is full is not written."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        count = len(hashes) - 100 if hashes and not len(hashes) % 100 else len(hashes)
        stored = super()._store(space, hashes[:count], contents[:count])
        return [*stored, *[True] * (len(hashes) - count)]


@caught_by("KV-204")
class ReadsThe256First(DictStore):
    """Of a get only the first 256 pages are read; the others are misses."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes[:256])
        return [*found, *[None] * (len(hashes) - len(found))]


@caught_by("KV-204")
class FindsThe4000First(DictStore):
    """Of a lookup only the first 4,000 pages are answered; the others are misses."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        found = super()._present(space, hashes[:4000])
        return [*found, *[False] * (len(hashes) - len(found))]


@caught_by("KV-204")
class TooManyVariables(DictStore):
    """A batch of more than 999 is one statement with too many variables."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        if len(hashes) > 999:
            raise ValueError("too many SQL variables")
        return super()._contents(space, hashes)


@caught_by("KV-204")
class GoesDeep(DictStore):
    """A batch is worked off by a function that calls itself once a page."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        if not hashes:
            return []
        return [self._has(space, hashes[0]), *self._present(space, hashes[1:])]


@caught_by("KV-204", check="a_batch_of_many_bytes_is_set_and_read")
class MessagesOfFourMegabytes(DictStore):
    """A batch is one message, of up to 4 MiB; a larger one is refused as a whole."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        if sum(map(len, contents)) > 4 << 20:
            return [False] * len(hashes)
        return super()._store(space, hashes, contents)
