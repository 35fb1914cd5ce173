"""How layers are copied on a kind of device: at once, or queued on a stream of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from hicache_storage.host_pool.memory import load_torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
else:
    torch = load_torch()


# A plane of a page from which on a call for each page costs less than an index does.
_WHOLE_PAGE_NBYTES = 16 << 10


class Pages(NamedTuple):
    """Some pages of one plane of one layer."""

    rows: torch.Tensor
    """[slots, page_tokens, heads, words] of the whole pool."""
    slots: torch.Tensor
    """Which of them, on the device of the rows."""


class Mark(Protocol):
    """A point in what a device has been told to do."""

    def precede_caller(self) -> None:
        """What the calling thread computes from here on comes after it."""

    def synchronize(self) -> None:
        """Block until the device has come to it."""


class CopyStream(Protocol):
    """Copies in one direction, in order. Used by one thread, `now` excepted."""

    def now(self) -> Mark:
        """What the calling thread has had computed so far."""
        ...

    def follow(self, mark: Mark) -> None:
        """The copies that follow come after `mark`."""

    def index(self, slots: torch.Tensor) -> torch.Tensor:
        """Slot numbers, where the device can use them."""
        ...

    def upload(self, here: Pages, there: Pages) -> None:
        """Copy pages from host memory to the device."""

    def download(self, there: Pages, here: Pages) -> Callable[[], None]:
        """Copy pages from the device to host memory; to call what it returns puts them in place."""
        ...

    def mark(self) -> Mark:
        """All copies so far."""
        ...


class _Past:
    """A mark that the device has come to already."""

    def precede_caller(self) -> None:
        """It does."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostStream:
    """The device is the CPU: a copy is done when the call returns."""

    def now(self) -> Mark:
        return _Past()

    def follow(self, mark: Mark) -> None:
        """Everything before is done."""

    def index(self, slots: torch.Tensor) -> torch.Tensor:
        return slots

    def upload(self, here: Pages, there: Pages) -> None:
        _copy(here, there)

    def download(self, there: Pages, here: Pages) -> Callable[[], None]:
        _copy(there, here)
        return lambda: None

    def mark(self) -> Mark:
        return _Past()


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types there
        self.event.record(stream)

    def precede_caller(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStream:
    """A stream beside the engine's: the CPU gathers pages, one copy brings them, the GPU scatters them.

    The memory between is pinned where the host pool is, and only then do copies overlap with the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # nor there

    def now(self) -> Mark:
        return _CudaMark(torch.cuda.current_stream(self._device))

    def follow(self, mark: Mark) -> None:
        if isinstance(mark, _CudaMark):
            self._stream.wait_event(mark.event)

    def index(self, slots: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return slots.to(self._device)

    def upload(self, here: Pages, there: Pages) -> None:
        staged = _staging(here)
        _copy(here, staged)
        with torch.cuda.stream(self._stream):
            landed = staged.rows.to(self._device, non_blocking=True)
            there.rows.index_copy_(0, there.slots, landed)

    def download(self, there: Pages, here: Pages) -> Callable[[], None]:
        staged = _staging(here)
        with torch.cuda.stream(self._stream):
            gathered = there.rows.index_select(0, there.slots)
            staged.rows.copy_(gathered, non_blocking=True)
        mark = self.mark()

        def land() -> None:
            mark.synchronize()
            _copy(staged, here)

        return land

    def mark(self) -> Mark:
        return _CudaMark(self._stream)


def _copy(source: Pages, target: Pages) -> None:
    """From host memory to host memory."""
    if source.rows[0].nbytes < _WHOLE_PAGE_NBYTES:
        target.rows.index_copy_(0, target.slots, source.rows.index_select(0, source.slots))
        return
    for from_slot, to_slot in zip(source.slots, target.slots, strict=True):
        target.rows[int(to_slot)].copy_(source.rows[int(from_slot)])


def _staging(here: Pages) -> Pages:
    """Host memory for as many pages, between the pool and the device. Pinned as the pool is."""
    count = len(here.slots)
    shape = (count, *here.rows.shape[1:])
    rows = torch.empty(shape, dtype=here.rows.dtype, pin_memory=here.rows.is_pinned())
    return Pages(rows, torch.arange(count))


def stream_for(device: torch.device) -> CopyStream:
    """A stream of its own on `device`.

    Raises:
        ValueError: Neither the CPU nor CUDA.
    """
    if device.type == "cpu":
        return HostStream()
    if device.type == "cuda":
        return CudaStream(device)
    raise ValueError(f"device pools lie on the CPU or on CUDA, not on {device}")
