"""A storage whose calls run in another process.

`open_remote(case)` starts a process that opens the case's store, and returns a probe on it.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

from hicache_conformance.case.probe import Probe
from hicache_conformance.run.outcomes import Unknown
from hicache_conformance.tools.content.memory import PageMemory
from hicache_storage.errors import StorageTimeout, StorageUnavailable, UnsupportedOperation
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.tools.processes.child import Link
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import Capabilities, PageInfo

_FORWARDED = (StorageTimeout, StorageUnavailable, UnsupportedOperation)
"""The errors that are raised here just as in the other process."""
_ANSWER_LIMIT_S = 120.0
"""Longer than the limit of the store's calls, so that the check's own limit finds a hang first."""


class RemoteError(Exception):
    """The store in the other process raised an exception that the message names."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the store, as it is sent to the other process."""

    method: str
    arguments: tuple[Any, ...] = ()
    contents: list[bytes] = field(default_factory=list[bytes])
    """The contents of the pages to set."""
    nbytes: int = 0
    """The length of each page to get."""
    is_last: bool = False
    """True: the process kills itself after it has sent the answer."""


@dataclass(frozen=True, slots=True)
class _Answer:
    value: Any = None
    contents: list[bytes] = field(default_factory=list[bytes])
    raised: str = ""
    error: str = ""


class ProcessChannel(Protocol):
    """The parent's side of a process, which `Child` and `ForkedChild` provide."""

    def send(self, value: Any) -> None: ...
    def receive(self, limit_s: float = ...) -> Any: ...


class RemoteStorage(HiCacheStorage):
    """The parent's side of the storage. Each call is sent to the child process and made there."""

    def __init__(self, child: ProcessChannel, claims: Capabilities) -> None:
        self._child = child
        self.is_killed_after_next_call = False
        """True: the child is killed (SIGKILL) right after its next answer."""
        vars(self)["capabilities"] = claims

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        raise NotImplementedError(f"made by `open_remote`, not from {sorted(config)}")

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._verdicts(_Call("batch_exists", (space, list(hashes))))

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        call = _Call("batch_get", (space, list(hashes)), nbytes=space.stored_nbytes)
        answer = self._call(call)
        for page, data in zip(pages, answer.contents, strict=True):
            page.copy_from(data)
        verdicts: list[bool] = answer.value
        return verdicts

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        contents = [page.tobytes() for page in pages]
        return self._verdicts(_Call("batch_set", (space, list(hashes)), contents))

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._verdicts(_Call("batch_delete", (space, list(hashes))))

    def open_space(self, space: KeySpace) -> None:
        self._call(_Call("open_space", (space,)))

    def spaces(self) -> Iterator[KeySpace]:
        return iter(self._call(_Call("spaces")).value)

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        return iter(self._call(_Call("scan", (space,))).value)

    def clear(self, space: KeySpace) -> int:
        removed: int = self._call(_Call("clear", (space,))).value
        return removed

    def close(self) -> None:
        with suppress(RemoteError):
            self._call(_Call("close"))
        super().close()

    def _verdicts(self, call: _Call) -> list[bool]:
        verdicts: list[bool] = self._call(call).value
        return verdicts

    def _call(self, call: _Call) -> _Answer:
        if self.is_killed_after_next_call:
            call = _Call(call.method, call.arguments, call.contents, call.nbytes, is_last=True)
        self._child.send(call)
        try:
            answer: _Answer = self._child.receive(_ANSWER_LIMIT_S)
        except EOFError:
            raise RemoteError("nothing: the other process ended in this call") from None
        if call.is_last:
            with suppress(EOFError):
                self._child.receive()  # This returns when the child has died.
        if answer.raised:
            kinds = {kind.__name__: kind for kind in _FORWARDED}
            raise kinds.get(answer.raised, RemoteError)(f"{answer.raised}: {answer.error}")
        return answer


def open_remote(case: Case, label: str, process: ProcessChannel | None = None) -> Probe:
    """Return a handle on the case's store in another process, which ends with the check.

    `process` runs `serve`. By default a new process is started.
    """
    process = process or case.child(serve)
    try:
        process.receive()
    except EOFError:
        raise Unknown("another process ended before it had opened the store") from None
    storage = RemoteStorage(process, case.claims)
    return Probe(storage, case.trace, label, alive=case.alive, absent=case.absent)


def kill_after_next_call(probe: Probe) -> None:
    """Kill the process of an `open_remote` probe right after its next answer."""
    assert isinstance(probe.storage, RemoteStorage)
    probe.storage.is_killed_after_next_call = True


def serve(link: Link) -> None:
    """Make the calls of the parent until it is gone. This is the child's side."""
    storage = link.open_storage()
    link.send(True)
    while True:
        call: _Call = link.receive()
        try:
            answer = _run(storage, call)
        except Exception as error:  # noqa: BLE001 - the parent judges it
            answer = _Answer(raised=type(error).__name__, error=" ".join(str(error).split()))
        link.send(answer)
        if call.is_last:
            os.kill(os.getpid(), signal.SIGKILL)


def _run(storage: HiCacheStorage, call: _Call) -> _Answer:
    claims = storage.capabilities
    if call.method in ("batch_get", "batch_set"):
        count, nbytes = len(call.arguments[1]), call.nbytes or len(call.contents[0])
        memory = PageMemory(count, nbytes, alignment=claims.alignment)
        if call.contents:
            memory.filled_with(call.contents)
        value = getattr(storage, call.method)(*call.arguments, memory.pages)
        return _Answer(value, [page.tobytes() for page in memory.pages] if call.nbytes else [])
    value = getattr(storage, call.method)(*call.arguments)
    return _Answer(list(value) if call.method in ("spaces", "scan") else value)
