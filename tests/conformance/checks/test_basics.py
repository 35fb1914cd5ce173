"""The checks of basics, sizes and batches: what each catches alone, and whom it must not accuse."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hicache_conformance.checks import all_checks
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Scratch, Subject
from hicache_conformance.scenarios.edge_cases import (
    batch_sizes,
    deceptive_bytes,
    nearly_equal,
    segmentations,
    similar_hashes,
)
from hicache_conformance.selftest import mutants
from hicache_conformance.selftest.references.blobs import Blobs
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.first_wins import FirstWins
from hicache_conformance.selftest.references.slow import SlowStore
from hicache_conformance.selftest.references.subjects import DictSubject, ShelfSubject, subject_of
from hicache_conformance.tools.content.memory import PageMemory

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


# --- each check has a fault that it is there for -------------------------------------------------


@pytest.mark.parametrize(
    ("name", "control", "words"),
    [
        ("a_fresh_key_space_is_empty", "AskingMakesPages", "lists pages that are not there"),
        ("a_new_key_space_of_a_used_store_is_empty", "HashesOfAllSpaces", "another key space"),
        ("asking_for_a_page_does_not_make_it", "DeletingListsPages", "only asked for"),
        ("what_was_set_is_there", "LosesTheLastPage", "batch_get is False for a page whose"),
        ("a_page_shows_after_misses", "RemembersMisses", "looked for in vain before"),
        ("a_page_shows_after_misses", "ReadsMissesOnce", "looked for in vain before"),
        ("a_page_stays_while_others_come_and_go", "NotFoundIsTheLast", "deleted meanwhile"),
        ("opening_a_key_space_again_keeps_its_pages", "OpeningEmpties", "open_space was called"),
        ("equal_key_spaces_are_one", "KeySpacesByIdentity", "equal key spaces"),
        ("any_length_of_page_hash_works", "Sha256Only", "its hash has 32 digits"),
        ("pages_in_read_only_memory_can_be_stored", "NeedsWritableMemory", "TypeError"),
        ("a_miss_is_false", "BloomFilter", "True for a page that was never set"),
        ("a_miss_is_false", "MissIsAKeyError", "raised KeyError"),
        ("a_miss_is_false_for_every_reason", "StumblesOverTombstones", "TypeError"),
        ("a_batch_writes_into_its_own_pages_only", "ZeroesMissesInOnePiece", "of 2 segments"),
        ("a_batch_writes_into_its_own_pages_only", "WritesWholeBlocks", "8 bytes next to"),
        ("a_present_page_can_be_set_again", "RefusesPresentPages", "there already"),
        ("other_bytes_leave_a_page_whole", "PatchesTheFirstBlock", "up to byte 512"),
        ("another_handle_can_set_a_page_again", "LeavesOthersPagesAlone", "another handle"),
        ("any_bytes_are_read_back", "ZerosAreAbsent", "the page holds zeros only"),
        ("any_bytes_are_read_back", "UnpacksWhatLooksPacked", "the page holds a gzip file"),
        ("pages_that_are_nearly_equal_are_apart", "ComparesEnds", "another page differs"),
        ("hashes_that_are_alike_are_apart", "HashesCutAt64", "one is the start of the other"),
        ("hashes_that_are_alike_are_apart", "HashesAsIntegers", "zeros in front"),
        ("hashes_that_are_alike_are_apart", "HashesPadded", "zeros at the end"),
        ("hashes_that_are_alike_are_apart", "HashesAsNumbers", "decimal digits only"),
        ("hashes_that_are_alike_are_apart", "HashesByChecksum", "equal CRC-32"),
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
        ("a_page_that_has_no_room_never_shows", "TriesAgainLater", "before others were deleted"),
        ("bytes_that_have_no_room_never_show", "RefusesWhatItReplaced", "version 1"),
        ("every_size_of_page_works", "OneByteIsNothing", "pages of 1 bytes"),
        ("every_size_of_page_works", "WholeWordsOnly", "batch_set refuses pages of 1 bytes"),
        ("large_pages_work", "LosesMegabytes", "pages of 1048577 bytes"),
        ("sizes_coexist_in_one_store", "SizedByTheFirst", "other page sizes were used"),
        ("a_frame_is_a_part_of_the_page", "FramesMadeAnew", "a frame of 64 bytes"),
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
        ("a_missing_page_changes_no_other", "SearchesForThePrefix", "batch_exists is True"),
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
def test_a_check_catches_its_fault_and_says_what_it_is(name: str, control: str, words: str) -> None:
    found = caught(name, control, QUICK)

    assert Outcome.FAILED == found.outcome, found.message
    assert words in f"{found.message} {found.got}"
    assert found.sequence


@SLOW
@pytest.mark.parametrize(
    ("name", "control", "words"),
    [
        ("many_pages_are_all_there", "RemembersAThousand", "1100 pages were set in all"),
        ("pages_outlive_an_orderly_close", "LosesItsTail", "read by the next handle"),
        ("sets_and_deletes_take_effect_in_order", "DeletesInTheBackground", "right after it was"),
        ("sets_and_deletes_take_effect_in_order", "WritesBehind", "right after it was"),
        ("a_page_that_has_no_room_never_shows", "GivesUpBeforeItsWriter", "was refused"),
        ("a_page_that_the_file_system_refused_never_shows", "KeepsWhatFilesRefused", "shows once"),
        (
            "a_page_that_the_file_system_refused_never_shows",
            "WritesUnwrittenFilesAtClose",
            "in another process",
        ),
        ("large_pages_work", "LengthIn24Bits", "pages of 16777216 bytes"),
        ("batches_of_every_size_are_read", "ReadsThe256First", "in batches of"),
        ("batches_of_every_size_are_read", "TooManyVariables", "too many SQL variables"),
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
    """Native memory at multiples of 4096."""

    capabilities = replace(Blobs.capabilities, alignment=4096)


class AlignedSegments(DictStore):
    """Segments at multiples of 4096."""

    capabilities = replace(DictStore.capabilities, alignment=4096)


class FiftyPages(EvictingStore):
    """A cache of 50 entries, whatever their size."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        while key not in self._pages and len(self._pages) >= 50:
            self._evict()
        return super()._make_room(key, nbytes)


