"""hicache_conformance.scenes.forks: how long each side of a fork uses the store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_conformance.case import Case
from hicache_conformance.controls.references import DictSubject
from hicache_conformance.scenes import forks
from hicache_conformance.scenes.attempts import Caller

if TYPE_CHECKING:
    import pytest


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
        side = forks._Side(Caller(store, space, 60.0), {}, "parent")
        side.use(0.0)

        calls_a_round = 3 + 2 * 3
        assert not side.report.wrong
        assert calls_a_round <= side.report.calls <= 4 * calls_a_round
