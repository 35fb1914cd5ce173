"""Types of vLLM that the adapter uses. This module does not import vLLM.

Source: vllm/v1/kv_offload/base.py, config.py, tiering/base.py;
vllm/distributed/kv_transfer/kv_connector/v1/offloading/metrics.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from hicache_storage.integrations.vllm._runtime import Runtime


class ReqContext(Protocol):
    """`ReqContext`: the request for which vLLM calls the tier."""

    req_id: str


class TransferJob(Protocol):
    """`TransferJob`: rows of vLLM's CPU tier to store, or to load pages into."""

    job_id: int
    keys: Collection[bytes]
    chunk_ids: Iterable[int]
    req_context: ReqContext


class Stats(Protocol):
    """`OffloadingConnectorStats`."""

    def increase_counter(
        self,
        counter_name: str,
        counter_increase_value: float = 1,
        labelvalues: tuple[str, ...] = (),
    ) -> None: ...
    def set_gauge(
        self, gauge_name: str, gauge_value: float, labelvalues: tuple[str, ...] = ()
    ) -> None: ...
    def observe_histogram(
        self, histogram_name: str, histogram_value: float, labelvalues: tuple[str, ...] = ()
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineTypes:
    """vLLM's classes and values that the adapter uses."""

    hit: Any
    miss: Any
    retry: Any
    storage_medium: Any
    locality: Callable[[str], Any]
    job_result: Callable[..., Any]
    event: Callable[..., Any]
    request_context: Callable[[], Any]
    stats: Callable[[], Stats]
    counter: Callable[..., Any]
    gauge: Callable[..., Any]
    histogram: Callable[..., Any]
    runtime: Runtime
