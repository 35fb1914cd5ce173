"""Copies between L1 and L2, layer by layer, behind the engine's back."""

from __future__ import annotations

import logging
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from hicache_storage.device_pool.streams import stream_for
from hicache_storage.device_pool.transfer import LayerTransfer, LayerTransferFailed
from hicache_storage.host_pool.memory import load_torch
from hicache_storage.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    import torch

    from hicache_storage.device_pool.streams import CopyStream, Mark
    from hicache_storage.device_pool.tensors import LayeredPool

    HostSlots: TypeAlias = Sequence[Sequence[int | None]]
    """For each pool, the slot of each page; None: this pool has no part of the page in L2."""
    Move: TypeAlias = Callable[["CopyStream", Sequence["_Part"], LayerTransfer], None]
else:
    torch = load_torch()

logger = logging.getLogger(__name__)

LAYERS_AHEAD = 2
"""Layers of a store that are under way at a time: enough to keep a copy engine busy, and what the memory
between device and host pool is for."""


class _Part:
    """What one pool has to move: the same pages in every layer."""

    def __init__(self, pool: LayeredPool, host_slots: Sequence[int], tokens: torch.Tensor) -> None:
        self.pool = pool
        self.slots = torch.tensor(host_slots, dtype=torch.int64)
        self.tokens = tokens


class _Landing(NamedTuple):
    """A layer on its way from the device."""

    part: _Part
    planes: list[tuple[torch.Tensor, torch.Tensor]]
    """Where it belongs, and the host memory that it comes to first."""
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
        self.pools = tuple(pools)
        self.slots = min(pool.slots for pool in pools)
        device = pools[0].device
        self._loading = (Workers("hicache-l1-load", 1), stream_for(device))
        self._storing = (Workers("hicache-l1-store", 1), stream_for(device))
        self._lock = threading.Lock()
        self._closed = False

    def load(self, host_slots: HostSlots, device_slots: Sequence[int]) -> LayerTransfer:
        """L2 → L1. Returns at once; the layers come in order.

        What the device was told to do before may still use `device_slots`: on CUDA the copies come after
        all that the calling thread's current stream has been given. Where a pool's slot is None, what it
        has at the device's slot stays as it was, and is not that page.

        Raises:
            ValueError: A slot that there is not, or that is written twice; or lists of other lengths.
            RuntimeError: The copier was closed.
        """
        _check_distinct(device_slots, "device")
        return self._submit(self._loading, _load, host_slots, device_slots)

    def store(self, device_slots: Sequence[int], host_slots: HostSlots) -> LayerTransfer:
        """L1 → L2. Returns at once; on CUDA after all that the current stream has been given to compute.

        Neither side may change before `settled`.

        Raises:
            ValueError: A slot that there is not, or that is written twice; or lists of other lengths.
            RuntimeError: The copier was closed.
        """
        for slots in host_slots:
            _check_distinct([slot for slot in slots if slot is not None], "host")
        return self._submit(self._storing, _store, host_slots, device_slots)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Let the transfers that were begun end, and the threads; False where that takes longer.

        Idempotent.
        """
        with self._lock:
            self._closed = True
        stopped = [workers.close(timeout_s) for workers, _ in (self._loading, self._storing)]
        return all(stopped)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(
        self,
        lane: tuple[Workers, CopyStream],
        move: Move,
        host_slots: HostSlots,
        device_slots: Sequence[int],
    ) -> LayerTransfer:
        self._check(host_slots, device_slots)
        workers, stream = lane
        transfer = LayerTransfer([pool.layers for pool in self.pools])
        work = partial(
            self._run,
            transfer,
            move,
            stream=stream,
            asked=stream.now(),
            host_slots=[list(slots) for slots in host_slots],
            device_slots=list(device_slots),
        )
        with self._lock:  # a task behind the end of the threads would never run
            if self._closed:
                raise RuntimeError("these device pools were closed: make new ones")
            workers.submit(work)
        return transfer

    def _run(
        self,
        transfer: LayerTransfer,
        move: Move,
        *,
        stream: CopyStream,
        asked: Mark,
        host_slots: HostSlots,
        device_slots: Sequence[int],
    ) -> None:
        """One transfer, on its thread. Whatever goes wrong, nobody is left waiting."""
        try:
            with (
                torch.inference_mode()
            ):  # engines make their tensors in it: others may not write them
                stream.follow(asked)
                move(stream, self._parts(stream, host_slots, device_slots), transfer)
        except BaseException as error:
            logger.warning("pages could not be moved between L1 and L2", exc_info=error)
            failure = LayerTransferFailed(f"a layer could not be moved: {error}")
            failure.__cause__ = error
            transfer.fail(failure)
        try:
            stream.mark().synchronize()
        except Exception as error:  # a device that is lost touches no memory any more
            logger.warning("the device could not be waited for", exc_info=error)
        transfer.settle()

    def _parts(
        self, stream: CopyStream, host_slots: HostSlots, device_slots: Sequence[int]
    ) -> list[_Part]:
        """Where each pool's pages are. Pools that have every page share their token numbers."""
        whole: torch.Tensor | None = None
        parts: list[_Part] = []
        for pool, slots in zip(self.pools, host_slots, strict=True):
            there = [slot for slot in slots if slot is not None]
            if len(there) < len(slots):
                pairs = zip(device_slots, slots, strict=True)
                held = [device_slot for device_slot, slot in pairs if slot is not None]
                tokens = stream.index(_tokens(held, pool.page_tokens))
            else:
                whole = tokens = (
                    stream.index(_tokens(device_slots, pool.page_tokens))
                    if whole is None
                    else whole
                )
            parts.append(_Part(pool, there, tokens))
        return parts

    def _check(self, host_slots: HostSlots, device_slots: Sequence[int]) -> None:
        if [len(slots) for slots in host_slots] != [len(device_slots)] * len(self.pools):
            raise ValueError(
                f"{len(device_slots)} pages in {len(self.pools)} pools need as many host slots each, not"
                f" {[len(slots) for slots in host_slots]}"
            )
        _check_range(device_slots, self.slots, "device")
        for pool, slots in zip(self.pools, host_slots, strict=True):
            _check_range([slot for slot in slots if slot is not None], pool.host.slots, "host")


