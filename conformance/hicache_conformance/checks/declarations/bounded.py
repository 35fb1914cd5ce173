"""KV-901: a store that claims to be bounded comes back in time, and has let go of every page then."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import Violation
from hicache_conformance.scenarios.attempts import attempted
from hicache_conformance.scenarios.fault_path import FaultPath, foreign, road
from hicache_conformance.scenarios.planting import about
from hicache_conformance.tools.network.proxy import FaultProxy
from hicache_conformance.tools.processes.resources import wait_until
from hicache_conformance.tools.processes.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.attempts import Attempt, Caller
    from hicache_conformance.tools.content.memory import PageMemory

_PAGES = 4
_WATCHED_S = 1.0
_FOREIGN = 0x3C
"""What the next user of the memory writes into it."""


@check("KV-901", Need.BOUNDED)
def a_bounded_get_ends_in_time_and_lets_go_of_its_pages(case: Case) -> None:
    """With servers that accept, drip and fall silent, a get ends in time and writes nothing later."""
    with road(case) as way:
        for why, fault in _faults(way).items():
            caller = way.caller()
            pages = way.planted(caller, _PAGES)
            memory = caller.probe.memory(way.space, _PAGES)
            hashes = list(pages)[: caller.probe.max_batch]
            get = partial(
                caller.probe.storage.batch_get, way.space, hashes, memory.pages[: len(hashes)]
            )
            _must_end(way, _struck(way, caller, "batch_get", get, fault), why)
            _reuse(memory)
            way.all(FaultProxy.pass_through)
            _must_stay(caller, memory, why)
            _delete(way, caller, pages)


@check("KV-901", Need.BOUNDED)
def a_bounded_set_ends_in_time_and_lets_go_of_its_pages(case: Case) -> None:
    """With servers that accept, drip and fall silent, a set ends in time and reads nothing later."""
    with road(case) as way:
        for why, fault in _faults(way).items():
            caller = way.caller()
            pages = case.contents(way.space, case.hashes(min(_PAGES, caller.probe.max_batch)))
            case.trace.stored[way.space].update(pages)
            memory = caller.probe.memory(way.space, len(pages)).holding(list(pages.values()))
            put = partial(caller.probe.storage.batch_set, way.space, list(pages), memory.pages)
            _must_end(way, _struck(way, caller, "batch_set", put, fault), why)
            _reuse(memory)
            way.all(FaultProxy.pass_through)
            time.sleep(_WATCHED_S / 2)
            _must_be_right(way, caller, pages, why)
            _delete(way, caller, pages)


@dataclass(frozen=True, slots=True)
class _Fault:
    """What the network does while the call runs."""

    mode: Callable[[FaultProxy], object]
    falls_silent: bool = False
    """As soon as something has come through."""


def _faults(way: FaultPath) -> dict[str, _Fault]:
    """By what they are, in words."""
    page_nbytes_per_s = way.space.stored_nbytes / way.timeout_s
    return {
        "the server accepts and says nothing": _Fault(FaultProxy.go_silent),
        "the server drips": _Fault(partial(FaultProxy.drip, nbytes_per_s=page_nbytes_per_s / 8)),
        "the server falls silent half way": _Fault(
            partial(FaultProxy.drip, nbytes_per_s=page_nbytes_per_s), falls_silent=True
        ),
    }


def _struck(
    way: FaultPath,
    caller: Caller,
    operation: str,
    call: Callable[[], list[bool]],
    fault: _Fault,
) -> Attempt:
    """Make the call while there is a fault."""
    way.all(fault.mode)
    before = way.bytes_moved()
    with Threads() as crew:
        made = crew.start(partial(attempted, caller.probe, operation, call, limit_s=caller.limit_s))
        if fault.falls_silent:
            wait_until(lambda: way.bytes_moved() > before, way.timeout_s / 2)
            way.all(FaultProxy.go_silent)
        return made.result()


def _must_end(way: FaultPath, made: Attempt, why: str) -> None:
    if made.error is not None and not made.failed_by_contract:
        raise foreign(made, way.case.trace.sequence(made.operation))
    if made.elapsed_s > way.limit_s:
        raise Violation(
            f"bounded is declared, and {made.operation} took too long when {why}",
            f"an end within timeout_s + 1 = {way.timeout_s + 1:g} s",
            f"{made.text} after {made.elapsed_s:.1f} s",
            way.case.trace.sequence(made.operation),
        )


def _reuse(memory: PageMemory) -> None:
    for page in memory.pages:
        for part in page.segments:
            np.frombuffer(part, np.uint8)[:] = _FOREIGN


def _must_stay(caller: Caller, memory: PageMemory, why: str) -> None:
    def is_touched() -> bool:
        parts = [part for page in memory.pages for part in page.segments]
        return any(bool((np.frombuffer(part, np.uint8) != _FOREIGN).any()) for part in parts)

    if wait_until(is_touched, _WATCHED_S):
        raise caller.probe.violation(
            f"bounded is declared, and a page was written into after batch_get had returned, when {why}",
            expected="a store that has let go of every page of the call",
            got="bytes of the next user of the memory were overwritten",
            sequence=caller.probe.trace.sequence("batch_get"),
        )


def _must_be_right(way: FaultPath, caller: Caller, pages: Mapping[str, bytes], why: str) -> None:
    for page_hash, data in pages.items():
        (read,) = way.in_time(partial(caller.get, [page_hash]))
        if read not in (None, data):
            with about(f"batch_set had returned and its memory was reused, when {why}"):
                raise way.case.wrong_bytes(caller.probe, way.space, page_hash, read, [data])


def _delete(way: FaultPath, caller: Caller, pages: Mapping[str, bytes]) -> None:
    """The store may be small."""
    way.in_time(partial(caller.delete, list(pages)[: caller.probe.max_batch]))
