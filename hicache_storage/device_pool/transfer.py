"""Pages on their way between L1 and L2, as those see it who wait for them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.device_pool.streams import Mark


class LayerTransferFailed(HiCacheError, RuntimeError):
    """A layer will not arrive. What the pages hold where they were going is not to be read."""


class LayerTransfer:
    """Layer after layer of some pages, in every pool: the first pool's layers, then the next one's.

    Thread-safe. However it ends, everyone who waits is let go.
    """

    settled: Future[None]
    """Done when no memory of the transfer is touched any more: a lease may be released then, a
    reservation committed. It has the LayerTransferFailed where there is one: what was to be filled is to
    be abandoned."""

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers`: how many each pool has."""
        self.settled = Future()
        self._layers = list(layers)
        self._marks: list[Mark] = []
        self._error: LayerTransferFailed | None = None
        self._changed = threading.Condition()

    def wait(self, layer: int, *, pool: int = 0, timeout_s: float | None = None) -> None:
        """What this thread computes from here on may use `layer` of `pool`.

        On a CPU it blocks until the layer is there. On CUDA it blocks only until the copy is queued, and
        makes the current stream wait for it.

        Raises:
            LayerTransferFailed: The layer will not come, or was cancelled.
            TimeoutError: It did not come within `timeout_s`.
            IndexError: There is no such layer or pool.
        """
        if not (0 <= pool < len(self._layers) and 0 <= layer < self._layers[pool]):
            raise IndexError(
                f"no layer {layer} in pool {pool}: the pools have {self._layers} layers"
            )
        step = sum(self._layers[:pool]) + layer
        with self._changed:
            self._changed.wait_for(lambda: len(self._marks) > step or self._error, timeout_s)
            if len(self._marks) > step:
                mark = self._marks[step]
            elif self._error is not None:
                raise LayerTransferFailed(*self._error.args) from self._error
            else:
                raise TimeoutError(f"layer {layer} of pool {pool} did not come in {timeout_s} s")
        mark.precede_caller()

    def cancel(self) -> None:
        """Move no further layers; those that have not come never will. It ends by settling."""
        self.fail(LayerTransferFailed("the transfer was cancelled"))

    # --- the copying thread's side -------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Nobody waits for further layers."""
        return self._error is not None

    def arrive(self, mark: Mark) -> None:
        """The next layer is there, once the device has come to `mark`."""
        with self._changed:
            self._marks.append(mark)
            self._changed.notify_all()

    def fail(self, error: LayerTransferFailed) -> None:
        """No further layer will come. The first reason stands, and none does once all have come."""
        with self._changed:
            if self._error is None and len(self._marks) < sum(self._layers):
                self._error = error
            self._changed.notify_all()

    def settle(self, lost: LayerTransferFailed | None = None) -> None:
        """Its memory is not touched any more. `lost`: nor is it known to hold what came."""
        error = self._error or lost
        if error is None:
            self.settled.set_result(None)
        else:
            self.settled.set_exception(error)
