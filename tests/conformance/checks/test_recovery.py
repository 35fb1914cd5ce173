"""What the checks of a network that is back make a store do."""

from __future__ import annotations

import threading
import time

from hicache_conformance.case.case import Case
from hicache_conformance.checks.lifecycle.recovery import must_work_again
from hicache_conformance.scenarios.fault_path import open_fault_path
from hicache_conformance.selftest.references.subjects import WireSubject
from hicache_conformance.selftest.references.wire import WireStore
from hicache_conformance.selftest.references.wire_protocol import Connection, Deadline

_APART_S = 0.02
"""Longer than a round trip takes."""


class OneAfterAnother(WireStore):
    """A store whose requests start so far apart that each has its reply before the next one starts."""

    _turn = threading.Lock()
    most_in_use = 0

    def _lease(self, number: int, deadline: Deadline) -> Connection:
        with self._turn:
            time.sleep(_APART_S)
            connection = super()._lease(number, deadline)
        self.most_in_use = max(self.most_in_use, len(self._busy))
        return connection


class OneAfterAnotherSubject(WireSubject):
    storage_class = OneAfterAnother


def test_a_store_must_work_again_on_every_connection_however_its_calls_are_timed() -> None:
    with Case(OneAfterAnotherSubject()) as case, open_fault_path(case, short_timeout=False) as path:
        caller = path.caller()
        store = caller.probe.storage
        assert isinstance(store, OneAfterAnother)
        assert store.most_in_use == 1

        must_work_again(path, caller, "nothing happened")

        assert store.most_in_use == path.width == 4
