"""Wrong stores that fail in batches or in the memory of pages; KV-202 to KV-206."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.wire import WireStore
from hicache_storage.errors import StorageTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hicache_conformance.selftest.references.dict_store import DictSettings
    from hicache_conformance.selftest.references.wire_protocol import Operation
    from hicache_conformance.selftest.references.wire_settings import WireSettings
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

    T = TypeVar("T")


# --- KV-202 --------------------------------------------------------------------------------------


@caught_by("KV-202:a_page_whose_file_cannot_be_made_changes_no_other", says="returned True")
class OneWrittenIsAllWritten(Shelf):
    """Files are in two folders. If one page of a batch could be written, all verdicts are True."""

    capabilities = replace(Shelf.capabilities, enumerable=False)

    def _path(self, space: KeySpace, page_hash: str) -> Path:
        return self._folder(space) / str(int(page_hash, 16) % 2) / page_hash

    def _replaced(self, path: Path, data: bytes) -> bool:
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
        return super()._replaced(path, data)

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        return [any(super()._store(space, hashes, contents))] * len(hashes)


@caught_by(
    "KV-202:a_missing_page_changes_no_other",
    says="of a batch of 2 are missing",
    seen_in="SGLang 0.5.23, hf3fs",
)
class MovesUpAfterAMiss(DictStore):
    """After a missing page, each page is read into the memory of the page before it."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes)
        there = [data for data in found if data is not None]
        return [*there, *[None] * (len(found) - len(there))]


@caught_by("KV-202:each_page_of_a_batch_has_its_own_bytes", says="bytes of the page")
class BindsLate(DictStore):
    """The writers of a batch are made in a loop, so all write the bytes of its last page."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        return super()._store(space, hashes, [contents[-1]] * len(contents) if contents else [])


@caught_by("KV-202:a_present_page_in_a_set_changes_no_other", says="there already")
class PairsAbsentWithAll(DictStore):
    """A set pairs the hashes of absent pages with the first pages of the batch, so bytes get mixed."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        absent = [page_hash for page_hash in hashes if not self._has(space, page_hash)]
        super()._store(space, absent, contents[: len(absent)])
        return [True] * len(hashes)


