from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hicache_conformance.tools.observation.linearizability import (
    Counterexample,
    Kind,
    Operation,
    Undecided,
    explain,
    explain_each,
)
from hypothesis import given, settings
from hypothesis import strategies as st


def histories(text: str) -> list[Operation]:
    """Return the operations of lines such as "0-3 set 1 True", "4- delete" or "5-6 get 1"."""
    found: list[Operation] = []
    for process, line in enumerate(text.strip().splitlines()):
        span, kind, *rest = line.split()
        invoked, _, returned = span.partition("-")
        found.append(
            _operation(process, int(invoked), int(returned) if returned else None, kind, rest)
        )
    return found


def _operation(
    process: int, invoked: int, returned: int | None, kind: str, rest: list[str]
) -> Operation:
    values = [int(word) for word in rest if word.isdigit()]
    value = values[0] if values else None
    outcome = None if returned is None else "False" not in rest and "miss" not in rest
    kinds: dict[str, Kind] = {"set": "set", "get": "get", "delete": "delete", "exists": "exists"}
    return Operation(process, invoked, returned, kinds[kind], value, outcome)


# --- single facts --------------------------------------------------------------------------------

EXPLAINED = {
    "nothing happened": "",
    "a miss first": "0-1 get miss",
    "what was set": "0-1 set 1\n2-3 get 1\n4-5 exists",
    "a set and a read at once, seen": "0-9 set 1\n1-2 get 1",
    "a set and a read at once, not seen": "0-9 set 1\n1-2 get miss",
    "a delete": "0-1 set 1\n2-3 delete\n4-5 get miss\n6-7 exists False",
    "a delete of nothing": "0-1 delete\n2-3 get miss",
    "a set again after a delete": "0-1 set 1\n2-3 delete\n4-5 set 2\n6-7 get 2",
    "a set and a delete at once": "0-1 set 1\n2-9 delete\n3-8 set 2\n10-11 get 2",
    "a set and a delete at once, gone": "0-1 set 1\n2-9 delete\n3-8 set 2\n10-11 get miss",
    "an overwriting set that changed nothing": "0-1 set 1\n2-3 set 2\n4-5 get 1",
    "an overwriting set": "0-1 set 1\n2-3 set 2\n4-5 get 2",
    "a refused set": "0-1 set 1 False\n2-3 get miss",
    "a set that raised, done at last": "0- set 1\n2-3 get miss\n4-5 get 1",
    "a set that raised, never done": "0- set 1\n2-3 get miss\n4-5 exists False",
    "a delete that raised, done at last": "0-1 set 1\n2- delete\n3-4 get 1\n5-6 get miss",
    "a delete that answered False, done": "0-1 set 1\n2-3 delete False\n4-5 get miss",
    "a delete that answered False, not done": "0-1 set 1\n2-3 delete False\n4-5 get 1",
    "a get that raised": "0-1 set 1\n2- get",
}  # fmt: skip

UNEXPLAINED = {
    "a version that nobody set": "0-1 get 1",
    "a page that nobody set": "0-1 exists",
    "a page that is forgotten": "0-1 set 1\n2-3 get miss",
    "a page that comes back": "0-1 set 1\n2-3 delete\n4-5 get 1",
    "a page that only exists": "0-1 set 1\n2-3 exists\n4-5 get miss",
    "a refused set that shows": "0-1 set 1 False\n2-3 get 1",
    "a refused set that shows while it runs": "0-9 set 1 False\n2-3 get 1",
    "a read from the future": "0-1 get 1\n2-3 set 1",
    "versions that go back": "0-1 set 1\n2-9 set 2\n3-4 get 2\n5-6 get 1",
    "readers that see two orders": "0-9 set 1\n0-9 set 2\n1-2 get 1\n3-4 get 2\n5-6 get 1",
    "a raised set that is undone": "0- set 1\n2-3 get 1\n4-5 get miss",
    "a raised delete that is undone": "0-1 set 1\n2- delete\n3-4 get miss\n5-6 get 1",
}


@pytest.mark.parametrize("text", EXPLAINED.values(), ids=EXPLAINED)
def test_a_history_that_one_order_explains_is_linearizable(text: str) -> None:
    assert explain(histories(text)) is None


