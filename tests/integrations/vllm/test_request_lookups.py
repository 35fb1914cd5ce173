"""The answers of lookups, which are kept for each request separately."""

from __future__ import annotations

from hicache_storage.integrations.vllm._request_lookups import RequestLookups

KEY = b"key"


def test_a_question_is_passed_on_once() -> None:
    lookups = RequestLookups()

    assert [None, None] == [lookups.ask("a", KEY), lookups.ask("a", KEY)]
    assert {KEY: ["a"]} == lookups.take_asked()
    assert {} == lookups.take_asked()


def test_two_requests_ask_one_question() -> None:
    lookups = RequestLookups()
    lookups.ask("a", KEY)
    lookups.ask("b", KEY)

    assert {KEY: ["a", "b"]} == lookups.take_asked()


def test_an_answer_is_of_the_requests_that_asked() -> None:
    lookups = RequestLookups()
    lookups.ask("a", KEY)
    lookups.ask("b", KEY)
    lookups.answer(["a"], KEY, present=True)

    assert [True, None] == [lookups.ask("a", KEY), lookups.ask("b", KEY)]


def test_a_failed_load_is_a_miss_of_its_request_only() -> None:
    lookups = RequestLookups()
    for request in ("a", "b"):
        lookups.ask(request, KEY)
    lookups.answer(["a", "b"], KEY, present=True)
    lookups.mark_missing("a", [KEY])

    assert [False, True] == [lookups.ask("a", KEY), lookups.ask("b", KEY)]


def test_a_late_answer_changes_no_earlier_one() -> None:
    lookups = RequestLookups()
    lookups.ask("a", KEY)
    lookups.mark_missing("a", [KEY])
    lookups.answer(["a"], KEY, present=True)

    assert lookups.ask("a", KEY) is False


def test_a_request_that_is_over_is_forgotten() -> None:
    lookups = RequestLookups()
    lookups.ask("a", KEY)
    lookups.take_asked()
    lookups.forget("a")
    lookups.answer(["a"], KEY, present=True)
    lookups.mark_missing("a", [KEY])

    assert lookups.ask("a", KEY) is None
    assert {KEY: ["a"]} == lookups.take_asked()


def test_after_a_reset_requests_ask_again() -> None:
    lookups = RequestLookups()
    lookups.ask("a", KEY)
    lookups.answer(["a"], KEY, present=True)
    lookups.clear()

    assert lookups.ask("a", KEY) is None
