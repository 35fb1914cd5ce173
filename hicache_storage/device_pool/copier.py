"""Copy pages between L1 and L2 asynchronously, layer by layer."""

from __future__ import annotations

import logging
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.executor import DaemonExecutor
from hicache_storage.device_pool.slot_mapping import map_slots
from hicache_storage.device_pool.streams import Pages, stream_for
from hicache_storage.device_pool.transfer import LayerTransfer, LayerTransferFailed
from hicache_storage.host_pool.memory import load_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    import torch

    from hicache_storage.device_pool.slot_mapping import PerPool, SlotMapping
    from hicache_storage.device_pool.streams import HostStream, StreamEvent
    from hicache_storage.device_pool.tensors import LayeredPool

    Move: TypeAlias = Callable[["HostStream", Sequence["_PoolCopy"], LayerTransfer], None]
else:
    torch = load_torch()

logger: logging.Logger = logging.getLogger(__name__)

LAYERS_AHEAD = 2
"""How many layers of a copy to L2 are in flight at the same time. They keep a copy engine busy. Each
layer takes staging memory between device and host pool."""


class _PoolCopy:
    """The pages of one pool in a transfer, which are the same in every layer."""

    def __init__(self, mapping: SlotMapping, stream: HostStream) -> None:
        self.pool = mapping.pool
        self._host_slots = torch.tensor(mapping.host_slots, dtype=torch.int64)
        self._device_slots = stream.index(torch.tensor(mapping.device_slots, dtype=torch.int64))

    def planes(self, layer: int) -> list[tuple[Pages, Pages]]:
        """Return the pages of each plane of a layer, on the device and in host memory."""
        return [
            (Pages(on_device, self._device_slots), Pages(in_host, self._host_slots))
            for on_device, in_host in self.pool.planes(layer)
        ]


class _QueuedLayer(NamedTuple):
    """A layer whose copies from the device are queued."""

    finish: list[Callable[[], None]]
    """For each plane, a function that puts it into the host pool."""
    copied: StreamEvent


class LayerCopier:
    """A copier of pages between L1 and L2, for a group of pools in one transfer. Thread-safe.

    Loads and stores each have their own thread, and on CUDA their own stream, so loads and stores do not
    wait for each other. The caller allocates the slots. If your engine has no allocator, use
    `DevicePool`.
    """

    def __init__(self, pools: Sequence[LayeredPool]) -> None:
        """Start the threads.

        Raises:
            ValueError: There is no pool, or the pools differ in device or page size.
        """
        if not pools:
            raise ValueError("a group needs at least one pool")
        if len({(pool.device, pool.page_tokens) for pool in pools}) != 1:
            raise ValueError(
                "all pools of a group must be on one device and have the same page_tokens"
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
        """Start a copy from L2 to L1 and return at once. The layers arrive in order.

        On CUDA the copies run after all work that is queued in the calling thread's current stream,
        because that work may still use `device_slots`.

        Args:
            host_slots: For each pool, the slots of its pages in L2, such as `Lease.slots`.
            device_slots: The slot of each page in L1, the same in all pools.
            indices: For each pool, which pages `host_slots` are for, such as `Lease.indices`. None: all
                pages. The device slots of other pages keep their bytes in that pool.

        Raises:
            ValueError: A slot does not exist or is given twice, or the lists do not match.
            RuntimeError: The copier is closed.
        """
        mappings = map_slots(self.pools, host_slots, device_slots, indices)
        return self._submit(self._loading, _upload, mappings)

    def store(
        self, device_slots: Sequence[int], host_slots: PerPool, *, indices: PerPool | None = None
    ) -> LayerTransfer:
        """Start a copy from L1 to L2 and return at once.

        On CUDA the copies run after all work that is queued in the calling thread's current stream. The
        pages must not change on either side before `settled`. Use the `slots` and `indices` of a
        reservation.

        Raises:
            ValueError: A slot does not exist or is given twice, or the lists do not match.
            RuntimeError: The copier is closed.
        """
        mappings = map_slots(self.pools, host_slots, device_slots, indices)
        return self._submit(self._storing, _download, mappings)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Finish the transfers that have started, and stop the threads. Return False after `timeout_s`.

        Idempotent.
        """
        with self._lock:
            self._closed = True
        deadline = Deadline(timeout_s)
        stopped = [
            executor.close(deadline.remaining_s()) for executor, _ in (self._loading, self._storing)
        ]
        return all(stopped)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(
        self,
        worker: tuple[DaemonExecutor, HostStream],
        move: Move,
        mappings: Sequence[SlotMapping],
    ) -> LayerTransfer:
        executor, stream = worker
        transfer = LayerTransfer([pool.layers for pool in self.pools])
        work = partial(_run_transfer, transfer, move, mappings, stream, stream.caller_event())
        with self._lock:  # a closed executor would never run the task
            if self._closed:
                raise RuntimeError("these device pools were closed: open new ones")
            executor.submit(work)
        return transfer


def _run_transfer(
    transfer: LayerTransfer,
    move: Move,
    mappings: Sequence[SlotMapping],
    stream: HostStream,
    after: StreamEvent,
) -> None:
    """Run one transfer in its thread. Release all threads that wait for it, even after an error."""
    try:
        with torch.inference_mode():  # only this mode can write inference tensors
            stream.wait_for(after)
            move(stream, [_PoolCopy(mapping, stream) for mapping in mappings], transfer)
    except BaseException as error:  # noqa: BLE001 - `_failure` logs it
        transfer.fail(_failure("a layer could not be moved", error))
    try:
        stream.record_event().synchronize()
    except Exception as error:  # noqa: BLE001 - as above
        transfer.settle(_failure("the device is lost", error))
    else:
        transfer.settle()


def _failure(what: str, error: BaseException) -> LayerTransferFailed:
    logger.warning("a transfer between L1 and L2 failed: %s", what, exc_info=error)
    failure = LayerTransferFailed(f"{what}: {error}")
    failure.__cause__ = error
    return failure


def _upload(stream: HostStream, copies: Sequence[_PoolCopy], transfer: LayerTransfer) -> None:
    for copy, layer in _layers(copies):
        if transfer.failed:
            return
        for on_device, in_host in copy.planes(layer):
            stream.upload(in_host, on_device)
        transfer.arrive(stream.record_event())


def _download(stream: HostStream, copies: Sequence[_PoolCopy], transfer: LayerTransfer) -> None:
    """Copy pages to the host layer by layer, with some layers queued ahead to keep the device busy."""
    queued: deque[_QueuedLayer] = deque()
    for copy, layer in _layers(copies):
        if transfer.failed:
            return
        finish = [stream.download(on_device, in_host) for on_device, in_host in copy.planes(layer)]
        queued.append(_QueuedLayer(finish, stream.record_event()))
        if len(queued) > LAYERS_AHEAD:
            _finish_layer(queued.popleft(), transfer)
    while queued and not transfer.failed:
        _finish_layer(queued.popleft(), transfer)


def _finish_layer(layer: _QueuedLayer, transfer: LayerTransfer) -> None:
    """Wait for a queued layer, and put its planes into the host pool."""
    for finish_plane in layer.finish:
        finish_plane()
    transfer.arrive(layer.copied)


def _layers(copies: Sequence[_PoolCopy]) -> Iterator[tuple[_PoolCopy, int]]:
    return ((copy, layer) for copy in copies for layer in range(copy.pool.layers))
