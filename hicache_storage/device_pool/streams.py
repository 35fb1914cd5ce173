"""How layers are copied on a kind of device: at once, or queued on a stream of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache_storage.host_pool.memory import load_torch

if TYPE_CHECKING:
    import torch
else:
    torch = load_torch()


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

    def index(self, numbers: torch.Tensor) -> torch.Tensor:
        """Token numbers, where the device can use them."""
        ...

    def upload(
        self, rows: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, target: torch.Tensor
    ) -> None:
        """Pages `slots` of `rows`, in host memory, to `tokens` of `target`, on the device."""

    def download(self, source: torch.Tensor, tokens: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        """`tokens` of `source`, on the device, in fresh host memory: there once the next mark is."""
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

    def index(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers

    def upload(
        self, rows: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, target: torch.Tensor
    ) -> None:
        target.index_copy_(0, tokens, rows.index_select(0, slots).flatten(0, 1))

    def download(
        self,
        source: torch.Tensor,
        tokens: torch.Tensor,
        *,
        pinned: bool,  # noqa: ARG002 - nothing to a CPU
    ) -> torch.Tensor:
        return source.index_select(0, tokens)

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

    def index(self, numbers: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return numbers.to(self._device)

    def upload(
        self, rows: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, target: torch.Tensor
    ) -> None:
        shape = (len(slots), *rows.shape[1:])
        staged = torch.empty(shape, dtype=rows.dtype, pin_memory=rows.is_pinned())
        torch.index_select(rows, 0, slots, out=staged)
        with torch.cuda.stream(self._stream):
            landed = staged.to(self._device, non_blocking=True)
            target.index_copy_(0, tokens, landed.flatten(0, 1))

    def download(self, source: torch.Tensor, tokens: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        shape = (len(tokens), *source.shape[1:])
        staged = torch.empty(shape, dtype=source.dtype, pin_memory=pinned)
        with torch.cuda.stream(self._stream):
            return staged.copy_(source.index_select(0, tokens), non_blocking=True)

    def mark(self) -> Mark:
        return _CudaMark(self._stream)


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
