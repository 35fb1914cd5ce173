"""KV-501: some order of the calls explains the answers that threads get about one page.

If the store has several parts, each of which may have its copy, an order explains each answer by itself.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared, Violation
from hicache_conformance.scenarios.setup import fitting
from hicache_conformance.tools.observation.linearizability import (
    Counterexample,
    History,
    Undecided,
    explain,
    explain_each,
)
from hicache_conformance.tools.processes.machine import WorkLimit
from hicache_conformance.tools.processes.threads import run_at_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_conformance.tools.observation.history import Kind, Operation
    from hicache_storage.keys import KeySpace

_THREADS = 4
_CALLS = 70
"""How many calls each thread makes about two pages, so that a history has fewer than 200 calls."""
_LIMIT_S = 5.0
_MOST_ROUNDS = 24
"""Two writers that disturb each other only for a moment were seen in every tenth round."""
_FEWEST_ROUNDS = 6
_FEWEST_ROUNDS_QUICK = 2
_ALL_ROUNDS_S = 8.0
_KINDS: tuple[Kind, ...] = ("get", "get", "get", "set", "set", "exists", "delete")


@check("KV-501", stochastic=True)
def the_answers_about_a_page_fit_one_order(case: Case) -> None:
    """The answers that threads get about a page are possible if the calls run one after another."""
    if not case.keeps:
        raise NotDeclared("pages may vanish at any time, so any answers are allowed")
    handles = [case.open()]
    judge = explain_each if len(handles[0].storage.parts()) > 1 else explain
    if case.claims.shared:
        handles.append(case.open())
    space = case.space(fitting(case, 1024))
    for store in handles:
        store.open_space(space)
    fewest = _FEWEST_ROUNDS_QUICK if case.quick else _FEWEST_ROUNDS
    limit, rounds, undecided = WorkLimit(_ALL_ROUNDS_S), 0, 0
    while rounds < fewest or (not case.quick and rounds < _MOST_ROUNDS and not limit.is_over()):
        rounds += 1
        pages = [_Page(case, space, page_hash) for page_hash in case.hashes(2)]
        run_at_once(
            [
                partial(_call, pages, handles[number % len(handles)], number, _own_random(case))
                for number in range(_THREADS)
            ],
            turns=_CALLS,
            limit_s=_LIMIT_S,
        )
        undecided += sum(page.must_be_explained(judge) for page in pages)
        handles[0].delete(space, [page.page_hash for page in pages])
    case.evidence["histories"] = f"{2 * rounds}, {undecided} of them too long to decide"


class _Page:
    """One page with its possible contents and the history of its calls."""

    def __init__(self, case: Case, space: KeySpace, page_hash: str) -> None:
        self.page_hash = page_hash
        self._case = case
        self._space = space
        self._history = History()
        self._versions: dict[bytes, int] = {}

    def set(self, store: Probe, number: int, version: int) -> None:
        contents = self._case.contents(self._space, [self.page_hash], version)
        self._versions[contents[self.page_hash]] = version
        with self._history.recording(process=number, kind="set", value=version) as call:
            call.record_answer(store.set(self._space, contents)[0])

    def get(self, store: Probe, number: int) -> None:
        with self._history.recording(process=number, kind="get") as call:
            (data,) = store.get(self._space, [self.page_hash])
            if data is None:
                call.record_answer(outcome=False)
            elif data in self._versions:
                call.record_answer(outcome=True, value=self._versions[data])
            else:
                raise self._case.wrong_bytes(store, self._space, self.page_hash, data, [])

    def exists(self, store: Probe, number: int) -> None:
        with self._history.recording(process=number, kind="exists") as call:
            call.record_answer(store.exists(self._space, [self.page_hash])[0])

    def delete(self, store: Probe, number: int) -> None:
        with self._history.recording(process=number, kind="delete") as call:
            call.record_answer(store.delete(self._space, [self.page_hash])[0])

    def must_be_explained(
        self, judge: Callable[[list[Operation]], Counterexample | Undecided | None]
    ) -> bool:
        """Raise if no order of the calls explains the answers. Return True if the search gave up."""
        # The last of several simultaneous sets may win, even if the store never overwrites a
        # present page.
        found = judge(self._history.operations())
        if isinstance(found, Counterexample):
            raise Violation(
                "threads got answers about one page that no order of their calls explains",
                "answers that would be right if the calls had come one after the other",
                str(found.culprit),
                tuple(found.lines()),
            )
        return isinstance(found, Undecided)


def _own_random(case: Case) -> random.Random:
    """Return a random generator for one thread, which no other thread uses."""
    return random.Random(case.random.random())


def _call(pages: list[_Page], store: Probe, number: int, rng: random.Random, turn: int) -> None:
    page = rng.choice(pages)
    match rng.choice(_KINDS):
        case "set":
            page.set(store, number, turn * _THREADS + number)
        case "get":
            page.get(store, number)
        case "exists":
            page.exists(store, number)
        case "delete":
            page.delete(store, number)