@pytest.mark.parametrize("text", UNEXPLAINED.values(), ids=UNEXPLAINED)
def test_a_history_that_no_order_explains_is_not_linearizable(text: str) -> None:
    assert isinstance(explain(histories(text)), Counterexample)


ONLY_EACH = {
    "versions that go back",
    "readers that see two orders",
    "a raised set that is undone",
    "a raised delete that is undone",
}
"""Histories whose reads are right one by one, but not together."""


@pytest.mark.parametrize("text", EXPLAINED.values(), ids=EXPLAINED)
def test_an_order_of_all_answers_explains_each(text: str) -> None:
    assert explain_each(histories(text)) is None


@pytest.mark.parametrize("name", UNEXPLAINED)
def test_each_answer_by_itself_must_be_possible(name: str) -> None:
    found = explain_each(histories(UNEXPLAINED[name]))

    assert isinstance(found, Counterexample) != (name in ONLY_EACH)


# --- counterexamples -----------------------------------------------------------------------------


def shown(text: str) -> list[str]:
    found = explain(histories(text))
    assert isinstance(found, Counterexample)
    return found.lines()


def test_a_counterexample_names_what_cannot_be() -> None:
    assert shown("0-1 set 1\n2-3 delete\n4-5 get 1") == [
        "process 0: set version 1 -> True [0..1]",
        "process 1: delete -> True [2..3]",
        "process 2: get -> version 1 [4..5]   <- no order explains this",
    ]


def test_a_counterexample_leaves_out_what_it_does_not_take() -> None:
    lines = shown(
        "0-1 set 1\n2-3 get 1\n4-5 delete\n6-7 set 2\n8-9 exists\n10-11 get 2\n12-13 get miss"
        "\n14-15 set 3\n16-17 get 3"
    )

    assert lines == [
        "process 3: set version 2 -> True [6..7]",
        "process 6: get -> miss [12..13]   <- no order explains this",
    ]


def test_a_counterexample_names_the_set_of_each_version_read() -> None:
    lines = shown("0-1 set 1\n2-3 delete\n4-5 set 2\n6-7 get 1")

    assert "process 0: set version 1 -> True [0..1]" in lines


def test_operations_without_a_result_are_marked() -> None:
    lines = shown("0- set 1\n2-3 get 1\n4-5 get miss")

    assert "process 0: set version 1 -> no answer [0..]" in lines


def test_a_delete_without_a_result_is_shown_where_it_may_explain_a_miss() -> None:
    lines = shown("0-1 set 1\n2- delete\n3-4 get miss\n5-6 get 1")

    assert "process 1: delete -> no answer [2..]" in lines


def test_a_counterexample_is_one_itself() -> None:
    for text in UNEXPLAINED.values():
        found = explain(histories(text))
        assert isinstance(found, Counterexample)

        assert isinstance(explain(found.operations), Counterexample)


# --- against a real register ---------------------------------------------------------------------


def simulated(seed: int, *, processes: int, calls: int) -> list[Operation]:
    """Return what callers of a right store record, under an interleaving that the seed chooses."""
    rng = random.Random(seed)
    clock, versions = itertools.count(), itertools.count(1)
    state: int | None = None
    pending: dict[int, Operation] = {}
    done: dict[int, Operation] = {}
    history: list[Operation] = []
    left = dict.fromkeys(range(processes), calls)
    while left or pending or done:
        process = rng.choice([*left, *pending, *done])
        if process in done:
            history.append(replace(done.pop(process), returned=next(clock)))
        elif process in pending:
            operation, state = _applied(pending.pop(process), state, rng)
            lost = operation.kind in ("set", "delete") and rng.random() < 0.05
            if lost:
                history.append(operation.unanswered)
            else:
                done[process] = operation
        else:
            kind = rng.choice(_KINDS)
            value = next(versions) if kind == "set" else None
            pending[process] = Operation(process, next(clock), None, kind, value)
            left[process] -= 1
            if not left[process]:
                del left[process]
    return history


_KINDS: tuple[Kind, ...] = ("set", "set", "get", "get", "get", "delete", "exists")


