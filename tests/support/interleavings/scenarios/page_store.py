"""Calls of a page store over a storage that is slow or fails: deadlines, loans and breakers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from pages import hash_of, space

from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.page_store.results import Outcome, Transfer, Verdict
from interleavings.scenario import Scenario
from interleavings.scenarios.storage import (
    FAILS,
    REFUSES,
    SLOW,
    WORKS,
    ExploredStorage,
    content,
)

_SPACE = space(pool="kv", page_nbytes=256)
_HASHES = [hash_of(number) for number in range(4)]
_TIMEOUT_S = 2.0
_COOLDOWN_S = 5.0
_EPSILON_S = 0.001
_USED_AGAIN = b"\x5a" * 256


def page_of(page_hash: str | None) -> Page:
    """Return a page with the content of a hash, or a blank one to read into."""
    filled = bytes(256) if page_hash is None else content("kv", 256, page_hash)
    return Page(bytearray(filled))


class PageStoreScenario(Scenario):
    """Loads, saves, lookups and deletions run while another thread closes the store.

    An OK page has the bytes of its hash. A call ends at its deadline, whatever the storage does. Nothing
    touches the memory of a call that has returned. Each page counts in one verdict.
    """

    name = "page-store"
    time_passes = False

    def set_up(self) -> None:
        self.storage = ExploredStorage(
            self,
            behaviours={
                "get": (WORKS, WORKS, WORKS, SLOW, FAILS),
                "set": (WORKS, WORKS, WORKS, SLOW, FAILS, REFUSES),
                "exists": (WORKS, WORKS, SLOW, FAILS),
                "delete": (WORKS, WORKS, SLOW, FAILS),
            },
            revocable=self.pick((False, True)),
        )
        settings = PageStoreSettings(
            timeout_s=_TIMEOUT_S, breaker_failures=2, breaker_cooldown_s=_COOLDOWN_S, parallelism=2
        )
        self.store = PageStore(self.storage, settings)
        self.store.open_space(_SPACE)
        self.verdicts: Counter[str] = Counter()
        self.used_again: list[Page] = []

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {"engine": self._work, "other": self._work, "closer": self._close}

    def finish(self) -> None:
        self.store.close()
        self.scheduler.settle()
        for page in self.used_again:
            self.require(page.tobytes() == _USED_AGAIN, "a call that has returned changed a page")
        counted = self.store.stats()
        for name, pages in self.verdicts.items():
            self.require(counted.get(name, 0) == pages, f"{name}: {counted.get(name)} not {pages}")

    def _work(self) -> None:
        for _ in range(3):
            began_s = time.monotonic()
            timeout_s = self.pick((_TIMEOUT_S, _TIMEOUT_S, 0.5))
            self.pick((self._load, self._save, self._match, self._delete))(timeout_s)
            took_s = time.monotonic() - began_s
            self.require(took_s <= timeout_s + _EPSILON_S, f"a call took {took_s} s")

    def _load(self, timeout_s: float) -> None:
        hashes = _HASHES[: self.pick((1, 2, 4))]
        pages = [page_of(None) for _ in hashes]
        outcome = self.store.load([Transfer(_SPACE, hashes, pages)], timeout_s=timeout_s)
        self._judge("load", outcome)
        for page_hash, page, verdict in zip(hashes, pages, outcome.verdicts[0], strict=True):
            if verdict is Verdict.OK:
                right = page.tobytes() == content("kv", 256, page_hash)
                self.require(right, "an OK page has other bytes")
            self.require(
                verdict not in (Verdict.CORRUPT, Verdict.WRONG_KEY, Verdict.WRONG_SIZE),
                f"a page is {verdict}",
            )
        self._use_again(pages)

    def _save(self, timeout_s: float) -> None:
        hashes = _HASHES[self.pick((0, 1, 2)) :]
        pages = [page_of(page_hash) for page_hash in hashes]
        outcome = self.store.save([Transfer(_SPACE, hashes, pages)], timeout_s=timeout_s)
        self._judge("save", outcome)
        self._use_again(pages)

    def _match(self, timeout_s: float) -> None:
        self.store.present(_SPACE, _HASHES, timeout_s=timeout_s)

    def _delete(self, timeout_s: float) -> None:
        self.store.delete(_SPACE, _HASHES[:2], timeout_s=timeout_s)

    def _close(self) -> None:
        if self.pick((False, True)):
            time.sleep(self.pick((0.0, 1.0)))
            self.store.close()

    def _judge(self, direction: str, outcome: Outcome) -> None:
        for verdict in outcome.verdicts[0]:
            self.verdicts[f"{direction}_{verdict.value}"] += 1

    def _use_again(self, pages: Sequence[Page]) -> None:
        for page in pages:
            page.copy_from(_USED_AGAIN)
        self.used_again += pages


class BreakerScenario(Scenario):
    """Reads that work while writes are slow or fail, and calls without pages.

    Failing writes do not make the store turn away reads. A breaker closes only after a call that
    worked.
    """

    name = "breaker"
    time_passes = False

    def set_up(self) -> None:
        self.storage = ExploredStorage(
            self, behaviours={"set": (SLOW, SLOW, SLOW, FAILS, FAILS, WORKS)}
        )
        settings = PageStoreSettings(
            timeout_s=_TIMEOUT_S, breaker_failures=2, breaker_cooldown_s=_COOLDOWN_S, parallelism=2
        )
        self.store = PageStore(self.storage, settings)
        self.store.open_space(_SPACE)
        self.was_open = False
        self.worked = 0
        """How many writes had worked when the breaker opened."""

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {"reader": self._read, "writer": self._write, "other": self._write}

    def check(self) -> None:
        is_open = self.store.breaker.writes._opened_at_s is not None
        worked = self.storage.succeeded["set"]
        if is_open and not self.was_open:
            self.worked = worked
        if self.was_open and not is_open:
            assert worked > self.worked, "a breaker closed without a call that worked"
        self.was_open = is_open

    def finish(self) -> None:
        self.require(not self.store.stats()["read_breaker_opened"], "the reads' breaker opened")
        self.store.close(100.0)

    def _read(self) -> None:
        for _ in range(4):
            outcome = self.store.load([Transfer(_SPACE, _HASHES[:1], [page_of(None)])])
            verdict = outcome.verdicts[0][0]
            self.require(verdict in (Verdict.OK, Verdict.MISS), f"a read is {verdict}")
            time.sleep(self.pick((0.0, 1.0, _COOLDOWN_S)))

    def _write(self) -> None:
        for _ in range(3):
            self.store.save([Transfer(_SPACE, _HASHES[:1], [page_of(_HASHES[0])])])
            time.sleep(self.pick((0.0, _COOLDOWN_S)))
            outcome = self.store.save(self.pick(([], [Transfer(_SPACE, [], [])])))
            self.require(outcome.arrived() == 0, "an empty call has moved a page")


class ImpatienceScenario(Scenario):
    """Reads that the store never answers, with deadlines shorter than the store's own time limit.

    Only calls that exceed the store's own limit count for the breaker: two of them open it.
    """

    name = "impatience"
    time_passes = False

    def set_up(self) -> None:
        self.storage = ExploredStorage(self, behaviours={"get": (SLOW,)})
        settings = PageStoreSettings(
            timeout_s=_TIMEOUT_S, breaker_failures=2, breaker_cooldown_s=60.0, parallelism=4
        )
        self.store = PageStore(self.storage, settings)
        self.store.open_space(_SPACE)

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {"first": self._read, "second": self._read}

    def finish(self) -> None:
        self.scheduler.settle()
        self.require(self.storage.calls["get"] <= 4, "an open breaker lets calls through")
        self.require(self.store.stats()["read_breaker_opened"], "the breaker never opened")
        self.store.close()

    def _read(self) -> None:
        for _ in range(3):
            transfer = Transfer(_SPACE, _HASHES[:1], [page_of(None)])
            self.store.load([transfer], timeout_s=self.pick((0.1, 0.5)))
            time.sleep(self.pick((_TIMEOUT_S, 3.0)))
