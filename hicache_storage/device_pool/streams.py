"""Copy streams: synchronous copies on the CPU, or copies queued on a CUDA stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.host_pool.memory import load_torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
else:
    torch = load_torch()


# If a page's plane has at least this size, one copy call per page is faster than an indexed copy.
_PAGEWISE_NBYTES = 16 << 10


class Pages(NamedTuple):
    """Some pages in one plane of one layer."""

    rows: torch.Tensor
    """The content of all slots of the pool: [slots, page_tokens, heads, words]."""
    slots: torch.Tensor
    """Slot numbers of the pages, on the same device as `rows`."""


class StreamEvent:
    """A point in the queued work of a device. This class is for a CPU, which has passed every point."""

    def block_caller_stream(self) -> None:
        """Make later work in the calling thread's current stream wait for this event."""

    def synchronize(self) -> None:
        """Block until the device has reached this event."""


class HostStream:
    """A sequence of copies in one direction. One thread uses it; any thread may call `caller_event`.

    This class is for a CPU: a copy is complete when the call returns.
    """

    def caller_event(self) -> StreamEvent:
        """Return an event that follows the work queued in the calling thread's current stream."""
        return StreamEvent()

    def wait_for(self, event: StreamEvent) -> None:
        """Make later copies wait for `event`."""

    def index(self, slots: torch.Tensor) -> torch.Tensor:
        """Return `slots` in memory that the device can read."""
        return slots

    def upload(self, in_host: Pages, on_device: Pages) -> None:
        """Copy pages from host memory to the device."""
        _copy(in_host, on_device)

    def download(self, on_device: Pages, in_host: Pages) -> Callable[[], None]:
        """Copy pages from the device to staging memory. Return a function that moves the pages on."""
        _copy(on_device, in_host)
        return lambda: None

    def record_event(self) -> StreamEvent:
        """Return an event that follows all copies so far."""
        return StreamEvent()


class _CudaEvent(StreamEvent):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types there
        self.event.record(stream)

    def block_caller_stream(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStream(HostStream):
    """A separate CUDA stream. The CPU gathers pages, one copy moves them, and the GPU scatters them.

    The staging memory is pinned if the host pool is. Only pinned copies overlap with CPU work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types there

    def caller_event(self) -> StreamEvent:
        return _CudaEvent(torch.cuda.current_stream(self._device))

    def wait_for(self, event: StreamEvent) -> None:
        if isinstance(event, _CudaEvent):
            self._stream.wait_event(event.event)

    def index(self, slots: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return slots.to(self._device)

    def upload(self, in_host: Pages, on_device: Pages) -> None:
        staged = _staging(in_host)
        _copy(in_host, staged)
        with torch.cuda.stream(self._stream):
            rows = staged.rows.to(self._device, non_blocking=True)
            on_device.rows.index_copy_(0, on_device.slots, rows)

    def download(self, on_device: Pages, in_host: Pages) -> Callable[[], None]:
        staged = _staging(in_host)
        with torch.cuda.stream(self._stream):
            gathered = on_device.rows.index_select(0, on_device.slots)
            staged.rows.copy_(gathered, non_blocking=True)
        copied = self.record_event()

        def finish() -> None:
            copied.synchronize()
            _copy(staged, in_host)

        return finish

    def record_event(self) -> StreamEvent:
        return _CudaEvent(self._stream)


def _copy(source: Pages, target: Pages) -> None:
    """Copy pages from host memory to host memory."""
    if source.rows[0].nbytes < _PAGEWISE_NBYTES:
        target.rows.index_copy_(0, target.slots, source.rows.index_select(0, source.slots))
        return
    for from_slot, to_slot in zip(source.slots, target.slots, strict=True):
        target.rows[int(to_slot)].copy_(source.rows[int(from_slot)])


def _staging(in_host: Pages) -> Pages:
    """Allocate staging memory for the pages, pinned if the host pool is."""
    count = len(in_host.slots)
    shape = (count, *in_host.rows.shape[1:])
    rows = torch.empty(shape, dtype=in_host.rows.dtype, pin_memory=in_host.rows.is_pinned())
    return Pages(rows, torch.arange(count))


def stream_for(device: torch.device) -> HostStream:
    """Return a new copy stream on `device`.

    Raises:
        ValueError: The device is neither the CPU nor CUDA.
    """
    if device.type == "cpu":
        return HostStream()
    if device.type == "cuda":
        return CudaStream(device)
    raise ValueError(f"device pools are on the CPU or on CUDA, not on {device}")
