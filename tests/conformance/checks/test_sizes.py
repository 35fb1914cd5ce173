"""Checks of page sizes: whom they must not accuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_backends.hf3fs import Hf3fsStorage
from hicache_conformance.checks import all_checks
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Scratch, Subject

if TYPE_CHECKING:
    from collections.abc import Mapping


class Small(Subject):
    """64 MiB, in blocks of 4096 bytes, so that a page of 512 segments is a large one."""

    storage_class = Hf3fsStorage

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return {"path": str(scratch.path), "capacity_nbytes": "64MiB"}


def test_a_batch_that_a_small_store_has_no_room_for_is_not_asked_of_it() -> None:
    [check] = [one for one in all_checks() if one.run.__name__ == "batches_of_many_segments_work"]

    record = run_check(Small, check, RunOptions(call_limit_s=30))

    assert (Outcome.PASSED, "") == (record.outcome, record.message)