class ForgetsByChance(DictStore):
    """A cache that has forgotten one page in a hundred whenever it is asked."""

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
    [("pages of 1 byte", "basics"), ("4 KiB that evict", "batches"), ("64 KiB", "contents")],
)
def test_a_small_store_is_not_accused(kind: str, module: str) -> None:
    must_not_accuse(UNUSUAL[kind], QUICK, module)


@SLOW
@pytest.mark.parametrize("kind", UNUSUAL)
def test_an_unusual_store_is_not_accused(kind: str) -> None:
    modules = ("basics", "contents", "removal", "refusals", "sizes", "batches", "duplicates")
    must_not_accuse(UNUSUAL[kind], QUICK, *modules, "batch_sizes", "buffers")


def must_not_accuse(made: type[Subject], options: RunOptions, *modules: str) -> None:
    records = [run_check(made, check, options) for check in of_modules(*modules)]

    assert [] == [(one.name, one.message) for one in records if one.outcome in ACCUSED]
    assert len(records) // 2 < sum(one.outcome is Outcome.PASSED for one in records)


# --- what can't be told is not said ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "name", "outcome"),
    [
        (DictSubject, "a_page_that_the_file_system_refused_never_shows", Outcome.NOT_VERIFIED),
        (DictSubject, "a_damaged_page_changes_no_other", Outcome.NOT_VERIFIED),
        (DictSubject, "nothing_is_written_after_a_get_that_timed_out", Outcome.NOT_VERIFIED),
        (DictSubject, "pages_outlive_an_orderly_close", Outcome.NOT_DECLARED),
        (DictSubject, "another_handle_sees_no_deleted_page", Outcome.NOT_DECLARED),
        (DictSubject, "a_delete_through_another_handle_counts", Outcome.NOT_DECLARED),
        (ShelfSubject, "a_page_that_has_no_room_never_shows", Outcome.NOT_VERIFIED),
        (UNUSUAL["aligned"], "any_segmentation_is_read_back_in_any_other", Outcome.NOT_DECLARED),
        (UNUSUAL["batches of 1"], "duplicates_are_each_read", Outcome.NOT_DECLARED),
    ],
)
def test_a_check_that_does_not_apply_says_so(
    made: type[Subject], name: str, outcome: Outcome
) -> None:
    assert outcome == run_check(made, CHECKS[name], QUICK).outcome


# --- specimens -----------------------------------------------------------------------------------


def test_alike_hashes_are_different_page_hashes() -> None:
    for words, hashes in similar_hashes(random.Random(1)).items():
        assert len(set(hashes)) == len(hashes) > 1, words
        assert {len(one) % 2 for one in hashes} == {0}, words
        if "CRC-32" in words:
            assert len({zlib.crc32(one.encode()) for one in hashes}) == 1
        assert all(32 <= len(one) <= 128 and set(one) <= set("0123456789abcdef") for one in hashes)


@pytest.mark.parametrize("nbytes", [1, 2, 3, 8, 600])
def test_specimens_have_the_size_that_is_asked_for(nbytes: int) -> None:
    noise = random.Random(3)
    deceptive = deceptive_bytes(nbytes, noise)
    nearly = nearly_equal(nbytes, noise)

    assert {nbytes} == {len(data) for data in (*deceptive.values(), *nearly)}
    assert len(set(nearly)) == len(nearly)


@pytest.mark.parametrize(("nbytes", "alignment"), [(1, 1), (4099, 1), (4099 * 512, 512), (100, 64)])
def test_segments_add_up_to_the_page_and_begin_aligned(nbytes: int, alignment: int) -> None:
    for words, lengths in segmentations(nbytes, alignment, random.Random(4)).items():
        assert nbytes == sum(lengths), words
        assert all(lengths), words
        assert not any(length % alignment for length in lengths[:-1]), words
        memory = PageMemory(2, nbytes, alignment=alignment, lengths=lengths)
        assert [len(lengths)] * 2 == [len(page.segments) for page in memory.pages]
        assert not memory.overrun()


def test_batches_go_up_to_the_limit() -> None:
    assert [1] == batch_sizes(1)
    assert [1, 2, 3, 5, 7] == batch_sizes(7)
    assert 1025 == batch_sizes(1025)[-1]
