"""The steps of vLLM's scheduler over a secondary tier: they poll its jobs and resolve its lookups.

As in vLLM's `TieringOffloadingManager`, one lock serializes all calls of the tier. A step asks for
the finished jobs, then looks up keys, then ends. If a lookup has no answer yet, the next step asks
again. Jobs and lookups have no time limit.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from field.vllm.engine import module
from hicache_storage.errors import StorageClosed

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    Resolved = list[tuple[Future[set[bytes]], set[bytes]]]

_STEP_S = 0.0005
"""How long to wait between two steps. There are no steps while nothing is under way."""


class TierSteps:
    """A thread that makes a scheduler's steps, and methods that submit jobs and lookups to them.

    Thread-safe.
    """

    def __init__(self, tier: Any) -> None:
        self._tier = tier
        self._base = module("vllm.v1.kv_offload.base")
        self._job = module("vllm.v1.kv_offload.tiering.base").TransferJob
        self._array = module("numpy").array
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._lookups: dict[str, tuple[Any, Sequence[bytes], Future[set[bytes]]]] = {}
        self._jobs: dict[int, tuple[Sequence[bytes], Future[set[bytes]]]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="vllm-steps", daemon=True)
        self._thread.start()

    @contextmanager
    def request(self) -> Generator[Any, None, None]:
        """Begin a request, and end it after the block. Until then the tier keeps lookup answers."""
        context = self._base.ReqContext(uuid.uuid4().hex)
        with self._changed:
            self._ensure_open()
            self._tier.on_new_request(context)
        try:
            yield context
        finally:
            with self._changed:
                self._tier.on_request_finished(context)

    def look_up(self, context: Any, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys that the tier holds."""
        future: Future[set[bytes]] = Future()
        with self._changed:
            self._ensure_open()
            self._lookups[context.req_id] = context, keys, future
            self._changed.notify_all()
        return future.result()

    def submit(
        self, context: Any, keys: Sequence[bytes], rows: Sequence[int], *, load: bool
    ) -> Future[set[bytes]]:
        """Submit one job. The result of the future is the set of keys that were stored or loaded."""
        future: Future[set[bytes]] = Future()
        with self._changed:
            self._ensure_open()
            number = next(self._numbers)
            job = self._job(number, list(keys), self._array(rows, dtype="int32"), load, context)
            (self._tier.submit_load if load else self._tier.submit_store)(job)
            self._jobs[number] = keys, future
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """Shut down the tier without waiting for its jobs, as vLLM does. Open futures fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._tier.shutdown()
        with self._changed:
            waiting = [future for _, _, future in self._lookups.values()]
            waiting += [future for _, future in self._jobs.values()]
            self._lookups.clear()
            self._jobs.clear()
        for future in waiting:
            future.set_exception(StorageClosed("the tier was shut down before the answer"))

    def _ensure_open(self) -> None:
        if self._closed:
            raise StorageClosed("the tier was shut down: it takes no more calls")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._lookups or self._jobs)
                if self._closed:
                    return
                resolved = self._step()
            for future, keys in resolved:
                future.set_result(keys)
            time.sleep(_STEP_S)

    def _step(self) -> Resolved:
        """Make one step. Return each future that now has an answer, with the keys of that answer."""
        resolved: Resolved = []
        for result in self._tier.get_finished_jobs():
            keys, future = self._jobs.pop(result.job_id)
            done = keys if result.success else result.successful_keys or ()
            resolved.append((future, set(done)))
        for context, keys, future in list(self._lookups.values()):
            answers = [self._tier.lookup(key, context) for key in keys]
            if self._base.LookupResult.RETRY not in answers:
                del self._lookups[context.req_id]
                hits = zip(keys, answers, strict=True)
                resolved.append(
                    (future, {key for key, one in hits if one is self._base.LookupResult.HIT})
                )
        self._tier.on_schedule_end(self._base.ScheduleEndContext((), ()))
        return resolved
