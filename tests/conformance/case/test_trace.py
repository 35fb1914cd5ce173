"""What a trace tells of the calls, and what it keeps of them."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

from hicache_conformance.case.trace import Trace
from hicache_conformance.checks import all_checks
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Scratch
from hicache_conformance.selftest.references.subjects import WireSubject
from pages import space

if TYPE_CHECKING:
    from pathlib import Path


class Found:
    """The find of a listing."""

    def __repr__(self) -> str:
        return "Found"


def test_a_listing_is_not_kept_alive() -> None:
    trace = Trace()
    found = Found()
    seen = weakref.ref(found)

    trace.ended(trace.began("scan"), [found])
    del found
    gc.collect()

    assert seen() is None


def test_a_long_listing_is_shown_by_its_first_entries() -> None:
    trace = Trace()

    trace.ended(trace.began("scan"), [Found()] * 9)

    assert ["scan() -> [Found, Found, Found, Found, ... 9 in all]"] == trace.sequence()


def test_a_large_batch_is_shown_by_the_pages_in_question_with_their_verdicts() -> None:
    trace = Trace()
    hashes = [f"{number:08x}" for number in range(6)]

    trace.ended(trace.began("batch_get", hashes), [True, True, False, True, True, True])

    assert ["batch_get([2] 00000002 of 6 pages) -> [2] False"] == trace.sequence("00000002")


def test_a_store_of_many_key_spaces_is_not_taken_for_one_that_leaks(tmp_path: Path) -> None:
    [check] = [
        one for one in all_checks() if one.run.__name__ == "opening_and_closing_keeps_memory"
    ]
    subject = WireSubject()
    with WireSubject.storage_class.from_config(subject.config(Scratch(tmp_path, "x"))) as storage:
        for number in range(800):
            storage.open_space(space(model=f"model-{number}"))

        record = run_check(WireSubject, check, RunOptions(call_limit_s=10))

    assert (Outcome.PASSED, "") == (record.outcome, record.got)


def test_a_clear_is_shown_with_the_pages_that_it_may_have_removed() -> None:
    trace = Trace()
    for line, pages in (("a.clear kv", ()), ("a.batch_set kv", ("ab" * 4,)), ("a.clear kv", ())):
        trace.ended(trace.began(line, pages), 1)
    trace.ended(trace.began("a.batch_set kv", ("cd" * 4,)), 1)

    assert ["a.batch_set kv(abababab) -> 1", "a.clear kv() -> 1"] == trace.sequence("ab" * 4)
