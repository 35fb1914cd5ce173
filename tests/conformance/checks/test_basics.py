"""The checks of basics and batches: each catches its fault alone, and right stores pass."""

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
from hicache_conformance.selftest import mutants
from hicache_conformance.selftest.references.blobs import Blobs
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.first_wins import FirstWins
from hicache_conformance.selftest.references.slow import SlowStore
from hicache_conformance.selftest.references.subjects import DictSubject, ShelfSubject, subject_of

from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from hicache_conformance.checks import Check
    from hicache_conformance.report.record import CheckRecord

    from hicache_storage.keys import KeySpace

CHECKS = {check.run.__name__: check for check in all_checks()}
OPTIONS = RunOptions(call_limit_s=10)
QUICK = RunOptions(call_limit_s=10, quick=True)
ACCUSED = {Outcome.FAILED, Outcome.ERROR, Outcome.UNKNOWN}
SLOW = pytest.mark.slow


def of_modules(*names: str) -> list[Check]:
    return [one for one in all_checks() if one.run.__module__.rpartition(".")[2] in names]


def caught(name: str, control_name: str, options: RunOptions) -> CheckRecord:
    control = next(one for one in mutants.all_mutants() if one.name == control_name)
    subject = control.subject or subject_of(control.storage_class)
    return run_check(subject, CHECKS[name], options)


# --- each check catches its fault ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "control", "words"),
    [
        ("a_fresh_key_space_is_empty", "AskingMakesPages", "lists pages that are not there"),
        ("a_new_key_space_of_a_used_store_is_empty", "HashesOfAllSpaces", "another key space"),
        ("asking_for_a_page_does_not_make_it", "DeletingListsPages", "only asked for"),
        ("what_was_set_is_there", "LosesTheLastPage", "batch_get is False for a page whose"),
        ("a_page_shows_after_misses", "RemembersMisses", "looked for in vain before"),
        ("a_page_stays_while_others_come_and_go", "NotFoundIsTheLast", "deleted meanwhile"),
        ("opening_a_key_space_again_keeps_its_pages", "OpeningEmpties", "open_space was called"),
        ("equal_key_spaces_are_one", "KeySpacesByIdentity", "equal key spaces"),
        ("any_length_of_page_hash_works", "Sha256Only", "its hash has 32 digits"),
        ("pages_in_read_only_memory_can_be_stored", "NeedsWritableMemory", "TypeError"),
        ("a_miss_is_false", "BloomFilter", "True for a page that was never set"),
        ("a_miss_is_false_for_every_reason", "StumblesOverTombstones", "TypeError"),
        ("a_batch_writes_into_its_own_pages_only", "ZeroesMissesInOnePiece", "of 2 segments"),
        ("a_present_page_can_be_set_again", "RefusesPresentPages", "there already"),
        ("other_bytes_leave_a_page_whole", "PatchesTheFirstBlock", "up to byte 512"),
        ("another_handle_can_set_a_page_again", "LeavesOthersPagesAlone", "another handle"),
        ("any_bytes_are_read_back", "ZerosAreAbsent", "the page holds zeros only"),
        ("pages_that_are_nearly_equal_are_apart", "ComparesEnds", "another page differs"),
        ("hashes_that_are_alike_are_apart", "HashesPadded", "zeros at the end"),
        ("a_page_of_another_size_is_no_hit", "LongerPagesServe", "is asked for with 999"),
        ("sizes_under_one_hash_are_apart", "OneSizeAtATime", "other page sizes have this hash"),
        ("a_page_reads_the_same_every_time", "ServesItsLastRead", "never set"),
        ("a_deleted_page_is_gone", "ServesWhatItRead", "batch_get is True for a page that was del"),
        ("deleting_an_absent_page_is_true", "AbsentIsFalse", "batch_delete is False"),
        ("a_deleted_page_can_be_set_again", "NeverAgain", "set and deleted 1 times before"),
        ("one_delete_is_enough", "OldVersionReturns", "had been set four times"),
        ("a_page_with_the_same_bytes_stays", "CountsNoReferences", "with the same bytes"),
        ("deleting_spares_hashes_that_are_alike", "DeletesByPattern", "whose hash is like it"),
        ("what_is_done_later_brings_no_deleted_page_back", "RebuildsItsIndex", "was deleted"),
        ("a_page_deleted_twice_leaves_room_for_one", "FreesSlotsTwice", "bytes of the page"),
        ("deleting_many_spares_the_rest", "CompactsTooMuch", "pages were deleted"),
        ("another_handle_sees_no_deleted_page", "DeletesInMemory", "through an earlier handle"),
        ("a_delete_through_another_handle_counts", "CachesForItself", "through another handle"),
        ("bytes_that_have_no_room_never_show", "RefusesWhatItReplaced", "version 1"),
        ("every_size_of_page_works", "OneByteIsNothing", "pages of 1 bytes"),
        ("large_pages_work", "LosesMegabytes", "pages of 1048577 bytes"),
        ("sizes_coexist_in_one_store", "SizedByTheFirst", "other page sizes were used"),
        ("a_frame_is_a_part_of_the_page", "ReadsAsItWrote", "a frame of 64 bytes"),
        ("any_segmentation_is_read_back_in_any_other", "ReadsAsItWrote", "was set in 2 segments"),
        ("batches_of_many_segments_work", "OneVectorABatch", "512 segments each"),
        ("segments_may_lie_in_any_order", "SortsSegments", "shifted by 2000 bytes"),
        ("an_empty_batch_gives_an_empty_list", "NothingToDo", "batch_delete raised ValueError"),
        ("a_batch_gives_one_bool_a_page", "VerdictsOfNumpy", "np.True_"),
        ("verdicts_are_in_the_order_of_the_hashes", "AnswersInItsOwnOrder", "with others"),
        ("hashes_may_come_as_a_tuple", "NeedsLists", "are tuples"),
        ("the_callers_lists_are_left_alone", "SortsTheHashes", "changed the list of hashes"),
        ("the_answer_is_the_callers", "SharesItsAnswers", "list of an earlier answer"),
        ("a_missing_page_changes_no_other", "MovesUpAfterAMiss", "of a batch of 2 are missing"),
        ("each_page_of_a_batch_has_its_own_bytes", "BindsLate", "bytes of the page"),
        ("a_present_page_in_a_set_changes_no_other", "PairsAbsentWithAll", "there already"),
        ("an_absent_page_in_a_delete_changes_no_other", "DeletesToTheFirstAbsent", "not there"),
        ("a_damaged_page_changes_no_other", "DamageStopsTheBatch", "was cut in half"),
        ("duplicates_are_each_read", "FillsTheLastOfEqualPages", "untouched buffer"),
        ("duplicates_are_each_set", "PairsDifferentWithAll", "3 of them different"),
        ("duplicates_with_other_bytes_leave_a_whole_page", "MixesEqualHashes", "up to byte 10"),
        ("duplicates_are_each_deleted", "DeletesEqualHashesOnce", "[True, False"),
        ("ten_thousand_pages_are_looked_up", "FindsThe4000First", "a lookup of 10000 pages"),
        ("batches_of_every_size_are_set", "LosesAFullLastPiece", "set in a batch of 100)"),
        ("a_batch_of_many_bytes_is_set_and_read", "MessagesOfFourMegabytes", "a batch of 6 pages"),
        ("memory_may_be_reused_after_a_set", "CopiesWhenItComesToIt", "every byte is 0x3c"),
        ("memory_may_be_reused_after_a_get", "CachesTheCallersMemory", "every byte is 0x3c"),
        ("nothing_is_written_after_a_get", "WipesMissesLater", "after batch_get returned"),
        ("nothing_is_written_after_a_get_that_raised", "LeavesItsReadersRunning", "raised"),
    ],
)
def test_a_check_finds_its_fault_and_names_it(name: str, control: str, words: str) -> None:
    found = caught(name, control, QUICK)

    assert Outcome.FAILED == found.outcome, found.message
    assert words in f"{found.message} {found.got}"
    assert found.sequence


