"""KV-402: a reader that was killed in the middle of a get or a scan does not use up room forever."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotVerified
from hicache_conformance.scenarios.fork_server import ForkServer, read_half, scan_half
from hicache_conformance.scenarios.killed_writers import keep_open_if_shared, reopen, require_files
from hicache_conformance.scenarios.setup import fitting
from hicache_conformance.tools.observation.files import DirectoryUsage, backdate

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe

_PAGE_NBYTES = 64 << 10
_PAGES = 6
_TURNS = 24
"""How many pages one churn sets and deletes."""
_CHURNS = 12
_KILLS = 4
_KILLS_QUICK = 2
_MONTH_S = 30 * 86_400.0
_CLEANING_LIMIT_S = 5.0
_POLL_S = 0.1


@check("KV-402", quick=False)
def killed_readers_leave_nothing_that_grows(case: Case) -> None:
    """After readers were killed half way, sets and deletes do not take more and more room."""
    require_files(case)
    churn = _Churn(case)
    if not churn.settles():
        raise NotVerified("the store grows with every set, whether or not anybody reads")
    kills = _KILLS_QUICK if case.quick else _KILLS
    churn.kill_readers(kills)
    before = churn.usage()
    churn.usage()
    after = churn.usage()
    case.evidence["left"] = f"{before} after {kills} readers were killed, {after} later"
    until_s = time.monotonic() + _CLEANING_LIMIT_S
    while after.nbytes - before.nbytes > churn.nbytes:
        if time.monotonic() > until_s:
            raise churn.violation(
                "after readers were killed half way, the store grows with every set",
                f"about {before}, as before {2 * _TURNS} pages were set and deleted",
                str(after),
            )
        backdate(case.scratch.path, _MONTH_S)  # Some stores remove only files that are old.
        time.sleep(_POLL_S)
        after = churn.usage()


class _Churn:
    """A store in which pages are set and deleted while readers of its other pages are killed."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.space = case.space(fitting(case, _PAGE_NBYTES))
        self.nbytes = _TURNS * self.space.stored_nbytes
        """How many bytes the pages of one churn have."""
        self._fork_server = ForkServer(case)
        self._store = case.open()
        self._store.open_space(self.space)
        self._pages = case.stored(self._store, self.space, _PAGES)
        self._stays_open = keep_open_if_shared(case, self._store)

    def usage(self) -> DirectoryUsage:
        """Set and delete pages once more, and return how many bytes the directory uses."""
        store = self._handle()
        for turn in range(_TURNS):
            new = self.case.contents(self.space, self.case.hashes(1))
            if not all(store.set(self.space, new)):
                raise store.violation(
                    "a page is refused for lack of room after others were set and deleted",
                    expected=f"True: {_PAGES} pages are there, as when the first pages were set",
                    got=f"False after {turn} pages of {self.space.stored_nbytes} bytes",
                )
            store.delete(self.space, list(new))
        keep_open_if_shared(self.case, store)
        return DirectoryUsage.of(self.case.scratch.path)

    def settles(self) -> bool:
        """Return True if the store stops growing. It may take new room before it reuses old room."""
        usage = self.usage()
        for _ in range(_CHURNS):
            before, usage = usage, self.usage()
            if usage.nbytes - before.nbytes <= self.nbytes // 2:
                return True
        return False

    def kill_readers(self, count: int) -> None:
        """Kill readers in the middle of a get, and in the middle of a scan."""
        for _ in range(count):
            self._fork_server.spawn(read_half, self.space, list(self._pages)).receive()
            if self.case.claims.enumerable:
                self._fork_server.spawn(scan_half, self.space).receive()
        self._fork_server.end()

    def violation(self, message: str, expected: str, got: str) -> Exception:
        return self._store.violation(message, expected=expected, got=got)

    def _handle(self) -> Probe:
        if self._stays_open:
            return self._store
        store = reopen(self.case)
        store.open_space(self.space)
        return store
