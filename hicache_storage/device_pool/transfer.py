"""The state of a transfer between L1 and L2, for threads that wait for it and the thread that copies."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from hicache_storage.durations import longest_wait_s
from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.device_pool.streams import StreamEvent


class LayerTransferFailed(HiCacheError, RuntimeError):
    """A layer will not arrive. Do not read the target pages."""


class LayerTransfer:
    """A copy of pages, layer by layer: all layers of the first pool, then all layers of the next pool.

    Thread-safe. When the transfer ends, every waiting thread is released, even after an error.
    """

    settled: Future[None]
    """Done when the transfer does not access any memory any more.

    After that you may release the lease or commit the reservation. If the transfer failed, this
    future holds a LayerTransferFailed, and you must abandon the target pages.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        """Prepare for a transfer with this number of layers for each pool."""
        self.settled = Future()
        self._layers = list(layers)
        self._arrived: list[StreamEvent] = []
        self._error: LayerTransferFailed | None = None
        self._changed = threading.Condition()

    def wait(self, layer: int, *, pool: int = 0, timeout_s: float | None = None) -> None:
        """Wait until the work that this thread starts next may use `layer` of `pool`.

        On a CPU the call blocks until the layer has arrived. On CUDA it blocks until the copy is
        queued, and makes the current stream wait for the copy.

        Raises:
            LayerTransferFailed: The layer will not arrive, or the transfer was canceled.
            TimeoutError: The layer did not arrive within `timeout_s`.
            IndexError: The layer or the pool does not exist.
        """
        if not (0 <= pool < len(self._layers) and 0 <= layer < self._layers[pool]):
            raise IndexError(
                f"no layer {layer} in pool {pool}: the pools have {self._layers} layers"
            )
        step = sum(self._layers[:pool]) + layer
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._arrived) > step or self._error, longest_wait_s(timeout_s)
            )
            if len(self._arrived) > step:
                event = self._arrived[step]
            elif self._error is not None:
                raise LayerTransferFailed(*self._error.args) from self._error
            else:
                raise TimeoutError(f"layer {layer} of pool {pool} did not arrive in {timeout_s} s")
        event.block_caller_stream()

    def cancel(self) -> None:
        """Stop copying layers. The transfer settles with an error unless all layers have arrived."""
        self.fail(LayerTransferFailed("the transfer was canceled"))

    # --- the copying thread's side -------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """True if no further layer will arrive."""
        return self._error is not None

    def arrive(self, event: StreamEvent) -> None:
        """Announce the next layer. It is complete when the device reaches `event`."""
        with self._changed:
            self._arrived.append(event)
            self._changed.notify_all()

    def fail(self, error: LayerTransferFailed) -> None:
        """Announce that no more layers arrive.

        The first error counts, unless all layers have arrived.
        """
        with self._changed:
            if self._error is None and len(self._arrived) < sum(self._layers):
                self._error = error
            self._changed.notify_all()

    def settle(self, lost: LayerTransferFailed | None = None) -> None:
        """Announce that no memory is accessed any more. With `lost`, arrived layers may be wrong."""
        error = self._error or lost
        if error is None:
            self.settled.set_result(None)
        else:
            self.settled.set_exception(error)