def _load(stream: CopyStream, parts: Sequence[_Part], transfer: LayerTransfer) -> None:
    for part, layer in _steps(parts):
        if transfer.failed:
            return
        for on_device, in_host in part.pool.planes(layer):
            stream.upload(in_host, part.slots, part.tokens, on_device)
        transfer.arrive(stream.mark())


def _store(stream: CopyStream, parts: Sequence[_Part], transfer: LayerTransfer) -> None:
    """Some layers are queued before the first of them is waited for: the device need not stand still."""
    queued: deque[_Landing] = deque()
    for part, layer in _steps(parts):
        if transfer.failed:
            return
        planes = [
            (in_host, stream.download(on_device, part.tokens, pinned=part.pool.host.pinned))
            for on_device, in_host in part.pool.planes(layer)
        ]
        queued.append(_Landing(part, planes, stream.mark()))
        if len(queued) > LAYERS_AHEAD:
            _land(queued.popleft(), transfer)
    while queued and not transfer.failed:
        _land(queued.popleft(), transfer)


def _land(landing: _Landing, transfer: LayerTransfer) -> None:
    """Put a layer that has come from the device where it belongs in host memory."""
    landing.mark.synchronize()
    for in_host, rows in landing.planes:
        pages = rows.view(len(landing.part.slots), *in_host.shape[1:])
        in_host.index_copy_(0, landing.part.slots, pages)
    transfer.arrive(landing.mark)


def _steps(parts: Sequence[_Part]) -> Iterator[tuple[_Part, int]]:
    return ((part, layer) for part in parts for layer in range(part.pool.layers))


def _tokens(slots: Sequence[int], page_tokens: int) -> torch.Tensor:
    first = torch.tensor(slots, dtype=torch.int64) * page_tokens
    return (first[:, None] + torch.arange(page_tokens)).flatten()


def _check_range(slots: Sequence[int], count: int, where: str) -> None:
    for slot in slots:
        if not 0 <= slot < count:
            raise ValueError(f"there is no {where} slot {slot}: there are slots 0 to {count - 1}")


def _check_distinct(slots: Sequence[int], where: str) -> None:
    if len(set(slots)) != len(slots):
        twice = next(slot for slot in slots if list(slots).count(slot) > 1)
        raise ValueError(f"{where} slot {twice} is named twice: each page needs its own")
