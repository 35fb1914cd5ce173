"""Each side of a fork uses the store for some rounds."""

from __future__ import annotations

import time

import pytest
from hicache_conformance.case.case import Case
from hicache_conformance.run.outcomes import NotVerified
from hicache_conformance.scenarios import forks
from hicache_conformance.scenarios.attempts import Caller
from hicache_conformance.selftest.references.subjects import DictSubject


def test_a_page_that_was_refused_before_the_fork_is_not_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Case(DictSubject()) as case:
        store, space = case.open(), case.space(64)
        store.open_space(space)
        side = forks._HandleUser(Caller(store, space, 60.0), {}, "parent")

        def refused(*_: object) -> list[bool]:
            return [False]

        monkeypatch.setattr(store.storage, "batch_set", refused)

        with pytest.raises(NotVerified, match="takes no page"):
            side.set_all(case.contents(space, case.hashes(1)))


def test_a_slow_store_is_used_for_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_ROUNDS_LIMIT_S", 0.1)
    with Case(DictSubject()) as case:
        store, space = case.open(), case.space(64)
        store.open_space(space)
        batch_get = store.storage.batch_get

        def slow(*arguments: object) -> list[bool]:
            time.sleep(0.02)
            return batch_get(*arguments)  # type: ignore[arg-type] # passed on

        monkeypatch.setattr(store.storage, "batch_get", slow)
        side = forks._HandleUser(Caller(store, space, 60.0), {}, "parent")
        side.use(0.0)

        calls_a_round = 3 + 2 * 3
        assert not side.report.problem
        assert calls_a_round <= side.report.calls <= 4 * calls_a_round