@caught_by("KV-202:an_absent_page_in_a_delete_changes_no_other", says="not there")
class DeletesToTheFirstAbsent(DictStore):
    """A delete stops at the first absent page, but returns True for all."""

    def _remove(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        present = [*super()._present(space, hashes), False]
        super()._remove(space, hashes[: present.index(False)])
        return [True] * len(hashes)


@caught_by("KV-202:a_damaged_page_changes_no_other", says="was cut in half")
class DamageStopsTheBatch(Shelf):
    """A get stops at a file of the wrong length, so all later pages are False."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes)
        for place, page_hash in enumerate(hashes):
            damaged = found[place] is None and self._path(space, page_hash).exists()
            if damaged:
                return [*found[:place], *[None] * (len(found) - place)]
        return found


# --- KV-203 --------------------------------------------------------------------------------------


@caught_by("KV-203:duplicates_are_each_read", says="untouched buffer")
class FillsTheLastOfEqualPages(DictStore):
    """If a get names a hash several times, only the last page is filled, but all verdicts are True."""

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


@caught_by("KV-203:duplicates_are_each_set", says="3 of them different")
class PairsDifferentWithAll(DictStore):
    """A set drops repeated hashes but not their pages, so it pairs hashes with the wrong pages."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        different = list(dict.fromkeys(hashes))
        super()._store(space, different, contents[: len(different)])
        return [True] * len(hashes)


@caught_by("KV-203:duplicates_with_other_bytes_leave_a_whole_page", says="up to byte 10")
class MixesEqualHashes(DictStore):
    """If a set names a hash twice, each of the two writes a part of the page."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        half = space.stored_nbytes // 2
        mixed: dict[str, bytes] = {}
        for page_hash, data in zip(hashes, contents, strict=True):
            mixed[page_hash] = mixed.get(page_hash, data)[:half] + data[half:]
        return super()._store(space, hashes, [mixed[page_hash] for page_hash in hashes])


@caught_by("KV-203:duplicates_are_each_deleted", says=r"\[True, False")
class DeletesEqualHashesOnce(DictStore):
    """If a delete names a hash twice, the second verdict is False, because the page is already gone."""

    def _remove(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        super()._remove(space, hashes)
        return [page_hash not in hashes[:place] for place, page_hash in enumerate(hashes)]


# --- KV-204 --------------------------------------------------------------------------------------


@caught_by("KV-204:batches_of_every_size_are_set", says=r"set in a batch of 100\)")
class LosesAFullLastPiece(DictStore):
    """Sets are split into pieces of 100, and a last piece that is full is not written."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        count = len(hashes) - 100 if hashes and not len(hashes) % 100 else len(hashes)
        stored = super()._store(space, hashes[:count], contents[:count])
        return [*stored, *[True] * (len(hashes) - count)]


@caught_by("KV-204:batches_of_every_size_are_read", says="in batches of")
class ReadsThe256First(DictStore):
    """A get reads only its first 256 pages; the others are misses."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes[:256])
        return [*found, *[None] * (len(hashes) - len(found))]


@caught_by("KV-204:ten_thousand_pages_are_looked_up", says="a lookup of 10000 pages")
class FindsThe4000First(DictStore):
    """A lookup answers only its first 4,000 pages; the others are misses."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        found = super()._present(space, hashes[:4000])
        return [*found, *[False] * (len(hashes) - len(found))]


@caught_by("KV-204:a_batch_of_many_bytes_is_set_and_read", says="a batch of 6 pages")
class MessagesOfFourMegabytes(DictStore):
    """A batch is one message of up to 4 MiB; a larger batch is refused as a whole."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        if sum(map(len, contents)) > 4 << 20:
            return [False] * len(hashes)
        return super()._store(space, hashes, contents)


def _as_verdicts(answer: object) -> list[bool]:
    """Turn a list of bool into what a wrong store returns."""
    return cast("list[bool]", answer)


@caught_by("KV-201:a_batch_gives_one_bool_a_page", says="np.True_")
class VerdictsOfNumpy(DictStore):
    """Verdicts are numpy.bool_, which fail `is True` and can't be written as JSON."""

    def _answer(self, verdicts: list[bool]) -> list[bool]:
        return _as_verdicts(list(np.array(verdicts, dtype=bool)))


@caught_by("KV-201:a_batch_gives_one_bool_a_page", seen_in="SGLang's storage interface")
class CountsThePrefix(DictStore):
    """Exists returns how many pages are present before the first absent one."""

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        found = [*super().batch_exists(space, hashes), False]
        return _as_verdicts(found.index(False))


@caught_by("KV-201:verdicts_are_in_the_order_of_the_hashes", says="with others")
class AnswersInItsOwnOrder(DictStore):
    """The verdicts of `exists` follow the sorted hashes, not the order of the call."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return super()._present(space, sorted(hashes))


@caught_by("KV-201:the_callers_lists_are_left_alone", says="changed the list of hashes")
class SortsTheHashes(DictStore):
    """The caller's list of hashes is sorted in place, so that reads follow the order of the disk."""

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        verdicts = super().batch_exists(space, list(hashes))
        if isinstance(hashes, list):
            hashes.sort()
        return verdicts


@caught_by("KV-201:hashes_may_come_as_a_tuple", says="are tuples")
class NeedsLists(DictStore):
    """The hashes are copied with a method that only lists have, so a tuple gives an AttributeError."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        names = cast("list[str]", hashes).copy()
        return super()._present(space, names)


@caught_by("KV-201:an_empty_batch_gives_an_empty_list", says="batch_delete raised ValueError")
class NothingToDo(DictStore):
    """An empty batch raises an error of the store's own (as a pipeline without commands does)."""

    def _remove(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        if not hashes:
            raise ValueError("wrong number of arguments for 'del'")
        return super()._remove(space, hashes)


@caught_by("KV-201:the_answer_is_the_callers", says="list of an earlier answer")
class SharesItsAnswers(DictStore):
    """Exists keeps the lists that it returned, and returns them again."""

    _answers: dict[tuple[object, ...], list[bool]] = own(dict)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        fresh = super().batch_exists(space, hashes)
        with self._lock:
            question = (space, len(self._pages), tuple(hashes))
        return self._answers.setdefault(question, fresh)


# --- the memory of pages after the call ----------------------------------------------------------


_SOON_S = 0.05
_PATIENCE_S = 30.0


def _soon(call: Callable[[], object]) -> None:
    timer = threading.Timer(_SOON_S, call)
    timer.daemon = True
    timer.start()


@caught_by("KV-205:memory_may_be_reused_after_a_set", says="every byte is 0x3c")
class CopiesWhenItComesToIt(DictStore):
    """A set queues the page's memory, and another thread copies it a moment later."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        verdicts = super().batch_set(space, hashes, pages)
        if space.stored_nbytes > 1024:  # small pages are copied at once
            _soon(partial(self._copy_again, space, list(hashes), list(pages)))
        return verdicts

    def _copy_again(self, space: KeySpace, hashes: list[str], pages: list[Page]) -> None:
        if not self._closed:
            self._store(space, hashes, [page.tobytes() for page in pages])


@caught_by("KV-205:memory_may_be_reused_after_a_set")
class KeepsLargePagesByReference(DictStore):
    """A page of 2 MiB or more in one segment is kept without a copy."""

    _kept: dict[tuple[str, str], memoryview] = own(dict)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        for page_hash, page in zip(hashes, pages, strict=True):
            if page.nbytes >= 2 << 20 and len(page.segments) == 1:
                self._kept[space.id, page_hash] = page.segments[0]
        return super().batch_set(space, hashes, pages)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        kept = self._kept.get((space.id, page_hash))
        return super()._read(space, page_hash) if kept is None else kept.tobytes()


@caught_by("KV-205:no_call_keeps_its_pages", says="batch_set keeps references")
class RemembersItsLastPages(DictStore):
    """The store keeps the pages of the last call for its log, and their memory with them."""

    _last: tuple[Page, ...] = ()

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._last = tuple(pages)
        return super().batch_set(space, hashes, pages)


@caught_by("KV-205:memory_may_be_reused_after_a_get", says="every byte is 0x3c")
class CachesTheCallersMemory(DictStore):
    """A page that was read is served again from the memory that it was read into."""

    _seen: dict[bytes, Page] = own(dict)

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is None:
            return False
        source = self._seen.get(data)
        filled = super()._filled(page, data if source is None else source.tobytes())
        self._seen[data] = page
        return filled


@caught_by("KV-205:nothing_is_written_after_a_get", says="after batch_get returned")
class WipesMissesLater(DictStore):
    """A miss fills its page with zeros a moment later."""

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is None:
            _soon(partial(page.copy_from, bytes(page.nbytes)))
        return super()._filled(page, data)


@caught_by("KV-205:nothing_is_written_after_a_get_that_raised", says="raised")
class LeavesItsReadersRunning(DictStore):
    """A pool of threads reads the pages; if one fails, get raises while the others still run."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._pool = ThreadPoolExecutor(2)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._begin(space, hashes, pages)
        found = self._contents(space, hashes)
        readers = [
            self._pool.submit(self._slowly_filled, page, data)
            for page, data in zip(pages, found, strict=True)
        ]
        return self._answer([reader.result() for reader in readers])

    def _slowly_filled(self, page: Page, data: bytes | None) -> bool:
        time.sleep(_SOON_S)  # as long as a disk takes
        return self._filled(page, data)

    def close(self) -> None:
        self._pool.shutdown()
        super().close()


class _GivesUp(WireStore):
    """A store that leaves round trips that take too long to a thread, which has no timeout."""

    def __init__(self, settings: WireSettings) -> None:
        self._patience_s = settings.timeout_s
        self._thread = threading.local()
        super().__init__(settings.model_copy(update={"timeout_s": _PATIENCE_S}))

    def _exchange(self, operation: Operation, *parts: bytes) -> Sequence[bytes]:
        call = partial(super()._exchange, operation, *parts)
        return call() if getattr(self._thread, "is_patient", False) else self._in_time(call)

    def _in_time(self, call: Callable[[], T]) -> T:
        """Return the result of the call. If it does not come in time, raise and let the call run on."""
        answers: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            self._thread.is_patient = True
            try:
                answers.append(call())
            except BaseException as error:  # noqa: BLE001 - raised by the caller, if it still waits
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._patience_s)
        if errors:
            raise errors[0]
        if not answers:
            raise StorageTimeout(f"no answer within {self._patience_s} s")
        return answers[0]


@caught_by("KV-205:nothing_is_written_after_a_get_that_timed_out", says="answered after all")
class GivesUpAndReadsOn(_GivesUp):
    """A get that takes too long raises, but its thread fills the pages when the reply comes."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return self._in_time(partial(super().batch_get, space, hashes, pages))


@caught_by("KV-205:nothing_is_stored_after_a_set_that_timed_out", says="0x3c")
class GivesUpAndSendsOn(_GivesUp):
    """A set that takes too long raises, but its thread sends the pages once the server answers."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return self._in_time(partial(self._set_absent, space, list(hashes), list(pages)))

    def _set_absent(self, space: KeySpace, hashes: list[str], pages: list[Page]) -> list[bool]:
        self._present(space, hashes)
        return super().batch_set(space, hashes, pages)


# --- digests -------------------------------------------------------------------------------------


@caught_by("KV-206:a_digest_is_that_of_the_bytes")
class DigestOfTheWholePage(EvictingStore):
    """The digest covers the bytes that it should leave out."""

    def _digest(self, data: bytes, skip: int) -> int:
        return super()._digest(data, 0 * skip)


@caught_by("KV-206:a_digest_is_that_of_the_bytes")
class DigestsByPlaceAmongHits(EvictingStore):
    """The digests of the hits go to the first pages of the batch, whether these are hits or not."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        verdicts = super().batch_get(space, hashes, pages)
        digests = [page.digest for page, hit in zip(pages, verdicts, strict=True) if hit]
        for page, digest in zip(pages, digests, strict=False):
            page.digest = digest
        return verdicts


@caught_by("KV-206:a_digest_is_that_of_the_bytes")
class DigestOfTheFirstPage(EvictingStore):
    """Every page of a batch gets the digest of the first page."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        verdicts = super().batch_get(space, hashes, pages)
        for page in pages:
            page.digest = pages[0].digest
        return verdicts


# --- batches that are split ----------------------------------------------------------------------


class _Splitting(DictStore):
    """A store that splits a set at so many bytes. A subclass makes a mistake in the second part."""

    _split_nbytes = 32 << 20

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        step = max(1, self._split_nbytes // space.stored_nbytes)
        parts = [slice(start, start + step) for start in range(0, len(hashes), step)]
        done: list[bool] = []
        for number, part in enumerate(parts):
            done += self._stored_part(space, hashes[part], contents[part], number)
        return done

    def _stored_part(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes], number: int
    ) -> list[bool]:
        del number
        return super()._store(space, hashes, contents)


@caught_by(
    "KV-204:batches_past_the_sizes_at_which_stores_split_are_whole",
    says="never set under this hash",
    seen_in="an author's PostgreSQL store",
)
class ShiftsTheSecondPart(_Splitting):
    """In the second part of a split set, each page is stored under the hash of the next one."""

    def _stored_part(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes], number: int
    ) -> list[bool]:
        if number:
            contents = [*contents[-1:], *contents[:-1]]
        return super()._stored_part(space, hashes, contents, number)


@caught_by("KV-204:batches_past_the_sizes_at_which_stores_split_are_whole")
class DropsTheThirdPart(_Splitting):
    """A set of three parts of 64 MiB stores two of them, and says True for all pages."""

    _split_nbytes = 64 << 20

    def _stored_part(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes], number: int
    ) -> list[bool]:
        if number == 2:
            return [True] * len(hashes)
        return super()._stored_part(space, hashes, contents, number)


@caught_by("KV-204:batches_past_the_sizes_at_which_stores_split_are_whole")
class CountsBytesIn26Bits(Shelf):
    """The length of a batch is a number of 26 bits, so the pages behind 64 MiB are not written."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        kept = max(1, (64 << 20) // space.stored_nbytes)
        return super()._store(space, hashes[:kept], contents[:kept]) + [True] * len(hashes[kept:])
