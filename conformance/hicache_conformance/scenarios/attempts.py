"""Makes calls that the contract allows to fail, and records the result and the time of each."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_conformance.case.probe import require_present, space_text
from hicache_conformance.tools.processes.machine import MachineDelay
from hicache_storage.errors import StorageTimeout, StorageUnavailable, UnsupportedOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_conformance.case.probe import Probe
    from hicache_conformance.run.outcomes import Violation
    from hicache_storage.keys import KeySpace

T = TypeVar("T")

_POLL_S = 0.1
_TOLD_FROM_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One call that has returned."""

    operation: str
    answer: Any = None
    error: BaseException | None = None
    elapsed_s: float = 0.0
    delayed_s: float = 0.0
    """How much of that time the machine ran something else."""

    @property
    def own_s(self) -> float:
        """How long the call took, without the time in which the machine ran something else."""
        return self.elapsed_s - self.delayed_s

    @property
    def duration_text(self) -> str:
        """The duration in words."""
        machine = f", of which the machine took {self.delayed_s:.1f} s for other work"
        return f"{self.elapsed_s:.1f} s{machine if self.delayed_s >= _TOLD_FROM_S else ''}"

    @property
    def text(self) -> str:
        """The result of the call, in one line."""
        if self.error is None:
            return _shortened(repr(self.answer), 100)
        return f"raised {error_text(self.error)}"

    @property
    def failed_by_contract(self) -> bool:
        """True if the call raised an error that the contract names for a store that can't answer."""
        return isinstance(self.error, (StorageUnavailable, StorageTimeout))


def make_attempt(
    probe: Probe, operation: str, call: Callable[[], Any], *, limit_s: float, detail: str = ""
) -> Attempt:
    """Make a call in a thread of its own.

    Raises:
        Violation: The call has not returned after `limit_s` of its own time. Its thread is left behind.
        NotVerified: The store does not implement the call, and says so.
    """
    number = probe.trace.began(f"{probe.label}.{operation}({detail})")
    began_s, delay = time.monotonic(), MachineDelay()
    attempts: list[Attempt] = []

    def run() -> None:
        try:
            answer, error = call(), None
        except BaseException as raised:  # noqa: BLE001 - any exception is a result
            answer, error = None, raised
        elapsed_s = time.monotonic() - began_s
        attempt = Attempt(
            operation=operation,
            answer=answer,
            error=error,
            elapsed_s=elapsed_s,
            delayed_s=delay.so_far_s(),
        )
        attempts.append(attempt)
        probe.trace.ended(number, f"{attempt.text} after {elapsed_s:.2f} s")

    thread = threading.Thread(target=run, name=f"conformance {operation}", daemon=True)
    thread.start()
    thread.join(limit_s)
    while thread.is_alive() and time.monotonic() - began_s - delay.so_far_s() < limit_s:
        thread.join(_POLL_S)
    thread.join(_POLL_S)  # if the whole process was paused, it has not run since
    if not attempts:
        raise hang_violation(probe, operation, time.monotonic() - began_s)
    if isinstance(attempts[0].error, UnsupportedOperation):
        require_present(operation, probe.absent)
    return attempts[0]


def hang_violation(probe: Probe, operation: str, elapsed_s: float) -> Violation:
    """Return the violation for a call that does not return."""
    return probe.violation(
        f"{operation} did not return: the call hangs",
        expected="an answer or an exception in time",
        got=f"nothing for {elapsed_s:.1f} s",
    )


def call_at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make these calls at the same time and return their results."""
    met = threading.Barrier(len(calls))

    def begun(call: Callable[[], T]) -> T:
        met.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(begun, calls))


class Caller:
    """A caller of a storage, whose calls may fail and take at most `limit_s`. Pages are bytes here."""

    def __init__(self, probe: Probe, space: KeySpace, limit_s: float) -> None:
        self.probe = probe
        self.space = space
        self.limit_s = limit_s

    def open_space(self) -> Attempt:
        """Attempt `open_space`. The answer is None."""
        storage = self.probe.storage
        return self._attempt("open_space", [], lambda: storage.open_space(self.space))

    def exists(self, hashes: Sequence[str]) -> Attempt:
        """Attempt `batch_exists`. The answer is a list of bool."""
        storage = self.probe.storage
        return self._attempt(
            "batch_exists", hashes, lambda: storage.batch_exists(self.space, hashes)
        )

    def get(self, hashes: Sequence[str]) -> Attempt:
        """Attempt `batch_get`. The answer is the bytes of each page, or None for a miss."""
        memory = self.probe.memory(self.space, len(hashes))

        def call() -> list[bytes | None]:
            hits = self.probe.storage.batch_get(self.space, hashes, memory.pages)
            return [
                page.tobytes() if hit else None
                for hit, page in zip(hits, memory.pages, strict=True)
            ]

        return self._attempt("batch_get", hashes, call)

    def set(self, contents: Mapping[str, bytes]) -> Attempt:
        """Attempt `batch_set`. The answer is a list of bool. The trace counts the pages as stored."""
        hashes = list(contents)
        memory = self.probe.memory(self.space, len(hashes)).filled_with(list(contents.values()))
        self.probe.trace.stored[self.space].update(hashes)
        self.probe.trace.offered(self.space, hashes)
        storage = self.probe.storage
        return self._attempt(
            "batch_set", hashes, lambda: storage.batch_set(self.space, hashes, memory.pages)
        )

    def delete(self, hashes: Sequence[str]) -> Attempt:
        """Attempt `batch_delete`. The answer is a list of bool."""
        storage = self.probe.storage
        return self._attempt(
            "batch_delete", hashes, lambda: storage.batch_delete(self.space, hashes)
        )

    def close(self) -> Attempt:
        """Attempt `close`. The answer is None."""
        return make_attempt(self.probe, "close", self.probe.storage.close, limit_s=self.limit_s)

    def _attempt(self, operation: str, hashes: Sequence[str], call: Callable[[], Any]) -> Attempt:
        hashes_text = ", ".join(page_hash[:8] for page_hash in hashes[:4])
        detail = f"{space_text(self.space)}, [{hashes_text}]"
        return make_attempt(self.probe, operation, call, limit_s=self.limit_s, detail=detail)


def error_text(error: BaseException) -> str:
    """Return the type and the message of an exception, in one line."""
    return _shortened(f"{type(error).__name__}: {' '.join(str(error).split())}", 300)


def _shortened(text: str, nchars: int) -> str:
    return text if len(text) <= nchars else f"{text[: nchars - 3]}..."