@SLOW
@pytest.mark.parametrize(
    ("name", "control", "words"),
    [
        ("many_pages_are_all_there", "RemembersAThousand", "1100 pages were set in all"),
        ("pages_outlive_an_orderly_close", "ReopenedWithoutTheLast", "read by the next handle"),
        ("sets_and_deletes_take_effect_in_order", "WritesBehind", "right after it was"),
        (
            "a_page_that_has_no_room_never_shows",
            "GivesUpBeforeItsWriter",
            "batch_set returned False",
        ),
        ("a_page_that_the_file_system_refused_never_shows", "KeepsWhatFilesRefused", "shows once"),
        ("batches_of_every_size_are_read", "ReadsThe256First", "in batches of"),
        ("no_call_keeps_its_pages", "RemembersItsLastPages", "batch_set keeps references"),
        (
            "nothing_is_written_after_a_get_that_timed_out",
            "GivesUpAndReadsOn",
            "answered after all",
        ),
        ("nothing_is_stored_after_a_set_that_timed_out", "GivesUpAndSendsOn", "0x3c"),
    ],
)
def test_a_thorough_check_catches_its_fault(name: str, control: str, words: str) -> None:
    found = caught(name, control, OPTIONS)

    assert Outcome.FAILED == found.outcome, found.message
    assert words in f"{found.message} {found.got}"


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
