"""Asserts that a check finds each known defect of SGLang's backends that shows in their interface.

docs/field/ describes the defects; `make field-known` runs this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from field.sglang.file import SGLangFile
from field.sglang.hf3fs import SGLangHF3FS
from hicache_conformance.checks import all_checks
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_conformance import Scratch

pytestmark = pytest.mark.timeout(600)  # killed writers take a while


class InDirectory(Subject):
    fields: ClassVar[Mapping[str, Any]] = {}

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return {"path": str(scratch.path), **self.fields}


class File(InDirectory):
    storage_class = SGLangFile
    absent = SGLangFile.absent


class FileWithMetadataCache(File):
    fields = {"extra_config": {"enable_metadata_cache": True}}  # noqa: RUF012 - of the base


class FileIntoStridedMemory(File):
    fields = {"strided": True}  # noqa: RUF012 - as above


class HF3FS(InDirectory):
    storage_class = SGLangHF3FS
    absent = SGLangHF3FS.absent


class HF3FSWithFlags(HF3FS):
    fields = {"page_flags": True}  # noqa: RUF012 - as above


@pytest.mark.parametrize(
    ("subject", "name", "text"),
    [
        (File, "KV-003:a_page_of_another_size_is_no_hit", "batch_exists is True"),
        (File, "KV-101:a_page_is_not_seen_from_a_neighbour", "differs in dtype only"),
        (File, "KV-103:clear_spares_look_alikes", "after a key space was cleared"),
        (File, "KV-103:clear_spares_other_programs_files", "removed or changed a file"),
        (File, "KV-105:every_model_name_works", "batch_get raised OSError"),
        (File, "KV-105:no_model_name_aliases_another", "/a-b/c"),
        (File, "KV-106:ranks_of_a_sharded_draft_share_nothing", "set by other ranks"),
        (File, "KV-402:killed_writers_leave_nothing_that_grows", "grow"),
        (File, "KV-403:a_damaged_object_is_a_miss", "batch_get raised OSError"),
        (File, "KV-403:a_damaged_object_heals_when_it_is_set_unseen", "batch_get raised OSError"),
        (File, "KV-403:an_extended_object_is_a_miss", "object is damaged"),
        (File, "KV-404:a_flipped_bit_is_no_hit_without_the_page_store", "never set"),
        (
            FileWithMetadataCache,
            "KV-403:a_removed_object_heals_when_it_is_set_unseen",
            "batch_get is False for a page whose batch_set returned True",
        ),
        (FileIntoStridedMemory, "KV-002:what_was_set_is_there", "never set"),
        (HF3FS, "KV-102:pools_of_one_hash_coexist", "batch_set refused"),
        (HF3FS, "KV-202:a_missing_page_changes_no_other", "never set"),
        (HF3FS, "KV-306:it_leaves_the_process_as_it_was", "signal"),
        (HF3FS, "KV-307:a_batch_that_does_not_fit_is_judged_page_by_page", "KeyError"),
        (HF3FS, "KV-307:a_page_twice_in_a_batch_takes_room_once", ""),
        (HF3FSWithFlags, "KV-201:a_batch_gives_one_bool_a_page", "one bool a hash"),
    ],
)
def test_a_known_defect_is_found(subject: type[Subject], name: str, text: str) -> None:
    (check,) = [one for one in all_checks() if one.name == name]

    record = run_check(subject, check, RunOptions())

    assert Outcome.FAILED is record.outcome
    assert text in f"{record.message} {record.got} {record.expected}"
