"""The answers of lookups, and what became of each hit, which are kept for each request separately."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hicache_storage.integrations.vllm._request_lookups import RequestLookups
from hicache_storage.request_log import Reason

KEY = b"key"
GONE = {KEY: Reason.VANISHED}


def context(request: str, **ends: int) -> Any:
    """Return the context of a request, with the place where each page ends in the prompt."""
    end_of = {name.encode(): end for name, end in ends.items()}.get
    return SimpleNamespace(req_id=request, get_offload_key_position=end_of)


A, B = context("a"), context("b")


def hits_of(a: Any, *keys: bytes) -> RequestLookups:
    """Return the lookups of a request that was given a hit of each page."""
    lookups = RequestLookups()
    for key in keys:
        lookups.ask(a, key)
        lookups.answer([a.req_id], key)
        assert lookups.ask(a, key) is True
    return lookups


def test_a_question_is_passed_on_once() -> None:
    lookups = RequestLookups()

    assert [None, None] == [lookups.ask(A, KEY), lookups.ask(A, KEY)]
    assert {KEY: ["a"]} == lookups.take_asked()
    assert {} == lookups.take_asked()


def test_two_requests_ask_one_question() -> None:
    lookups = RequestLookups()
    lookups.ask(A, KEY)
    lookups.ask(B, KEY)

    assert {KEY: ["a", "b"]} == lookups.take_asked()


def test_an_answer_is_of_the_requests_that_asked() -> None:
    lookups = RequestLookups()
    lookups.ask(A, KEY)
    lookups.ask(B, KEY)
    lookups.answer(["a"], KEY)

    assert [True, None] == [lookups.ask(A, KEY), lookups.ask(B, KEY)]


def test_a_failed_load_is_a_miss_of_its_request_only() -> None:
    lookups = RequestLookups()
    for request in (A, B):
        lookups.ask(request, KEY)
    lookups.answer(["a", "b"], KEY)
    lookups.mark_missing("a", GONE)

    assert [False, True] == [lookups.ask(A, KEY), lookups.ask(B, KEY)]


def test_a_late_answer_changes_no_earlier_one() -> None:
    lookups = RequestLookups()
    lookups.ask(A, KEY)
    lookups.mark_missing("a", GONE)
    lookups.answer(["a"], KEY)

    assert lookups.ask(A, KEY) is False


def test_a_request_that_is_over_is_forgotten() -> None:
    lookups = RequestLookups()
    lookups.ask(A, KEY)
    lookups.take_asked()
    lookups.forget("a")
    lookups.answer(["a"], KEY)
    lookups.mark_missing("a", GONE)
    lookups.mark_loaded("a", [KEY])

    assert lookups.ask(A, KEY) is None
    assert {KEY: ["a"]} == lookups.take_asked()


def test_after_a_reset_requests_ask_again() -> None:
    lookups = RequestLookups()
    lookups.ask(A, KEY)
    lookups.answer(["a"], KEY)
    lookups.clear()

    assert lookups.ask(A, KEY) is None


def test_a_page_that_was_loaded_and_is_asked_again_is_missing() -> None:
    lookups = hits_of(A, KEY)
    lookups.mark_loaded("a", [KEY])

    assert lookups.ask(A, KEY) is False
    pages = lookups.forget("a")
    assert pages is not None
    assert ({KEY: Reason.EVICTED}, 1) == (pages.reasons(), pages.unused_loads())


def test_a_page_without_a_row_is_a_hit_until_the_request_has_rows_to_lose() -> None:
    lookups = hits_of(A, KEY, b"other")
    assert lookups.ask(A, KEY) is True

    lookups.mark_loaded("a", [b"other"])
    assert lookups.ask(A, KEY) is False
    pages = lookups.forget("a")
    assert pages is not None
    assert ({KEY: Reason.NO_HOST_SLOT}, 0) == (pages.reasons(), pages.unused_loads())


def test_a_request_that_asks_after_it_was_preempted_gets_its_hits_again() -> None:
    lookups = hits_of(A, KEY)
    lookups.mark_loaded("a", [KEY])
    lookups.forget("a")

    assert lookups.ask(A, KEY) is None
    lookups.answer(["a"], KEY)
    assert lookups.ask(A, KEY) is True


def test_loads_behind_a_lost_page_are_unused() -> None:
    keys = [b"p0", b"p1", b"p2", b"p3"]
    lookups = hits_of(context("a", p0=16, p1=32, p2=48, p3=64), *keys)
    lookups.mark_loaded("a", keys)
    lookups.mark_missing("a", {b"p1": Reason.TIMEOUT})

    pages = lookups.forget("a")
    assert pages is not None
    assert pages.unused_loads() == 2
