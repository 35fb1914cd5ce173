"""Asserts that a check finds each known defect of vLLM's `fs` tier: `make field-vllm-known`."""

from __future__ import annotations

import pytest
from field.vllm.fs import VllmFs
from hicache_conformance.checks import all_checks
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from page_files import PaddedFileSubject

pytestmark = pytest.mark.timeout(400)


class Fs(PaddedFileSubject):
    storage_class = files = VllmFs
    absent = VllmFs.absent
    alignment = 4096


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KV-003:a_page_of_another_size_is_no_hit", "batch_exists is True"),
        ("KV-101:a_page_is_not_seen_from_a_neighbour", "differs in layout only"),
        ("KV-105:every_model_name_works", "File name too long"),
        ("KV-403:an_extended_object_is_a_miss", "object is damaged"),
        ("KV-403:a_damaged_object_is_a_miss", "makes another one of its batch a miss"),
        ("KV-403:a_damaged_object_heals_when_it_is_set_unseen", ""),
        ("KV-404:a_flipped_bit_is_no_hit_without_the_page_store", "never set"),
    ],
)
def test_a_known_defect_is_found(name: str, text: str) -> None:
    (check,) = [one for one in all_checks() if one.name == name]

    record = run_check(Fs, check, RunOptions())

    assert Outcome.FAILED is record.outcome, record.message
    assert text in f"{record.message} {record.got} {record.expected}", record
