"""Copies between L1 and L2, layer by layer, behind the engine's back."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from hicache_storage.backend_support.executor import DaemonExecutor
from hicache_storage.device_pool.routes import routes
from hicache_storage.device_pool.streams import Pages, stream_for
from hicache_storage.device_pool.transfer import LayerTransfer, LayerTransferFailed
from hicache_storage.host_pool.memory import load_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    import torch

    from hicache_storage.device_pool.routes import PerPool, Route
    from hicache_storage.device_pool.streams import CopyStream, Mark
    from hicache_storage.device_pool.tensors import LayeredPool

    Move: TypeAlias = Callable[["CopyStream", Sequence["_Part"], LayerTransfer], None]
else:
    torch = load_torch()

logger: logging.Logger = logging.getLogger(__name__)

LAYERS_AHEAD = 2
"""Layers of a store that are under way at a time: enough to keep a copy engine busy, and what the memory
between device and host pool is for."""


class _Part:
    """What one pool has to move: the same pages in every layer."""

    def __init__(self, route: Route, stream: CopyStream) -> None:
        self.pool = route.pool
        self._host_slots = torch.tensor(route.host_slots, dtype=torch.int64)
        self._device_slots = stream.index(torch.tensor(route.device_slots, dtype=torch.int64))

    def planes(self, layer: int) -> list[tuple[Pages, Pages]]:
        """The pages of each plane of a layer: on the device, and in host memory."""
        return [
            (Pages(on_device, self._device_slots), Pages(in_host, self._host_slots))
            for on_device, in_host in self.pool.planes(layer)
        ]


class _Landing(NamedTuple):
    """A layer on its way from the device."""

    planes: list[Callable[[], None]]
    mark: Mark


class LayerCopier:
    """Moves pages of a group of pools, all pools in one transfer. Thread-safe.

    Loads and stores have a thread each (and on CUDA a stream each) and do not wait for each other. Which
    slots are whose is the caller's to know: `DevicePool` does, for engines that do not.
    """

    def __init__(self, pools: Sequence[LayeredPool]) -> None:
        """Start the threads.

        Raises:
            ValueError: No pool, or pools of different devices or page sizes.
        """
        if not pools:
            raise ValueError("a group needs at least one pool")
        if len({(pool.device, pool.page_tokens) for pool in pools}) != 1:
            raise ValueError(
                "all pools of a group are on one device, and have the same page_tokens"
            )
        self.pools: tuple[LayeredPool, ...] = tuple(pools)
        self.slots: int = min(pool.slots for pool in pools)
        load_stream, store_stream = stream_for(pools[0].device), stream_for(pools[0].device)
        self._loading = (DaemonExecutor("hicache-l1-load", 1), load_stream)
        self._storing = (DaemonExecutor("hicache-l1-store", 1), store_stream)
        self._lock = threading.Lock()
        self._closed = False

    def load(
        self, host_slots: PerPool, device_slots: Sequence[int], *, indices: PerPool | None = None
    ) -> LayerTransfer:
        """L2 → L1. Returns at once; the layers come in order.

        What the device was told to do before may still use `device_slots`: on CUDA the copies come after
        all that the calling thread's current stream has been given.

        Args:
            host_slots: For each pool the slots of its pages: a lease's `slots`.
            device_slots: Where each page goes, in all pools.
            indices: For each pool the pages that `host_slots` has: a lease's `indices`. None: all. What
                a pool has in the device's slots of other pages stays as it was, and is not those pages.

        Raises:
            ValueError: A slot that there is not, or that is named twice; or lists that do not match.
            RuntimeError: The copier was closed.
        """
        found = routes(self.pools, host_slots, device_slots, indices)
        return self._submit(self._loading, _load, found)

    def store(
        self, device_slots: Sequence[int], host_slots: PerPool, *, indices: PerPool | None = None
    ) -> LayerTransfer:
        """L1 → L2. Returns at once; on CUDA after all that the current stream has been given to compute.

        Neither side may change before `settled`. A reservation has `slots` and `indices`.

        Raises:
            ValueError: A slot that there is not, or that is named twice; or lists that do not match.
            RuntimeError: The copier was closed.
        """
        found = routes(self.pools, host_slots, device_slots, indices)
        return self._submit(self._storing, _store, found)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Let the transfers that were begun end, and the threads; False where that takes longer.

        Idempotent.
        """
        with self._lock:
            self._closed = True
        deadline_s = time.monotonic() + timeout_s
        stopped = [
            workers.close(max(0.0, deadline_s - time.monotonic()))
            for workers, _ in (self._loading, self._storing)
        ]
        return all(stopped)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(
        self, lane: tuple[DaemonExecutor, CopyStream], move: Move, found: Sequence[Route]
    ) -> LayerTransfer:
        workers, stream = lane
        transfer = LayerTransfer([pool.layers for pool in self.pools])
        work = partial(_run, transfer, move, found, stream, stream.now())
        with self._lock:  # a task behind the end of the threads would never run
            if self._closed:
                raise RuntimeError("these device pools were closed: make new ones")
            workers.submit(work)
        return transfer


def _run(
    transfer: LayerTransfer, move: Move, found: Sequence[Route], stream: CopyStream, asked: Mark
) -> None:
    """One transfer, on its thread. Whatever goes wrong, nobody is left waiting."""
    try:
        with torch.inference_mode():  # tensors that were made in it are written in it alone
            stream.follow(asked)
            move(stream, [_Part(route, stream) for route in found], transfer)
    except BaseException as error:  # noqa: BLE001 - `_failure` logs it
        transfer.fail(_failure("a layer could not be moved", error))
    try:
        stream.mark().synchronize()
    except Exception as error:  # noqa: BLE001 - as above
        transfer.settle(_failure("the device is lost", error))
    else:
        transfer.settle()


def _failure(what: str, error: BaseException) -> LayerTransferFailed:
    logger.warning("pages on their way between L1 and L2: %s", what, exc_info=error)
    failure = LayerTransferFailed(f"{what}: {error}")
    failure.__cause__ = error
    return failure


def _load(stream: CopyStream, parts: Sequence[_Part], transfer: LayerTransfer) -> None:
    for part, layer in _steps(parts):
        if transfer.failed:
            return
        for there, here in part.planes(layer):
            stream.upload(here, there)
        transfer.arrive(stream.mark())


def _store(stream: CopyStream, parts: Sequence[_Part], transfer: LayerTransfer) -> None:
    """Some layers are queued before the first of them is waited for: the device need not stand still."""
    queued: deque[_Landing] = deque()
    for part, layer in _steps(parts):
        if transfer.failed:
            return
        planes = [stream.download(there, here) for there, here in part.planes(layer)]
        queued.append(_Landing(planes, stream.mark()))
        if len(queued) > LAYERS_AHEAD:
            _land(queued.popleft(), transfer)
    while queued and not transfer.failed:
        _land(queued.popleft(), transfer)


def _land(landing: _Landing, transfer: LayerTransfer) -> None:
    """Put a layer that has come from the device where it belongs in host memory."""
    for land in landing.planes:
        land()
    transfer.arrive(landing.mark)


def _steps(parts: Sequence[_Part]) -> Iterator[tuple[_Part, int]]:
    return ((part, layer) for part in parts for layer in range(part.pool.layers))
