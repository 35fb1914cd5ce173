"""The jobs of an engine's adapter: loads, stores and lookups with deadlines, and a close during them."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from pages import hash_of, space

from hicache_storage.integrations._jobs import JobKind, JobRunner, JobSettings
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings, Transfer
from hicache_storage.page_store.results import Verdict
from interleavings.scenario import Scenario
from interleavings.scenarios.storage import FAILS, SLOW, WORKS, ExploredStorage, content

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_storage.integrations._jobs import JobResult

_NBYTES = 256
_SPACE = space(pool="kv", page_nbytes=_NBYTES)
_HASHES = [hash_of(number) for number in range(4)]
_TIMEOUT_S = 2.0
_EPSILON_S = 0.001
_USED_AGAIN = b"\x5a" * _NBYTES


class JobRunnerScenario(Scenario):
    """An engine submits jobs, and reuses its memory as soon as a job is reported.

    Each job is reported once, by its deadline. An OK page has the bytes of its hash. No storage call
    uses the memory of a reported job, and after a `close` that returned True every job is reported.
    """

    name = "job-runner"
    time_passes = False

    def set_up(self) -> None:
        behaviours = (WORKS, WORKS, SLOW, FAILS)
        self.storage = ExploredStorage(
            self,
            behaviours=dict.fromkeys(("get", "set", "exists"), behaviours),
            slow_s=12.0,
            revocable=self.pick((False, True)),
        )
        self.store = PageStore(
            self.storage,
            PageStoreSettings(
                timeout_s=_TIMEOUT_S,
                breaker_failures=1000,
                parallelism=1,
                private_nbytes=self.pick((256 << 20, 1 << 16)),
            ),
        )
        self.jobs: dict[int, tuple[JobKind, Transfer, float]] = {}
        self.reports: Counter[int] = Counter()
        self.submitted: list[int] = []
        self.runner = JobRunner(
            self.store,
            JobSettings(
                load_timeout_s=_TIMEOUT_S,
                store_timeout_s=_TIMEOUT_S,
                queued_nbytes=self.pick((8 * 4096, 2 * 4096)),
            ),
            on_finished=self._fetch,
        )

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {"engine": lambda: self._submit(0), "other": lambda: self._submit(10)} | {
            "closer": self._close
        }

    def finish(self) -> None:
        self.require(self.runner.drain(100.0), "a job has not ended")
        self._close(always=True)
        self.scheduler.settle()
        self.store.close()
        for job_id, (kind, batch, _) in self.jobs.items():
            times = self.reports[job_id]
            self.require(times == 1, f"a {kind.value} was reported {times} times")
            for page in batch.pages:
                self.require(
                    page.tobytes() == _USED_AGAIN, "the memory of a reported job was changed"
                )

    def _submit(self, first: int) -> None:
        for job_id in range(first, first + 2):
            kind = self.pick((JobKind.STORE, JobKind.LOAD, JobKind.LOOKUP))
            if kind is JobKind.LOOKUP:
                self.runner.submit_lookup(job_id, [(_SPACE, _HASHES)])
                continue
            hashes = _HASHES[: self.pick((1, 2))]
            is_store = kind is JobKind.STORE
            pages = [
                Page(bytearray(content("kv", _NBYTES, each) if is_store else bytes(_NBYTES)))
                for each in hashes
            ]
            batch = Transfer(_SPACE, hashes, pages)
            self.jobs[job_id] = (kind, batch, time.monotonic())
            (self.runner.submit_store if is_store else self.runner.submit_load)(job_id, [batch])
            self.submitted.append(job_id)
            time.sleep(self.pick((0.0, 1.0)))

    def _fetch(self, kind: JobKind) -> None:
        if kind is not JobKind.LOOKUP:
            loads = kind is JobKind.LOAD
            for result in self.runner.finished_loads() if loads else self.runner.finished_stores():
                self._judge(result)
        else:
            self.runner.finished_lookups()

    def _judge(self, result: JobResult) -> None:
        kind, batch, began_s = self.jobs[result.job_id]
        self.reports[result.job_id] += 1
        took_s = time.monotonic() - began_s
        in_time = took_s <= _TIMEOUT_S + _EPSILON_S
        self.require(in_time, f"a {kind.value} was reported after {took_s} s")
        for page_hash, page, verdict in zip(
            batch.hashes, batch.pages, result.verdicts[0], strict=True
        ):
            if verdict is Verdict.OK:
                right = page.tobytes() == content("kv", _NBYTES, page_hash)
                self.require(right, "an OK page has other bytes")
            page.copy_from(_USED_AGAIN)

    def _close(self, *, always: bool = False) -> None:
        if always or self.pick((False, True)):
            began = list(self.submitted)
            if self.runner.close(self.pick((15.0, 0.0))):
                self.require(all(map(self.reports.__getitem__, began)), "a job is open after close")