def _applied(
    operation: Operation, state: int | None, rng: random.Random
) -> tuple[Operation, int | None]:
    """Return the operation with its answer, and the state after it."""
    match operation.kind:
        case "get":
            return replace(operation, outcome=state is not None, value=state), state
        case "exists":
            return replace(operation, outcome=state is not None), state
        case "delete":
            return replace(operation, outcome=True), None
        case "set":
            if rng.random() < 0.1:
                return replace(operation, outcome=False), state
            kept = state is not None and rng.random() < 0.3
            return replace(operation, outcome=True), state if kept else operation.value


@settings(deadline=None)  # The machine may be busy.
@given(seed=st.integers(min_value=0), processes=st.integers(1, 6), calls=st.integers(1, 8))
def test_every_history_of_a_right_store_is_explained(seed: int, processes: int, calls: int) -> None:
    assert explain(simulated(seed, processes=processes, calls=calls)) is None


def by_brute_force(history: Sequence[Operation]) -> bool:
    """Return whether an order explains a history. Try all orders, with and without open effects."""
    sure = [each for each in history if each.outcome is not None]
    unsure = [each for each in history if each.outcome is None and each.kind in ("set", "delete")]
    for count in range(len(unsure) + 1):
        for chosen in itertools.combinations(unsure, count):
            for order in itertools.permutations([*sure, *chosen]):
                in_time = all(
                    later.returned is None or later.returned > earlier.invoked
                    for earlier, later in itertools.combinations(order, 2)
                )
                states: set[int | None] = {None}
                for operation in order if in_time else ():
                    states = {after for state in states for after in _after(operation, state)}
                if in_time and states:
                    return True
    return False


def _after(operation: Operation, state: int | None) -> set[int | None]:
    """Return the states to which an operation with this answer may lead."""
    if operation.kind in ("get", "exists"):
        wanted = state is not None and (operation.kind == "exists" or state == operation.value)
        return {state} if (wanted if operation.outcome else state is None) else set()
    if operation.kind == "delete":
        return {None} if operation.outcome is not False else {None, state}
    if operation.outcome is False:
        return {state}
    return {operation.value} if state is None else {state, operation.value}


@settings(deadline=None)  # The machine may be busy.
@given(
    seed=st.integers(min_value=0),
    wrong=st.integers(min_value=0, max_value=5),
    version=st.integers(min_value=0, max_value=4),
)
def test_with_one_answer_changed_it_agrees_with_trying_every_order(
    seed: int, wrong: int, version: int
) -> None:
    history = simulated(seed, processes=3, calls=2)
    operation = history[wrong]
    history[wrong] = (
        replace(operation, value=version, outcome=version > 0)
        if operation.kind == "get" and operation.outcome is not None
        else replace(operation, outcome=not operation.outcome, returned=operation.returned or 99)
    )

    found = explain(history)

    explained = by_brute_force(history)
    assert explained == (found is None)


@settings(deadline=None)  # The machine may be busy.
@given(seed=st.integers(min_value=0), calls=st.integers(1, 10))
def test_a_reduced_history_is_still_wrong_and_minimal(seed: int, calls: int) -> None:
    history = simulated(seed, processes=4, calls=calls)
    history.append(Operation(9, 10_000, 10_001, "get", 10_000, outcome=True))

    found = explain(history)

    assert isinstance(found, Counterexample)
    assert (history[-1],) == found.operations


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_two_hundred_operations_take_little(seed: int) -> None:
    history = simulated(seed, processes=8, calls=25)
    started_s = time.process_time()

    assert explain(history) is None
    assert time.process_time() - started_s < 2


def test_a_wrong_answer_among_two_hundred_operations_takes_little() -> None:
    history = simulated(3, processes=8, calls=24)
    end = max(each.returned or 0 for each in history)
    history += [
        Operation(0, end + 1, end + 2, "delete", None, outcome=True),
        Operation(1, end + 3, end + 4, "exists", None, outcome=True),
    ]
    history = [each for each in history if each.outcome is not None]
    started_s = time.process_time()

    assert isinstance(explain(history), Counterexample)
    assert time.process_time() - started_s < 5


def test_a_search_that_takes_too_long_is_given_up() -> None:
    sets = "\n".join(f"{number}-99 set {number}" for number in range(20))
    history = histories(f"{sets}\n100-101 get 7\n102-103 get 8")

    assert Undecided(1000) == explain(history, max_states=1000)
