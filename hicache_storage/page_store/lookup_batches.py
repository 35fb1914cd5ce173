"""Answer the lookups that were begun. Those that wait are answered together, with fewer round trips."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from hicache_storage.errors import UnsupportedOperation
from hicache_storage.keys import check_page_hashes
from hicache_storage.page_store.begun import Begun, Once
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.begun import Call, Calls
    from hicache_storage.page_store.lookup import ExistsQuery

Queries: TypeAlias = "Sequence[tuple[KeySpace, Sequence[str]]]"
Verdicts: TypeAlias = "list[list[Verdict]]"

_MOST_UNDER_WAY = 2


class _Asked(NamedTuple):
    queries: Queries
    deadline: Deadline
    future: Future[Verdicts]

    def fail(self, verdict: Verdict) -> None:
        self.future.set_result([[verdict] * len(hashes) for _, hashes in self.queries])


class LookupBatches:
    """The lookups of one process that were begun. Thread-safe.

    Two calls are under way at the same time. The lookups that arrive meanwhile become one call, whose
    deadline is the first of theirs.
    """

    def __init__(
        self,
        calls: Calls,
        ask: Callable[[Queries, Deadline], Call[list[ExistsQuery]]],
        check: Callable[[KeySpace], object],
    ) -> None:
        self._calls = calls
        self._ask = ask
        self._check = check
        # The rest belongs to the thread of `calls`.
        self._waiting: list[_Asked] = []
        self._under_way = 0

    def begin(self, queries: Queries, deadline: Deadline) -> Future[Verdicts]:
        """Begin a lookup, without waiting for anything."""
        asked = _Asked(queries, deadline, Future())
        self._calls.soon(partial(self._add, asked))
        return asked.future

    # --- in the thread -------------------------------------------------------------------------------

    def _add(self, asked: _Asked) -> None:
        if not asked.future.set_running_or_notify_cancel():
            return
        try:
            for space, hashes in asked.queries:
                check_page_hashes(hashes)
                self._fits(space)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            asked.future.set_exception(error)
            return
        self._waiting.append(asked)
        self._answer_waiting()
        if self._waiting:
            self._calls.at(asked.deadline, Once(partial(self._give_up, asked)))

    def _give_up(self, asked: _Asked) -> None:
        if asked in self._waiting:
            self._waiting.remove(asked)
            asked.fail(Verdict.TIMEOUT)

    def _answer_waiting(self) -> None:
        if not self._waiting or self._under_way >= _MOST_UNDER_WAY:
            return
        asked, self._waiting = self._waiting, []
        queries = [query for query in _together(asked) if self._fits(query[0])]
        deadline = min((one.deadline for one in asked), key=lambda each: each.end_s)
        self._under_way += 1
        begun = Begun(self._ask(queries, deadline), deadline)
        begun.add_done_callback(partial(self._answer, asked, queries))
        self._calls.go_on(begun)

    def _fits(self, space: KeySpace) -> bool:
        try:
            self._check(space)
        except UnsupportedOperation:  # the log has it when its pages are first stored
            return False
        return True

    def _answer(
        self, asked: Sequence[_Asked], queries: Queries, begun: Future[list[ExistsQuery]]
    ) -> None:
        self._under_way -= 1
        try:
            answers = begun.result()
        except BaseException as error:  # noqa: BLE001 - it is the callers'
            for one in asked:
                one.future.set_exception(error)
        else:
            if len(asked) == 1 and len(queries) == len(asked[0].queries):
                asked[0].future.set_result([query.verdicts for query in answers])
            else:
                _hand_out(asked, queries, answers)
        self._answer_waiting()


def _together(asked: Sequence[_Asked]) -> Queries:
    """Return one query for each key space, or the queries of a lookup that is alone."""
    if len(asked) == 1:
        return asked[0].queries
    wanted: dict[KeySpace, dict[str, None]] = {}
    for one in asked:
        for space, hashes in one.queries:
            wanted.setdefault(space, {}).update(dict.fromkeys(hashes))
    return [(space, list(hashes)) for space, hashes in wanted.items()]


def _hand_out(asked: Sequence[_Asked], queries: Queries, answers: Sequence[ExistsQuery]) -> None:
    """Give each lookup its part. A key space that was not asked is UNAVAILABLE."""
    found: dict[KeySpace, dict[str, Verdict]] = {}
    for (space, hashes), answer in zip(queries, answers, strict=True):
        found.setdefault(space, {}).update(zip(hashes, answer.verdicts, strict=True))
    for one in asked:
        one.future.set_result(
            [
                [found[space][page_hash] for page_hash in hashes]
                if space in found
                else [Verdict.UNAVAILABLE] * len(hashes)
                for space, hashes in one.queries
            ]
        )
