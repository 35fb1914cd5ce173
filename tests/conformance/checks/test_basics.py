"""The checks of basics and batches, on right stores of unusual kinds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.hf3fs import Hf3fsStorage
from hicache_conformance.checks import all_checks
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Scratch, Subject
from hicache_conformance.selftest.references.blobs import Blobs
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.first_wins import FirstWins
from hicache_conformance.selftest.references.slow import SlowStore
from hicache_conformance.selftest.references.subjects import DictSubject, ShelfSubject

from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from hicache_conformance.checks import Check

    from hicache_storage.keys import KeySpace

CHECKS = {check.run.__name__: check for check in all_checks()}
QUICK = RunOptions(call_limit_s=10, quick=True)
ACCUSED = {Outcome.FAILED, Outcome.ERROR, Outcome.UNKNOWN}
SLOW = pytest.mark.slow


def of_modules(*names: str) -> list[Check]:
    return [one for one in all_checks() if one.run.__module__.rpartition(".")[2] in names]


# --- right stores of unusual kinds ----------------------------------------------------------------


class Aligned(Blobs):
    """A store with native memory at multiples of 4096."""

    capabilities = replace(Blobs.capabilities, alignment=4096)


class AlignedSegments(DictStore):
    """A store whose segments lie at multiples of 4096."""

    capabilities = replace(DictStore.capabilities, alignment=4096)


class FiftyPages(EvictingStore):
    """A cache of 50 entries of any size."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        while key not in self._pages and len(self._pages) >= 50:
            self._evict()
        return super()._make_room(key, nbytes)


class ForgetsByChance(DictStore):
    """A cache that forgets one page in a hundred at each call."""

    capabilities = replace(DictStore.capabilities, retention=Retention.BEST_EFFORT)

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self._forget(space, hashes)
        return super()._present(space, hashes)

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        self._forget(space, hashes)
        return super()._contents(space, hashes)

    def _forget(self, space: KeySpace, hashes: Sequence[str]) -> None:
        for page_hash in hashes:
            if self._chance.random() < 0.01:
                self._removed(space, page_hash)

    _chance = random.Random(5)


def subject(storage_class: type[Any], **config: Any) -> Any:
    def configured(self: Subject, scratch: Scratch) -> Mapping[str, Any]:
        return config

    fields = {"storage_class": storage_class, "config": configured, "__module__": __name__}
    return type(f"{storage_class.__name__}Subject", (Subject,), fields)


UNUSUAL = {
    "pages of 1 byte": subject(DictStore, max_page_nbytes=1),
    "pages of 16 bytes": subject(DictStore, max_page_nbytes=16),
    "batches of 1": subject(DictStore, max_batch=1),
    "batches of 3": subject(DictStore, max_batch=3, max_page_nbytes=4096),
    "64 KiB": subject(DictStore, capacity_nbytes=64 << 10),
    "4 KiB that evict": subject(EvictingStore, capacity_nbytes=4096),
    "50 pages": subject(FiftyPages, capacity_nbytes=1 << 30),
    "forgets by chance": subject(ForgetsByChance),
    "first wins": subject(FirstWins),
    "aligned": subject(Aligned),
    "aligned segments": subject(AlignedSegments),
    "one by one, 1 ms each": subject(SlowStore, delay_s=0.001, max_batch=1),
}


@pytest.mark.parametrize(
    ("kind", "module"),
    [("pages of 1 byte", "round_trips"), ("4 KiB that evict", "verdicts"), ("64 KiB", "contents")],
)
def test_a_small_right_store_passes(kind: str, module: str) -> None:
    must_not_accuse(UNUSUAL[kind], QUICK, module)


@SLOW
@pytest.mark.parametrize("kind", UNUSUAL)
def test_an_unusual_right_store_passes(kind: str) -> None:
    modules = ("round_trips", "contents", "removal", "refusals", "sizes", "verdicts", "duplicates")
    must_not_accuse(UNUSUAL[kind], QUICK, *modules, "batch_sizes", "buffers")


def must_not_accuse(made: type[Subject], options: RunOptions, *modules: str) -> None:
    records = [run_check(made, check, options) for check in of_modules(*modules)]

    assert [] == [(one.name, one.message) for one in records if one.outcome in ACCUSED]
    assert len(records) // 2 < sum(one.outcome is Outcome.PASSED for one in records)


class _Hf3fs(Subject):
    """A store of 64 MiB in blocks of 4096 bytes, so that a page of 512 segments is a large one."""

    storage_class = Hf3fsStorage

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return {"path": str(scratch.path), "capacity_nbytes": "64MiB"}


def test_a_batch_beyond_the_capacity_of_a_small_store_is_not_requested() -> None:
    record = run_check(_Hf3fs, CHECKS["batches_of_many_segments_work"], RunOptions(call_limit_s=30))

    assert (Outcome.PASSED, "") == (record.outcome, record.message)


# --- checks that do not apply --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "name", "outcome"),
    [
        (DictSubject, "a_page_that_the_file_system_refused_never_shows", Outcome.NOT_DECLARED),
        (DictSubject, "a_damaged_page_changes_no_other", Outcome.NOT_VERIFIED),
        (DictSubject, "nothing_is_written_after_a_get_that_timed_out", Outcome.NOT_DECLARED),
        (DictSubject, "pages_outlive_an_orderly_close", Outcome.NOT_DECLARED),
        (DictSubject, "another_handle_sees_no_deleted_page", Outcome.NOT_DECLARED),
        (DictSubject, "a_delete_through_another_handle_counts", Outcome.NOT_DECLARED),
        (ShelfSubject, "a_page_that_has_no_room_never_shows", Outcome.NOT_VERIFIED),
        (UNUSUAL["aligned"], "any_segmentation_is_read_back_in_any_other", Outcome.NOT_DECLARED),
        (UNUSUAL["batches of 1"], "duplicates_are_each_read", Outcome.NOT_DECLARED),
    ],
)
def test_a_check_that_does_not_apply_gives_the_reason(
    made: type[Subject], name: str, outcome: Outcome
) -> None:
    assert outcome == run_check(made, CHECKS[name], QUICK).outcome
