"""A prefill engine hands a request over to one of two decode engines that may await it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from engines import leaked

from hicache_storage.controller import CacheController, ControllerSettings, PrefetchPolicy
from hicache_storage.handoff import HandoffReceiver, HandoffSender, HandoffSettings
from hicache_storage.page_store import PageStore, PageStoreSettings
from interleavings.scenario import Scenario
from interleavings.scenarios.controller import PairedStorage
from interleavings.scenarios.engines import HASHES, check_lease, check_slots, compute, make_pools
from interleavings.scenarios.storage import REFUSES, WORKS

_PROMPT = HASHES[:2]
_REFUSALS = (*(WORKS,) * 5, REFUSES)


class HandoffScenario(Scenario):
    """The request is published, awaited and taken. It may move from one decode engine to another.

    The pages of a lease have the bytes of their hashes. Unless a write was refused, the decode engine
    gets the whole prompt, even if the other one cancels. A draft is never written before its target.
    """

    name = "handoff"
    time_passes = False

    def set_up(self) -> None:
        self.storage = PairedStorage(self, behaviours={"set": self.pick(((WORKS,), _REFUSALS))})
        self.store = PageStore(
            self.storage, PageStoreSettings(timeout_s=5.0, breaker_failures=1000, parallelism=1)
        )
        settings = HandoffSettings(
            timeout_s=4.0, poll_min_s=0.1, poll_max_s=0.4, load_every_s=1.0, grace_s=2.0
        )
        self.engines = [self._engine() for _ in range(3)]
        self.prefill, *decoding = self.engines
        self.sender = HandoffSender(self.prefill, self.store, settings)
        self.receivers = [HandoffReceiver(engine, self.store, settings) for engine in decoding]

    def threads(self) -> Mapping[str, Callable[[], None]]:
        first, second = self.receivers
        if self.pick((False, True)):
            return {"prefill": self._publish, "decode": lambda: self._take(first)}
        return {
            "prefill": self._publish,
            "decode-a": lambda: self._cancel(first),
            "decode-b": lambda: self._take(second),
        }

    def check(self) -> None:
        for engine in self.engines:
            check_slots(engine)

    def finish(self) -> None:
        self.require(self.sender.close(), "the sender does not end")
        for receiver in self.receivers:
            self.require(receiver.close(), "a receiver does not end")
        for engine in self.engines:
            engine.close(timeout_s=30)
            held = leaked(engine)
            self.require(not held, f"still held: {', '.join(held)}")
        self.store.close()

    def _engine(self) -> CacheController:
        settings = ControllerSettings(
            prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, prefetch_threshold_tokens=0
        )
        pools = make_pools(len(_PROMPT), draft_is_required=False)
        engine = CacheController(self.store, pools, settings)
        engine.start()
        return engine

    def _publish(self) -> None:
        compute(self.prefill, _PROMPT, 1.0)
        published = self.sender.publish("request", _PROMPT).result()
        refused = self.storage.failed["set"]
        self.require(refused or published == len(_PROMPT), f"{published} pages were published")

    def _cancel(self, receiver: HandoffReceiver) -> None:
        request = receiver.expect("request", _PROMPT)
        time.sleep(self.pick((0.0, 0.1, 0.5)))
        request.cancel()

    def _take(self, receiver: HandoffReceiver) -> None:
        request = receiver.expect("request", _PROMPT)
        with request.result() as lease:
            check_lease(self, lease)
            if not self.storage.failed["set"]:
                self.require(lease.pages == len(_PROMPT), f"a request got {lease.pages} pages")
                timed_out = receiver.stats().get("timed_out_requests")
                self.require(not timed_out, "a request timed out")
