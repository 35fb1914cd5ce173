"""The vLLM tier. Its base class is added later, so that this module does not import vLLM."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

from hicache_storage.errors import ConfigError
from hicache_storage.integrations._backend_choice import close_all
from hicache_storage.integrations._metrics import AdapterMetrics
from hicache_storage.integrations.vllm._connection import StoreConnection
from hicache_storage.integrations.vllm._identity import of_adapter, renewed, spaces_of
from hicache_storage.integrations.vllm._metrics import TierMetrics, definitions
from hicache_storage.integrations.vllm._region import claim_region
from hicache_storage.integrations.vllm._request_log import log_request
from hicache_storage.integrations.vllm._request_lookups import RequestLookups
from hicache_storage.integrations.vllm._rows import KeyGroups, Rows, hashes_of
from hicache_storage.integrations.vllm._settings import NAME, own_fields, tier_settings
from hicache_storage.integrations.vllm._transfers import Transfer
from hicache_storage.page_store.results import Verdict
from hicache_storage.request_log import Operation, Reason, open_explain_log, open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from hicache_storage.integrations._jobs import JobResult, LookupResult
    from hicache_storage.integrations.vllm._adapters import Adapter
    from hicache_storage.integrations.vllm._engine import (
        EngineTypes,
        ReqContext,
        Stats,
        TransferJob,
    )
    from hicache_storage.metrics import CacheView
    from hicache_storage.request_log import ExplainLog, TraceRecorder

logger = logging.getLogger("vllm.hicache_storage")

T = TypeVar("T")


class _LookupJob(NamedTuple):
    asked: dict[bytes, list[str]]
    keys: list[list[bytes]]
    began_s: float


class Tier:
    """A secondary tier of vLLM's offloading that uses a storage of this project.

    vLLM calls it in its scheduler's thread, under one lock. Only `drain_jobs` and `shutdown` block. No
    method raises: every failure is a miss, or a job that failed.
    """

    engine: ClassVar[EngineTypes]

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **config: Any,
    ) -> None:
        """Open the storage named by `backend`.

        Raises:
            ConfigError: A field is invalid, the identity of the pages is unknown, or another connector
                or engine uses the same memory.
        """
        settings = tier_settings(config)
        base = cast("Any", super())
        base.__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality: Any = self.engine.locality(settings.locality) if settings.locality else None
        self._settings = settings
        claim_region(offloading_spec)
        self._rows = Rows(primary_kv_view)
        self._adapters: dict[str, tuple[Adapter, str | None]] = {}
        self._groups_of_adapter: dict[str, KeyGroups] = {}
        self._lookups = RequestLookups()
        self._lookup_jobs: dict[int, _LookupJob] = {}
        self._lookup_count = 0
        self._jobs: dict[int, Transfer] = {}
        self._ended: list[Any] = []
        self._metrics = TierMetrics(
            self.engine, f"{_number(offloading_spec, config)}:{tier_type}", settings.backend
        )
        self._closed = False
        self._tokens_per_hash = int(offloading_spec.config.cache.tokens_per_hash)
        self._explain_log: ExplainLog | None = None
        self._trace: TraceRecorder | None = None
        try:
            self._groups = KeyGroups(
                spaces_of(offloading_spec, self._rows.nbytes, settings, self.engine.runtime)
            )
            self._events = self._event_list(offloading_spec)
            self._explain_log = open_explain_log(settings, engine=NAME)
            self._trace = open_trace(settings, self._tokens_per_hash, engine=NAME)
            owner = next(iter(self._groups.spaces.values()))
            self._connection = StoreConnection(settings, self._rows.memory, owner)
        except BaseException:
            self._rows.release()
            self._close_logs()
            raise
        self._served = AdapterMetrics(
            settings,
            self._view,
            engine="vllm",
            backend=settings.backend,
            logger=logger,
            rank=_replica(offloading_spec),
        )
        for space in self._groups.spaces.values():
            logger.info("pool %s is stored as %s", space.pool, space.manifest())

    # --- lookups -------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> Any:
        return self.engine.request_context()

    def lookup(self, key: bytes, req_context: ReqContext) -> Any:
        """Return HIT or MISS, or RETRY until the store has answered."""
        if self._adapters and self._label_of(req_context.req_id) is None:
            return self.engine.miss
        try:
            present = self._lookups.ask(req_context, key)
        except Exception:  # noqa: BLE001 - it would end the engine
            self._count_error()
            return self.engine.miss
        if present is None:
            return self.engine.retry
        return self.engine.hit if present else self.engine.miss

    def on_schedule_end(self, context: Any) -> None:
        """Submit a lookup of all pages that vLLM asked for in this scheduling step."""
        for request in context.preempted_req_ids:
            self._guard(partial(self._finish_request, request), None)
        asked = self._lookups.take_asked()
        if asked and not self._guard(lambda: self._ask(asked), otherwise=False):
            self._answer(asked, asked, [Verdict.UNAVAILABLE] * len(asked))

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._guard(lambda: self._finish_request(req_context.req_id), None)
        self._adapters.pop(req_context.req_id, None)

    def _finish_request(self, request: str) -> None:
        pages = self._lookups.forget(request)
        if pages is None:
            return
        self._metrics.unused_loads += pages.unused_loads()
        if self._explain_log is not None:
            log_request(self._explain_log, pages, self._groups.spaces)

    def _ask(self, asked: dict[bytes, list[str]]) -> bool:
        runner = self._connection.runner
        if runner is None:
            return False
        of_space = [
            each
            for label, keys in self._by_label(asked)
            for each in self._groups_of(label).of_keys(keys)
        ]
        self._lookup_count += 1
        job = _LookupJob(asked, [keys for _, keys in of_space], time.monotonic())
        self._lookup_jobs[self._lookup_count] = job
        queries = [(space, hashes_of(keys)) for space, keys in of_space]
        runner.submit_lookup(self._lookup_count, queries)
        return True

    def _finish_lookup(self, result: LookupResult) -> None:
        job = self._lookup_jobs.pop(result.job_id, None)
        if job is None:  # this lookup began before a reset
            return
        self._metrics.observe("lookup", time.monotonic() - job.began_s)
        if not self._guard(lambda: self._answer_all(job, result), otherwise=False):
            self._answer(job.asked, job.asked, [Verdict.ERROR] * len(job.asked))

    def _answer_all(self, job: _LookupJob, result: LookupResult) -> bool:
        for keys, verdicts in zip(job.keys, result.verdicts, strict=True):
            self._answer(job.asked, keys, verdicts)
        return True

    def _answer(
        self, asked: dict[bytes, list[str]], keys: Iterable[bytes], verdicts: Sequence[Verdict]
    ) -> None:
        for key, verdict in zip(keys, verdicts, strict=True):
            missing = None if verdict is Verdict.OK else Reason.of_lookup(verdict)
            self._lookups.answer(asked[key], key, missing)

    # --- LoRA adapters -------------------------------------------------------------------------------

    def note_adapter(self, request: str, adapter: Adapter) -> None:
        """Use the adapter's key spaces for a request, or none if its weights are unknown."""
        self._adapters[request] = adapter, self._label(adapter)

    def _label(self, adapter: Adapter) -> str | None:
        return adapter.label(trusted=bool(self._settings.revision))

    def _label_of(self, request: str) -> str | None:
        """Return the label of a request's adapter: "" without one, None if it is unknown."""
        return self._adapters[request][1] if request in self._adapters else ""

    def _may_store(self, request: str) -> bool:
        if request in self._adapters:
            adapter, label = self._adapters[request]
            return label is not None and self._label(adapter) == label
        return True

    def _by_label(self, asked: dict[bytes, list[str]]) -> Iterable[tuple[str, Iterable[bytes]]]:
        """Return the keys by the label of their adapter, which all requests for a key share."""
        if not self._adapters:
            return [("", asked)]
        keys: dict[str, list[bytes]] = {}
        for key, requests in asked.items():
            labels = (self._label_of(request) for request in requests)
            keys.setdefault(next(filter(None, labels), ""), []).append(key)
        return keys.items()

    def _groups_of(self, label: str) -> KeyGroups:
        if not label:
            return self._groups
        if label not in self._groups_of_adapter:
            self._groups_of_adapter[label] = KeyGroups(
                {group: of_adapter(space, label) for group, space in self._groups.spaces.items()}
            )
        return self._groups_of_adapter[label]

    # --- transfers -----------------------------------------------------------------------------------

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, "load")

    def submit_store(self, job_metadata: TransferJob) -> None:
        if self._may_store(job_metadata.req_context.req_id):
            self._submit(job_metadata, "store")
        else:  # as for a page that is not admitted
            self._ended.append(self.engine.job_result(job_metadata.job_id, success=True))

    def get_finished_jobs(self) -> Collection[Any]:
        """Return the jobs that ended since the last call. Nothing touches their rows any more."""
        results, self._ended = self._ended, []
        runner = self._connection.runner
        if runner is None:
            return results
        for lookup in runner.finished_lookups():
            self._finish_lookup(lookup)
        for result in runner.finished_loads():
            results.append(self._finish(result, self._finish_load))
        for result in runner.finished_stores():
            results.append(self._finish(result, self._finish_store))
        return results

    def _submit(self, job: TransferJob, operation: str) -> None:
        keys = list(job.keys)
        request = job.req_context.req_id
        if not self._guard(lambda: self._try_submit(job, keys, operation), otherwise=False):
            self._jobs.pop(job.job_id, None)
            if operation == "load":
                self._lookups.mark_missing(request, dict.fromkeys(keys, Reason.UNAVAILABLE))
            self._ended.append(self.engine.job_result(job.job_id, success=False))

    def _try_submit(self, job: TransferJob, keys: list[bytes], operation: str) -> bool:
        runner = self._connection.runner
        if runner is None:
            return False
        groups = self._groups_of(self._label_of(job.req_context.req_id) or "")
        of_batch, batches = groups.batches(keys, job.chunk_ids, self._rows)
        self._jobs[job.job_id] = Transfer(job.req_context.req_id, of_batch)
        submit = runner.submit_load if operation == "load" else runner.submit_store
        submit(job.job_id, batches)
        if operation == "load":
            self._lookups.mark_loaded(job.req_context.req_id, keys)
        return True

    def _finish(self, result: JobResult, finish: Callable[[Transfer, JobResult], Any]) -> Any:
        job = self._jobs.pop(result.job_id, None)
        ended = None if job is None else self._guard(lambda: finish(job, result), None)
        if ended is not None:
            return ended
        if job is not None:
            reasons = dict.fromkeys(job.all_keys, Reason.INTERNAL_ERROR)
            self._lookups.mark_missing(job.request, reasons)
        return self.engine.job_result(result.job_id, success=False)

    def _finish_load(self, job: Transfer, result: JobResult) -> Any:
        loaded = job.moved(result)
        succeeded = len(loaded) == len(job.all_keys)
        if not succeeded:
            self._lookups.mark_missing(job.request, job.missing_reasons(result))
            self._add_event(job.gone(result), removed=True)
        self._metrics.observe("load", result.elapsed_s)
        return self._job_result(result, succeeded, tuple(loaded) or None)

    def _finish_store(self, job: Transfer, result: JobResult) -> Any:
        if self._explain_log is not None:
            self._explain_store(self._explain_log, job, result)
        self._add_event(job.moved(result), removed=False)
        self._metrics.observe("store", result.elapsed_s)
        return self._job_result(result, job.is_concluded(result), None)

    def _job_result(self, result: JobResult, success: bool, keys: tuple[bytes, ...] | None) -> Any:  # noqa: FBT001
        return self.engine.job_result(
            job_id=result.job_id,
            success=success,
            successful_keys=None if success else keys,
            transfer_time=result.elapsed_s,
            transfer_bytes=result.nbytes,
        )

    def _explain_store(self, log: ExplainLog, job: Transfer, result: JobResult) -> None:
        for keys, verdicts in zip(job.keys, result.verdicts, strict=True):
            ((space, _),) = self._groups.of_keys(keys)
            log.add_pages(
                Operation.STORE,
                hashes_of(keys),
                [verdicts],
                space.pool,
                request=job.request,
                elapsed_s=result.elapsed_s,
            )

    # --- the trace -----------------------------------------------------------------------------------

    def record_request(self, request: Any) -> None:
        """Record the prompt of a request in the trace, if there is one."""
        if self._trace is not None:
            trace, tokens = self._trace, self._tokens_per_hash
            self._guard(
                lambda: trace.record(request.block_hashes[: request.num_prompt_tokens // tokens]),
                None,
            )

    # --- events and metrics --------------------------------------------------------------------------

    def take_events(self) -> list[Any]:
        """Return the events of stored and removed pages since the last call."""
        events = self._events or []
        if events:
            self._events = []
        return events

    def get_stats(self) -> Stats | None:
        connection = self._connection
        return self._guard(lambda: self._metrics.take(connection.runner, connection.store), None)

    def _view(self) -> CacheView:
        """Return the data for a scrape of `metrics_port`. `get_stats` returns vLLM's own metrics."""
        from hicache_storage.metrics import CacheView  # noqa: PLC0415 - the extra is optional

        runner, store = self._connection.runner, self._connection.store
        counts = {} if runner is None else runner.stats()
        return CacheView(
            store=store,
            attached=runner is not None,
            engine={
                "adapter_errors": self._metrics.errors,
                "load_pages_unused": self._metrics.unused_loads,
                **counts,
            },
        )

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return definitions(cls.engine)

    def _event_list(self, offloading_spec: Any) -> list[Any] | None:
        if not self._settings.enable_kv_events:
            return None
        events = offloading_spec.kv_events_config
        if events.enable_kv_cache_events:
            if events.self_describing_kv_events and offloading_spec.blocks_per_chunk > 1:
                raise ConfigError(
                    f"{NAME}: self_describing_kv_events: announces each block of a chunk, but only a"
                    f" whole chunk of {offloading_spec.blocks_per_chunk} blocks can be found, so a"
                    " router would expect hits that never come: leave it out, or set"
                    " blocks_per_chunk to 1"
                )
            return []
        logger.warning(
            "enable_kv_events is set, but vLLM's KV events are disabled, so none are published"
        )
        return None

    def _add_event(self, keys: list[bytes], *, removed: bool) -> None:
        if self._events is not None and keys:
            medium = self.engine.storage_medium
            self._events.append(
                self.engine.event(keys=keys, medium=medium, removed=removed, locality=self.locality)
            )

    # --- resets and the end --------------------------------------------------------------------------

    def drain_jobs(self) -> None:
        """Wait until every job has ended, and begin new key spaces.

        vLLM calls this only before it resets its caches: for new weights, after a sleep, and on demand.
        The call does not give the cause. So the engine stops using earlier pages, and does not share its
        own pages until it starts again.
        """
        self._guard(self._drain, None)

    def _drain(self) -> None:
        try:
            if self._connection.runner is not None:
                self._connection.runner.drain()
        finally:
            epoch = uuid.uuid4().hex
            spaces = self._groups.spaces.items()
            self._groups = KeyGroups({group: renewed(space, epoch) for group, space in spaces})
            self._groups_of_adapter.clear()
            self._clear_lookups()
        logger.warning(
            "vLLM resets its caches, perhaps because of other weights: earlier pages in the store"
            " are no longer used, and this engine shares no pages until it restarts"
        )

    def shutdown(self) -> None:
        """Close the tier, and release the rows once nothing touches them any more. Idempotent."""
        if not self._closed:
            self._closed = True
            self._guard(self._shut_down, None)

    def _shut_down(self) -> None:
        self._served.close()
        self._clear_lookups()
        if self._connection.close(self._settings.close_timeout_s):
            self._rows.release()
        else:
            logger.error(
                "a call of the store has not ended, so the memory of the CPU tier stays mapped"
            )
        self._close_logs()

    def _close_logs(self) -> None:
        close_all(log.close for log in (self._explain_log, self._trace) if log is not None)

    def _clear_lookups(self) -> None:
        self._lookups.clear()
        self._lookup_jobs.clear()

    def _guard(self, function: Callable[[], T], otherwise: T) -> T:
        """Call `function`. If it raises, return `otherwise`, because an error would end the engine."""
        try:
            return function()
        except Exception:  # noqa: BLE001 - as above
            self._count_error()
            return otherwise

    def _count_error(self) -> None:
        self._metrics.errors += 1
        level = logging.ERROR if self._metrics.errors == 1 else logging.DEBUG
        logger.log(
            level, "a call of vLLM failed, and the result is a miss", exc_info=sys.exc_info()
        )


def _number(offloading_spec: Any, config: Mapping[str, Any]) -> int:
    """Return the number of the tier with this config, as in vLLM's metrics: 1 is asked first."""
    tiers = enumerate(offloading_spec.extra_config.get("secondary_tiers", ()), start=1)
    return next((number for number, tier in tiers if own_fields(tier) == config), 1)


def _replica(offloading_spec: Any) -> int:
    """Return the number of this engine's data-parallel replica, counted from 0."""
    parallel = getattr(getattr(offloading_spec, "config", None), "parallel", None)
    return getattr(parallel, "data_parallel_index", 0)
