"""Requests that a prefill engine of two ranks hands over to a decode engine of two ranks."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any, Self

from engines import ThreadRanks, leaked, on_each_rank
from handoff_sides import compute, engine_rank, is_right
from hicache_backends.memory import MemoryStorage
from pages import hash_of

from hicache_storage.controller import CacheController
from hicache_storage.handoff import HandoffReceiver, HandoffSender, HandoffSettings
from hicache_storage.testing import Fault, FaultyStorage, Odds

_RANKS = 2
_PAGES = 6
_LIMIT_S = 60.0
_PLAN = [
    Odds(operation, fault, 0.002)
    for operation in ("batch_exists", "batch_get", "batch_set")
    for fault in (Fault.RAISE, Fault.MISS, Fault.LIE, Fault.TEAR, Fault.FLIP, Fault.DELAY)
]
_HASTY = HandoffSettings(timeout_s=0.2, grace_s=2, poll_max_s=0.02, load_every_s=0.05)


class Handoffs:
    """Both engines over one store that fails, each with a target pool and a draft pool."""

    def __init__(self, seed: int) -> None:
        self.handed = 0
        """How many pages arrived, on all ranks."""
        self._chance = random.Random(seed)
        self._prefix = self._chance.getrandbits(40) << 20
        self._engines: list[CacheController] = []
        self._senders: list[HandoffSender] = []
        self._receivers: list[HandoffReceiver] = []
        self._opened = ExitStack()
        self._storage = FaultyStorage(MemoryStorage(), _PLAN, seed=seed)

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            storage = opened.enter_context(self._storage)
            decoding = ThreadRanks.of(_RANKS)
            for rank in range(_RANKS):
                which: dict[str, Any] = {"kind": "mla-mha", "rank": rank, "size": _RANKS}
                prefill, store = opened.enter_context(engine_rank(storage, **which))
                self._senders.append(opened.enter_context(HandoffSender(prefill, store, _HASTY)))
                decode, store = opened.enter_context(
                    engine_rank(storage, ranks=decoding[rank], **which)
                )
                self._receivers.append(opened.enter_context(HandoffReceiver(decode, store, _HASTY)))
                self._engines += [prefill, decode]
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def serve(self, number: int) -> list[str]:
        """Hand over one request. Return what is wrong."""
        hashes = [hash_of(self._prefix + number * _PAGES + page) for page in range(_PAGES)]
        hashes = hashes[: self._chance.randint(1, _PAGES)]
        found = on_each_rank(
            lambda rank: self._serve(rank, f"{number}", hashes), _RANKS, timeout_s=_LIMIT_S
        )
        pages = [arrived for arrived, _ in found]
        self.handed += sum(pages)
        wrong = [f"hand-off {number} has a wrong page" for _, right in found if not right]
        return wrong + ([f"the ranks got {pages} pages"] if len(set(pages)) > 1 else [])

    def leaked(self) -> list[str]:
        """Return what the idle engines still hold."""
        return [each for engine in self._engines for each in leaked(engine)]

    def _serve(self, rank: int, request_id: str, hashes: list[str]) -> tuple[int, bool]:
        compute(self._engines[2 * rank], hashes)
        self._senders[rank].publish(request_id, hashes).result(_LIMIT_S)
        request = self._receivers[rank].expect(request_id, hashes)
        with request.result() as lease:
            return lease.pages, is_right(lease, hashes)
